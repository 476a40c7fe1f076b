"""What drafting costs and brings, learned while writing: the models that `auto` decides with.

    expected tokens of a step that drafts L deep     1 + sum of P(at least d guesses accepted), d = 1 .. L
    expected seconds                                  draft(L) + verify(rows(L), context)

All of it is measured on the machine at hand, and what was measured long ago is forgotten exponentially. What drafts
and verifications cost is the machine's and known to all texts of an engine; how many guesses are right is a text's
own, and begins as it was with the others (`SharedStatistics`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from longdraft.tree import Tree

_FORGET = 0.97  # weight of what was known, at each new measurement of time: the last 30 or so count
_FORGET_LUCK = 0.985  # at each new outcome, which varies more
_DOUBT = 4.0  # outcomes that what is expected of a depth weighs as much as
_UNUSUAL = 3.0  # a measurement this many times what was expected is a hiccup of the machine, not news
_SURE_AFTER = 20  # steps from which a contender's figures are believed
_ASK_S = 1e-4  # what a forward takes for each text in it, however short; on 2 cores 60 to 130 microseconds
_ASK_LEAST = 0.1  # of a forward's time is reading and multiplying, at least
_CLAIM = 1000  # steps of all texts for which a first try is one text's alone
_EARLY = 0.05  # share of the time that may be lost on probes of those of which little is known


class LinearCost:
    """y = base + slope x, both >= 0, fitted by least squares to what was seen lately; 0 while nothing is known.

    share  how much of y goes with x (slope x / y at the mean x): a guess, until different x have told
    """

    def __init__(self, share: float) -> None:
        self.base = self.slope = 0.0
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
        self.base, self.slope = (level * (1 - self._share), level * self._share / mean) if mean else (level, 0.0)

    def at(self, x: float) -> float:
        """The y expected at x."""
        return self.base + self.slope * x


class ForwardCost:
    """Seconds of a forward, from what it reads and what it multiplies.

        _ASK_S for each text  +  a (weights + contexts of all texts)
                              +  b (rows of each text times (weights + its context), summed)

    One text's part of it is what is its own, and of the weights' reading as much as everybody's. So a row costs what
    it adds to the forward, however many others are in it: b is learned from forwards with the rows of all.

    weights  tokens of context whose cache is as large as the model's weights
    """

    def __init__(self, weights: float) -> None:
        self._weights = weights
        self._line = LinearCost(0.1)  # y: seconds by what is read; x: what is multiplied by what is read (alone: the rows)

    def add(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """A forward of texts with (rows, context) each."""
        reads = self._weights + sum(context for _, context in parts)
        self._add(sum(rows * (self._weights + context) for rows, context in parts), reads, seconds, len(parts))

    def add_part(self, rows: int, context: int, texts: float, seconds: float) -> None:
        """One text's part of a forward of `texts` of them."""
        self._add(rows * (self._weights + context), self._weights / texts + context, seconds, 1)

    def _add(self, multiplies: float, reads: float, seconds: float, texts: int) -> None:
        """What a text takes however short is known and does not depend on the rest, so that it is not fitted."""
        self._line.add(multiplies / reads, max(_ASK_LEAST * seconds, seconds - texts * _ASK_S) / reads)

    def terms(self, context: int, texts: float = 1) -> tuple[float, float]:
        """Of one text's part of a forward of `texts` of them: what it costs with no row, and what each row adds."""
        return (_ASK_S + self._line.base * (self._weights / texts + context),
                self._line.slope * (self._weights + context))

    def at(self, rows: float, context: int, texts: float = 1) -> float:
        """One text's part of a forward of `texts` of them."""
        fixed, each = self.terms(context, texts)
        return fixed + each * rows

    def per_row(self, context: int) -> float:
        """What each row adds."""
        return self.terms(context)[1]

    def shared(self, texts: float) -> float:
        """What a draft costs among `texts` texts, as a part of what it costs alone: a forward of little but weights."""
        whole = self.at(1, 0) if texts != 1 else 0.0
        return self.at(1, 0, texts) / whole if whole else 1.0


class AcceptanceByDepth:
    """P(at least d guesses accepted) in steps that were allowed to draft d deep or deeper.

    Counted as the share of guesses d that are right where those before were. A depth of which little is known is
    expected to do as well as it did `before`, or as the one above it, and the first as all do: else what was never
    tried would never be.

    before  of other texts, which goes on growing
    """

    def __init__(self, deepest: int, before: AcceptanceByDepth | None = None) -> None:
        self._tries = [0.0] * deepest
        self._hits = [0.0] * deepest
        self._before = before

    def of_a_text(self) -> AcceptanceByDepth:
        """A text's own, which expects this until it has been lucky or not itself."""
        return AcceptanceByDepth(len(self._tries), self)

    def add(self, allowed: int, accepted: int) -> None:
        for depth in range(min(allowed, accepted + 1, len(self._hits))):
            self._tries[depth] = _FORGET_LUCK * self._tries[depth] + 1
            self._hits[depth] = _FORGET_LUCK * self._hits[depth] + (depth < accepted)

    def reached(self) -> list[float]:
        """For d = 1, 2, ..., falling."""
        found: list[float] = []
        rate, reach = (sum(self._hits) + 0.5) / (sum(self._tries) + 1), 1.0
        expected = self._before.rates() if self._before else [0.0] * len(self._tries)
        for tries, hits, other in zip(self._tries, self._hits, expected, strict=True):
            rate = (hits + _DOUBT * (other or rate)) / (tries + _DOUBT)
            reach *= rate
            found.append(reach)
        return found

    def rates(self) -> list[float]:
        """P(guess d is right where those before were); 0 where that was never tried."""
        return [(hits + 0.5) / (tries + 1) if tries else 0.0
                for tries, hits in zip(self._tries, self._hits, strict=True)]


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


