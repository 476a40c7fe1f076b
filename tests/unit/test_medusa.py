"""Medusa: the public head files, the template of its tree, and the drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

import longdraft
from helpers.checkpoints import HIDDEN, VOCAB, load, write_medusa
from helpers.equality import prompt_of
from longdraft import drafters
from longdraft.drafters import template
from longdraft.errors import ModelError, UsageError
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts import heads
from longdraft.parts.medusa import MedusaHeads
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Verified
from longdraft.speculation.routine import run_alone


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", [None, "reference"])
def test_public_heads_compute_what_their_paper_says(tiny, tmp_path, own, name):
    tensors = write_medusa(tmp_path, own=own)
    model = load(tiny["mha"], name=name)
    loaded = heads.load_heads(tmp_path, model)
    assert isinstance(loaded, MedusaHeads) and len(loaded) == 2
    hidden = model.forward(chain_rows(prompt_of(9), 0), model.new_cache()).hidden[-1:]
    normed = model.kernels.rms_norm(hidden, model.weights.norm, model.config.rms_norm_eps)
    expected = []
    for i in range(2):
        x = normed
        for j in range(2):
            weight, bias = (tensors[f"{i}.{j}.linear.{part}"] for part in ("weight", "bias"))
            x = x + functional.silu(functional.linear(x, weight, bias))
        expected.append(functional.linear(x, tensors[f"{i}.2.weight"]) if own else model.head(x))
    torch.testing.assert_close(loaded.logits(hidden), torch.cat(expected), atol=1e-4, rtol=1e-4)


def damage(folder: Path, what: str) -> None:
    tensors = write_medusa(folder)
    config = json.loads((folder / "config.json").read_text())
    if what == "missing":
        del tensors["1.0.linear.bias"]
    elif what == "surplus":
        tensors["2.0.linear.bias"] = torch.zeros(HIDDEN)
    elif what == "shape":
        tensors["0.2.weight"] = torch.zeros(VOCAB - 1, HIDDEN)
    elif what == "number":
        config["medusa_num_heads"] = "two"
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if what == "pickle":
        (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")


@pytest.mark.parametrize("what, message", [
    ("missing", "missing 1.0.linear.bias"),
    ("surplus", "unexpected 2.0.linear.bias"),
    ("shape", r"0.2.weight has shape \[319, 48\], not \[320, 48\]"),
    ("number", "medusa_num_heads is 'two' in config.json; allowed: 1 to 16"),
    ("pickle", ".pt files are pickles, which can run code, and are not loaded; convert one with"),
])
def test_heads_that_do_not_fit_are_refused_with_the_reason(tiny, tmp_path, what, message):
    damage(tmp_path, what)
    with pytest.raises(ModelError, match=message) as caught:
        heads.load_heads(tmp_path, load(tiny["mha"]))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("drafter", ["medusa", "tokenswift"])
def test_public_heads_draft_by_name(tiny, tmp_path, drafter):
    write_medusa(tmp_path, num_heads=3, num_blocks=1)
    params = SamplingParams(max_new_tokens=30, temperature=0.0)
    texts = []
    for name, settings in ((drafter, {"heads": str(tmp_path)}), ("plain", {})):
        engine = longdraft.load(str(tiny["mha"]), drafter=name, **settings)
        generation = engine.generate(prompt_of(40), params)
        stats = [event.stats for event in generation][-1]
        texts.append(stats["sha256_tokens"])
        if name != "plain":
            assert stats["by_source"]["heads"]["drafted"] > 0
    assert texts[0] == texts[1]


def test_templates():
    assert template.parse_template("2,1") == ((0,), (1,), (0, 0), (1, 0))
    assert template.parse_template("0.0 1 0") == ((0,), (1,), (0, 0))
    published = template.parse_template("mc_sim_7b_63")
    assert [sum(len(path) == depth for path in published) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]


@pytest.mark.parametrize("tree, message", [
    ("", "allowed: widths such as 1,3"),
    ("1,x", "allowed: widths such as 1,3, choices such as '0 1 0.0', or mc_sim_7b_63"),
    ("1,0", "whole numbers of 1 or more"),
    ("99,99", "at most 1024 nodes"),
    ("0 1.0", r"each node's parent, that of \(1, 0\) too"),
    ("0 -1", "ranks of 0 or more"),
])
def test_an_invalid_template_is_refused(tree, message):
    with pytest.raises(UsageError, match=message):
        drafters.parse_options("medusa", {"tree": tree})


def begin(model: Transformer, folder: Path, prompt: list[int], tree: str):
    params = SamplingParams(temperature=0.0)
    cache, sampler = model.new_cache(), Sampler(params)
    result = model.forward(chain_rows(prompt[:-1], 0), cache)
    cache.commit(range(len(prompt) - 1))
    given = drafters.Resources(model, cache, sampler, params, heads.load_heads(folder, model))
    drafter = drafters.DRAFTERS["medusa"].build(drafters.parse_options("medusa", {"tree": tree}), given)
    context = Context(prompt)
    drafter.begin(context, Verified(result, [-1]))
    return drafter, context, result.hidden[-1:]


def test_the_tree_holds_the_heads_best_guesses_at_each_depth(tiny):
    model = load(tiny["mha"])
    drafter, context, hidden = begin(model, tiny["mha"] / "heads", prompt_of(40), "0 1 0.0 0.1 1.1 0.0.0")
    best = heads.load_heads(tiny["mha"] / "heads", model).logits(hidden).argsort(-1, descending=True)[:, :2].tolist()
    (a, b), (c, d), (e, _) = best
    tree = run_alone(drafter.propose(context, 9))
    paths = {tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(1, len(tree))}
    assert paths == {(a,), (b,), (a, c), (a, d), (b, d), (a, c, e)}
    assert max(run_alone(drafter.propose(context, 2)).depths) == 2 and len(run_alone(drafter.propose(context, 0))) == 1


def test_a_tree_deeper_than_the_heads_is_refused(tiny):
    with pytest.raises(UsageError, match="tree '1,1,1,1' is 4 deep; allowed: at most 3, the number of heads"):
        begin(load(tiny["mha"]), tiny["mha"] / "heads", prompt_of(40), "1,1,1,1")
