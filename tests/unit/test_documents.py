"""The documents name files that exist, commands that parse, and every key of the statistics."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import longdraft
from longdraft.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md",
                                      "benchmarks/results/README.md", "tests/promise/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "longdraft" / "bundled").glob("*/README.md"))
NOTEBOOK = sorted((ROOT / "notebook").glob("*.md"))  # names files and commands as they were
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
SOURCE = re.compile(
    r"(?<![\w/.])((?:longdraft|longdraft_bench|benchmarks|tests|csrc|examples|notebook)/[\w./*$-]*[\w/])")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS + NOTEBOOK, ids=name_of)
def test_every_link_leads_to_a_file(document):
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_named_source_file_exists(document):
    named = SOURCE.findall(document.read_text(encoding="utf-8"))
    assert [path for path in named if "$" not in path and not any(ROOT.glob(path.rstrip("/")))] == []


def commands(text: str) -> list[list[str]]:
    """The arguments of every `longdraft` command in the blocks of a document."""
    found = []
    for block in re.findall(r"(?:^(?: {4,}.*)?\n)+", text, re.MULTILINE):
        variables = dict(re.findall(r'^ *(\w)="(.*)"$', block, re.MULTILINE))
        for line in re.sub(r"\\\n", " ", block).splitlines():
            line = re.sub(r"\$(\w)\b", lambda match, known=variables: known.get(match[1], match[0]), line)
            called = re.match(r" +(?:\w+=\S+ )*(?:\S*bin/|torchrun .* -m )?longdraft( .*|)$", line)
            if called:
                words = shlex.split(called[1], comments=True)
                end = next((place for place, word in enumerate(words) if word[0] in ">|;"), len(words))
                found.append(words[:end])
    return found


@functools.cache
def all_commands() -> Any:
    return get_command(app)


def parse(arguments: list[str]) -> None:
    """Raise the error of a command or an option that does not exist, or of a value of the wrong type."""
    command = all_commands()
    while hasattr(command, "commands") and arguments:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_has_the_options_that_it_shows(document):
    for arguments in commands(document.read_text(encoding="utf-8")):
        try:
            parse(arguments)
        except Exception as error:
            raise AssertionError(f"longdraft {shlex.join(arguments)}: {error}") from error


def test_the_commands_of_the_documents_are_found():
    """So that the test above does not pass on nothing."""
    found = [arguments[0] for document in DOCUMENTS for arguments in commands(document.read_text(encoding="utf-8"))
             if arguments]
    assert set(found) == set(all_commands().commands)
    assert len(found) > 60
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parse(["bench", "length", "--no-such-option", "1"])


def test_every_key_of_the_statistics_is_described(tiny):
    engine = longdraft.load(str(tiny["mha"]), drafter="auto", threads=1)
    events = list(engine.generate([1, 2, 3], longdraft.SamplingParams(max_new_tokens=8, seed=1, ignore_eos=True)))
    described = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    keys = json.loads(json.dumps(events[-1].stats)).keys()
    assert [key for key in keys if f"`{key}`" not in described and not re.fullmatch(r"distinct_[23]", key)] == []
