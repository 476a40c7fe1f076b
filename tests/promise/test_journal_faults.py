"""The journal's writer: no fault of the operating system loses a confirmed token."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.journals import (
    HEADER,
    RUN,
    STEPS,
    TOKENS,
    FaultyOS,
    check_one_line,
    finish_journal,
    is_true_prefix,
    replace_os,
)
from longdraft.errors import JournalError, LongdraftError, OutputError
from longdraft.journal import writer as writing
from longdraft.journal.format import FILE, read_journal
from longdraft.journal.writer import Journal


def life(folder: Path, done: list[int]) -> None:
    """Write a journal in two runs; append each confirmed step to `done`."""
    with Journal.create(folder, HEADER, RUN, 0.0) as journal:
        for step in STEPS[:3]:
            journal.append(step, 0, 0.0)
            done += step
    journal, _ = Journal.open(folder, 0.0)
    with journal:
        journal.begin(RUN)
        for step in STEPS[3:]:
            journal.append(step, 0, 0.0)
            done += step
        journal.finish("length")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EINTR])
def test_a_fault_of_any_system_call_loses_nothing_confirmed(tmp_path, monkeypatch, number):
    faults = 0
    for at in range(1, 1000):
        folder, done, faulty = tmp_path / str(at), [], FaultyOS(at, number)
        with monkeypatch.context() as patch:
            replace_os(patch, faulty)
            patch.setattr(writing, "fcntl", SimpleNamespace(flock=faulty.flock, LOCK_EX=2, LOCK_NB=4))
            patch.setattr(writing, "_PATH_CHECK_INTERVAL_S", 0.0)
            try:
                life(folder, done)
            except LongdraftError as error:
                check_one_line(error, os.strerror(number))
                faults += 1
        if faulty.calls < at:
            break
        if not (folder / FILE).exists():
            assert done == []  # it never began
            continue
        assert read_journal(folder).tokens.tolist()[: len(done)] == done
        assert is_true_prefix(folder)
        finish_journal(folder)
    assert at > 30 and faults > 25  # few calls may fail unnoticed: those that close


def test_short_writes_are_continued(tmp_path, monkeypatch):
    replace_os(monkeypatch, FaultyOS(0, 0, is_short=True))
    done: list[int] = []
    life(tmp_path, done)
    assert done == TOKENS and is_true_prefix(tmp_path) and read_journal(tmp_path).finish == "length"


def test_interrupted_system_calls_are_repeated(tmp_path):
    """Signals interrupt the writer's system calls; Python repeats them, and no record is lost or duplicated."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(1))
    stops = threading.Event()

    def rain() -> None:
        while not stops.wait(1e-4):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=rain)
    thread.start()
    try:
        for turn in range(200):
            done: list[int] = []
            life(tmp_path / str(turn), done)
            assert done == TOKENS == read_journal(tmp_path / str(turn)).tokens.tolist()
            if len(seen) > 200:
                break
    finally:
        stops.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert seen


def test_a_failed_write_leaves_no_partial_record(tmp_path, monkeypatch):
    with Journal.create(tmp_path, HEADER, RUN) as journal:
        journal.append(STEPS[0], 0, 0.0)
        size = (tmp_path / FILE).stat().st_size
        replace_os(monkeypatch, FaultyOS(1, errno.ENOSPC))
        with pytest.raises(OutputError, match="No space left"):
            journal.append(STEPS[1], 0, 0.0)
    assert (tmp_path / FILE).stat().st_size == size and read_journal(tmp_path).damaged_bytes == 0


def test_a_folder_that_vanishes_is_created_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writing, "_PATH_CHECK_INTERVAL_S", 0.0)
    with Journal.create(tmp_path / "a" / "b", HEADER, RUN) as journal:
        journal.append(STEPS[0], 0, 0.0)
        shutil.rmtree(tmp_path / "a")
        for step in STEPS[1:]:
            journal.append(step, 0, 0.0)
        assert "had been removed" in caplog.text
        with pytest.raises(JournalError, match="is being written"):
            Journal.open(tmp_path / "a" / "b")
    assert read_journal(tmp_path / "a" / "b").tokens.tolist() == TOKENS


