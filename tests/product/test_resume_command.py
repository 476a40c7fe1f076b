"""`longdraft resume` and `inspect`: signals, a full disk, exhausted memory, SIGKILL and usage errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from helpers.extents import extent
from helpers.processes import Fork, run_code, run_longdraft
from longdraft.__main__ import run
from longdraft.journal.format import FILE, read_journal

ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 800
WRITE = ["generate", "It was", "--max-new-tokens", str(NUM_TOKENS), "--seed", "1", "--min-p", "0.1", "--on-loop", "off",
         "--threads", "1"]


@pytest.fixture(scope="module")
def uncut(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("uncut")
    assert run([*WRITE, "--output", str(folder / "text"), "--tokens-out", str(folder / "ids.npy")]) == 0
    return {"text": (folder / "text").read_text(), "ids": np.load(folder / "ids.npy").tolist()}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


@pytest.mark.full
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_prints_the_resume_command_and_the_resumed_text_is_unchanged(uncut, tmp_path, number, status):
    journal, output = tmp_path / "a journal", tmp_path / "text"
    work = Fork(tmp_path / "work", run_longdraft, *WRITE, "--journal", journal, "--output", output)
    wait_for(lambda: (journal / FILE).exists() and (journal / FILE).stat().st_size > 2500)
    work.kill(number)
    assert work.wait() == status
    err = work.stderr
    assert err.count("\n") == 1 and f"resume it with: longdraft resume '{journal}'" in err
    assert not output.exists() and (tmp_path / "text.partial").stat().st_size > 0  # the partial text has another name
    assert uncut["text"].startswith((tmp_path / "text.partial").read_text())
    assert run(["resume", str(journal), "--output", str(output), "--tokens-out", str(tmp_path / "ids.npy"),
                "--stats", str(tmp_path / "stats.json"), "--drafter", "suffix", "--threads", "1"]) == 0
    assert output.read_text() == uncut["text"] and np.load(tmp_path / "ids.npy").tolist() == uncut["ids"]
    assert json.loads((tmp_path / "stats.json").read_text())["resumed_tokens"] > 0
    assert not (tmp_path / "text.partial").exists()


def test_a_second_signal_ends_the_command_immediately(tmp_path):
    """During a step that does not end, the first signal waits for the step and the second one does not."""
    code = ("import sys, time, longdraft.speculation.step as s\n"
            "s.Step.run = lambda *a: (print('stuck', file=sys.stderr, flush=True), time.sleep(60))\n"
            "from longdraft.__main__ import main; sys.argv[0] = 'longdraft'; main()")
    work = Fork(tmp_path / "work", run_code, code, *WRITE, "--journal", tmp_path / "j")
    wait_for(lambda: work.stderr == "stuck\n")
    work.kill(signal.SIGTERM)
    time.sleep(0.2)
    assert work.is_running()
    work.kill(signal.SIGTERM)
    assert work.wait(timeout_s=10) == 143
    assert work.stderr.count("\n") == 2 and "terminated; resume it with: longdraft resume" in work.stderr


@pytest.mark.full
def test_a_closed_stdout_pipe_leaves_a_journal_that_resumes(uncut, tmp_path):
    work = subprocess.Popen([sys.executable, "-m", "longdraft", *WRITE, "--journal", str(tmp_path / "j")],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    work.stdout.read(20)
    work.stdout.close()
    err = work.stderr.read().decode()
    assert work.wait(timeout=60) == 1
    assert "Traceback" not in err and err.count("\n") == 1 and "resume it with: longdraft resume" in err
    done = Fork(tmp_path / "work", run_longdraft, "resume", tmp_path / "j", "--threads", 1)
    assert done.wait() == 0 and done.stdout == uncut["text"] and done.stderr == ""


def test_a_full_disk_prints_one_line_and_leaves_a_journal_that_resumes(uncut, tmp_path):
    """A limit on the file size acts like a disk that fills up: writes are short, then fail."""
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\n"
            "from longdraft.__main__ import main; sys.argv[0] = 'longdraft'; main()")
    work = Fork(tmp_path / "work", run_code, code, *WRITE, "--journal", tmp_path / "j", "--drafter", "plain")
    assert work.wait() == 1
    assert work.stderr.count("\n") == 1 and "File too large; resume it with: longdraft resume" in work.stderr
    found = read_journal(tmp_path / "j")
    assert found.tokens.tolist() == uncut["ids"][: len(found.tokens)] and len(found.tokens) > 100
    assert uncut["text"].startswith(work.stdout.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert run(["resume", str(tmp_path / "j"), "--output", str(tmp_path / "t"), "--threads", "1"]) == 0
    assert (tmp_path / "t").read_text() == uncut["text"]


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell its memory so")
def test_running_out_of_memory_raises_memory_error_and_leaves_a_journal_that_resumes(uncut, tmp_path):
    """The address space is limited while the text grows, so that any allocation may fail first."""
    code = ("import sys, resource, longdraft\nfrom pathlib import Path\n"
            "engine = longdraft.load('novelist', drafter='suffix', threads=1)\n"
            "params = longdraft.SamplingParams(max_new_tokens=800, seed=1, min_p=0.1, on_loop='off')\n"
            "next(engine.generate('It was', params))\n"
            "size = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size + (3 << 20), -1))\n"
            "try:\n    [0 for event in engine.generate('It was', params, journal=sys.argv[1])]\n"
            "except MemoryError:\n    sys.exit(42)")
    assert Fork(tmp_path / "work", run_code, code, tmp_path / "j").wait() == 42
    assert 100 < len(read_journal(tmp_path / "j").tokens) < NUM_TOKENS
    assert run(["resume", str(tmp_path / "j"), "--output", str(tmp_path / "t"), "--threads", "1"]) == 0
    assert (tmp_path / "t").read_text() == uncut["text"]


def test_the_text_is_unchanged_after_sigkill_at_random_moments(tmp_path):
    """A short run of `longdraft bench soak kills`."""
    code = "import sys; from longdraft.__main__ import run; sys.exit(run(['bench', 'soak', *sys.argv[1:]]))"
    work = Fork(tmp_path / "work", run_code, code, "kills", "--count", 12, "--tokens", 250)
    assert work.wait() == 0, work.stderr
    figures = json.loads(work.stdout.splitlines()[-1])
    assert figures["kills"] == 12 and figures["equal"] == figures["texts"] >= 1


MISTAKES = {
    "journal there": (["generate", "a", "--journal", "{done}"], "resume it with: longdraft resume"),
    "journal of a file": (["generate", "a", "--journal", "{file}/x", "--max-new-tokens", "1"], "Not a directory"),
    "journal of a bad name": (["generate", "a", "--journal", "x" * 300, "--max-new-tokens", "1"], "too long"),
    "fsync": (["generate", "a", "--journal", "{new}", "--fsync", "often"], "allowed: always, never, or seconds"),
    "on-loop": (["generate", "a", "--on-loop", "x"], "allowed: warn, stop, answer or off"),
    "resume nothing": (["resume", "{new}"], "no journal in"),
    "resume a file": (["resume", "{file}"], "no journal in"),
    "resume without": (["resume"], "Missing argument 'JOURNAL'"),
    "inspect nothing": (["inspect", "{new}"], "no journal in"),
    "resume fsync": (["resume", "{done}", "--fsync", "0"], "allowed: always"),
    "resume drafter": (["resume", "{done}", "--drafter", "x"], "unknown drafter 'x'"),
    "inspect other tokenizer": (["inspect", "{done}", "--text", "-", "--model", "{model}"],
                                "differs from the journal's"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    journal = tmp_path_factory.mktemp("finished") / "j"
    assert run(["generate", "It was", "--max-new-tokens", "40", "--seed", "1", "--journal", str(journal),
                "--output", "/dev/null"]) == 0
    return journal


@pytest.mark.parametrize("mistake", extent(MISTAKES, [*MISTAKES][::3]))
def test_a_usage_error_prints_one_line_and_exits_with_status_2(mistake, finished, tiny, capfd, tmp_path):
    (tmp_path / "file").write_text("")
    arguments, message = MISTAKES[mistake]
    places = {"done": finished, "file": tmp_path / "file", "new": tmp_path / "new", "model": tiny["gqa"]}
    assert run([part.format(**places) for part in arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith("longdraft: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_resuming_a_finished_journal_prints_its_text_and_a_notice(finished, capfd, tmp_path):
    assert run(["generate", "It was", "--max-new-tokens", "40", "--seed", "1"]) == 0
    text = capfd.readouterr().out
    assert run(["resume", str(finished)]) == 0
    shown = capfd.readouterr()
    assert shown.out == text and "the text is complete (40 tokens, finish reason length)" in shown.err


def test_inspect_prints_and_exports_a_journal(finished, capfd, tmp_path):
    assert run(["inspect", str(finished)]) == 0
    shown = capfd.readouterr().out
    for part in ("finished (length)", "40 of 40", "seed 1", "novelist", "tokens/s", "bit-exact", "0-5"):
        assert part in shown
    assert run(["inspect", str(finished), "--json", "--text", str(tmp_path / "t"), "--tokens-out",
                str(tmp_path / "ids.npy")]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["state"] == "finished" and report["new_tokens"] == 40 and report["torn_bytes"] == 0
    assert sum(part["steps"] for part in report["over_length"]) == report["steps"]
    assert report["header"]["sampling"]["seed"] == 1
    assert np.load(tmp_path / "ids.npy").tolist() == read_journal(finished).tokens.tolist()
    assert run(["inspect", str(finished), "--text", "-", "--json"]) == 2
    assert "--json and --text - both write to stdout" in capfd.readouterr().err
    assert run(["inspect", str(finished), "--text", "-"]) == 0
    assert capfd.readouterr().out == (tmp_path / "t").read_text() != ""
