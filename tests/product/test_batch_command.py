"""The command `longdraft batch`: SIGKILL, usage errors, and the estimate of the remaining time."""

from __future__ import annotations

import json
import signal
import time

import pytest

from helpers.jobs import ROWS, put, records, sorted_lines
from helpers.processes import Fork, run_longdraft
from longdraft.__main__ import run as longdraft_command
from longdraft.batch.requests import RowProgress
from longdraft.batch.run import Totals

pytestmark = pytest.mark.full


def test_the_command_resumes_after_sigkill_and_counts_rows(chatty, tmp_path, capsys):
    rows = put(tmp_path / "in.jsonl", [{**row, "max_new_tokens": 400} for row in ROWS[:3]] + ["{"])
    settings = ["--model", str(chatty), "--drafter", "suffix", "--on-loop", "off", "--threads", "1"]
    uncut = tmp_path / "uncut.jsonl"
    assert longdraft_command(["batch", str(rows), str(uncut), *settings, "--stats", str(tmp_path / "s.json")]) == 1
    assert "4 of 4 rows written; 1 is an error" in capsys.readouterr().err
    assert json.loads((tmp_path / "s.json").read_text())["new_tokens"] == sum(
        record.get("new_tokens", 0) for record in records(uncut))
    output = tmp_path / "out.jsonl"
    for number in (signal.SIGKILL, signal.SIGINT):
        child = Fork(tmp_path / "child", run_longdraft, "batch", rows, output, *settings)
        before = sum(path.stat().st_size for path in tmp_path.glob("out.jsonl.work/journals/*/text.journal"))
        while child.is_running() and sum(path.stat().st_size for path in tmp_path.glob(
                "out.jsonl.work/journals/*/text.journal")) <= before + 4000:
            time.sleep(0.005)
        child.kill(number)
        assert child.wait() in (-signal.SIGKILL, 130), child.stderr
    assert "interrupted" in child.stderr and "the same command continues the job" in child.stderr
    assert longdraft_command(["batch", str(rows), str(output), *settings]) == 1
    assert sorted_lines(output) == sorted_lines(uncut)


@pytest.mark.parametrize("arguments, complaint", [
    ([], "Missing argument 'IN'"), (["in.jsonl", "--ray"], "Missing argument 'OUT'"),
    (["none.jsonl", "out.jsonl"], "cannot read the input none.jsonl"),
    (["in.jsonl", "in.jsonl/out.jsonl"], "cannot write the output"),
    (["in.jsonl", "out.jsonl", "--workers", "0"], "--workers is 0; allowed: 1 to 4096"),
    (["in.jsonl", "out.jsonl", "--top-p", "7"], "top_p is 7.0"),
    (["in.jsonl", "out.jsonl", "--model", "nobody"], "no model 'nobody'"),
    (["in.jsonl", "out.jsonl", "--model", "nobody", "--workers", "2"], "no model 'nobody'"),
])
def test_a_usage_error_prints_one_line_and_exits_with_status_2(tmp_path, monkeypatch, capsys, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "in.jsonl", ROWS[:2])
    assert longdraft_command(["batch", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1


def test_remaining_time_is_estimated_from_finished_texts():
    totals = Totals(rows=4, skipped=1, began=time.monotonic() - 10)
    totals.add(RowProgress("a", 50))
    assert totals.seconds_left is None
    totals.add(RowProgress("a", 100, 0, {"id": "a", "text": ""}))
    totals.add(RowProgress("b", 520, 500))
    assert totals.left == 2 and totals.new_tokens == 120
    totals.add(RowProgress("b", 570, 550))  # another worker resumed tokens of this run
    assert totals.new_tokens == 170 and totals.seconds_left == 0
    assert "2 of 4 rows" in totals.live_line() and "1 of 4 rows written; 1 was done before" in totals.last_line()
