"""The clock of what a text costs, alone and in a batch."""

from __future__ import annotations

import time
from collections.abc import Callable


class CostClock:
    """Measures the cost of one text: the time of its own work, and its share of the forwards and rounds that it takes
    part in.

    batch_size  number of texts that currently share forwards
    together    number of texts whose latest launched work was done together
    sharers     number of texts that shared the latest verification
    """

    def __init__(self, always: bool = False, agree: Callable[[float], float] = float) -> None:
        """always: start now, for a text generated alone; agree: maps this rank's number to that of all ranks."""
        self.batch_size = self.together = self.sharers = 1
        self._charged = 0.0
        self.agree = agree
        self._since = time.perf_counter() if always else None  # start of the text's own work; None: stopped

    def __call__(self) -> float:
        """Cost so far, in seconds."""
        return self.agree(self._charged + (0.0 if self._since is None else time.perf_counter() - self._since))

    @property
    def charged(self) -> float:
        """Cost up to the latest `stop` or `charge`, in seconds, on this rank."""
        return self._charged

    def charge(self, seconds: float) -> None:
        """Add the text's share of what several texts do together, in seconds."""
        self._charged += seconds

    def start(self, batch_size: int = 1) -> None:
        """Start the clock of the text's own work."""
        self.batch_size, self.together = batch_size, min(self.together, batch_size)
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock of the text's own work."""
        if self._since is not None:
            self._charged += time.perf_counter() - self._since
        self._since = None
