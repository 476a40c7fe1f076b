"""How often guesses are right, counted while writing: by depth for each candidate of `auto`, and for single nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from longdraft.request.tree import Tree
from longdraft.speculation.decayed_rate import DecayedRate


class AcceptanceByDepth:
    """P(at least i guesses are accepted) in steps that may draft i deep or deeper:

        P(i)  =  rate_1 * ... * rate_i        rate_i: share of right guesses at depth i whose ancestors were right

    A depth with few outcomes is expected to do as well as it did in `earlier` requests, else as well as the depth above
    it, the first depth as `prior`. Without that, a depth that was never tried would never be tried.

    prior    share of right guesses to expect before the first outcome
    earlier  the acceptance of all requests, which continues to change
    steps    that were counted
    """

    def __init__(self, max_depth: int, prior: float = 0.8, earlier: AcceptanceByDepth | None = None) -> None:
        self.steps = 0
        self._prior = prior
        self._earlier = earlier
        self._depths = [DecayedRate() for _ in range(max_depth)]
        self._reached: list[float] = []
        self._counted = -1, -1  # steps, own and earlier ones, from which `_reached` was computed

    def of_a_request(self) -> AcceptanceByDepth:
        """The acceptance of one request, which starts as this one's."""
        return AcceptanceByDepth(len(self._depths), self._prior, self)

    def add(self, allowed: int, accepted: int) -> None:
        """A step that could draft `allowed` deep, of which `accepted` guesses became text."""
        self.steps += 1
        for depth in range(min(allowed, accepted + 1, len(self._depths))):
            self._depths[depth].add(depth < accepted)

    def reached(self) -> list[float]:
        """P(1), P(2), ..., falling."""
        counted = self.steps, self._earlier.steps if self._earlier else 0
        if counted != self._counted:
            self._reached = list(accumulate(self._rates(), mul))
            self._counted = counted
        return self._reached

    def _rates(self) -> list[float]:
        """P(guess i is right, if its ancestors are)."""
        earlier = self._earlier and self._earlier._rates()
        rates = list[float]()
        for depth, counted in enumerate(self._depths):
            above = rates[-1] if rates else self._prior
            rates.append(counted.value(earlier[depth] if earlier else above))
        return rates


class NodeAcceptance:
    """P(a guess is accepted, if its parent is), by its source, its depth and its rank among its siblings."""

    _DEPTHS, _RANKS = 8, 4  # deeper depths and later ranks are counted as these
    _PRIOR_FIRST, _PRIOR_LATER = 0.8, 0.25  # expected of a first guess, and of its siblings
    _PRIOR_WEIGHT = 2.0

    def __init__(self) -> None:
        self._rates = defaultdict[tuple[str, int, int], DecayedRate](DecayedRate)

    def _kinds(self, tree: Tree) -> list[tuple[str, int, int]]:
        siblings = defaultdict[tuple[int, str], int](int)
        kinds = []
        for node, (parent, source) in enumerate(zip(tree.parents, tree.sources, strict=True)):
            rank = siblings[parent, source]
            siblings[parent, source] += 1
            kinds.append((source, min(tree.depths[node], self._DEPTHS), min(rank, self._RANKS)))
        return kinds

    def add(self, tree: Tree, path: Sequence[int]) -> None:
        """A verified tree: the children of the nodes on the accepted `path` were tried; those on it were right."""
        accepted = set(path)
        for node, kind in enumerate(self._kinds(tree)):
            if node and tree.parents[node] in accepted:
                self._rates[kind].add(node in accepted)

    def reach(self, tree: Tree) -> list[float]:
        """P(node becomes text), for each node: from the drafter's own rates, where it has some."""
        reach = [1.0]
        for node, kind in enumerate(self._kinds(tree)[1:], 1):
            rate = tree.rates[node] if tree.rates else None
            if rate is None:
                expected = self._PRIOR_LATER if kind[2] else self._PRIOR_FIRST
                rate = self._rates[kind].value(expected, self._PRIOR_WEIGHT)
            reach.append(reach[tree.parents[node]] * rate)
        return reach
