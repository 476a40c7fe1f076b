"""Chat templates: from messages to the prompt that a chat model expects, as `transformers` renders it.

    ChatTemplate.find(folder).render([{"role": "user", "content": "Hello"}], enable_thinking=False)

A template is part of the model and therefore untrusted code: it runs in jinja's sandbox (rendering.py), on plain data,
in a child process with limits of time and memory.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes

from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.errors import LongdraftError, ModelError, UsageError
from longdraft.system.limited import CallError, LimitedProcess, LimitError
from longdraft.text.gguf_vocabulary import template_of
from longdraft.text.rendering import RefusedError, new_environment
from longdraft.text.tokenizer_config import SPECIAL_TOKENS, SideFiles

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
THINKING_SWITCHES = ("enable_thinking", "thinking")  # variables by which families turn a model's thinking on and off
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a message's thought
_DEFAULT_NAME = "default"  # of the template to use if a model has several
# Variables that requests may not set.
_TOOLS = ("tools", "xml_tools")  # names of the list of functions; the second one is SmolLM3's
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "documents", *_TOOLS)
_MARK = "\ue000end of the message\ue001"  # characters for private use, which no text has
_ANSWER = "\ue000answer\ue001"
_MAX_FILE = 1 << 22  # bytes; the largest known templates have some 20,000
_RENDERER = LimitedProcess("longdraft.text.rendering", "renderer")  # of all templates; it keeps those in use compiled


class ChatTemplate:
    """A model's template, with the special tokens that it may use. source: in jinja's language"""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self._tokens = tokens
        try:
            parsed = new_environment().parse(source)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template is invalid: {error}; give another with "
                             "--chat-template FILE") from error
        # Otherwise such messages get the role `system`, which stands for the same in older templates.
        self._knows_developer = any(each.value == "developer" for each in parsed.find_all(nodes.Const))

    @classmethod
    def find(cls, folder: Path, other: Path | None = None, beside: SideFiles | None = None) -> ChatTemplate | None:
        """The template of a model folder or a GGUF file, if it has one. A file of its own overrides
        tokenizer_config.json.

        other   a file whose template is used in place of the model's
        beside  the small files of a folder, if they were read already
        """
        beside = beside or SideFiles(folder)
        if other is not None:
            tokens = template_of(open_gguf(folder))[1] if folder.is_file() else beside.special
            return cls(_text_of(other), tokens)
        if folder.is_file():
            of_file, tokens = template_of(open_gguf(folder))
            return cls(_template_source(of_file), tokens) if of_file else None
        source: object = beside.settings.get("chat_template") or beside.read("chat_template.json").get("chat_template")
        file = folder / "chat_template.jinja"
        if file.is_file():
            source = _text_of(file)
        if not source:
            return None
        return cls(_template_source(source), beside.special)

    def mentions(self, texts: Collection[str]) -> bool:
        """Whether one of the texts is in the template, as such or by the name of a special token."""
        return any(text in self.source for text in texts) or any(
            name in self.source for name, text in self._tokens.items() if text in texts)

    @cached_property
    def options(self) -> list[str]:
        """Names of the template's variables that a request may set."""
        return sorted(self._variables - set(_RESERVED) - set(SPECIAL_TOKENS))

    @property
    def reads_tools(self) -> bool:
        """Whether the template lists the functions that a model may call."""
        return not self._variables.isdisjoint(_TOOLS)

    @cached_property
    def _variables(self) -> frozenset[str]:
        return frozenset(self._run(None).split())

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, /, *,
               add_generation_prompt: bool = True, continue_final_message: bool = False,
               tools: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> str:
        """The prompt for the next answer, or with `continue_final_message` for the rest of the last message.

        variables, options  of the template; the first have any names, such as those of a request
        tools  functions that the model may call, as in OpenAI's requests

        Raises UsageError for unknown variables, and for messages that the template refuses.
        """
        options |= variables or {}
        if continue_final_message:
            return self._render_open(messages, options, tools)
        unknown = next((name for name in options if name not in self.options), None)
        if unknown is not None:
            raise UsageError(f"the model's chat template has no variable {unknown!r}; "
                             f"available: {', '.join(self.options) or 'none'}", "chat_template_kwargs")
        plain = [with_thought({name: value for name, value in message.items() if value is not None})
                 for message in messages]
        if not self._knows_developer:
            plain = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in plain]
        rest = {"add_generation_prompt": add_generation_prompt, **dict.fromkeys(_TOOLS, tools), "documents": None}
        try:
            return self._run({**self._tokens, **options, "messages": plain, **rest})
        except UsageError:
            if (simpler := _with_one_system(plain)) == plain:
                raise
            return self._run({**self._tokens, **options, "messages": simpler, **rest})

    def last_message(self, prompt: str) -> str | None:
        """The user's last message in a prompt, of which the beginning may be left out; None for a prompt that the
        template did not make. prompt: with its special tokens"""
        opening, closing, endings = self._around_messages
        if not opening or not (ending := next((each for each in endings if prompt.endswith(each)), "")):
            return None
        message = prompt.removesuffix(ending).rpartition(opening)[2]
        return message.partition(closing)[0] if closing else message

    def only_message(self, prompt: str) -> str | None:
        """The user's message in a prompt that has no other message; None for other prompts. prompt: with its special
        tokens"""
        message = self.last_message(prompt)
        if message is None:
            return None
        with contextlib.suppress(LongdraftError):  # the template refuses this message by itself
            alone = [{"role": "user", "content": message}]
            return message if any(prompt.endswith(self.render(alone, each)) for each in self._switches) else None
        return None

    @property
    def _switches(self) -> list[dict[str, Any]]:
        """Variables of the template: as they are, and with thinking on and off where it has a switch."""
        return [{}, *({name: value} for name in THINKING_SWITCHES if name in self.options for value in (True, False))]

    @cached_property
    def _around_messages(self) -> tuple[str, str, list[str]]:
        """What is before each message of the user, what is between it and an answer, and what may be behind the last
        message: by the switch of thinking."""
        user, answer = {"role": "user", "content": _MARK}, {"role": "assistant", "content": _ANSWER}
        try:
            first, between, _ = self.render([user, answer, user], add_generation_prompt=False).split(_MARK)
            endings = {self.render([user], each).rpartition(_MARK)[2] for each in self._switches}
        except (LongdraftError, ValueError):  # it refuses these messages, or shows them in a way of its own
            return "", "", []
        opening = next(between[i:] for i in range(len(between) + 1) if first.endswith(between[i:]))
        return opening, between.partition(_ANSWER)[0], sorted(filter(None, endings), key=len, reverse=True)

    def _run(self, variables: dict[str, Any] | None) -> str:
        """What the child process returns. ModelError if the template fails or goes beyond a limit."""
        try:
            return _RENDERER.call(self.source, variables)
        except LimitError as error:
            raise ModelError(f"the model's chat template {error}; send fewer messages, or give another template with "
                             "--chat-template FILE") from None
        except CallError as error:  # untrusted code may fail in any way
            if error.kind == RefusedError.__name__:
                raise UsageError(f"the model's chat template refuses these messages: {error}") from error
            raise ModelError(f"the model's chat template fails: {error.kind}: {error}") from error

    def _render_open(self, messages: Sequence[Message], options: dict[str, Any],
                     tools: Sequence[Mapping[str, Any]] | None) -> str:
        """The messages up to the end of the last one's content, or of its thinking where it has no content. A mark
        shows where that is. It also keeps templates from stripping white space at its end."""
        *others, last = messages
        part = "reasoning_content" if last.get("reasoning_content") and not last.get("content") else "content"
        marked = {**last, part: f"{last.get(part) or ''}{_MARK}"}
        rendered = self.render([*others, marked], options, add_generation_prompt=False, tools=tools)
        prompt, mark, after = rendered.partition(_MARK)
        if not mark or _MARK in after:
            raise UsageError("the model's chat template does not show the last message once, so it cannot be "
                             "continued; send the prompt to /v1/completions")
        return prompt


