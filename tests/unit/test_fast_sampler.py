"""The compiled sampler chooses the tokens of the Python sampler."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.launched import finished
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling.fast import FastSampler
from longdraft.sampling.sampler import Sampler

VOCABULARY = 40


@st.composite
def trees(draw, root: int) -> Tree:
    count = draw(st.integers(0, 7))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=count, max_size=count))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    return Tree((root, *tokens), (-1, *parents), ("",) + ("test",) * count)


@st.composite
def sampling(draw) -> SamplingParams:
    return SamplingParams(
        seed=draw(st.integers(0, 2**64 - 1)), temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.1, 0.9])), top_k=draw(st.sampled_from([0, 0, 1, 5, 37, 500])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.9999])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.2, 0.8])),
        penalty_window=draw(st.integers(1, 30)), max_new_tokens=100, min_new_tokens=draw(st.sampled_from([0, 3, 50])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])), temperature_last=draw(st.booleans()),
        dry_multiplier=draw(st.sampled_from([0.0, 0.0, 0.8])), no_repeat_ngram_size=draw(st.sampled_from([0, 0, 3])))


@st.composite
def logits(draw, rows: int) -> torch.Tensor:
    """Rows with ties, bans and, sometimes, values that are not finite."""
    numbers = np.random.default_rng(draw(st.integers(0, 10**6)))
    made = numbers.normal(0, draw(st.sampled_from([0.1, 3.0, 30.0])), (rows, VOCABULARY))
    if draw(st.booleans()):
        made = made.round()
    for value in draw(st.lists(st.sampled_from([-np.inf, np.inf, np.nan, 0.0, -0.0]), max_size=2)):
        made[draw(st.integers(0, rows - 1)), draw(st.integers(0, VOCABULARY - 1))] = value
    return torch.tensor(made, dtype=torch.float32)


@pytest.mark.skipif(not FastSampler.supports(SamplingParams()), reason="the compiled module is missing")
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_compiled_sampler_agrees_with_the_python_sampler(data):
    params, banned = data.draw(sampling()), data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=3))
    samplers = [Sampler(params, banned, is_fast) for is_fast in (True, False)]
    context = Context(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50)))
    for _ in range(data.draw(st.integers(1, 4))):
        tree = data.draw(trees(context.last))
        rows = data.draw(logits(len(tree)))
        compiled, obvious = (sampler.choose(rows, tree, context) for sampler in samplers)
        assert compiled == obvious
        for sampler in samplers:
            chosen = sampler.choose(rows, tree, context, every=False)
            path = tree.along(obvious)
            assert tree.along(chosen) == path and [chosen[node] for node in path] == [obvious[node] for node in path]
        path, ahead = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=6)), data.draw(st.integers(0, 2))
        num = data.draw(st.integers(1, VOCABULARY - 6))  # leaving out the impossible ones, which are equal
        if not rows[0].unique().numel() < VOCABULARY:  # among equal logits beyond the support any may be guessed
            within = data.draw(st.sampled_from([math.inf, 0.0, 0.5, 3.0]))
            compiled, obvious = (sampler.ranked(rows[0], context, path, num, ahead, within) for sampler in samplers)
            assert compiled == obvious
        context.extend(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9)))


@pytest.mark.skipif(not FastSampler.supports(SamplingParams()), reason="the compiled module is missing")
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_compiled_shortlists_of_a_part_of_the_vocabulary_are_those_of_the_python_sampler(data):
    params, banned = data.draw(sampling()), data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=3))
    ids = sorted(data.draw(st.sets(st.integers(0, VOCABULARY - 1), min_size=9)))
    part = data.draw(st.sampled_from([PartOfVocabulary(torch.tensor(ids), VOCABULARY), None]))
    context = Context(data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50)))
    rows = data.draw(logits(data.draw(st.integers(1, 4))))
    assume(all(row.unique().numel() == VOCABULARY for row in rows))  # among equal ones beyond the support any may come
    rows = rows if part is None else rows[:, ids].contiguous()
    bias = data.draw(st.sampled_from([(), ((3, 2.5), (7, -4.0))]))
    params = replace(params, logit_bias=bias)
    samplers = [Sampler(params, banned, is_fast) for is_fast in (True, False)]
    position = len(context) + data.draw(st.integers(-1, 2))
    for sampler in samplers:
        sampler.ban(position, [3, ids[-1]])
    compiled, obvious = (finished(sampler.shortlists(rows, context, 6, part)) for sampler in samplers)
    for one, other in zip(compiled, obvious, strict=True):
        assert one.tokens == other.tokens and one.scores.tolist() == other.scores.tolist()


@pytest.mark.parametrize("setting", [dict(eta_cutoff=0.1), dict(min_tokens_to_keep=2),
                                     dict(typical_p=0.9), dict(top_n_sigma=1.0), dict(xtc_probability=0.1),
                                     dict(temperature_last=True, dynatemp_range=0.5)])
def test_settings_that_python_decides(setting):
    assert not FastSampler.supports(SamplingParams(**setting))
    assert FastSampler.supports(SamplingParams(temperature=0, **setting)) == FastSampler.supports(SamplingParams())


@given(st.integers(0, 2**64 - 1), st.integers(1000, 200_000), st.sampled_from([0.05, 1.0, 12.0]),
       st.sampled_from([{}, dict(top_p=0.9), dict(top_p=0.999, top_k=3000), dict(top_k=50, top_p=0.8),
                        dict(top_k=300)]))
@settings(max_examples=40, deadline=None)
def test_they_agree_on_large_vocabularies(seed, size, spread, filters):
    rows = torch.tensor(np.random.default_rng(seed).normal(0, spread, (1, size)), dtype=torch.float32)
    context = Context([3, 4])
    root = Tree((4,), (-1,), ("",))
    samplers = [Sampler(SamplingParams(seed=seed, **filters), (), is_fast) for is_fast in (True, False)]
    compiled, obvious = (sampler.choose(rows, root, context) for sampler in samplers)
    assert compiled == obvious
    compiled, obvious = (sampler.ranked(rows[0], context, [], 3) for sampler in samplers)
    assert compiled == obvious


@given(size=st.integers(300, 60_000), kinds=st.integers(1, 3), kept=st.integers(1, 299),
       above=st.sampled_from([0, 1, -1]), temperature=st.sampled_from([0.01, 0.7, 1.0, 50.0]))
@settings(max_examples=40, deadline=None)
def test_they_agree_where_the_cut_of_top_p_falls_between_equal_tokens(size, kinds, kept, above, temperature):
    """The goal is a token's mass, or one ten-trillionth beside it: an estimate of the total does not decide."""
    logits = -torch.arange(size).remainder(kinds).float()[None]
    top_p = min(1 - 2**-50, kept / size * (1 + above * 2**-43))
    context, root = Context([3, 4]), Tree((4,), (-1,), ("",))
    for seed in range(4):
        params = SamplingParams(seed=seed, temperature=temperature, top_p=top_p)
        compiled, obvious = (Sampler(params, (), is_fast).choose(logits, root, context) for is_fast in (True, False))
        assert compiled == obvious


@given(seed=st.integers(0, 2**31), size=st.integers(1000, 200_000), temperature=st.sampled_from([0.0, 1.0]),
       min_p=st.sampled_from([0.001, 0.9]), num=st.integers(1, 150))
@settings(max_examples=25, deadline=None)
def test_they_agree_on_large_vocabularies_of_which_few_tokens_pass_the_filter(seed, size, temperature, min_p, num):
    """Most guesses of the ranking are tokens that min-p removes. All logits differ."""
    logits = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).float() * (20 / size)
    params, context = SamplingParams(seed=seed, temperature=temperature, min_p=min_p), Context([3, 4])
    compiled, obvious = (Sampler(params, (), is_fast) for is_fast in (True, False))
    assert compiled.ranked(logits, context, [], num) == obvious.ranked(logits, context, [], num)
    root = Tree((4,), (-1,), ("",))
    assert compiled.choose(logits[None], root, context) == obvious.choose(logits[None], root, context)
