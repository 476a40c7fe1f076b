"""A book from a premise: an outline, then one chapter after the other.

    book = Book.open(Path("book"), engine, BookPlan("A lighthouse keeper finds a letter.", chapters=20), params)
    for progress in book.write(lambda generation, part: "".join(event.text for event in generation)):
        print(progress)

A model with a chat template writes an outline as structured output (a title, and for each chapter its title, a brief
and a number of words), then each chapter as a turn of one conversation. A model without one continues a plain text:
the premise, a list of headings, and the chapters so far.

The folder holds BOOK.json (premise, outline, states) and a journal for each chapter. Every part is a function of the
model, the premise, the outline and the settings, so the same command goes on after any interruption and ends with the
same book. A chapter whose prompt has changed, because the outline or an earlier chapter has, is written again. Other
settings, or another chat template, are refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.book.export import ExportedBook, ExportedChapter, epub, markdown
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.errors import JournalError, UsageError, check
from longdraft.journal.format import journal_exists, read_journal
from longdraft.journal.writer import remove_journal
from longdraft.request.sampling_params import SamplingParams
from longdraft.system.files import OutputFile
from longdraft.text.effort import Effort
from longdraft.text.thinking import divide

STATE = "BOOK.json"
_WORDS_ALLOWED = 50, 20_000  # of a chapter
_OUTLINE_BATCH = 20  # chapters that are outlined in one answer
_TOKENS_PER_WORD = 3  # upper bound, for the largest number of tokens of a chapter
_HEADING_TOKENS = 24  # of a heading that a model without a template writes
_OUTLINE_TOKENS = 400, 250  # of an outline, and for each of its chapters
# 40 is XXXX here, not XL: the prompts of books that were begun have it so.
_NUMERALS = ((100, "C"), (90, "XC"), (50, "L"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))

# Runs a generation to its end and returns its text. The second argument describes what is written.
Follow = Callable[[Generation, str], str]


@dataclass(frozen=True)
class BookPlan:
    """The plan of a book.

    premise   what it is about; for a model without a chat template, the text that it continues
    chapters  1 to 200
    words     of a chapter, about; 50 to 20,000
    """

    premise: str
    chapters: int = 10
    words: int = 1500

    def __post_init__(self) -> None:
        check(bool(self.premise.strip()), "the premise", self.premise, "a text")
        check(1 <= self.chapters <= 200, "--chapters", self.chapters, "1 to 200")
        _check_words("--words", self.words)


@dataclass
class OutlinedChapter:
    """A chapter of the outline. The person who edits BOOK.json may change all three."""

    title: str
    brief: str
    words: int


@dataclass
class BookState:
    """The content of BOOK.json. `chapters` grows while the outline is written; `written` is informational."""

    plan: dict[str, Any]
    settings: dict[str, Any]
    model: str
    fingerprint: str
    title: str = ""
    chapters: list[OutlinedChapter] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)


class BookProgress(NamedTuple):
    """A part of the book that is done: its number (0: the outline), its title, its new tokens and what happened."""

    number: int
    title: str
    tokens: int
    state: str  # outlined | written | kept


class Book:
    """One book in its folder. See the module."""

    def __init__(self, folder: Path, engine: Engine, plan: BookPlan, params: SamplingParams, state: BookState,
                 options: Mapping[str, Any]) -> None:
        self.folder = folder
        self.engine = engine
        self.plan = plan
        self.params = params
        self.state = state
        self.context_limit = engine.model.config.max_positions  # tokens of a prompt and its chapter
        self._effort = engine.effort(params, options) if self._is_chat else Effort({})
        self._options = self._effort.variables

    @classmethod
    def open(cls, folder: Path, engine: Engine, plan: BookPlan, params: SamplingParams,
             options: Mapping[str, Any] | None = None) -> Book:
        """A new book, or the one in `folder`. UsageError if that one has another premise, model or settings.

        params   with a seed; its numbers of tokens are not used
        options  variables of the chat template
        """
        check(params.seed is not None, "seed", None, "a number", "each part of a book derives its own from it")
        chat_settings = _chat_settings(engine, options or {})
        state = BookState(asdict(plan), _settings_of(params) | chat_settings, engine.name, engine.fingerprint)
        path = folder / STATE
        if path.exists():
            state_of_folder = _read_state(path)
            state_of_folder.settings = chat_settings | state_of_folder.settings  # older versions did not save these
            for name in ("plan", "settings", "fingerprint"):
                began, now = getattr(state_of_folder, name), getattr(state, name)
                if began != now:
                    raise UsageError(f"the book in {folder} was begun with another {_WORDS[name]}"
                                     f"{_difference(began, now)}; give the first one again, or another --folder")
            state = state_of_folder
        book = cls(folder, engine, plan, params, state, options or {})
        book._require_usable_settings()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--folder {folder} cannot be made: {error.strerror or error}; choose another") from error
        return book

    def outline(self, follow: Follow) -> Iterator[BookProgress]:
        """Write what is missing of the outline."""
        while len(self.state.chapters) < self.plan.chapters:
            first = len(self.state.chapters)
            if self._is_chat:
                self._outline_batch(follow, first, min(_OUTLINE_BATCH, self.plan.chapters - first))
            else:
                self._outline_heading(follow, first)
            self.save()
            if len(self.state.chapters) == self.plan.chapters:
                yield BookProgress(0, self.state.title, 0, "outlined")

    def write(self, follow: Follow) -> Iterator[BookProgress]:
        """Write the outline and all chapters that are missing or stale; the files after each of them."""
        yield from self.outline(follow)
        texts: list[str] = []
        for number, chapter in enumerate(self.state.chapters, 1):
            prompt = self._chapter_prompt(number, texts)
            text, tokens, state = self._chapter(number, prompt, follow)
            texts.append(text)
            self.state.written[number - 1 :] = [{"tokens": tokens, "characters": len(text)}]
            self.save()
            self.export(texts)
            yield BookProgress(number, chapter.title, tokens, state)

    def export(self, texts: list[str]) -> None:
        """Write book.md and book.epub of the chapters so far."""
        chapters = [ExportedChapter(chapter.title, text)
                    for chapter, text in zip(self.state.chapters, texts, strict=False)]
        book = ExportedBook(self.state.title or "Untitled", chapters)
        self._replace("book.md", markdown(book).encode(errors="replace"))
        self._replace("book.epub", epub(book))

    def save(self) -> None:
        self._replace(STATE, (json.dumps(asdict(self.state), indent=1, ensure_ascii=False) + "\n").encode())

    def _replace(self, name: str, data: bytes) -> None:
        file = OutputFile(self.folder / name, "--folder")
        try:
            file.write(data)
            file.finish()
        finally:
            file.abandon()

    @cached_property
    def _is_chat(self) -> bool:
        return self.engine.tokenizer.chat_template is not None

    def _params_of(self, part: int, **changes: Any) -> SamplingParams:
        """The settings of a part, which has a seed of its own: 0 is the outline, then come the chapters."""
        assert self.params.seed is not None
        params = replace(self.params, seed=(self.params.seed + part) % 2**64, **changes)
        return self.engine.loaded.with_closing(self._effort.applied(params) if self._is_chat else params)

    def _write(self, generation: Generation, follow: Follow, part: str) -> str:
        """The text of a generation, without the thinking of models that mark it."""
        text = follow(generation, part)
        form = self.engine.loaded.answer_format if self._is_chat else None
        return divide(form, generation.prompt, generation.tokens.tolist(), text).content

    def _require_usable_settings(self) -> None:
        """UsageError for settings that the model cannot follow."""
        first = len(self.state.chapters)
        missing = min(_OUTLINE_BATCH, self.plan.chapters - first)
        params = self._outline_params(first, missing) if self._is_chat and missing > 0 else self._params_of(0)
        self.engine.loaded.check_settings(params)
        self.engine.loaded.grammar_rules(params)

    # The outline

    def _outline_params(self, first: int, count: int, **changes: Any) -> SamplingParams:
        """The settings of the next chapters of the outline, as JSON."""
        schema = json.dumps(_schema(count, first == 0, self.plan.words))
        return self._params_of(0, min_new_tokens=0, stop=(), ignore_eos=False, structured_outputs=("json", schema),
                               **changes)

    def _outline_batch(self, follow: Follow, first: int, count: int) -> None:
        """The next chapters of the outline, as JSON."""
        messages = [{"role": "user", "content": _OUTLINE_REQUEST.format(
            premise=self.plan.premise, chapters=self.plan.chapters, words=self.plan.words)}]
        if first:
            messages += [{"role": "assistant", "content": self._outline_text()},
                         {"role": "user", "content": f"Go on with chapters {first + 1} to {first + count}, as JSON."}]
        tokens, each = _OUTLINE_TOKENS
        ids = self.engine.chat(messages, **self._options)
        room = self._room(ids, tokens + each * count + self._thought_tokens)
        params = self._outline_params(first, count, max_new_tokens=room)
        part = f"outline, chapters {first + 1} to {first + count}"
        text = self._write(self.engine.generate(ids, params), follow, part)
        try:
            outline = json.loads(text)
        except ValueError as error:
            raise UsageError("the outline does not fit into the model's context; give fewer --chapters or a shorter "
                             "premise") from error
        self.state.title = self.state.title or _line(outline["title"])
        self.state.chapters += [OutlinedChapter(_line(entry["title"]), _line(entry["brief"]), int(entry["words"]))
                                for entry in outline["chapters"]]

    def _outline_heading(self, follow: Follow, first: int) -> None:
        """The next heading, after the premise and the headings before it, as a plain text."""
        ids = self.engine.encode(self._headings() + f"CHAPTER {_roman(first + 1)}. ")
        params = self._params_of(first, max_new_tokens=self._room(ids, _HEADING_TOKENS), min_new_tokens=0,
                                 stop=("\n", ". ", "CHAPTER"), on_loop="off")
        title = _line(follow(self.engine.generate(ids, params), f"heading {first + 1}")).strip(" .")
        self.state.title = self.state.title or _line(self.plan.premise)[:60]
        self.state.chapters.append(OutlinedChapter(title or f"Chapter {first + 1}", "", self.plan.words))

    def _headings(self) -> str:
        lines = [f"CHAPTER {_roman(i)}. {chapter.title}\n" for i, chapter in enumerate(self.state.chapters, 1)]
        return f"{self.plan.premise.strip()}\n\nCONTENTS\n\n{''.join(lines)}"

    def _outline_text(self) -> str:
        return json.dumps({"title": self.state.title, "chapters": [asdict(each) for each in self.state.chapters]},
                          ensure_ascii=False)

    # The chapters

    def _chapter_prompt(self, number: int, texts: list[str]) -> list[int]:
        """The prompt of a chapter: the outline, and as many of the latest chapters as the context has room for."""
        room = self.context_limit - self._most_tokens(self.state.chapters[number - 1])
        for first in range(number):  # of the chapters that are shown
            ids = self._prompt_from(first, number, texts)
            if len(ids) <= room:
                return ids
        raise UsageError(f"chapter {number} of {self.state.chapters[number - 1].words} words does not fit into the "
                         f"model's context of {self.context_limit} tokens; lower its words in "
                         f"{self.folder / STATE}")

    def _prompt_from(self, first: int, number: int, texts: list[str]) -> list[int]:
        shown = list(enumerate(texts[first : number - 1], first + 1))
        if not self._is_chat:
            parts = [f"CHAPTER {_roman(i)}. {self.state.chapters[i - 1].title}\n\n{text.strip()}\n\n"
                     for i, text in [*shown, (number, "")]]
            return self.engine.encode(f"{self._headings()}\n\n{''.join(parts)}".rstrip("\n") + "\n\n")
        messages = [{"role": "user", "content": _OUTLINE_REQUEST.format(**asdict(self.plan))},
                    {"role": "assistant", "content": self._outline_text()}]
        for i, text in shown:
            messages += [{"role": "user", "content": self._request(i)}, {"role": "assistant", "content": text}]
        return self.engine.chat([*messages, {"role": "user", "content": self._request(number)}], **self._options)

    def _request(self, number: int) -> str:
        chapter = self.state.chapters[number - 1]
        return _CHAPTER_REQUEST.format(number=number, chapters=len(self.state.chapters), title=chapter.title,
                                       brief=chapter.brief, words=chapter.words)

    def _chapter(self, number: int, prompt: list[int], follow: Follow) -> tuple[str, int, str]:
        """The text of a chapter, its number of tokens, and whether it was written now or kept."""
        folder = self.folder / f"chapter-{number:03d}"
        chapter = self.state.chapters[number - 1]
        own_stops = () if self._is_chat else (f"CHAPTER {_roman(number + 1)}",)
        stops = *self.params.stop, *own_stops
        params = self._params_of(number, max_new_tokens=self._most_tokens(chapter), stop=stops,
                                 min_new_tokens=0 if self.params.structured_outputs else chapter.words)
        kept = read_journal(folder) if journal_exists(folder) else None
        if kept and (kept.header.prompt, kept.params) == (prompt, params):
            generation = self.engine.resume(folder)
            state = "kept" if kept.finish else "written"
        else:
            if kept:
                remove_journal(folder)
            generation = self.engine.generate(prompt, params, journal=folder)
            state = "written"
        text = self._write(generation, follow, f"chapter {number} of {len(self.state.chapters)}, {chapter.title!r}")
        return text, len(generation.tokens), state

    def _most_tokens(self, chapter: OutlinedChapter) -> int:
        return chapter.words * _TOKENS_PER_WORD + self._thought_tokens

    @property
    def _thought_tokens(self) -> int:
        """Tokens that a part may have besides its text: the budget of its thought."""
        return max(0, self.params.thinking_budget)

    def _room(self, ids: list[int], wanted: int) -> int:
        """Tokens that may follow a prompt: `wanted`, or what the context leaves."""
        return max(1, min(wanted, self.context_limit - len(ids)))


_OUTLINE_REQUEST = """Plan a book.

