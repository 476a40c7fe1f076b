"""Ctrl-C and SIGTERM: the first asks the work to end after the step, a second one ends it at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupted(Exception):
    """Raised where work may be left because `Interrupt.number` is set."""


class Interrupt:
    """While entered, remembers the first signal instead of dying of it."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that arrived
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def check(self) -> None:
        if self.number:
            raise Interrupted
