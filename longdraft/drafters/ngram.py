"""The n-grams of the text itself, as in TokenSwift (paper 3.3): what followed the last token earlier, as one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longdraft.drafters.matches import DelayedTokens, MatchDrafter
from longdraft.drafters.ngram_table import RANKED, NgramTable
from longdraft.drafters.options import DrafterOptions
from longdraft.errors import check
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie

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


class NgramMatcher:
    """The n-gram table of one text. Implements `Matcher`."""

    def __init__(self, options: NgramOptions, params: SamplingParams) -> None:
        self._options = options
        self._table = NgramTable(options.order, options.capacity)
        self._tokens = DelayedTokens(options.delay, params)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    def update(self, context: Context) -> None:
        """Count the n-grams that the text has gained."""
        self._table.extend(self._tokens.take(context).tolist())

    def add_matches(self, trie: Trie, node: int, context: Context, path: Sequence[int], max_depth: int) -> None:
        """See `Matcher`. What followed the last token."""
        last = path[-1] if path else context.last
        for continuation in self._table.continuations(last, self._options.continuations, self._options.seen):
            trie.graft(node, continuation[:max_depth], NGRAM)


class NgramDrafter(MatchDrafter[NgramMatcher]):
    def __init__(self, options: NgramOptions, params: SamplingParams) -> None:
        super().__init__(NgramMatcher(options, params))
