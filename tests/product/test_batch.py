"""Batch jobs: each row becomes one record. Workers and interruptions do not change the bytes of the output."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from itertools import islice
from threading import Timer

import pytest

import longdraft
from helpers.extents import extent
from helpers.jobs import ROWS, put, records, sorted_lines, stop_after, write_row, writers
from longdraft.__main__ import run as longdraft_command
from longdraft.batch import job_files
from longdraft.batch.local import in_process, worker_processes
from longdraft.batch.requests import parse, seed_of
from longdraft.batch.run import Totals, run
from longdraft.batch.worker import BatchWorker, num_written
from longdraft.engine import batching
from longdraft.errors import JournalError, UsageError
from longdraft.journal.format import FILE
from longdraft.system.console import Interrupted


def test_each_row_has_the_text_that_generate_writes(chatty, job, tmp_path):
    rows = put(tmp_path / "in.jsonl", [
        {"id": "a", "prompt": "It was", "max_new_tokens": 12, "seed": 5, "metadata": {"page": 3}},
        {"id": 7, "prompt": [40, 50, 60], "max_tokens": 12},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}], "chat_options": {"excited": True},
         "max_new_tokens": 12, "temperature": 0}])
    totals = run(rows, tmp_path / "out.jsonl", job, in_process)
    engine = longdraft.load(str(chatty), drafter="plain")
    found = {record["id"]: record for record in records(tmp_path / "out.jsonl")}
    for key, prompt, changes in (("a", "It was", {"seed": 5}), ("7", [40, 50, 60], {"seed": seed_of("7", 0)}),
                                 ("chat", "<user>Hi!", {"seed": seed_of("chat", 0), "temperature": 0.0})):
        *_, last = engine.generate(prompt, longdraft.SamplingParams(max_new_tokens=12, **changes))
        for name in ("sha256_tokens", "new_tokens", "prompt_tokens", "seed", "finish_reason"):
            assert found[key][name] == last.stats[name], (key, name)
    assert found["a"]["metadata"] == {"page": 3} and found["a"]["system_fingerprint"] == engine.fingerprint
    assert (totals.rows, totals.done, totals.failed, totals.left) == (3, 3, 0, 0)
    assert totals.new_tokens == sum(record["new_tokens"] for record in found.values())


def test_openai_requests_produce_openai_records(job, tmp_path):
    line = {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 9, "top_p": 0.9,
            "user": "me", "n": 1, "stream": False, "logit_bias": {}}
    rows = put(tmp_path / "in.jsonl", [
        {**line, "body": body},
        {"custom_id": "r2", "url": "/v1/completions",
         "body": {"prompt": "It", "max_tokens": 9, "logit_bias": {"70": 100}}}])
    run(rows, tmp_path / "out.jsonl", job, in_process)
    chat, plain = records(tmp_path / "out.jsonl")
    assert chat["custom_id"] == "r1" and chat["error"] is None and chat["response"]["status_code"] == 200
    answer = chat["response"]["body"]
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 9, "total_tokens": 17}
    assert answer["choices"][0]["finish_reason"] == "length" and isinstance(answer["created"], int)
    assert plain["response"]["body"]["object"] == "text_completion"
    assert len({*plain["response"]["body"]["choices"][0]["text"]}) == 1  # a bias of 100 forces this token


def test_a_job_interrupted_anywhere_writes_the_same_bytes(job, tmp_path):
    rows = put(tmp_path / "in.jsonl", [*ROWS, "{"])
    run(rows, tmp_path / "uncut.jsonl", job, in_process)
    expected = (tmp_path / "uncut.jsonl").read_bytes()
    output, runs, resumed = tmp_path / "out.jsonl", 0, 0
    while True:
        runs += 1
        seen: list[Totals] = []
        try:
            totals = run(rows, output, job, in_process, check=stop_after(35), on_progress=seen.append)
        except Interrupted:
            resumed += seen[-1].resumed if seen else 0
            with output.open("ab") as file:  # a power cut may leave an incomplete line
                file.write(b'{"id": "row 5", "te')
            continue
        break
    assert output.read_bytes() == expected and runs > 5 and resumed > 0
    assert totals.skipped + totals.done == 7 and not job.work_folder.exists()
    again = run(rows, output, job, in_process)
    assert (again.skipped, again.done) == (7, 0) and output.read_bytes() == expected
    put(rows, ROWS[:2])
    shorter = run(rows, output, job, in_process)
    assert shorter.last_line().startswith("0 of 2 rows written; 2 were done before"), "not the records of other rows"


def test_retry_errors_replaces_error_records(job, tmp_path):
    rows, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    put(rows, [ROWS[0], {**ROWS[1], "top_k": -2}, ROWS[2]])
    assert run(rows, output, job, in_process).failed == 1
    put(rows, ROWS[:3])
    assert run(rows, output, job, in_process).done == 0
    totals = run(rows, output, job, in_process, retry_errors=True)
    assert (totals.skipped, totals.done, totals.failed) == (2, 1, 0)
    run(rows, tmp_path / "uncut.jsonl", job, in_process)
    assert sorted_lines(output) == sorted_lines(tmp_path / "uncut.jsonl")


@pytest.mark.full
def test_worker_processes_write_the_same_records_after_one_is_killed(job, tmp_path):
    rows = put(tmp_path / "in.jsonl", [{**row, "max_new_tokens": 600} for row in ROWS])
    run(rows, tmp_path / "alone.jsonl", job, in_process)
    killed: list[int] = []

    def kill_once(totals: Totals) -> None:
        if not killed and any(totals.running.values()):
            killed.extend(writers(job.work_folder)[:1])
            for process in killed:
                os.kill(process, signal.SIGKILL)

    totals = run(rows, tmp_path / "out.jsonl", job, worker_processes(2), on_progress=kill_once)
    assert killed and (totals.done, totals.failed) == (6, 0)
    assert sorted_lines(tmp_path / "out.jsonl") == sorted_lines(tmp_path / "alone.jsonl")


@pytest.mark.parametrize("batch_size, workers", extent([(3, 0), (8, 0), (2, 2)], [(3, 0)]))
def test_texts_written_in_a_batch_equal_texts_written_alone(job, tmp_path, batch_size, workers):
    """workers: processes; 0: the one of the test"""
    rows = put(tmp_path / "in.jsonl", [*ROWS, "{", {**ROWS[0], "id": "far", "prompt": [10**6]}])
    run(rows, tmp_path / "one.jsonl", job, in_process)
    execute, output = worker_processes(workers) if workers else in_process, tmp_path / "together.jsonl"
    with suppress(Interrupted):
        run(rows, output, replace(job, batch_size=batch_size), execute, check=stop_after(25))
    run(rows, output, replace(job, batch_size=batch_size), execute)
    assert sorted_lines(output) == sorted_lines(tmp_path / "one.jsonl")


def test_a_row_that_repeatedly_ends_its_worker_becomes_an_error_record(job, tmp_path):
    writer, task = BatchWorker(job), parse({**ROWS[0]}, 1, "tiny")
    for _ in range(3):  # each attempt ends before its first token, as if the process was killed
        next(write_row(writer, task))
        job.journal(task.key).joinpath(FILE).unlink()
    (report,) = write_row(writer, task)
    assert report.record["error"]["code"] == "worker_lost"
    other = parse({**ROWS[1]}, 2, "tiny")
    for _ in range(8):  # each attempt writes more tokens than the one before
        assert len(list(islice(write_row(writer, other), 2))) == 2
    assert list(write_row(writer, other))[-1].record["text"]


@pytest.mark.parametrize("place", ["while it is checked", "while it is written"])
def test_a_row_that_ends_its_worker_does_not_fail_the_rest_of_the_batch(job, place):
    """Other rows of the batch are not counted as the cause when their worker ends."""
    class Died(BaseException):
        pass

    killer, *others = tasks = [parse({**row, "prompt": f"{i} was"}, i, "tiny") for i, row in enumerate(ROWS)]
    writer, deaths, found = BatchWorker(replace(job, batch_size=4)), 0, {}
    step, ids, check = batching.Batch.step, writer._engine.encode(killer.prompt), BatchWorker._checked

    def deadly(batch, only=None):
        if any(batch[text].prompt == ids for text in batch):
            raise Died
        return step(batch, only)

    def deadly_check(worker, request):
        if request.key == killer.key:
            raise Died
        return check(worker, request)

    with pytest.MonkeyPatch.context() as patch:
        if place == "while it is written":
            patch.setattr(batching.Batch, "step", deadly)
        else:
            patch.setattr(BatchWorker, "_checked", deadly_check)
        while len(found) < len(tasks):
            left = iter([task for task in tasks if task.key not in found])
            try:
                for report in filter(None, writer.write(lambda is_idle, left=left: next(left, None))):
                    if report.record:
                        found[report.key] = report.record
            except Died:
                deaths += 1
                assert deaths <= job.retries + 1
    assert found.pop(killer.key)["error"]["code"] == "worker_lost" and deaths == job.retries + 1
    assert all("text" in found[task.key] for task in others)


def test_signals_are_checked_during_the_prefill_of_a_long_prompt(job, tmp_path):
    rows = put(tmp_path / "in.jsonl", [{"id": "long", "prompt": [60] * 1500, "max_new_tokens": 2}])
    task = parse(next(job_files.read_rows(rows))[1], 1, "tiny")
    given = iter([task])
    with BatchWorker(job) as writer:
        told = list(writer.write(lambda is_idle: next(given, None)))
    assert told[:2] == [None, None] and told[-2].record
    seen: list[Totals] = []
    with pytest.raises(Interrupted):
        run(rows, tmp_path / "out.jsonl", job, in_process, check=stop_after(1), on_progress=seen.append)
    assert len(seen) == 1 and not seen[0].running


def test_only_a_damaged_journal_is_discarded(job, tmp_path):
    rows, output = put(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        run(rows, output, job, in_process, check=stop_after(12))
    journal = job.journal("row 0") / FILE
    before = num_written(journal.parent)
    kept = journal.rename(tmp_path / "kept")
    journal.symlink_to(journal)  # a link to itself cannot be read, as on a failing disk
    with pytest.raises(JournalError, match="cannot be read: Too many levels of symbolic links"):
        run(rows, output, job, in_process)
    assert journal.is_symlink()
    journal.unlink()
    kept.rename(journal)
    with journal.open("rb") as file:  # another process holds a shared lock
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = Timer(0.5, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        totals: list[Totals] = []
        with pytest.raises(Interrupted):
            run(rows, output, job, in_process, check=stop_after(3), on_progress=totals.append)
        timer.join()
    assert totals[-1].resumed == before > 0
    with journal.open("r+b") as file:
        file.write(b"damaged!")
    assert run(rows, output, job, in_process).resumed == 0


def test_a_changed_row_starts_from_the_beginning(job, tmp_path):
    rows, output = put(tmp_path / "in.jsonl", ROWS[:1]), tmp_path / "out.jsonl"
    with pytest.raises(Interrupted):
        run(rows, output, job, in_process, check=stop_after(5))
    put(rows, [{**ROWS[0], "prompt": "Another"}])
    run(rows, output, job, in_process)
    run(rows, tmp_path / "uncut.jsonl", job, in_process)
    assert output.read_bytes() == (tmp_path / "uncut.jsonl").read_bytes()


@pytest.mark.full
def test_parquet_input_and_output(job, tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [*ROWS[:2], {"custom_id": "o", "url": "/v1/completions", "body": json.dumps({"prompt": "It",
                                                                                        "max_tokens": 8})},
            {"id": "bad", "prompt": "x", "top_k": -2}]
    columns = ("id", "prompt", "max_new_tokens", "ignore_eos", "custom_id", "url", "body", "top_k")
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    parquet.write_table(table, tmp_path / "in.parquet")
    run(put(tmp_path / "in.jsonl", [*rows[:2], {**rows[2], "body": json.loads(rows[2]["body"])}, rows[3]]),
        tmp_path / "out.jsonl", job, in_process)
    output = tmp_path / "out.parquet"
    with pytest.raises(Interrupted):
        run(tmp_path / "in.parquet", output, job, in_process, check=stop_after(30))
    assert not output.exists()
    run(tmp_path / "in.parquet", output, job, in_process)
    found, plain = parquet.read_table(output).to_pylist(), records(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == ["row 0", "row 1", "o", "bad"]
    assert found[0]["text"] == plain[0]["text"] and found[0]["seed"] == plain[0]["seed"]
    assert json.loads(found[2]["response"]) == plain[2]["response"] and found[2]["new_tokens"] == 8
    assert found[3]["error_code"] == "invalid_request" and found[3]["text"] is None
    with pytest.raises(UsageError, match="exists and is complete"):
        run(tmp_path / "in.parquet", output, job, in_process)
    with pytest.raises(UsageError, match="as Parquet"):
        run(put(tmp_path / "broken.parquet", ["no"]), tmp_path / "other.jsonl", job, in_process)


@pytest.mark.full
def test_parquet_metadata_without_a_json_type_becomes_text(job, tmp_path):
    import pyarrow
    from pyarrow import parquet

    cells = {"at": datetime(2026, 1, 2, 3), "cost": Decimal("1.50"), "raw": b"\xff1", "none": float("nan"), "page": 3}
    metadata = {"at": "2026-01-02 03:00:00", "cost": "1.50", "raw": "\\xff1", "none": "nan", "page": 3}
    rows = [{**ROWS[0], "metadata": cells}, {"id": "bad", "prompt": "", "metadata": cells}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert run(tmp_path / "in.parquet", tmp_path / "out.jsonl", job, in_process).failed == 1
    found = {record["id"]: record for record in records(tmp_path / "out.jsonl")}
    assert found["row 0"]["metadata"] == found["bad"]["metadata"] == metadata
    assert run(tmp_path / "in.parquet", tmp_path / "out.parquet", job, in_process).failed == 1
    assert json.loads(parquet.read_table(tmp_path / "out.parquet").to_pylist()[0]["metadata"]) == metadata


def test_several_workers_on_one_gpu_are_refused(tmp_path, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = put(tmp_path / "in.jsonl", ROWS[:1])
    for device in ("auto", "cuda"):
        assert longdraft_command(["batch", str(rows), str(tmp_path / "out"), "--workers", "2", "--device", device]) == 2
        assert "--workers would share one GPU" in capsys.readouterr().err
