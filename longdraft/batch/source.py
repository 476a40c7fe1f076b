"""The rows of a job's input, one after the other: JSON lines, or a Parquet table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from longdraft.batch.rows import Row
from longdraft.errors import UsageError

PARQUET = ".parquet"
_MOST = 1 << 28  # characters of a line
_AT_ONCE = 256  # rows of a table


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


def rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Each row with its line (from 1), or a text that says why it is none. Empty lines are passed over."""
    if is_parquet(path):
        return _table(path)
    return _lines(path)


def count(path: Path) -> int:
    """How many `rows` will give."""
    if is_parquet(path):
        return int(_open_table(path).metadata.num_rows)
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise _unreadable(path, error) from error


def _lines(path: Path) -> Iterator[tuple[int, Row | str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _parsed(line: bytes) -> Row | str:
    if len(line) > _MOST:
        return f"the line has {len(line)} bytes; allowed: {_MOST}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"the line is not valid JSON: {error}"
    return row if isinstance(row, dict) else f"the line holds a {type(row).__name__}; allowed: an object"


def _table(path: Path) -> Iterator[tuple[int, Row | str]]:
    number = 0
    with _readable_table(path):
        for batch in _open_table(path).iter_batches(_AT_ONCE):
            for row in batch.to_pylist():
                number += 1
                yield number, {name: _from_cell(name, value) for name, value in row.items()}


def _from_cell(name: str, value: Any) -> Any:
    """Without the fields that a column has for other rows; `body` and the like may be JSON in a text."""
    if name in ("body", "messages", "chat_options") and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _open_table(path: Path) -> Any:
    _, parquet = parquet_library()
    with _readable_table(path):
        return parquet.ParquetFile(path)


@contextmanager
def _readable_table(path: Path) -> Iterator[None]:
    pyarrow, _ = parquet_library()
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"cannot read {path} as Parquet: {str(error).splitlines()[0]}; give a Parquet file or JSON "
                         "lines") from error


def parquet_library() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow; pip install 'longdraft[ray]', or use .jsonl") from error
    return pyarrow, parquet


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read the input {path}: {error.strerror or error}; give a file of JSON lines or Parquet")
