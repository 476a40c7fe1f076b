"""Run a command line in this process with a real pseudo-terminal as some of its standard streams."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from longdraft.__main__ import run

SIZE = {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}


@contextmanager
def terminal(*streams: str) -> Iterator[Callable[[], str]]:
    """Connect streams ("stdin", "stdout", "stderr") to a terminal; calling the value afterwards returns its output."""
    leader, follower = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(leader, 65536):
                shown.append(piece)
        except OSError:  # Linux: the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    files = {stream: open(follower, "r" if stream == "stdin" else "w", encoding="utf-8", closefd=False)  # noqa: SIM115
             for stream in streams}
    try:
        with mock.patch.dict(os.environ, SIZE), mock.patch.multiple("sys", **files):
            yield lambda: b"".join(shown).decode(errors="replace")
    finally:
        for file in files.values():
            file.close()
        os.close(follower)
        reader.join()
        os.close(leader)


def on_terminal(arguments: list[str]) -> str:
    """Run a command that must succeed, on a terminal; return the terminal's output."""
    with terminal("stdin", "stdout", "stderr") as shown:
        status = run(arguments)
    assert status == 0, shown()
    return shown()
