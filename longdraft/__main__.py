"""`longdraft` and `python -m longdraft`: run the command line, and turn errors into one line and a status.

0 done · 2 bad usage or input · 130 interrupted (143 terminated) · 1 anything else
"""

from __future__ import annotations

import errno
import sys
from typing import TextIO, cast

_WRITE_ERRORS = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


def main() -> None:
    import os
    import signal

    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:  # the caller closed it: no journal may get its number
        pass
    os.close(file)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - Python sets None
    try:
        from longdraft.system.console import ClosedStdout, Terminated, on_terminate

        sys.stdout = sys.stdout or cast("TextIO", ClosedStdout())
        try:
            signal.signal(signal.SIGTERM, on_terminate)
            status = run(sys.argv[1:])
        except Terminated:  # the same for SIGTERM
            status = 143
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except KeyboardInterrupt:  # while the first modules are imported, or a second one during the clean-up
        status = 130
    is_default = False
    while not is_default:  # one more interrupt, here or while Python ends, must not print a traceback
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            is_default = True
        except KeyboardInterrupt:
            status = 130
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit status."""
    from longdraft.system.console import remarks_on_stderr

    with remarks_on_stderr():
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    import typer

    from longdraft.cli import app
    from longdraft.errors import JournalError, LongdraftError, ModelError, UsageError
    from longdraft.system.console import Terminated, stdout_lost

    command = typer.main.get_command(app)
    try:
        status = command.main(arguments, prog_name="longdraft", standalone_mode=False)
        sys.stdout.flush()  # not at exit, where Python would print a traceback
    except LongdraftError as error:
        is_input = isinstance(error, UsageError | ModelError | JournalError)
        return _fail(_with_notes(str(error), error), 2 if is_input else 1)
    except Terminated as error:
        earlier = error.__context__  # if a rank fails, torchrun terminates the others: report their own failure first
        if isinstance(earlier, LongdraftError):
            return _fail(_with_notes(str(earlier), earlier), 143)
        return _fail(_with_notes("terminated", error), 143)
    except KeyboardInterrupt as error:  # unless Typer has turned it into a status
        return _fail(_with_notes("interrupted", error), 130)
    except MemoryError as error:
        message = "out of memory; a shorter context, a smaller model or --dtype bfloat16 needs less"
        return _fail(_with_notes(message, error), 1)
    except ImportError as error:
        if not (error.path or "").endswith(".so"):  # a bug
            raise
        return _fail(f"{error.name} cannot be loaded: {error}; free some memory, or install it again", 1)
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        return stdout_lost(error)  # failures of all other files are OutputErrors
    except Exception as error:
        # Click's own errors (unknown option, missing argument, bad number) format their own message.
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # without arguments, the help was printed
            return 2
        return _fail(f"{error.format_message().rstrip('.')}; see --help", 2)
    return status if isinstance(status, int) else 0


def _with_notes(message: str, error: BaseException) -> str:
    """The message with the notes that callers added, such as how to resume."""
    return "; ".join([message, *getattr(error, "__notes__", ())])


def _fail(message: str, status: int) -> int:
    print("longdraft:", " ".join(message.split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
