"""How long something takes: medians over interleaved repeats, on memory that the caches cannot hold.

    fast, slow = interleaved([lambda: f(next(turn)), lambda: g(next(turn))], repeats=9)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

_SAMPLE_S = 2e-3  # a sample is at least about this long: as many calls as that takes
_MAX_CALLS = 1000

Work = Callable[[], object]


class Timing(NamedTuple):
    """Seconds of one call: the median over the repeats, and the least and the most of them."""

    median_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Timing:
        return cls(median(samples_s), min(samples_s), max(samples_s))

    def in_ms(self) -> dict[str, float]:
        return {"ms": self.median_s * 1e3, "ms_low": self.low_s * 1e3, "ms_high": self.high_s * 1e3}


def interleaved(works: Sequence[Work], repeats: int) -> list[Timing]:
    """Each work's timing. One sample of every work is a round, so that a slow moment of the machine hits all."""
    calls = [max(1, min(_MAX_CALLS, math.ceil(_SAMPLE_S / _warm(work)))) for work in works]
    samples: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for index, work in enumerate(works):
            samples[index].append(_seconds(work, calls[index]))
    return [Timing.of(found) for found in samples]


def _warm(work: Work) -> float:
    """Seconds of a call that is not the first."""
    work()
    return max(_seconds(work, 1), 1e-9)


def _seconds(work: Work, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


class Limits(NamedTuple):
    """What this machine was measured to do at most, with the threads in use; `details` says how."""

    read_bandwidth: float  # bytes a second
    peak: dict[str, float]  # dtype -> floating-point operations a second of a matrix product
    details: dict[str, Any]


def figures(timing: Timing, limits: Limits, dtype: str, *, bytes_read: int = 0, flops: int = 0) -> dict[str, float]:
    """A timing, and what it reached, as fractions of the measured limits."""
    found = timing.in_ms()
    if bytes_read:
        rate = bytes_read / timing.median_s
        found |= {"bytes_read": bytes_read, "gb_per_s": rate / 1e9, "of_bandwidth": rate / limits.read_bandwidth}
    if flops:
        rate = flops / timing.median_s
        found |= {"gflop_per_s": rate / 1e9, "of_peak": rate / limits.peak[dtype]}
    return found


def copies(nbytes: int, memory: int) -> int:
    """How many pieces of `nbytes` in rotation make `memory` bytes."""
    return max(1, math.ceil(memory / nbytes))
