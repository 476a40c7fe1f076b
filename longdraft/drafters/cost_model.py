"""What drafting costs and brings: the model that `auto` decides with, fitted while writing.

For a candidate c that drafts d tokens deep, behind n tokens of text, where m requests share each forward:

    tokens(c, d)   =  1 + P_c(1) + ... + P_c(d)                        P_c(i): at least i guesses are accepted
    seconds(c, d)  =  forward(rows_c(d), n, m) + share(m) * draft_c(d)

    rows_c(d), draft_c(d)                                              straight lines in d
    forward(r, n, m)  =  t  +  a (W / m + n)  +  b r (W + n)           one request's part of a forward with r rows of it
    share(m)          =  forward(1, 0, m) / forward(1, 0, 1)           a draft's forwards read little but the weights

t is a constant, a the time to read and b the time to multiply. W is the size of the model's weights, in tokens of KV
cache. `auto` takes the candidate and the depth with the fewest seconds(c, d) / tokens(c, d).

All of it is measured on this machine; earlier measurements decay exponentially. Costs belong to the machine: the
requests of an engine share them (`SharedStatistics`). Acceptance belongs to the text: a request starts with that of the
earlier requests (`AcceptanceByDepth`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from longdraft.tree import Tree


@dataclass(frozen=True)
class AutoSettings:
    """The constants of `auto`. They set how fast it learns and what it may spend on that; none changes a text."""

    # Measurements.
    cost_decay: float = 0.97  # weight of earlier costs at each new one: about the last 30 count
    acceptance_decay: float = 0.985  # the same for acceptance, which varies more
    prior_outcomes: float = 4.0  # outcomes that the acceptance expected of a depth weighs as much as
    outlier_factor: float = 3.0  # a cost above this many times the expected one is cut to that: the machine was busy
    trusted_steps: int = 20  # steps after which a candidate's measurements count in full
    seconds_per_request: float = 1e-4  # t: on 2 cores, 60 to 130 microseconds
    variable_share: float = 0.1  # share of a forward's time above t, at least

    # Choice.
    max_depth: int = 16  # deepest draft
    switch_ratio: float = 0.97  # another candidate must take at most this share of the leader's time for each token
    steps_per_decision: int = 3  # while nothing is probed
    steps_per_exploration: int = 32  # every so many steps a draft is deeper than the best depth and not pruned
    exploration_depth: int = 2  # tokens that it is deeper

    # Probes.
    probe_budget: float = 0.01  # share of the time that all probes together may lose
    first_probe_budget: float = 0.05  # share of the time that probes of candidates with few measurements may lose
    probe_steps: int = 4
    first_probe_steps: int = 6  # of a candidate without measurements, the step that takes over included
    hopeless_ratio: float = 2.0  # times the best candidate's time for each token: ends a first probe after two steps
    claim_steps: int = 1000  # steps of all requests for which a first probe belongs to one request

    # Report.
    tokens_per_report: int = 1024  # new tokens over which `choices` of the statistics are counted


AUTO_SETTINGS = AutoSettings()


class LinearCost:
    """y = base + slope * x, both at least 0, fitted by least squares to the latest measurements; 0 before the first.

    slope_share  share of y that depends on x, slope * x / y at the mean x: assumed until measurements at different x
                 are known
    """

    def __init__(self, slope_share: float) -> None:
        self.base = self.slope = 0.0
        self._slope_share = slope_share
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # decayed sums

    def add(self, x: float, y: float) -> None:
        if self._weight > 3 and self._y > 0:
            y = min(y, AUTO_SETTINGS.outlier_factor * self.at(x))
        self._weight, self._x, self._y, self._xx, self._xy = (
            AUTO_SETTINGS.cost_decay * old + new for old, new in
            ((self._weight, 1.0), (self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)))
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if self._weight > 3 and variance > 0.05 and mean_y > 0:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            self._slope_share += 0.5 * (min(1.0, max(0.0, slope * mean_x / mean_y)) - self._slope_share)
        self.base, self.slope = mean_y, 0.0
        if mean_x:
            self.base, self.slope = mean_y * (1 - self._slope_share), mean_y * self._slope_share / mean_x

    def at(self, x: float) -> float:
        """The y expected at x."""
        return self.base + self.slope * x


class ForwardCost:
    """Seconds of a forward. For several requests with (rows r, context n) each:

        t * requests  +  a (W + sum of n)  +  b * sum of r (W + n)

    One request's part of it has its own terms, and an equal share of the time to read the weights. So a row costs what
    it adds to the forward, whatever the number of requests. a and b are fitted; t is a constant.

    weights  W: tokens of context whose KV cache is as large as the model's weights
    """

    def __init__(self, weights: float) -> None:
        self._weights = weights
        self._line = LinearCost(0.1)  # a + b x, with y = seconds / what is read, x = what is multiplied / what is read

    def add(self, parts: Sequence[tuple[int, int]], seconds: float) -> None:
        """A measured forward of requests with (rows, context) each."""
        read = self._weights + sum(context for _, context in parts)
        self._add(sum(rows * (self._weights + context) for rows, context in parts), read, seconds, len(parts))

    def add_part(self, rows: int, context: int, requests: float, seconds: float) -> None:
        """One request's part of a measured forward of `requests` requests."""
        self._add(rows * (self._weights + context), self._weights / requests + context, seconds, 1)

    def _add(self, multiplied: float, read: float, seconds: float, requests: int) -> None:
        variable = max(AUTO_SETTINGS.variable_share * seconds, seconds - requests * AUTO_SETTINGS.seconds_per_request)
        self._line.add(multiplied / read, variable / read)

    def terms(self, context: int, requests: float = 1) -> tuple[float, float]:
        """Of one request's part of a forward of `requests` requests: seconds without rows, and seconds for each row."""
        return (AUTO_SETTINGS.seconds_per_request + self._line.base * (self._weights / requests + context),
                self._line.slope * (self._weights + context))

    def at(self, rows: float, context: int, requests: float = 1) -> float:
        """Seconds of one request's part of a forward of `requests` requests."""
        fixed, per_row = self.terms(context, requests)
        return fixed + per_row * rows

    def per_row(self, context: int) -> float:
        """Seconds that each row adds."""
        return self.terms(context)[1]

    def share(self, requests: float) -> float:
        """Cost of a draft when `requests` requests share its forwards, relative to its cost alone."""
        alone = self.at(1, 0) if requests != 1 else 0.0
        return self.at(1, 0, requests) / alone if alone else 1.0


