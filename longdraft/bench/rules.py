"""Verification as it was published, and as it would be without shared noise. For comparisons only: nothing outside
the benchmarks can choose it.

    keyed        longdraft's: one choice for each node, by noise that drafters share (longdraft/sampling/sampler.py)
    independent  the same law and the same text, but drafters do not see the noise: what an honest exact match gives
    per-path     TokenSwift's code and its Algorithm 1: for each path of the tree tokens are sampled anew, and the path
                 that matches longest wins, the first or the last of several. Another law than plain decoding's: with
                 M paths through a token x it is written with 1 - (1 - p(x))^M instead of p(x). The penalty sees the
                 window that ends at the root, for every node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft.core import Context, SamplingParams
from longdraft.sampling import process
from longdraft.sampling.sampler import Sampler
from longdraft.tree import Tree


class IndependentSampler(Sampler):
    """Chooses as ever; ranks a drafter's guesses by their logits alone."""

    def __init__(self, params: SamplingParams, banned: Iterable[int] = (), is_fast: bool = True) -> None:
        super().__init__(params, banned, is_fast)
        self._by_logit = Sampler(replace(params, temperature=0.0), banned, is_fast)

    def rank(self, logits: torch.Tensor, context: Context, path: Sequence[int], num: int, ahead: int = 0,
             within: float = math.inf) -> list[int]:
        return self._by_logit.rank(logits, context, path, num, ahead, within)


class PathSampler(IndependentSampler):
    """Chooses such tokens that the walk goes the way of the published rule, and ends with its last sample."""

    def choose(self, logits: torch.Tensor, tree: Tree, context: Context) -> list[int]:
        rows = self._penalised(logits, context, [()] * len(tree))  # the root's window, whatever the node
        laws = [_law(row, self.params) for row in rows]
        pick = np.random.default_rng([self.params.seed or 0, len(context)])
        path, last = best_path(tree, laws, pick)
        chosen = [0] * len(tree)
        for node, child in pairwise(path):
            chosen[node] = tree.tokens[child]
        chosen[path[-1]] = last
        # The rule ends here, even where another path goes on with this token: the step's walk must too.
        tree.children.pop((path[-1], last), None)
        return chosen


Law = tuple[NDArray[np.int64], NDArray[np.float64]]  # tokens, and their running sum of probabilities


def _law(row: NDArray[np.float32], params: SamplingParams) -> Law:
    if params.temperature == 0:
        return np.array([process.best_token(row)]), np.ones(1)
    kept = process.support(row, params)
    masses = np.exp(kept.scores - kept.scores.max())
    return kept.ids, np.cumsum(masses / masses.sum())


def best_path(tree: Tree, laws: Sequence[Law], pick: np.random.Generator) -> tuple[list[int], int]:
    """The nodes that the published rule accepts, root first, and the token it adds behind them."""
    inner = set(tree.parents)
    ends = []
    for leaf in (node for node in range(len(tree)) if node not in inner):
        path = tree.path(leaf)
        matched, last = _sampled(tree, path, laws, pick)
        ends.append((path[: matched + 1], last))
    longest = max(len(path) for path, _ in ends)
    best = [end for end in ends if len(end[0]) == longest]
    return best[0] if pick.random() < 0.5 else best[-1]


def _sampled(tree: Tree, path: Sequence[int], laws: Sequence[Law], pick: np.random.Generator) -> tuple[int, int]:
    """How many guesses of a path its own samples match, and the sample behind them."""
    for depth, node in enumerate(path):
        tokens, sums = laws[node]
        token = int(tokens[min(int(np.searchsorted(sums, pick.random(), side="right")), len(tokens) - 1)])
        if depth + 1 == len(path) or tree.tokens[path[depth + 1]] != token:
            return depth, token
    raise AssertionError("a path has a root")
