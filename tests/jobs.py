"""Batch jobs for tests: a tiny model, rows, and what interrupts them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from conftest import make_checkpoint

from longdraft.batch.writer import Job
from longdraft.console import Interrupted

ROWS = [{"id": f"row {i}", "prompt": "It was"[: 1 + i % 6], "max_new_tokens": 20 + i, "ignore_eos": True}
        for i in range(6)]


def make_model(folder: Path) -> Path:
    make_checkpoint(folder, num_key_value_heads=2)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if excited %}!{% endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def make_job(model: Path, work: Path) -> Job:
    return Job(work, {"model": str(model), "drafter": "suffix", "threads": 1}, {"on_loop": "off"}, 0, "tiny",
               fsync="never")


def put(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sorted_lines(path: Path) -> list[str]:
    return sorted(path.read_text().splitlines())


def stop_after(count: int):
    """A check that interrupts the job when it is asked for the last time."""
    asked = iter(range(count))

    def check() -> None:
        if next(asked, None) is None:
            raise Interrupted

    return check


def writers(work: Path) -> list[int]:
    """Processes that have a journal of the job open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(name.startswith(str(work / "journals")) for name in opened):
            found.append(int(process.name))
    return found
