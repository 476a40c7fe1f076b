"""A journal for tests, the checks on a damaged copy of it, and an operating system that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from longdraft.errors import JournalError, LongdraftError
from longdraft.journal import format as form
from longdraft.journal import writer as writing
from longdraft.journal.format import FILE, Header, Run, read_journal
from longdraft.journal.writer import Journal

ARITHMETIC = {"kernels": "portable", "device": "cpu", "dtype": "float32"}
HEADER = Header(
    model="novelist", weights="w" * 64, tokenizer="t" * 64, config="c" * 64, prompt_sha256="p" * 64, prompt=[1, 2, 3],
    sampling={"max_new_tokens": 10_000, "seed": 7, "stop": ["x"]}, eos_token_ids=[1], quantize="none",
    arithmetic=ARITHMETIC, exactness="bit-exact", drafter="auto", drafter_options={}, heads=None)
RUN = Run("2026-01-01T00:00:00+00:00", 0, ARITHMETIC, "auto", 2)
RUN_PAYLOAD = form.dump_payload(RUN)
STEPS = [(5, 6, 7), (8,), (9, 10), (11, 12, 13, 14), (15,)]
TOKENS = [token for step in STEPS for token in step]


def written(folder: Path, fsync: float = 1.0, is_finished: bool = True) -> None:
    with Journal.create(folder, HEADER, RUN, fsync) as journal:
        for step in STEPS:
            journal.append(step, 4, 0.25)
        if is_finished:
            journal.finish("length")


def lying(folder: Path, *records: tuple[int, bytes]) -> None:
    """Write a journal of these records with correct checksums."""
    digest = form.RunningHash()
    content = b"".join(form.encode_record(kind, payload, digest) for kind, payload in records)
    (folder / FILE).write_bytes(form.MAGIC + content)


def header_with(**changes: object) -> bytes:
    return json.dumps(json.loads(form.dump_payload(HEADER)) | changes).encode()


def check_one_line(error: LongdraftError, part: str = "") -> None:
    assert part in str(error) and "\n" not in str(error).strip() and len(str(error)) < 2000


def is_true_prefix(folder: Path) -> bool:
    """Check that the journal reads as a prefix of what was written; return False if it is refused with one line."""
    try:
        found = read_journal(folder)
    except JournalError as error:
        check_one_line(error)
        return False
    assert found.header == HEADER
    assert found.tokens.tolist() == TOKENS[: len(found.tokens)]
    assert len(found.tokens) in np.cumsum([0, *map(len, STEPS)])
    assert found.finish in (None, "length") and (found.finish is None or found.tokens.tolist() == TOKENS)
    return True


def finish_journal(folder: Path) -> None:
    """Check that a new run can continue the journal to the same end."""
    if read_journal(folder).finish:
        return
    journal, found = Journal.open(folder)
    with journal:
        journal.begin(RUN)
        if rest := TOKENS[len(found.tokens):]:
            journal.append(rest, 0, 0.0)
        journal.finish("length")
    assert read_journal(folder).tokens.tolist() == TOKENS and read_journal(folder).damaged_bytes == 0


def replace_os(patch: pytest.MonkeyPatch, replaced: object) -> None:
    """Let the writer of journals use this in place of `os`, and its `fsync` to sync files."""
    patch.setattr(writing, "os", replaced)
    patch.setattr(writing, "sync_file", replaced.fsync)


class FaultyOS:
    """Replaces `os` and `fcntl` in the writer: the n-th call fails, or each write is short."""

    COUNTED = ("open", "write", "fsync", "ftruncate", "replace", "stat", "fstat", "pread", "close", "flock")

    def __init__(self, fails_at: int, number: int, is_short: bool = False) -> None:
        self._left, self._number, self._is_short = fails_at, number, is_short
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        import fcntl

        real = getattr(os, name) if hasattr(os, name) else getattr(fcntl, name)
        return self._counted(name, real) if name in self.COUNTED else real

    def _counted(self, name: str, real):
        def call(*args, **options):
            self.calls += 1
            is_fault = self.calls == self._left
            if name == "write" and (self._is_short or is_fault):  # half of it, then maybe the fault
                args = (args[0], args[1][: max(1, len(args[1]) // 2)])
                done = real(*args)
                return done if self._is_short and not is_fault else self._fail()
            if name == "close" and is_fault:  # the system closes it all the same
                real(*args)
            return self._fail() if is_fault else real(*args, **options)

        return call

    def _fail(self):
        raise OSError(self._number, os.strerror(self._number))
