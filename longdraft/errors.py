"""Errors that a user can cause. Each message is one line: what was given, what is allowed, and the cure.

The command line and the server print only the message. A traceback means a bug in longdraft.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class LongdraftError(Exception):
    """Base class of all errors that the user can correct."""


class UsageError(LongdraftError):
    """An option, setting or prompt outside its allowed range. `name`: the option or setting, if it is a single one."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name


class ModelError(LongdraftError):
    """A model, tokenizer or heads folder that is missing, corrupt or not supported."""


class JournalError(LongdraftError):
    """A journal that is missing, damaged, in use, or of another model, tokenizer, setting or arithmetic."""


class UnusableJournalError(JournalError):
    """A journal whose text cannot be continued: it is damaged, contradicts itself, or has another format. Other
    journal errors do not concern the content."""


class BusyJournalError(JournalError):
    """A journal that another process is writing or has locked briefly."""


class OutputError(LongdraftError):
    """Output cannot be written, for example because the disk is full or the device is gone."""


class NumericalError(LongdraftError):
    """The model produced logits, or training a loss, that are not finite."""

    def __init__(self, message: str = "the model's logits are not finite; its weights may be damaged") -> None:
        super().__init__(message)


class WorkerError(LongdraftError):
    """A worker or rank has ended or cannot continue, and no other process can replace it."""


def missing_extra(user: str, packages: str, extra: str, name: str | None = None, verb: str = "needs") -> UsageError:
    """The error of `user`, which cannot work without `packages` of an extra of longdraft."""
    return UsageError(f"{user} {verb} {packages}; install the extra '{extra}': pip install -e '.[{extra}]' in "
                      f"longdraft's folder, or pip install 'FILE.whl[{extra}]' with its wheel", name)


def check(condition: bool, name: str, value: object, allowed: str, cure: str = "") -> None:
    """Raise :class:`UsageError` with the value, the allowed range and the cure unless `condition` is true."""
    if not condition:
        raise UsageError(f"{name} is {value!r}; allowed: {allowed}" + (f"; {cure}" if cure else ""), name)


@contextmanager
def translate_memory_errors() -> Iterator[None]:
    """Raise `MemoryError` regardless of which allocator failed."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if (translated := translated_error(error)) is error:
            raise
        raise translated from error


def translated_error(error: Exception) -> Exception:
    """A `MemoryError` for an error that says that an allocator failed; other errors as they are."""
    is_of_torch = isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("can't allocate memory", "not enough memory", "out of memory"))
    if is_of_torch or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return MemoryError(str(error).splitlines()[0])
    return error


@contextmanager
def translate_panics(what: str) -> Iterator[None]:
    """Raise ModelError where a library in Rust panics. Its own exception is no Exception, so it would end a thread.

    what  what failed, for the message
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of pyo3_runtime, which cannot be imported
            raise
        raise ModelError(f"{what}: {' '.join(str(error).split())[:200]}; give another with --tokenizer") from None