def with_thought(message: dict[str, Any]) -> dict[str, Any]:
    """As in `transformers`: a thought under any of its names has the one that templates read, `thinking` in gpt-oss's
    and `reasoning_content` in others."""
    thought = next((message[name] for name in _THOUGHTS if name in message), None)
    return message if thought is None else {"thinking": thought} | message | {"reasoning_content": thought}


def _with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for templates that want one message of the system, at the beginning: those that lead are joined,
    and a later one is a reminder in the user's turn before it."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message.get("role") not in ("system", "developer"):
            joined.append(message)
        elif not joined or (last["role"] == "system" and len(joined) == 1):
            text = f"{last['content']}\n\n{message['content']}" if joined else message["content"]
            joined = [{**message, "role": "system", "content": text}]
        else:
            reminder = f"<system-reminder>\n{message['content']}\n</system-reminder>"
            if last["role"] == "user":
                joined[-1] = {**last, "content": f"{last['content']}\n{reminder}"}
            else:
                joined.append({"role": "user", "content": reminder})
    return joined


def parse_option(text: str) -> Any:
    """The value of a `--chat-option`: parsed as JSON if possible (true, 3, null), otherwise the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _text_of(file: Path) -> str:
    """The text of a file with a template. Pipes and devices, which may never end, are not opened."""
    try:
        if not file.is_file() or (size := file.stat().st_size) > _MAX_FILE:
            what = f"it has {size:,} bytes" if file.is_file() else "there is no such file"
            raise ModelError(f"cannot read the chat template {file}: {what}; allowed: a file of at most {_MAX_FILE:,}")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error


def _template_source(source: object) -> str:
    """The source of the template in use: `source` is a text, or a list of named templates."""
    if isinstance(source, list) and all(isinstance(entry, dict) and "name" in entry for entry in source):
        named = {entry["name"]: entry.get("template") for entry in source}
        if _DEFAULT_NAME not in named:
            raise ModelError(f"the model has the chat templates {', '.join(map(str, named))}, but none is named "
                             f"{_DEFAULT_NAME!r}; give one with --chat-template FILE")
        source = named[_DEFAULT_NAME]
    if not isinstance(source, str):
        raise ModelError(f"chat_template is a {type(source).__name__}; allowed: a text, or a list of named texts")
    return source
