"""Errors a user can cause. Each message is one line: what was given, what is allowed, how to cure it.

The doors (command line, server) print the message and nothing else; a traceback means a bug of ours.
"""

from __future__ import annotations


class LongdraftError(Exception):
    """Base of every error that is the user's to cure."""


class UsageError(LongdraftError):
    """An option, setting or prompt outside what is allowed."""


class ModelError(LongdraftError):
    """A model, tokenizer or heads folder that is missing, corrupt or not supported."""


class JournalError(LongdraftError):
    """A journal that is missing, damaged, in use, or of another model, tokenizer, setting or arithmetic."""


class OutputError(LongdraftError):
    """What was to be written could not be: the disk is full, the device is gone."""


class NumericalError(LongdraftError):
    """The model produced logits that are not numbers."""


class WorkerError(LongdraftError):
    """A process that was to help is gone, and nobody can take its place."""


def check(condition: bool, name: str, value: object, allowed: str, cure: str = "") -> None:
    """Raise :class:`UsageError` naming the value, the allowed range and the cure unless `condition`."""
    if not condition:
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}" + (f"; {cure}" if cure else ""))
