"""A power cut loses any part of what was not synced: a journal stays a true prefix, and synced tokens stay.

The disk of these tests writes sectors of 512 bytes. After a power cut it has everything up to the last sync of the
file, and any subset of the sectors that were written later. Lost sectors inside the file read as zeros.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.journals import HEADER, RUN, finish_journal, is_true_prefix, replace_os
from helpers.journals import STEPS as SHORT_STEPS
from longdraft.journal import writer as writing
from longdraft.journal.format import FILE, read_journal
from longdraft.journal.writer import Journal

SECTOR = 512


class Operation(NamedTuple):
    """A write of `data` at an offset, a truncation to an offset, or a sync. confirmed: tokens shown by then."""

    name: str
    offset: int = 0
    data: bytes = b""
    confirmed: int = 0


class RecordingOS:
    """Replaces `os` in the writer, and notes what happens to its file once it has its name."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.confirmed = 0
        self._has_name = False

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def replace(self, old: Path, new: Path) -> None:
        os.replace(old, new)
        self._has_name = True

    def write(self, file: int, data: bytes) -> int:
        offset = os.fstat(file).st_size
        done = os.write(file, data)
        self._note("write", offset, bytes(data[:done]))
        return done

    def ftruncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)
        self._note("truncate", size)

    def fsync(self, file: int) -> None:
        os.fsync(file)
        self._note("sync")

    def _note(self, name: str, offset: int = 0, data: bytes = b"") -> None:
        if self._has_name:
            self.operations.append(Operation(name, offset, data, self.confirmed))


def record_life(folder: Path, clock: list[float]) -> tuple[bytes, list[Operation]]:
    """Write a journal in two runs, a second for each step. Returns the first content and what happened later."""
    recorder = RecordingOS()
    with pytest.MonkeyPatch.context() as patch:
        replace_os(patch, recorder)
        patch.setattr(writing.time, "monotonic", lambda: clock[0])
        journal = Journal.create(folder, HEADER, RUN, 2.0)
        first = (folder / FILE).read_bytes()
        with journal:
            write_steps(journal, SHORT_STEPS[:3], recorder, clock)
        journal, _ = Journal.open(folder, 2.0)
        with journal:
            journal.begin(RUN)
            write_steps(journal, SHORT_STEPS[3:], recorder, clock)
            journal.finish("length")
    return first, recorder.operations


def write_steps(journal: Journal, steps, recorder: RecordingOS, clock: list[float]) -> None:
    for step in steps:
        journal.append(step, 0, 0.0)
        recorder.confirmed += len(step)
        clock[0] += 1


def after_power_cut(first: bytes, operations: list[Operation], keeps) -> bytes:
    """The file after a power cut after these operations. keeps: called for each unsynced sector or truncation."""
    synced = max((i for i, each in enumerate(operations) if each.name == "sync"), default=-1)
    content = bytearray(first)
    for i, each in enumerate(operations):
        if each.name == "truncate" and (i < synced or keeps()):
            del content[each.offset :]
        elif each.name == "write":
            start, end = each.offset, each.offset + len(each.data)
            while start < end:
                stop = min(end, (start // SECTOR + 1) * SECTOR)
                if i < synced or keeps():
                    content.extend(bytes(max(0, stop - len(content))))
                    content[start:stop] = each.data[start - each.offset : stop - each.offset]
                start = stop
    return bytes(content)


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=list(HealthCheck), database=None)
def test_any_subset_of_unsynced_sectors_leaves_a_true_prefix_with_all_synced_tokens(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("life")
    first, operations = record_life(folder / "whole", [100.0])
    cut = data.draw(st.integers(0, len(operations)))
    content = after_power_cut(first, operations[:cut], lambda: data.draw(st.booleans()))
    (folder / "cut").mkdir()
    (folder / "cut" / FILE).write_bytes(content)
    assert is_true_prefix(folder / "cut")
    synced = [each for each in operations[:cut] if each.name == "sync"]
    assert len(read_journal(folder / "cut").tokens) >= (synced[-1].confirmed if synced else 0)
    finish_journal(folder / "cut")


def test_the_disk_of_these_tests_loses_what_was_not_synced(tmp_path):
    first, operations = record_life(tmp_path, [100.0])
    assert sum(each.name == "sync" for each in operations) >= 3
    assert after_power_cut(first, operations, lambda: False) == (tmp_path / FILE).read_bytes(), "synced by `close`"
    before = operations[: next(i for i, each in enumerate(operations) if each.name == "sync")]
    assert after_power_cut(first, before, lambda: False) == first
    assert len(after_power_cut(first, before, lambda: True)) > len(first)
