"""Draft trees from guesses that are made in one pass: the likeliest nodes first.

Heads and block drafters guess several tokens ahead at once. The guesses of one place, a *slot*, do not depend on the
guesses before it. The noise of the target's choice is keyed by position and token, not by path. So a slot has one list
of candidates in one order, and the probability of a node is a product over the slots:

    root ─┬─ a ─┬─ c        reach(a c)  =  share(a in slot 1) * share(c in slot 2)
          │     └─ d
          └─ b ─── c        slot 1: a, b      slot 2: c, d

Nodes leave a heap by falling reach. A parent has at least the reach of its children, and a candidate at least that of
the next one in its list, so the first N nodes are the best tree of N nodes.

The share of a candidate is P(it is the target's token, if its parent is). It is estimated from the distances between
scores (logit / T + noise): a softmax of score / scale, where the scale is the size of the errors in the drafter's
logits. The scale that explains the text so far best is taken, and the shares are corrected by its outcomes
(`Calibration`).

Some drafters also score pairs of neighbouring candidates (`Slot.pairs`). The list of a slot then depends on its parent.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.request.tree import Tree, Trie
from longdraft.speculation.decayed_rate import DecayedRate

MAX_NODES = 63  # of a tree; with the root, the rows of the largest verification that `auto` plans
SHORTLIST = 16  # candidates of a slot at most
_SCALES = np.array([0.4, 0.6, 0.8, 1.1, 1.6, 2.4])  # errors of a drafter's logits in nats, of which one is taken
_FIRST_SCALE = 2  # of _SCALES, before the first outcome
_MISSED = 0.15  # share of the target's tokens that are not among the candidates, before the first outcome
_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)  # between classes of shares
_DEPTHS = (1, 2, 3, 5)  # least depths of the classes of depths
_SCALE_DECAY = 0.99  # about the last 100 outcomes of a class of depths decide
_DECAY = 0.995  # about the last 200 outcomes of a class count
_WEIGHT = 4.0  # expected right guesses that the uncorrected share counts as
_HEAD_START = 1.0  # nats of likelihood by which the first scale is ahead
_LARGEST = 50.0  # exponent
_HIGHEST = 0.99  # of a corrected share


class Slot(NamedTuple):
    """The candidates for one place after the root.

    tokens  K token ids
    scores  [K] nats, with the noise of the target's choice
    pairs   [K of the slot before, K] nats, added to the scores after each candidate of the slot before; None: nothing
            is added. Of the first slot: [1, K]
    trust   factor of all shares: the drafter's own estimate that this slot is worth guessing
    """

    tokens: Sequence[int]
    scores: NDArray[np.float64]
    pairs: NDArray[np.float64] | None = None
    trust: float = 1.0


class Calibration:
    """By depth, in the text of one request: the likelihood of the text under each of _SCALES; and, by share as well,
    right candidates divided by expected ones."""

    def __init__(self) -> None:
        self._rates = defaultdict[tuple[int, int], DecayedRate](lambda: DecayedRate(_DECAY))
        self._likelihoods = np.zeros((len(_DEPTHS) + 1, len(_SCALES)))  # decayed sums of logarithms
        self._likelihoods[:, _FIRST_SCALE] = _HEAD_START

    @staticmethod
    def _class(share: float, depth: int) -> tuple[int, int]:
        return bisect_right(_EDGES, share), bisect_right(_DEPTHS, depth)

    def scale(self, depth: int) -> float:
        """The likeliest scale."""
        return float(_SCALES[self._likelihoods[bisect_right(_DEPTHS, depth)].argmax()])

    def fit(self, scores: NDArray[np.float64], depth: int, right: int) -> None:
        """The candidate at index `right` was the target's token."""
        scaled = (scores - scores[right]) / _SCALES[:, None]
        own = self._likelihoods[bisect_right(_DEPTHS, depth)]
        own *= _SCALE_DECAY
        own -= np.log(np.exp(np.minimum(scaled, _LARGEST)).sum(1))

    def corrected(self, share: float, depth: int) -> float:
        """P(a candidate with this share is the target's token, if its parent is)."""
        rate = self._rates.get(self._class(share, depth))
        return min(_HIGHEST, share if rate is None else share * rate.value(1.0, _WEIGHT))

    def add(self, shares: Sequence[float], depth: int, right: int | None) -> None:
        """The candidate at index `right` was the target's token; None: no candidate was."""
        expected, hits = defaultdict[tuple[int, int], float](float), None
        for index, share in enumerate(shares):
            expected[self._class(share, depth)] += share
            if index == right:
                hits = self._class(share, depth)
        for kind, total in expected.items():
            self._rates[kind].add(kind == hits, total)


