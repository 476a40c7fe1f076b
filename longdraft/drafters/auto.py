"""The default drafter: it measures all candidates while writing, and drafts with the fastest one.

Each step uses the candidate and the depth with the fewest expected seconds for each token, plain decoding among them
(longdraft/drafters/cost_model.py has the equations). Guesses whose expected gain is below the cost of their row are
removed before verification. So drafting begins when the text is long enough for it to pay, and becomes deeper as the
text grows. Measured times may decide, because no choice can change the text.

Candidates that are not in use are *probed* for a few steps now and then:

- A candidate with measurements is probed when the time since its last probe, times `probe_budget`, exceeds the time
  that the probe is expected to lose. All probes together so cost at most that share of the time.
- A candidate without measurements gets a first probe. First probes follow each other at once while they gain time, and
  wait while they have lost more than `first_probe_budget` of the time. Requests of one engine share what they measure:
  one of them makes the first probe, and a new request starts with what the earlier ones have measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

from longdraft.cache.partial import PartialCache
from longdraft.core import Context
from longdraft.drafters.cost_model import AUTO_SETTINGS, NodeAcceptance, Rating, SharedStatistics
from longdraft.drafters.draft_model import DraftModelOptions
from longdraft.drafters.options import DrafterOptions
from longdraft.model.draft_copy import AUTO as AUTO_WEIGHTS
from longdraft.model.draft_copy import check_draft_weights
from longdraft.model.routine import CostClock, Routine
from longdraft.speculation.drafter import Accepted, Drafter, Verified, memory_of
from longdraft.tree import Tree


@dataclass(frozen=True)
class AutoOptions(DrafterOptions):
    """Options of `auto`.

    draft_weights  as for `tokenswift`: weights that its self-drafting candidate drafts with
    """

    draft_weights: str = AUTO_WEIGHTS

    def __post_init__(self) -> None:
        check_draft_weights(self.draft_weights)

    @property
    def copy_weights(self) -> str:
        return self.draft_weights

    @property
    def draft_window(self) -> int:
        return DraftModelOptions().draft_window


class Selector:
    """Decides which candidate drafts next, and how deep, from what one request and all requests have measured.

    names  of the candidates, plain decoding first
    """

    def __init__(self, names: list[str], shared: SharedStatistics, clock: CostClock) -> None:
        self._shared, self._clock = shared, clock
        self._plain = names[0]
        depths = {name: AUTO_SETTINGS.max_depth if name != self._plain else 0 for name in names}
        self._known = {name: shared.candidate(name, max_depth) for name, max_depth in depths.items()}
        self.acceptance = {name: known.acceptance_by_depth.of_a_request() for name, known in self._known.items()}
        self._ratings: dict[str, Rating] = {}  # of the candidates with measurements
        self._turns = cycle([*names[1:], self._plain])  # plain decoding was just measured
        self.active = self._leader = self._plain  # the leader drafts while nothing is probed
        self.probe_steps_left = AUTO_SETTINGS.first_probe_steps  # the first steps of all measure plain decoding
        self.is_early_probe = False  # the probed candidate has few measurements

    def begin(self, context: Context) -> None:
        """Start with what earlier requests have measured, if there were any."""
        if self._known[self._plain].steps:
            for name in self._known:
                self._rate(name, context)
            self.active = self._leader = min(self._ratings, key=self._ratings.__getitem__)
            self.probe_steps_left = 0

    @property
    def rating(self) -> Rating:
        """Of the active candidate, which is not being probed for the first time."""
        return self._ratings[self.active]

    @property
    def plain_seconds(self) -> float:
        """Expected seconds for each token of plain decoding."""
        return self._ratings[self._plain].seconds

    def decide(self, context: Context, has_switched: bool) -> None:
        """Choose the active candidate. has_switched: the last step was the active candidate's first since a switch."""
        turn = next(self._turns)  # one other candidate is rated at a time: rating all would cost a part of a short step
        self._rate(self.active, context)
        self._rate(turn, context)
        if not self._ratings:
            return
        best = min(self._ratings, key=self._ratings.__getitem__)
        if best == self._plain or self._leader not in self._ratings or self._is_faster(best):
            self._leader = best
        if self.probe_steps_left:
            self.probe_steps_left -= 1
            if self.probe_steps_left and not self._is_hopeless(best, has_switched):
                return
            self.probe_steps_left, self.is_early_probe = 0, False
        unknown = next((name for name in self._known
                        if name not in self._ratings and self._shared.claim_first_probe(name)), None)
        if unknown:
            self._probe(unknown, AUTO_SETTINGS.first_probe_steps)
        elif turn != self._leader and turn in self._ratings and self._probe_credit(turn, context) > 0:
            self._probe(turn, AUTO_SETTINGS.probe_steps)
        else:
            self.active = self._leader

    def _rate(self, name: str, context: Context) -> None:
        known = self._known[name]
        if known.steps:
            self._ratings[name] = known.rate(self._shared.forward, len(context), self._clock.batch_size,
                                             self.acceptance[name])

    def _is_faster(self, name: str) -> bool:
        """Than the leader, by enough to pay for the switch. (A switch to plain decoding costs nothing.)"""
        return self._ratings[name].seconds < AUTO_SETTINGS.switch_ratio * self._ratings[self._leader].seconds

    def _is_hopeless(self, best: str, has_switched: bool) -> bool:
        """Whether a first probe has shown in its first two measured steps that the candidate is much too slow."""
        if has_switched or self._known[self.active].steps != 2:
            return False
        return self._ratings[self.active].seconds > AUTO_SETTINGS.hopeless_ratio * self._ratings[best].seconds

    def _probe(self, name: str, steps: int) -> None:
        self.active, self.probe_steps_left = name, steps
        self.is_early_probe = self._known[name].trust < 1
        self._shared.last_probe[name] = self._shared.seconds

    def _probe_credit(self, name: str, context: Context) -> float:
        """Seconds that a probe may lose, minus those that it is expected to lose."""
        known, rating = self._known[name], self._ratings[name]
        step = known.seconds(self._shared.forward, len(context), rating.depth, self._clock.batch_size)
        slower = step * (1 - self._ratings[self._leader].seconds / rating.seconds) * AUTO_SETTINGS.probe_steps
        trust = known.trust if self._shared.can_lose else 1.0
        switch = trust * step + max(0.0, known.switch_seconds - step)  # at least the time of a step
        elapsed = self._shared.seconds - self._shared.last_probe[name]
        return elapsed * AUTO_SETTINGS.probe_budget / max(1, len(self._known) - 1) - (trust * slower + switch)


