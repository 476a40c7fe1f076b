"""How the drafter `auto` (longdraft/drafters/auto/drafter.py) decides between its candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import cycle

import numpy as np

from longdraft.drafters.auto.knowledge import Delivery, Rating, SharedKnowledge
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.speculation.routine import CostClock

_ROWS = np.arange(1 + AUTO_SETTINGS.max_rows, dtype=np.float64)
_SIZES = np.array([rows.bit_length() for rows in range(1 + AUTO_SETTINGS.max_rows)])  # forwards of a size share a pace
_INTERRUPTED = 3.0  # times the expected seconds: a forward that takes longer counts as one that takes so long
_NOISE = 0.05  # of a step: a draft that takes less does not tell that its costs are off
_SHARING_RATE = 0.02  # how much of the share of requests that verify together is taken over at once
_BETWEEN_RATE = 0.05  # how much of the seconds between two steps is taken over at once


class Selector:
    """Decides which candidate drafts next, and how deep, for one request. The first candidate is plain decoding."""

    def __init__(self, shared: SharedKnowledge, clock: CostClock, context: Context, watched: Collection[str] = ()
                 ) -> None:
        """watched: candidates of which outcomes arrive while others draft, so that they need no probes"""
        self._shared, self._clock, self._watched = shared, clock, watched
        self._plain, *others = shared.candidates
        self._turns = cycle(others or [self._plain])
        self.turn = self._plain  # the candidate that was rated last
        own = {id(known.acceptance): known.acceptance.of_a_request() for known in shared.candidates.values()}
        self._acceptance = {name: own[id(known.acceptance)] for name, known in shared.candidates.items()}
        self._deliveries = {name: Delivery() for name in shared.candidates}
        self._promises: dict[str, float] = {}  # seconds for each token, as the model of costs says
        self._ratings: dict[str, Rating] = {}
        self._next_decision = 0.0  # by the clock
        self._num_known, self._batch_size = shared.num_known, clock.batch_size  # at the latest decision
        self._probe_steps = 0  # that are left to the current probe
        self._step_loss = 0.0  # seconds that each of its steps was expected to lose
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

    @property
    def has_news(self) -> bool:
        """Whether other requests got to know a candidate, or joined or left, since the latest decision."""
        return self._num_known != self._shared.num_known or self._batch_size != self._clock.batch_size

    def is_due(self, num_steps: int, now: float) -> bool:
        """Whether to decide after this step. now: by the clock"""
        if self.is_probing or self.has_news:
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
        return min(deepest, 2 << min(8, self._shared.candidates[self.active].acceptance.steps))

    def _deepest(self) -> int:
        """How deep tokens pay together if they are certain. One row can be dear: the first that reads the weights
        again."""
        most = min(AUTO_SETTINGS.max_depth, len(self._steps) - 2)
        gain = self._promised - self._token_seconds
        return 1 + int((gain * np.arange(1, most + 1) - self._steps[2 : most + 2]).argmax())

    @property
    def least_probability(self) -> float:
        """A further token pays if it is accepted with this probability: if it takes the seconds of a token that is
        written, times that."""
        rating = self._ratings[self.active]
        deep = max(1, min(rating.depth, len(self._steps) - 2))
        row = float(self._steps[1 + deep] - self._steps[1]) / deep
        return (self._token_seconds + row) / self._promised

    @property
    def _promised(self) -> float:
        """Seconds for each token of the active candidate, as costs and acceptance say. It may deliver less, but that
        does not make a deeper draft worth while."""
        return self._promises[self.active]

    @property
    def _token_seconds(self) -> float:
        """Seconds of a further token of the active candidate's draft."""
        costs = self._shared.candidates[self.active].costs
        return self._draft_factor(self.active) * costs.token_of(self._clock.batch_size)

    def decide(self, context: Context) -> None:
        """Choose the active candidate."""
        self._look(context)
        self.turn = self._next_turn()
        rated = set(self._ratings) if self.has_news else {self._plain, self._leader, self.active, self.turn}
        for name in rated:
            self._rate(name)
        are_others = self._batch_size != self._clock.batch_size
        self._num_known, self._batch_size = self._shared.num_known, self._clock.batch_size
        if self.is_probing:
            is_promising = self._ratings[self.active].seconds < self._ratings[self._leader].seconds
            self._probe_steps = 0 if are_others and not self._is_near(self.active) else self._probe_steps - 1
            if self.is_probing and (self._reserved > 0 or is_promising):  # bad luck alone does not end a probe
                return
            self._probe_steps = 0
            self._reserve(-self._reserved)
            self._shared.losses.past = max(0.0, self._shared.losses.past)
        if (best := self._best()) not in rated:  # its rating may be old
            self._rate(best)
            best = self._best()
        if best == self._plain or self._ratings[best].seconds < (
                AUTO_SETTINGS.switch_ratio * self._ratings[self._leader].seconds):
            self._leader = best
        self.active = self._leader
        if self.turn != self._leader:
            self._probe(self.turn)

    def _next_turn(self) -> str:
        """The candidate to rate, one at a time: rating all would cost a part of a short step. Every other time plain
        decoding, if it could be the fastest: only its steps tell whether the machine is slow, or forwards of drafts are
        dearer than their costs. Else, every other time one that may well be the fastest and whose drafts were not
        timed."""
        plain, leader = self._ratings[self._plain], self._ratings[self._leader]
        if self._plain not in (self._leader, self.turn) and plain.seconds <= AUTO_SETTINGS.doubt * leader.seconds:
            return self._plain
        untimed = [name for name in self._ratings
                   if self._is_near(name) and not self._is_timed(name) and name not in self._watched]
        if not untimed or self.turn in untimed:
            return next(self._turns)
        return min(untimed, key=lambda name: self._ratings[name].seconds)

    def could_lead(self, name: str) -> bool:
        """Whether a candidate would be the fastest if all its guesses were right, as far as its costs are known."""
        return name == self.active or self._ratings[name].least <= self._ratings[self._leader].seconds

    def _is_near(self, name: str) -> bool:
        """Whether a candidate may well be the fastest."""
        return self._ratings[name].seconds <= AUTO_SETTINGS.near * self._ratings[self._leader].seconds

    def learn(self, name: str, tree: Tree, allowed: int, accepted: int) -> None:
        """The outcome of a draft of a candidate, which could draft `allowed` deep."""
        known = self._shared.candidates[name]
        known.add(tree, allowed, accepted)
        self._shared.num_known += known.acceptance.steps == AUTO_SETTINGS.first_steps
        self._acceptance[name].add(allowed, accepted)

    def spend(self, tokens: int, rows: int, step: float, drafted: int, draft: float, is_typical: bool, between: float,
              steps: int = 1) -> None:
        """A step wrote `tokens` tokens. It took `step` seconds with so many rows, after `draft` seconds for a draft
        `drafted` tokens deep. is_typical: the draft did nothing else. between: seconds since the step before. steps: so
        many steps did all this"""
        shared, pace = self._shared, self._shared.pace
        found = min(between / steps / pace.machine, float(self._forwards[1]))  # an interrupted host counts little
        rate = _BETWEEN_RATE if shared.between else 1.0
        shared.between = max(0.0, shared.between + rate * (found - shared.between))
        is_expected = self._batch_size == self._clock.batch_size  # else costs were reckoned for other forwards
        if rows < len(self._steps) and is_expected:
            expected = self._expected(rows)
            pace.add(self._forward_kind(rows.bit_length()), step / steps, expected, is_forward=True)
            step = min(step, steps * _INTERRUPTED * expected * pace.machine)
        if is_typical and is_expected and not self.is_plain:
            kind, costs = self._draft_kind(self.active), shared.candidates[self.active].costs
            pace.begin(kind, factor := self._draft_factor(self.active))
            pace.add(kind, draft, factor * costs.at(drafted, self._clock.together), slack=_NOISE * step)
            shared.num_known += pace.times(kind) == AUTO_SETTINGS.enough_times
        seconds = (step + draft + between) / pace.machine  # on a machine as fast as it was when costs were measured
        shared.seconds += seconds
        if self.is_probing:
            loss = seconds - tokens * self._ratings[self._leader].seconds
            known = loss if is_typical else min(loss, self._step_loss)  # a drafter's first step reads the whole text
            self._reserve(-known)
            shared.losses.past += loss
            shared.candidates[self.active].losses.past += max(0.0, loss)
        elif is_typical and not self.is_plain:  # drafts of probes are shorter than the rated ones
            self._deliveries[self.active].add(seconds, tokens * self._promises[self.active])

    def _expected(self, rows: int) -> float:
        """Seconds of a forward with so many rows of this request, which as many requests shared as the latest one."""
        sharers, num_requests = self._clock.sharers, self._clock.batch_size
        if num_requests == 1 or (rows == 1 and sharers == num_requests):  # as `_look` expects
            return float(self._forwards[rows])
        if rows > 1:
            self._shared.sharing += _SHARING_RATE * (sharers / num_requests - self._shared.sharing)
        return float(self._factors[rows] * self._shared.forward.at([rows], self._length, sharers, num_requests)[0])

    def num_guesses(self, reach: Sequence[float]) -> int:
        """How many of the likeliest guesses are worth their rows. reach: P(guess becomes text), falling"""
        most = min(len(reach), len(self._steps) - 2)
        if not most:
            return 0
        gain = np.cumsum(reach[:most]) * self._promised - self._steps[2 : most + 2]
        best = int(gain.argmax())
        return best + 1 if gain[best] > -self._steps[1] else 0

    def _look(self, context: Context) -> None:
        """Seconds of a step without its draft, by rows, after the text as it is now."""
        pace, factors = self._shared.pace, list[float]()
        for size, kind in enumerate(map(self._forward_kind, range(1 + AUTO_SETTINGS.max_rows.bit_length()))):
            # Several rows that were not timed are expected to be as far off as fewer of them.
            factors.append(factors[-1] if size > 2 and kind not in pace else pace[kind])
        self._factors, self._length = np.array(factors)[_SIZES], len(context)
        num_requests, sharers = self._clock.batch_size, np.full(len(_SIZES), float(self._clock.batch_size))
        sharers[2:] = max(1.0, self._shared.sharing * num_requests)
        self._forwards = self._factors * self._shared.forward.at(_ROWS, self._length, sharers, num_requests)
        several = self._forwards[2:]  # noise only adds to their times: more rows take no less
        np.minimum.accumulate(several[::-1], out=several[::-1])
        self._steps = self._forwards + self._shared.between

    def _forward_kind(self, size: int) -> tuple[object, ...]:
        return size, self._clock.batch_size > 1

    def _draft_kind(self, name: str) -> tuple[object, ...]:
        return name, self._clock.batch_size > 1

    def _draft_factor(self, name: str) -> float:
        """For the measured costs. Where drafts of several requests share forwards, each drafted token is a step of the
        host: what that comes to is not known before they have drafted. A candidate that was not timed is expected to be
        as far off as another one of its model."""
        shared, kind = self._shared, self._draft_kind(name)
        if kind in shared.pace:
            return shared.pace[kind]
        kinds = (self._draft_kind(other) for other, known in shared.candidates.items()
                 if known.acceptance is shared.candidates[name].acceptance)
        return next((shared.pace[other] for other in kinds if other in shared.pace), 1.0)

    def _rate(self, name: str) -> None:
        if name == self._plain:
            plain = float(self._steps[1]) * (AUTO_SETTINGS.batch_ratio if self._clock.batch_size > 1 else 1.0)
            self._ratings[name] = Rating(plain, 0, plain, 1.0, (plain, 1.0))
        else:
            rating = self._shared.candidates[name].rate(
                self._steps, self._draft_factor(name), self._acceptance[name].reached(), self._clock.batch_size)
            error = self._deliveries[name].error(float(self._steps[1]))
            self._promises[name], self._ratings[name] = rating.seconds, rating._replace(seconds=rating.seconds * error)

    def _is_trusted(self, name: str) -> bool:
        """Whether the acceptance of a candidate is known well enough to choose it."""
        return name == self._plain or self._shared.candidates[name].acceptance.steps >= AUTO_SETTINGS.first_steps

    def _best(self) -> str:
        return min(filter(self._is_trusted, self._ratings), key=self._ratings.__getitem__)

    def _is_timed(self, name: str) -> bool:
        """Whether the drafts of a candidate were timed often enough since the engine began."""
        return name == self._plain or self._shared.pace.times(self._draft_kind(name)) >= AUTO_SETTINGS.enough_times

    def _doubt(self, name: str) -> float:
        """How many times too high the costs of a candidate may be. A time corrects them by half, as `Pace` does."""
        times = self._shared.pace.times(self._draft_kind(name))
        return float(AUTO_SETTINGS.doubt ** (1 / (1 + times)))

    def _probe(self, name: str) -> None:
        """Probe a candidate if it could be the fastest. If only its costs speak against that, check them."""
        leader, rating = self._ratings[self._leader], self._ratings[name]
        if name in self._watched:
            return
        if self.could_lead(name) or name == self._plain:
            steps = AUTO_SETTINGS.probe_steps if self._is_trusted(name) else AUTO_SETTINGS.first_steps
            self._begin_probe(name, steps, rating.tokens * (rating.seconds - leader.seconds))
        if not self.is_probing and not self._is_timed(name) and rating.least <= self._doubt(name) * leader.seconds:
            seconds, tokens = rating.short
            self._begin_probe(name, AUTO_SETTINGS.check_steps, seconds - tokens * leader.seconds, depth=2)

    def _begin_probe(self, name: str, steps: int, loss: float, depth: int = AUTO_SETTINGS.max_depth) -> None:
        """Probe a candidate if what that may lose is within the budget.

        loss   seconds, expected of each step
        depth  of its drafts at most
        """
        shared, plain = self._shared, self._ratings[self._plain].seconds
        self._step_loss = max(AUTO_SETTINGS.least_loss * plain, loss) * (
            AUTO_SETTINGS.batch_loss if self._clock.batch_size > 1 else 1.0)
        loss = steps * self._step_loss
        budget = AUTO_SETTINGS.probe_budget * shared.seconds
        if not self._is_trusted(name):
            budget += AUTO_SETTINGS.allowance * plain
        own = shared.candidates[name].losses.seconds + loss
        is_hopeful = (self._ratings[name].seconds < self._ratings[self._leader].seconds
                      and own <= AUTO_SETTINGS.hopeful_budget * shared.seconds)
        if name == self._plain:  # what drafts are compared with has a budget of its own
            is_hopeful = own <= budget + AUTO_SETTINGS.allowance * plain
        if is_hopeful or shared.losses.seconds + loss <= budget:
            self.active, self._probe_steps, self._probe_depth = name, steps, depth
            if not is_hopeful:
                self._deliveries[name].forget_half()
            self._reserve(loss)

    @property
    def _reserved(self) -> float:
        """Seconds that are left to the current probe."""
        return self._shared.losses.reserved.get(self, 0.0)

    def _reserve(self, seconds: float) -> None:
        """Reserve so many more seconds for the current probe, so that no other request spends them meanwhile."""
        left = self._reserved + seconds
        for account in (self._shared, self._shared.candidates[self.active]):
            account.losses.reserved[self] = left
