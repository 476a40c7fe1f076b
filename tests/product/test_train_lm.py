"""Training of language models and draft models: loss, position jumps, resuming, and loading of the result."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import longdraft
from helpers.checkpoints import VOCAB, make_checkpoint
from helpers.families import logits_of, make_family, theirs_of
from helpers.training import ALPHABET, QUICK, SMALL, At, alphabet_text, losses, tokenizer_folder
from longdraft.errors import LongdraftError, UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.train import frozen_model as frozen
from longdraft.train import job, lm
from longdraft.train.settings import DraftSettings, HeadSettings, LmSettings

pytestmark = pytest.mark.full

HYBRID = {"kind": "hybrid", "layers": 4, "hidden_size": 32}


text = pytest.fixture(scope="module")(alphabet_text)
tokens = pytest.fixture(scope="module")(tokenizer_folder)


def test_a_trained_model_loads_in_the_engine(text, tokens, tmp_path):
    result = job.train(LmSettings(data=(text,), tokenizer=str(tokens), **SMALL), tmp_path / "lm")
    first, *_, last = losses(tmp_path / "lm")
    assert last[0] < 0.7 * first[0] and result.validation[0]["loss"] < first[0]
    engine = longdraft.load(str(tmp_path / "lm"))
    assert engine.model.config.num_kv_heads == 1 and engine.model.config.max_positions == 256
    assert list(engine.generate("abc", SamplingParams(max_new_tokens=20, seed=1)))
    record = json.loads((tmp_path / "lm" / "training.json").read_text())["training"]
    assert record["tokens_seen"] == 25 * 4 * 32 and str(tmp_path) not in json.dumps(record)


def test_a_trained_hybrid_is_that_of_transformers(text, tokens, tmp_path):
    wanted = SMALL | HYBRID
    job.train(LmSettings(data=(text,), tokenizer=str(tokens), **wanted), tmp_path / "lm")
    first, *_, last = losses(tmp_path / "lm")
    assert last[0] < 0.7 * first[0]
    engine = longdraft.load(str(tmp_path / "lm"))
    assert engine.model.config.hybrid.is_delta == (True, True, True, False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "lm", dtype=torch.float32)
    ids = engine.encode(ALPHABET * 3)[:40]
    torch.testing.assert_close(logits_of(engine.model, ids, 30), theirs_of(theirs, ids), atol=1e-4, rtol=1e-4)
    assert list(engine.generate("abc", SamplingParams(max_new_tokens=20, seed=1)))
    for wrong, message in (({"layers": 3}, "layers is 3; allowed: 4 or more of a hybrid"),
                           ({"hidden_size": 48}, "hidden_size is 48; allowed: of a hybrid, a multiple of 16"),
                           ({"kind": "mamba"}, "kind is 'mamba'; allowed: llama or hybrid")):
        with pytest.raises(UsageError, match=message):
            LmSettings(data=(text,), tokenizer=str(tokens), **wanted | wrong)


def test_reduced_kv_heads_are_group_means(tokens):
    """If the heads of each group are equal, the reduction does not change the logits."""
    wanted = LmSettings(data=("x",), **SMALL | {"num_heads": 4, "num_kv_heads": 4})
    model = lm.new_model(wanted, VOCAB, 0, 1)
    state = model.state_dict()
    for name in ("k_proj", "v_proj"):
        weight = state[f"model.layers.0.self_attn.{name}.weight"].view(2, 2, -1, 16)
        weight[:, 1] = weight[:, 0]
    model.load_state_dict(state)
    fewer = lm.with_fewer_kv_heads(model, 2)
    assert fewer.config.num_key_value_heads == 2 and model.config.num_key_value_heads == 4
    ids = torch.arange(10)[None] + 20
    assert torch.allclose(fewer(ids).logits, model(ids).logits, atol=1e-6)


def test_training_continues_from_a_model_with_fewer_kv_heads(text, tokens, tmp_path):
    had = longdraft.load(str(tokens), drafter="plain").model.config.num_kv_heads
    wanted = QUICK | {"num_kv_heads": had // 2, "steps": 2}
    job.train(LmSettings(data=(text,), start=str(tokens), **wanted), tmp_path / "lm")
    assert longdraft.load(str(tmp_path / "lm"), drafter="plain").model.config.num_kv_heads == had // 2
    with pytest.raises(UsageError, match=rf"num_kv_heads is 3; allowed: a divisor of {had}, the KV heads of"):
        job.train(LmSettings(data=(text,), start=str(tokens), **QUICK | {"num_kv_heads": 3}), tmp_path / "no")


def test_a_tokenizer_is_trained_if_none_is_given(tmp_path):
    words = " ".join(f"word{i} stands beside line{i * 7}" for i in range(600))
    (tmp_path / "words.txt").write_text(words)
    wanted = LmSettings(data=(str(tmp_path / "words.txt"),), vocab_size=400, **SMALL)
    with pytest.raises(UsageError, match="give more data"):  # the failed run leaves a tokenizer of another size
        job.train(replace(wanted, vocab_size=300, sequence_length=10**6, context=10**6), tmp_path / "lm")
    job.train(wanted, tmp_path / "lm")
    engine = longdraft.load(str(tmp_path / "lm"))
    assert engine.tokenizer.decode(engine.encode("word5 étrange 漢")) == "word5 étrange 漢"
    assert engine.model.config.vocab_size == 400 and engine.model.config.eos_token_ids == (1,)


@pytest.mark.parametrize("shape", [{}, HYBRID])
def test_a_draft_model_is_distilled_from_its_target_and_drafts(text, tokens, tmp_path, shape):
    wanted = DraftSettings(data=(text,), model=str(tokens), distill=1.0, **SMALL | {"probe_tokens": 12} | shape)
    result = job.train(wanted, tmp_path / "draft")
    first, *_, last = losses(tmp_path / "draft")
    assert last[0] < first[0] and [measured["temperature"] for measured in result.probe] == [0.0, 1.0]
    engine = longdraft.load(str(tokens), drafter="draft-model", drafter_options={"model": str(tmp_path / "draft"),
                                                                               "budget": 200, "refresh": 50})
    assert [event.stats for event in engine.generate("abcdef", SamplingParams(max_new_tokens=30, seed=1))][-1]


def test_a_resumed_training_equals_an_uninterrupted_one(text, tokens, tmp_path):
    wanted = LmSettings(data=(text,), tokenizer=str(tokens), gradient_accumulation=2, **SMALL)
    job.train(wanted, tmp_path / "whole")
    cut = job.train(wanted, tmp_path / "cut", At(9, lambda: signal.raise_signal(signal.SIGTERM)))
    assert cut.signal == signal.SIGTERM
    with pytest.raises(UsageError, match=r"holds a training of 'lm', not of 'heads'"):
        job.resume("heads", tmp_path / "cut", {})
    job.resume("lm", tmp_path / "cut", {})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_training_from_a_model_keeps_its_shape_and_vocabulary(text, tokens, tmp_path):
    wanted = LmSettings(data=(text,), start=str(tokens), **QUICK | {"learning_rate": 1e-3})
    job.train(wanted, tmp_path / "lm")
    config = json.loads((tmp_path / "lm" / "config.json").read_text())
    assert config["hidden_size"] == 48 and config["vocab_size"] == VOCAB


def test_training_from_a_model_uses_the_positions_of_its_declared_context(text, tokens, tmp_path, monkeypatch):
    shown = []
    positions = lm.jumping_positions

    def told(*given):
        shown.append(positions(*given))
        return shown[-1]

    monkeypatch.setattr(lm, "jumping_positions", told)
    wanted = LmSettings(data=(text,), start=str(tokens), skip=1.0, **QUICK | {"steps": 6})
    job.train(wanted, tmp_path / "lm")
    assert 1000 < max(int(places.max()) for places in shown) < 4096
    record = json.loads((tmp_path / "lm" / "training.json").read_text())["training"]
    assert record["context"] == 4096
    with pytest.raises(UsageError, match=r"context is 8192; allowed: 4096, the context of '.*tiny'; leave it out"):
        job.train(replace(wanted, context=8192), tmp_path / "no")
    with pytest.raises(LongdraftError, match="no model 'nowhere'"):
        job.train(replace(wanted, start="nowhere"), tmp_path / "no")
    with pytest.raises(UsageError, match="at most the model's context"):
        job.train(replace(wanted, sequence_length=5000, batch_size=1), tmp_path / "no")


IDLE = [
    (LmSettings, {"start": "MODEL", name: value}, rf"{name} is .*, but has no effect with --start")
    for name, value in {"layers": 2, "hidden_size": 64, "intermediate_size": 9, "num_heads": 8, "rope_theta": 1e4,
                        "vocab_size": 500, "tokenizer": "MODEL"}.items()
] + [
    (LmSettings, {"tokenizer": "MODEL", "vocab_size": 500}, "vocab_size is 500, .* with --tokenizer"),
    (LmSettings, {"tokenizer": "MODEL", "distill": 0.7}, "distill is 0.7, .* without --distill-from"),
    (LmSettings, {"tokenizer": "MODEL", "distill_from": "MODEL", "distill": 0.0}, "distill_from is .* --distill 0"),
    (DraftSettings, {"model": "MODEL", "tokenizer": "MODEL"}, "tokenizer is .* is the model's"),
    (DraftSettings, {"model": "MODEL", "vocab_size": 500}, "vocab_size is 500, .* is the model's"),
    (DraftSettings, {"model": "MODEL", "distill_from": "MODEL"}, "distill_from is .* --model is the teacher"),
    (HeadSettings, {"model": "MODEL", "kind": "medusa", "init": "paper"}, "init is 'paper', .* not chained"),
    (HeadSettings, {"model": "MODEL", "start": "MODEL", "init": "paper"}, "init is 'paper', .* with --start"),
    (HeadSettings, {"model": "MODEL", "sinks": 4}, "sinks is 4, but has no effect without --window"),
    (HeadSettings, {"model": "MODEL", "validation": "TEXT", "holdout": 0.1}, "holdout is 0.1, .* with --validation"),
]


@pytest.mark.parametrize(("kind", "given", "message"), IDLE, ids=lambda value: str(value)[:40])
def test_settings_without_effect_are_refused(text, tokens, tmp_path, kind, given, message):
    stands_for = {"MODEL": str(tokens), "TEXT": (text,)}
    wanted = kind(data=(text,), **QUICK, **{name: stands_for.get(value, value) for name, value in given.items()})
    with pytest.raises(UsageError, match=message) as caught:
        job.train(wanted, tmp_path / "no")
    assert "\n" not in str(caught.value) and not (tmp_path / "no").exists()


@pytest.mark.parametrize(("kind", "distill"), [(DraftSettings, 0.5), (DraftSettings, 0.0), (LmSettings, 0.5)])
def test_different_vocabularies_of_the_same_size_are_refused(text, tokens, tmp_path, kind, distill):
    other = tmp_path / "other"
    make_checkpoint(other)
    changed = json.loads((other / "tokenizer.json").read_text())
    words = changed["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (other / "tokenizer.json").write_text(json.dumps(changed))
    teacher = {"model": str(tokens)} if kind is DraftSettings else {"distill_from": str(tokens)}
    with pytest.raises(UsageError, match="has another tokenizer than the new model"):
        job.train(kind(data=(text,), start=str(other), distill=distill, **teacher, **QUICK), tmp_path / "no")
    assert not (tmp_path / "no" / job.METRICS).exists()


def test_a_checkpoint_with_ineffective_settings_resumes(text, tokens, tmp_path, monkeypatch):
    """Earlier versions accepted such settings."""
    wanted = LmSettings(data=(text,), start=str(tokens), layers=3, **QUICK | {"steps": 4})
    stop = At(2, lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(LmSettings, "require_effective", lambda settings: None)
    job.train(wanted, tmp_path / "lm", stop)
    monkeypatch.undo()
    assert job.resume("lm", tmp_path / "lm", {}).step == 4


def test_position_jumps_depend_on_the_index_of_the_sequence_only():
    wanted = LmSettings(data=("none",), skip=0.5, **SMALL | {"context": 4096})
    found = lm.jumping_positions(wanted, 10, 200, 20)
    assert torch.equal(lm.jumping_positions(wanted, 13, 1, 20)[0], found[3])
    jumps = (found.diff(dim=1) > 1).sum(1)
    assert set(jumps.tolist()) == {0, 1} and 60 < int(jumps.sum()) < 140
    assert found.max() < 4096 and found.max() > 2000


@pytest.mark.parametrize("kept_bytes", [0, 1 << 40])
def test_tokens_after_a_position_jump_attend_to_tokens_before_it(text, tokens, monkeypatch, kept_bytes):
    """Without a mask, `transformers` takes a position jump for the start of another packed text."""
    monkeypatch.setattr(lm, "_ACTIVATION_BYTES", kept_bytes)  # 0 enables gradient checkpointing, as for long sequences
    wanted = LmSettings(data=(text,), tokenizer=str(tokens), **SMALL)
    module = lm.prepare(lm.new_model(wanted, VOCAB, 0, 1), wanted, torch.device("cpu"))
    task = lm.LanguageModelTask(module, wanted, torch.device("cpu"), torch.float32, None, np.empty(0))
    places = torch.cat([torch.arange(10), torch.arange(10) + 100])[None]
    one, other = torch.arange(20)[None] + 5, torch.arange(20)[None] + 5
    other[0, 3] = 99
    with torch.no_grad():
        first, second = task._hidden(one, places), task._hidden(other, places)
    assert not torch.allclose(first[0, 15], second[0, 15])
    model = frozen.load_frozen_model(tokens, "auto", torch.device("cpu"))
    assert not torch.allclose(model.outputs(one, places).hidden[0, 15], model.outputs(other, places).hidden[0, 15])


def test_training_computes_the_logits_of_the_model(text, tmp_path):
    """Granite divides its logits by a constant; the training must apply it too."""
    model = make_family(tmp_path, "granite")
    wanted = LmSettings(data=(text,), start=str(tmp_path), **QUICK)
    module = lm.prepare(model, wanted, torch.device("cpu"))
    task = lm.LanguageModelTask(module, wanted, torch.device("cpu"), torch.float32, None, np.empty(0))
    ids = torch.arange(20)[None] + 5
    with torch.no_grad():
        logits = task._logits(task._hidden(ids, None)[0])
        assert torch.allclose(logits, module(ids).logits[0], atol=1e-5)


def test_the_loss_is_the_mean_over_all_tokens(text, tokens):
    wanted = LmSettings(data=(text,), tokenizer=str(tokens), **SMALL)
    module = lm.prepare(lm.new_model(wanted, VOCAB, 0, 1), wanted, torch.device("cpu"))
    task = lm.LanguageModelTask(module, wanted, torch.device("cpu"), torch.float32, None, np.empty(0))
    ids = np.random.default_rng(3).integers(2, 250, (3, 20))
    loss = task.accumulate(ids, 1.0, 0)
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    tokens_ = torch.from_numpy(ids)
    logits = module(tokens_[:, :-1], position_ids=lm.jumping_positions(wanted, 0, 3, 19),
                    attention_mask=torch.ones(3, 19)).logits
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_[:, 1:].flatten())
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-4)
    for mine, parameter in zip(gradients, module.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": 15}, "a multiple of 2 x num_heads"), ({"num_kv_heads": 3}, "a multiple of num_kv_heads"),
    ({"sequence_length": 512}, "at most the context"), ({"skip": 2.0}, "0 to 1"), ({"vocab_size": 20}, "300 or more"),
    ({"tokenizer": "nowhere"}, "no model 'nowhere'"),
    ({"distill_from": "nowhere"}, "no model 'nowhere'"),
    ({"data": ("hf:nobody/nothing",)}, "hf:nobody/nothing"),
])
def test_invalid_settings_raise_an_error_that_names_them(text, tokens, tmp_path, changes, message):
    with pytest.raises(LongdraftError, match=message):
        job.train(LmSettings(**{"data": (text,), "tokenizer": str(tokens)} | SMALL | changes), tmp_path / "lm")
