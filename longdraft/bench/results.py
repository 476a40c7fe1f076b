"""Results as JSON lines: appended while measuring, one line as soon as it is known, so that a cut run goes on.

    {"kind": "session", ...}   a process began: machine, versions, model, prompt, experiment (`provenance`)
    {"kind": "text", ...}      a text is begun: what it depends on, and which systems write it
    {"kind": "turn", ...}      a system wrote a stretch of it
    {"kind": "stats", ...}     a system finished it

What is compared must be comparable: all sessions of a file are of one machine and one setting, and all systems of a
text wrote the same tokens (but for those that the rule of verification allows another text). UsageError otherwise.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import OutputError, UsageError

Record = dict[str, Any]
# What may differ between the sessions of one file; all else that a session tells must be equal.
_PASSING = {"kind", "began", "date", "load_average", "limits", "prompt_file"}


@dataclass
class Text:
    """A text as it was measured: its own record, and turns of each system in order."""

    about: Record
    turns: dict[str, list[Record]] = field(default_factory=dict)
    stats: dict[str, Record] = field(default_factory=dict)

    def tokens(self, system: str) -> NDArray[np.int32]:
        """What a system wrote, as far as the turns say: its own text, or that of all."""
        about = self.about["systems"][system]
        turns = self.turns.get(system if about["own_text"] else self.about["reference"], [])
        parts = [unpacked(turn["ids"]) for turn in turns]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


@dataclass
class Results:
    """Everything in a file of results."""

    sessions: list[Record] = field(default_factory=list)
    texts: dict[str, Text] = field(default_factory=dict)
    name: str = ""

    def add(self, record: Record) -> None:
        if record["kind"] == "session":
            self.sessions.append(record)
        elif record["kind"] == "text":
            self.texts.setdefault(record["text"], Text(record))
        elif record["kind"] == "turn":
            turns = self.texts[record["text"]].turns.setdefault(record["system"], [])
            del turns[record["turn"] :]  # measured again, after a round that was cut
            turns.append(record)
        elif record["kind"] == "stats":
            self.texts[record["text"]].stats[record["system"]] = record["stats"]

    def check(self) -> None:
        """UsageError where what the file holds must not be compared."""
        for session in self.sessions[1:]:
            if different := differences(self.sessions[0], session):
                raise UsageError(f"{self.name or 'the results'} mix machines or settings: {'; '.join(different)}; "
                                 "measure them in one file each")
        for text in self.texts.values():
            require_one_text(text)


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two sessions do not share, as 'name: this, that'."""
    names = sorted((first.keys() | other.keys()) - _PASSING)
    return [f"{name}: {first.get(name)}, {other.get(name)}" for name in names if first.get(name) != other.get(name)]


def require_one_text(text: Text) -> None:
    """UsageError where systems that must write the same tokens did not."""
    reference = text.about["reference"]
    hashes = [turn["sha256_tokens"] for turn in text.turns.get(reference, [])]
    for system, turns in text.turns.items():
        if text.about["systems"][system]["own_text"]:
            continue
        for place, (turn, expected) in enumerate(zip(turns, hashes)):
            if turn["sha256_tokens"] != expected:
                raise UsageError(f"{reference} and {system} wrote different texts, somewhere before token "
                                 f"{turn['end']:,} (turn {place}); a comparison of their times means nothing, and it "
                                 "is a bug: please report it")


def read(path: Path) -> Results:
    """The results in a file, checked. UsageError where it is none, or must not be compared."""
    results = Results(name=str(path))
    for record in _records(path):
        try:
            results.add(record)
        except KeyError as error:
            raise UsageError(f"{path} is not a file of results: a line lacks {error}") from error
    if not results.sessions:
        raise UsageError(f"{path} is not a file of results: it has no session; give what `bench ... --output` wrote")
    results.check()
    return results


def _records(path: Path) -> Iterator[Record]:
    """The whole lines; the last one may have been cut."""
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
            raise UsageError(f"{path} is not a file of results: line {number} is no JSON record") from error
        yield record


class Store:
    """Where results go: a file that is appended to (and what it held), or memory alone."""

    def __init__(self, path: Path | None, session: Record) -> None:
        self.results = Results()
        self._path = path
        self._file: IO[bytes] | None = None
        if path and path.exists() and path.stat().st_size:
            self.results = read(path)
            if different := differences(self.results.sessions[0], session):
                raise UsageError(f"--output {path} holds other measurements ({'; '.join(different)[:400]}); give "
                                 "another file, or the same machine and settings to go on")
        if path:
            try:
                self._file = open(path, "ab")  # noqa: SIM115 - held until `close`
                _cut_torn_line(path)
            except OSError as error:
                raise UsageError(f"--output cannot write {path}: {error.strerror or error}; choose another "
                                 "place") from error
        self.append(session)

    def append(self, record: Record) -> None:
        self.results.add(record)
        if self._file:
            try:
                self._file.write((json.dumps(record) + "\n").encode())
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise OutputError(f"--output cannot write {self._path}: {error.strerror or error}; the same command "
                                  "goes on when there is room") from error

    def close(self) -> None:
        if self._file:
            self._file.close()


def _cut_torn_line(path: Path) -> None:
    """A line that a killed process left unfinished goes."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def packed(tokens: Sequence[int] | NDArray[np.int32]) -> str:
    """Token ids as text: little-endian int32, deflated, base64."""
    return base64.b64encode(zlib.compress(np.asarray(tokens, dtype="<i4").tobytes(), 9)).decode()


def unpacked(text: str) -> NDArray[np.int32]:
    found: NDArray[np.int32] = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<i4").astype(np.int32)
    return found
