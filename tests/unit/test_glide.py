"""Glide: the layer compared with its training module, and reading of the text."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import longdraft
from helpers.checkpoints import load, load_glide, make_checkpoint, make_glide
from helpers.families import HYBRIDS, make_family
from helpers.generation import by_name, generate
from longdraft.cache.window import RowWindow
from longdraft.drafters.glide import GlideDraftModel
from longdraft.errors import ModelError, UsageError
from longdraft.model.transformer import chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally
from longdraft.train import frozen_model as frozen
from longdraft.train import glide as training
from longdraft.train.settings import GlideSettings

DELTA_LAST = ["linear_attention", "full_attention", "full_attention", "linear_attention"]


@pytest.fixture(scope="module")
def model(tiny):
    return load(tiny["gqa"])


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("name", ["mha", "gqa", "gemma3", "phi3, longrope, part", *HYBRIDS,
                                  "qwen3_5, a delta layer last"])
def test_the_layer_computes_what_was_trained(tiny, tmp_path, name, lag):
    """Row by row over stores, compared with the training module over whole sequences. Heads are rotated in part, and
    some layers have no keys."""
    folder = tiny.get(name) or tmp_path / "model"
    if name not in tiny:
        family, _, ending = name.partition(", a delta")
        make_family(folder, family, **(dict(layer_types=DELTA_LAST) if ending else {}))
    target = load(folder)
    trained = frozen.load_frozen_model(folder, "auto", torch.device("cpu"))
    task = training.glide_task(trained, GlideSettings(data=("none",), window=5, max_lag=4, seed=3), np.empty(0))
    with torch.no_grad():
        for parameter in task.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    task.export(tmp_path, {})
    layer = load_glide(tmp_path, target)
    ids = list(range(2, 32))
    tokens, places = torch.tensor([ids]), torch.arange(30)[None]
    with torch.no_grad():
        wanted = trained.logits(task.module(tokens, places, trained.outputs(tokens, places), lag)[0])
    cache = target.new_cache()
    target.forward(chain_rows(ids, 0), cache)
    cache.commit(range(30))
    rows = RowWindow(target.kernels, 1, target.config.num_kv_heads, target.config.head_dim, 5, 0)
    for position, token in enumerate(ids):
        row = layer.forward([token], position, target, rows.stores[0], rows.length, cache.stores[-1],
                            max(0, position + 1 - lag))
        assert torch.allclose(layer.logits(row.hidden)[0], wanted[position], atol=1e-3)
        rows.add_text(row.k[None], row.v[None])


def test_logits_do_not_depend_on_earlier_drafts(tiny, model):
    """A draft model with rejected drafts gives the logits of one without them, up to what its rows of text had seen."""
    layer = load_glide(tiny["gqa"] / "glide", model)
    pick = random.Random(2)
    text = [pick.randrange(2, 258) for _ in range(40)]
    cache = model.new_cache()
    model.forward(chain_rows(text[:-1], 0), cache)
    cache.commit(range(39))
    straight, led = (GlideDraftModel(layer, model, cache, 8) for _ in range(2))
    context = Context(text)
    for path in ([9], [9, 8], [9, 8, 7], [3]):
        run_alone(led.next_logits(context, [text[-1], *path]))
    for path in ([], [5], [5, 6], [5, 6, 7]):
        one, other = (run_alone(reader.next_logits(context, [text[-1], *path])) for reader in (straight, led))
        assert torch.allclose(one, other, atol=1e-4)
        assert led.rows.num_drafts == len(path)


def test_memory_does_not_grow_with_the_text(tiny, model):
    layer = load_glide(tiny["gqa"] / "glide", model)
    sizes = []
    for length in (30, 600):
        cache = model.new_cache()
        text = [2 + i % 250 for i in range(length)]
        model.forward(chain_rows(text[:-1], 0), cache)
        cache.commit(range(length - 1))
        reader = GlideDraftModel(layer, model, cache, 4)
        run_alone(reader.next_logits(Context(text), text[-1:]))
        sizes.append(reader.rows.nbytes)
        assert reader.rows.num_text == 12
    assert sizes[0] == sizes[1]


def test_training_positions_move_except_for_the_anchors():
    found = training.offset_positions(42, 3, 1000, 7, 50, 20)
    again = training.offset_positions(42, 3, 1000, 9, 1, 20)
    assert torch.equal(found[2], again[0])
    steps = found.diff(dim=1)
    assert found[:, -1].max() < 1000 and found[:, -1].max() > 500 and (steps >= 1).all()
    assert all((row != 1).sum() <= 1 and (row[3:] == 1).all() for row in steps)


def test_a_layer_in_the_models_folder_is_found_and_drafts(tiny):
    engine = longdraft.load(str(tiny["mha"]), drafter="glide")
    plain = longdraft.load(str(tiny["mha"]), drafter="plain")
    params = SamplingParams(max_new_tokens=60, seed=2, ignore_eos=True)
    hashes = {[event.stats for event in each.generate("The same story. " * 8, params)][-1]["sha256_tokens"]
              for each in (engine, plain)}
    assert len(hashes) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_drafts_of_a_trained_layer_are_accepted(tmp_path, kind):
    """The layer learns from text that the model writes, because the tiny model is random."""
    from longdraft.train import job

    folder = tmp_path / "tiny"
    if kind == "llama":
        make_checkpoint(folder, initializer_range=0.15)
    else:
        make_family(folder, kind, initializer_range=0.15)
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 300)
    wanted = GlideSettings(model=str(folder), data=(str(tmp_path / "text.txt"),), own_tokens=6000, sequence_length=64,
                           steps=60, batch_size=4, learning_rate=1e-2, warmup_steps=5, window=32, max_lag=4,
                           distill=1.0, eval_every=0, checkpoint_every=0, probe_tokens=0, device="cpu", threads=1)
    result = job.train(wanted, tmp_path / "glide")
    assert [part["lag"] for part in result.validation] == [1.0, 4.0]
    target, tally = load(folder), Tally()
    layer = load_glide(tmp_path / "glide", target)
    params = SamplingParams(max_new_tokens=80, temperature=1.0, min_p=0.1, seed=5)
    prompt = [2 + i % 26 for i in range(60)]
    written = generate(target, prompt, params, by_name("glide", glide=layer, suffix="false"), tally=tally)
    assert written == generate(target, prompt, params, by_name("plain"))
    assert tally.accepted["glide"] > 0


@pytest.mark.parametrize(("changes", "message"), [
    ({"window": 0}, "window is 0"), ({"hidden_size": 3}, "trained for hidden_size 3"),
    ({"base_sha256": "0" * 64}, "trained on other weights"),
    ({"vocabulary_sha256": "0" * 64}, "another tokenizer"),
])
def test_a_layer_of_another_model_is_refused(tiny, tmp_path, changes, message):
    make_glide(tmp_path / "glide", tiny["mha"], **changes)
    with pytest.raises(ModelError, match=message):
        longdraft.load(str(tiny["mha"]), drafter="glide", heads=str(tmp_path / "glide"))


def test_options_out_of_range_and_missing_layers_get_a_clear_error(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=r"needs a trained glide layer .* `longdraft train glide`"):
        longdraft.load(str(tmp_path), drafter="glide")
    with pytest.raises(UsageError, match="chain is 0; allowed: 1 to 64"):
        longdraft.load(str(tmp_path), drafter="glide", drafter_options={"chain": 0})


@pytest.mark.parametrize(("name", "message"), [("glm4", "turns adjacent dimensions"), ("gemma4", "heads of two sizes")])
def test_a_model_with_which_it_does_not_draft_is_refused(tmp_path, name, message):
    """By the training, and by loading."""
    make_family(tmp_path / "model", name)
    make_glide(tmp_path / "model" / "glide", tmp_path / "model")
    trained = frozen.load_frozen_model(tmp_path / "model", "auto", torch.device("cpu"))
    for attempt in (lambda: training.glide_task(trained, GlideSettings(data=("none",)), np.empty(0)),
                    lambda: longdraft.load(str(tmp_path / "model"), drafter="glide")):
        with pytest.raises(ModelError, match=f"glide does not draft for a model that .*{message}"):
            attempt()
