"""A rate that is counted while writing: later outcomes weigh more, and a prior stands in for what was not counted yet.

With x_i out of y_i in the i-th of n outcomes:

    hits  =  sum of decay ^ (n - i) * x_i
    tries =  sum of decay ^ (n - i) * y_i
    rate  =  (hits + weight * expected) / (tries + weight)

For right and wrong guesses (x_i is 0 or 1, y_i is 1), this is the mean of the Beta distribution that follows from the
prior Beta(weight * expected, weight * (1 - expected)). About the last 1 / (1 - decay) outcomes count.
"""

from __future__ import annotations

DECAY = 0.985  # about the last 66 outcomes count
PRIOR_WEIGHT = 4.0  # outcomes that an expected rate weighs as much as


class DecayedRate:
    """See above.

    decay  weight of the earlier outcomes at each new one
    tries  that were counted, decayed
    """

    __slots__ = ("_hits", "decay", "tries")

    def __init__(self, decay: float = DECAY) -> None:
        self.decay = decay
        self.tries = 0.0
        self._hits = 0.0

    def add(self, hits: float, tries: float = 1.0) -> None:
        """An outcome: by default whether one guess was right, else so many units out of so many."""
        self._hits = self.decay * self._hits + hits
        self.tries = self.decay * self.tries + tries

    def value(self, expected: float, weight: float = PRIOR_WEIGHT) -> float:
        """The rate. expected: before the first outcome"""
        return (self._hits + weight * expected) / (self.tries + weight)

    @property
    def mean(self) -> float:
        """The rate of the counted outcomes alone; 0 before the first."""
        return self._hits / self.tries if self.tries else 0.0

    def halve(self) -> None:
        """Let what was counted so far weigh half."""
        self._hits /= 2
        self.tries /= 2
