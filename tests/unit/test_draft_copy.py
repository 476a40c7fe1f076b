"""A quantised copy of the weights drafts; the target verifies, so the text is that of plain decoding."""

from __future__ import annotations

import logging

import pytest

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.families import make_family
from longdraft.drafters.chain import Chain
from longdraft.errors import UsageError
from longdraft.kernels.cpu import native
from longdraft.parts import draft_copy

PARAMS = longdraft.SamplingParams(max_new_tokens=48, seed=3, temperature=1.0, min_p=0.05, ignore_eos=True)


def text_of(engine: longdraft.Engine) -> tuple[str, dict]:
    events = list(engine.generate("It was a dark and stormy night", PARAMS))
    return events[-1].stats["sha256_tokens"], events[-1].stats


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("drafter", ["magicdec", "tokenswift", "auto"])
def test_the_text_is_that_of_plain_decoding(tiny, drafter, weights):
    plain, _ = text_of(longdraft.load(str(tiny["gqa"]), drafter="plain"))
    engine = longdraft.load(str(tiny["gqa"]), drafter=drafter, drafter_options={"draft_weights": weights})
    found, stats = text_of(engine)
    assert found == plain and stats["draft_weights"] == weights and stats["draft_weights_bytes"] > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_a_copy_of_experts_drafts_too(tmp_path, monkeypatch, family):
    """A whole chain in one call."""
    make_family(tmp_path, family)
    plain, _ = text_of(longdraft.load(str(tmp_path), drafter="plain"))
    monkeypatch.setattr(Chain, "step_by_step", None)
    engine = longdraft.load(str(tmp_path), drafter="magicdec", drafter_options={"draft_weights": "int4"})
    found, stats = text_of(engine)
    assert found == plain and stats["draft_weights"] == "int4" and stats["draft_weights_bytes"] > 0


def test_a_batch_of_texts_drafts_with_the_copy_too(tiny):
    prompts = ["It was", "Once upon a time", "The"]
    engine = longdraft.load(str(tiny["mha"]), drafter="magicdec", drafter_options={"draft_weights": "int4"})
    alone = [list(engine.generate(prompt, PARAMS))[-1].stats["sha256_tokens"] for prompt in prompts]
    together = {place: event.stats["sha256_tokens"]
                for place, event in engine.generate_many(prompts, PARAMS, batch_size=3) if event.stats}
    assert [together[place] for place in range(3)] == alone


def test_auto_makes_a_copy_of_large_weights_only(tiny, monkeypatch):
    small = longdraft.load(str(tiny["mha"]), drafter="magicdec")
    assert small.loaded.draft_copy is None
    with monkeypatch.context() as smaller:
        smaller.setattr(draft_copy, "_MIN_BYTES", 1)
        assert longdraft.load(str(tiny["mha"]), drafter="magicdec").loaded.draft_copy.weights.quantize == "int8"
        reference = longdraft.load(str(tiny["mha"]), drafter="magicdec", kernels_name="reference")
        assert reference.loaded.draft_copy is None, "its products with int8 take longer"
    monkeypatch.setattr(draft_copy, "_MIN_WEIGHTS_IN_TOKENS", 1)
    large = longdraft.load(str(tiny["mha"]), drafter="magicdec")
    assert large.loaded.draft_copy.weights.quantize == "int4"
    assert longdraft.load(str(tiny["mha"]), drafter="suffix").loaded.draft_copy is None, "suffix drafts without weights"
    quantised = longdraft.load(str(tiny["mha"]), drafter="magicdec", quantize="int4")
    assert quantised.loaded.draft_copy is None, "the target is as small as its copy"


