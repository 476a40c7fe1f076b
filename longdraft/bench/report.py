"""What a benchmark leaves: tables for a person, one JSON document for everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longdraft.files import open_outputs

Record = Mapping[str, Any]
Column = tuple[str, str, str]  # title, key, format


@contextmanager
def document(output: Path | None, is_told: bool = True) -> Iterator[dict[str, Any]]:
    """A dictionary to fill; written as JSON to `output`, which is opened first, when all went well.

    Where stdout goes to a program, its last line is the document too.
    """
    files = open_outputs({"--output": output})
    filled: dict[str, Any] = {}
    try:
        yield filled
        for file in files.values():
            file.write((json.dumps(filled, indent=2) + "\n").encode())
            file.finish()
        if is_told and not sys.stdout.isatty():
            print(json.dumps(filled))
    finally:
        for file in files.values():
            file.abandon()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A live line on a terminal's stderr while something is measured."""
    console = Console(file=sys.stderr)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield


def table(title: str, columns: Sequence[Column], records: Sequence[Record]) -> None:
    """Print those columns of which there are values."""
    shown = [column for column in columns if any(record.get(column[1]) is not None for record in records)]
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name, key, _ in shown:
        is_number = all(isinstance(record.get(key), int | float | None) for record in records)
        grid.add_column(name, justify="right" if is_number else "left")
    for record in records:
        grid.add_row(*("" if record.get(key) is None else format(record[key], how) for _, key, how in shown))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(grid)
    console.print()


def limits_line(limits: Mapping[str, Any]) -> None:
    peaks = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in limits["peak_gflop_per_s"].items())
    print(f"measured limits: read {limits['read_bandwidth_gb_per_s']:.1f} GB/s, {peaks}\n")
