"""Time short calls: medians over interleaved repeats.

    first, second = interleaved([lambda: f(x), lambda: g(x)], repeats=9)
    print(first.median_s / second.median_s)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

_MIN_SAMPLE_S = 2e-3  # a sample repeats short calls until it takes about this long
_MAX_CALLS_PER_SAMPLE = 1000

Call = Callable[[], object]


class Timing(NamedTuple):
    """Seconds of one call: the median, the lowest and the highest of the repeats."""

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Timing:
        return cls(median(samples_s), min(samples_s), max(samples_s))

    def in_ms(self) -> dict[str, float]:
        return {"ms": self.median_s * 1e3, "ms_low": self.low_s * 1e3, "ms_high": self.high_s * 1e3}


def interleaved(calls: Sequence[Call], repeats: int) -> list[Timing]:
    """Time each call. A round takes one sample of every call, so that a slow moment of the machine affects all."""
    counts = [max(1, min(_MAX_CALLS_PER_SAMPLE, math.ceil(_MIN_SAMPLE_S / _warm_up(call)))) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for index, call in enumerate(calls):
            samples[index].append(_seconds_per_call(call, counts[index]))
    return [Timing.of(seconds) for seconds in samples]


def _warm_up(call: Call) -> float:
    """Seconds of the second call; the first one may load code or memory."""
    call()
    return max(_seconds_per_call(call, 1), 1e-9)


def _seconds_per_call(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
