"""The command line: where each command writes its output, and one clear line for each usage error."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.processes import Fork, run_longdraft, wait_for
from helpers.terminal import on_terminal
from longdraft.__main__ import run
from longdraft.checkpoint.hub import BUNDLED_DIR
from longdraft.engine.run_statistics import sha256_tokens
from longdraft.system.files import OutputFile

LONGDRAFT = [sys.executable, "-m", "longdraft"]
QUICK = ["generate", "It was", "--max-new-tokens", "30", "--seed", "1", "--min-p", "0.1"]


def test_only_the_text_goes_to_stdout_and_stderr_is_empty(capfd):
    assert run(QUICK) == 0
    captured = capfd.readouterr()
    assert len(captured.out) > 40 and "\x1b" not in captured.out
    assert captured.err == ""


def test_a_hyphen_as_output_is_stdout_and_refused_for_all_but_texts(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([*QUICK, "--output", "-", "--journal", "work"]) == 0
    text = capfd.readouterr().out
    assert run(["resume", "work", "--output", "-"]) == 0
    assert len(text) > 40 and capfd.readouterr().out == text
    (tmp_path / "in.jsonl").write_text('{"prompt": "It was"}')
    for command in ([*QUICK, "--stats", "-"], [*QUICK, "--tokens-out", "-"], ["batch", "in.jsonl", "-"]):
        assert run(command) == 2
        assert "is '-'; allowed: the name of a file" in capfd.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "work"]


def test_a_report_is_not_written_to_stdout(capfd, tmp_path, monkeypatch):
    for package in ("matplotlib", "pandas", "tabulate"):
        pytest.importorskip(package, reason="the extra `bench` is not installed")
    monkeypatch.chdir(tmp_path)
    assert run([*QUICK, "--report", "-"]) == 2
    assert "is '-'; allowed: the name of a file" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_drafter_writes_the_same_bytes(capfd, tmp_path):
    texts, hashes = set(), set()
    for drafter in ("plain", "ngram", "auto"):
        assert run([*QUICK, "--drafter", drafter, "--stats", str(tmp_path / "s.json")]) == 0
        texts.add(capfd.readouterr().out)
        hashes.add(json.loads((tmp_path / "s.json").read_text())["sha256_tokens"])
    assert len(texts) == len(hashes) == 1


def test_output_files_hold_the_generated_text_and_tokens(capfd, tmp_path):
    output, tokens, stats = tmp_path / "text.txt", tmp_path / "ids.npy", tmp_path / "stats.json"
    assert run([*QUICK, "--output", str(output), "--tokens-out", str(tokens), "--stats", str(stats)]) == 0
    assert capfd.readouterr().out == ""
    assert run(QUICK) == 0
    assert output.read_text() == capfd.readouterr().out
    ids = np.load(tokens)
    assert ids.dtype == np.int32 and len(ids) == 30
    assert json.loads(stats.read_text())["sha256_tokens"] == sha256_tokens(ids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.npy", "stats.json", "text.txt"]


def test_a_prompt_is_read_from_a_file_or_stdin(capfd, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text("It was")
    assert run(QUICK) == 0
    expected = capfd.readouterr().out
    options = QUICK[2:]
    assert run(["generate", "--prompt-file", str(tmp_path / "prompt.txt"), *options]) == 0
    assert capfd.readouterr().out == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"It was")))
    assert run(["generate", "--prompt-file", "-", *options]) == 0
    assert capfd.readouterr().out == expected


def test_prefill_takes_the_first_tokens_of_the_prompt(capfd, tmp_path):
    stats = tmp_path / "s.json"
    assert run(["generate", "It was a dark and stormy night", "--prefill", "3", "--max-new-tokens", "2",
                "--stats", str(stats)]) == 0
    assert json.loads(stats.read_text())["prompt_tokens"] == 3


WITHOUT_DRAFT = str(BUNDLED_DIR / "novelist" / "draft")  # a folder with a model but without a draft model
MISTAKES = {
    "no prompt": (["generate"], "no prompt; give it as an argument or with --prompt-file"),
    "empty prompt": (["generate", ""], "the prompt is empty"),
    "two prompts": (["generate", "a", "--prompt-file", "b"], "both given"),
    "missing prompt file": (["generate", "--prompt-file", "/no/such/file"], "cannot read /no/such/file"),
    "unknown command": (["write"], "No such command 'write'"),
    "unknown option": (["generate", "a", "--fast"], "No such option: --fast"),
    "not a number": (["generate", "a", "--seed", "x"], "'--seed'"),
    "out of range": (["generate", "a", "--top-p", "2"], "top_p is 2.0; allowed: above 0, at most 1"),
    "contradiction": (["generate", "a", "--min-new-tokens", "9", "--max-new-tokens", "8"], "at most max_new_tokens"),
    "too long": (["generate", "a", "--max-new-tokens", "200000"], "the model's context limit"),
    "prefill": (["generate", "a", "--prefill", "9"], "--prefill is 9; allowed: 1 to 1"),
    "a model's name as no file has": (["generate", "a", "--model", "x" * 300], "no model 'xxx"),
    "bodies of no size": (["serve", "--max-body-mib", "nan"], "--max-body-mib is nan; allowed: above 0"),
    "pages of everywhere": (["serve", "--cors-origin", "*"], "an origin such as https://example.org"),
    "unknown model": (["generate", "a", "--model", "no-such"], "no model 'no-such'"),
    "no folder here": (["generate", "a", "--model", "./no-such"], "no model './no-such' exists"),
    "no file above": (["generate", "a", "--model", "../no-such.gguf"], "no model '../no-such.gguf' exists"),
    "unknown drafter": (["generate", "a", "--drafter", "no-such"], "known: auto, plain, ngram, suffix, tokenswift"),
    "unknown drafter option": (["generate", "a", "--drafter", "ngram", "--drafter-option", "x=1"],
                               "known: continuations"),
    "drafter option shape": (["generate", "a", "--drafter-option", "x"], "allowed: KEY=VALUE"),
    "drafter option twice": (["generate", "a", "--drafter-option", "x=1", "--drafter-option", "x=2"], "given twice"),
    "no draft model": (["generate", "a", "--model", WITHOUT_DRAFT, "--drafter", "draft-model"],
                       "give --drafter-option model=NAME"),
    "tree too deep": (["generate", "a", "--drafter", "medusa", "--drafter-option", "tree=1,1,1,1"], "at most 3, the"),
    "no chat template": (["generate", "a", "--chat"], "no chat template"),
    "unwritable output": (["generate", "a", "--output", "/no/such/folder/x"], "--output cannot write"),
    "output with a name too long": (["generate", "a", "--output", "x" * 300], "--output cannot write"),
    "prompt that is no text": (["generate", "a\udcff"], "is not UTF-8 text"),
    "temperature too small": (["generate", "a", "--temperature", "1e-9"], "0, or 0.001 and more"),
    "output is a folder": (["generate", "a", "--stats", "/tmp"], "is a folder"),
    "journal without a name": (["generate", "a", "--journal", ""], "the folder's path is ''; allowed: a path such as"),
    "work without a name": (["batch", "a", "b", "--work="], "'.' is the current folder"),
    "fsync of no journal": (["generate", "a", "--fsync", "5"], "give --journal with them"),
    "snapshot of no journal": (["generate", "a", "--snapshot", "always"], "give --journal with them"),
    "doctor of no model": (["doctor", "--offline"], "give --model with them"),
    "missing heads": (["generate", "a", "--drafter", "tokenswift", "--heads", "/no/heads"], "no model '/no/heads'"),
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usage_error_prints_one_line_and_exits_with_status_2(mistake, capfd):
    arguments, message = MISTAKES[mistake]
    assert run(arguments) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("longdraft: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_two_options_that_name_the_same_file_are_refused(capfd, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for other in ("x", "link"):
        assert run([*QUICK, "--output", str(tmp_path / "x"), "--stats", str(tmp_path / other)]) == 2
        assert "--output and --stats both name" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_writing_to_a_symbolic_link_replaces_its_target(capfd, tmp_path):
    (tmp_path / "real").write_text("before")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run([*QUICK, "--output", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() != "before"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600


needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


@needs_dev_full
def test_a_full_disk_prints_one_line(capfd):
    assert run([*QUICK, "--output", "/dev/full"]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "No space left" in captured.err and captured.err.count("\n") == 1


@pytest.mark.full
@needs_dev_full
@pytest.mark.parametrize("command", [QUICK, ["models"], ["models", "--json"], ["doctor"]], ids=" ".join)
def test_a_full_disk_at_stdout_prints_one_line(command):
    """Runs in a subprocess, because Python flushes the rest of stdout when it exits."""
    with open("/dev/full", "w") as full:
        work = subprocess.run([*LONGDRAFT, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert work.returncode == 1
    assert "No space left" in work.stderr and work.stderr.count("\n") == 1


@pytest.mark.full
def test_a_closed_stdout_does_not_stop_a_text_for_a_file(tmp_path):
    command = [*LONGDRAFT, *QUICK, "--output", str(tmp_path / "text.txt")]
    work = subprocess.run(["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True,
                          check=False)
    assert work.returncode == 0 and work.stderr == "" and (tmp_path / "text.txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize("command", [QUICK, ["models"], ["--help"]], ids=" ".join)
def test_a_closed_stdout_is_one_line_where_it_would_have_the_output(command):
    work = subprocess.run(["/bin/sh", "-c", 'exec "$@" >&-', "sh", *LONGDRAFT, *command], stderr=subprocess.PIPE,
                          text=True, check=False)
    assert work.returncode == 1 and work.stderr == "longdraft: cannot write to stdout: it is closed\n"


@pytest.mark.full
@pytest.mark.parametrize("module", ["typer", "longdraft.cli", "torch"])
def test_sigterm_while_modules_are_imported_exits_with_143(tmp_path, module):
    """The signal arrives in the import of this module."""
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Finder())
""")
    work = subprocess.run([*LONGDRAFT, *QUICK], env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False,
                          capture_output=True, text=True)
    assert work.returncode == 143 and "Traceback" not in work.stderr and work.stdout == ""


