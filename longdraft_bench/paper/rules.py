"""Verification as published, and without shared noise. For comparison in the benchmarks only.

    keyed        longdraft's: one choice per node, with noise that drafters share (longdraft/sampling/sampler.py)
    independent  the same distribution and the same text, but drafters do not use the noise: the acceptance of an
                 unbiased exact match
    per-path     TokenSwift's code and its Algorithm 1: tokens are sampled anew for each path of the tree, and the path
                 with the longest match wins (of several, the first or the last). It does not sample from the model's
                 distribution: with M paths through a token x, x is written with probability 1 - (1 - p(x))^M instead
                 of p(x). The penalty uses the window that ends at the root, for every node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft.drafters.ngram import NGRAM
from longdraft.kernels.chain_plan import Ranked, Ranker
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import process
from longdraft.sampling.sampler import Sampler


class IndependentSampler(Sampler):
    """Ranks draft tokens by their logits alone; chooses tokens as the base class does."""

    def __init__(self, params: SamplingParams, banned: Iterable[int] = (), is_fast: bool = True) -> None:
        super().__init__(params, banned, is_fast)
        self._by_logit = Sampler(replace(params, temperature=0.0), banned, is_fast)

    def ranked(self, logits: torch.Tensor, context: Context, path: Sequence[int], num: int, ahead: int = 0,
               within: float = math.inf) -> Ranked:
        return self._by_logit.ranked(logits, context, path, num, ahead, within)

    def ranker(self, context: Context, vocabulary: int, width: int, within: float = math.inf) -> Ranker | None:
        return self._by_logit.ranker(context, vocabulary, width, within)


class PathSampler(IndependentSampler):
    """Chooses tokens so that the walk accepts the path of the published rule and adds its last sample."""

    def choose(self, logits: torch.Tensor, tree: Tree, context: Context, every: bool = True) -> list[int]:
        generator = np.random.default_rng([self.params.seed or 0, len(context)])
        best, place = best_paths(tree, _Distributions(self, logits, tree, context), generator)
        path, last = best[place]
        chosen = [0] * len(tree)
        for node, child in pairwise(path):
            chosen[node] = tree.tokens[child]
            tree.children[node, tree.tokens[child]] = child  # of several equal children, this path's
        chosen[path[-1]] = last
        # The rule ends here, even if another path continues with this token, so the walk must not follow it.
        tree.children.pop((path[-1], last), None)
        if any(tree.sources[nodes[-1]] == NGRAM for nodes, _ in best if len(nodes) > 1):
            _credit(tree, path[1:], NGRAM)
        return chosen


def _credit(tree: Tree, nodes: Sequence[int], source: str) -> None:
    """Count these nodes for a drafter. The paper's beta credits n-grams wherever one of the longest paths is one's."""
    sources = [source if node in nodes else found for node, found in enumerate(tree.sources)]
    object.__setattr__(tree, "sources", tuple(sources))  # a tree is frozen; this one is dropped after the step


class _Distributions(Sequence["Distribution"]):
    """The target's distribution at each node of a tree, computed where a path reaches it.

    The penalty window of all nodes is that which ends at the root. Nodes with the same tokens before them have the same
    distribution; each is computed once.
    """

    def __init__(self, sampler: PathSampler, logits: torch.Tensor, tree: Tree, context: Context) -> None:
        self._sampler, self._logits, self._tree, self._context = sampler, logits, tree, context
        self._known: dict[tuple[int, ...], Distribution] = {}

    def __len__(self) -> int:
        return len(self._tree)

    def __getitem__(self, node: Any) -> Any:
        tree, sampler, context = self._tree, self._sampler, self._context
        tokens = tuple(tree.tokens[each] for each in tree.path(node)[1:])
        if tokens not in self._known:
            row = sampler._biased(self._logits[node : node + 1], [len(context) + len(tokens)], None)
            self._known[tokens] = _distribution(sampler._penalised(row, context, [()])[0], sampler.params)
        return self._known[tokens]


Distribution = tuple[NDArray[np.int64], NDArray[np.float64]]  # token ids, and the running sum of their probabilities


def _distribution(row: NDArray[np.float32], params: SamplingParams) -> Distribution:
    if params.temperature == 0:
        return np.array([process.best_token(row)]), np.ones(1)
    kept = process.filtered(row, params)
    masses = np.exp(kept.scores - kept.scores.max())
    return kept.ids, np.cumsum(masses / masses.sum())


Ends = list[tuple[list[int], int]]  # paths, as nodes from the root, each with the token that is added after it


def best_paths(tree: Tree, distributions: Sequence[Distribution], generator: np.random.Generator) -> tuple[Ends, int]:
    """The paths with the longest match, root first, and the place of the one that the published rule takes: the first
    or the last."""
    inner = set(tree.parents)
    ends = []
    for leaf in (node for node in range(len(tree)) if node not in inner):
        path = tree.path(leaf)
        matched, last = _sampled(tree, path, distributions, generator)
        ends.append((path[: matched + 1], last))
    longest = max(len(path) for path, _ in ends)
    best = [end for end in ends if len(end[0]) == longest]
    return best, 0 if generator.random() < 0.5 else -1


def _sampled(tree: Tree, path: Sequence[int], distributions: Sequence[Distribution],
             generator: np.random.Generator) -> tuple[int, int]:
    """How many draft tokens of a path its own samples match, and the sample after them."""
    for depth, node in enumerate(path):
        tokens, sums = distributions[node]
        token = int(tokens[min(int(np.searchsorted(sums, generator.random(), side="right")), len(tokens) - 1)])
        if depth + 1 == len(path) or tree.tokens[path[depth + 1]] != token:
            return depth, token
    raise AssertionError("a path has a root")
