"""The records of a job: a file that only grows, each record on the disk before the next row counts as done.

    with Records.open(Path("out.jsonl"), work) as records:
        records.add(record)
        records.finish()          # a Parquet output is made of what was collected

A line that a power cut left half is taken back when the file is opened again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from longdraft.batch.rows import Record, fingerprint_of, is_failed, key_of, num_tokens
from longdraft.batch.source import is_parquet, parquet_library
from longdraft.errors import OutputError, UsageError
from longdraft.files import sync_folder

_COLLECTED = "records.jsonl"  # in the work folder, for an output that cannot be appended to
_AT_ONCE = 1024
_BEGINNING = b'{"id": "'  # of every record
_LINE_ENDS = "\x85\u2028\u2029"  # which JSON leaves as they are, and some readers take for the end of a line


class Records:
    """What is done, by the rows' ids, and the file that says so.

    done         ids of rows that have a record
    failed       how many of them are errors
    tokens       of all their texts
    fingerprint  of what wrote the texts that are there; None: there are none
    """

    def __init__(self, output: Path, work: Path) -> None:
        self._output = output
        self._path = work / _COLLECTED if is_parquet(output) else output
        self.done: set[str] = set()
        self.failed = self.tokens = 0
        self.fingerprint: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            is_new = not self._path.exists()
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"cannot write the output {output}: {error.strerror or error}; choose another "
                             "place") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise UsageError(f"another job writes {output}; wait for it, or give another output") from error
        if is_new:
            sync_folder(self._path.parent)

    @classmethod
    def open(cls, output: Path, work: Path, *, without_errors: bool = False) -> Records:
        """Those that are there, and more to come. `without_errors`: errors are forgotten, their rows done anew.

        UsageError where the file holds something else, or another job writes it.
        """
        if is_parquet(output) and os.path.exists(output):  # JSON lines could be gone on with
            raise UsageError(f"the output {output} is there already, whole; give another name, or remove it")
        records = cls(output, work)
        try:
            size = records._read()
            os.ftruncate(records._file, size)
            if without_errors and records.failed:
                records._drop_errors()
        except BaseException:
            records.close()
            raise
        return records

    def _read(self) -> int:
        """Take in what is there; returns where the last whole line ends."""
        size = 0
        for number, line in enumerate(self._lines(), 1):
            if not line.endswith(b"\n") and (size or _is_torn_record(line)):
                break
            try:
                self._count(json.loads(line))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise UsageError(f"line {number} of the output {self._output} is no record of a job; give another "
                                 "name, or remove the file") from error
            size += len(line)
        return size

    def _lines(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            yield from file

    def _count(self, record: Record) -> None:
        key = key_of(record)
        if key is None or key in self.done:
            raise ValueError("not a record, or a second one of a row")
        self.done.add(key)
        self.failed += is_failed(record)
        self.tokens += num_tokens(record)
        self.fingerprint = fingerprint_of(record) or self.fingerprint

    def _drop_errors(self) -> None:
        """In the same file, which is locked: a cut on the way loses records of errors or texts that are done anew."""
        kept = b"".join(line for line in self._lines() if not is_failed(json.loads(line)))
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            partial.write_bytes(kept)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
                fresh = os.open(partial, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
            fcntl.flock(fresh, fcntl.LOCK_EX)
            os.replace(partial, self._path)
        except OSError as error:
            raise self._failure(error) from error
        os.close(self._file)
        self._file = fresh
        self.done, self.failed, self.tokens = set(), 0, 0
        self._read()

    def add(self, record: Record) -> None:
        """On the disk when this returns. OutputError where it cannot be."""
        line = _line(record)
        size = os.fstat(self._file).st_size
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, size)
            raise self._failure(error) from error
        self._count(record)

    def _failure(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self._path}: {error.strerror or error}; what is there stands, start the job "
                           "again to go on")

    def finish(self) -> None:
        """Every row has its record: a Parquet file is made of them, whole or not at all."""
        if not is_parquet(self._output):
            return
        pyarrow, parquet = parquet_library()
        partial = self._output.with_name(self._output.name + ".partial")
        schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in _COLUMNS.items()])
        try:
            with parquet.ParquetWriter(partial, schema) as writer:
                batch: list[dict[str, Any]] = []
                for line in self._lines():
                    batch.append(_cells(json.loads(line)))
                    if len(batch) == _AT_ONCE:
                        writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                        batch = []
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(partial, self._output)
            sync_folder(self._output.parent)
            self._path.unlink()
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _is_torn_record(line: bytes) -> bool:
    """Whether a line without its end may be what was written of a record before a power cut."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
    return isinstance(found, dict) and key_of(found) is not None


def _line(record: Record) -> bytes:
    text = json.dumps(record, ensure_ascii=False)
    for letter in _LINE_ENDS:
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return _utf8(text) + b"\n"


def _utf8(text: str) -> bytes:
    """Half a surrogate pair, which UTF-8 has no bytes for, as JSON names it."""
    return text.encode("utf-8", "backslashreplace")


# A table has one shape for all rows: what OpenAI's records have of their own stands in `response`, as JSON.
_COLUMNS = {"id": "string", "text": "string", "finish_reason": "string", "prompt_tokens": "int64",
            "new_tokens": "int64", "seed": "uint64", "sha256_tokens": "string", "system_fingerprint": "string",
            "error_code": "string", "error_message": "string", "response": "string", "metadata": "string"}


def _cells(record: Record) -> dict[str, Any]:
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
