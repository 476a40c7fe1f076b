"""An answer with calls, as it is written: thinking, text, and calls whose arguments are JSON.

    answers = ToolAnswers(form, tokenizer, thinking, tools)
    reader = answers.reader(prompt, seed=7)
    parts = reader.read(events, is_end=False)

The grammar allows nothing else, so the reader repairs nothing. The parts of one token do not depend on those of the
same step: however the tokens arrive, the same parts come in the same order. An answer that is cut within a call ends
with the fragment of its arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from longdraft.request.events import Event
from longdraft.request.tools import ToolRequest
from longdraft.text.harmony import ChannelText, Harmony
from longdraft.text.stream import TokenMarker
from longdraft.text.thinking import AnswerFormat, AnswerReader, ThinkingTags, begun_length
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.forms import ToolForm
from longdraft.text.tools.grammar import properties_of, takes_text

# Special tokens have no text: these halves of surrogate pairs, which no decoded text has, stand for them.
_FIRST_MARK = 0xD820
_MAX_NAME = 256  # characters; a longer "name" shows that the text has no call


class Part(NamedTuple):
    """A fragment of an answer.

    kind  thought and text: more of it. call: one begins; `text` is its function and `id` its id. arguments: more of
          the JSON of the latest call's arguments
    """

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    id: str = ""


class Call(NamedTuple):
    """A whole call. arguments: JSON"""

    id: str
    name: str
    arguments: str


class WholeAnswer(NamedTuple):
    """An answer whose parts are put together."""

    reasoning: str
    content: str
    calls: list[Call]


def put_together(parts: Sequence[Part]) -> WholeAnswer:
    """The whole answer of its parts."""
    texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("thought", "text")}
    calls: list[Call] = []
    for part in parts:
        if part.kind == "call":
            calls.append(Call(part.id, part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part.text)
    return WholeAnswer(texts["thought"], texts["text"], calls)


def chat_message(answer: WholeAnswer, tools: ToolRequest | None) -> dict[str, Any]:
    """An answer as a message of OpenAI's chats."""
    message: dict[str, Any] = {"role": "assistant", "content": None if answer.calls and not answer.content else
                               answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls and tools and tools.is_legacy:
        call = answer.calls[0]
        message["function_call"] = {"name": call.name, "arguments": call.arguments}
    elif answer.calls:
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": {
            "name": call.name, "arguments": call.arguments}} for call in answer.calls]
    return message


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts, with those of one kind in a row as one."""
    groups: list[Part] = []
    for part in parts:
        if groups and part.kind == groups[-1].kind != "call":
            groups[-1] = groups[-1]._replace(text=groups[-1].text + part.text)
        else:
            groups.append(part)
    return groups


@dataclass(frozen=True)
class ToolAnswers:
    """How a model's answers show thinking and calls.

    thinking  how they show thinking; None: they show none, or it is part of the text
    tools     of the request; None: answers have no calls
    """

    form: ToolForm
    tokenizer: Tokenizer
    thinking: AnswerFormat | None
    tools: ToolRequest | None

    def reader(self, prompt: Sequence[int], begun: str = "", thought: str = "", seed: int | None = 0) -> ToolReader:
        """A reader for the answer to a prompt. seed: of the text; begun, thought: the beginnings of the answer and of
        its thinking, if the prompt has one"""
        thinking = self.thinking
        if self.tools is not None and isinstance(thinking, Harmony):
            thinking = thinking._replace(shows_calls=True)
        elif isinstance(thinking, ThinkingTags):
            thinking = thinking._replace(marks={**thinking.marks, **self._marks})
        inner: AnswerReader = (thinking.reader(prompt, begun, thought) if thinking else
                               _MarkedReader(self.tokenizer, self._marks))
        parser = _CallParser(self._form, self.tools) if self.tools and self.tools.callable else None
        ids = _Ids(prompt, seed, is_short=self.form.has_short_ids) if parser else None
        return ToolReader(inner, parser, ids)

    def whole(self, prompt: Sequence[int], tokens: Sequence[int], pieces: Sequence[str], seed: int | None = 0
              ) -> list[Part]:
        """The parts of a complete answer. pieces: the text that each token adds"""
        reader = self.reader(prompt, seed=seed)
        return reader.read([Event(tuple(tokens), "".join(pieces), pieces=tuple(pieces))], is_end=True)

    @cached_property
    def _marks(self) -> dict[int, str]:
        """The characters of the form's silent markers, by their ids."""
        if self.tools is None:
            return {}
        ids = self.tokenizer.added_tokens
        silent = [ids[marker] for marker in self.form.markers
                  if marker in ids and self.tokenizer.is_silent(ids[marker])]
        return {token: chr(_FIRST_MARK + index) for index, token in enumerate(silent)}

    @cached_property
    def _form(self) -> ToolForm:
        """The form, with characters in the place of silent markers."""
        marks = {self.tokenizer.letters(token): mark for token, mark in self._marks.items()}

        def marked(text: str) -> str:
            for marker, mark in marks.items():
                text = text.replace(marker, mark)
            return text

        form = self.form
        before, behind, end = map(marked, form.parameter)
        return replace(form, trigger=marked(form.trigger), markers=tuple(map(marked, form.markers)),
                       opening=marked(form.opening), middle=marked(form.middle), closing=marked(form.closing),
                       begin=marked(form.begin), between=marked(form.between), end=marked(form.end),
                       parameter=(before, behind, end))


