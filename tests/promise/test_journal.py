"""The journal's file: a journal that is cut, damaged or forged is read as a true prefix, or refused."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers.journals import (
    ARITHMETIC,
    HEADER,
    RUN,
    STEPS,
    TOKENS,
    check_one_line,
    finish_journal,
    is_true_prefix,
    written,
)
from longdraft.core import SamplingParams
from longdraft.errors import BusyJournalError, JournalError, UnusableJournalError, UsageError
from longdraft.journal import FILE, Journal, is_being_written, parse_fsync, read_journal, remove_journal
from longdraft.journal import format as form
from longdraft.journal import writer as writing
from longdraft.journal.resume import load_options


def test_what_was_written_is_read_back(tmp_path):
    written(tmp_path)
    found = read_journal(tmp_path)
    assert found.header == HEADER and found.runs == [RUN]
    assert found.tokens.tolist() == TOKENS and found.tokens.dtype == np.int32
    assert [step.num_tokens for step in found.steps] == [len(step) for step in STEPS]
    assert found.steps[0].drafted == 4 and found.steps[0].seconds == 0.25
    assert found.finish == "length" and found.damaged_bytes == 0
    assert found.header.params == SamplingParams(max_new_tokens=10_000, seed=7, stop=("x",))


def test_a_new_run_truncates_a_torn_record_and_appends(tmp_path):
    written(tmp_path, is_finished=False)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"T\x00\x00")
    assert read_journal(tmp_path).damaged_bytes == 3
    journal, found = Journal.open(tmp_path)
    with journal:
        journal.begin(replace(RUN, token=len(found.tokens)))
        journal.append((77,), 0, 0.1)
    found = read_journal(tmp_path)
    assert found.tokens.tolist() == [*TOKENS, 77] and found.damaged_bytes == 0 and len(found.runs) == 2
    assert found.steps[-1].run == 1


def test_opening_changes_nothing_before_a_run_begins(tmp_path):
    written(tmp_path, is_finished=False)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-5])
    before = (tmp_path / FILE).read_bytes()
    Journal.open(tmp_path)[0].close()
    assert (tmp_path / FILE).read_bytes() == before


def test_a_journal_cut_at_any_byte_is_a_true_prefix_or_refused(tmp_path):
    written(tmp_path / "whole")
    content = (tmp_path / "whole" / FILE).read_bytes()
    begins = content.index(b"R", content.index(b'"heads"'))
    for length in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:length])
        assert is_true_prefix(tmp_path) == (length >= begins)


def test_a_journal_with_any_byte_flipped_is_a_true_prefix_or_refused(tmp_path):
    written(tmp_path / "whole")
    content = (tmp_path / "whole" / FILE).read_bytes()
    for place in range(len(content)):
        for mask in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[place] ^= mask
            (tmp_path / FILE).write_bytes(damaged)
            if is_true_prefix(tmp_path):
                assert read_journal(tmp_path).damaged_bytes > 0  # no flip goes unnoticed


@pytest.mark.parametrize("tail", [b"\0" * 512, b"\xff" * 512, os.urandom(700)], ids=["zeros", "ones", "noise"])
def test_a_last_sector_of_any_bytes_is_truncated(tmp_path, tail):
    """After a power cut, a file may have its new length without its new content."""
    written(tmp_path, is_finished=False)
    size = (tmp_path / FILE).stat().st_size
    for lost in (0, 1, 30, 100):
        content = (tmp_path / FILE).read_bytes()[: size - lost]
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / FILE).write_bytes(content + tail)
        assert is_true_prefix(tmp_path / "x")
        finish_journal(tmp_path / "x")


def test_records_from_another_run_or_offset_are_ignored(tmp_path):
    """The checksum of a record covers all records before it, so old sectors of a file are not accepted."""
    written(tmp_path / "a")
    with Journal.create(tmp_path / "b", HEADER, RUN) as journal:
        journal.append((99,), 0, 0.0)
        size = (tmp_path / "b" / FILE).stat().st_size
    tail = (tmp_path / "a" / FILE).read_bytes()[size:]
    with (tmp_path / "b" / FILE).open("ab") as file:
        file.write(tail)
    assert read_journal(tmp_path / "b").tokens.tolist() == [99]


def test_two_writers_exclude_each_other(tmp_path):
    journal = Journal.create(tmp_path, HEADER, RUN)
    assert is_being_written(tmp_path)
    with pytest.raises(JournalError, match="is being written"):
        Journal.open(tmp_path)
    with pytest.raises(JournalError, match="longdraft resume"):
        Journal.create(tmp_path, HEADER, RUN)
    assert read_journal(tmp_path).tokens.tolist() == []  # reading is free
    journal.close()
    assert not is_being_written(tmp_path)
    Journal.open(tmp_path)[0].close()


def test_a_journal_with_a_torn_header_is_started_again(tmp_path):
    (tmp_path / (FILE + ".partial")).write_bytes(b"LDJR")
    written(tmp_path)
    assert read_journal(tmp_path).tokens.tolist() == TOKENS
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("policy, seconds", [("always", 0), ("never", np.inf), ("2.5", 2.5), (1, 1)])
def test_each_fsync_policy_syncs_when_it_says(tmp_path, monkeypatch, policy, seconds):
    assert parse_fsync(policy) == seconds
    synced, now = [], [0.0]
    monkeypatch.setattr(writing.time, "monotonic", lambda: now[0])
    with Journal.create(tmp_path, HEADER, RUN, parse_fsync(policy)) as journal:
        monkeypatch.setattr(writing.os, "fsync", lambda file: synced.append(now[0]))
        for _ in range(10):
            now[0] += 0.5
            journal.append((1,), 0, 0.0)
    assert len(synced) == {"always": 11, "never": 0, "2.5": 3, 1: 6}[policy]


@pytest.mark.parametrize("policy", ["", "sometimes", "0", "-1", "nan", "inf", None, [], 0])
def test_unknown_fsync_policies_are_refused(policy):
    with pytest.raises(UsageError, match="always, never, or seconds"):
        parse_fsync(policy)


REFUSED = {
    "nothing there": (lambda folder: (folder / FILE).unlink(), "no journal in"),
    "a folder in its place": (lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()), "is not a file"),
    "a pipe": (lambda folder: ((folder / FILE).unlink(), os.mkfifo(folder / FILE)), "is not a file"),
    "empty": (lambda folder: (folder / FILE).write_bytes(b""), "is not a journal"),
    "something else": (lambda folder: (folder / FILE).write_bytes(b"hello" * 99), "is not a journal"),
    "no header": (lambda folder: (folder / FILE).write_bytes(form.MAGIC), "the header is damaged"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_is_no_journal_is_refused_with_one_line(tmp_path, what):
    written(tmp_path)
    damage, message = REFUSED[what]
    damage(tmp_path)
    for attempt in (read_journal, Journal.open):
        with pytest.raises(JournalError, match=message):
            attempt(tmp_path)


def lying(folder: Path, *records: tuple[int, bytes]) -> None:
    """Write a journal of these records with correct checksums."""
    digest = form.RunningHash()
    content = b"".join(form.encode_record(kind, payload, digest) for kind, payload in records)
    (folder / FILE).write_bytes(form.MAGIC + content)


def header_with(**changes: object) -> bytes:
    return json.dumps(json.loads(form.dump_payload(HEADER)) | changes).encode()


LIES = {
    "newer format": (header_with(format=2), "another format"),
    "surplus": (header_with(more=1), "surplus fields: more"),
    "not JSON": (b"{", "not readable"),
    "nested": (b"[" * 100_000, "not readable"),
    "no object": (b"[]", "not a JSON object"),
    "prompt of texts": (header_with(prompt=["a"]), "prompt is"),
    "prompt of huge ids": (header_with(prompt=[2**40]), "prompt is"),
    "sampling of no name": (header_with(sampling={"x": 1}), "sampling settings"),
    "sampling out of range": (header_with(sampling={"top_p": 9}), "top_p is 9"),
    "no seed": (header_with(sampling={}), "no seed"),
    "model of another type": (header_with(model=3), "model is '3'"),
}


@pytest.mark.parametrize("what", LIES)
def test_a_header_with_false_values_is_refused_with_one_line(tmp_path, what):
    payload, message = LIES[what]
    lying(tmp_path, (form.HEADER, payload))
    with pytest.raises(JournalError, match=message) as caught:
        read_journal(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


RUN_PAYLOAD = form.dump_payload(RUN)


@pytest.mark.parametrize("records, message", [
    ([(form.TOKENS, form.dump_step(np.array([1], np.int32), 0, 0.0))], "invalid values"),  # before any run
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, form.dump_step(np.array([-1], np.int32), 0, 0.0))], "invalid values"),
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, form.dump_step(np.array([1], np.int32), 0, np.nan))], "invalid values"),
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, b"\0" * 14)], "14 bytes"),
    ([(form.FINISH, b"{}"), (form.RUN, RUN_PAYLOAD)], "records behind the end"),
    ([(ord("Z"), b"")], "of kind 90"),
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, form.dump_step(np.ones(10_001, np.int32), 0, 0.0))], "more than"),
])
def test_records_with_impossible_values_are_refused(tmp_path, records, message):
    lying(tmp_path, (form.HEADER, form.dump_payload(HEADER)), *records)
    with pytest.raises(JournalError, match=message):
        read_journal(tmp_path)


def test_a_false_record_length_allocates_no_memory(tmp_path):
    written(tmp_path)
    with (tmp_path / FILE).open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    assert read_journal(tmp_path).finish == "length"
    (tmp_path / FILE).write_bytes(form.MAGIC + b"H\xff\xff\xff\xff" + b"x" * 100)
    with pytest.raises(JournalError, match="header is damaged"):
        read_journal(tmp_path)


# Against a model: a list of tokens


class Lives(RuleBasedStateMachine):
    """Random appends, kills, power cuts with torn or damaged sectors, and recoveries: each read is a true prefix."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self._keeper = tempfile.TemporaryDirectory()
        self.folder = Path(self._keeper.name) / "journal"
        self.journal: Journal | None = Journal.create(self.folder, HEADER, RUN, np.inf)
        self.tokens: list[int] = []
        self.is_finished = False
        self.floor = self.size()  # the header is on the disk from the beginning

    def size(self) -> int:
        return (self.folder / FILE).stat().st_size

    @rule(step=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
    def append(self, step: list[int]) -> None:
        if self.journal and not self.is_finished:
            self.journal.append(step, len(step), 0.5)
            self.tokens += step

    @rule()
    def finish(self) -> None:
        if self.journal and not self.is_finished and self.tokens:
            self.journal.finish("length")
            self.is_finished = True

    @rule()
    def kill(self) -> None:
        """Nothing is lost: all was handed to the system."""
        if self.journal:
            self.journal.close()
            self.journal = None

    @rule(data=st.data())
    def power_cut(self, data: st.DataObject) -> None:
        """Anything behind the header may be missing, or be something else."""
        self.kill()
        cut = data.draw(st.integers(self.floor, self.size()))
        os.truncate(self.folder / FILE, cut)
        with (self.folder / FILE).open("ab") as file:
            file.write(data.draw(st.binary(max_size=40) | st.just(b"\0" * 64)))
        found = read_journal(self.folder)
        assert found.tokens.tolist() == self.tokens[: len(found.tokens)]
        self.tokens, self.is_finished = found.tokens.tolist(), found.finish is not None

    @rule()
    def resume(self) -> None:
        if self.journal is None and not self.is_finished:
            self.journal, found = Journal.open(self.folder, np.inf)
            assert found.tokens.tolist() == self.tokens
            self.journal.begin(replace(RUN, token=len(self.tokens)))

    @invariant()
    def a_reader_sees_what_was_written(self) -> None:
        if hasattr(self, "tokens"):
            found = read_journal(self.folder)
            assert found.tokens.tolist() == self.tokens
            assert (found.finish is not None) == self.is_finished

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.kill()
            self._keeper.cleanup()


Lives.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestLives = Lives.TestCase


@settings(max_examples=300, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_records_never_crash_the_reader(tmp_path, data):
    """The checksums are correct and the content is random."""
    values = st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.floats() | st.text(max_size=5) | st.just([])
    header = json.loads(form.dump_payload(HEADER))
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), max_size=2)):
        header[name] = data.draw(values | st.dictionaries(st.sampled_from(["seed", "top_p", "stop", "x"]), values))
    records = [(form.HEADER, json.dumps(header).encode())]
    records += data.draw(st.lists(st.tuples(st.integers(0, 255) | st.sampled_from(b"HRTF"),
                                            st.binary(max_size=40) | st.just(RUN_PAYLOAD)), max_size=4))
    lying(tmp_path, *records)
    try:
        read_journal(tmp_path)
    except JournalError as error:
        check_one_line(error)


def test_removing_a_journal_leaves_other_files_and_refuses_a_live_one(tmp_path):
    written(tmp_path / "a")
    (tmp_path / "a" / "notes").write_text("mine")
    remove_journal(tmp_path / "a")
    remove_journal(tmp_path / "a")  # again
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["notes"]
    with Journal.create(tmp_path / "b", HEADER, RUN), pytest.raises(BusyJournalError):
        remove_journal(tmp_path / "b")
    remove_journal(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_probing_a_journal_makes_no_resume_fail(tmp_path):
    written(tmp_path, is_finished=False)
    ended = threading.Event()
    thread = threading.Thread(target=lambda: [is_being_written(tmp_path) for _ in iter(ended.is_set, True)])
    thread.start()
    try:
        for _ in range(200):
            Journal.open(tmp_path)[0].close()
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("degree", ["many", "-1", "", "1" * 5000, "1.0"])
def test_a_tensor_parallel_degree_that_is_no_number_is_refused(degree):
    header = replace(HEADER, arithmetic=ARITHMETIC | {"tensor_parallel": degree})
    with pytest.raises(UnusableJournalError) as caught:
        load_options(header, drafter=None, drafter_options=None, heads=None)
    check_one_line(caught.value, "tensor_parallel")
