"""The files of a batch job: rows of the input, and the records of the output. Both are JSON lines or Parquet.

    with RecordFile(Path("out.jsonl"), work) as records:
        records.add(record)       # on the disk when this returns
        records.finish()          # makes a Parquet output of the collected records

A line that a power cut left incomplete is removed when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from longdraft.batch.requests import OutputRecord, Row, fingerprint_of, is_failed, key_of, num_tokens
from longdraft.errors import OutputError, UsageError, missing_extra
from longdraft.request.openai_body import parse_json
from longdraft.system.files import append_synced, open_locked, replacing, require_file_name, sync_folder

PARQUET = ".parquet"
_LONGEST_LINE = 1 << 28  # bytes
_ROWS_PER_READ = 256  # of a Parquet table
_COLLECTED = "records.jsonl"  # in the work folder, for a Parquet output, which cannot be appended to
_ROWS_PER_WRITE = 1024
_SECTOR = 512  # bytes of the smallest unit that a disk writes
_RECORD_START = b'{"id": "'
_LINE_ENDS = "\x85\u2028\u2029"  # JSON does not escape them, but some readers end a line there


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() == PARQUET


def read_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    """Yield each line number (from 1) with its row, or with an error text if it has no row. Empty lines are skipped."""
    if is_parquet(path):
        return _table_rows(path)
    return _json_rows(path)


def count_rows(path: Path) -> int:
    """The number of rows that `read_rows` yields."""
    if is_parquet(path):
        return int(_open_table(path).metadata.num_rows)
    try:
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise _unreadable(path, error) from error


def _json_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parsed(line)
    except OSError as error:
        raise _unreadable(path, error) from error


def _parsed(line: bytes) -> Row | str:
    if len(line) > _LONGEST_LINE:
        return f"the line has {len(line)} bytes; allowed: {_LONGEST_LINE}"
    try:
        row = parse_json(line)
    except (ValueError, RecursionError) as error:
        return f"the line is not valid JSON: {error}"
    if isinstance(row, dict):
        return row
    return 'the line is no JSON object; a row is one, such as {"id": "a", "prompt": "It was"}'


def _table_rows(path: Path) -> Iterator[tuple[int, Row | str]]:
    number = 0
    with _readable_table(path):
        for batch in _open_table(path).iter_batches(_ROWS_PER_READ):
            for row in batch.to_pylist():
                number += 1
                yield number, {name: _from_cell(name, value) for name, value in row.items()}


def _from_cell(name: str, value: Any) -> Any:
    """A cell without the null fields that its column has for other rows. `body` and the like may be JSON text."""
    if name in ("body", "messages", "chat_options") and isinstance(value, str):
        try:
            return parse_json(value)
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
        raise missing_extra("Parquet, unlike .jsonl,", "pyarrow", "ray") from error
    return pyarrow, parquet


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read the input {path}: {error.strerror or error}; give a file of JSON lines or Parquet")


class RecordFile(AbstractContextManager["RecordFile"]):
    """The records of a job, in a file that only grows.

    done         id of each row that has a record -> whether that is an error
    tokens       tokens of all their texts
    fingerprint  of the engine that wrote the texts; None if there are none
    """

    def __init__(self, output: Path, work: Path, *, without_errors: bool = False) -> None:
        """Open the existing records and prepare to add more.

        without_errors  remove the error records, so that their rows are written again

        Raises UsageError if the file holds something else, or another job writes it.
        """
        require_file_name(output, "the output")
        if is_parquet(output) and os.path.exists(output):  # a Parquet output is complete once it exists
            raise UsageError(f"the output {output} exists and is complete; give another name, or remove it")
        self._output = output
        self._path = work / _COLLECTED if is_parquet(output) else output
        self._reset_counts()
        self.fingerprint: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            self._file = open_locked(self._path, os.O_RDWR | os.O_APPEND)
            if is_new:
                sync_folder(self._path.parent)
        except BlockingIOError as error:
            raise UsageError(f"another job writes {output}; wait for it, or give another output") from error
        except OSError as error:
            raise UsageError(f"cannot write the output {output}: {error.strerror or error}; choose another "
                             "path") from error
        try:
            os.ftruncate(self._file, self._read())
            if without_errors and any(self.done.values()):
                self._drop_errors()
        except BaseException:
            self.close()
            raise

    def _reset_counts(self) -> None:
        self.done: dict[str, bool] = {}
        self.tokens = 0

    def _read(self) -> int:
        """Count the existing records; returns the offset in bytes where the last whole line ends."""
        size = 0
        end = os.fstat(self._file).st_size
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n") and (size or _is_torn_record(line)):
                break
            try:
                self._count(json.loads(line))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                # A power cut may keep the last sectors of a line, its end included, and lose those before.
                if size + len(line) == end and not _is_json(line) and (size or _is_torn_record(line)):
                    break
                raise UsageError(f"line {number} of the output {self._output} is no record of a job; give another "
                                 "name, or remove the file") from error
            size += len(line)
        return size

    def _lines(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            yield from file

    def _count(self, record: OutputRecord) -> None:
        key = key_of(record)
        if key is None or key in self.done:
            raise ValueError("not a record, or a second one of a row")
        self.done[key] = is_failed(record)
        self.tokens += num_tokens(record)
        self.fingerprint = fingerprint_of(record) or self.fingerprint

    def _drop_errors(self) -> None:
        """Replace the file by one without its error records. The new file is locked before it has the name."""
        kept = b"".join(line for line in self._lines() if not is_failed(json.loads(line)))
        try:
            with replacing(self._path) as partial:
                partial.write_bytes(kept)
                fresh = open_locked(partial, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise self._failure(error) from error
        os.close(self._file)
        self._file = fresh
        self._reset_counts()
        self._read()

    def add(self, record: OutputRecord) -> None:
        """Append a record; it is on the disk when this returns. Raises OutputError if that fails."""
        line = _line(record)
        size = os.fstat(self._file).st_size
        try:
            append_synced(self._file, line)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise self._failure(error) from error
        self._count(record)

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self._path}: {error.strerror or error}; the records so far are kept, start "
                           "the job again to continue")

    def finish(self) -> None:
        """Make the Parquet output, if that is its format, of all records in one atomic step."""
        if not is_parquet(self._output):
            return
        pyarrow, parquet = parquet_library()
        schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in _COLUMNS.items()])
        try:
            with replacing(self._output) as partial, parquet.ParquetWriter(partial, schema) as writer:
                batch: list[dict[str, Any]] = []
                for line in self._lines():
                    batch.append(_cells(json.loads(line)))
                    if len(batch) == _ROWS_PER_WRITE:
                        writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                        batch = []
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
            self._path.unlink()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        os.close(self._file)

    def __exit__(self, *exception: object) -> None:
        self.close()


def _is_torn_record(line: bytes) -> bool:
    """Whether the only line of a file may be a record of which a power cut left some sectors; the others are zeros."""
    if _is_json(line):
        content = json.loads(line)
        return isinstance(content, dict) and key_of(content) is not None
    lost_start = line.startswith(bytes(min(_SECTOR, len(line)))) and line.rstrip(b"\n\0")[-1:] in (b"", b"}")
    return line.startswith(_RECORD_START) or _RECORD_START.startswith(line) or lost_start


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _line(record: OutputRecord) -> bytes:
    text = json.dumps(record, ensure_ascii=False)
    for letter in _LINE_ENDS:
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return _utf8(text) + b"\n"


def _utf8(text: str) -> bytes:
    """UTF-8; a lone surrogate, which it cannot encode, becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace")


# A table has the same columns for all rows; `response` holds OpenAI's record as JSON.
_COLUMNS = {"id": "string", "text": "string", "finish_reason": "string", "prompt_tokens": "int64",
            "new_tokens": "int64", "seed": "uint64", "sha256_tokens": "string", "system_fingerprint": "string",
            "error_code": "string", "error_message": "string", "response": "string", "metadata": "string"}


def _cells(record: OutputRecord) -> dict[str, Any]:
    error = record.get("error") or {}
    cells = {"id": key_of(record), "error_code": error.get("code"), "error_message": error.get("message")}
    if response := record.get("response"):
        body = response["body"]
        choice, usage = body["choices"][0], body["usage"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        record = {**body["longdraft"], "text": text, "prompt_tokens": usage["prompt_tokens"],
                  "new_tokens": usage["completion_tokens"], "system_fingerprint": body["system_fingerprint"],
                  "response": json.dumps(response, ensure_ascii=False)}
    elif "metadata" in record:
        record = {**record, "metadata": json.dumps(record["metadata"], ensure_ascii=False)}
    return {name: _utf8(cell).decode() if isinstance(cell := (record | cells).get(name), str) else cell
            for name in _COLUMNS}