class Candidate:
    """What is known of one drafter, from all texts: what its drafts cost and bring, by how deep they may go."""

    def __init__(self, deepest: int) -> None:
        self.acceptance_by_depth = AcceptanceByDepth(deepest)
        self.steps = 0
        self.catching_up = 0.0  # seconds that taking over took lately, beside the step itself
        self._deepest = 0  # that it ever drafted
        self._draft = LinearCost(0.5)
        self._rows = LinearCost(0.5)

    @property
    def trust(self) -> float:
        """How far its figures are believed, 0 to 1: a few steps may have been unlucky ones."""
        return min(1.0, self.steps / _SURE_AFTER)

    def add(self, allowed: int, tree: Tree, accepted: int, draft_seconds: float) -> None:
        """A step that might draft `allowed` deep, and verified `tree`. The seconds are those of a text alone."""
        self.steps += 1
        self._deepest = max(self._deepest, *tree.depths)
        depth = min(allowed, self._deepest)
        if self.trust < 1 and self._draft.at(depth) > _UNUSUAL * draft_seconds:
            self._draft = LinearCost(0.5)  # no luck makes a draft that much faster: those before were the hiccups
        self._draft.add(depth, draft_seconds)
        self._rows.add(depth, len(tree))
        self.acceptance_by_depth.add(allowed, accepted)

    def best(self, verify: ForwardCost, context: int, texts: float = 1, acceptance_by_depth: AcceptanceByDepth | None = None,
             ) -> tuple[float, int]:
        """(seconds for each token, depth) at the depth that is fastest; luck: the text's own."""
        fixed, each = self._terms(verify, context, texts)
        reached = (acceptance_by_depth or self.acceptance_by_depth).reached()[: max(1, self._deepest)]
        if not reached:
            return fixed, 0
        tokens, choices = 1.0, []
        for depth, probability in enumerate(reached, 1):
            tokens += probability
            choices.append(((fixed + each * depth) / tokens, depth))
        return min(choices)

    def seconds(self, verify: ForwardCost, context: int, depth: int, texts: float = 1) -> float:
        """Of a step that drafts `depth` deep, among so many texts."""
        fixed, each = self._terms(verify, context, texts)
        return fixed + each * depth

    def _terms(self, verify: ForwardCost, context: int, texts: float) -> tuple[float, float]:
        """Of a step: what it takes without a draft, and what each level of the draft adds."""
        whole, row = verify.terms(context, texts)
        shared = verify.shared(texts)
        return (whole + row * self._rows.base + shared * self._draft.base,
                row * self._rows.slope + shared * self._draft.slope)


class SharedStatistics:
    """What all texts of an engine have learned of its drafters. Texts are written by one thread at a time.

    weights  tokens of context whose cache is as large as the model's weights
    """

    def __init__(self, weights: float = 1.0) -> None:
        self.verify = ForwardCost(weights)
        self.seconds = 0.0  # of all texts
        self.lost = 0.0  # of them, on probes of drafters of which little was known; negative where they gained
        self.probed: defaultdict[str, float] = defaultdict(float)  # when a drafter was probed last, by these seconds
        self._candidates: dict[str, Candidate] = {}
        self._claims: dict[str, int] = {}  # steps of all at which a text began with the first try
        self._steps = 0

    def candidate(self, name: str, deepest: int) -> Candidate:
        """What is known of this drafter, if only that it may draft so deep."""
        return self._candidates.setdefault(name, Candidate(deepest))

    def add(self, name: str, allowed: int, tree: Tree, accepted: int, draft_seconds: float) -> None:
        """See `Candidate.add`."""
        self._steps += 1
        self._candidates[name].add(allowed, tree, accepted, draft_seconds)

    def claim(self, name: str) -> bool:
        """Whether a text may try what nobody has tried: one of them does, and tells the others.

        Where tries gain, drafting pays and the rest is tried at once; where they lose, each waits for its time.
        """
        is_new = not self._candidates[name].steps and self._steps >= self._claims.get(name, -_CLAIM) + _CLAIM
        if not is_new or not self.may_lose():
            return False
        self._claims[name] = self._steps
        return True

    def may_lose(self) -> bool:
        """Whether there is time to learn more of those of which little is known."""
        return self.lost <= _EARLY * self.seconds
