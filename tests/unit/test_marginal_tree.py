"""Trees of the likeliest guesses: against the enumeration of all of them, and their estimates from outcomes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from longdraft.drafters.auto.acceptance import NodeAcceptance
from longdraft.drafters.marginal_tree import MAX_NODES, Calibration, MarginalTrees, Slot
from longdraft.kernels.launched import finished
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling.sampler import Sampler

CASES = [(seed, has_pairs) for seed in range(6) for has_pairs in (False, True)]


def random_slots(seed: int, has_pairs: bool, num: int = 4, width: int = 3) -> list[Slot]:
    draw = np.random.default_rng(seed)
    return [Slot(draw.permutation(50)[:width].tolist(), -np.sort(-draw.normal(size=width) * 2),
                 draw.normal(size=(width if place else 1, width)) if has_pairs else None, draw.uniform(0.5, 1))
            for place in range(num)]


def every_path(slots: list[Slot], shares: Calibration) -> dict[tuple[int, ...], float]:
    """The probability of every path, from all combinations of candidates."""
    reach = {}
    for depth in range(1, len(slots) + 1):
        for places in itertools.product(*(range(len(slot.tokens)) for slot in slots[:depth])):
            total = 1.0
            for index, (slot, place) in enumerate(zip(slots, places, strict=False)):
                scores = slot.scores.copy()
                if slot.pairs is not None:
                    scores += slot.pairs[places[index - 1] if index else 0]
                scale = shares.scale(index + 1)
                weights = [math.exp(score / scale) for score in scores]
                share = 0.85 * slot.trust * weights[place] / sum(weights)
                total *= shares.corrected(share, index + 1)
            reach[tuple(slot.tokens[place] for slot, place in zip(slots, places, strict=False))] = total
    return reach


def paths_of(tree: Tree) -> dict[tuple[int, ...], float]:
    """The probability of each node's path, as the tree states it."""
    return {tuple(tree.tokens[node] for node in tree.path(last)[1:]):
            math.prod(tree.rates[node] for node in tree.path(last)[1:]) for last in range(1, len(tree))}


@pytest.mark.parametrize("seed, has_pairs", CASES)
def test_a_tree_has_the_likeliest_paths_of_all(seed, has_pairs):
    slots, trees = random_slots(seed, has_pairs), MarginalTrees("test")
    for tokens in ([slots[0].tokens[1], slots[1].tokens[0], 7], [9], [slots[0].tokens[0]] * 3):
        trees.grow(1, slots, 20)
        trees.learn(tokens)
    wanted = sorted(every_path(slots, trees._calibration).items(), key=lambda item: -item[1])
    for count in (1, 2, 5, 17, MAX_NODES):
        grown = paths_of(trees.grow(1, slots, count))
        assert list(grown.values()) == pytest.approx([reach for _, reach in wanted[:count]])
        assert list(grown.values()) == sorted(grown.values(), reverse=True), "parents and likelier nodes come first"
        assert all(reach == pytest.approx(dict(wanted)[path]) for path, reach in grown.items())


def test_a_tree_has_64_rows_at_most():
    slots = random_slots(3, False, num=6, width=8)
    assert len(MarginalTrees("test").grow(1, slots, 999)) == 1 + MAX_NODES


@pytest.mark.parametrize("slots", [[], [Slot([], np.empty(0))], [Slot([5], np.zeros(1)), Slot([], np.empty(0))]])
def test_slots_without_candidates_give_what_is_before_them(slots):
    trees = MarginalTrees("test")
    tree = trees.grow(1, slots, 9)
    assert tree.tokens == (1, *(token for slot in slots for token in slot.tokens))
    trees.learn([5, 6, 7])


def test_outcomes_correct_the_shares():
    """Whatever the scores say, the candidate that is always right gets a share near 1, others near 0."""
    slots, trees = [Slot([4, 5], np.array([1.0, 0.9]))], MarginalTrees("test")
    for _ in range(60):
        trees.grow(1, slots, 2)
        trees.learn([4, 1])
    assert trees.grow(1, slots, 1).rates[1] > 0.7
    for _ in range(400):
        trees.grow(1, slots, 2)
        trees.learn([9, 1])
    assert trees.grow(1, slots, 1).rates[1] < 0.3


def test_scores_that_tell_little_get_a_larger_scale():
    draw, scales = np.random.default_rng(1), []
    for error in (0.1, 3.0):
        shares = Calibration()
        for _ in range(200):
            true = draw.gumbel(size=8)
            shares.fit(true + draw.normal(size=8) * error, 1, int(true.argmax()))
        scales.append(shares.scale(1))
    assert scales[0] < scales[1]


def test_auto_prices_the_nodes_by_the_rates_of_the_tree_and_keeps_them_when_it_cuts():
    slots, acceptance = random_slots(2, False), NodeAcceptance()
    tree = MarginalTrees("test").grow(1, slots, 9)
    expected = [1.0, *paths_of(tree).values()]
    assert acceptance.reach(tree) == pytest.approx(expected)
    kept = tree.kept([node < 5 for node in range(len(tree))])
    assert acceptance.reach(kept) == pytest.approx(expected[:5])


@pytest.mark.parametrize("settings", [
    dict(temperature=0.0), dict(temperature=1.0, min_p=0.1), dict(temperature=0.8, top_k=5),
    dict(temperature=1.0, min_p=0.05, repetition_penalty=1.3, penalty_window=6), dict(typical_p=0.9),
])
def test_shortlists_are_the_ranked_guesses_with_scores_that_fall(settings):
    sampler = Sampler(SamplingParams(seed=3, **settings))
    context = Context([5, 6, 7, 8, 5])
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)) * 3
    for ahead, shortlist in enumerate(finished(sampler.shortlists(logits, context, 7))):
        assert shortlist.tokens == sampler.ranked(logits[ahead], context, (), 7, ahead).tokens
        assert (np.diff(shortlist.scores) <= 0).all() and len(shortlist.scores) == 7


def test_logits_that_are_not_finite_give_no_candidates():
    logits = torch.full((2, 9), torch.nan)
    found = finished(Sampler(SamplingParams(seed=1)).shortlists(logits, Context([1]), 4))
    assert [len(each.tokens) for each in found] == [0, 0]
