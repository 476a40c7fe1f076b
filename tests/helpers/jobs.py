"""Batch jobs for tests: rows, records and interruptions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from longdraft.batch.requests import BatchRequest, RowProgress
from longdraft.batch.worker import BatchWorker
from longdraft.system.console import Interrupted

ROWS = [{"id": f"row {i}", "prompt": "It was"[: 1 + i % 6], "max_new_tokens": 20 + i, "ignore_eos": True}
        for i in range(6)]


def put(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sorted_lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


def stop_after(count: int):
    """A check that interrupts the job after `count` calls."""
    asked = iter(range(count))

    def check() -> None:
        if next(asked, None) is None:
            raise Interrupted

    return check


def writers(work: Path) -> list[int]:
    """The ids of processes that have a journal of the job open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(name.startswith(str(work / "journals")) for name in opened):
            found.append(int(process.name))
    return found


def write_row(writer: BatchWorker, task: BatchRequest) -> Iterator[RowProgress]:
    """Write one row with a worker."""
    tasks = iter([task])
    return filter(None, writer.write(lambda is_idle: next(tasks, None)))