def test_a_library_that_cannot_be_loaded_is_one_line(tmp_path):
    """As without memory for it, or with a part of it missing."""
    (tmp_path / f"torch{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    work = subprocess.run([*LONGDRAFT, *QUICK], env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=False,
                          capture_output=True, text=True)
    assert work.returncode == 1 and work.stdout == ""
    assert work.stderr.startswith("longdraft: torch cannot be loaded: ") and work.stderr.count("\n") == 1


def test_characters_outside_the_terminals_encoding_are_replaced(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii", write_through=True))
    prompt = "\N{SNOWMAN}" * 30
    assert run(["generate", prompt, "--max-new-tokens", "40", "--temperature", "0"]) == 0
    assert shown.getvalue()


@pytest.mark.parametrize("command", ["generate", "chat", "batch", "book", "resume", "train heads", "train lm"])
def test_the_help_has_the_whole_names_of_options_in_a_terminal_of_80_columns(command, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command.split(), "--help"]) == 0
    assert re.findall(r"--\S*…", capfd.readouterr().out) == []


def test_no_arguments_print_only_the_help(capfd):
    assert run([]) == 2
    captured = capfd.readouterr()
    assert "Usage" in captured.out + captured.err and "longdraft: " not in captured.err


def test_a_usage_error_leaves_no_files_behind(capfd, tmp_path):
    assert run([*QUICK, "--model", "no-such", "--output", str(tmp_path / "x"), "--stats", str(tmp_path / "y")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_process_writes_is_left_alone(tmp_path, capfd):
    """A second process must not truncate the file of a process that is still writing."""
    output = tmp_path / "text.txt"
    first = OutputFile(output, "--output")
    first.write(b"the beginning, ")
    assert run([*QUICK, "--output", str(output)]) == 2
    assert "another process is writing it" in capfd.readouterr().err
    first.write(b"the end")
    first.finish()
    assert output.read_bytes() == b"the beginning, the end"
    assert run([*QUICK, "--output", str(output)]) == 0, "now it may be replaced"
    assert output.read_bytes() != b"the beginning, the end" and list(tmp_path.iterdir()) == [output]


def test_a_prompt_file_that_is_not_utf8_is_refused(capfd, tmp_path):
    (tmp_path / "prompt").write_bytes(b"abc\xff")
    assert run(["generate", "--prompt-file", str(tmp_path / "prompt")]) == 2
    assert "not UTF-8 text (byte 3)" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_output_files_are_complete_after_a_signal(tmp_path, number, status):
    output, stats, tokens = tmp_path / "text.txt", tmp_path / "stats.json", tmp_path / "ids.npy"
    work = Fork(tmp_path / "process", run_longdraft, "generate", "It was", "--max-new-tokens", 100000, "--seed", 1,
                "--output", output, "--stats", stats, "--tokens-out", tokens)
    partial = tmp_path / "text.txt.partial"
    wait_for(lambda: partial.exists() and partial.stat().st_size >= 50, 60)
    work.kill(number)
    assert work.wait(60) == status
    assert "interrupted after" in work.stderr and "Traceback" not in work.stderr
    report = json.loads(stats.read_text())
    ids = np.load(tokens)
    assert report["finish_reason"] == "cancelled"
    assert report["new_tokens"] == len(ids) > 0
    from longdraft.checkpoint import hub
    from longdraft.text.tokenizer import Tokenizer

    assert Tokenizer(hub.resolve("novelist")).decode(ids.tolist()).startswith(output.read_text())
    assert not partial.exists()


@pytest.mark.full
def test_many_interrupts_end_a_command_without_a_traceback():
    """The first modules may not be imported yet, or Python may be ending already."""
    work = subprocess.Popen([*LONGDRAFT, "generate", "It was", "--max-new-tokens", "100000"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)
    while work.poll() is None:
        work.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert "Traceback" not in work.stderr.read() and work.returncode in (130, -signal.SIGINT)


@pytest.mark.full
def test_a_closed_stdout_pipe_ends_the_command_quietly():
    work = subprocess.Popen([*LONGDRAFT, "generate", "It was", "--max-new-tokens", "100000", "--seed", "1"],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    work.stdout.read(20)
    work.stdout.close()
    assert b"Traceback" not in work.stderr.read()
    assert work.wait(timeout=60) == 1


@pytest.mark.full
@pytest.mark.parametrize("shares", [True, False], ids=["text on the terminal", "text in a file"])
def test_a_terminal_shows_a_live_line_below_the_text(tmp_path, shares):
    """The live line shows tokens, speed, mean accepted length and remaining time; `--quiet` disables it."""
    shown = on_terminal([*QUICK, "--output", str(tmp_path / "x")] if not shares else QUICK)
    assert "tokens/s" in shown and "per step" in shown and "left" in shown
    quiet = on_terminal([*QUICK, "--quiet"])
    assert "tokens/s" not in quiet and "loading" not in shown
    if shares:
        words = quiet.split()
        assert shown.rfind("reading the prompt") < shown.index(words[0])
        assert len(words) > 5 and all(word in shown for word in words)


def summaries(shown: str) -> list[str]:
    """The lines that start with `longdraft:`, without the control sequences of the live line."""
    return re.findall(r"longdraft: [^\r\n\x1b]*", shown)


@pytest.mark.full
def test_a_terminal_shows_one_summary_line_at_the_end_of_a_run(tmp_path):
    """Tokens, time, speed, speed-up over plain decoding, mean accepted length, main drafter, and output files."""
    output, journal = tmp_path / "text.txt", tmp_path / "journal"
    long = ["generate", "It was", "--max-new-tokens", "200", "--seed", "1", "--min-p", "0.1", "--drafter", "suffix",
            "--output", str(output)]
    line, = summaries(on_terminal([*long, "--journal", str(journal)]))
    assert re.fullmatch(
        r"longdraft: 200 tokens · \d+\.\d s · \d+\.\d tokens/s · \d+\.\d\dx plain decoding \(measured\) · "
        r"mean accepted length \d\.\d\d · most tokens by no draft \(\d+%\) · "
        rf"journal {journal} · output {output}", line)
    assert "plain decoding" not in summaries(on_terminal([*long, "--drafter", "plain"]))[0]
    assert summaries(on_terminal([*long, "--quiet"])) == []
    whole, line = summaries(on_terminal(["resume", str(journal)]))
    assert "the text is complete" in whole and line == (
        f"longdraft: 200 tokens (200 of them by earlier runs) · journal {journal}")


def test_models_and_doctor_print_text_or_json(capfd):
    assert run(["models", "--json"]) == 0
    models = {model["model"]: model["parameters"] for model in json.loads(capfd.readouterr().out)
              if model["place"] == "bundled"}
    assert models == {"novelist": 5_868_800, "novelist-gqa": 5_278_976}
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["kernels"] in report["kernels_available"].split(", ")
    assert report["exactness"] == "bit-exact"
    assert run(["models"]) == 0 and run(["doctor"]) == 0
    assert "novelist" in capfd.readouterr().out


@pytest.mark.parametrize("command", [[], ["generate"], ["resume"], ["inspect"], ["models"],
                                     ["doctor"], ["train"], ["train", "heads"]])
def test_every_command_has_help(command, capfd):
    assert run([*command, "--help"]) == 0
    assert "Usage" in capfd.readouterr().out


def test_version(capfd):
    assert run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("longdraft 0.")


def test_the_bundled_chapter_can_be_used_as_a_prompt(capfd):
    chapter = Path(__file__).parents[2] / "examples" / "chapter.txt"
    assert run(["generate", "--prompt-file", str(chapter), "--prefill", "300", "--max-new-tokens", "5"]) == 0
