"""What the drafter `auto` (longdraft/drafters/auto.py) knows of its candidates, and how it decides between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.core import Context
from longdraft.drafters.acceptance import AcceptanceByDepth
from longdraft.drafters.auto_settings import AUTO_SETTINGS
from longdraft.drafters.costs import Costs, DraftCosts, ForwardCosts, Pace
from longdraft.model.routine import CostClock
from longdraft.tree import Tree

_SIZES = [rows.bit_length() for rows in range(1 + AUTO_SETTINGS.max_rows)]  # forwards of a size share a pace
_INTERRUPTED = 3.0  # times the expected seconds: a forward that takes longer counts as one that takes so long
_NOISE = 0.05  # of a step: a draft that takes less does not tell that its costs are off

FloatArray = NDArray[np.float64]


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


class Candidate:
    """What the requests of an engine know of one drafter.

    costs  as they were measured on this machine
    prior  share of right guesses to expect before it has drafted
    """

    def __init__(self, costs: DraftCosts, prior: float) -> None:
        self.costs = costs
        self.acceptance = AcceptanceByDepth(AUTO_SETTINGS.max_depth, prior)
        self.steps = 0
        self.lost = 0.0  # seconds, by its probes
        self._nodes = costs.nodes  # guesses that are verified, for each token of depth

    def add(self, tree: Tree, allowed: int, accepted: int) -> None:
        """A step that could draft `allowed` deep and verified `tree`."""
        self.steps += 1
        self.acceptance.add(allowed, accepted)
        self._nodes += 0.05 * ((len(tree) - 1) / max(1, allowed) - self._nodes)

    def rate(self, steps: FloatArray, draft_factor: float, reached: list[float]) -> Rating:
        """steps: seconds of a step without its draft, by rows from 0 on; draft_factor: of the seconds of a draft;
        reached: P(1), P(2), ..."""
        depths = np.arange(1, 1 + (self.costs.depth or AUTO_SETTINGS.max_depth))
        rows = np.minimum(len(steps) - 1, 1 + np.rint(self._nodes * depths)).astype(np.int64)
        seconds = steps[rows] + draft_factor * (self.costs.base + self.costs.token * depths)
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
    """

    def __init__(self, weights_in_tokens: float = 1.0) -> None:
        self.forward = ForwardCosts.by_size(weights_in_tokens)
        self.candidates: dict[str, Candidate] = {}
        self.pace = Pace()
        self.seconds = 0.0  # of all steps
        self.lost = 0.0  # by probes, and reserved for those that are being made

    def begin(self, costs: Costs, priors: Mapping[str, float]) -> None:
        """Take over the measured costs. priors: share of right guesses to expect of each candidate"""
        self.forward = costs.forward
        self.candidates = {name: Candidate(draft, priors[name]) for name, draft in costs.drafts.items()}


