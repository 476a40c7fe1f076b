"""What drafting costs and brings, learned while writing: the models that `auto` decides with.

    expected tokens of a step that drafts L deep     1 + sum of P(at least d guesses accepted), d = 1 .. L
    expected seconds                                  draft(L) + verify(rows(L), context)

All of it is measured on the machine at hand, and what was measured long ago is forgotten exponentially.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from longdraft.tree import Tree

_FORGET = 0.97  # weight of what was known, at each new measurement of time: the last 30 or so count
_FORGET_LUCK = 0.985  # at each new outcome, which varies more
_DOUBT = 4.0  # outcomes that what is expected of a depth weighs as much as
_UNUSUAL = 3.0  # a measurement this many times what was expected is a hiccup of the machine, not news


class Line:
    """y = a + b x with a, b >= 0, fitted by least squares to what was seen lately.

    share  how much of y goes with x (b x / y at the mean x): a guess, until different x have told
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        if self._weight > 3 and self._y > 0:
            y = min(y, _UNUSUAL * self.at(x))
        self._weight, self._x, self._y, self._xx, self._xy = (
            _FORGET * old + new for old, new in
            ((self._weight, 1.0), (self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)))
        mean, level = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean * mean
        if self._weight > 3 and spread > 0.05 and level > 0:
            slope = (self._xy / self._weight - mean * level) / spread
            self._share += 0.5 * (min(1.0, max(0.0, slope * mean / level)) - self._share)

    def at(self, x: float) -> float:
        """The y expected at x; 0 while nothing is known."""
        if not self._x:
            return self._y / self._weight if self._weight else 0.0
        return self._y / self._weight * (1 - self._share + self._share * x * self._weight / self._x)

    @property
    def per_x(self) -> float:
        """How much y grows with each x."""
        return self._share * self._y / self._x if self._x else 0.0


