"""A rate that is counted while writing. Its later outcomes weigh more, and a prior stands in for what was not counted.

With x_i out of y_i in the i-th outcome, the latest being the n-th:

    hits  =  Σ DECAY^(n - i) x_i        tries  =  Σ DECAY^(n - i) y_i

    rate  =  (hits + weight * expected) / (tries + weight)

which is the mean of a Beta distribution with the prior Beta(weight * expected, weight * (1 - expected)) where the
outcomes are right or wrong. About the last 1 / (1 - DECAY) outcomes count.
"""

from __future__ import annotations

DECAY = 0.985  # about the last 66 outcomes count


class DecayedRate:
    """See above."""

    __slots__ = ("_hits", "count", "tries")

    def __init__(self) -> None:
        self._hits = 0.0
        self.tries = 0.0  # decayed
        self.count = 0  # outcomes

    def add(self, hits: float, tries: float = 1.0) -> None:
        """An outcome: by default whether one guess was right, else so many units out of so many."""
        self._hits = DECAY * self._hits + hits
        self.tries = DECAY * self.tries + tries
        self.count += 1

    def value(self, expected: float = 0.0, weight: float = 0.0) -> float:
        """The rate. expected: prior, which weighs as much as `weight` of the latest outcomes"""
        return (self._hits + weight * expected) / (self.tries + weight)
