"""The files of a batch job: a work folder belongs to one job, unrelated files are kept, disk errors end the job."""

from __future__ import annotations

import json
import os
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from queue import SimpleQueue

import pytest

from helpers.jobs import ROWS, put, records, stop_after
from helpers.processes import Fork, run_code
from longdraft.batch import local
from longdraft.batch.job_files import RecordFile
from longdraft.batch.local import in_process, worker_processes
from longdraft.batch.requests import BatchRequest, RowProgress, error_record, parse
from longdraft.batch.run import run
from longdraft.batch.worker import BatchJob, BatchWorker
from longdraft.errors import OutputError, UsageError
from longdraft.system import files
from longdraft.system.console import Interrupted

pytestmark = pytest.mark.full


def error_records_only(job: BatchJob, tasks: Iterator[BatchRequest], check) -> Iterator[RowProgress]:
    """An executor without an engine: every row becomes an error record."""
    for task in tasks:
        yield RowProgress(task.key, 0, 0, error_record(task, "invalid_request", task.problem))


@pytest.mark.parametrize("execute", [in_process, worker_processes(1)], ids=["alone", "processes"])
def test_an_unusable_work_folder_ends_the_job(job, execute):
    job.work_folder.mkdir()
    (job.work_folder / "attempts").write_text("")  # a file in place of a folder
    started = time.monotonic()

    def check() -> None:
        if time.monotonic() > started + 100:
            raise Interrupted

    with pytest.raises(OutputError, match=f"the work folder {job.work_folder} cannot be used: Not a directory"):
        list(execute(job, iter([parse(ROWS[0], 1, "tiny")]), check))


def test_a_file_system_without_hard_links_raises_a_clear_error(job, monkeypatch):
    def refuse(*paths):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OutputError, match="cannot be used: Operation not supported"):
        BatchWorker(job)
    assert not list(job.work_folder.iterdir())