def test_a_file_in_place_of_the_journal_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_PATH_CHECK_INTERVAL_S", 0.0)
    with Journal.create(tmp_path, HEADER, RUN) as journal:
        (tmp_path / FILE).rename(tmp_path / "moved")
        (tmp_path / FILE).write_text("mine")
        with pytest.raises(OutputError, match="another file lies in its place"):
            journal.append(STEPS[0], 0, 0.0)
    assert (tmp_path / FILE).read_text() == "mine"
    (tmp_path / "moved").rename(tmp_path / FILE)
    finish_journal(tmp_path)


def foreign(path: Path, change: str) -> None:
    """What another program does to a journal while it is written."""
    size = path.stat().st_size
    if change == "appended":
        with path.open("ab") as file:
            file.write(b"a line of a log\n")
    else:
        os.truncate(path, {"emptied": 0, "cut": size - 3, "extended": size + 100}[change])


@pytest.mark.parametrize("change", ["emptied", "cut", "extended", "appended"])
@pytest.mark.parametrize("end", ["step", "finish", "close"])
def test_a_change_by_another_program_is_one_error_and_the_rest_can_be_resumed(tmp_path, monkeypatch, change, end):
    if end == "step":
        monkeypatch.setattr(writing, "_PATH_CHECK_INTERVAL_S", 0.0)
    journal = Journal.create(tmp_path, HEADER, RUN)
    journal.append(STEPS[0], 0, 0.0)
    journal.append(STEPS[1], 0, 0.0)
    foreign(tmp_path / FILE, change)
    with pytest.raises(OutputError) as caught:
        {"step": lambda: journal.append(STEPS[2], 0, 0.0), "finish": lambda: journal.finish("length"),
         "close": journal.close}[end]()
    check_one_line(caught.value, "another program has truncated it or written to it")
    journal.close()
    assert is_true_prefix(tmp_path) == (change != "emptied")
    if change != "emptied":
        finish_journal(tmp_path)


def test_a_pipe_in_place_of_a_journal_does_not_block(tmp_path):
    os.mkfifo(tmp_path / FILE)
    for look in (read_journal, writing.is_being_written, writing.remove_journal, Journal.open):
        with pytest.raises(LongdraftError) as caught:
            look(tmp_path)
        check_one_line(caught.value, "not a")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_journal_that_cannot_be_removed_is_one_line(tmp_path, monkeypatch, number):
    Journal.create(tmp_path, HEADER, RUN).close()

    def fail(*given, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OutputError) as caught:
        writing.remove_journal(tmp_path)
    check_one_line(caught.value, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ENAMETOOLONG])
def test_a_folder_that_cannot_be_made_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, number):
    def fail(self, *given, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(LongdraftError) as caught:
        Journal.create(tmp_path / "a" / "b", HEADER, RUN)
    check_one_line(caught.value, os.strerror(number))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused_with_one_line(tmp_path, monkeypatch):
    Journal.create(tmp_path / "a", HEADER, RUN).close()

    def fail(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(writing.fcntl, "flock", fail)
    for begin in (lambda: Journal.create(tmp_path / "b", HEADER, RUN), lambda: Journal.open(tmp_path / "a")):
        with pytest.raises(LongdraftError) as caught:
            begin()
        check_one_line(caught.value, os.strerror(errno.ENOLCK))
    assert not list((tmp_path / "b").iterdir()), "nothing half-written"


def test_every_new_folder_is_synced_in_its_parent(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(writing, "sync_folder", synced.append)
    Journal.create(tmp_path / "a" / "b" / "c", HEADER, RUN).close()
    assert set(synced) == {tmp_path / "a" / "b" / "c", tmp_path / "a" / "b", tmp_path / "a", tmp_path}


def test_a_slow_step_is_synced_with_its_record(tmp_path, monkeypatch):
    """A step that is slower than the interval delays the sync of earlier records, but not its own."""
    now, synced = [100.0], []
    monkeypatch.setattr(writing.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(writing.os, "fsync", lambda file: synced.append(now[0]))
    with Journal.create(tmp_path, HEADER, RUN, 1.0) as journal:
        synced.clear()
        for when in (100.5, 160.0, 160.2, 161.1):
            now[0] = when
            journal.append([5], 0, 0.0)
        assert synced == [160.0, 161.1]
