"""What the requests of an engine know of the candidates of `auto`: costs, acceptance, how fast the machine is now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from longdraft.drafters.auto.acceptance import AcceptanceByDepth
from longdraft.drafters.auto.costs import Costs, DraftCosts, FloatArray, ForwardCosts
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.request.tree import Tree

_OUTLIER = 3.0  # a measured time counts as at most this many times the expected one, and at least 1 / 3 of it
_MACHINE_RATE, _KIND_RATE = 0.2, 0.1  # how much of a ratio is taken over at once
_ENOUGH, _TOLERANCE = 100, 1.5  # pieces of work after which a factor beyond this one means that costs are off


class Pace:
    """Measured seconds over expected seconds, for each kind of work, relative to how fast the machine is now.

    A machine that is busy with other work makes all kinds slower, and that changes no decision. How fast it is now is
    seen in the latest forwards. What a kind deviates from them in the long run is the error of its costs. A forward
    tells that only after a forward of another kind: in a row of the same kind, all that changes is the machine.

    machine  factor for the expected seconds of all kinds
    """

    def __init__(self) -> None:
        self.machine = 1.0
        self._num_forwards = 0
        self._latest: object = None  # kind of the latest forward
        self._of: dict[object, float] = {}
        self._counts: defaultdict[object, int] = defaultdict(int)
        self._telling: defaultdict[object, int] = defaultdict(int)

    def __getitem__(self, kind: object) -> float:
        """Factor for the expected seconds of this kind of work."""
        return self._of.get(kind, 1.0)

    def __contains__(self, kind: object) -> bool:
        """Whether work of this kind was timed."""
        return kind in self._of

    def begin(self, kind: object, factor: float) -> None:
        """Expect this factor of a kind that was not timed."""
        self._of.setdefault(kind, factor)

    def times(self, kind: object) -> int:
        """How often work of this kind was timed."""
        return self._counts[kind]

    def add(self, kind: object, measured: float, expected: float, *, is_forward: bool = False, slack: float = 0.0
            ) -> None:
        """A piece of work took `measured` seconds. expected: this kind's factor included

        slack  seconds of noise, which both may have besides. Work that takes less does not tell that its costs are off
        """
        expected *= self.machine
        ratio = min(_OUTLIER, max(1 / _OUTLIER, (measured + slack) / (expected + slack)))
        self._telling[kind] += expected > slack
        rate = _KIND_RATE
        if not is_forward or kind != self._latest:  # the first ones tell much
            self._counts[kind] += 1
            rate = max(rate, 1 / (1 + self._counts[kind]))
        if is_forward:
            rate *= self._latest not in (None, kind)
            self._num_forwards += 1
            self.machine *= ratio ** (max(_MACHINE_RATE, 1 / (1 + self._num_forwards)) * (1 - rate))
            self._latest = kind
        self._of[kind] = self[kind] * ratio ** rate

    @property
    def is_off(self) -> bool:
        """Whether some kind of work takes much longer, or shorter, than its costs say."""
        return any(self._telling[kind] >= _ENOUGH and not 1 / _TOLERANCE < factor < _TOLERANCE
                   for kind, factor in self._of.items())


class Rating(NamedTuple):
    """What to expect of a candidate.

    seconds  for each token at its best depth
    depth    that depth; 0 for plain decoding
    least    seconds for each token if all guesses were right
    tokens   expected of a step
    short    seconds of a step with a draft of two tokens, and the tokens expected of it
    """

    seconds: float
    depth: int
    least: float
    tokens: float
    short: tuple[float, float]


class Guesser(NamedTuple):
    """What guesses for a candidate.

    model  candidates of one model are right equally often
    prior  share of right guesses to expect before it has drafted
    """

    model: str
    prior: float


class Losses:
    """Seconds that probes lost, and those that requests reserved for the probes that they make now. What a request
    reserved goes with it if it ends during its probe."""

    def __init__(self) -> None:
        self.past = 0.0
        self.reserved = WeakKeyDictionary[object, float]()

    @property
    def seconds(self) -> float:
        return self.past + sum(self.reserved.values())


class Candidate:
    """What the requests of an engine know of one drafter.

    costs       as they were measured on this machine
    acceptance  of its guesses; candidates that guess with the same model share it
    """

    def __init__(self, costs: DraftCosts, acceptance: AcceptanceByDepth) -> None:
        self.costs = costs
        self.acceptance = acceptance
        self.losses = Losses()  # by its probes
        self._depths = np.arange(1.0, 1 + (costs.depth or AUTO_SETTINGS.max_depth))
        self._nodes = costs.nodes  # guesses that are verified, for each token of depth

    def add(self, tree: Tree, allowed: int, accepted: int) -> None:
        """A step that could draft `allowed` deep and verified `tree`."""
        self.acceptance.add(allowed, accepted)
        self._nodes += 0.05 * ((len(tree) - 1) / max(1, allowed) - self._nodes)

    def rate(self, steps: FloatArray, draft_factor: float, reached: list[float], requests: int = 1) -> Rating:
        """steps: seconds of a step without its draft, by rows from 0 on; draft_factor: of the seconds of a draft;
        reached: P(1), P(2), ...; requests: that draft together"""
        depths, token = self._depths, self.costs.token_of(requests)
        rows = np.minimum(len(steps) - 1, (1.5 + self._nodes * depths).astype(np.int64))
        seconds = steps[rows] + draft_factor * (self.costs.base + token * depths)
        tokens = 1 + np.cumsum(reached[: len(depths)])
        best = int((seconds / tokens).argmin())
        two = min(2, len(depths)) - 1
        return Rating(float(seconds[best] / tokens[best]), best + 1, float((seconds / (1 + depths)).min()),
                      float(tokens[best]), (float(seconds[two]), float(tokens[two])))


class Delivery:
    """What a candidate delivers in one request, beside what its rating promises: the seconds that its steps took, and
    the seconds that its tokens should have taken. Whatever is wrong with a rating shows here."""

    def __init__(self) -> None:
        self._spent = self._promised = 0.0
        self._prior = AUTO_SETTINGS.delivery_prior  # what is left of it

    def add(self, spent: float, promised: float) -> None:
        decay = AUTO_SETTINGS.delivery_decay
        self._spent, self._promised = decay * self._spent + spent, decay * self._promised + promised
        self._prior *= decay

    def forget_half(self) -> None:
        """It is tried again: the latest steps shall decide."""
        self._spent, self._promised = self._spent / 2, self._promised / 2

    def error(self, plain: float) -> float:
        """Factor for the rated seconds, 1 or more. plain: seconds of a step of plain decoding"""
        prior = self._prior * plain
        return max(1.0, (self._spent + prior) / (self._promised + prior))


class SharedKnowledge:
    """What the requests of an engine know, and what their probes may lose. One thread runs the requests of an engine.

    weights_in_tokens  tokens of context whose KV cache is as large as the model's weights
    between            seconds of a request between two steps: its events and their text
    sharing            share of the requests of a batch that verify drafts in one forward, while others still draft
    num_known          how often the acceptance or the costs of a candidate became known: then all requests decide anew
    """

    def __init__(self, weights_in_tokens: float = 1.0) -> None:
        self.forward = ForwardCosts.by_size(weights_in_tokens)
        self.candidates: dict[str, Candidate] = {}
        self.pace = Pace()
        self.between = 0.0
        self.sharing = 1.0
        self.num_known = 0
        self.seconds = 0.0  # of all steps
        self.losses = Losses()  # by all probes

    def begin(self, costs: Costs, guessers: Mapping[str, Guesser]) -> None:
        """Take over the measured costs. guessers: of each candidate"""
        self.forward = costs.forward
        of_model = {model: AcceptanceByDepth(AUTO_SETTINGS.max_depth, prior) for model, prior in guessers.values()}
        self.candidates = {name: Candidate(drafts, of_model[guessers[name].model])
                           for name, drafts in costs.drafts.items()}