class AcceptanceByDepth:
    """P(at least i guesses are accepted) in steps that may draft i deep or deeper.

    Counted as the share of right guesses at depth i among those whose ancestors were right. A depth with few outcomes
    is expected to do as well as it did in `earlier` requests, else as well as the depth above it; the first depth, as
    well as all depths. Without that, a depth that was never tried would never be tried.

    earlier  the acceptance of all requests, which continues to change
    """

    def __init__(self, max_depth: int, earlier: AcceptanceByDepth | None = None) -> None:
        self._tries = [0.0] * max_depth
        self._hits = [0.0] * max_depth
        self._earlier = earlier

    def of_a_request(self) -> AcceptanceByDepth:
        """The acceptance of one request, which starts as this one's."""
        return AcceptanceByDepth(len(self._tries), self)

    def add(self, allowed: int, accepted: int) -> None:
        """A step that could draft `allowed` deep, of which `accepted` guesses became text."""
        for depth in range(min(allowed, accepted + 1, len(self._hits))):
            self._tries[depth] = AUTO_SETTINGS.acceptance_decay * self._tries[depth] + 1
            self._hits[depth] = AUTO_SETTINGS.acceptance_decay * self._hits[depth] + (depth < accepted)

    def reached(self) -> list[float]:
        """P(1), P(2), ..., falling."""
        found: list[float] = []
        rate, reach = (sum(self._hits) + 0.5) / (sum(self._tries) + 1), 1.0
        expected = self._earlier.rates() if self._earlier else [0.0] * len(self._tries)
        for tries, hits, earlier in zip(self._tries, self._hits, expected, strict=True):
            rate = (hits + AUTO_SETTINGS.prior_outcomes * (earlier or rate)) / (tries + AUTO_SETTINGS.prior_outcomes)
            reach *= rate
            found.append(reach)
        return found

    def rates(self) -> list[float]:
        """P(guess i is right, if its ancestors are); 0 where that was never tried."""
        return [(hits + 0.5) / (tries + 1) if tries else 0.0
                for tries, hits in zip(self._tries, self._hits, strict=True)]


class NodeAcceptance:
    """P(a guess is accepted, if its parent is), by its source, its depth and its rank among its siblings."""

    _DEPTHS, _RANKS = 8, 4  # deeper depths and later ranks are counted as these

    def __init__(self) -> None:
        self._tries: defaultdict[tuple[str, int, int], float] = defaultdict(lambda: 2.0)
        self._hits: defaultdict[tuple[str, int, int], float] = defaultdict(lambda: 1.0)  # 1 of 2 at first: optimistic

    def _kinds(self, tree: Tree) -> list[tuple[str, int, int]]:
        siblings: defaultdict[tuple[int, str], int] = defaultdict(int)
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
                self._tries[kind] = AUTO_SETTINGS.acceptance_decay * self._tries[kind] + 1
                self._hits[kind] = AUTO_SETTINGS.acceptance_decay * self._hits[kind] + (node in accepted)

    def reach(self, tree: Tree) -> list[float]:
        """P(node becomes text), for each node."""
        found: list[float] = []
        for node, kind in enumerate(self._kinds(tree)):
            found.append(found[tree.parents[node]] * self._hits[kind] / self._tries[kind] if node else 1.0)
        return found


