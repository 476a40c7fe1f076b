"""How the drafter `auto` (longdraft/drafters/auto/drafter.py) decides between its candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from longdraft.drafters.auto.acceptance import AcceptanceByDepth
from longdraft.drafters.auto.observation import Observation
from longdraft.drafters.auto.pace import OUTLIER
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.drafters.auto.shared import MOVING_RATE, Candidate, Rating, SharedStatistics
from longdraft.drafters.auto.step_costs import StepCosts
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.decayed_rate import DecayedRate

_NOISE = 0.05  # of a step: a draft that takes less does not tell that its costs are off


class CandidateOfRequest:
    """A candidate as one request sees it.

    shared      what all requests of the engine share about it
    acceptance  of its guesses in this request; candidates that guess with the same model share it
    rating      the latest
    promised    seconds for each token, as costs and acceptance say. `rating` has those that it delivers
    """

    rating: Rating
    promised: float

    def __init__(self, shared: Candidate, acceptance: AcceptanceByDepth) -> None:
        self.shared = shared
        self.acceptance = acceptance
        self._delivered = DecayedRate(AUTO_SETTINGS.delivery_decay)  # seconds of steps over those of their rating
        self._per_token = DecayedRate(AUTO_SETTINGS.watch_decay)  # as that of `shared`
        self._expected = 0.0  # seconds of the latest step, of a candidate that reads the text alone
        self._trusted_steps = AUTO_SETTINGS.delivery_prior

    def rate(self, steps: StepCosts, draft_factor: float, requests: int) -> None:
        """Whatever is wrong with a rating shows in what the candidate delivers: a factor of 1 or more."""
        self._take(self.shared.rate(steps.steps, draft_factor, self.acceptance.reached(), requests), steps)

    def rate_reader(self, steps: StepCosts) -> None:
        """By its own steps, and by those that its drafts would have made while another candidate drafted."""
        earlier = self.shared.per_token.value(1.0)
        self._take(Rating.of_reader(float(steps.steps[1]) * self._per_token.value(earlier)), steps)

    def _take(self, rating: Rating, steps: StepCosts) -> None:
        weight = self._trusted_steps * float(steps.steps[1])
        self.promised = rating.seconds
        self.rating = rating._replace(seconds=rating.seconds * max(1.0, self._delivered.value(1.0, weight)))

    def count_step(self, seconds: float, plain: float, tokens: int) -> None:
        """A step of a candidate that reads the text alone takes so many seconds, by its costs, and a plain step
        `plain` seconds."""
        self._expected = seconds
        for rate in (self._per_token, self.shared.per_token):
            rate.add(seconds / plain, tokens)

    def deliver(self, seconds: float, tokens: int) -> None:
        """A step took so many seconds for so many tokens."""
        self._delivered.add(seconds, self._expected or tokens * self.promised)
        self._trusted_steps *= AUTO_SETTINGS.delivery_decay

    def try_again(self) -> None:
        """It is probed again: the latest steps shall decide."""
        self._delivered.halve()


@dataclass
class Probe:
    """Some steps with a candidate that does not lead.

    steps  that are left
    loss   seconds that each of them is expected to lose
    depth  of its drafts at most
    """

    steps: int
    loss: float
    depth: int


class Policy:
    """Decides which candidate drafts next, and how deep, for one request. The first candidate is plain decoding.

    active  the candidate that drafts
    turn    the candidate that was rated last
    """

    def __init__(self, shared: SharedStatistics, clock: CostClock, context: Context, watched: Collection[str] = ()
                 ) -> None:
        """watched: candidates of which outcomes arrive while others draft, so that they need no probes"""
        self._shared = shared
        self._clock = clock
        self._watched = watched
        self._plain, *drafters = shared.candidates
        self._turns = cycle(drafters or [self._plain])
        self.turn = self._plain
        own = {id(known.acceptance): known.acceptance.of_a_request() for known in shared.candidates.values()}
        self._candidates = {name: CandidateOfRequest(known, own[id(known.acceptance)])
                            for name, known in shared.candidates.items()}
        self._costs = StepCosts(shared, clock)
        self._next_decision = 0.0  # by the clock
        self._num_known = shared.num_known  # at the latest decision, as the next one
        self._batch_size = clock.batch_size
        self._probe: Probe | None = None
        self._is_overtaken = False
        self._costs.update(len(context))
        for name in self._candidates:
            self._rate(name)
        self._leader = self._best()  # drafts while nothing is probed
        self.active = self._leader
        for name in sorted(self._candidates, key=self._rating):
            if not self.is_probing and not self._is_trusted(name):
                self._consider_probe(name)

    @property
    def is_probing(self) -> bool:
        return self._probe is not None

    @property
    def is_plain(self) -> bool:
        """Whether plain decoding is active."""
        return self.active == self._plain

    @property
    def has_news(self) -> bool:
        """Whether other requests got to know a candidate, or joined or left, or a candidate that is watched overtook
        the leader or fell behind, since the latest decision."""
        return self._num_known != self._shared.num_known or self._batch_has_changed or self._is_overtaken

    @property
    def _batch_has_changed(self) -> bool:
        return self._batch_size != self._clock.batch_size

    # When to decide, and what

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

    def decide(self, context: Context) -> None:
        """Choose the active candidate."""
        self._costs.update(len(context))
        self.turn = self._next_turn()
        rated = set(self._candidates) if self.has_news else {
            self._plain, self._leader, self.active, self.turn, *self._watched}
        for name in rated:
            self._rate(name)
        may_go_on = not self._batch_has_changed or self._is_near(self.active)
        self._num_known = self._shared.num_known
        self._batch_size = self._clock.batch_size
        self._is_overtaken = False
        if self._probe and self._continue_probe(self._probe, may_go_on):
            return
        best = self._best()
        if best not in rated:  # its rating may be old
            self._rate(best)
            best = self._best()
        if best == self._plain or self._seconds(best) < AUTO_SETTINGS.switch_ratio * self._seconds(self._leader):
            self._leader = best
        self.active = self._leader
        if self.turn != self._leader:
            self._consider_probe(self.turn)

    def _next_turn(self) -> str:
        """The candidate to rate, one at a time: rating all would cost a part of a short step. Every other time plain
        decoding, if it could be the fastest: only its steps tell whether the machine is slow, or forwards of drafts are
        dearer than their costs. Else, every other time one that may well be the fastest and whose drafts were not
        timed."""
        if self._plain not in (self._leader, self.turn) and (
                self._seconds(self._plain) <= AUTO_SETTINGS.doubt * self._seconds(self._leader)):
            return self._plain
        untimed = [name for name in self._candidates
                   if self._is_near(name) and not self._is_timed(name) and name not in self._watched]
        if not untimed or self.turn in untimed:
            return next(self._turns)
        return min(untimed, key=self._seconds)

    # Ratings

    def _rate(self, name: str) -> None:
        candidate = self._candidates[name]
        if name == self._plain:
            ratio = AUTO_SETTINGS.batch_ratio if self._clock.batch_size > 1 else 1.0
            candidate.rating = Rating.of_plain(ratio * self._costs.plain)
        elif name in self._watched:
            candidate.rate_reader(self._costs)
        else:
            candidate.rate(self._costs, self._draft_factor(name), self._clock.batch_size)

    def _rating(self, name: str) -> Rating:
        return self._candidates[name].rating

    def _seconds(self, name: str) -> float:
        """Seconds for each token."""
        return self._candidates[name].rating.seconds

    def _best(self) -> str:
        return min(filter(self._is_trusted, self._candidates), key=self._rating)

    def could_lead(self, name: str) -> bool:
        """Whether a candidate would be the fastest if all its guesses were right, as far as its costs are known."""
        return name == self.active or self._rating(name).least <= self._seconds(self._leader)

    def _is_near(self, name: str) -> bool:
        """Whether a candidate may well be the fastest."""
        return self._seconds(name) <= AUTO_SETTINGS.near * self._seconds(self._leader)

    def _is_trusted(self, name: str) -> bool:
        """Whether the acceptance of a candidate is known well enough to choose it."""
        return name == self._plain or (
            self._shared.candidates[name].acceptance.steps >= AUTO_SETTINGS.first_steps)

    def _is_timed(self, name: str) -> bool:
        """Whether the drafts of a candidate were timed often enough since the engine began."""
        return name == self._plain or self._shared.pace.times(self._draft_kind(name)) >= AUTO_SETTINGS.first_steps

    def _draft_kind(self, name: str) -> tuple[str, bool]:
        """The kind of a candidate's drafts, for `Pace`."""
        return name, self._clock.batch_size > 1

    def _draft_factor(self, name: str) -> float:
        """The factor for the measured costs of a candidate's drafts.

        Where drafts of several requests share forwards, each drafted token is a step of the host: what that comes to is
        not known before they have drafted. A candidate that was not timed is expected to be as far off as another one
        of its model.
        """
        pace = self._shared.pace
        if self._draft_kind(name) in pace:
            return pace[self._draft_kind(name)]
        kinds = (self._draft_kind(other) for other, known in self._shared.candidates.items()
                 if known.acceptance is self._shared.candidates[name].acceptance)
        return next((pace[kind] for kind in kinds if kind in pace), 1.0)

    # How deep the active candidate drafts, and how much of its tree is verified

    def depth(self, ends_itself: bool) -> int:
        """How deep the active candidate drafts. Its first drafts are short: they may all be wrong.

        ends_itself: its chains end where a further token does not pay (`least_probability`)
        """
        if self.active in self._watched:
            return AUTO_SETTINGS.max_depth
        deepest = self._deepest() if ends_itself else self._rating(self.active).depth
        if self._probe:
            deepest = min(deepest, self._probe.depth)
        return min(deepest, 2 << min(8, self._shared.candidates[self.active].acceptance.steps))

    def _deepest(self) -> int:
        """How deep tokens pay together if they are certain. One row can be dear: the first that reads the weights
        again."""
        steps = self._costs.steps
        most = min(AUTO_SETTINGS.max_depth, len(steps) - 2)
        gain = self._promised - self._token_seconds
        return 1 + int((gain * np.arange(1, most + 1) - steps[2 : most + 2]).argmax())

    @property
    def least_probability(self) -> float:
        """A further token pays if it is accepted with this probability: if it takes the seconds of a token that is
        written, times that."""
        steps = self._costs.steps
        deep = max(1, min(self._rating(self.active).depth, len(steps) - 2))
        row = float(steps[1 + deep] - steps[1]) / deep
        return (self._token_seconds + row) / self._promised

    def num_guesses(self, name: str, reach: Sequence[float]) -> int:
        """How many of a candidate's likeliest guesses are worth their rows. reach: P(guess becomes text), falling"""
        steps = self._costs.steps
        most = min(len(reach), len(steps) - 2)
        if not most:
            return 0
        gain = np.cumsum(reach[:most]) * self._candidates[name].promised - steps[2 : most + 2]
        best = int(gain.argmax())
        return best + 1 if gain[best] > -steps[1] else 0

    @property
    def _promised(self) -> float:
        """Seconds for each token of the active candidate. It may deliver less, but that does not make a deeper draft
        worth while."""
        return self._candidates[self.active].promised

    @property
    def _token_seconds(self) -> float:
        """Seconds of a further token of the active candidate's draft."""
        costs = self._shared.candidates[self.active].costs
        return self._draft_factor(self.active) * costs.token_of(self._clock.batch_size)

    # What steps tell

    def learn_ahead(self, is_ahead: bool) -> None:
        """Whether the latest steps of plain decoding were computed ahead."""
        self._costs.is_ahead = is_ahead

    def learn(self, name: str, tree: Tree, allowed: int, accepted: int) -> None:
        """The outcome of a draft of a candidate, which could draft `allowed` deep."""
        known = self._shared.candidates[name]
        known.add(tree, allowed, accepted)
        self._shared.num_known += known.acceptance.steps == AUTO_SETTINGS.first_steps
        self._candidates[name].acceptance.add(allowed, accepted)
        if name in self._watched:
            steps = self._costs.steps
            draft = self._draft_factor(name) * known.costs.at(allowed, self._clock.batch_size)
            self._candidates[name].count_step(float(steps[len(tree)]) + draft, float(steps[1]), accepted + 1)
            if self._is_trusted(name):
                self._rate(name)
                if name == self._leader:
                    self._is_overtaken |= self._best() != name
                else:
                    self._is_overtaken |= self._seconds(name) < AUTO_SETTINGS.switch_ratio * self._seconds(self._leader)

    def observe(self, step: Observation) -> None:
        """Count the time of a step of the active candidate."""
        self._count_between(step)
        forward_seconds = step.forward_seconds
        if not self._batch_has_changed:  # else costs were expected of other forwards
            if step.rows < len(self._costs.steps):
                forward_seconds = self._count_forward(step)
            if step.is_typical and not self.is_plain:
                self._count_draft(step, forward_seconds)
        # On a machine as fast as it was when costs were measured:
        seconds = (forward_seconds + step.draft_seconds + step.between_seconds) / self._shared.pace.machine
        self._shared.seconds += seconds
        if self._probe:
            self._count_loss(self._probe, step, seconds)
        elif step.is_typical and not self.is_plain:  # drafts of probes are shorter than the rated ones
            self._candidates[self.active].deliver(seconds, step.tokens)

    def observe_ahead(self, steps: int, ahead: int, seconds: float, latest: float) -> None:
        """Count the time of steps of plain decoding, of which so many were computed ahead.

        seconds  of all of them, with what passes between them
        latest   of the latest one, which was not computed ahead
        """
        shared, costs, machine = self._shared, self._costs, self._shared.pace.machine
        single = float(costs.forwards[1])
        expected = single + (costs.plain - single) * ahead / steps
        if not self._batch_has_changed:  # else costs were expected of other forwards
            each = (seconds - (steps - ahead) * latest) / ahead
            shared.ahead.add(*(shared.pace.ratio(one, single * machine) for one in (each, latest)))
            shared.pace.add_forward(costs.kind(1), seconds / steps, expected)
        shared.seconds += min(seconds / machine, steps * OUTLIER * expected)

    def _count_between(self, step: Observation) -> None:
        shared = self._shared
        seconds = step.between_seconds / step.steps / shared.pace.machine
        seconds = min(max(0.0, seconds), float(self._costs.forwards[1]))  # an interrupted host counts little
        rate = MOVING_RATE if shared.between else 1.0
        shared.between += rate * (seconds - shared.between)
        if step.tokens_before == 1:
            before = seconds if shared.after_plain is None else shared.after_plain
            shared.after_plain = before + MOVING_RATE * (seconds - before)

    def _count_forward(self, step: Observation) -> float:
        """Correct the costs of forwards; returns the step's seconds without an interruption."""
        pace = self._shared.pace
        expected = self._costs.of_latest(step.rows)
        self._costs.count_sharers(step.rows)
        pace.add_forward(self._costs.kind(step.rows.bit_length()), step.forward_seconds / step.steps, expected)
        return min(step.forward_seconds, step.steps * OUTLIER * expected * pace.machine)

    def _count_draft(self, step: Observation, forward_seconds: float) -> None:
        pace = self._shared.pace
        kind = self._draft_kind(self.active)
        factor = self._draft_factor(self.active)
        expected = factor * self._shared.candidates[self.active].costs.at(step.drafted, self._clock.together)
        pace.add_draft(kind, step.draft_seconds, expected, factor, noise=_NOISE * forward_seconds)
        self._shared.num_known += pace.times(kind) == AUTO_SETTINGS.first_steps

    # Probes, and what they may lose

    def _consider_probe(self, name: str) -> None:
        """Probe a candidate if it could be the fastest. If only its costs speak against that, check them."""
        if name in self._watched:
            return
        rating = self._rating(name)
        leader = self._seconds(self._leader)
        if self.could_lead(name) or name == self._plain:
            steps = AUTO_SETTINGS.probe_steps if self._is_trusted(name) else AUTO_SETTINGS.first_steps
            self._begin_probe(name, steps, rating.tokens * (rating.seconds - leader))
        if not self.is_probing and not self._is_timed(name) and rating.least <= self._doubt(name) * leader:
            seconds, tokens = rating.short
            self._begin_probe(name, AUTO_SETTINGS.probe_steps, seconds - tokens * leader, depth=2)

    def _doubt(self, name: str) -> float:
        """How many times too high the costs of a candidate may be. A time corrects them by half, as `Pace` does."""
        times = self._shared.pace.times(self._draft_kind(name))
        return float(AUTO_SETTINGS.doubt ** (1 / (1 + times)))

    def _begin_probe(self, name: str, steps: int, loss: float, depth: int = AUTO_SETTINGS.max_depth) -> None:
        """Probe a candidate if what that may lose is within the budget.

        loss   seconds, expected of each step
        depth  of its drafts at most
        """
        shared = self._shared
        plain = self._seconds(self._plain)
        step_loss = max(AUTO_SETTINGS.least_loss * plain, loss) * (
            AUTO_SETTINGS.batch_loss if self._clock.batch_size > 1 else 1.0)
        loss = steps * step_loss
        budget = AUTO_SETTINGS.probe_budget * shared.seconds
        if not self._is_trusted(name):
            budget += AUTO_SETTINGS.allowance * plain
        own = shared.candidates[name].losses.seconds + loss
        is_hopeful = (self._seconds(name) < self._seconds(self._leader)
                      and own <= AUTO_SETTINGS.hopeful_budget * shared.seconds)
        if name == self._plain:  # what drafts are compared with has a budget of its own
            is_hopeful = own <= budget + AUTO_SETTINGS.allowance * plain
        if is_hopeful or shared.losses.seconds + loss <= budget:
            self.active = name
            self._probe = Probe(steps, step_loss, depth)
            if not is_hopeful:
                self._candidates[name].try_again()
            self._reserve(loss)

    def _continue_probe(self, probe: Probe, may_go_on: bool) -> bool:
        """Whether the probe goes on. Bad luck alone does not end a probe."""
        probe.steps -= 1
        is_promising = self._seconds(self.active) < self._seconds(self._leader)
        if may_go_on and probe.steps and (self._reserved > 0 or is_promising):
            return True
        self._probe = None
        self._reserve(-self._reserved)
        self._shared.losses.past = max(0.0, self._shared.losses.past)
        return False

    def _count_loss(self, probe: Probe, step: Observation, seconds: float) -> None:
        """A step of a probe took so many seconds. A probe that gains returns what others lost."""
        loss = seconds - step.tokens * self._seconds(self._leader)
        self._reserve(-(loss if step.is_typical else min(loss, probe.loss)))  # the first step reads the whole text
        self._shared.losses.past += loss
        self._shared.candidates[self.active].losses.past += max(0.0, loss)

    @property
    def _reserved(self) -> float:
        """Seconds that are left to the current probe."""
        return self._shared.losses.reserved.get(self, 0.0)

    def _reserve(self, seconds: float) -> None:
        """Reserve so many more seconds for the current probe, so that no other request spends them meanwhile."""
        left = self._reserved + seconds
        for losses in (self._shared.losses, self._shared.candidates[self.active].losses):
            losses.reserved[self] = left