def test_another_model_other_settings_or_another_job_are_refused(chatty, job, tmp_path):
    rows, output = put(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        run(rows, output, job, in_process, check=stop_after(60))
    with pytest.raises(UsageError, match="seed was 0, now 1"):
        run(rows, output, replace(job, seed=1), in_process)
    other = replace(job, load={**job.load, "dtype": "bfloat16"})
    with pytest.raises(UsageError, match="the output's texts have fingerprint fp_"):
        run(rows, output, other, in_process)
    put(output, [])
    with pytest.raises(UsageError, match="begun by another engine: dtype is bfloat16, expected float32"):
        run(rows, output, other, in_process)
    with RecordFile(output, job.work_folder), pytest.raises(UsageError, match="another job writes"):
        run(rows, output, job, in_process)
    with pytest.raises(UsageError, match="input and output are both"):
        run(rows, rows, job, in_process)
    novel, other = put(tmp_path / "novel.jsonl", [{"chapter": 1}]), replace(job, work_folder=tmp_path / "other")
    with pytest.raises(UsageError, match=r"line 1 of the output .* is no record"):
        run(rows, novel, other, in_process)
    assert records(tmp_path / "novel.jsonl") == [{"chapter": 1}]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_work_folder_belongs_to_one_job_and_keeps_unrelated_files(job, tmp_path, name):
    rows, output = put(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / name
    theirs = [tmp_path / path for path in ("notes.txt", "journals/monday.txt", "attempts/first.txt", "other.json")]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    here = replace(job, work_folder=tmp_path)
    with pytest.raises(Interrupted):
        run(rows, output, here, in_process, check=stop_after(10))
    begun = sorted(tmp_path.glob("journals/*/text.journal"))
    for other in ("second.jsonl", "second.parquet"):
        with pytest.raises(UsageError, match=f"belongs to the job of {output}, which is not done"):
            run(rows, tmp_path / other, here, in_process)
    assert begun and sorted(tmp_path.glob("journals/*/text.journal")) == begun and not list(tmp_path.glob("second*"))
    assert run(rows, output, here, in_process).resumed
    assert {path.read_text() for path in theirs} == {"mine"}
    assert {path for path in tmp_path.rglob("*") if path.is_file()} - set((tmp_path / "tiny").rglob("*")) == {
        *theirs, rows, output}


@pytest.mark.parametrize("content", ['{"hidden_size": 64}', '{"id": "x", "prompt": "It"}', "a novel", "[", '{"idea": '])
def test_an_unrelated_output_file_without_a_final_newline_is_kept(job, tmp_path, content):
    rows, output = put(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    output.write_text(content)
    with pytest.raises(UsageError, match=r"line 1 of the output .* is no record"):
        run(rows, output, job, in_process)
    assert output.read_text() == content


def test_an_output_with_only_an_incomplete_record_is_rewritten(job, tmp_path):
    rows, output = put(tmp_path / "in.jsonl", [{"id": "a"}]), tmp_path / "out.jsonl"
    run(rows, output, job, in_process)
    whole = output.read_bytes()
    for cut in range(len(whole)):
        output.write_bytes(whole[:cut])
        assert run(rows, output, job, error_records_only).done == 1
        assert output.read_bytes() == whole


@pytest.mark.parametrize("content", ["3", "{", '{"name": "a novel"}'])
def test_a_foreign_job_file_in_the_work_folder_is_refused(job, tmp_path, content):
    job.work_folder.mkdir()
    (job.work_folder / "job.json").write_text(content)
    with pytest.raises(UsageError, match="was not written by a batch job; give another folder with --work"):
        run(put(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl", job, in_process)
    assert (job.work_folder / "job.json").read_text() == content and not (tmp_path / "out.jsonl").exists()


def test_a_job_moved_with_its_work_folder_resumes(job, tmp_path):
    rows, before, after = put(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "before", tmp_path / "after"
    before.mkdir()
    with pytest.raises(Interrupted):
        run(rows, before / "out.jsonl", replace(job, work_folder=before / "work"), in_process, check=stop_after(10))
    before.rename(after)
    assert run(rows, after / "out.jsonl", replace(job, work_folder=after / "work"), in_process).resumed


def test_a_full_disk_ends_the_job_without_failing_a_row(job, tmp_path, monkeypatch):
    rows, output = put(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"

    def full(self, record):
        raise self._failure(OSError(28, "No space left on device"))

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "add", full)
        with pytest.raises(OutputError, match="No space left"):
            run(rows, output, job, in_process)
    totals = run(rows, output, job, in_process)
    assert totals.done == 2 and totals.resumed > 0 and len(records(output)) == 2


def test_sending_more_than_the_pipe_buffer_does_not_block():
    """Both processes may send more than the pipe's buffer holds; neither may block the other."""
    worker = object.__new__(local._WorkerProcess)
    worker._pipe, theirs = Pipe()
    worker.requests, worker._outbox = {}, SimpleQueue()
    sender = threading.Thread(target=worker._send, daemon=True)
    sender.start()
    tasks = [BatchRequest(str(number), prompt="x" * 10_000) for number in range(100)]  # five times the pipe's buffer
    for task in tasks:
        worker.send(task)
    assert [theirs.recv().key for _ in tasks] == [task.key for task in tasks] == list(worker.requests)
    worker._outbox.put(None)
    sender.join(10)
    assert not sender.is_alive()


def test_a_last_record_of_which_only_the_end_survived_is_written_again(job, tmp_path):
    """A power cut may lose any sector that was not synced, and keep later ones."""
    rows, out = put(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    run(rows, out, job, in_process)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:-1]) + bytes(20) + lines[-1][20:])
    run(rows, out, job, in_process)
    assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    out.write_bytes(lines[0] + bytes(20) + lines[1][20:] + lines[2])
    with pytest.raises(UsageError, match="line 2"):
        run(rows, out, job, in_process)


def test_a_record_file_that_is_replaced_while_it_is_opened_is_opened_again(job, tmp_path, monkeypatch):
    """Another job with --retry-errors replaces the file between our opening and our lock."""
    out, flock = tmp_path / "out.jsonl", files.fcntl.flock
    out.write_bytes(b"")

    def replacing(file, how):
        if not (tmp_path / "old").exists():
            os.rename(out, tmp_path / "old")
            out.write_bytes(b"")
        flock(file, how)

    monkeypatch.setattr(files.fcntl, "flock", replacing)
    with RecordFile(out, job.work_folder) as records:
        records.add({"id": "a", "text": "b"})
    assert b'"a"' in out.read_bytes() and (tmp_path / "old").read_bytes() == b""


def test_a_row_that_kills_the_process_ends_after_the_retries_of_several_runs(job, tmp_path):
    """... in the default batch, without worker processes, where the attempts are kept over restarts."""
    rows, out, job = put(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl", replace(job, retries=0)
    code = textwrap.dedent(f"""
        import os, sys
        from longdraft.engine import batching
        from longdraft.batch.local import in_process
        from longdraft.batch.run import run
        from longdraft.batch.worker import BatchJob
        from pathlib import Path
        step = batching.Batch.step
        def deadly(batch, only=None):
            if any(batch[text].params.max_new_tokens == {ROWS[1]["max_new_tokens"]} for text in batch):
                os._exit(9)
            return step(batch, only)
        batching.Batch.step = deadly
        run(Path({str(rows)!r}), Path({str(out)!r}), {job!r}, in_process)
        """).replace("PosixPath", "Path")
    statuses = [Fork(tmp_path / f"process-{number}", run_code, code).wait() for number in range(2)]
    assert statuses == [9, 0]
    found = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert found[ROWS[1]["id"]]["error"]["code"] == "worker_lost"
    assert all("text" in found[row["id"]] for row in ROWS if row is not ROWS[1])
