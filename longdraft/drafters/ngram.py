"""The n-grams of the text itself, as in TokenSwift (paper 3.3): what followed the last token earlier, as one tree."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longdraft.drafters.ngram_table import RANKED, NgramTable
from longdraft.drafters.options import DrafterOptions
from longdraft.errors import check
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import atomic

NGRAM = "ngram"  # the source of the guesses in the statistics


@dataclass(frozen=True)
class NgramOptions(DrafterOptions):
    """Options of `ngram`.

    continuations  n-grams tried in each step at most
    seen           number of times an n-gram must have occurred in the text to be tried
    order          tokens of an n-gram, the first of which is looked up
    capacity       n-grams stored at most
    delay          last tokens of the text that are not yet in the table; -1: the penalty window if there is a
                   repetition penalty (as in the paper: those n-grams are being penalised), else 0
    """

    continuations: int = 5
    seen: int = 2
    order: int = 4
    capacity: int = 262_144
    delay: int = -1

    def __post_init__(self) -> None:
        check(1 <= self.continuations <= RANKED, "continuations", self.continuations, f"1 to {RANKED}")
        check(self.seen >= 1, "seen", self.seen, "1 or more")
        check(2 <= self.order <= 16, "order", self.order, "2 to 16")
        check(self.capacity >= 16, "capacity", self.capacity, "16 or more")
        check(self.delay >= -1, "delay", self.delay, "0 or more, or -1 for the penalty window")


class DelayedTokens:
    """Gives each token of a growing text once, when `delay` more tokens have been written.

    After a cut of the text it goes on with the new tokens. Those that were taken back and given before remain given.

    delay  a number of tokens; -1: the penalty window of `params` if there is a penalty, else 0
    """

    def __init__(self, delay: int, params: SamplingParams) -> None:
        self._delay = delay
        if delay < 0:
            self._delay = params.penalty_window if params.repetition_penalty != 1 else 0
        self._end = 0

    def take(self, context: Context) -> NDArray[np.int32]:
        """The tokens [N] that have become due since the last call."""
        start = min(self._end, len(context))
        self._end = max(start, len(context) - self._delay)
        return context.slice(start, self._end)


class NgramMatcher:
    """The n-gram table of one text."""

    def __init__(self, options: NgramOptions, params: SamplingParams) -> None:
        self._options = options
        self._table = NgramTable(options.order, options.capacity)
        self._tokens = DelayedTokens(options.delay, params)

    def update(self, context: Context) -> None:
        """Count the n-grams that the text has gained."""
        self._table.extend(self._tokens.take(context).tolist())

    def add_matches(self, trie: Trie, node: int, token: int, max_depth: int) -> None:
        """Add what followed `token` earlier below `node`, at most `max_depth` tokens of it."""
        for continuation in self._table.continuations(token, self._options.continuations, self._options.seen):
            trie.graft(node, continuation[:max_depth], NGRAM)


class NgramDrafter:
    reads_text_only = True

    def __init__(self, options: NgramOptions, params: SamplingParams) -> None:
        self._matcher = NgramMatcher(options, params)

    def inherit(self, earlier: NgramDrafter, num_retracted: int) -> None:
        self._matcher = earlier._matcher

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._matcher.update(context)

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        trie = Trie(context.last)
        self._matcher.add_matches(trie, 0, context.last, max_depth)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._matcher.update(context)