class Rating(NamedTuple):
    """What to expect of a candidate: seconds for each token at its best depth, and that depth."""

    seconds: float
    depth: int


class Candidate:
    """Measurements of one drafter, from all requests."""

    def __init__(self, max_depth: int) -> None:
        self.acceptance_by_depth = AcceptanceByDepth(max_depth)
        self.steps = 0
        self.switch_seconds = 0.0  # that the last switch to it took, besides its step
        self._deepest = 0  # depth of its deepest tree
        self._draft = LinearCost(0.5)  # seconds by depth
        self._rows = LinearCost(0.5)  # nodes of the tree by depth

    @property
    def trust(self) -> float:
        """Weight of its measurements, 0 to 1: the first steps may be untypical."""
        return min(1.0, self.steps / AUTO_SETTINGS.trusted_steps)

    def add(self, allowed: int, tree: Tree, accepted: int, draft_seconds: float) -> None:
        """A step that could draft `allowed` deep and verified `tree`. draft_seconds: of a request alone."""
        self.steps += 1
        self._deepest = max(self._deepest, *tree.depths)
        depth = min(allowed, self._deepest)
        if self.trust < 1 and self._draft.at(depth) > AUTO_SETTINGS.outlier_factor * draft_seconds:
            self._draft = LinearCost(0.5)  # the earlier measurements were the outliers: no draft is that fast by chance
        self._draft.add(depth, draft_seconds)
        self._rows.add(depth, len(tree))
        self.acceptance_by_depth.add(allowed, accepted)

    def rate(self, forward: ForwardCost, context: int, requests: float = 1,
             acceptance: AcceptanceByDepth | None = None) -> Rating:
        """The best depth behind `context` tokens, when `requests` requests share forwards.

        acceptance: that of the request; None: that of all requests
        """
        fixed, per_depth = self._terms(forward, context, requests)
        reached = (acceptance or self.acceptance_by_depth).reached()[: max(1, self._deepest)]
        if not reached:
            return Rating(fixed, 0)
        tokens, ratings = 1.0, []
        for depth, probability in enumerate(reached, 1):
            tokens += probability
            ratings.append(Rating((fixed + per_depth * depth) / tokens, depth))
        return min(ratings)

    def seconds(self, forward: ForwardCost, context: int, depth: int, requests: float = 1) -> float:
        """Of a step that drafts `depth` deep."""
        fixed, per_depth = self._terms(forward, context, requests)
        return fixed + per_depth * depth

    def _terms(self, forward: ForwardCost, context: int, requests: float) -> tuple[float, float]:
        """Of a step: seconds without a draft, and seconds that each level of the draft adds."""
        fixed, per_row = forward.terms(context, requests)
        share = forward.share(requests)
        return (fixed + per_row * self._rows.base + share * self._draft.base,
                per_row * self._rows.slope + share * self._draft.slope)


class SharedStatistics:
    """What the requests of an engine have measured. One thread runs the requests of an engine.

    weights  tokens of context whose KV cache is as large as the model's weights
    """

    def __init__(self, weights: float = 1.0) -> None:
        self.forward = ForwardCost(weights)
        self.candidates: dict[str, Candidate] = {}
        self.seconds = 0.0  # of all steps
        self.seconds_lost = 0.0  # on probes of candidates with few measurements; negative where they gained
        self.last_probe: defaultdict[str, float] = defaultdict(float)  # `seconds` at each candidate's last probe
        self._claims: dict[str, int] = {}  # steps of all candidates when a request claimed a first probe

    def candidate(self, name: str, max_depth: int) -> Candidate:
        """The measurements of a drafter that may draft `max_depth` deep."""
        return self.candidates.setdefault(name, Candidate(max_depth))

    def claim_first_probe(self, name: str) -> bool:
        """Whether a request may probe a candidate without measurements; True for one request at a time."""
        steps = sum(candidate.steps for candidate in self.candidates.values())
        is_claimed = name in self._claims and steps < self._claims[name] + AUTO_SETTINGS.claim_steps
        if self.candidates[name].steps or is_claimed or not self.can_lose:
            return False
        self._claims[name] = steps
        return True

    @property
    def can_lose(self) -> bool:
        """Whether further probes of candidates with few measurements are within their budget."""
        return self.seconds_lost <= AUTO_SETTINGS.first_probe_budget * self.seconds
