"""How a text's drafts fared, in the shape of vLLM's per-request statistics.

Lengths count the token that the target itself adds, histograms do not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from longdraft.core import Event


class Acceptance:
    """Sees every step of one text."""

    def __init__(self) -> None:
        self._accepted: Counter[int] = Counter()  # guesses accepted in a step -> steps
        self._by_depth: dict[int, Counter[int]] = {}
        self._drafted = 0

    def add(self, event: Event) -> None:
        self._accepted[event.num_accepted] += 1
        self._by_depth.setdefault(event.depth, Counter())[event.num_accepted] += 1
        self._drafted += event.drafted

    @property
    def mean_length(self) -> float:
        """Tokens for each forward of the target."""
        steps = self._accepted.total()
        return 1 + self._num_accepted / steps if steps else 0.0

    @property
    def _num_accepted(self) -> int:
        # Asked for while the engine's thread adds to it.
        return sum(accepted * steps for accepted, steps in list(self._accepted.items()))

    def report(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": self.mean_length,
            "draft_acceptance_rate": self._num_accepted / self._drafted if self._drafted else 0.0,
            "acceptance_histogram": _listed(self._accepted),
            "acceptance_histogram_by_draft_length": {
                str(depth): _listed(counts) for depth, counts in sorted(self._by_depth.items())},
            "num_spec_steps": self._accepted.total(),
            "num_accepted_draft_tokens": self._num_accepted,
            "num_draft_tokens": self._drafted,
            "num_spec_tokens": max(self._by_depth, default=0),
        }


def _listed(counts: Counter[int]) -> list[int]:
    """Counts by index, from 0 to the largest."""
    return [counts[i] for i in range(max(counts, default=0) + 1)]
