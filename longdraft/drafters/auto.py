"""The drafter that chooses, at every step: who drafts, how deep, and which guesses are worth a row.

What each contender's drafts cost and bring, and what a verification of r rows costs at this context, is learned
while writing (longdraft/drafters/cost_model.py). Each step takes the contender and the depth with the fewest expected
seconds for each token, plain decoding among them, and leaves out guesses whose expected gain is worth less than
their row. So drafting begins where the context has grown long enough for it to pay, and grows deeper with it.

What is not used is tried again now and then, and pays for it: a contender is probed when the time since its last
probe, times BUDGET, covers what the probe is expected to lose. Probing everything together costs at most that share
of the time. First tries, of which nothing is known before, follow one another as long as they gain; where they lose,
the next one waits until the time has grown (`SharedStatistics.claim`). They are the engine's, not the text's: what one text
has learned the others begin with, and of texts side by side one tries what none has tried. The clock may decide,
because no choice can change the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longdraft.cache.partial import PartialCache
from longdraft.core import Context
from longdraft.drafters.cost_model import Acceptance, SharedStatistics
from longdraft.drafters.draft_model import DraftModelOptions
from longdraft.drafters.options import DrafterOptions
from longdraft.model.routine import CostClock, Routine
from longdraft.speculation.drafter import Accepted, Drafter, Verified, memory_of
from longdraft.tree import Tree

BUDGET = 0.01  # share of the time that probing may lose, all contenders together
FIRST_STEPS = 6  # of the first probe; the step that takes over is not counted, it may have to catch up
PROBE_STEPS = 4
HOPELESS = 2.0  # times the best's seconds for each token: a first probe ends after two counted steps
STICKY = 0.97  # another must be this much faster to take over
DEEPEST = 16
_OPEN_EVERY = 32  # steps after which one is drafted a little deeper than is thought best, and verified whole
_DEEPER = 2
_DECIDE_EVERY = 3  # steps, where nothing is probed
_BUCKET = 1024  # tokens for which the choices are reported together


@dataclass(frozen=True)
class AutoOptions(DrafterOptions):
    """`auto` has no options."""

    @property
    def draft_window(self) -> int:
        return DraftModelOptions().draft_window


class AutoDrafter:
    """Drafts with one of `contenders` (name -> drafter, plain decoding first) at a time.

    experience  what the engine's texts have learned, and go on learning
    meter       what the text takes of the time, and how many texts share its forwards; none: the clock, it is alone
    """

    def __init__(self, candidates: Mapping[str, Drafter], statistics: SharedStatistics | None = None,
                 clock: CostClock | None = None, partial: PartialCache | None = None) -> None:
        self._partial = partial
        self._drafters = dict(candidates)
        self._plain = next(iter(self._drafters))
        self._clock = clock or CostClock(always=True)
        self._experience = statistics or SharedStatistics()
        self._verify = self._experience.verify
        self._known = {name: self._experience.candidate(name, DEEPEST if name != self._plain else 0)
                       for name in self._drafters}
        self._acceptance_by_depth = {name: known.acceptance_by_depth.of_a_text() for name, known in self._known.items()}
        self._best: dict[str, tuple[float, int]] = {}  # seconds for each token, and the depth that gives them
        self._acceptance = Acceptance()
        self._active = self._leader = self._written_by = self._plain
        self._probing = FIRST_STEPS  # steps left of a probe
        self._is_early = False  # the probe is of one of which little is known
        self._is_new = False  # took over just now
        self._took_over = 0.0  # seconds it took to tell who took over
        self._steps = self._decisions = 0
        self._allowed = 0
        self._times = (0.0, 0.0)  # propose began, ended
        self._tree: Tree | None = None
        self.turns: Counter[str] = Counter(dict.fromkeys(self._drafters, 0))  # tokens written with each
        self.choices: list[Counter[str]] = []  # the same, for each _BUCKET of the text's new tokens

    @property
    def nbytes(self) -> int:
        shared = self._partial.nbytes if self._partial else 0
        return shared + sum(memory_of(drafter) for drafter in self._drafters.values())

    def begin(self, context: Context, verified: Verified | None) -> None:
        for drafter in self._drafters.values():
            drafter.begin(context, verified)
        if self._known[self._plain].steps:  # others have told
            for name in self._drafters:
                self._rate(name, context)
            self._active = self._leader = min(self._best, key=self._best.__getitem__)
            self._probing = 0

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        began = self._clock()
        is_open = bool(self._probing) or self._steps % _OPEN_EVERY == 0
        if self._probing:  # as deep as it goes, and less, to learn what depth costs
            depth = DEEPEST if self._probing % 2 else DEEPEST // 4
        else:
            depth = max(1, self._best[self._active][1]) + _DEEPER * is_open
        self._allowed = min(max_depth, depth)
        tree = yield from self._drafters[self._active].propose(context, self._allowed)
        if not is_open and len(tree) > 1:
            whole, tree = tree, self._worth_verifying(tree, context)
            if tree is not whole:  # says nothing of the depths that were cut off
                self._allowed = max(tree.depths)
        self._tree = tree
        self._times = began, self._clock()
        return tree

    def _worth_verifying(self, tree: Tree, context: Context) -> Tree:
        """Without the guesses whose chance to become text is worth less time than their row takes."""
        pace, row = self._best[self._active][0], self._verify.per_row(len(context))
        return tree.kept([reach * pace >= row for reach in self._acceptance.reach(tree)])

    def observe(self, context: Context, accepted: Accepted) -> None:
        verified_at = self._clock()
        self._drafters[self._active].observe(context, accepted)
        self._learn(context, accepted, verified_at)
        self._report(context, len(accepted.tokens))
        before = self._active
        if self._probing or self._steps % _DECIDE_EVERY == 0:
            self._decide(context)
        self._is_new = self._active != before
        if self._is_new:  # who takes over has missed what was written meanwhile
            began = self._clock()
            self._drafters[self._active].observe(context, accepted)
            self._took_over = self._clock() - began

    def _learn(self, context: Context, accepted: Accepted, verified_at: float) -> None:
        began, proposed = self._times
        now, guesses = self._clock(), len(accepted.tokens) - 1
        tree, known = self._tree, self._known[self._active]
        assert tree is not None, "observed without a proposal"
        self._steps += 1
        self._experience.seconds += now - began
        if self._is_early:
            took = now - began + (self._took_over if self._is_new else 0.0)
            self._experience.lost += took - len(accepted.tokens) * self._best[self._plain][0]
        if len(tree) > 1:
            self._acceptance.add(tree, accepted.rows)
        if self._is_new:  # some catch up here, some when they are told
            ordinary = known.seconds(self._verify, len(context), self._allowed, self._clock.texts)
            known.catching_up = max(0.0, self._took_over + (now - began) - ordinary)
        if self._is_new or self._steps == 1:
            return  # it had to catch up, or the machine to wake up
        texts = self._clock.texts
        self._verify.add_part(len(tree), len(context), texts, verified_at - proposed)
        drafted = ((proposed - began) + (now - verified_at)) / self._verify.shared(texts)
        self._acceptance_by_depth[self._active].add(self._allowed, guesses)
        self._experience.add(self._active, self._allowed, tree, guesses, drafted)

    def _report(self, context: Context, written: int) -> None:
        self._written_by = self._active
        self.turns[self._active] += written
        while len(self.choices) <= context.num_new // _BUCKET:
            self.choices.append(Counter())
        self.choices[-1][self._active] += written

    def cut(self, count: int) -> None:
        """The last `count` tokens of the last step lie behind the text's end: nobody has written them."""
        self.turns[self._written_by] -= count
        self.choices[-1][self._written_by] -= count

    def _rate(self, name: str, context: Context) -> None:
        """What to expect of a contender now, if anything is known of it."""
        known = self._known[name]
        if known.steps:
            self._best[name] = known.best(self._verify, len(context), self._clock.texts, self._acceptance_by_depth[name])

    def _decide(self, context: Context) -> None:
        """Who drafts the next step."""
        names = list(self._drafters)
        self._decisions += 1
        turn = names[self._decisions % len(names)]  # one at a time: thinking of all would take a part of a short step
        self._rate(self._active, context)
        self._rate(turn, context)
        if not self._best:
            return
        paces = {name: pace for name, (pace, _) in self._best.items()}
        best = min(paces, key=paces.__getitem__)
        if best == self._plain or self._leader not in paces or paces[best] < STICKY * paces[self._leader]:
            self._leader = best  # plain decoding has nothing to catch up
        if self._probing:
            self._probing -= 1
            known = self._known[self._active]
            is_hopeless = not self._is_new and known.steps == 2 and paces[self._active] > HOPELESS * paces[best]
            if self._probing and not is_hopeless:
                return
            self._probing, self._is_early = 0, False
        unknown = next((name for name in names if name not in paces and self._experience.claim(name)), None)
        if unknown:
            self._active, self._probing = unknown, FIRST_STEPS
        elif turn != self._leader and turn in paces and self._credit(turn, paces, context) > 0:
            self._active, self._probing = turn, PROBE_STEPS
        else:
            self._active = self._leader
            return
        self._is_early = self._known[self._active].trust < 1
        self._experience.probed[self._active] = self._experience.seconds

    def _credit(self, name: str, paces: Mapping[str, float], context: Context) -> float:
        """Seconds that may be lost on a probe, less those that it will probably lose."""
        known = self._known[name]
        step = known.seconds(self._verify, len(context), self._best[name][1], self._clock.texts)
        slower = step * (1 - paces[self._leader] / paces[name]) * PROBE_STEPS
        trust = known.trust if self._experience.may_lose() else 1.0
        lost = trust * (slower + step) + max(0.0, known.catching_up - step)  # a step's time at least, to catch up
        waited = self._experience.seconds - self._experience.probed[name]
        return waited * BUDGET / max(1, len(self._known) - 1) - lost

    def summary(self) -> dict[str, Any]:
        """What was chosen and why, for the statistics."""
        return {
            "tokens_by_choice": dict(self.turns),
            "choices_per_tokens": _BUCKET,
            "choices": [dict(counts) for counts in self.choices],
        }
