"""Chat templates: from messages to the text a chat model expects, as transformers renders it.

    ChatTemplate.find(folder).render([{"role": "user", "content": "Hello"}], enable_thinking=False)

A template comes with the model, so it is foreign code: it runs in jinja's sandbox and sees plain data only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longdraft.errors import ModelError, UsageError
from longdraft.model.config import read_json

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
_NAME = "default"  # of the template that is taken where a model has several
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OURS = ("messages", "add_generation_prompt", "tools", "documents")
_OPENED = re.compile(r"<(?P<tag>think|thinking|reasoning)>\s*\Z")


class ChatTemplate:
    """One model's template with the special tokens it may write."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = tokens
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._names = meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    @classmethod
    def find(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder, where it has one: a file of its own wins over the tokenizer's settings."""
        settings = _settings(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        found: object = settings.get("chat_template") or _settings(folder / "chat_template.json").get("chat_template")
        if file.is_file():
            try:
                found = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ModelError(f"cannot read {file}: {error}") from error
        if not found:
            return None
        return cls(_chosen(found), _special_tokens(_settings(folder / "special_tokens_map.json") | settings))

    @property
    def options(self) -> list[str]:
        """The variables that a request may set."""
        return sorted(self._names - set(_OURS) - set(_TOKENS))

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The prompt, ready for the answer. UsageError for options it does not have and messages it refuses."""
        unknown = next((name for name in options if name not in self.options), None)
        if unknown is not None:
            raise UsageError(f"the model's chat template has no variable {unknown!r}; "
                             f"it has: {', '.join(self.options) or 'none'}")
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=True, tools=None, documents=None,
                                         **self._tokens, **options)
        except _RefusedError as error:
            raise UsageError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # a foreign program may fail in any way
            raise ModelError(f"the model's chat template fails: {type(error).__name__}: {error}") from error


def opened_thinking(prompt: str) -> str:
    """What a template has already written of the answer: `<think>` and the space behind it, or nothing."""
    found = _OPENED.search(prompt)
    return found.group() if found else ""


def parse_option(text: str) -> Any:
    """The value of a `--chat-option`: JSON where it reads as JSON (true, 3, null), else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


class _RefusedError(TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """jinja's own filter escapes for HTML, which models have not been trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _chosen(found: object) -> str:
    """A template is a text, or a list of named ones."""
    if isinstance(found, list) and all(isinstance(entry, dict) and "name" in entry for entry in found):
        named = {entry["name"]: entry.get("template") for entry in found}
        if _NAME not in named:
            raise ModelError(f"the model has the chat templates {', '.join(map(str, named))}, and none is named "
                             f"{_NAME!r}; put the one to use into chat_template.jinja in its folder")
        found = named[_NAME]
    if not isinstance(found, str):
        raise ModelError(f"chat_template holds a {type(found).__name__}; allowed: a text, or a list of named texts")
    return found


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Those the model has; a template may ask whether one is defined."""
    values = ((name, settings.get(name)) for name in _TOKENS)
    texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in values)
    return {name: text for name, text in texts if isinstance(text, str)}


def _settings(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
