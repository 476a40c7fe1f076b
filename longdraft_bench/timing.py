"""The runner of calls: cases take turns, so that a slow moment of the machine affects all of them.

    first, second = interleaved([lambda: f(x), lambda: g(x)], repeats=9)
    print(first.median_s / second.median_s)
    samples = in_rounds({"with": work, "without": other_work}, rounds=5)     # what each call returned
    print(median_ratio(samples["with"], samples["without"]))

`longdraft_bench/turns.py` is the runner of texts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, TypeVar

_MIN_SAMPLE_S = 2e-3  # a sample repeats short calls until it takes about this long
_MAX_CALLS_PER_SAMPLE = 1000

Call = Callable[[], object]
T = TypeVar("T")


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
    return [Timing.of(taken) for taken in samples]


def _warm_up(call: Call) -> float:
    """Seconds of the second call; the first one may load code or memory."""
    call()
    return max(_seconds_per_call(call, 1), 1e-9)


def _seconds_per_call(call: Call, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def seconds_of(call: Call) -> float:
    """Seconds of one call."""
    return _seconds_per_call(call, 1)


def in_rounds(cases: Mapping[str, Callable[[], T]], rounds: int, *, alternates: bool = False) -> dict[str, list[T]]:
    """What each case returns in each round. A round runs every case once, in the order of `cases`.

    alternates  every second round has the reverse order, so that each case comes first equally often
    """
    samples: dict[str, list[T]] = {name: [] for name in cases}
    for number in range(rounds):
        names = list(cases)
        for name in reversed(names) if alternates and number % 2 else names:
            samples[name].append(cases[name]())
    return samples


def median_ratio(samples: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of sample / other sample of the same round. A case that failed has fewer rounds."""
    return median(sample / other for sample, other in zip(samples, others))