class _Ranking(NamedTuple):
    """The candidates of a slot after one parent: scores by index in the slot; then, best first, indices, shares and
    corrected shares."""

    scores: NDArray[np.float64]
    indices: list[int]
    shares: list[float]
    corrected: list[float]


class MarginalTrees:
    """The trees of one request, with one source, and what their outcomes say about later ones."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._calibration = Calibration()
        self._slots: Sequence[Slot] = ()  # of the latest tree
        self._rankings: dict[tuple[int, int], _Ranking] = {}  # by depth and index of the parent, of the latest tree

    def grow(self, root: int, slots: Sequence[Slot], num_nodes: int) -> Tree:
        """The tree of the `num_nodes` likeliest nodes at most."""
        trie = Trie(root)
        self._slots, self._rankings = slots, {}
        order = count()  # of entries with one reach: the earlier one first
        heap: list[tuple[float, int, float, int, int, int, int]] = []

        def push(reach: float, parent: int, depth: int, before: int, rank: int) -> None:
            """Offer the candidate of this rank in slot `depth`, after the candidate at index `before` of the slot
            before. reach: of the parent"""
            if depth > len(slots):
                return
            ranking = self._ranking(depth, before)
            if rank < len(ranking.indices):
                own = reach * ranking.corrected[rank]
                if own > 0:
                    heapq.heappush(heap, (-own, next(order), reach, parent, depth, before, rank))

        push(1.0, 0, 1, 0, 0)
        while heap and len(trie) <= min(num_nodes, MAX_NODES):
            own, _, reach, parent, depth, before, rank = heapq.heappop(heap)
            ranking = self._ranking(depth, before)
            token = int(slots[depth - 1].tokens[ranking.indices[rank]])
            node = trie.add(parent, token, self._source, ranking.corrected[rank])
            push(reach, parent, depth, before, rank + 1)
            push(-own, node, depth + 1, ranking.indices[rank], 0)
        return trie.tree()

    def _ranking(self, depth: int, before: int) -> _Ranking:
        """The ranking of the slot at this depth, after the candidate at index `before` of the slot before."""
        slot = self._slots[depth - 1]
        key = depth, before if slot.pairs is not None else 0
        if key not in self._rankings:
            self._rankings[key] = self._ranked(slot, *key)
        return self._rankings[key]

    def _ranked(self, slot: Slot, depth: int, before: int) -> _Ranking:
        if not len(slot.tokens):
            return _Ranking(slot.scores, [], [], [])
        scores = slot.scores if slot.pairs is None else slot.scores + slot.pairs[before]
        weights = np.exp((scores - scores.max()) / self._calibration.scale(depth))
        shares = ((1 - _MISSED) * slot.trust * weights / weights.sum()).tolist()
        corrected = [self._calibration.corrected(share, depth) for share in shares]
        indices = sorted(range(len(shares)), key=lambda index: -corrected[index])
        return _Ranking(scores, indices, [shares[index] for index in indices], [corrected[index] for index in indices])

    def learn(self, tokens: Sequence[int]) -> None:
        """The text continued with these tokens after the root of the latest tree. All candidates of a slot learn from
        them, not only those in the tree."""
        before: int | None = 0
        for depth, (slot, token) in enumerate(zip(self._slots, tokens, strict=False), 1):
            if slot.pairs is not None and before is None:
                break
            ranking, before = self._ranking(depth, before or 0), None
            right = next((rank for rank, index in enumerate(ranking.indices) if slot.tokens[index] == token), None)
            self._calibration.add(ranking.shares, depth, right)
            if right is not None:
                before = ranking.indices[right]
                self._calibration.fit(ranking.scores, depth, before)
        self._slots = ()
