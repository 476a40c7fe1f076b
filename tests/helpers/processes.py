"""Processes for tests, forked from a server process that has imported longdraft once.

They start in milliseconds. A new interpreter needs seconds of processor time to import PyTorch. Tests of how an
interpreter starts or exits use `subprocess`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from longdraft.__main__ import main

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["longdraft.cli", "longdraft.engine.loading", "longdraft.journal", "typer.rich_utils"])


class Fork:
    """A process that calls a function of a module. Its stdout and stderr are files in a folder."""

    def __init__(self, folder: Path, function: Callable[..., None], *arguments: object,
                 environment: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [str(folder / name) for name in ("stdout", "stderr")]
        for path in self._files:
            Path(path).write_bytes(b"")
        given = dict(os.environ, **environment or {})
        self._process = _forks.Process(target=_call, args=(self._files, given, function, arguments))
        self._process.start()
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.is_alive()

    def kill(self, signal: int) -> None:
        with suppress(ProcessLookupError):  # it ends at this moment, from an earlier signal
            os.kill(self.pid, signal)

    def wait(self, timeout_s: float = 120) -> int:
        """The exit status; the negative number of the signal if one ended the process."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"still running after {timeout_s} s"
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        return Path(self._files[0]).read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return Path(self._files[1]).read_text(errors="replace")


def _call(files: list[str], environment: dict[str, str], function: Callable[..., None],
          arguments: tuple[object, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in enumerate(files, start=1):
        file = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, stream)
        os.close(file)
    function(*arguments)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(size: int, folder: Path, function: Callable[..., None], *arguments: object) -> list[Fork]:
    """Start the processes of all ranks with the variables that torchrun sets."""
    shared = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
    return [Fork(folder / f"rank-{rank}", function, *arguments,
                 environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)]


def run_longdraft(*arguments: object) -> None:
    """The function of a fork that runs a command line of longdraft."""
    sys.argv = ["longdraft", *map(str, arguments)]
    main()


def run_code(code: str, *arguments: object) -> None:
    """The function of a fork that runs code as `python -c` does."""
    sys.argv = ["longdraft", *map(str, arguments)]
    exec(code, {"__name__": "__main__"})


def wait_for(condition, seconds: float = 10.0) -> float:
    """Wait for a condition. Returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "the condition was not met in time"
        time.sleep(0.005)
    return time.monotonic() - began
