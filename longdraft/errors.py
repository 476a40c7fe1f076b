"""Errors a user can cause. Each message is one line: what was given, what is allowed, how to cure it.

The doors (command line, server) print the message and nothing else; a traceback means a bug of ours.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class LongdraftError(Exception):
    """Base of every error that is the user's to cure."""


class UsageError(LongdraftError):
    """An option, setting or prompt outside what is allowed. `name`: which one, where it is one."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class ModelError(LongdraftError):
    """A model, tokenizer or heads folder that is missing, corrupt or not supported."""


class JournalError(LongdraftError):
    """A journal that is missing, damaged, in use, or of another model, tokenizer, setting or arithmetic."""


class UnusableJournalError(JournalError):
    """A journal whose content nobody can go on with: damaged, contradicting itself, or of another format. Other
    journal errors say nothing about the content."""


class BusyJournalError(JournalError):
    """A journal that another process writes, or has locked for a moment."""


class OutputError(LongdraftError):
    """What was to be written could not be: the disk is full, the device is gone."""


class NumericalError(LongdraftError):
    """The model produced logits that are not numbers."""


class WorkerError(LongdraftError):
    """A process that was to help is gone, and nobody can take its place."""


def check(condition: bool, name: str, value: object, allowed: str, cure: str = "") -> None:
    """Raise :class:`UsageError` naming the value, the allowed range and the cure unless `condition`."""
    if not condition:
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}" + (f"; {cure}" if cure else ""), name)


@contextmanager
def translate_memory_errors() -> Iterator[None]:
    """Whoever ran out of memory, it is a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in ("can't allocate memory", "not enough memory", "out of memory")):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(str(error)) from error
        raise