{premise}

It has {chapters} chapters of about {words} words. Answer with JSON: the book's title, and for each chapter its title, \
a brief of what happens in it, and its number of words."""
_CHAPTER_REQUEST = """Write chapter {number} of {chapters}, "{title}". {brief}

Write about {words} words of prose. Begin with the text itself, without a heading, and end where the chapter ends."""
_WORDS = {"plan": "plan", "settings": "setting", "fingerprint": "model, tokenizer or kernels than the present ones"}


def _schema(count: int, has_title: bool, words: int) -> dict[str, Any]:
    """Of an outline. words: of a chapter, about: half to twice as many"""
    least, most = max(_WORDS_ALLOWED[0], words // 2), min(_WORDS_ALLOWED[1], 2 * words)
    chapter = {"type": "object", "additionalProperties": False, "required": ["title", "brief", "words"], "properties": {
        "title": {"type": "string", "minLength": 1, "maxLength": 80},
        "brief": {"type": "string", "minLength": 1, "maxLength": 600},
        "words": {"type": "integer", "minimum": least, "maximum": most}}}
    chapters = {"type": "array", "minItems": count, "maxItems": count, "items": chapter}
    title = {"title": {"type": "string", "minLength": 1, "maxLength": 80}} if has_title else {}
    return {"type": "object", "additionalProperties": False, "properties": {**title, "chapters": chapters},
            "required": [*title, "chapters"]}


def _settings_of(params: SamplingParams) -> dict[str, Any]:
    """The settings that all parts of a book share, as JSON has them."""
    shared = {name: value for name, value in asdict(params).items()
              if name not in ("max_new_tokens", "min_new_tokens", "from_model")}
    settings: dict[str, Any] = json.loads(json.dumps(shared))
    return settings


def _check_words(name: str, words: int) -> None:
    least, most = _WORDS_ALLOWED
    check(least <= words <= most, name, words, f"{least} to {most}")


def _chat_settings(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the prompts of a model with a chat template depend on besides the outline."""
    if (template := engine.tokenizer.chat_template) is None:
        return {}
    return {"chat_options": dict(options), "chat_template": hashlib.sha256(template.source.encode()).hexdigest()[:16]}


def _read_state(path: Path) -> BookState:
    try:
        content = json.loads(path.read_bytes())
        chapters = [OutlinedChapter(str(each["title"]), str(each["brief"]), int(each["words"]))
                    for each in content["chapters"]]
        settings = _settings_of(SamplingParams()) | content["settings"]  # books of older versions lack the newest ones
        state = BookState(**{**content, "chapters": chapters, "settings": settings})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JournalError(f"{path} cannot be read: {error!r}; repair it, or choose another --folder") from error
    for chapter in state.chapters:
        _check_words(f"words of {chapter.title!r} in {path}", chapter.words)
    return state


def _difference(began: Any, now: Any) -> str:
    if not isinstance(began, dict):
        return ""
    names = [name for name in now if began.get(name) != now[name]]
    return f" ({', '.join(f'{name} was {str(began.get(name))[:60]!r}, now {str(now[name])[:60]!r}' for name in names)})"


def _line(text: str) -> str:
    return " ".join(re.sub(r"[\x00-\x1f]", " ", text).split())


def _roman(number: int) -> str:
    numeral = ""
    for value, letters in _NUMERALS:
        numeral += letters * (number // value)
        number %= value
    return numeral
