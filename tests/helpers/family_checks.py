"""What holds for every family, with the checkpoint of one in a folder. The tests of families call these checks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import longdraft
from helpers import resuming
from helpers.checkpoints import load, load_glide
from helpers.eagle import load_eagle
from helpers.equality import DRAFTERS, liar, prompt_of
from helpers.families import greedy_text_of, logits_of, make_family, rounding_errors, theirs_of
from helpers.generation import by_name, generate
from longdraft.kernels.cpu.decoder import CpuDecoder
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.model.transformer import ForwardRequest, Rows, Transformer, chain_rows
from longdraft.parts import heads
from longdraft.request.sampling_params import SamplingParams


def check_against_transformers(folder: Path, name: str, tolerance: float = 1e-4, spread: float = 0.1) -> None:
    """Logits over prefill and decode, in float32 and within bfloat16's rounding; greedy texts.

    tolerance  of float32 logits
    spread     initializer_range of the checkpoint in bfloat16
    """
    theirs, tokens = make_family(folder / "a", name), prompt_of(300)
    ours = load(folder / "a")
    torch.testing.assert_close(logits_of(ours, tokens, 270), theirs_of(theirs, tokens), atol=tolerance, rtol=1e-4)
    prompt = prompt_of(60)
    greedy = SamplingParams(max_new_tokens=40, temperature=0.0)
    assert generate(ours, prompt, greedy, by_name("plain")) == greedy_text_of(theirs, prompt, 40)
    tokens = prompt_of(120)
    error, theirs_error = rounding_errors(
        folder / "b", name, lambda: logits_of(load(folder / "b", "bfloat16"), tokens, 100), tokens, spread)
    assert error <= 1.2 * theirs_error


def check_rows(folder: Path, name: str, dtype: str) -> None:
    """Rows have the same bits one by one, together and in a tree, and after a path of the tree that was kept.

    name  of the kernels; in float32 their logits are near those of the reference
    """
    model, tokens = load(folder, dtype, name), prompt_of(40)
    alone = logits_of(model, tokens, 1)
    assert torch.equal(logits_of(model, tokens, 40), alone)
    if name != "reference" and dtype == "float32":
        torch.testing.assert_close(alone, logits_of(load(folder, name="reference"), tokens, 40), atol=1e-4, rtol=1e-4)
    cache = model.new_cache()
    model.forward(chain_rows(tokens[:30], 0), cache)
    cache.commit(range(30))
    # The true continuation is the path 0, 2, 3, 5 of a tree; its other nodes are wrong.
    rows = Rows([tokens[30], 7, tokens[31], tokens[32], 9, tokens[33], 11], [30, 31, 31, 32, 32, 33, 34],
                [-1, 0, 0, 2, 2, 3, 4])
    found = model.forward(rows, cache, 7).logits
    assert torch.equal(found[[0, 2, 3, 5]], alone[30:34])
    cache.commit([0, 2, 3, 5])
    assert torch.equal(model.forward(chain_rows(tokens[34:], 34), cache, 6).logits, alone[34:])


def check_one_call(model: Transformer, prompt: int = 20) -> None:
    """All layers in one compiled call have the bits of single operations: the rows of two texts, a tree among them,
    after prompts of so many tokens, their attention, and the states of delta layers."""
    tokens = prompt_of(prompt + 4)
    slow = copy.copy(model)
    slow._decoder = LayerwiseDecoder(model.kernels, model.weights.layers, model.geometry)
    assert isinstance(model._decoder, CpuDecoder)
    found = []
    for each in (model, slow):
        caches = [each.new_cache(), each.new_cache()]
        for cache in caches:
            each.forward(chain_rows(tokens[:prompt], 0), cache)
            cache.commit(range(prompt))
        tree = Rows([tokens[prompt], 7, tokens[prompt + 1], 5], [prompt, prompt + 1, prompt + 1, prompt + 2],
                    [-1, 0, 0, 1])
        chain = chain_rows(tokens[prompt : prompt + 3], prompt)
        requests = [ForwardRequest(each, tree, caches[0], 4), ForwardRequest(each, chain, caches[1], 3)]
        results = each.forward_batch(requests)
        caches[0].commit([0, 1, 3])
        caches[1].commit([0, 1, 2])
        alone = each.forward(chain_rows([9], prompt + 3), caches[0], 1)
        found.append([part for result in (*results, alone) for part in (result.logits, *result.attention_output)]
                     + [part for cache in caches if cache.states for state in cache.states.current for part in state])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def check_drafters(folder: Path, drafters: Iterable[str], dtype: str, settings: dict[str, Any], tokens: int,
                   draft: Transformer | None) -> None:
    """These drafters write the plain text. `glide` takes part where the folder has a layer for it.

    drafters  names of DRAFTERS
    draft     the smaller model of drafters that need one; None: the model itself
    """
    model = load(folder, dtype)
    trained, eagle = heads.load_heads(folder / "heads", model), load_eagle(folder / "eagle", model)
    layer = load_glide(folder / "glide", model) if (folder / "glide").exists() else None
    params = SamplingParams(max_new_tokens=tokens, seed=11, **settings)
    plain = generate(model, prompt_of(60), params, by_name("plain"), banned=[1])
    for name, options in map(DRAFTERS.__getitem__, drafters):
        if (name == "glide" and layer is None) or (model.config.hybrid and options.get("cache") == "full"
                                                   and name == "tokenswift"):
            continue
        factory = by_name(name, trained, draft or model if "model" in options else None, layer, eagle, **options)
        assert generate(model, prompt_of(60), params, factory, banned=[1]) == plain, (name, options)


def check_liar(folder: Path, kind: str, dtype: str, tokens: int) -> None:
    """A drafter that lies does not change the text."""
    model, prompt = load(folder, dtype), prompt_of(60)
    params = SamplingParams(max_new_tokens=tokens, seed=5, temperature=1.0, top_p=0.9)
    plain = generate(model, prompt, params, by_name("plain"), banned=[1])
    drafter = liar(kind, plain, len(prompt))
    assert generate(model, prompt, params, lambda given: drafter, banned=[1]) == plain


def check_drafts_are_accepted(folder: Path) -> None:
    """Self-drafts on the whole cache are right nearly always, and on a small partial cache now and then."""
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    for options, least in ((dict(budget=2000), 6.0), (dict(budget=40, sinks=4, refresh=8), 1.1)):
        engine = longdraft.load(str(folder), drafter="magicdec", drafter_options={"suffix": "false"} | options)
        stats = list(engine.generate(prompt_of(90), params))[-1].stats
        assert stats["mean_accepted_length"] > least


def check_batch_and_resumed_text(folder: Path, drafter: str, journal: Path) -> None:
    """The texts of a batch, and a text that is resumed, are the plain ones."""
    params = [SamplingParams(max_new_tokens=20, seed=seed, ignore_eos=True) for seed in (1, 2, 3)]
    prompts = [prompt_of(30), prompt_of(45, 4), prompt_of(30)]
    engine = longdraft.load(str(folder), drafter=drafter)
    plain = engine.with_drafter("plain")
    expected = [[token for event in plain.generate(prompt, each) for token in event.tokens]
                for prompt, each in zip(prompts, params, strict=True)]
    assert resuming.written_together(engine, prompts, params) == expected
    with engine.generate(prompts[0], params[0], journal=journal) as text:
        while len(text.tokens) < 8:
            next(text)
    assert [token for event in engine.resume(journal) for token in event.tokens] == expected[0]


def check_quantised_texts(folder: Path) -> None:
    """With quantised weights too, a drafted text is the plain one."""
    for quantize in ("int8", "int4"):
        model = load(folder, "bfloat16", quantize=quantize)
        params = SamplingParams(max_new_tokens=20, seed=2, temperature=1.0)
        plain = generate(model, prompt_of(60), params, by_name("plain"), banned=[1])
        assert generate(model, prompt_of(60), params, by_name("magicdec", chain=4), banned=[1]) == plain