@pytest.mark.skipif(not native.variants(), reason="the compiled kernels are missing")
def test_an_int8_copy_has_a_scale_for_each_32_inputs_and_an_int8_target_has_not(tmp_path, monkeypatch):
    """The copy drafts a whole chain in one call, and most of its guesses are right."""
    make_checkpoint(tmp_path, hidden_size=64, intermediate_size=96)
    path = str(tmp_path)
    plain, _ = text_of(longdraft.load(path, drafter="plain"))
    monkeypatch.setattr(Chain, "step_by_step", None)
    engine = longdraft.load(path, drafter="magicdec", drafter_options={"draft_weights": "int8"})
    found, stats = text_of(engine)
    assert found == plain and stats["mean_accepted_length"] > 3
    target = longdraft.load(path, drafter="plain", quantize="int8").loaded.target
    for model, is_grouped in ((engine.loaded.draft_copy, True), (target, False)):
        weights = (model.weights.layers[0].qkv, model.weights.layers[1].down, model.weights.head)
        assert [weight.native.is_grouped for weight in weights] == [is_grouped, is_grouped, False]


@pytest.mark.skipif(not native.variants(), reason="the compiled kernels are missing")
def test_the_last_mlps_of_an_int4_copy_are_int8(tmp_path):
    """A tenth of the layers. They are in the cache file, as all weights of the copy are."""
    make_checkpoint(tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=11)
    engine = longdraft.load(str(tmp_path), drafter="magicdec", drafter_options={"draft_weights": "int4"})
    copy, size = engine.loaded.draft_copy, draft_copy.quantized_bytes(engine.model.whole, "int4", is_draft_copy=True)
    kinds = [[weight.native.is_int8 for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
             for layer in copy.weights.layers]
    assert kinds[:10] == [[False] * 4] * 10 and kinds[10] == [False, False, True, True]
    assert copy.weights_bytes == size
    plain, _ = text_of(longdraft.load(str(tmp_path), drafter="plain"))
    assert text_of(engine)[0] == plain


def test_a_request_may_draft_with_the_targets_own_weights(tiny):
    engine = longdraft.load(str(tiny["mha"]), drafter="magicdec", drafter_options={"draft_weights": "int4"})
    _, stats = text_of(engine.with_drafter("magicdec", {"draft_weights": "same"}))
    assert stats["draft_weights"] == "same" and stats["draft_weights_bytes"] == 0


def test_a_copy_without_room_is_left_out_by_auto_and_refused_by_name(tiny, monkeypatch, caplog):
    monkeypatch.setattr(draft_copy, "_MIN_WEIGHTS_IN_TOKENS", 1)
    monkeypatch.setattr(draft_copy, "available_memory", lambda: 1000)
    with caplog.at_level(logging.WARNING):
        assert longdraft.load(str(tiny["mha"]), drafter="magicdec").loaded.draft_copy is None
    assert "drafting with the unquantised weights" in caplog.text
    with pytest.raises(MemoryError, match="draft_weights=same"):
        longdraft.load(str(tiny["mha"]), drafter="magicdec", drafter_options={"draft_weights": "int4"})


def test_auto_makes_a_copy_on_a_device_if_it_takes_a_quarter_of_its_free_memory(tiny, monkeypatch, caplog):
    loaded = longdraft.load(str(tiny["mha"]), drafter="plain").loaded
    target, files = loaded.target, loaded.files
    monkeypatch.setattr(draft_copy, "_MIN_WEIGHTS_IN_TOKENS", 1)
    monkeypatch.setattr(target.kernels, "is_device", True, raising=False)
    size = draft_copy.quantized_bytes(target.whole, "int4", is_draft_copy=True, is_on_device=True)
    for free, has_one in ((4 * size + 9, True), (3 * size, False)):
        monkeypatch.setattr(target.kernels, "free_bytes", lambda free=free: free, raising=False)
        made = draft_copy.load_copy(files, target, "auto")
        assert (made is not None) == has_one
    assert "most of which is left to the cache" in caplog.text
    assert draft_copy.load_copy(files, target, "int4") is not None


def test_an_unknown_format_is_one_clear_line(tiny):
    with pytest.raises(UsageError, match="draft_weights is 'int2'; allowed: auto, same, file, int8, int4"):
        longdraft.load(str(tiny["mha"]), drafter="magicdec", drafter_options={"draft_weights": "int2"})
    with pytest.raises(UsageError, match=r"draft_weights is 'int3'; allowed: .*slowly than int4"):
        draft_copy.check_draft_weights("int3")
