"""`longdraft book`: an outline, chapters and files, the same after any interruption."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

import longdraft
from helpers.processes import Fork, run_longdraft, wait_for
from longdraft.__main__ import run
from longdraft.book.book import STATE, Book, BookPlan, OutlinedChapter
from longdraft.errors import JournalError, UsageError
from longdraft.journal.format import FILE, read_journal
from longdraft.request.sampling_params import SamplingParams

pytestmark = pytest.mark.full

PREMISE = "It was a dark night, and the keeper of the lighthouse found a letter."
COMMAND = ["book", PREMISE, "--chapters", "3", "--words", "50", "--seed", "4", "--threads", "1", "--quiet"]
FILES = ("book.md", "book.epub")
TEMPLATE = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}")


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A book that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "book"
    assert run([*COMMAND, "--folder", str(folder), "--drafter", "plain"]) == 0
    return folder


def test_a_book_has_an_outline_journals_and_files(whole):
    state = json.loads((whole / STATE).read_text())
    assert len(state["chapters"]) == 3 and all(each["title"] for each in state["chapters"])
    text = (whole / "book.md").read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        each["title"] for each in state["chapters"]]
    for number, written in enumerate(state["written"], 1):
        journal = read_journal(whole / f"chapter-{number:03d}")
        assert journal.finish and len(journal.tokens) == written["tokens"] >= 50


def test_a_chapter_follows_the_headings_and_the_chapters_before_it(whole):
    words = longdraft.load("novelist", drafter="plain", threads=1).tokenizer
    third = words.decode(read_journal(whole / "chapter-003").header.prompt)
    second = words.decode(read_journal(whole / "chapter-002").tokens.tolist())
    assert third.startswith(PREMISE) and second.strip() in third and "CHAPTER III. " in third


def test_a_book_that_is_killed_in_any_chapter_becomes_the_same_book(whole, tmp_path):
    """kill -9 as soon as each of the chapters has a journal, then the same command with another drafter."""
    folder = tmp_path / "book"
    command = [*COMMAND, "--folder", str(folder), "--drafter", "suffix"]
    for number in (1, 3):
        process = Fork(tmp_path / f"process-{number}", run_longdraft, *command)
        wait_for((folder / f"chapter-{number:03d}" / FILE).exists, 60)
        process.kill(signal.SIGKILL)
        process.wait()
    assert not (folder / FILES[0]).exists() or files(folder) != files(whole)
    assert run(command) == 0
    assert files(folder) == files(whole)


def test_the_same_command_keeps_a_finished_book(whole, capfd):
    before = files(whole)
    assert run([*COMMAND[:-1], "--folder", str(whole), "--drafter", "suffix"]) == 0
    assert files(whole) == before
    assert capfd.readouterr().err.count("tokens, kept") == 3


def test_a_changed_brief_makes_its_chapter_and_those_after_it_stale(whole, tmp_path, capfd):
    folder = tmp_path / "book"
    shutil.copytree(whole, folder)
    state = json.loads((folder / STATE).read_text())
    state["chapters"][1]["words"] = 55  # the brief, the title and earlier chapters would do as well
    (folder / STATE).write_text(json.dumps(state))
    assert run([*COMMAND[:-1], "--folder", str(folder), "--drafter", "suffix"]) == 0
    assert capfd.readouterr().err.count("tokens, kept") == 1
    assert [len(read_journal(folder / f"chapter-00{number}").tokens) for number in (1, 2)] == [150, 165]


@pytest.mark.parametrize("changed, message", [
    (["--seed", "5"], "another setting (seed was '4', now '5')"),
    (["--words", "60"], "another plan (words was '50', now '60')"),
])
def test_another_book_in_the_folder_is_refused(whole, capfd, changed, message):
    assert run([*COMMAND, *changed, "--folder", str(whole)]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("arguments, message", [
    (["book", " "], "the premise is ' '"),
    (["book", "a", "--chapters", "0"], "--chapters is 0; allowed: 1 to 200"),
    (["book", "a", "--words", "10"], "--words is 10; allowed: 50 to 20000"),
    (["book", "a", "--regex", "b"], "a book is prose"),
    (["book"], "no premise; give it as an argument or with --premise-file FILE"),
    (["book", "a", "--premise-file", "b"], "a premise and --premise-file are both given"),
])
def test_wrong_plans_are_refused(arguments, message, capfd, tmp_path):
    assert run([*arguments, "--folder", str(tmp_path / "book")]) == 2
    assert message in capfd.readouterr().err and not (tmp_path / "book").exists()


def test_a_damaged_state_is_refused(tmp_path):
    (tmp_path / STATE).write_text('{"plan": 3}')
    engine = longdraft.load("novelist", drafter="plain", threads=1)
    with pytest.raises(JournalError, match=r"BOOK.json cannot be read"):
        Book.open(tmp_path, engine, BookPlan(PREMISE, 1, 50), SamplingParams(seed=1))


def test_settings_that_the_model_cannot_follow_are_refused_before_there_is_a_folder(chat, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    folder, plan = tmp_path / "book", BookPlan(PREMISE, 1, 50)
    with pytest.raises(UsageError, match="install the extra 'structured'"):
        Book.open(folder, chat, plan, SamplingParams(seed=3))
    with pytest.raises(UsageError, match="needs a model that marks its thinking"):
        Book.open(folder, chat, plan, SamplingParams(seed=3, thinking_budget=9))
    assert not folder.exists()


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> longdraft.Engine:
    """The bundled model with a chat template. It writes no sense, but valid outlines."""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("chat") / "model"
    bundled = Path(longdraft.__file__).parent / "bundled" / "novelist"
    folder.mkdir()
    for file in bundled.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return longdraft.load(str(folder), drafter="suffix", threads=1)


def follow(generation, part: str) -> str:
    return "".join(event.text for event in generation)


def test_a_chat_model_outlines_the_book_as_data_and_writes_it_as_one_conversation(chat, tmp_path):
    book = Book.open(tmp_path, chat, BookPlan(PREMISE, 2, 50), SamplingParams(seed=3, temperature=0.7, min_p=0.05))
    done = list(book.write(follow))
    assert [(each.number, each.state) for each in done] == [(0, "outlined"), (1, "written"), (2, "written")]
    state = json.loads((tmp_path / STATE).read_text())
    assert state["title"] and all(each["brief"] and 50 <= each["words"] <= 100 for each in state["chapters"])
    prompt = chat.tokenizer.decode(read_journal(tmp_path / "chapter-002").header.prompt)
    roles = [line.partition(":")[0] for line in prompt.splitlines() if line.startswith(("user:", "assistant:"))]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant"]


def test_a_chat_book_is_not_written_again_with_other_prompts(chat, tmp_path, monkeypatch):
    """Its chapters would be removed without a word."""
    plan, params = BookPlan(PREMISE, 1, 50), SamplingParams(seed=3)
    Book.open(tmp_path, chat, plan, params, {"enable_thinking": False}).save()
    with pytest.raises(UsageError, match=r"another setting .chat_options was "):
        Book.open(tmp_path, chat, plan, params)
    state = json.loads((tmp_path / STATE).read_text())
    state["settings"]["chat_template"] = "another"
    (tmp_path / STATE).write_text(json.dumps(state))
    with pytest.raises(UsageError, match=r"another setting .chat_template was "):
        Book.open(tmp_path, chat, plan, params, {"enable_thinking": False})
    del state["settings"]["chat_template"], state["settings"]["chat_options"]  # by an older version
    (tmp_path / STATE).write_text(json.dumps(state))
    Book.open(tmp_path, chat, plan, params)


def test_early_chapters_leave_the_prompt_where_the_context_is_full(chat, tmp_path):
    book = Book.open(tmp_path, chat, BookPlan(PREMISE, 3, 50), SamplingParams(seed=3))
    book.state.chapters = [OutlinedChapter(f"Title {i}", "brief", 50) for i in range(3)]
    texts = ["first " * 50, "second " * 50]
    whole = book._chapter_prompt(3, texts)
    book.context_limit = len(whole) + 149
    shorter = chat.tokenizer.decode(book._chapter_prompt(3, texts))
    assert "second second" in shorter and "first first" not in shorter and "Title 0" in shorter
    book.context_limit = 200
    with pytest.raises(UsageError, match=r"chapter 3 of 50 words does not fit into the model's context"):
        book._chapter_prompt(3, texts)