class ForwardCost:
    """Seconds of a forward, from what it reads and what it multiplies.

        a (weights + contexts of all texts)  +  b (rows of each text times (weights + its context), summed)

    One text's part of it is what is its own, and of the weights' reading as much as everybody's. So a row costs what
    it adds to the forward, however many others are in it: b is learned from forwards with the rows of all.

    weights  tokens of context whose cache is as large as the model's weights
    """

    def __init__(self, weights: float) -> None:
        self._weights = weights
        self._line = Line(0.1)  # y: seconds by what is read; x: what is multiplied by what is read (alone: the rows)

    def add(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """A forward of texts with (rows, context) each."""
        reads = self._weights + sum(context for _, context in parts)
        self._line.add(sum(rows * (self._weights + context) for rows, context in parts) / reads, seconds / reads)

    def add_part(self, rows: int, context: int, texts: float, seconds: float) -> None:
        """One text's part of a forward of `texts` of them."""
        reads = self._weights / texts + context
        self._line.add(rows * (self._weights + context) / reads, seconds / reads)

    def at(self, rows: float, context: int, texts: float = 1) -> float:
        """One text's part of a forward of `texts` of them."""
        reads = self._weights / texts + context
        return self._line.at(rows * (self._weights + context) / reads) * reads

    def per_row(self, context: int) -> float:
        """What each row adds."""
        return self._line.per_x * (self._weights + context)

    def shared(self, texts: float) -> float:
        """What a draft costs among `texts` texts, as a part of what it costs alone: a forward of little but weights."""
        whole = self.at(1, 0)
        return self.at(1, 0, texts) / whole if whole else 1.0


class Depths:
    """P(at least d guesses accepted) in steps that were allowed to draft d deep or deeper.

    Counted as the share of guesses d that are right where those before were. A depth of which little is known is
    expected to do as well as the one before it, and the first as all do: else what was never tried would never be.
    """

    def __init__(self, deepest: int) -> None:
        self._tries = [0.0] * deepest
        self._hits = [0.0] * deepest

    def add(self, allowed: int, accepted: int) -> None:
        for depth in range(min(allowed, accepted + 1, len(self._hits))):
            self._tries[depth] = _FORGET_LUCK * self._tries[depth] + 1
            self._hits[depth] = _FORGET_LUCK * self._hits[depth] + (depth < accepted)

    def reached(self) -> list[float]:
        """For d = 1, 2, ..., falling."""
        found: list[float] = []
        rate, reach = (sum(self._hits) + 0.5) / (sum(self._tries) + 1), 1.0
        for tries, hits in zip(self._tries, self._hits, strict=True):
            rate = (hits + _DOUBT * rate) / (tries + _DOUBT)
            reach *= rate
            found.append(reach)
        return found


class Acceptance:
    """P(a guess is taken where its parent was), by who guessed it, how deep, and as which of its siblings."""

    _DEPTHS, _RANKS = 8, 4  # beyond them all are alike

    def __init__(self) -> None:
        self._tries: defaultdict[tuple[str, int, int], float] = defaultdict(lambda: 2.0)
        self._hits: defaultdict[tuple[str, int, int], float] = defaultdict(lambda: 1.0)  # hopeful at first

    def _kinds(self, tree: Tree) -> list[tuple[str, int, int]]:
        siblings: defaultdict[tuple[int, str], int] = defaultdict(int)
        kinds = []
        for node, (parent, source) in enumerate(zip(tree.parents, tree.sources, strict=True)):
            rank = siblings[parent, source]
            siblings[parent, source] += 1
            kinds.append((source, min(tree.depths[node], self._DEPTHS), min(rank, self._RANKS)))
        return kinds

    def add(self, tree: Tree, path: Sequence[int]) -> None:
        """Guesses below the nodes of the accepted `path` were tried; those on it were hits."""
        taken = set(path)
        for node, kind in enumerate(self._kinds(tree)):
            if node and tree.parents[node] in taken:
                self._tries[kind] = _FORGET_LUCK * self._tries[kind] + 1
                self._hits[kind] = _FORGET_LUCK * self._hits[kind] + (node in taken)

    def reach(self, tree: Tree) -> list[float]:
        """P(each node becomes text)."""
        found: list[float] = []
        for node, kind in enumerate(self._kinds(tree)):
            found.append(found[tree.parents[node]] * self._hits[kind] / self._tries[kind] if node else 1.0)
        return found


class Contender:
    """What is known of one drafter: what its drafts cost and bring, by how deep they may go."""

    def __init__(self, deepest: int) -> None:
        self._deepest = 0  # that it ever drafted
        self._draft = Line(0.5)
        self._rows = Line(0.5)
        self._depths = Depths(deepest)
        self.steps = 0

    def add(self, allowed: int, tree: Tree, accepted: int, draft_seconds: float) -> None:
        """A step that might draft `allowed` deep, and verified `tree`. The seconds are those of a text alone."""
        self.steps += 1
        self._deepest = max(self._deepest, *tree.depths)
        self._draft.add(min(allowed, self._deepest), draft_seconds)
        self._rows.add(min(allowed, self._deepest), len(tree))
        self._depths.add(allowed, accepted)

    def best(self, verify: ForwardCost, context: int, texts: float = 1) -> tuple[float, int]:
        """(seconds for each token, depth) at the depth that is fastest."""
        tokens, reached = 1.0, self._depths.reached()
        choices = [(self.seconds(verify, context, 0, texts), 0)] if not reached else []
        for depth, probability in enumerate(reached[: max(1, self._deepest)], 1):
            tokens += probability
            choices.append((self.seconds(verify, context, depth, texts) / tokens, depth))
        return min(choices)

    def seconds(self, verify: ForwardCost, context: int, depth: int, texts: float = 1) -> float:
        """Of a step that drafts `depth` deep, among so many texts."""
        draft = self._draft.at(depth) * verify.shared(texts)
        return draft + verify.at(max(1.0, self._rows.at(depth)), context, texts)