class _MarkedReader:
    """A reader of answers without thinking: all of them is content."""

    def __init__(self, tokenizer: Tokenizer, marks: Mapping[int, str]) -> None:
        self._marker = TokenMarker(tokenizer, marks) if marks else None

    def push(self, tokens: Sequence[int], text: str) -> ChannelText:
        return ChannelText("", self._marker.add_marks(tokens, text) if self._marker else text)

    def finish(self) -> ChannelText:
        return ChannelText("", "")


class _Ids:
    """Ids of calls: a function of the prompt, the seed, and the tokens before the call."""

    def __init__(self, prompt: Sequence[int], seed: int | None, *, is_short: bool) -> None:
        self._hash = hashlib.blake2b(json.dumps([seed, *prompt]).encode(), digest_size=12)
        self._is_short = is_short

    def push(self, tokens: Sequence[int]) -> None:
        self._hash.update("".join(f",{token}" for token in tokens).encode())

    def new(self, index: int) -> str:
        own = self._hash.copy()
        own.update(f";{index}".encode())
        return own.hexdigest()[:9] if self._is_short else f"call_{own.hexdigest()}"


class ToolReader:
    """The parts of one answer. parser, ids: None for an answer without calls"""

    def __init__(self, inner: AnswerReader, parser: _CallParser | None, ids: _Ids | None) -> None:
        self._inner, self._parser, self._ids = inner, parser, ids
        self._num_calls = 0

    def push(self, tokens: Sequence[int], text: str) -> list[Part]:
        """The new parts. text: what the stream returned for these tokens, one at a time for the order of the parts"""
        if self._ids:
            self._ids.push(tokens)
        return self._parts(self._inner.push(tokens, text))

    def read(self, events: Sequence[Event], *, is_end: bool) -> list[Part]:
        """The parts of new events. is_end: the answer ends with them"""
        parts: list[Part] = []
        for event in events:
            for token, piece in zip(event.tokens, event.pieces, strict=True):
                parts += self.push([token], piece)
        return joined(parts + (self.finish() if is_end else []))

    def finish(self) -> list[Part]:
        """The parts that were held back, at the end of the answer."""
        parts = self._parts(self._inner.finish())
        return parts + (self._named(self._parser.finish()) if self._parser else [])

    def _parts(self, text: ChannelText) -> list[Part]:
        thought = [Part("thought", text.reasoning)] if text.reasoning else []
        if self._parser is None:
            return thought + ([Part("text", text.content)] if text.content else [])
        return thought + self._named(self._parser.push(text.content))

    def _named(self, parts: list[Part]) -> list[Part]:
        """The parts, with an id for each call."""
        named = []
        for part in parts:
            if part.kind == "call":
                assert self._ids, "a parser of calls has ids for them"
                part = part._replace(id=self._ids.new(self._num_calls))
                self._num_calls += 1
            named.append(part)
        return named


