"""Work that asks for forwards: whoever drives it decides which texts travel together.

Whatever a text does (reading its prompt, drafting, verifying) is a generator that yields an `ForwardRequest` and is sent the
`Forward`. Driven alone, each ask is a forward of its own. Several texts driven side by side have their asks answered
together: drafts of one, verifications of another and the prompt of a third are rows of one forward, wherever they ask
the same model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from longdraft.errors import translate_memory_errors
from longdraft.model.transformer import Forward, ForwardRequest

T = TypeVar("T")
P = ParamSpec("P")
Routine = Generator[ForwardRequest, Forward, T]


def atomic(result: Callable[P, T]) -> Callable[P, Routine[T]]:
    """Work that asks for nothing, made of a function."""

    @wraps(result)
    def work(*args: P.args, **kwargs: P.kwargs) -> Routine[T]:
        yield from ()  # what makes it a generator
        return result(*args, **kwargs)

    return work


def run_alone(work: Routine[T]) -> T:
    """Do the work by itself: every ask is a forward of its own."""
    try:
        ask = next(work)
        while True:
            ask = work.send(ask.model.forward_batch([ask])[0])
    except StopIteration as end:
        result: T = end.value
        return result


def run_batched(asks: Sequence[ForwardRequest], spent: Callable[[Sequence[int], float], None]) -> list[Forward | Exception]:
    """What is asked for, in few forwards: one for each model. Who cannot be answered gets the reason, alone.

    spent  is told of each forward the places of those that it served, and its seconds

    Where a forward of several texts fails (no memory for one's cache, say) each is asked for by itself: a forward that
    was cut short has changed nothing that counts.
    """
    found: dict[int, Forward | Exception] = {}
    groups: dict[object, list[int]] = {}
    for place, ask in enumerate(asks):
        groups.setdefault(ask.model.identity, []).append(place)
    for places in groups.values():
        began = time.perf_counter()
        found |= zip(places, _together([asks[place] for place in places]), strict=True)
        spent(places, time.perf_counter() - began)
    return [found[place] for place in range(len(asks))]


def _together(asks: Sequence[ForwardRequest]) -> Sequence[Forward | Exception]:
    try:
        with translate_memory_errors():
            return asks[0].model.forward_batch(asks)
    except Exception as error:  # whatever it is, it is given to who asked
        return [error] if len(asks) == 1 else [answer for ask in asks for answer in _together([ask])]


class CostClock:
    """A clock of what one text costs: the time of its own work, and its share of the forwards that it is served in.

    texts  how many texts share its forwards now (1: it is alone)
    """

    def __init__(self, always: bool = False, agree: Callable[[float], float] = lambda seconds: seconds) -> None:
        """always: it runs from now on, for a text whose work nobody else's comes between; agree: makes of the seconds
        here those that all ranks go by."""
        self.texts = 1.0
        self._charged = 0.0
        self._agree = agree
        self._since = time.perf_counter() if always else None  # that its own work began

    def __call__(self) -> float:
        """Seconds so far."""
        return self._agree(self._so_far())

    def _so_far(self) -> float:
        return self._charged + (0.0 if self._since is None else time.perf_counter() - self._since)

    def charge(self, seconds: float) -> None:
        """Its share of a forward."""
        self._charged += seconds

    def start(self) -> None:
        """Its own work begins."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Its own work stands by."""
        self._charged, self._since = self._so_far(), None
