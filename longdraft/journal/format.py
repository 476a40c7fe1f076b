"""The format of a journal file, and reading one that may be interrupted or damaged.

    file    MAGIC, then records; records are only appended
    record  kind (1 byte) | length of the payload (uint32) | payload | checksum (8 bytes); little-endian

    H  JSON of `Header`: the inputs that determine the text. Always the first record
    R  JSON of `Run`: a process started to write at this point
    T  one step: its seconds (float64), number of drafted tokens (uint32), new token ids (int32 each)
    C  JSON of `Closing`: on request, the thought closes at this point. At most one, before any token that follows it
    F  JSON: the finish reason. The last record

A checksum is an 8-byte BLAKE2b hash of everything before it in the file except the other checksums. A record is valid
only if it is complete, unchanged and in its place. Reading ends at the first invalid record, because bytes after it
may be out of date. Lost tokens only cost time: resuming generates the same tokens again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from longdraft.errors import JournalError, UnusableJournalError, UsageError
from longdraft.request.sampling_params import SamplingParams
from longdraft.system.files import open_regular

FILE = "text.journal"
MAGIC = b"LDJRNL1\n"
FORMAT = 1
HEADER, RUN, TOKENS, FINISH, CLOSING = b"HRTFC"
CHECKSUM = 8  # bytes
MAX_RECORD = 1 << 28  # bytes of a payload; the header for a prompt of 10,000,000 tokens needs a quarter of this
UNNAMED = {"machine": "x86_64", "tensor_parallel": "1", "schemas": "open"}  # of `arithmetic`: values that are left out
_HEAD = struct.Struct("<BI")
_STEP = struct.Struct("<dI")
STEP_BYTES, TOKEN_BYTES = _HEAD.size + _STEP.size + CHECKSUM, 4  # of a T record without tokens; of each token


@dataclass(frozen=True)
class Header:
    """The inputs that determine a text, and the drafter it was started with.

    model          a bundled name, an absolute folder or owner/model@commit
    weights, tokenizer, config, prompt_sha256   SHA-256 of the loaded files; of the prompt's ids as int32
    prompt         token ids
    sampling       every setting by its name in SamplingParams, with the seed
    eos_token_ids  the model's end-of-text ids
    quantize       none | int8 | int4 | file
    arithmetic     what determines the last bits of the logits: kernels, device, dtype, versions, and what `UNNAMED`
                   lists where it has another value
    exactness      bit-exact | distribution
    drafter, drafter_options, heads             informational: the text does not depend on these
    """

    model: str
    weights: str
    tokenizer: str
    config: str
    prompt_sha256: str
    prompt: list[int]
    sampling: dict[str, Any]
    eos_token_ids: list[int]
    quantize: str
    arithmetic: dict[str, str]
    exactness: str
    drafter: str
    drafter_options: dict[str, Any]
    heads: str | None

    @property
    def params(self) -> SamplingParams:
        """The sampling settings. UnusableJournalError if they are invalid."""
        settings: dict[str, Any] = {name: _tupled(value) for name, value in self.sampling.items()}
        if isinstance(settings.get("ignore_eos"), int):  # the first version accepted numbers
            settings["ignore_eos"] = bool(settings["ignore_eos"])
        try:
            params = SamplingParams(**settings)
        except (TypeError, UsageError) as error:
            raise UnusableJournalError(f"the journal's sampling settings cannot be used: {error}") from error
        if params.seed is None:
            raise UnusableJournalError("the journal has no seed, so its text cannot be continued")
        return params


@dataclass(frozen=True)
class Run:
    """One process that wrote to the journal.

    began       start time in UTC, for information only
    token       number of new tokens of earlier runs
    arithmetic  as in `Header`
    """

    began: str
    token: int
    arithmetic: dict[str, str]
    drafter: str
    threads: int


@dataclass(frozen=True)
class Closing:
    """A thought that was closed on request.

    token           number of new tokens from which it closes, `thinking_close_at`
    thinking_close  the tokens that close it
    """

    token: int
    thinking_close: list[int]


class StepRecord(NamedTuple):
    """One step: numbers of new and of drafted tokens, seconds, and the index of its run."""

    num_tokens: int
    drafted: int
    seconds: float
    run: int


class JournalContent(NamedTuple):
    """The valid part of a journal.

    tokens         the new token ids, int32
    finish         the finish reason; None if the text is unfinished
    size           bytes of the valid part
    damaged_bytes  bytes after the valid part
    digest         the running hash of the valid part, needed to append records
    closing        of the thought, on request; None: it was not requested
    """

    header: Header
    runs: list[Run]
    tokens: NDArray[np.int32]
    steps: list[StepRecord]
    finish: str | None
    size: int
    damaged_bytes: int
    digest: RunningHash
    closing: Closing | None = None

    @property
    def params(self) -> SamplingParams:
        """The sampling settings of the text: the header's, with the closing that was requested."""
        params = self.header.params
        if self.closing is None:
            return params
        return replace(params, thinking_close_at=self.closing.token, thinking_close=tuple(self.closing.thinking_close))


