"""`longdraft` and `python -m longdraft`: run the command line, turn errors into one line and a status.

0 done · 2 bad usage or input · 130 interrupted (143 terminated) · 1 anything else
"""

from __future__ import annotations

import sys


def main() -> None:
    import signal

    from longdraft.console import on_terminate

    signal.signal(signal.SIGTERM, on_terminate)
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """The exit status of a command line."""
    import typer

    from longdraft.cli import app
    from longdraft.console import Terminated
    from longdraft.errors import JournalError, LongdraftError, ModelError, UsageError

    command = typer.main.get_command(app)
    try:
        status = command.main(arguments, prog_name="longdraft", standalone_mode=False)
    except LongdraftError as error:
        return _fail(_noted(str(error), error), 2 if isinstance(error, UsageError | ModelError | JournalError) else 1)
    except Terminated as error:
        earlier = error.__context__  # a failure on its way here says more: ranks that lose one are all terminated
        told = (str(earlier), earlier) if isinstance(earlier, LongdraftError) else ("terminated", error)
        return _fail(_noted(*told), 143)
    except KeyboardInterrupt as error:  # where Typer has not made it the status
        return _fail(_noted("interrupted", error), 130)
    except MemoryError as error:
        message = "out of memory; a shorter context, a smaller model or --dtype bfloat16 needs less"
        return _fail(_noted(message, error), 1)
    except Exception as error:
        # Click's own errors (unknown option, missing argument, bad number) know how to say themselves.
        if not hasattr(error, "format_message"):
            raise
        if not error.format_message():  # no arguments: the help was shown
            return 2
        return _fail(f"{error.format_message().rstrip('.')}; see --help", 2)
    return status if isinstance(status, int) else 0


def _noted(message: str, error: BaseException) -> str:
    """With what was known where the error passed by (how to resume, for one)."""
    return "; ".join([message, *getattr(error, "__notes__", ())])


def _fail(message: str, status: int) -> int:
    print("longdraft:", " ".join(message.split()), file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
