"""The grammar of an answer that may call functions, in llguidance's notation (longdraft/sampling/grammar.py).

    structure = ToolGrammar(form, tokenizer, thinking).structure(tools)     # ("tools", text), for SamplingParams

    start: thought? answer
    answer: TEXT? | (text gap)? calls         "auto"
    answer: calls                             "required"
    answer: TEXT?                             "none"

Where the prompt opens the thought, or rules end it, the grammar begins behind it, and has no thought.

A marker that is one token ends a text by itself. A marker of several tokens is text; it ends the text where it is
complete, so that no answer has a part of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longdraft.errors import UsageError
from longdraft.request.structured import MAX_STRUCTURE, Structure, escaped
from longdraft.request.tools import Tool, ToolRequest, closed_schema
from longdraft.sampling.grammar import embedded
from longdraft.text.thinking import AnswerFormat, ThinkingTags
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.forms import GEMMA_QUOTE, HARMONY, ToolForm

# The spelling of Python's json.dumps, which chat templates have: needed escapes only.
_CANONICAL = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False,
              "json_allowed_escapes": 'nrbtf"\\'}
_ANY = r"(.|\n)*"
_MAX_COUNTED = 1000  # characters or items that a grammar counts: it has a state for each
_MAX_LEVELS = 16  # of values that a schema leaves open, in forms whose grammar is written here


@dataclass(frozen=True)
class ToolGrammar:
    """The grammars of one model. thinking: how its answers show their thinking; None: they show none"""

    form: ToolForm
    tokenizer: Tokenizer
    thinking: AnswerFormat | None = None

    def structure(self, tools: ToolRequest, answer: Structure | tuple[str, ...] = (), *, is_behind: bool = False
                  ) -> Structure:
        """The grammar of an answer.

        answer     what a text must match, if it is not free
        is_behind  the grammar begins behind the thought, which the prompt opens, or which is under rules
                   (longdraft/sampling/thought.py)
        """
        rules = _Rules(self.tokenizer, self.form.markers)
        if answer and answer[0] != "json":  # the other notations are translated in a process with limits
            raise UsageError(f"structured_outputs is a {answer[0]}, and the request has tools; allowed beside tools: a "
                             "JSON schema", "structured_outputs")
        write = self._channels if self.form is HARMONY else self._tagged
        write(rules, tools, answer, is_behind)
        return "tools", rules.text

    def _tagged(self, rules: _Rules, tools: ToolRequest, answer: Structure | tuple[str, ...], is_behind: bool) -> None:
        form, tags = self.form, self.thinking.texts if isinstance(self.thinking, ThinkingTags) else None
        thought = ""
        excluded = []
        if tags is not None:
            opening, closing = tags
            rules.markers.update(rules.tokens_of(tags))
            rules.add("BLANK", r"/\n{1,2}/")
            thought = "BLANK? " if is_behind else "thought? "
            if not is_behind:
                rules.add("thought", f"BREAK? {rules.literal(opening)} {rules.until(closing)} BLANK?")
                rules.add("BREAK", r"/\n/")
            if opening not in rules.markers:
                excluded.append(escaped(opening))
        rules.add("start", f"{thought}answer")
        is_token = form.trigger in rules.markers
        optional = "" if form.has_gap_always else "?"
        before = "" if form.gap is None else f"({_ANY}{escaped(form.gap)}){optional}"
        trigger = f"{before}{escaped(form.trigger)}"
        if not is_token:
            excluded.append(trigger)
            if form.lead:  # its white space may be behind a thought
                excluded.append(escaped(form.lead.lstrip() + form.trigger))
        rules.add("TEXT", " & ".join([f"/{_ANY}/", *(f"~/{each}{_ANY}/" for each in excluded)]))
        if answer:
            rules.add("free", embedded(answer[0], answer[1]))
        text = "free" if answer else "TEXT?"
        if not tools.callable:
            rules.add("answer", text)
            return
        if tools.is_required:
            rules.add("answer", self._calls(rules, tools, ""))
            return
        if answer or (is_token and form.gap is None):
            with_calls = self._calls(rules, tools, "")
        elif is_token:
            if form.gap:
                rules.add("TEXT_BEFORE", f"/{_ANY}{escaped(form.gap)}/")
            text_before = f"TEXT_BEFORE{optional}" if form.gap else "TEXT?"
            with_calls = f"{text_before} {self._calls(rules, tools, form.lead)}"
        else:
            own = [each for each in excluded if each != trigger]
            rules.add("head[lazy]", " & ".join([f"/{trigger}/", *(f"~/{each}{_ANY}/" for each in own)]))
            with_calls = f"head {self._calls(rules, tools, form.lead + form.trigger)}"
        rules.add("answer", f"{text} | {with_calls}")

    def _calls(self, rules: _Rules, tools: ToolRequest, written: str) -> str:
        """The calls. written: their beginning, which was read already"""
        form = self.form
        names = [rules.rule(self._call(rules, tool)) for tool in tools.callable]
        rules.add("call", " | ".join(names))
        first = rules.literal(f"{form.lead}{form.begin}{form.opening}".removeprefix(written))
        more = ""
        if tools.is_parallel and not form.is_single:
            more = f" ({rules.literal(form.between + form.opening)} call)*"
        return f"{first} call{more} {rules.literal(form.end)}"

    def _call(self, rules: _Rules, tool: Tool) -> str:
        """One call, from its name on."""
        form, head = self.form, f"{tool.name}{self.form.middle}"
        if form.style == "xml":
            parts = " ".join(_parameters(rules, form, tool))
            if form.empty and not any(name in (tool.parameters.get("required") or ())
                                      for name in properties_of(tool.parameters)):
                parts = f"({parts} | {rules.literal(form.empty)})" if parts else rules.literal(form.empty)
            return f"{rules.literal(head)} {parts} {rules.literal(form.closing)}"
        if form.style == "keywords":
            required = tool.parameters.get("required") or ()
            members = [(f"{rules.literal(f'{name}=')} {_value(rules, tool, schema)}", name in required)
                       for name, schema in properties_of(tool.parameters).items()]
            return f"{rules.literal(head)} {_separated(rules, members, ', ')} {rules.literal(form.closing)}"
        if form.style == "gemma":
            return f"{rules.literal(head)} {_Gemma(rules, tool).value(tool.parameters)} " + rules.literal(
                form.closing)
        closing = ', "id": "' if form.has_short_ids and form.closing else ""
        end = f"{rules.literal(closing)} /[A-Za-z0-9]{{9}}/ {rules.literal(chr(34) + form.closing)}" if closing else (
            rules.literal(form.closing))
        return f"{rules.literal(head)} {rules.rule(_json(tool.parameters, is_strict=tool.is_strict))} {end}"

    def _channels(self, rules: _Rules, tools: ToolRequest, answer: Structure | tuple[str, ...], is_behind: bool
                  ) -> None:
        """OpenAI's harmony format. The recipient of a call is before or behind its channel."""
        rules.markers.update(rules.tokens_of(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")))
        rules.add("TEXT", f"/{_ANY}/")
        more = rules.literal("<|end|><|start|>assistant")
        if not is_behind:
            rules.add("thought", f"{rules.literal('<|channel|>analysis<|message|>')} TEXT? {more}")
            rules.add("preamble", f"{rules.literal('<|channel|>commentary<|message|>')} TEXT? {more}")
        if answer:
            rules.add("free", embedded(answer[0], answer[1]))
        rules.add("final", f"{rules.literal('<|channel|>final<|message|>')} {'free' if answer else 'TEXT?'}")
        calls = []
        for tool in tools.callable:
            arguments = rules.rule(_json(tool.parameters, is_strict=tool.is_strict))
            for header in (f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>",
                           f" to=functions.{tool.name}<|channel|>commentary json<|message|>"):
                calls.append(rules.rule(f"{rules.literal(header)} {arguments}"))
        if calls:
            rules.add("call", " | ".join(calls))
        before = "thought*" if tools.is_required else "(thought | preamble)*"
        if is_behind:  # without a thought, the prompt has the beginning of the message
            before = f"({rules.literal('<|start|>assistant')})?"
        last = "call" if tools.is_required else "(final | call)" if calls else "final"
        rules.add("start", f"{before} {last}")


@dataclass
class _Rules:
    """The rules so far. markers: ids of texts that are one token, which a grammar names by its id"""

    tokenizer: Tokenizer
    texts: Sequence[str]
    markers: dict[str, int] = field(init=False)
    lines: list[str] = field(default_factory=list)
    length: int = 0  # characters of all rules
    names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.markers = self.tokens_of(self.texts)

    def tokens_of(self, texts: Sequence[str]) -> dict[str, int]:
        """The ids of texts that llguidance sees as tokens without a text: special ones, and those in angle brackets."""
        return {text: token for text in texts if (token := self.tokenizer.added_tokens.get(text)) is not None
                and (self.tokenizer.is_silent(token) or (text.startswith("<") and text.endswith(">")))}

    @property
    def text(self) -> str:
        return "\n".join([*self.lines, ""])

    def add(self, name: str, body: str) -> None:
        self.length += len(body)
        if self.length > MAX_STRUCTURE:
            raise UsageError(f"tools: the grammar of the functions has more than {MAX_STRUCTURE:,} characters; give "
                             "fewer functions, or smaller schemas", "tools")
        self.lines.append(f"{name}: {body}")

    def rule(self, body: str) -> str:
        """The name of a rule with this body."""
        if (name := self.names.get(body)) is None:
            name = self.names[body] = f"r{len(self.names)}"
            self.add(name, body)
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, its markers as tokens."""
        if not text:
            return ""
        pattern = "|".join(map(re.escape, sorted(self.markers, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(f"<[{self.markers[part]}]>" if part in self.markers else json.dumps(part, ensure_ascii=False)
                        for part in parts if part)

    def until(self, end: str, text: str = _ANY) -> str:
        """A text up to `end`, and `end`. text: a regular expression of it"""
        places = {place: marker for marker in self.markers if (place := end.find(marker)) >= 0}
        if places:  # it ends the text, which has what is before it
            before = end[: min(places)]
            optional = "" if before else "?"
            return f"/{text}{escaped(before)}/{optional} {self.literal(end[len(before) :])}"
        body = f"/{text}{escaped(end)}/"
        if (name := self.names.get(body)) is None:
            name = self.names[body] = f"r{len(self.names)}"
            self.add(f"{name}[lazy]", body)
        return name


def _json(schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """The canonical JSON of a schema. is_strict: keywords that the engine lacks are refused, not left out"""
    options = {**_CANONICAL, "lenient": not is_strict, "coerce_one_of": True}
    return f"%json {json.dumps({**closed_schema(schema), 'x-guidance': options})}"


def _parameters(rules: _Rules, form: ToolForm, tool: Tool) -> list[str]:
    """The parameters of a call, in the order of the schema. Texts are written as they are, all else as JSON."""
    before, behind, end = form.parameter
    required = tool.parameters.get("required") or ()
    parts = []
    for name, schema in properties_of(tool.parameters).items():
        is_text = takes_text(schema, tool.parameters)
        if is_text:
            values = schema.get("enum") if isinstance(schema, Mapping) else None
            is_listed = isinstance(values, list) and values and all(isinstance(each, str) for each in values)
            value = f"({' | '.join(rules.literal(each + end) for each in values)})" if is_listed and values else (
                rules.until(end, _text_of(schema, is_strict=tool.is_strict)))
        else:
            value = f"{_value(rules, tool, schema)} {rules.literal(end)}"
        opening = f"{before}{name}{behind if is_text else form.json_behind or behind}"
        part = rules.rule(f"{rules.literal(opening)} {value}")
        parts.append(part if name in required else f"{part}?")
    return parts


def _value(rules: _Rules, tool: Tool, schema: Any) -> str:
    """The rule of the JSON of one property."""
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return rules.rule(_json({**schema, **shared} if isinstance(schema, Mapping) else schema, is_strict=tool.is_strict))


def _separated(rules: _Rules, members: Sequence[tuple[str, bool]], separator: str) -> str:
    """Members in their order, with a separator between them. members: rules, and whether each is needed"""
    first: list[str] = []  # what they may begin with
    rest = ""  # what may follow a member
    for member, is_required in reversed(members):
        begun = rules.rule(f"{member} {rest}")
        first = [begun] if is_required else [begun, *first]
        rest = rules.rule(f"({rules.literal(separator)} {member}){'' if is_required else '?'} {rest}")
    is_needed = any(is_required for _, is_required in members)
    return f"({' | '.join(first)}){'' if is_needed else '?'}" if members else ""


def _text_of(schema: Any, *, is_strict: bool) -> str:
    """The regular expression of a text that is written as it is. UsageError for what this form cannot demand."""
    schema = schema if isinstance(schema, Mapping) else {}
    unknown = next((word for word in ("pattern", "format") if word in schema), None)
    low, high = (schema.get(word) for word in ("minLength", "maxLength"))
    if is_strict and unknown:
        raise UsageError(f"tools: a schema has {unknown}, which calls of this model cannot follow; leave it out, or "
                         "set strict to false", "tools")
    if not any(isinstance(each, int) and 0 <= each <= _MAX_COUNTED for each in (low, high)):
        return _ANY
    counts = [str(each) if isinstance(each, int) and 0 <= each <= _MAX_COUNTED else "" for each in (low, high)]
    return rf"(.|\n){{{counts[0] or 0},{counts[1]}}}"


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The properties of a schema of an object, by their names."""
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def takes_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Whether a schema allows a text."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return schema is True
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return any(takes_text(each, root) for each in schema[word])
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return any(isinstance(each, str) for each in values)
    return kind is None or "string" in (kind if isinstance(kind, list) else [kind])


def resolved(schema: Any, root: Mapping[str, Any], levels: int = _MAX_LEVELS) -> Any:
    """The schema that a reference within `root` names, or the schema itself."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or levels == 0:
        return schema
    target: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        target = target.get(part, True) if isinstance(target, Mapping) else True
    return resolved(target, root, levels - 1)


class _Gemma:
    """Values as Gemma 4 writes them: texts in <|"|>, keys without quotes and in alphabetical order."""

    def __init__(self, rules: _Rules, tool: Tool) -> None:
        self._rules, self._root, self._is_strict = rules, tool.parameters, tool.is_strict
        self._references: dict[str, str] = {}

    def value(self, schema: Any) -> str:
        """The name of a rule for a schema."""
        if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            reference = schema["$ref"]
            if reference not in self._references:  # named before it is written: it may contain itself
                self._references[reference] = f"g{len(self._references)}"
                self._rules.add(self._references[reference], self._body(resolved(schema, self._root)))
            return self._references[reference]
        return self._rules.rule(self._body(schema))

    def _body(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._any()
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                return " | ".join(self.value(each) for each in schema[word])
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return " | ".join(self._rules.literal(gemma_text(each)) for each in values)
        kinds = schema.get("type")
        if kinds is None and "properties" in schema:
            kinds = "object"
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return " | ".join(self._kind(kind, schema) for kind in kinds)

    def _kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            text = _text_of(schema, is_strict=self._is_strict)
            return f"{self._rules.literal(GEMMA_QUOTE)} {self._rules.until(GEMMA_QUOTE, text)}"
        if kind in ("integer", "number", "boolean", "null"):
            return self._rules.rule(_json({**schema, "type": kind}, is_strict=self._is_strict))
        if kind == "array":
            item = self.value(schema.get("items", True))
            low, high = (each if isinstance(each, int) and 0 <= each <= _MAX_COUNTED else None
                         for each in (schema.get("minItems"), schema.get("maxItems")))
            if high == 0:
                return '"[]"'
            more = f'("," {item}){{{max(0, (low or 0) - 1)},{"" if high is None else high - 1}}}'
            return f'"[" {item} {more} "]"' if low else f'"[" ({item} {more})? "]"'
        if kind == "object":
            return self._object(schema)
        return self._any()

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Members in alphabetical order. Each has a comma before it, unless it is the first."""
        members = sorted(properties_of(schema).items())
        if not members:
            return '"{}"' if schema.get("additionalProperties") in (None, False) or "properties" in schema else (
                f'"{{" ({self._member()} ("," {self._member()})*)? "}}"')
        required = schema.get("required") or ()
        rules = [(self._rules.rule(f"{self._rules.literal(f'{name}:')} {self.value(each)}"), name in required)
                 for name, each in members]
        return f'"{{" {_separated(self._rules, rules, ",")} "}}"'

    def _member(self) -> str:
        return f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self._any()}'

    def _any(self) -> str:
        """Any value, of one level: texts, numbers, and lists of them."""
        quote, text = self._rules.literal(GEMMA_QUOTE), self._rules.until(GEMMA_QUOTE)
        plain = self._rules.rule(f'{quote} {text} | /-?(0|[1-9][0-9]*)(\\.[0-9]+)?/ | "true" | "false" | "null"')
        return self._rules.rule(f'{plain} | "[" ({plain} ("," {plain})*)? "]"')


def gemma_text(value: Any) -> str:
    """A value as Gemma 4's template writes it."""
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{gemma_text(each)}" for name, each in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return json.dumps(value)
