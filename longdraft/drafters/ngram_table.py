"""The n-gram table of TokenSwift (paper 3.3): what followed this token before, most frequent first.

    table = NgramTable(order=4)
    table.extend([5, 6, 7, 8, 5, 6, 7, 8, 5])
    table.continuations(5, 2)                     # [(6, 7, 8), ...]

Ranking is by (count, most recent) and exact. A count only ever grows by the n-gram just seen, so the
best RANKED of a token's continuations can be kept in order with work bounded by RANKED: if the n-gram
is among them it moves up, else it displaces the last when it now outranks it. (The paper's code keeps
a set ordered by count alone, in which n-grams of equal count delete one another.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

RANKED = 32  # continuations kept in order for each token: the most `continuations` can give


@dataclass
class _Entry:
    count: int = 0
    latest: int = 0  # when it was last seen, in n-grams

    def __lt__(self, other: _Entry) -> bool:
        return (self.count, self.latest) < (other.count, other.latest)


@dataclass
class _Row:
    """The continuations of one token."""

    entries: dict[tuple[int, ...], _Entry] = field(default_factory=dict)
    ranked: list[tuple[int, ...]] = field(default_factory=list)  # best first


class NgramTable:
    """Counts of n-grams by their first token, with bounded memory.

    order     n; a continuation has n - 1 tokens
    capacity  n-grams held at most; beyond it counts are halved and those that fall to 0 forgotten
    """

    def __init__(self, order: int = 4, capacity: int = 262_144) -> None:
        self._order = order
        self._capacity = capacity
        self._rows: dict[int, _Row] = {}
        self._recent: deque[int] = deque(maxlen=order)
        self._clock = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, tokens: Iterable[int]) -> None:
        """Take in the next tokens of the text."""
        for token in tokens:
            self._recent.append(token)
            if len(self._recent) == self._order:
                first, *rest = self._recent
                self._count(first, tuple(rest))

    def continuations(self, token: int, num: int, seen: int = 1) -> list[tuple[int, ...]]:
        """At most `num` (up to RANKED) continuations of `token` that stood there `seen` times, the best first."""
        row = self._rows.get(token)
        return [rest for rest in row.ranked[:num] if row.entries[rest].count >= seen] if row else []

    def _count(self, first: int, rest: tuple[int, ...]) -> None:
        row = self._rows.setdefault(first, _Row())
        entry = row.entries.get(rest)
        if entry is None:
            entry = row.entries[rest] = _Entry()
            self._size += 1
        self._clock += 1
        entry.count += 1
        entry.latest = self._clock
        self._rank(row, rest, entry)
        if self._size > self._capacity:
            self._forget()

    def _rank(self, row: _Row, rest: tuple[int, ...], entry: _Entry) -> None:
        ranked = row.ranked
        if rest in ranked:
            place = ranked.index(rest)
        elif len(ranked) < RANKED:
            ranked.append(rest)
            place = len(ranked) - 1
        elif row.entries[ranked[-1]] < entry:
            ranked[-1] = rest
            place = RANKED - 1
        else:
            return
        while place and row.entries[ranked[place - 1]] < entry:
            ranked[place] = ranked[place - 1]
            place -= 1
        ranked[place] = rest

    def _forget(self) -> None:
        """Age everything by half. Each n-gram pays for its part of this once: amortised O(1)."""
        while self._size > self._capacity // 2:
            for first, row in list(self._rows.items()):
                row.entries = {rest: _Entry(entry.count // 2, entry.latest)
                               for rest, entry in row.entries.items() if entry.count > 1}
                row.ranked = sorted(row.entries, key=row.entries.__getitem__, reverse=True)[:RANKED]
                if not row.entries:
                    del self._rows[first]
            self._size = sum(len(row.entries) for row in self._rows.values())
