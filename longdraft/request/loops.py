"""Detects a text that repeats itself. It uses only the tokens, so no drafter can change where a text ends.

There are two signs. Each takes constant time and memory per token, and the first is checked only when a period can
have held for long enough:

    period   the last tokens repeat with a period of up to PERIODS: at least REPEATS times after the first, and
             for at least LEAST_LOOP tokens
    poverty  less than POOR of the last WINDOW 4-grams are distinct, after more than RICH were

Tables, refrains and code repeat too, but not verbatim for so long (tests/unit/test_loops.py). If few of their 4-grams
are distinct, this is so from the beginning, or for less than the window. A third sign, drafts that are always accepted
in full, depends on the drafter. It therefore only adds a remark to the warning (`FullAcceptance`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PERIODS = 1024  # tokens; the longest period that is detected
REPEATS = 4
LEAST_LOOP = 512  # tokens
WINDOW = 2048  # 4-grams
GRAM = 4
POOR, RICH = 0.1, 0.5  # distinct 4-grams over 4-grams
_KEPT = PERIODS + LEAST_LOOP  # tokens that a check looks at
_HIGH_SHARE = 0.95  # of the steps whose draft was accepted in full
_LAST_STEP_WEIGHT = 1 / 64  # in the moving average of that share


class Loop(NamedTuple):
    """A detected loop.

    token     number of new tokens at detection
    period    tokens after which the text repeats; 0: the sign was poverty
    repeated  number of tokens that had repeated at detection
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
    """Checks each new token, in order. `loop` is the first loop detected, or None."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.is_looping = False  # whether the last token is part of a loop
        self.period = 0  # the shortest that has held for long enough; 0: none
        self._num = 0
        # _last[_at - _KEPT : _at]: the last tokens, of which the last _unchecked ones are not in _held yet.
        # _held[i]: for how many tokens period PERIODS - i had held before these.
        self._last: NDArray[np.int32] = np.full(8 * PERIODS, -1, dtype=np.int32)
        self._at = _KEPT
        self._unchecked, self._due = 0, LEAST_LOOP  # before _due tokens, no period can have held for long enough
        self._held: NDArray[np.int32] = np.zeros(PERIODS, dtype=np.int32)
        self._needed = np.maximum(LEAST_LOOP, REPEATS * np.arange(PERIODS, 0, -1)).astype(np.int32)
        self._gram: deque[int] = deque(maxlen=GRAM)
        self._grams: deque[tuple[int, ...]] = deque()
        self._counts: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._was_rich = False

    @property
    def distinct(self) -> float:
        """Distinct 4-grams over 4-grams of the window; 1 if there are none yet."""
        return len(self._counts) / len(self._grams) if self._grams else 1.0

    @property
    def quiet_for(self) -> int:
        """Tokens, at least 1, of which only the last can be the first token of a loop."""
        period = self._due - self._unchecked
        distinct, poor = len(self._counts), int(POOR * WINDOW)
        # The window has to be full, and each token makes one 4-gram less distinct at most.
        poverty = max(WINDOW - len(self._grams), distinct - poor if self._was_rich else int((RICH - POOR) * WINDOW))
        return max(1, min(period, poverty))

    def push(self, token: int) -> None:
        self._num += 1
        self._count(token)
        self.period = self._repeat(token)
        self.is_looping = bool(self.period) or self._is_poor()
        if self.loop is None and self.is_looping:
            repeated = int(self._held[PERIODS - self.period]) if self.period else 0
            self.loop = Loop(self._num, self.period, repeated, self.distinct)

    def _repeat(self, token: int) -> int:
        """The shortest period that has held for long enough; 0: none."""
        if self._at == len(self._last):
            self._last[:_KEPT] = self._last[-_KEPT:]
            self._at = _KEPT
        self._last[self._at] = token
        self._at += 1
        self._unchecked += 1
        if self._unchecked < self._due:
            return 0
        self._check()
        missing = self._needed - self._held
        self._due = max(1, int(missing.min()))
        lasting = np.flatnonzero(missing <= 0)
        return PERIODS - int(lasting[-1]) if len(lasting) else 0

    def _check(self) -> None:
        """Compare the unchecked tokens with those a period before, from the last one back: most periods end at once."""
        last, indices = self._last, np.arange(PERIODS)  # of the periods that have held so far
        for end in range(self._at - 1, self._at - 1 - self._unchecked, -1):
            holds = last[end - PERIODS + indices] == last[end]
            self._held[indices[~holds]] = self._at - 1 - end
            indices = indices[holds]
            if not len(indices):
                break
        self._held[indices] += self._unchecked
        self._unchecked = 0

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
    """The share of recent drafts that were accepted in full. It depends on the drafter, so it may only be printed."""

    def __init__(self) -> None:
        self._share = 0.0

    def push(self, accepted: int, depth: int) -> None:
        """A step whose draft was `depth` tokens deep, of which `accepted` were accepted."""
        if depth:
            self._share += _LAST_STEP_WEIGHT * ((accepted == depth) - self._share)

    @property
    def is_high(self) -> bool:
        return self._share >= _HIGH_SHARE
