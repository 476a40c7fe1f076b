"""Reuse of the text's own n-grams: continuations of the last token from the 4-gram table, as one trie."""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.core import Context, SamplingParams
from longdraft.drafters.ngram_table import RANKED, NgramTable
from longdraft.errors import check
from longdraft.model.routine import atomic
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

SOURCE = "ngram"


@dataclass(frozen=True)
class NgramOptions:
    """Options of `ngram`.

    continuations  n-grams tried in each step at most
    seen           how often an n-gram must have stood in the text to be tried
    order          tokens of an n-gram, the first of which is looked up
    capacity       n-grams remembered at most
    delay          tokens of the text's end that are not yet in the table; -1: the penalty window while
                   there is a penalty (as in the paper: those n-grams are being penalised), else 0
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


class DelayedTable:
    """An n-gram table that follows a context some tokens behind its end."""

    def __init__(self, options: NgramOptions, params: SamplingParams) -> None:
        self._table = NgramTable(options.order, options.capacity)
        self._num, self._seen = options.continuations, options.seen
        self._delay = options.delay
        if options.delay < 0:
            self._delay = params.penalty_window if params.repetition_penalty != 1 else 0
        self._taken = 0

    def follow(self, context: Context) -> None:
        end = max(self._taken, len(context) - self._delay)
        self._table.extend(context.slice(self._taken, end).tolist())
        self._taken = end

    def graft(self, trie: Trie, node: int, token: int, max_length: int) -> None:
        """Add the continuations of `token` below `node`, cut to `max_length`."""
        for continuation in self._table.continuations(token, self._num, self._seen):
            trie.graft(node, continuation[:max_length], SOURCE)


class NgramDrafter:
    def __init__(self, options: NgramOptions, params: SamplingParams) -> None:
        self._table = DelayedTable(options, params)

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._table.follow(context)

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        trie = Trie(context.last)
        self._table.graft(trie, 0, context.last, max_depth)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._table.follow(context)