class Selector:
    """Decides which candidate drafts next, and how deep, for one request. The first candidate is plain decoding."""

    def __init__(self, shared: SharedKnowledge, clock: CostClock, context: Context, watched: Collection[str] = ()
                 ) -> None:
        """watched: candidates of which outcomes arrive while others draft, so that they need no probes"""
        self._shared, self._clock, self._watched = shared, clock, watched
        self._plain, *others = shared.candidates
        self._turns = cycle(others or [self._plain])
        self.turn = self._plain  # the candidate that was rated last
        self._acceptance = {name: known.acceptance.of_a_request() for name, known in shared.candidates.items()}
        self._deliveries = {name: Delivery() for name in shared.candidates}
        self._promises: dict[str, float] = {}  # seconds for each token, as the model of costs says
        self._ratings: dict[str, Rating] = {}
        self._next_decision = 0.0  # by the clock
        self._probe_steps, self._reserved = 0, 0.0  # steps and seconds that are left to the current probe
        self._probe_depth = AUTO_SETTINGS.max_depth  # of its drafts at most
        self._look(context)
        for name in shared.candidates:
            self._rate(name)
        self.active = self._leader = self._best()  # the leader drafts while nothing is probed
        for name in sorted(self._ratings, key=self._ratings.__getitem__):
            if not self.is_probing and not self._is_trusted(name):
                self._probe(name)

    @property
    def is_probing(self) -> bool:
        return self._probe_steps > 0

    @property
    def is_plain(self) -> bool:
        """Whether plain decoding is active."""
        return self.active == self._plain

    def is_due(self, num_steps: int, now: float) -> bool:
        """Whether to decide after this step. now: by the clock"""
        if self.is_probing:
            return True
        every = AUTO_SETTINGS.steps_per_decision if self.is_plain else AUTO_SETTINGS.drafts_per_decision
        return num_steps % every == 0 and now >= self._next_decision

    def postpone(self, began: float) -> None:
        """A decision that began then is done. The next one waits until decisions take a small part of the time."""
        now = self._clock()
        self._next_decision = now + (now - began) / AUTO_SETTINGS.decision_share

    def depth(self, ends_itself: bool) -> int:
        """How deep the active candidate drafts. Its first drafts are short: they may all be wrong.

        ends_itself: its chains end where a further token does not pay (`least_probability`)
        """
        deepest = self._deepest() if ends_itself else self._ratings[self.active].depth
        if self.is_probing:
            deepest = min(deepest, self._probe_depth)
        return min(deepest, 2 << min(8, self._shared.candidates[self.active].steps))

    def _deepest(self) -> int:
        """How deep tokens pay together if they are certain. One row can be dear: the first that reads the weights
        again."""
        most = min(AUTO_SETTINGS.max_depth, len(self._steps) - 2)
        gain = self._ratings[self.active].seconds - self._token_seconds
        return 1 + int((gain * np.arange(1, most + 1) - self._steps[2 : most + 2]).argmax())

    @property
    def least_probability(self) -> float:
        """A further token pays if it is accepted with this probability: if it takes the seconds of a token that is
        written, times that."""
        rating = self._ratings[self.active]
        deep = max(1, min(rating.depth, len(self._steps) - 2))
        row = float(self._steps[1 + deep] - self._steps[1]) / deep
        return (self._token_seconds + row) / rating.seconds

    @property
    def _token_seconds(self) -> float:
        """Seconds of a further token of the active candidate's draft."""
        return self._draft_factor(self.active) * self._shared.candidates[self.active].costs.token

    def decide(self, context: Context) -> None:
        """Choose the active candidate."""
        self._look(context)
        self.turn = next(self._turns)  # one at a time: rating all would cost a part of a short step
        for name in {self._plain, self._leader, self.active, self.turn}:
            self._rate(name)
        if self.is_probing:
            self._probe_steps -= 1
            is_promising = self._ratings[self.active].seconds < self._ratings[self._leader].seconds
            if self.is_probing and (self._reserved > 0 or is_promising):  # bad luck alone does not end a probe
                return
            self._probe_steps = 0
            self._shared.lost = max(0.0, self._shared.lost - self._reserved)
        self._rate(self._best())  # its rating may be old
        best = self._best()
        if best == self._plain or self._ratings[best].seconds < (
                AUTO_SETTINGS.switch_ratio * self._ratings[self._leader].seconds):
            self._leader = best
        self.active = self._leader
        if self.turn != self._leader:
            self._probe(self.turn)

    def learn(self, name: str, tree: Tree, allowed: int, accepted: int) -> None:
        """The outcome of a draft of a candidate, which could draft `allowed` deep."""
        self._shared.candidates[name].add(tree, allowed, accepted)
        self._acceptance[name].add(allowed, accepted)

    def spend(self, tokens: int, rows: int, step: float, drafted: int, draft: float, is_typical: bool, steps: int = 1
              ) -> None:
        """A step wrote `tokens` tokens. It took `step` seconds with so many rows, after `draft` seconds for a draft
        `drafted` tokens deep. is_typical: the draft did nothing else. steps: so many steps did all this"""
        shared, pace = self._shared, self._shared.pace
        if rows < len(self._steps):
            expected = float(self._steps[rows])
            pace.add(self._forward_kind(_SIZES[rows]), step / steps, expected, is_forward=True)
            step = min(step, steps * _INTERRUPTED * expected * pace.machine)
        if is_typical and not self.is_plain:
            expected = self._draft_factor(self.active) * shared.candidates[self.active].costs.at(drafted)
            pace.add(self._draft_kind(self.active), draft, expected, slack=_NOISE * step)
        seconds = (step + draft) / pace.machine  # on a machine that is as fast as it was when costs were measured
        shared.seconds += seconds
        if self.is_probing:
            loss = seconds - tokens * self._ratings[self._leader].seconds
            self._reserved -= loss
            shared.candidates[self.active].lost += max(0.0, loss)
        elif is_typical and not self.is_plain:  # drafts of probes are shorter than the rated ones
            self._deliveries[self.active].add(seconds, tokens * self._promises[self.active])

    def num_guesses(self, reach: Sequence[float]) -> int:
        """How many of the likeliest guesses are worth their rows. reach: P(guess becomes text), falling"""
        most = min(len(reach), len(self._steps) - 2)
        if not most:
            return 0
        gain = np.cumsum(reach[:most]) * self._ratings[self.active].seconds - self._steps[2 : most + 2]
        best = int(gain.argmax())
        return best + 1 if gain[best] > -self._steps[1] else 0

    def _look(self, context: Context) -> None:
        """Seconds of a step without its draft, by rows, after the text as it is now."""
        pace, factors = self._shared.pace, list[float]()
        for size, kind in enumerate(map(self._forward_kind, range(_SIZES[-1] + 1))):
            # Several rows that were not timed are expected to be as far off as fewer of them.
            factors.append(factors[-1] if size > _SIZES[2] and kind not in pace else pace[kind])
        forward, requests = self._shared.forward, self._clock.batch_size
        self._steps = np.take(factors, _SIZES) * forward.at(np.arange(len(_SIZES)), len(context), requests)
        several = self._steps[2:]  # noise only adds to their times: more rows take no less
        np.minimum.accumulate(several[::-1], out=several[::-1])

    def _forward_kind(self, size: int) -> tuple[object, ...]:
        return size, self._clock.batch_size > 1

    def _draft_kind(self, name: str) -> tuple[object, ...]:
        return name, self._clock.batch_size > 1

    def _draft_factor(self, name: str) -> float:
        """For the measured costs. Drafts of several requests share the weights, but each drafted token is a step of the
        host: what that comes to is not known before they have drafted."""
        return self._shared.pace[self._draft_kind(name)]

    def _rate(self, name: str) -> None:
        if name == self._plain:
            plain = float(self._steps[1]) * (AUTO_SETTINGS.batch_ratio if self._clock.batch_size > 1 else 1.0)
            self._ratings[name] = Rating(plain, 0, plain, 1.0, (plain, 1.0))
        else:
            rating = self._shared.candidates[name].rate(
                self._steps, self._draft_factor(name), self._acceptance[name].reached())
            error = self._deliveries[name].error(float(self._steps[1]))
            self._promises[name], self._ratings[name] = rating.seconds, rating._replace(seconds=rating.seconds * error)

    def _is_trusted(self, name: str) -> bool:
        """Whether the acceptance of a candidate is known well enough to choose it."""
        return name == self._plain or self._shared.candidates[name].steps >= AUTO_SETTINGS.first_steps

    def _best(self) -> str:
        return min(filter(self._is_trusted, self._ratings), key=self._ratings.__getitem__)

    def _is_timed(self, name: str) -> bool:
        """Whether the drafts of a candidate were timed often enough since the engine began."""
        return name == self._plain or self._shared.pace.times(self._draft_kind(name)) >= AUTO_SETTINGS.enough_times

    def _probe(self, name: str) -> None:
        """Probe a candidate if it could be the fastest. If only its costs speak against that, check them."""
        leader, rating = self._ratings[self._leader], self._ratings[name]
        if name in self._watched:
            return
        if rating.least <= leader.seconds or name == self._plain:
            steps = AUTO_SETTINGS.probe_steps if self._is_trusted(name) else AUTO_SETTINGS.first_steps
            self._begin_probe(name, steps, rating.tokens * (rating.seconds - leader.seconds))
        if not self.is_probing and not self._is_timed(name) and rating.least <= AUTO_SETTINGS.doubt * leader.seconds:
            seconds, tokens = rating.short
            self._begin_probe(name, AUTO_SETTINGS.check_steps, seconds - tokens * leader.seconds, depth=2)

    def _begin_probe(self, name: str, steps: int, loss: float, depth: int = AUTO_SETTINGS.max_depth) -> None:
        """Probe a candidate if what that may lose is within the budget.

        loss   seconds, expected of each step
        depth  of its drafts at most
        """
        shared, plain = self._shared, self._ratings[self._plain].seconds
        loss = steps * max(AUTO_SETTINGS.least_loss * plain, loss)
        budget = AUTO_SETTINGS.probe_budget * shared.seconds
        if not self._is_trusted(name):
            budget += AUTO_SETTINGS.allowance * plain
        is_hopeful = self._ratings[name].seconds < self._ratings[self._leader].seconds and (
            shared.candidates[name].lost + loss <= AUTO_SETTINGS.hopeful_budget * shared.seconds)
        if is_hopeful or shared.lost + loss <= budget:
            self.active, self._probe_steps, self._probe_depth, self._reserved = name, steps, depth, loss
            if not is_hopeful:
                self._deliveries[name].forget_half()
            shared.lost += loss
