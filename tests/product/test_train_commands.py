"""Training by commands and in several processes."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.processes import run_code, start_ranks
from helpers.training import SMALL, alphabet_text, losses, tokenizer_folder
from longdraft.__main__ import run
from longdraft.train import job, processes
from longdraft.train.settings import HeadSettings, LmSettings

pytestmark = pytest.mark.full

text = pytest.fixture(scope="module")(alphabet_text)
tokens = pytest.fixture(scope="module")(tokenizer_folder)


def in_two_processes(folder: Path, commands: list[list[str]]) -> list[str]:
    """Run the commands in two processes, as torchrun starts them; returns the lines of stdout."""
    code = ("import json, sys\nfrom longdraft.__main__ import run\n"
            "sys.exit(max(run(command) for command in json.loads(sys.argv[1])))")
    started = start_ranks(2, folder, run_code, code, json.dumps(commands))
    assert [process.wait(240) for process in started] == [0, 0], [process.stderr for process in started]
    return [line for process in started for line in process.stdout.splitlines()]


def test_two_processes_train_the_same_weights_as_one_and_only_one_reports(text, tokens, tmp_path):
    shared = dict(data=(text,), sequence_length=32, steps=6, warmup_steps=2, eval_every=0, checkpoint_every=0,
                  probe_tokens=4, device="cpu", threads=1, dtype="float32", learning_rate=1e-2)
    kinds = {"heads": (HeadSettings, dict(shared, model=str(tokens))),
             "lm": (LmSettings, dict(SMALL, **shared, tokenizer=str(tokens)))}
    commands = []
    for kind, (settings, given) in kinds.items():
        job.train(settings(**given | {"batch_size": 4}), tmp_path / kind / "one")
        options = given | {"batch_size": 2, "data": text, "output": tmp_path / kind / "two"}
        commands.append(["train", kind, *(part for option, value in options.items()
                                          for part in (f"--{option.replace('_', '-')}", str(value)))])
    lines = in_two_processes(tmp_path, commands)
    assert sum(line.startswith("part   loss") for line in lines) == 2
    reports = {report["kind"]: report for report in map(json.loads, (line for line in lines if line[:1] == "{"))}
    assert len([line for line in lines if '{"kind"' in line]) == len(reports) == 2
    assert len(reports.pop("lm")["probe"]) == 0 and len(reports.popitem()[1]["probe"]) == 2
    for kind in kinds:
        assert np.allclose(losses(tmp_path / kind / "two"), losses(tmp_path / kind / "one"), rtol=1e-3)
        one, other = (load_file(tmp_path / kind / where / "model.safetensors") for where in ("one", "two"))
        assert all(torch.allclose(one[key], other[key], rtol=1e-2, atol=2e-3) for key in one)


def test_processes_wait_for_each_other_for_hours(monkeypatch):
    """Only the main process writes training text and probes the result. Both take longer than the default timeout."""
    import accelerate

    given: dict[str, object] = {}
    monkeypatch.setattr(accelerate, "PartialState", lambda **options: given.update(options))
    processes._state(is_cpu=True)
    assert given["timeout"] >= timedelta(days=1)


def test_train_commands_print_json_on_the_last_line(text, tokens, tmp_path, capsys):
    small = ["--data", text, "--steps", "2", "--sequence-length", "32", "--probe-tokens", "4", "--threads", "1"]
    shape = ["--layers", "1", "--hidden-size", "16", "--num-heads", "2", "--num-kv-heads", "1", "--context", "256"]
    commands = {"glide": ["--model", str(tokens), "--window", "8", "--max-lag", "2"],
                "draft": ["--model", str(tokens), *shape], "lm": ["--tokenizer", str(tokens), *shape, "--no-tied"]}
    for kind, more in commands.items():
        assert run(["train", kind, "--output", str(tmp_path / kind), *small, *more]) == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert last["kind"] == kind and last["steps"] == 2 and len(last["probe"]) == (0 if kind == "lm" else 2)
    assert json.loads((tmp_path / "lm" / "config.json").read_text())["tie_word_embeddings"] is False


def test_options_override_a_preset(text, tokens, tmp_path, capsys):
    more = ["--preset", "paper-llama3.1-8b", "--model", str(tokens), "--data", text, "--sequence-length", "32",
            "--steps", "2", "--batch-size", "1", "--gradient-accumulation", "2", "--threads", "1",
            "--probe-tokens", "0", "--min-tokens", "0", "--document-tokens", "0"]
    assert run(["train", "heads", "--output", str(tmp_path / "heads"), *more]) == 0
    record = json.loads((tmp_path / "heads" / "config.json").read_text())["training"]
    assert [record[name] for name in ("kind", "init", "learning_rate", "steps")] == ["tokenswift", "paper", 5e-3, 2]
    resumed = ["train", "heads", "--output", str(tmp_path / "heads"), "--resume"]
    assert run([*resumed, "--preset", "paper-llama3.1-8b"]) == 2
    assert "uses the settings of the checkpoint" in capsys.readouterr().err
    assert run(["train", "heads", "--output", str(tmp_path / "no"), "--preset", "paper-gpt2", "--data", text]) == 2
    assert "preset is 'paper-gpt2'; allowed: paper-llama3.1-8b" in capsys.readouterr().err
