"""The output of a training while it runs: a live line or plain lines on stderr, and JSON lines on the disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO

from longdraft.errors import OutputError, UsageError
from longdraft.system.files import lock_if_possible, open_locked

PLAIN_LINE_EVERY_S = 15.0


class TrainingProgress:
    """A live line if `stream` is a terminal, else a plain line every PLAIN_LINE_EVERY_S; nothing if quiet."""

    def __init__(self, stream: TextIO, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._live: Any = None
        self._said_at = -PLAIN_LINE_EVERY_S
        self._stack = ExitStack()

    def __enter__(self) -> TrainingProgress:
        if not self._quiet and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (BarColumn(24), TextColumn("{task.description}"))
            self._live = self._stack.enter_context(
                Bar(*columns, console=Console(file=self._stream), transient=True))
            self._live.add_task("starting", total=1.0)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def step(self, done: float, text: str) -> None:
        """Update the line. done: the finished share of the training, 0 to 1."""
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=done, description=text)
        elif not self._quiet and (done >= 1 or time.monotonic() - self._said_at >= PLAIN_LINE_EVERY_S):
            self._said_at = time.monotonic()
            self.say(f"{done:4.0%}  {text}")

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if self._quiet:
            return
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            print(text, file=self._stream, flush=True)


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """A file of JSON lines, each with its step, and TensorBoard's event files if `tensorboard`.

    A resumed training removes the lines after its checkpoint. With `path` None nothing is written: only the main
    process has a path. UsageError where another process writes the file.
    """

    def __init__(self, path: Path | None, last_step: int, tensorboard: bool = False) -> None:
        self._file: TextIO | None = None
        self._board: Any = None
        if path is None:
            return
        if tensorboard:
            self._board = _board(path.parent, last_step)
        try:
            file = open_locked(path, os.O_RDWR | os.O_APPEND, lock_if_possible)
        except BlockingIOError as error:
            raise UsageError(f"{str(path.parent)!r} is being trained by another process; wait for its end, or give "
                             "another --output") from error
        os.ftruncate(file, _bytes_until(path, last_step))  # in place: the kept lines are not rewritten
        self._file = os.fdopen(file, "a", encoding="utf-8")

    def __exit__(self, *exception: object) -> None:
        if self._file:
            with suppress(OSError):  # after a failure to write, which is the error that counts
                self._file.close()
        if self._board:
            self._board.close()

    def write(self, line: Mapping[str, Any]) -> None:
        if self._file:
            try:
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()
            except OSError as error:
                raise OutputError(f"cannot write {self._file.name}: {error.strerror or error}; the last checkpoint is "
                                  "kept: free disk space, then continue with --resume") from error
        if self._board:
            for name, value in _flat(line):
                self._board.add_scalar(name, value, line["step"])


def _bytes_until(path: Path, last_step: int) -> int:
    """The length of the lines up to a step, in bytes. A kill can leave an incomplete line at the end."""
    size = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n") or json.loads(line)["step"] > last_step:
                break
            size += len(line)
    return size


def _board(folder: Path, last_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("--tensorboard needs tensorboard; install it with: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=last_step + 1)


def _flat(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line with TensorBoard's names: losses/1, losses/2, ..., validation/1/loss, ..."""
    for name, value in line.items():
        values = value if isinstance(value, list) else [value]
        for index, each in enumerate(values, 1):
            part = f"{name}/{index}" if isinstance(value, list) else name
            if isinstance(each, dict):
                yield from ((f"{part}/{inner}", number) for inner, number in each.items())
            elif name not in ("step", "is_final"):
                yield part, each
