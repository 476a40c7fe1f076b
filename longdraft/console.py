"""What the doors share: the first signal asks the work to end, stdout may end before it, how long a time is."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """Raised where work may be left because a signal has arrived."""


class Terminated(BaseException):
    """What KeyboardInterrupt is for SIGINT: SIGTERM ends the work at once."""


class Interrupt:
    """While entered, SIGINT and SIGTERM are remembered in `number`; a second one ends the work at once, whatever
    is being done: it raises KeyboardInterrupt or Terminated, and a third does not even wait for that."""

    def __init__(self) -> None:
        self.number = 0  # of the signal that arrived
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # elsewhere the caller's handlers apply
            self._before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            for each in self._before:
                signal.signal(each, signal.SIG_DFL)
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.number = number

    def check(self) -> None:
        if self.number:
            raise Interrupted


def on_terminate(number: int, frame: FrameType | None) -> None:
    """A handler for SIGTERM where nothing is under way that must be finished."""
    raise Terminated


def any_letter() -> None:
    """A terminal that cannot show a letter shows '?'."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def stdout_lost(error: OSError) -> int:
    """The exit status where stdout takes no more. Says why, unless the reader has gone."""
    if not isinstance(error, BrokenPipeError):
        print(f"longdraft: cannot write to stdout: {error.strerror or error}", file=sys.stderr)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python tries again at exit
    return 1


def clock(seconds: float) -> str:
    """3661 -> 1:01:01"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
