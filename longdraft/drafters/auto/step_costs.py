"""Seconds of a request's next step without its draft, by its rows: measured costs as the pace corrects them."""

from __future__ import annotations

import numpy as np

from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.drafters.auto.shared import SharedStatistics
from longdraft.speculation.cost_clock import CostClock

_ROWS = np.arange(1 + AUTO_SETTINGS.max_rows, dtype=np.float64)
_SIZES = np.array([rows.bit_length() for rows in range(1 + AUTO_SETTINGS.max_rows)])  # forwards of a size share a pace
_MEASURED_WEIGHT = 0.5  # of what was measured of steps ahead before the first text: single ones are noisy
_SHARING_RATE = 0.02  # how much of the share of requests that verify together is taken over at once


class StepCosts:
    """The seconds of one request's next step.

    forwards  seconds of a forward with the sampler and the commit, by rows from 0 to AUTO_SETTINGS.max_rows
    steps     the same with what passes between two steps
    is_ahead  whether this request's steps of plain decoding are computed ahead, as far as is known
    """

    def __init__(self, shared: SharedStatistics, clock: CostClock) -> None:
        self._shared = shared
        self._clock = clock
        self.is_ahead = True

    def update(self, length: int) -> None:
        """Expect steps after a text of so many tokens, of as many requests as share forwards now."""
        pace = self._shared.pace
        factors = list[float]()
        for size, kind in enumerate(map(self.kind, range(1 + AUTO_SETTINGS.max_rows.bit_length()))):
            # Several rows that were not timed are expected to be as far off as fewer of them.
            factors.append(factors[-1] if size > 2 and kind not in pace else pace[kind])
        self._factors = np.array(factors)[_SIZES]
        self._length = length
        num_requests = self._clock.batch_size
        sharers = np.full(len(_SIZES), float(num_requests))
        sharers[2:] = max(1.0, self._shared.sharing * num_requests)
        self.forwards = self._factors * self._shared.forward.at(_ROWS, length, sharers, num_requests)
        several = self.forwards[2:]  # noise only adds to their times: more rows take no less
        np.minimum.accumulate(several[::-1], out=several[::-1])
        self.steps = self.forwards + self._shared.between

    @property
    def plain(self) -> float:
        """Seconds of a step of plain decoding, with what passes between two steps."""
        shared, is_batch = self._shared, self._clock.batch_size > 1
        between = shared.between if shared.after_plain is None or is_batch else shared.after_plain
        forward = float(self.forwards[1])
        single = forward + between
        if is_batch or not self.is_ahead:
            return single
        saved = float(self._factors[1]) * shared.forward.ahead
        return forward * shared.ahead.value((single - saved) / forward, _MEASURED_WEIGHT)

    def kind(self, size: int) -> tuple[int, bool]:
        """The kind, for `Pace`, of forwards whose number of rows has so many binary digits."""
        return size, self._clock.batch_size > 1

    def of_latest(self, rows: int) -> float:
        """Expected seconds of a forward with so many rows, shared by as many requests as the latest one."""
        sharers = self._clock.sharers
        num_requests = self._clock.batch_size
        if num_requests == 1 or (rows == 1 and sharers == num_requests):  # as `update` expects
            return float(self.forwards[rows])
        return float(self._factors[rows] * self._shared.forward.at([rows], self._length, sharers, num_requests)[0])

    def count_sharers(self, rows: int) -> None:
        """The latest forward verified so many rows of this request."""
        if rows > 1 and self._clock.batch_size > 1:
            share = self._clock.sharers / self._clock.batch_size
            self._shared.sharing += _SHARING_RATE * (share - self._shared.sharing)