class Proposal(NamedTuple):
    """A tree that is being verified: the depth that it was allowed, and when drafting began and ended, in seconds."""

    tree: Tree
    allowed: int
    began: float
    ended: float


class AutoDrafter:
    """Drafts with one of `candidates` at a time.

    candidates  name -> drafter, plain decoding first
    statistics  shared with the engine's other requests; None: this request's own
    clock       the time that this request takes and how many requests share its forwards; None: the wall clock
    partial     a partial cache that candidates share, for its memory
    """

    def __init__(self, candidates: Mapping[str, Drafter], statistics: SharedStatistics | None = None,
                 clock: CostClock | None = None, partial: PartialCache | None = None) -> None:
        self._drafters = dict(candidates)
        self._partial = partial
        self._clock = clock or CostClock(always=True)
        self._shared = statistics or SharedStatistics()
        self._selector = Selector(list(self._drafters), self._shared, self._clock)
        self._node_acceptance = NodeAcceptance()
        self._proposal: Proposal | None = None
        self._num_steps = 0
        self._has_switched = False  # the next step is the active candidate's first since a switch
        self._switch_seconds = 0.0  # that it took to bring the active candidate up to date
        self._last_writer = ""
        self.turns: Counter[str] = Counter(dict.fromkeys(self._drafters, 0))  # tokens written with each candidate
        self.choices: list[Counter[str]] = []  # the same for each `tokens_per_report` new tokens

    @property
    def active(self) -> str:
        """Name of the candidate that drafts the next step."""
        return self._selector.active

    @property
    def nbytes(self) -> int:
        shared = self._partial.nbytes if self._partial else 0
        return shared + sum(memory_of(drafter) for drafter in self._drafters.values())

    def begin(self, context: Context, verified: Verified | None) -> None:
        for drafter in self._drafters.values():
            drafter.begin(context, verified)
        self._selector.begin(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        began, probe_steps = self._clock(), self._selector.probe_steps_left
        is_exploring = probe_steps > 0 or self._num_steps % AUTO_SETTINGS.steps_per_exploration == 0
        if probe_steps:  # alternate between two depths, to measure what depth costs
            depth = AUTO_SETTINGS.max_depth if probe_steps % 2 else AUTO_SETTINGS.max_depth // 4
        else:
            depth = max(1, self._selector.rating.depth) + AUTO_SETTINGS.exploration_depth * is_exploring
        allowed = min(max_depth, depth)
        tree = yield from self._drafters[self.active].propose(context, allowed)
        if not is_exploring and len(tree) > 1:
            whole, tree = tree, self._pruned(tree, context)
            if tree is not whole:  # the step will show nothing about the depths that were cut off
                allowed = max(tree.depths)
        self._proposal = Proposal(tree, allowed, began, self._clock())
        return tree

    def _pruned(self, tree: Tree, context: Context) -> Tree:
        """The tree without the guesses whose row costs more than their probability times the time of a token."""
        seconds, row = self._selector.rating.seconds, self._shared.forward.per_row(len(context))
        return tree.kept([reach * seconds >= row for reach in self._node_acceptance.reach(tree)])

    def observe(self, context: Context, accepted: Accepted) -> None:
        verified_at, active = self._clock(), self.active
        self._drafters[active].observe(context, accepted)
        self._measure(context, accepted, verified_at)
        self._report(context, len(accepted.tokens))
        if self._selector.probe_steps_left or self._num_steps % AUTO_SETTINGS.steps_per_decision == 0:
            self._selector.decide(context, self._has_switched)
        self._has_switched = self.active != active
        if self._has_switched:  # the new candidate has not seen the latest tokens
            began = self._clock()
            self._drafters[self.active].observe(context, accepted)
            self._switch_seconds = self._clock() - began

    def _measure(self, context: Context, accepted: Accepted, verified_at: float) -> None:
        """Add the step to the measurements."""
        assert self._proposal is not None, "observe without propose"
        tree, allowed, began, drafted_at = self._proposal
        ended, num_accepted, requests = self._clock(), len(accepted.tokens) - 1, self._clock.batch_size
        shared, known = self._shared, self._shared.candidates[self.active]
        seconds = ended - began
        self._num_steps += 1
        shared.seconds += seconds
        if self._selector.is_early_probe:
            switch = self._switch_seconds if self._has_switched else 0.0
            shared.seconds_lost += seconds + switch - len(accepted.tokens) * self._selector.plain_seconds
        if len(tree) > 1:
            self._node_acceptance.add(tree, accepted.rows)
        if self._has_switched:  # some drafters catch up in `propose`, some in `observe`
            ordinary = known.seconds(shared.forward, len(context), allowed, requests)
            known.switch_seconds = max(0.0, self._switch_seconds + seconds - ordinary)
        if self._has_switched or self._num_steps == 1:
            return  # not typical: the candidate caught up, or the machine woke up
        shared.forward.add_part(len(tree), len(context), requests, verified_at - drafted_at)
        draft_seconds = ((drafted_at - began) + (ended - verified_at)) / shared.forward.share(requests)
        self._selector.acceptance[self.active].add(allowed, num_accepted)
        known.add(allowed, tree, num_accepted, draft_seconds)

    def _report(self, context: Context, written: int) -> None:
        self._last_writer = self.active
        self.turns[self.active] += written
        while len(self.choices) <= context.num_new // AUTO_SETTINGS.tokens_per_report:
            self.choices.append(Counter())
        self.choices[-1][self.active] += written

    def summary(self, num_tokens: int) -> dict[str, Any]:
        """The tokens written with each candidate, in all and for each part of the text, for the statistics."""
        turns, choices = self.turns.copy(), [counts.copy() for counts in self.choices]
        if behind := turns.total() - num_tokens:  # tokens of the last step behind the end of the text
            turns[self._last_writer] -= behind
            choices[-1][self._last_writer] -= behind
        return {
            "tokens_by_choice": dict(turns),
            "choices_per_tokens": AUTO_SETTINGS.tokens_per_report,
            "choices": [dict(counts) for counts in choices],
        }
