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
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

from longdraft.request.events import Event, Finish
from longdraft.request.tools import ToolRequest
from longdraft.text.harmony import ARGUMENTS_MARK, CALL_MARK, ChannelText, Harmony
from longdraft.text.stream import TokenMarker
from longdraft.text.thinking import AnswerFormat, AnswerReader, ThinkingTags, begun_length
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.forms import ToolForm
from longdraft.text.tools.grammar import properties_of, takes_text

# Special tokens have no text: these halves of surrogate pairs, which no decoded text has, stand for them.
_FIRST_MARK = 0xD820
_WRITTEN_ID = re.compile(r', "id": "[A-Za-z0-9]{9}"')  # of a call, which Mistral's models write


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
    calls: list[tuple[Part, list[str]]] = []
    for part in parts:
        if part.kind == "call":
            calls.append((part, []))
        elif part.kind == "arguments":
            calls[-1][1].append(part.text)
    whole = [Call(call.id, call.text, "".join(arguments)) for call, arguments in calls]
    return WholeAnswer(texts["thought"], texts["text"], whole)


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


def finish_reason_of(end: Finish, tools: ToolRequest | None, *, has_whole_call: bool) -> str:
    """OpenAI's reason for the end of a text. has_whole_call: it has calls, and the last one is complete"""
    if has_whole_call and end in ("eos", "stop"):
        return "function_call" if tools and tools.is_legacy else "tool_calls"
    return "stop" if end == "eos" else end


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
    is_free   no grammar is on: calls that cannot be read are text
    sends_thinking  otherwise answers are read without their thinking
    """

    form: ToolForm
    tokenizer: Tokenizer
    thinking: AnswerFormat | None
    tools: ToolRequest | None
    is_free: bool = False
    sends_thinking: bool = True

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
        parser = None
        if self.tools and self.tools.callable:
            parser = (_FreeCallParser(self._form, self.tools, self._letters) if self.is_free else
                      _CallParser(self._form, self.tools))
        ids = _Ids(prompt, seed, is_short=self.form.has_short_ids) if parser else None
        return ToolReader(inner, parser, ids, sends_thinking=self.sends_thinking)

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

    @property
    def _letters(self) -> dict[str, str]:
        """What the characters in the place of markers stand for."""
        own = {mark: self.tokenizer.letters(token) for token, mark in self._marks.items()}
        return own | {CALL_MARK: "to=functions.", ARGUMENTS_MARK: " "}

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

    def __init__(self, inner: AnswerReader, parser: _CallParser | None, ids: _Ids | None, *, sends_thinking: bool
                 ) -> None:
        self._inner, self._parser, self._ids = inner, parser, ids
        self._sends_thinking = sends_thinking
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
        thought = [Part("thought", text.reasoning)] if text.reasoning and self._sends_thinking else []
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


_State = Literal["text", "opening", "name", "arguments", "behind"]


class _CallParser:
    """Divides the content of an answer into text and calls. form: with marks for its silent markers"""

    def __init__(self, form: ToolForm, tools: ToolRequest, state: _State = "text") -> None:
        self._form = form
        self._tools = {tool.name: tool for tool in tools.callable}
        self._has_text = not tools.is_required
        self._held = ""
        self._state = state
        self._is_start = True  # nothing of the content was shown
        self._separator = ""  # between the text and the trigger
        self._skipped = ""  # of what is behind the arguments of calls
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
            return self._read_opening(self._form.begin + self._form.opening, parts)
        if self._state == "name":
            return self._read_name(parts)
        if self._state == "arguments":
            new, self._held = self._arguments.push(self._held)
            if new:
                parts.append(Part("arguments", new))
            self._state = "behind" if self._arguments.is_ended else "arguments"
            return self._arguments.is_ended
        following = self._form.opening or self._form.between
        before, opening, behind = self._held.partition(following)
        kept = behind if opening else self._held[-len(following) :]
        self._skipped += before if opening else self._held[: len(self._held) - len(kept)]
        self._held, self._state = kept, "name" if opening else "behind"
        return bool(opening)

    def _read_text(self, parts: list[Part]) -> bool:
        held, trigger, gap = self._held, self._form.trigger, self._form.gap
        lead = self._form.lead.lstrip()  # at the start, where its white space may be behind a thought
        if self._is_start and held.startswith(lead + trigger):
            position, self._separator = 0, lead
        else:
            position, self._separator = -1 if gap is None else held.find(gap + trigger), gap or ""
        if position >= 0:
            self._show(parts, held[:position])
            self._held, self._state = held[position + len(self._separator) :], "opening"
            return True
        shown = len(held) - (0 if gap is None else begun_length(held, gap + trigger))
        self._show(parts, held[: 0 if self._is_start and (lead + trigger).startswith(held) else shown])
        return False

    def _show(self, parts: list[Part], text: str) -> None:
        if text:
            parts.append(Part("text", text))
            self._held, self._is_start = self._held[len(text) :], False

    def _read_opening(self, opening: str, parts: list[Part]) -> bool:
        """The fixed text before the first name. What a grammar did not write may be something else, and is text."""
        if self._held.startswith(opening):
            self._held, self._state = self._held.removeprefix(opening), "name"
            return True
        if opening.startswith(self._held):
            return False
        self._give_up(parts)
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """The trigger is text."""
        self._state, self._is_start = "text", False
        parts.append(Part("text", self._separator + self._form.trigger))
        self._held = self._held.removeprefix(self._form.trigger)

    def _read_name(self, parts: list[Part]) -> bool:
        name, middle = self._name()
        if name is None:
            return False
        parts.append(Part("call", name))
        self._held, self._state = self._held[len(name) + len(middle) :], "arguments"
        schema = self._tools[name].parameters if name in self._tools else {}
        styles: dict[str, Callable[[], _Converter]] = {
            "json": _JsonArguments, "xml": lambda: _XmlArguments(self._form, schema),
            "gemma": lambda: _GemmaArguments(self._form), "keywords": _KeywordArguments}
        self._arguments = styles[self._form.style]()
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


class _FreeCallParser(_CallParser):
    """Divides the content of an answer that no grammar restricted. Calls are shown at its end, where all that is behind
    the text can be read as calls of the request's functions; otherwise it is text.

    letters  what the form's marks stand for, in text
    """

    def __init__(self, form: ToolForm, tools: ToolRequest, letters: Mapping[str, str]) -> None:
        super().__init__(form, tools)
        self._request, self._letters = tools, str.maketrans(dict(letters))

    def push(self, text: str) -> list[Part]:
        return self._lettered(super().push(text))

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._state != "text":
            if calls := self._calls():
                return self._lettered(parts) + calls
            self._give_up(parts)
            while self._step(parts):
                pass
        return self._lettered(parts + super().finish())

    def _step(self, parts: list[Part]) -> bool:
        """Hold what may be calls."""
        return self._state == "text" and super()._step(parts)

    def _calls(self) -> list[Part]:
        """The calls in the held text; none if it is not as the form has them."""
        reader, form = _CallParser(self._form, self._request, "opening"), self._form
        parts = reader.push(self._held)
        calls = put_together(parts).calls
        closing = form.closing if form.style in ("json", "gemma") else ""  # others end with it
        between = form.between if form.opening else ""
        expected = f"{closing}{between}" * (len(calls) - 1) + closing + form.end
        skipped = _WRITTEN_ID.sub("", reader._skipped + reader._held)
        is_read = reader._state == "behind" and all(part.kind in ("call", "arguments") for part in parts)
        is_valid = is_read and skipped.rstrip() == expected.rstrip() and all(
            call.name in self._tools and _is_object(call.arguments) for call in calls)
        return parts if is_valid else []

    def _lettered(self, parts: list[Part]) -> list[Part]:
        return [part._replace(text=part.text.translate(self._letters)) if part.kind == "text" else part
                for part in parts]


def _is_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class _JsonArguments:
    """Arguments that are JSON: they end with the object. ends: characters that a value ends before instead"""

    def __init__(self, ends: str = "") -> None:
        self.is_ended = False
        self._ends = ends
        self._depth = 0
        self._is_text = self._is_escaped = False

    def push(self, text: str) -> tuple[str, str]:
        for count, letter in enumerate(text):
            if self._is_text:
                self._is_text = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._is_text = True
            elif letter in self._ends and not self._depth:
                self.is_ended = True
                return text[:count], text[count:]
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not (self._depth or self._ends):
                    self.is_ended = True
                    return text[: count + 1], text[count + 1 :]
        return text, ""


class _XmlArguments:
    """Parameters between tags. A text is written as it is, where the schema allows texts; all else is JSON."""

    def __init__(self, form: ToolForm, schema: Mapping[str, Any]) -> None:
        self.is_ended = False
        self._before, behind, self._end = form.parameter
        # What is behind a name, and whether a text follows; None: as the schema says.
        self._kinds = ((behind, True), (form.json_behind, False)) if form.json_behind else ((behind, None),)
        self._closings = (form.closing, form.empty + form.closing)
        self._schema = schema
        self._begun = ""  # JSON before the next name
        self._is_text: bool | None = None  # of the value that is being read; None: there is none

    def push(self, text: str) -> tuple[str, str]:
        new = "" if self._begun else "{"
        self._begun = self._begun or "{"
        while True:
            if self._is_text is None:
                if closing := next((each for each in self._closings if text.startswith(each)), ""):
                    self.is_ended = True
                    return f"{new}}}", text[len(closing) :]
                heads = [(*text.removeprefix(self._before).partition(behind), kind) for behind, kind in self._kinds]
                name, behind, rest, is_text = min(heads, key=lambda head: len(head[0]))
                if not text.startswith(self._before) or not behind:
                    return new, text
                separator = "" if self._begun == "{" else ", "
                self._begun, text = "{ ", rest
                schema = properties_of(self._schema).get(name, True)
                self._is_text = takes_text(schema, self._schema) if is_text is None else is_text
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


class _KeywordArguments:
    """Arguments as Python has them, key=JSON, up to the closing parenthesis."""

    def __init__(self) -> None:
        self.is_ended = False
        self._num_names = 0
        self._value: _JsonArguments | None = None  # that is being read

    def push(self, text: str) -> tuple[str, str]:
        new = ""
        while text and not self.is_ended:
            if self._value is not None:
                value, text = self._value.push(text)
                new += value
                self._value = None if self._value.is_ended else self._value
            elif text.startswith(")"):
                new, text = f"{new}{'' if self._num_names else '{'}}}", text[1:]
                self.is_ended = True
            else:
                name, sign, rest = text.partition("=")
                if not sign:
                    break
                new += f"{', ' if self._num_names else '{'}{json.dumps(name.lstrip(', '), ensure_ascii=False)}: "
                self._num_names, self._value, text = self._num_names + 1, _JsonArguments(",)"), rest
        return new, text


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
