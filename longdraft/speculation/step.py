"""One decoding step of one request. All drafters, and plain decoding, go through `Step.run`.

    propose   the drafter proposes a tree of tokens                   longdraft/drafters/
    forward   the target computes logits for every node of the tree   longdraft/model/transformer.py
    choose    the sampler chooses the target's token at the nodes     longdraft/sampling/sampler.py
    verify    the path of the tree along those choices is accepted    longdraft/speculation/verify.py
    commit    the cache keeps the rows of the path                    longdraft/cache/full.py
    observe   the drafter is given the accepted tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import NamedTuple

from longdraft.cache.full import FullCache
from longdraft.errors import NumericalError
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.request.context import Context
from longdraft.request.tree import Tree
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.abilities import plain_steps_of
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.drafter import Accepted, Drafter, Verified
from longdraft.speculation.logprobs import path_logprobs
from longdraft.speculation.reuse import PREFILL_CHUNK
from longdraft.speculation.routine import Routine
from longdraft.speculation.verify import verify
from longdraft.system.machine import return_free_memory


@dataclass
class Timings:
    """Seconds (wall clock) spent in each part of the steps so far. In a batch they include other requests' work."""

    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    commit: float = 0.0


@dataclass
class Tally:
    """Numbers of steps, and of drafted and accepted tokens by the drafter that proposed them."""

    steps: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def add(self, drafted: Iterable[str], accepted: Iterable[str]) -> None:
        """Count a step. Both name the drafter of each token."""
        self.steps += 1
        self.drafted.update(drafted)
        self.accepted.update(accepted)


class Step(NamedTuple):
    """The common data of the steps of one request.

    num_logprobs  likeliest tokens to report beside each accepted one; None: no log-probabilities
    drafts_forced  draft the tokens that a grammar or a thought's closing forces, whatever the drafter proposes; not in
                   plain decoding
    ahead   tokens of plain decoding that are computed ahead; None: each step computes its own
    """

    model: Transformer
    cache: FullCache
    drafter: Drafter
    sampler: Sampler
    context: Context
    timings: Timings
    tally: Tally
    num_logprobs: int | None = None
    drafts_forced: bool = False
    ahead: PlainAhead | None = None

    def run(self, max_tokens: int) -> Routine[Accepted]:
        """One step: appends at least one and at most `max_tokens` tokens to the context.

        NumericalError if the target's logits are not finite.
        """
        context, timings = self.context, self.timings
        began = clock()
        max_tokens = min(max_tokens, self.sampler.quiet_for(context))
        if self.ahead and (accepted := self.ahead.step(context, min(max_tokens, plain_steps_of(self.drafter)))):
            timings.verify += clock() - began
            self.drafter.observe(context, accepted)
            self._count((), ())
            return accepted
        tree = yield from self._propose(max_tokens - 1)
        drafted = clock()
        sampler = self.sampler.for_tree(tree, context)
        device = sampler.on_device
        choice = device.tree_choice(tree, context) if device and self.num_logprobs is None else None
        result = yield ForwardRequest(self.model, tree_rows(tree, len(context) - 1), self.cache, len(tree),
                                      choice=choice)
        verified = clock()
        path, tokens = verify(sampler, result, tree, context, self.cache)
        if NO_TOKEN in tokens:
            raise NumericalError
        logprobs = () if self.num_logprobs is None else path_logprobs(
            sampler, result.logits, tree, path, tokens, context, self.num_logprobs)
        chosen = clock()
        self.cache.commit(path)
        context.extend(tokens)
        committed = clock()
        accepted = Accepted(tuple(tokens), tuple(path), tuple([tree.sources[node] for node in path[1:]]),
                            Verified(result, path), len(tree) - 1, max(tree.depths), logprobs)
        self.drafter.observe(context, accepted)
        timings.draft += drafted - began + clock() - committed
        timings.verify += verified - drafted
        timings.sample += chosen - verified
        timings.commit += committed - chosen
        self._count(tree.sources[1:], accepted.sources)
        return accepted

    def _count(self, drafted: Iterable[str], accepted: Iterable[str]) -> None:
        """Count a step. Both name the drafter of each token."""
        if not self.tally.steps and len(self.context) > PREFILL_CHUNK:
            return_free_memory()  # of the prompt's chunks: what follows needs less
        self.tally.add(drafted, accepted)

    def _propose(self, max_depth: int) -> Routine[Tree]:
        """The drafter's tree without hopeless guesses, and with the tokens that a grammar forces."""
        tree = (yield from self.drafter.propose(self.context, max_depth)).pruned(max_depth)
        tree = self.sampler.pruned(tree, self.context)
        if self.drafts_forced:
            tree = self.sampler.extended(tree, self.context, max_depth)
        assert tree.tokens[0] == self.context.last, "a tree grows on the last token of the text"
        return tree
