"""Detects a text that repeats itself. It reads the tokens alone, so no drafter can change where a text ends.

There are two signs, each with constant time and memory for each token:

    period   the last tokens repeat with a period of up to PERIODS: at least REPEATS times after the first time, and
             for at least LEAST tokens
    poverty  fewer than POOR of the last WINDOW 4-grams are distinct, after more than RICH were

Tables, refrains and code repeat too, but not verbatim for so long (tests/unit/test_loops.py). If they are poor, they
are poor from the beginning, or become richer within the window. A third sign, drafts that are always accepted whole,
depends on the drafter, so it only adds a remark to the warning (`FullAcceptance`).
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PERIODS = 1024  # tokens; the longest period that is noticed
REPEATS = 4
LEAST = 512  # tokens
WINDOW = 2048  # 4-grams
GRAM = 4
POOR, RICH = 0.1, 0.5  # distinct 4-grams over 4-grams
_HIGH_SHARE = 0.95  # of steps whose whole draft was accepted
_LAST_STEP_WEIGHT = 1 / 64  # in the moving average of that share


class Loop(NamedTuple):
    """A loop that was noticed.

    token     new tokens that were written when it was
    period    tokens after which the text repeats; 0: it only has become poor
    repeated  tokens that have come again, by then
    distinct  distinct 4-grams over 4-grams of the window
    """

    token: int
    period: int
    repeated: int
    distinct: float

    def __str__(self) -> str:
        if self.period:
            return f"since token {self.token - self.repeated:,} the text repeats every {self.period:,} tokens"
        return f"only {self.distinct:.0%} of the last {WINDOW:,} 4-grams before token {self.token:,} are distinct"


class LoopGuard:
    """Sees every new token once. `loop` is the first loop that was noticed."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.is_looping = False  # at the last token
        self._num = 0
        # The last PERIODS tokens lie in order before `_at`; how long a period has held, likewise: the longest first.
        self._last: NDArray[np.int32] = np.full(8 * PERIODS, -1, dtype=np.int32)
        self._at = PERIODS
        self._held: NDArray[np.int32] = np.zeros(PERIODS, dtype=np.int32)
        self._needed = np.maximum(LEAST, REPEATS * np.arange(PERIODS, 0, -1)).astype(np.int32)
        self._gram: deque[int] = deque(maxlen=GRAM)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._was_rich = False

    @property
    def distinct(self) -> float:
        """Distinct 4-grams over 4-grams of the window; 1 where there are none yet."""
        return len(self._counts) / len(self._grams) if self._grams else 1.0

    def push(self, token: int) -> None:
        self._num += 1
        self._count(token)
        period = self._repeat(token)
        self.is_looping = bool(period) or self._is_poor()
        if self.loop is None and self.is_looping:
            repeated = int(self._held[PERIODS - period]) if period else 0
            self.loop = Loop(self._num, period, repeated, self.distinct)

    def _repeat(self, token: int) -> int:
        """The shortest period that has held for long enough; 0: none."""
        last = self._last[self._at - PERIODS : self._at]
        self._held += 1
        self._held *= last == token
        found = np.flatnonzero(self._held >= self._needed)
        if self._at == len(self._last):
            self._last[:PERIODS] = last
            self._at = PERIODS
        self._last[self._at] = token
        self._at += 1
        return PERIODS - int(found[-1]) if len(found) else 0

    def _count(self, token: int) -> None:
        self._gram.append(token)
        if len(self._gram) < GRAM:
            return
        gram = tuple(self._gram)
        self._grams.append(gram)
        self._counts[gram] += 1
        if len(self._grams) > WINDOW:
            old = self._grams.popleft()
            self._counts[old] -= 1
            if not self._counts[old]:
                del self._counts[old]

    def _is_poor(self) -> bool:
        is_full = len(self._grams) == WINDOW
        self._was_rich = self._was_rich or (is_full and self.distinct > RICH)
        return is_full and self._was_rich and self.distinct < POOR


class FullAcceptance:
    """The share of recent drafts that were accepted whole. It depends on the drafter, so it may only be printed."""

    def __init__(self) -> None:
        self._share = 0.0

    def push(self, accepted: int, depth: int) -> None:
        """A step whose draft was `depth` tokens deep, of which `accepted` were accepted."""
        if depth:
            self._share += _LAST_STEP_WEIGHT * ((accepted == depth) - self._share)

    @property
    def is_high(self) -> bool:
        return self._share >= _HIGH_SHARE
