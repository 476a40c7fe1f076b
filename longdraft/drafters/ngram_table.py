"""The n-gram table of TokenSwift (paper 3.3): what followed a token earlier, most frequent first.

    table = NgramTable(order=4)
    table.extend([5, 6, 7, 8, 5, 6, 7, 8, 5])
    table.continuations(5, 2)                     # [(6, 7, 8), ...]

Continuations are ranked by (count, most recent), exactly. A count only grows by the n-gram just read. So the best
RANKED continuations of each token stay sorted with work bounded by RANKED: an n-gram among them moves up; any other
n-gram displaces the last one when it outranks it. (The paper's code keeps a set ordered by the count alone, in which
n-grams of equal count delete each other.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

_NGRAM_BYTES = 240  # of an n-gram of four tokens with its count, as tracemalloc measures after 20,000 tokens
RANKED = 32  # continuations kept sorted for each token: the largest `num` of `NgramTable.continuations`


@dataclass(slots=True)
class _Entry:
    count: int = 0
    latest: int = 0  # number of n-grams read when this one was last seen

    def __lt__(self, other: _Entry) -> bool:
        return (self.count, self.latest) < (other.count, other.latest)


@dataclass(slots=True)
class _Continuations:
    """The tokens that followed one token."""

    entries: dict[tuple[int, ...], _Entry] = field(default_factory=dict)
    ranked: list[tuple[int, ...]] = field(default_factory=list)  # best first


class NgramTable:
    """Counts of n-grams by their first token, with bounded memory.

    order     n; a continuation has n - 1 tokens
    capacity  n-grams stored at most; beyond it, all counts are halved and n-grams whose count becomes 0 are dropped
    """

    def __init__(self, order: int, capacity: int = 262_144) -> None:
        self._order = order
        self._capacity = capacity
        self._by_token: dict[int, _Continuations] = {}
        self._recent: deque[int] = deque(maxlen=order)
        self._clock = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Memory of the n-grams, about."""
        return _NGRAM_BYTES * self._size

    def extend(self, tokens: Iterable[int]) -> None:
        """Read the next tokens of the text."""
        for token in tokens:
            self._recent.append(token)
            if len(self._recent) == self._order:
                first, *continuation = self._recent
                self._count(first, tuple(continuation))

    def continuations(self, token: int, num: int, seen: int = 1) -> list[tuple[int, ...]]:
        """At most `num` (up to RANKED) continuations of `token` that occurred `seen` times or more, best first."""
        known = self._by_token.get(token, _Continuations())
        return [continuation for continuation in known.ranked[:num] if known.entries[continuation].count >= seen]

    def _count(self, first: int, continuation: tuple[int, ...]) -> None:
        known = self._by_token.setdefault(first, _Continuations())
        entry = known.entries.get(continuation)
        if entry is None:
            entry = known.entries[continuation] = _Entry()
            self._size += 1
        self._clock += 1
        entry.count += 1
        entry.latest = self._clock
        self._rank(known, continuation, entry)
        if self._size > self._capacity:
            self._halve_counts()

    def _rank(self, known: _Continuations, continuation: tuple[int, ...], entry: _Entry) -> None:
        ranked = known.ranked
        if continuation in ranked:
            index = ranked.index(continuation)
        elif len(ranked) < RANKED:
            ranked.append(continuation)
            index = len(ranked) - 1
        elif known.entries[ranked[-1]] < entry:
            ranked[-1] = continuation
            index = RANKED - 1
        else:
            return
        while index and known.entries[ranked[index - 1]] < entry:
            ranked[index] = ranked[index - 1]
            index -= 1
        ranked[index] = continuation

    def _halve_counts(self) -> None:
        """Halve all counts, until half of the capacity is free. Amortised O(1) for each n-gram read."""
        while self._size > self._capacity // 2:
            for first, known in list(self._by_token.items()):
                known.entries = {continuation: _Entry(entry.count // 2, entry.latest)
                               for continuation, entry in known.entries.items() if entry.count > 1}
                known.ranked = sorted(known.entries, key=known.entries.__getitem__, reverse=True)[:RANKED]
                if not known.entries:
                    del self._by_token[first]
            self._size = sum(len(known.entries) for known in self._by_token.values())