class RunningHash:
    """The hash of all records so far, from which their checksums are computed."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(MAGIC, digest_size=CHECKSUM)

    def add(self, record: bytes) -> bytes:
        """Add a record without its checksum; returns the checksum."""
        self._hash.update(record)
        return self._hash.digest()

    def copy(self) -> RunningHash:
        other = RunningHash()
        other._hash = self._hash.copy()
        return other


def encode_record(kind: int, payload: bytes, digest: RunningHash) -> bytes:
    """Encode the next record and add it to `digest`."""
    if len(payload) > MAX_RECORD:
        raise UsageError(f"a record of the journal has {len(payload):,} bytes; allowed: {MAX_RECORD:,}; shorten the "
                         "prompt")
    body = _HEAD.pack(kind, len(payload)) + payload
    return body + digest.add(body)


def dump_payload(payload: Header | Run | Closing) -> bytes:
    """The JSON payload of an H, R or C record."""
    content = {"format": FORMAT, **asdict(payload)} if isinstance(payload, Header) else asdict(payload)
    return json.dumps(content).encode()


def dump_step(tokens: NDArray[np.int32], drafted: int, seconds: float) -> bytes:
    """The payload of a T record. tokens: [N], at least one."""
    return _STEP.pack(seconds, drafted) + tokens.astype("<i4").tobytes()


def journal_exists(folder: Path) -> bool:
    """Whether the folder holds a journal."""
    return os.path.lexists(folder / FILE)


def read_journal(folder: Path) -> JournalContent:
    """The valid part of a journal, which may be finished, interrupted, damaged or in use by a writer.

    JournalError if there is no journal or it cannot be read; UnusableJournalError if its header is damaged.
    """
    path = folder / FILE
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnusableJournalError(f"{path} is not a file")
        with open_regular(path) as file:
            return read_file(file, path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise JournalError(f"no journal in {folder}; `longdraft generate --journal DIR` starts one") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise JournalError(f"the journal {path} cannot be read: {reason}") from error


def read_file(file: IO[bytes], path: Path) -> JournalContent:
    """Like `read_journal`, for an open file."""
    size, digest = os.fstat(file.fileno()).st_size, RunningHash()
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise UnusableJournalError(f"{path} is not a journal, or its first bytes are damaged; it cannot be used")
    records = _records(file, size, digest)
    end, kind, payload = next(records, (0, 0, b""))
    if kind != HEADER:
        raise UnusableJournalError(f"{path}: the header is damaged, so the text cannot be continued; start it again in "
                                   "another folder")
    header = _header(payload, path)
    runs: list[Run] = []
    steps: list[StepRecord] = []
    tokens, finish, closing = array("i"), None, None
    for end, kind, payload in records:  # noqa: B007 - `end` is used after the loop
        if finish is not None:
            raise UnusableJournalError(f"{path}: there are records after the end of the text; it cannot be used")
        if kind == RUN:
            runs.append(_typed(Run, _json(payload, path), path))
        elif kind == TOKENS:
            steps.append(_step(payload, tokens, len(runs) - 1, path))
        elif kind == CLOSING:
            closing = _closing(payload, tokens, closing, path)
        elif kind == FINISH:
            finish = str(_json(payload, path).get("finish_reason"))
        else:
            raise UnusableJournalError(f"{path}: a record of kind {kind}; a newer longdraft may have written it")
    ids = np.frombuffer(tokens, dtype=np.int32) if tokens else np.zeros(0, np.int32)
    if len(ids) > header.params.max_new_tokens:
        raise UnusableJournalError(f"{path}: {len(ids)} tokens are more than max_new_tokens; it cannot be used")
    return JournalContent(header, runs, ids, steps, finish, end, size - end, digest, closing)


def _records(file: IO[bytes], size: int, digest: RunningHash) -> Iterator[tuple[int, int, bytes]]:
    """Yield (end offset, kind, payload) of each valid record. `digest` covers exactly the yielded records."""
    at = file.tell()
    while True:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        kind, length = _HEAD.unpack(head)
        end = at + _HEAD.size + length + CHECKSUM
        if length > MAX_RECORD or end > size:
            return
        payload, checksum = file.read(length), file.read(CHECKSUM)
        if digest.copy().add(head + payload) != checksum:
            return
        digest.add(head + payload)
        at = end
        yield end, kind, payload


def _step(payload: bytes, tokens: array[int], run: int, path: Path) -> StepRecord:
    if len(payload) <= _STEP.size or (len(payload) - _STEP.size) % 4:
        raise UnusableJournalError(f"{path}: a record of tokens has {len(payload)} bytes; it cannot be used")
    seconds, drafted = _STEP.unpack_from(payload)
    new = np.frombuffer(payload, dtype="<i4", offset=_STEP.size).astype(np.int32)
    if int(new.min()) < 0 or not (math.isfinite(seconds) and seconds >= 0) or run < 0:
        raise UnusableJournalError(f"{path}: a record of tokens has invalid values; it cannot be used")
    tokens.frombytes(new.tobytes())
    return StepRecord(len(new), drafted, seconds, run)


def _closing(payload: bytes, tokens: array[int], earlier: Closing | None, path: Path) -> Closing:
    closing = _typed(Closing, _json(payload, path), path)
    if earlier is not None or closing.token < len(tokens) or not closing.thinking_close:
        raise UnusableJournalError(f"{path}: a record of the end of a thought is out of its place; it cannot be used")
    return closing


def _header(payload: bytes, path: Path) -> Header:
    content = _json(payload, path)
    if content.pop("format", None) != FORMAT:
        raise UnusableJournalError(f"{path} has another format than {FORMAT}, which this version reads; use "
                                   "the newer longdraft that started it")
    header = _typed(Header, content, path)
    header.params  # noqa: B018 - raises for invalid settings
    return header


def _tupled(value: Any) -> Any:
    """Convert JSON lists to tuples, nested ones too."""
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _json(payload: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise UnusableJournalError(f"{path}: a record is not readable: {error}") from error
    if not isinstance(content, dict):
        raise UnusableJournalError(f"{path}: a record is not a JSON object")
    return content


_Record = TypeVar("_Record", Header, Run, Closing)
_CHECKS = {
    "str": lambda value: isinstance(value, str),
    "str | None": lambda value: value is None or isinstance(value, str),
    "int": lambda value: type(value) is int and 0 <= value < 2**31,
    "list[int]": lambda value: isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(isinstance(i, str) for i in value.values()),
}


def _typed(kind: type[_Record], content: dict[str, Any], path: Path) -> _Record:
    """Build a dataclass from a JSON object. UnusableJournalError for a missing, surplus or mistyped field."""
    known = {field.name: str(field.type) for field in fields(kind)}
    if unlike := known.keys() ^ content.keys():
        raise UnusableJournalError(f"{path}: a record has missing or surplus fields: {', '.join(sorted(unlike))[:200]}")
    for name, hint in known.items():
        if not _CHECKS[hint](content[name]):
            raise UnusableJournalError(f"{path}: {name} is {str(content[name])[:80]!r}, not a {hint}")
    return kind(**content)
