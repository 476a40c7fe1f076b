"""Shared by the command-line programs: signal handlers, remarks, failures of stdout, and the format of durations."""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """Raised where the work can be stopped in order after a signal has arrived."""


class Terminated(BaseException):
    """The counterpart of KeyboardInterrupt for SIGTERM: ends the work at once."""


class Interrupt:
    """Context manager that stores the first SIGINT or SIGTERM in `number`. A second signal ends the work at once by
    raising KeyboardInterrupt or Terminated. A third has the system's default effect: it kills the process."""

    def __init__(self) -> None:
        self.number = 0  # of the first signal; 0: none has arrived
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            self._before = {number: signal.signal(number, self._arrived) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
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
    """A handler for SIGTERM while there is no work to finish: raises Terminated."""
    raise Terminated


class _Remarks(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print("longdraft:", self.format(record), file=sys.stderr)


@contextmanager
def remarks_on_stderr() -> Iterator[None]:
    """A context in which what longdraft logs is written to stderr, in the form of its errors."""
    logger, handler = logging.getLogger("longdraft"), _Remarks(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


def leave_remarks_out() -> None:
    """Write errors alone, until `remarks_on_stderr` ends."""
    logging.getLogger("longdraft").setLevel(logging.ERROR)


class ClosedStdout(io.TextIOBase):
    """In the place of a stdout that the caller has closed: what is written to it must not vanish without a word."""

    def write(self, text: str) -> int:
        if text:
            raise OSError(errno.EBADF, "it is closed")
        return 0


def replace_unencodable() -> None:
    """Make stdout print '?' for characters that its encoding does not have."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def stdout_lost(error: OSError) -> int:
    """Handle a failed write to stdout; returns the exit status. Prints the reason, except for a closed pipe."""
    if not isinstance(error, BrokenPipeError):
        print(f"longdraft: cannot write to stdout: {error.strerror or error}", file=sys.stderr)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else Python flushes the old one at exit
    return 1


def clock(seconds: float) -> str:
    """Format a duration: 3661 -> 1:01:01, 61 -> 1:01"""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"