class _Converter(Protocol):
    """Reads the arguments of one call."""

    is_ended: bool

    def push(self, text: str) -> tuple[str, str]:
        """The next JSON of the arguments, and the text behind them."""


class _CallParser:
    """Divides the content of an answer into text and calls. form: with marks for its silent markers"""

    def __init__(self, form: ToolForm, tools: ToolRequest) -> None:
        self._form = form
        self._tools = {tool.name: tool for tool in tools.callable}
        self._has_text = not tools.is_required
        self._held = ""
        self._state: Literal["text", "opening", "name", "arguments", "behind"] = "text"
        self._is_start = True  # nothing of the content was shown
        self._arguments: _Converter = _JsonArguments()

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The text that was held back. What is held of a call is not complete and is left out."""
        held, self._held = self._held, ""
        return [Part("text", held)] if self._state == "text" and self._has_text and held else []

    def _step(self, parts: list[Part]) -> bool:
        """Read what is certain; False where more text is needed."""
        if not self._held:
            return False
        if self._state == "text":
            return self._read_text(parts)
        if self._state == "opening":
            return self._read_opening(self._form.begin + self._form.opening)
        if self._state == "name":
            return self._read_name(parts)
        if self._state == "arguments":
            new, self._held = self._arguments.push(self._held)
            if new:
                parts.append(Part("arguments", new))
            self._state = "behind" if self._arguments.is_ended else "arguments"
            return self._arguments.is_ended
        _, opening, behind = self._held.partition(self._form.opening)
        self._held = behind if opening else self._held[-len(self._form.opening) :]
        self._state = "name" if opening else "behind"
        return bool(opening)

    def _read_text(self, parts: list[Part]) -> bool:
        held, trigger, gap = self._held, self._form.trigger, self._form.gap
        separator = "" if self._is_start else gap
        if self._is_start and held.startswith(trigger):
            position = 0
        else:
            separator = gap
            position = -1 if gap is None else held.find(gap + trigger)
        if position >= 0:
            self._show(parts, held[:position])
            self._held, self._state = held[position + len(separator or "") :], "opening"
            return True
        shown = len(held) - (0 if gap is None else begun_length(held, gap + trigger))
        self._show(parts, held[: 0 if self._is_start and trigger.startswith(held) else shown])
        return False

    def _show(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Part("text", text))
            self._held, self._is_start = self._held[len(text) :], False

    def _read_opening(self, opening: str) -> bool:
        """The fixed text before the first name. What a grammar did not write may be something else, and is text."""
        if self._held.startswith(opening):
            self._held, self._state = self._held.removeprefix(opening), "name"
            return True
        if opening.startswith(self._held):
            return False
        self._state, self._is_start = "text", False
        return True

    def _read_name(self, parts: list[Part]) -> bool:
        name, middle = self._name()
        if name is None:
            return False
        parts.append(Part("call", name))
        self._held, self._state = self._held[len(name) + len(middle) :], "arguments"
        schema = self._tools[name].parameters if name in self._tools else {}
        self._arguments = (_XmlArguments(self._form, schema) if self._form.style == "xml" else
                           _GemmaArguments(self._form) if self._form.style == "gemma" else _JsonArguments())
        return True

    def _name(self) -> tuple[str | None, str]:
        """The name that the held text begins with, and the text behind it; None: it is not complete."""
        form = self._form
        ends = [form.middle] if form.middle else ["{"] if form.style == "gemma" else [form.parameter[0], form.closing]
        positions = [(position, end) for end in ends if (position := self._held.find(end)) >= 0]
        if not positions:
            return None, ""
        position, end = min(positions)
        return self._held[:position], end if form.middle else ""


class _JsonArguments:
    """Arguments that are JSON: they end with the object."""

    def __init__(self) -> None:
        self.is_ended = False
        self._depth = 0
        self._is_text = self._is_escaped = False

    def push(self, text: str) -> tuple[str, str]:
        for count, letter in enumerate(text, 1):
            if self._is_text:
                self._is_text = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._is_text = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_ended = True
                    return text[:count], text[count:]
        return text, ""


class _XmlArguments:
    """Parameters between tags. A text is written as it is, where the schema allows texts; all else is JSON."""

    def __init__(self, form: ToolForm, schema: Mapping[str, Any]) -> None:
        self.is_ended = False
        self._before, self._behind, self._end = form.parameter
        self._closing = form.closing
        self._schema = schema
        self._begun = ""  # JSON before the next name
        self._is_text: bool | None = None  # of the value that is being read; None: there is none

    def push(self, text: str) -> tuple[str, str]:
        new = "" if self._begun else "{"
        self._begun = self._begun or "{"
        while True:
            if self._is_text is None:
                if text.startswith(self._closing):
                    self.is_ended = True
                    return f"{new}}}", text[len(self._closing) :]
                name, behind, rest = text.removeprefix(self._before).partition(self._behind)
                if not text.startswith(self._before) or not behind:
                    return new, text
                separator = "" if self._begun == "{" else ", "
                self._begun, text = "{ ", rest
                schema = properties_of(self._schema).get(name, True)
                self._is_text = takes_text(schema, self._schema)
                quote = '"' if self._is_text else ""
                new += f"{separator}{json.dumps(name, ensure_ascii=False)}: {quote}"
            value, end, rest = text.partition(self._end)
            if not end:
                held = begun_length(text, self._end)
                value, rest = text[: len(text) - held], text[len(text) - held :]
            new += json.dumps(value, ensure_ascii=False)[1:-1] if self._is_text else value
            if not end:
                return new, rest
            new += '"' if self._is_text else ""
            text, self._is_text = rest, None


class _GemmaArguments:
    """Gemma 4's objects: texts have marks of their own, and keys have no quotes."""

    def __init__(self, form: ToolForm) -> None:
        self.is_ended = False
        self._quote = form.markers[-1]
        self._levels: list[str] = []  # { or [ of each open level
        self._is_text = self._is_key = False
        self._expects_key = False  # within an object, before the next name

    def push(self, text: str) -> tuple[str, str]:
        new = []
        while text:
            if self._is_text:
                value, quote, rest = text.partition(self._quote)
                if not quote:
                    held = begun_length(text, self._quote)
                    value, rest = text[: len(text) - held], text[len(text) - held :]
                new.append(json.dumps(value, ensure_ascii=False)[1:-1])
                text = rest
                if not quote:
                    break
                new.append('"')
                self._is_text = False
                continue
            if text.startswith(self._quote):
                new.append('"')
                text, self._is_text = text[len(self._quote) :], True
                continue
            if self._quote.startswith(text):
                break
            letter, text = text[0], text[1:]
            new.append(self._punctuated(letter))
            if not self._levels:
                self.is_ended = True
                break
        return "".join(new), text

    def _punctuated(self, letter: str) -> str:
        """One character outside of texts, as JSON has it."""
        if letter in "{[":
            self._levels.append(letter)
            self._expects_key = letter == "{"
            return letter
        if letter in "}]":
            self._levels.pop()
            self._expects_key = False
            return letter
        if letter == ",":
            self._expects_key = self._levels[-1] == "{"
            return ", "
        if letter == ":" and self._is_key:
            self._is_key = False
            return '": '
        if self._expects_key:
            self._expects_key, self._is_key = False, True
            return f'"{letter}'
        return letter
