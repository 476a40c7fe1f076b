"""Statistics of one text while it is written: draft acceptance, throughput, and probes of plain decoding.

The engine thread adds to them while the event loop reads them.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from longdraft.request.events import Event

_WINDOW_S = 5.0  # throughput is averaged over this time
_MAX_PROBE_SHARE = 0.01  # of the text's own time that measuring plain decoding may take
_PROBE_INTERVAL_S = 0.5  # minimum time between two such measurements


class DraftAcceptance:
    """How many draft tokens each step verified and accepted."""

    def __init__(self) -> None:
        self._accepted: Counter[int] = Counter()  # draft tokens accepted in a step -> number of such steps
        self._by_depth: dict[int, Counter[int]] = {}  # the same for each depth of the draft
        self._drafted = 0

    def add(self, event: Event) -> None:
        self._accepted[event.num_accepted] += 1
        self._by_depth.setdefault(event.depth, Counter())[event.num_accepted] += 1
        self._drafted += event.drafted

    @property
    def mean_length(self) -> float:
        """Mean accepted length: tokens per verification forward, the target model's own token included."""
        steps = self._accepted.total()
        return 1 + self._num_accepted / steps if steps else 0.0

    @property
    def _num_accepted(self) -> int:
        return sum(accepted * steps for accepted, steps in list(self._accepted.items()))

    def report(self) -> dict[str, Any]:
        """vLLM's per-request statistics. Lengths include the target model's own token, histograms do not."""
        return {
            "mean_acceptance_length": self.mean_length,
            "draft_acceptance_rate": self._num_accepted / self._drafted if self._drafted else 0.0,
            "acceptance_histogram": _as_list(self._accepted),
            "acceptance_histogram_by_draft_length": {
                str(depth): _as_list(counts) for depth, counts in sorted(self._by_depth.items())},
            "num_spec_steps": self._accepted.total(),
            "num_accepted_draft_tokens": self._num_accepted,
            "num_draft_tokens": self._drafted,
            "num_spec_tokens": max(self._by_depth, default=0),
        }


def _as_list(counts: Counter[int]) -> list[int]:
    """Counts by index, from 0 to the largest key."""
    return [counts[i] for i in range(max(counts, default=0) + 1)]


class Throughput:
    """Recent tokens per second, by wall-clock time and by the text's own time, which excludes the other texts' work."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, int]] = deque()  # wall-clock s, own s, tokens so far

    def add(self, now: float, own_seconds: float, tokens: int) -> None:
        if self._samples and now - self._samples[-1][0] < _WINDOW_S / 50:
            return
        self._samples.append((now, own_seconds, tokens))
        while now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()

    @property
    def wall(self) -> float:
        return self._rate(0)

    @property
    def own(self) -> float:
        return self._rate(1)

    def _rate(self, clock: int) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last[clock] - first[clock]
        return (last[2] - first[2]) / seconds if seconds > 0 else 0.0


class PlainProbes:
    """When to run a forward of plain decoding for comparison, while a text is drafted."""

    def __init__(self) -> None:
        self._latest = 0.0  # step without a draft, or probe: monotonic time
        self._seconds = 0.0  # of all probes

    def is_due(self, now: float, own_seconds: float) -> bool:
        """own_seconds: the text's own time so far"""
        return now - self._latest >= _PROBE_INTERVAL_S and self._seconds <= _MAX_PROBE_SHARE * own_seconds

    def postpone(self, now: float, seconds: float = 0.0) -> None:
        """Plain decoding was timed, in a probe of so many seconds or in a step."""
        self._latest = now
        self._seconds += seconds
