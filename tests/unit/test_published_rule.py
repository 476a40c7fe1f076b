"""The verification of TokenSwift's published code: it changes the distribution, and only the measurements use it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import longdraft
import longdraft_bench
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import from_paths
from longdraft_bench.paper import rules


def laws_of(tree, probabilities):
    return [(np.arange(len(probabilities)), np.cumsum(probabilities))] * len(tree)


def best_path(tree, laws, pick):
    """The nodes that the published rule accepts, root first, and the token that it adds after them."""
    best, place = rules.best_paths(tree, laws, pick)
    return best[place]


def test_the_published_rule_gives_the_counter_example():
    """A fair coin and the leaves (A, A), (A, B): A is written three times out of four, 1.1875 guesses are accepted."""
    tree = from_paths(0, [(0, 0), (0, 1)], "test")
    pick = np.random.default_rng(1)
    found = []
    for _ in range(20_000):
        path, last = best_path(tree, laws_of(tree, [0.5, 0.5]), pick)
        found.append((tree.tokens[path[1]] if len(path) > 1 else last, len(path) - 1))
    assert np.mean([first == 0 for first, _ in found]) == pytest.approx(0.75, abs=0.015)
    assert np.mean([accepted for _, accepted in found]) == pytest.approx(1.1875, abs=0.02)


def test_each_path_adds_a_try_for_its_first_token():
    """With M paths through a token of probability p, it is written with probability 1 - (1 - p)^M."""
    tree = from_paths(9, [(0, other) for other in range(10, 37)], "test")
    pick = np.random.default_rng(2)
    first = [len(best_path(tree, laws_of(tree, [0.05, 0.95]), pick)[0]) > 1 for _ in range(4000)]
    assert np.mean(first) == pytest.approx(1 - 0.95**27, abs=0.03)


def test_the_walk_ends_where_the_rule_does():
    """The added token may be a node of another path; the walk does not follow it."""
    tree = from_paths(0, [(1, 1), (1, 2)], "test")
    params = SamplingParams(seed=3)
    logits = torch.tensor([[-9.0, 9.0, -9.0], [-9.0, 1.0, 1.0]] + [[9.0, 0.0, 0.0]] * 2)
    lengths = set()
    for length in range(2, 60):
        context = Context([2] * length + [0])
        fresh = from_paths(0, [(1, 1), (1, 2)], "test")
        choices = rules.PathSampler(params).choose(logits, fresh, context)
        pick = np.random.default_rng([3, len(context)])
        laws = [rules._distribution(row.numpy(), params) for row in logits]
        path, last = best_path(tree, laws, pick)

        walked = fresh.along(choices)
        assert walked == path and choices[walked[-1]] == last
        lengths.add(len(path))
    assert lengths >= {2, 3}


def test_only_the_measurements_use_the_published_rule():
    product, measurements = (Path(package.__file__).parent for package in (longdraft, longdraft_bench))
    assert any("PathSampler" in path.read_text() for path in measurements.rglob("*.py"))
    assert not any("PathSampler" in path.read_text() for path in product.rglob("*.py"))
