"""How far measured times are off their expected costs: the machine's part of it, and that of each kind of work.

    measured seconds  =  machine * factor(kind) * expected seconds

A machine that is busy with other work makes all kinds slower, and that changes no decision. What a kind deviates from
the latest forwards in the long run is the error of its costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

OUTLIER = 3.0  # a measured time counts as at most this many times the expected one, and at least 1 / 3 of it
_MACHINE_RATE = 0.2  # how much of a ratio the machine takes over at once
_KIND_RATE = 0.1  # how much of a ratio a kind takes over at once
_ENOUGH = 100  # pieces of work after which a factor tells that costs are off
_TOLERANCE = 1.5  # a factor beyond this one does


@dataclass
class _Kind:
    """A kind of work.

    factor   for its expected seconds
    times    how often it was timed; a row of forwards of one kind counts once
    telling  how often its time was longer than the noise
    """

    factor: float = 1.0
    times: int = 0
    telling: int = 0


class Pace:
    """Both factors are corrected by each measured time. With  ratio = measured / expected,  within 1 / 3 and 3,

        factor(kind)  *=  ratio ^ rate
        machine       *=  ratio ^ (machine rate * (1 - rate))      by forwards alone

    Rates are 1 / (1 + number of times) at first, so that the first times tell much.
    """

    def __init__(self) -> None:
        self.machine = 1.0
        self._num_forwards = 0
        self._latest: Hashable = None  # kind of the latest forward
        self._kinds: dict[Hashable, _Kind] = {}

    def __getitem__(self, kind: Hashable) -> float:
        """Factor for the expected seconds of this kind of work."""
        return self._kinds[kind].factor if kind in self._kinds else 1.0

    def __contains__(self, kind: Hashable) -> bool:
        """Whether work of this kind was timed."""
        return kind in self._kinds

    def times(self, kind: Hashable) -> int:
        """How often work of this kind was timed."""
        return self._kinds[kind].times if kind in self._kinds else 0

    def add_forward(self, kind: Hashable, measured: float, expected: float) -> None:
        """A forward took `measured` seconds. expected: with the factor of its kind

        A forward tells about its kind only after one of another kind: in a row of the same kind, all that changes is
        the machine.
        """
        known = self._kinds.setdefault(kind, _Kind())
        known.telling += 1
        ratio = self.ratio(measured, expected * self.machine)
        rate = 0.0
        if kind != self._latest:
            known.times += 1
            if self._latest is not None:
                rate = max(_KIND_RATE, 1 / (1 + known.times))
        known.factor *= ratio ** rate
        self._num_forwards += 1
        self.machine *= ratio ** (max(_MACHINE_RATE, 1 / (1 + self._num_forwards)) * (1 - rate))
        self._latest = kind

    def add_draft(self, kind: Hashable, measured: float, expected: float, factor: float = 1.0, noise: float = 0.0
                  ) -> None:
        """A draft took `measured` seconds. expected: with the factor of its kind, which is `factor` if none was timed

        noise  seconds that both may have besides. Work that takes less does not tell that its costs are off
        """
        known = self._kinds.setdefault(kind, _Kind(factor))
        expected *= self.machine
        known.telling += expected > noise
        known.times += 1
        known.factor *= self.ratio(measured + noise, expected + noise) ** max(_KIND_RATE, 1 / (1 + known.times))

    @staticmethod
    def ratio(measured: float, expected: float) -> float:
        """The ratio of a measured time to the expected one, within 1 / OUTLIER and OUTLIER."""
        return min(OUTLIER, max(1 / OUTLIER, measured / expected))

    @property
    def is_off(self) -> bool:
        """Whether some kind of work takes much longer, or shorter, than its costs say."""
        return any(kind.telling >= _ENOUGH and not 1 / _TOLERANCE < kind.factor < _TOLERANCE
                   for kind in self._kinds.values())
