"""Every command of docs/reproduce.md runs, on tiny models of the same layout as the named ones."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.checkpoints import make_checkpoint, make_heads, released
from helpers.sentencepiece_files import original_files
from longdraft.__main__ import run
from longdraft.train.presets import PRESETS
from longdraft_bench import document
from longdraft_bench.machine.limits import Limits
from longdraft_bench.paper import experiment as experiments

pytestmark = pytest.mark.full
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reproduce.md"
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 20
# What makes a training or a table small. The named options are the document's.
TRAINING = shlex.split(
    "--sequence-length 24 --steps 1 --batch-size 1 --gradient-accumulation 1 --threads 1 --probe-tokens 0 "
    "--min-tokens 0 --document-tokens 200 --dtype float32 --warmup-steps 1 --eval-tokens 24 --device cpu --quiet")
SYSTEMS = ("published", "tokenswift", "medusa-star", "weak")
SMALL_LM = ["--hidden-size", "32", "--intermediate-size", "32", "--num-heads", "2"]


def commands() -> list[list[str]]:
    """The commands of the document's code blocks, as arguments; a backslash continues a line."""
    lines = re.findall(r"^    (.*)$", DOCUMENT.read_text(encoding="utf-8").replace("\\\n", ""), re.MULTILINE)
    return [shlex.split(line) for line in lines if line.startswith("longdraft ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that the commands run in, with the models and the texts that they name."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "made").mkdir()
    for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"):
        make_checkpoint(folder / name, num_key_value_heads=2)
    make_heads(folder / "meta-llama/Llama-3.1-8B/heads", make_checkpoint(folder / "made/llama", num_key_value_heads=2))
    released(folder / "TokenSwift/TokenSwift-Llama-3.1-8B", folder / "meta-llama/Llama-3.1-8B")
    (folder / "TokenSwift/TokenSwift-Llama-3.1-8B/tokenizer.json").unlink()
    original_files(make_checkpoint(folder / "made/yarn"), folder / "NousResearch/Yarn-Llama-2-7b-128k")
    rows = [TEXT, TEXT.upper(), TEXT.title(), TEXT[5:], TEXT[9:]]
    for name in ("pg19-train", "pg19-test", "wikipedia", "slimpajama", "prolong-64k", "long-answers"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    ids = [[2 + place % 200 for place in range(start, start + 60)] for start in range(3)]
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))
    return folder


def adapted(arguments: list[str]) -> list[str]:
    """The command for the tiny models: names of models are folders here, data of the hub is a file, sizes are small."""
    names = {"pg19-train.parquet": "pg19-train.jsonl", "pg19-test.parquet": "pg19-test.jsonl"}
    found = ["ids.jsonl" if each.startswith("hf:") else names.get(each, each) for each in arguments[1:]]
    if found[0] == "train":
        kind, preset = found[1], found[found.index("--preset") + 1]
        if "model" in PRESETS[kind][preset] and "--model" not in found:
            found += ["--model", PRESETS[kind][preset]["model"]]
        found += [*TRAINING, *(SMALL_LM if kind == "lm" else [])]
        if kind == "glide" and "positions" in PRESETS[kind][preset]:
            found += ["--positions", "24"]
    if found[:2] == ["bench", "paper"]:
        found[found.index("--scale") + 1] = "smoke"
        found[found.index("--skip-characters") + 1] = "5"
        found[found.index("--documents") + 1] = "1"
        found += ["--memory", "0.01", "--threads", "1", "--dtype", "float32"]
        found += [] if "--tables" in found else ["--tables", "B"]
    return found


def test_every_command_of_the_walk_through_runs(folder, monkeypatch, capsys):
    """In the document's order: tables draft with the heads that were trained before."""
    monkeypatch.chdir(folder)
    scale = experiments.Scale((4,), 4, 0.05)
    monkeypatch.setattr(experiments.Experiment, "scale", lambda self, name: scale)
    chosen = experiments.Experiment.chosen

    def few(self, ids):
        """Some tables, without the systems whose budgets need longer prompts, and with one prompt length. No banned
        tokens, which the small vocabulary does not have."""
        found = chosen(self, ids or ["B"])
        profiles = {name: replace(profile, published={}) for name, profile in found.profiles.items()}
        return replace(found, profiles=profiles, tables=tuple(replace(table, cases=tuple(
            case for case in table.cases if case.prefill in (0, 4096) and case.system in SYSTEMS))
            for table in found.tables))

    monkeypatch.setattr(experiments.Experiment, "chosen", few)
    monkeypatch.setattr(document, "measure_limits", lambda memory, repeats: Limits(1.0, {}, {}))
    ran = []
    for arguments in commands():
        if arguments[:3] == ["longdraft", "bench", "report"]:
            pytest.importorskip("matplotlib")
        assert run(adapted(arguments)) == 0, f"{' '.join(arguments)}: {capsys.readouterr().err[-400:]}"
        ran.append(arguments[1:3])
    assert ran.count(["bench", "paper"]) >= 5 and ran.count(["train", "heads"]) >= 6 and ["train", "glide"] in ran
    for results in folder.glob("*.jsonl"):
        if results.name in ("llama-8b.jsonl", "yarn-7b.jsonl"):
            session = json.loads(results.read_text().splitlines()[0])
            assert session["profile"] in ("LLaMA3.1-8B", "YaRN-LLaMA2-7B") and session["heads"].endswith("-heads")
