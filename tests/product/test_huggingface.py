"""The interface for transformers models: the same greedy text, streamers, and errors for unsupported options."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
)
from transformers.generation.streamers import TextIteratorStreamer

import longdraft
from helpers.checkpoints import make_checkpoint, make_heads
from helpers.extents import extent
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError, UsageError

PROMPT = [5, 9, 17, 4, 30, 9, 17, 4, 30, 8]


@pytest.fixture(scope="module", params=["gqa", "bias"])
def model(request, tiny):
    names = [name for name in (request.param, "mha", *tiny) if name in tiny]
    return AutoModelForCausalLM.from_pretrained(tiny[names[0]], dtype=torch.float32)


def theirs(model, **options):
    return model.generate(torch.tensor([PROMPT]), **options)[0].tolist()


@pytest.mark.parametrize("drafter", extent(["plain", "auto", "suffix", "magicdec"], ["auto"]))
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"min_new_tokens": 40}])
def test_greedy_texts_equal_those_of_transformers(model, drafter, options):
    options = {"max_new_tokens": 60, "do_sample": False, **options}
    writer = longdraft.from_transformers(model, drafter=drafter)
    expected = theirs(model, **options)
    assert writer.generate(torch.tensor([PROMPT]), **options)[0].tolist() == expected
    assert theirs(model, custom_generate=longdraft.hf_generate, drafter=drafter, **options) == expected


@pytest.mark.parametrize("own", [
    {"logits_processor": [RepetitionPenaltyLogitsProcessor(50.0)]}, {"logits_processor": [TopKLogitsWarper(1)]},
    {"logits_processor": [MinLengthLogitsProcessor(40, 1)]},
    {"stopping_criteria": [MaxLengthCriteria(len(PROMPT) + 2)]}, {"stopping_criteria": [EosTokenCriteria(7)]}])
def test_processors_and_criteria_of_the_caller_are_refused(model, own):
    """Those that `generate` makes of its own options are of the same classes."""
    with pytest.raises(longdraft.UsageError, match=r"longdraft cannot apply your \w+; leave it out"):
        theirs(model, custom_generate=longdraft.hf_generate, max_new_tokens=30, do_sample=False, **own)


def test_an_end_of_text_token_ends_the_text_as_in_transformers(model):
    free = theirs(model, max_new_tokens=30, do_sample=False)
    end = free[len(PROMPT) + 7]
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [1, end], "pad_token_id": 0}
    assert longdraft.from_transformers(model).generate(PROMPT, **options)[0].tolist() == theirs(model, **options)


def test_sampled_text_depends_on_the_seed_only(model):
    options = {"max_new_tokens": 40, "do_sample": True, "min_p": 0.05, "temperature": 0.9}
    writers = [longdraft.from_transformers(model, drafter=name) for name in ("plain", "magicdec")]
    texts = [writer.generate(PROMPT, seed=3, **options).tolist() for writer in writers]
    assert texts[0] == texts[1] != writers[0].generate(PROMPT, seed=4, **options).tolist()
    drawn = []
    for _ in range(2):
        torch.manual_seed(11)
        drawn.append(theirs(model, custom_generate=longdraft.hf_generate, **options))
    assert drawn[0] == drawn[1]


def test_the_model_can_be_deleted_and_changed_weights_are_used(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny["gqa"], dtype=torch.float32)
    options = {"max_new_tokens": 20, "do_sample": False}
    before = theirs(model, custom_generate=longdraft.hf_generate, **options)
    weight = model.model.layers[0].mlp.down_proj.weight
    for written in (weight.detach(), weight.data):  # autograd does not track changes of .data
        written.mul_(-3)
        after = theirs(model, custom_generate=longdraft.hf_generate, **options)
        assert after == theirs(model, **options) != before
        before = after
    writer = longdraft.from_transformers(model)
    parameters = [weakref.ref(parameter.untyped_storage()) for parameter in model.parameters()]
    del model, weight, written
    gc.collect()
    assert writer.generate(PROMPT, **options)[0].tolist() == after
    assert not any(parameter() for parameter in parameters)


def test_heads_are_used_only_with_the_weights_they_name(tmp_path):
    base = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    make_heads(tmp_path / "heads", base, base_sha256=TensorFiles(tmp_path).fingerprint(), vocabulary_sha256="0" * 64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    writer = longdraft.from_transformers(model, drafter="tokenswift")
    assert len(writer.engine.heads) == 3
    with pytest.raises(UsageError, match="a model in memory are not kept"):
        writer.engine.generate(PROMPT, journal=tmp_path / "journal")
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert longdraft.from_transformers(other).engine.heads is None
    with pytest.raises(ModelError, match="trained on other weights"):
        longdraft.from_transformers(other, drafter="tokenswift")


def test_a_draft_model_that_cannot_be_checked_is_skipped_unless_requested(tmp_path, caplog):
    """`hf_generate` is given no tokenizer, so it cannot compare the vocabularies of the model and its draft model."""
    make_checkpoint(tmp_path)
    make_checkpoint(tmp_path / "draft", seed=8, hidden_size=24, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = theirs(model, **options)
    assert theirs(model, custom_generate=longdraft.hf_generate, **options) == expected
    assert [record.message for record in caplog.records if "drafting without draft" in record.message]
    with pytest.raises(UsageError, match="the target has no tokenizer to compare"):
        theirs(model, custom_generate=longdraft.hf_generate, drafter="draft-model", **options)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    writer = longdraft.from_transformers(model, tokenizer, drafter="draft-model")
    assert writer.engine.draft is not None
    assert writer.generate(PROMPT, **options)[0].tolist() == expected


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_in_memory_drafts_with_a_quantised_copy(model, weights):
    options = {"max_new_tokens": 40, "do_sample": False}
    copy = {"drafter": "magicdec", "drafter_options": {"draft_weights": weights}}
    assert longdraft.from_transformers(model, **copy).engine.loaded.draft_copy is not None
    assert theirs(model, custom_generate=longdraft.hf_generate, **copy, **options) == theirs(model, **options)


def test_a_quantised_model_in_memory_writes_the_text_of_one_loaded_from_its_folder(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny["gqa"], dtype=torch.float32)
    texts = [longdraft.from_transformers(model, drafter=drafter, quantize="int8").generate(
        PROMPT, max_new_tokens=30, do_sample=False, eos_token_id=None)[0].tolist() for drafter in ("plain", "magicdec")]
    engine = longdraft.load(str(tiny["gqa"]), drafter="plain", quantize="int8")
    params = longdraft.SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    ours = [token for event in engine.generate(PROMPT, params) for token in event.tokens]
    assert texts[0] == texts[1] == PROMPT + ours


def test_the_engine_uses_the_chat_template_of_the_tokenizer(model, tiny):
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny["gqa"] / "tokenizer.json"), bos_token="<s>",
                                        chat_template=template)
    writer = longdraft.from_transformers(model, tokenizer)
    assert writer.engine.chat("Hello") == tokenizer("<s>user: Hello", add_special_tokens=False).input_ids


class Listener:
    def __init__(self):
        self.got, self.is_ended = [], False

    def put(self, ids):
        self.got.append(ids.tolist())

    def end(self):
        self.is_ended = True


def test_streamers_receive_the_prompt_and_then_each_token(model, tiny):
    listener = Listener()
    ids = longdraft.from_transformers(model).generate(PROMPT, max_new_tokens=12, streamer=listener)[0].tolist()
    assert listener.got[0] == [PROMPT] and listener.is_ended
    assert [token for put in listener.got[1:] for token in put] == ids[len(PROMPT):]
    other = Listener()
    theirs(model, max_new_tokens=12, custom_generate=longdraft.hf_generate, text_streamer=other)
    assert other.got == listener.got and other.is_ended
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny["gqa"] / "tokenizer.json"))
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    writer = longdraft.from_transformers(model, tokenizer)
    writer.generate(PROMPT, max_new_tokens=12, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(ids[len(PROMPT):])
    assert writer.engine.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_generation_config_can_request_a_dictionary(model):
    config = GenerationConfig(max_length=len(PROMPT) + 9, do_sample=False, return_dict_in_generate=True)
    found = longdraft.from_transformers(model).generate(PROMPT, config)
    assert found.sequences.shape == (1, len(PROMPT) + 9) and found.sequences.dtype == torch.int64


@pytest.mark.parametrize("options, message", [
    ({"num_beams": 4}, "does not have num_beams=4"),
    ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences=2"),
    ({"epsilon_cutoff": 0.1, "top_h": 0.5}, "epsilon_cutoff=0.1, top_h=0.5"),
    ({"bad_words_ids": [[3]]}, "bad_words_ids"),
    ({"output_scores": True}, "output_scores"),
    ({"tempratur": 0.5}, "no option tempratur"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"attention_mask": torch.tensor([[0] + [1] * 9])}, "attention_mask hides tokens"),
    ({"stop_strings": "x"}, "stop_strings needs a tokenizer"),
    ({"penalty_window": 0}, "penalty_window is 0"),
])
def test_unsupported_options_are_refused_by_name(model, options, message):
    with pytest.raises(UsageError, match=message):
        longdraft.from_transformers(model).generate(PROMPT, **{"max_new_tokens": 5, **options})


def test_unsupported_options_without_effect_are_accepted(model):
    options = {"max_new_tokens": 8, "do_sample": False}
    idle = {"suppress_tokens": [], "bad_words_ids": [], "num_beams": 1, "forced_eos_token_id": None,
            "eos_token_id": [-1, 1, 10**6]}
    writer = longdraft.from_transformers(model)
    assert torch.equal(writer.generate(PROMPT, **options, **idle), writer.generate(PROMPT, **options))


@pytest.mark.parametrize("options, message", [
    ({"drafter": "guess"}, "unknown drafter 'guess'"),
    ({"drafter": "magicdec", "drafter_options": {"chian": 2}}, "no option 'chian'"),
    ({"drafter": "suffix", "heads": "somewhere"}, "drafter 'suffix' uses no heads"),
])
def test_usage_errors_are_raised_before_weights_are_read(model, monkeypatch, options, message):
    monkeypatch.setattr(type(model), "state_dict", lambda self: pytest.fail("read"))
    with pytest.raises(UsageError, match=message):
        longdraft.from_transformers(model, **options)
    with pytest.raises(UsageError, match=message):
        longdraft.load("no/such/model", **options)


def test_an_outdated_transformers_version_is_refused(model, monkeypatch):
    # By name: transformers replaces its own module while it is imported, so an earlier one may be another.
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(UsageError, match=r"transformers is 4.57.1; needed: 5.0 or newer"):
        longdraft.from_transformers(model)


@pytest.mark.parametrize("name, value", [
    ("token_type_ids", torch.zeros(1, len(PROMPT), dtype=torch.int64)),
    ("position_ids", torch.arange(3, 3 + len(PROMPT))[None]),
    ("inputs_embeds", torch.zeros(1, len(PROMPT), 48))])
def test_inputs_other_than_token_ids_are_refused_by_name(model, name, value):
    config = GenerationConfig(max_new_tokens=3)
    with pytest.raises(UsageError, match=f"leave {name} out"):
        longdraft.hf_generate(model, torch.tensor([PROMPT]), generation_config=config, **{name: value})


def test_several_prompts_logits_processors_and_stop_strings_without_a_tokenizer_are_refused(model):
    writer = longdraft.from_transformers(model)
    with pytest.raises(UsageError, match="has 2 rows; longdraft writes one text"):
        writer.generate(torch.tensor([PROMPT, PROMPT]), max_new_tokens=3)

    class Mine:
        def __call__(self, ids, scores):
            return scores

    with pytest.raises(UsageError, match="cannot apply your Mine"):
        theirs(model, max_new_tokens=3, custom_generate=longdraft.hf_generate, logits_processor=[Mine()])
    with pytest.raises(UsageError, match="stop_strings need a tokenizer"):
        longdraft.hf_generate(model, torch.tensor([PROMPT]), generation_config=GenerationConfig(stop_strings="x"))


@pytest.mark.full
def test_importing_longdraft_does_not_import_transformers():
    code = "import sys, longdraft; longdraft.from_transformers; assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_transformers_is_one_line_with_the_extra(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="needs transformers; install the extra 'train'"):
        longdraft.from_transformers(model)
