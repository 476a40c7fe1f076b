"""The journal's file: a journal that is cut, damaged or forged is read as a true prefix, or refused."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from helpers.journals import (
    ARITHMETIC,
    HEADER,
    RUN,
    RUN_PAYLOAD,
    STEPS,
    TOKENS,
    check_one_line,
    finish_journal,
    header_with,
    is_true_prefix,
    lying,
    written,
)
from longdraft.engine.provenance import load_options
from longdraft.errors import BusyJournalError, JournalError, UnusableJournalError, UsageError
from longdraft.journal import format as form
from longdraft.journal import writer as writing
from longdraft.journal.format import FILE, read_journal
from longdraft.journal.writer import Journal, is_being_written, parse_fsync, remove_journal
from longdraft.request.sampling_params import SamplingParams


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


@pytest.mark.parametrize("records, message", [
    ([(form.TOKENS, form.dump_step(np.array([1], np.int32), 0, 0.0))], "invalid values"),  # before any run
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, form.dump_step(np.array([-1], np.int32), 0, 0.0))], "invalid values"),
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, form.dump_step(np.array([1], np.int32), 0, np.nan))], "invalid values"),
    ([(form.RUN, RUN_PAYLOAD), (form.TOKENS, b"\0" * 14)], "14 bytes"),
    ([(form.FINISH, b"{}"), (form.RUN, RUN_PAYLOAD)], "records after the end"),
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
