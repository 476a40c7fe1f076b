"""The default drafter: it drafts with the fastest of all candidates, plain decoding among them.

Costs belong to the machine and are measured once (costs.py). Acceptance belongs to the text and is counted while
writing (acceptance.py). From both, policy.py rates each candidate c at each depth d:

    seconds for each token  =  (forward(rows_c(d)) + draft_c(d))  /  (1 + P_c(1) + ... + P_c(d))

The candidate and the depth with the fewest seconds draft next. Of the tree, as many of the likeliest guesses are
verified as pay for their rows. So drafting begins when the text is long enough for it to pay, and becomes deeper as the
text grows. Measured times may decide, because no choice can change the text.

The acceptance of a candidate is only observed while it drafts. Candidates that could be the fastest are *probed* for
a few steps now and then. All requests of an engine share a budget of time that probes may lose. A probe that gains
costs nothing of it, and a candidate that would lose even if all its guesses were right is not probed.

A drafter that reads the text alone is *watched* instead (watch.py): it drafts while another candidate writes, and is
rated by the steps that these drafts would have made.

Costs and acceptance can be wrong together, and then no outcome contradicts them. So what the candidate in use delivers
is compared with what its rating promises, and a tree of which no guess seems to pay is verified.

Chains end by themselves (longdraft/drafters/confidence.py) where a further token costs more than it gains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from longdraft.cache.partial import PartialCache
from longdraft.drafters.auto.acceptance import NodeAcceptance
from longdraft.drafters.auto.observation import Observation
from longdraft.drafters.auto.policy import Policy
from longdraft.drafters.auto.report import TokenReport
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.drafters.auto.shared import SharedStatistics
from longdraft.drafters.auto.watch import Watch
from longdraft.drafters.confidence import confidence_of
from longdraft.drafters.draft_model import DraftModelOptions
from longdraft.drafters.draft_vocabulary import AUTO_VOCABULARY, VocabularySize, check_draft_vocabulary
from longdraft.drafters.options import DrafterOptions
from longdraft.drafters.self_draft import MagicDecOptions
from longdraft.model.transformer import Transformer
from longdraft.parts.draft_copy import AUTO_WEIGHTS, check_draft_weights
from longdraft.request.context import Context
from longdraft.request.tree import Tree, root_only
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.abilities import Inherits, ReadsPrompt, ReadsStates, ReadsText, memory_of
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.routine import Routine


@dataclass(frozen=True)
class AutoOptions(DrafterOptions):
    """Options of `auto`.

    draft_weights     as for `tokenswift`: weights that its self-drafting candidates draft with; those of the layers of
                      an EAGLE or block head as well
    draft_vocabulary  as for `tokenswift`: tokens that they, and a block head, can guess
    """

    draft_weights: str = AUTO_WEIGHTS
    draft_vocabulary: VocabularySize = AUTO_VOCABULARY

    def __post_init__(self) -> None:
        check_draft_weights(self.draft_weights)
        check_draft_vocabulary(self.draft_vocabulary)

    @property
    def copy_weights(self) -> str:
        return self.draft_weights

    @property
    def head_weights(self) -> str:
        return self.draft_weights

    @property
    def draft_window(self) -> int:
        return DraftModelOptions().draft_window

    def partial_rows(self, model: Transformer) -> int:
        return MagicDecOptions().partial_rows(model)


class Proposal(NamedTuple):
    """A tree that is being verified.

    drafted  depth of the draft
    allowed  depth up to which its guesses were kept
    began, ended  of drafting, in seconds
    """

    tree: Tree
    drafted: int
    allowed: int
    began: float
    ended: float


@dataclass(slots=True)
class PlainRun:
    """Steps of plain decoding that are timed together: what is done beside a short step would be felt. The run began
    when the step before it ended.

    steps     those at rest included
    at_rest   steps to come in which nothing is timed or decided
    ahead     steps that were computed ahead
    tokens    of these steps
    reported  of the tokens, those that are in the report
    latest    when the latest step began, in seconds, by the clock; None: news from other requests ended the run early
    """

    steps: int = 0
    at_rest: int = 0
    ahead: int = 0
    tokens: int = 0
    reported: int = 0
    latest: float | None = None


class AutoDrafter:
    """Drafts with one of `candidates` at a time.

    candidates  name -> drafter, plain decoding first
    calibrate   gives `shared` the costs of the candidates, when an engine writes its first text
    forget      have the costs measured anew by the next engine, because they are off
    shared      with the engine's other requests
    clock       the time that this request takes and how many requests share its forwards
    partial     a partial cache that candidates share, for its memory
    sampler     of the request; it removes hopeless guesses
    """

    def __init__(self, candidates: Mapping[str, Drafter], calibrate: Callable[[], None], forget: Callable[[], None],
                 shared: SharedStatistics, clock: CostClock, partial: PartialCache | None = None,
                 sampler: Sampler | None = None) -> None:
        self._drafters = dict(candidates)
        self._calibrate = calibrate
        self._forget = forget
        self._partial = partial
        self._sampler = sampler
        self._clock = clock
        self._shared = shared
        self.policy: Policy  # from `begin` on
        self._node_acceptance = NodeAcceptance()
        self._proposal: Proposal | None = None  # None: plain decoding
        self._plain = PlainRun()
        self._followers = {name: each for name, each in self._drafters.items() if isinstance(each, ReadsStates)}
        self._readers = {name: each for name, each in self._drafters.items() if isinstance(each, ReadsText)}
        self._watch = Watch(self._readers, self._learn_watched, clock)
        self._confidences = {name: confidence_of(drafter) for name, drafter in self._drafters.items()}
        self._num_steps = 0
        self._num_same = 0  # steps of the active candidate since a switch
        self._ended = 0.0  # when the latest step that was not at rest ended, in seconds
        self._num_written = 0  # tokens of that step
        self.report = TokenReport(self._drafters)

    @property
    def nbytes(self) -> int:
        shared = self._partial.nbytes if self._partial else 0
        return shared + sum(memory_of(drafter) for drafter in self._drafters.values())

    @property
    def plain_steps(self) -> int:
        return self._plain.at_rest

    def read_prompt(self, context: Context) -> Routine[None]:
        for drafter in self._drafters.values():
            if isinstance(drafter, ReadsPrompt):
                yield from drafter.read_prompt(context)

    def begin(self, context: Context, verified: Verified | None) -> None:
        for drafter in self._drafters.values():
            drafter.begin(context, verified)
        if not self._shared.candidates:
            self._calibrate()
        self.policy = Policy(self._shared, self._clock, context, self._readers)
        self.report.num_new = context.num_new
        self._follow()

    def _follow(self) -> None:
        """Have states of the target copied only for drafters that could be the fastest."""
        is_wanted = any(map(self.policy.could_lead, self._followers))  # they read the same states
        for drafter in self._followers.values():
            drafter.follow(is_wanted)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        if self._plain.at_rest:
            return root_only(context.last)
        if self.policy.is_plain:
            self._proposal = None
            if self.policy.is_probing or (self._num_steps + 1) % AUTO_SETTINGS.steps_per_decision == 0:
                self._plain.latest = self._clock()
            return root_only(context.last)
        self._proposal = yield from self._draft(context, max_depth)
        return self._proposal.tree

    def _draft(self, context: Context, max_depth: int) -> Routine[Proposal]:
        """A tree of the active candidate, without the guesses that do not pay for their rows."""
        policy = self.policy
        began = self._clock()
        confidence = self._confidences[policy.active]
        if confidence:
            confidence.least = policy.least_probability
        is_exploring = (self._num_steps % AUTO_SETTINGS.steps_per_decision == 0 and not policy.is_probing
                        and not confidence and policy.active not in self._readers)
        deeper = AUTO_SETTINGS.exploration_depth * is_exploring
        drafted = min(max_depth, policy.depth(confidence is not None) + deeper)
        tree = yield from self._drafters[policy.active].propose(context, drafted)
        if confidence:
            drafted = confidence.num_drafted
        if self._sampler:  # before the step does it, so that `observe` is given nodes of this tree
            tree = self._sampler.pruned(tree, context)
        self._watch.add(policy.active, tree, len(context))
        allowed = drafted
        if not is_exploring and not policy.is_probing:
            worthwhile = self._worthwhile(policy.active, tree)
            if worthwhile is not tree:  # the step will show nothing about the depths that were cut off
                allowed = min(allowed, max(worthwhile.depths))
                tree = worthwhile
        return Proposal(tree, drafted, allowed, began, self._clock())

    def _worthwhile(self, name: str, tree: Tree) -> Tree:
        """The tree of the guesses of a candidate that pay for their rows.

        All of them, if none seems to pay: then the rating of the drafter or the acceptance of its guesses is wrong, and
        only their outcome can correct it. The outcome for a drafter that is watched comes without that.
        """
        if len(tree) == 1:
            return tree
        reach = self._node_acceptance.reach(tree)
        falling = sorted(reach[1:], reverse=True)
        count = self.policy.num_guesses(name, falling)
        if not count and name in self._readers:
            return root_only(tree.tokens[0])
        least = falling[(count or len(falling)) - 1]
        return tree.kept([at_all >= least for at_all in reach])

    def observe(self, context: Context, accepted: Accepted) -> None:
        run = self._plain
        policy = self.policy
        if run.at_rest:
            run.at_rest -= 1
            run.ahead += accepted.verified is None
            run.tokens += len(accepted.tokens)
            if not run.at_rest and self._num_steps % AUTO_SETTINGS.steps_per_look == 0:
                self._watch.look(context, accepted, policy.active)
                if not policy.has_news:
                    self._rest()
            return
        self._num_steps += 1
        now = self._clock()
        self._watch.look(context, accepted, policy.active)
        if self._proposal is None:
            run.steps += 1
            run.tokens += len(accepted.tokens)
            is_last = self._num_steps % AUTO_SETTINGS.steps_per_decision == 0
            is_first = self._num_steps <= AUTO_SETTINGS.untypical_steps
            if not (is_first or is_last or policy.is_probing or policy.has_news):
                self._rest()
                return
        active = policy.active
        if self._proposal is None:
            self._count_plain(now)
        else:
            self._drafters[active].observe(context, accepted)
            now = self._measure(self._proposal, accepted, now)
            self._report(len(accepted.tokens))
        if policy.is_due(self._num_steps, now):
            is_extra = policy.has_news
            policy.decide(context)
            if not is_extra:
                policy.postpone(now)
            self._follow()
        self._num_same += 1
        if policy.active != active:  # the new candidate has not seen the latest tokens
            self._num_same = 0
            self._drafters[policy.active].observe(context, accepted)
        self._rest()
        self._num_written = len(accepted.tokens)
        self._ended = self._clock()

    def _rest(self) -> None:
        """Of plain decoding, time and decide nothing until the next look for news. Its step may be computed ahead, but
        not that of a decision, which is timed, or of a text in a batch, whose news may be that texts joined."""
        if self.policy.is_plain and not self.policy.is_probing and self._num_steps >= AUTO_SETTINGS.untypical_steps:
            count = AUTO_SETTINGS.steps_per_look - self._num_steps % AUTO_SETTINGS.steps_per_look
            is_decision = (self._num_steps + count) % AUTO_SETTINGS.steps_per_decision == 0
            count -= is_decision or self._clock.batch_size > 1
            self._plain.at_rest = count
            self._plain.steps += count
            self._num_steps += count

    def _measure(self, proposal: Proposal, accepted: Accepted, verified_at: float) -> float:
        """Count the step's guesses and time; returns what the clock shows."""
        tree, drafted, allowed, began, drafted_at = proposal
        if len(tree) > 1 and self.policy.active not in self._readers:  # `_watch` gives the outcome of their drafts
            self._node_acceptance.add(tree, accepted.rows)
        self.policy.learn(self.policy.active, tree, allowed, len(accepted.tokens) - 1)
        now = self._clock()
        draft = drafted_at - began + now - verified_at
        if self._num_steps > 1:  # the first step of a text may take fifty times as long as the others
            is_typical = self._num_same >= AUTO_SETTINGS.untypical_steps
            self.policy.observe(Observation(
                len(accepted.tokens), len(tree), verified_at - drafted_at, self._since_last_step(began),
                drafted=drafted, draft_seconds=draft, is_typical=is_typical))
        return now

    def _since_last_step(self, began: float) -> float:
        """Seconds since the step before. After the first one the engine gives back memory of the prompt's chunks."""
        return began - self._ended if self._num_steps > AUTO_SETTINGS.untypical_steps else 0.0

    def _count_plain(self, now: float) -> None:
        """Count the steps of plain decoding since the latest step that was timed. now: by the clock"""
        run = self._plain
        if run.steps > 1 and self._clock.batch_size == 1:
            self.policy.learn_ahead(run.ahead > 0)
        if run.latest is not None and self._num_steps - run.steps >= AUTO_SETTINGS.untypical_steps:
            seconds, latest = now - self._ended, now - run.latest
            if run.ahead:
                self.policy.observe_ahead(run.steps, run.ahead, seconds, latest)
            else:
                forwards = min(run.steps * latest, seconds)
                self.policy.observe(Observation(run.tokens, 1, forwards, seconds - forwards, run.steps,
                                                tokens_before=self._num_written if run.steps == 1 else 1))
        self._report_plain()
        self._plain = PlainRun()

    def _learn_watched(self, name: str, tree: Tree, tokens: list[int]) -> None:
        """The text went on with these tokens after a draft. The step that verified the draft of the active candidate
        was counted, but not the guesses that it left out."""
        if name != self.policy.active:
            worthwhile = self._worthwhile(name, tree)
            self.policy.learn(name, worthwhile, AUTO_SETTINGS.max_depth, len(worthwhile.follow(tokens)) - 1)
        self._node_acceptance.add(tree, tree.follow(tokens))

    def _report(self, written: int) -> None:
        if self.report.add(self.policy.active, written) and self._shared.pace.is_off:
            self._forget()

    def _report_plain(self) -> None:
        """Report the tokens of plain decoding so far."""
        written = self._plain.tokens - self._plain.reported
        if written:
            self._report(written)
            self._plain.reported += written

    def inherit(self, earlier: AutoDrafter, num_retracted: int) -> None:
        earlier._report_plain()
        self.report = earlier.report
        if self.report.choices:
            self.report.retract(num_retracted)
        for name, drafter in self._drafters.items():
            if isinstance(drafter, Inherits):
                drafter.inherit(earlier._drafters[name], num_retracted)

    def summary(self, num_tokens: int) -> dict[str, Any]:
        self._report_plain()
        return self.report.summary(num_tokens)
