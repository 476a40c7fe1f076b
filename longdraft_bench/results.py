"""Results of experiments as JSON lines. Each line is appended as soon as it is measured, so a cut run can continue.

    {"kind": "session", ...}   a process began: machine, versions, model, prompt, experiment
    {"kind": "text", ...}      a text began: what it depends on, and the systems that write it
    {"kind": "turn", ...}      a system wrote a stretch of it
    {"kind": "stats", ...}     a system finished it

Only comparable results share a file: all its sessions have the same machine and settings, and all systems of a text
write the same tokens (except for systems whose verification rule produces another text). Seeds may be added later, or
measured by processes of their own whose files are concatenated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from longdraft.errors import OutputError, UsageError
from longdraft.report.turns import MeasuredText, Record, seeds_of
from longdraft.system.files import sync_file

# The entries that may differ between the sessions of one file.
_SESSION_SPECIFIC = {"kind", "began", "date", "load_average", "limits", "prompt_file", "seeds"}


@dataclass
class Results:
    """The content of a file of results."""

    sessions: list[Record] = field(default_factory=list)
    texts: dict[str, MeasuredText] = field(default_factory=dict)
    name: str = ""

    @property
    def seeds(self) -> list[int]:
        """The seeds of all sessions, in the order of the file."""
        return seeds_of(self.sessions)

    def add(self, record: Record) -> None:
        if record["kind"] == "session":
            self.sessions.append(record)
        elif record["kind"] == "text":
            self.texts.setdefault(record["text"], MeasuredText(record))
        elif record["kind"] == "turn":
            turns = self.texts[record["text"]].turns.setdefault(record["system"], [])
            del turns[record["turn"] :]  # a round that was cut is measured again
            turns.append(record)
        elif record["kind"] == "stats":
            self.texts[record["text"]].stats[record["system"]] = record["stats"]

    def check(self) -> None:
        """Raise UsageError if the file mixes results that are not comparable."""
        for session in self.sessions[1:]:
            if different := session_differences(self.sessions[0], session):
                raise UsageError(f"{self.name or 'the results'} mix machines or settings: {'; '.join(different)}; "
                                 "measure them in one file each")
        for text in self.texts.values():
            require_one_text(text)


def session_differences(first: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """The settings in which two sessions differ, as 'name: this, that'."""
    names = sorted((first.keys() | other.keys()) - _SESSION_SPECIFIC)
    return [f"{name}: {first.get(name)}, {other.get(name)}" for name in names if first.get(name) != other.get(name)]


def require_one_text(text: MeasuredText) -> None:
    """Raise UsageError if systems that must write the same tokens wrote different ones."""
    reference = text.about["reference"]
    hashes = [turn["sha256_tokens"] for turn in text.turns.get(reference, [])]
    for system, turns in text.turns.items():
        if text.about["systems"][system]["own_text"]:
            continue
        for number, (turn, expected) in enumerate(zip(turns, hashes)):
            if turn["sha256_tokens"] != expected:
                raise UsageError(f"{reference} and {system} wrote different texts, somewhere before token "
                                 f"{turn['end']:,} (turn {number}), so their times cannot be compared. This is a bug; "
                                 "please report it")


def read_results(path: Path) -> Results:
    """Read and check a file of results. Raises UsageError if it is not one, or mixes what is not comparable."""
    results = Results(name=str(path))
    for record in _records(path):
        try:
            results.add(record)
        except KeyError as error:
            raise UsageError(f"{path} is not a file of results: a line has no {error}; give a file that `longdraft "
                             "bench ... --output` wrote") from error
    if not results.sessions:
        raise UsageError(f"{path} is not a file of results: it has no session; give a file that `longdraft bench ... "
                         "--output` wrote")
    results.check()
    return results


def _records(path: Path) -> Iterator[Record]:
    """The complete lines. The last line may be cut."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read the results {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "kind" not in record:
                raise ValueError
        except ValueError as error:
            raise UsageError(f"{path} is not a file of results: line {number} is not a JSON record") from error
        yield record


class ResultsWriter:
    """Results in memory, and appended to a file if `path` is given. An existing file is continued."""

    def __init__(self, path: Path | None, session: Record) -> None:
        self.results = Results()
        self._path = path
        self._file: IO[bytes] | None = None
        if path and path.exists() and path.stat().st_size:
            self.results = read_results(path)
            if different := session_differences(self.results.sessions[0], session):
                raise UsageError(f"--output {path} holds other measurements ({'; '.join(different)[:400]}); give "
                                 "another file, or the same machine and settings to continue this one")
        if path:
            try:
                self._file = open(path, "ab")  # noqa: SIM115 - held until `close`
                _cut_torn_line(path)
            except OSError as error:
                raise UsageError(f"--output cannot write {path}: {error.strerror or error}; choose another "
                                 "place") from error
        self.append(session)

    def append(self, record: Record) -> None:
        """Add a record. Raises OutputError if the file cannot be written."""
        self.results.add(record)
        if self._file:
            try:
                self._file.write((json.dumps(record) + "\n").encode())
                self._file.flush()
                sync_file(self._file.fileno())
            except OSError as error:
                raise OutputError(f"--output cannot write {self._path}: {error.strerror or error}; free some space "
                                  "and run the same command again to continue") from error

    def close(self) -> None:
        if self._file:
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that a killed process left unfinished."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
