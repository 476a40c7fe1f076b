"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

    data: message_start, then for each block content_block_start, content_block_delta, content_block_stop,
          then message_delta and message_stop
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from longdraft.request.events import Event
from longdraft.request.tools import parsed_arguments
from longdraft.server.body_types import AnyObject, Name, StopString, StrictModel
from longdraft.server.doors.blocks import (
    StopSearch,
    TextReply,
    carried,
    carry,
    effort_of,
    is_object,
    left_out,
    named_event,
    objects,
    refused,
    template_options,
    text_of,
    without_none,
)
from longdraft.server.errors import ApiError, anthropic_error
from longdraft.server.jobs import GenerationJob
from longdraft.server.replies import ResponseOptions, as_json
from longdraft.server.schemas import LongdraftOptions
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.reader import Part, put_together

_NONCE = "x-anthropic-billing-header:"  # a line that differs in each request, so that no prompt would be reused
_THINKING = ("enabled", "adaptive", "disabled")
_IDLE = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class CountRequest(StrictModel):
    """The body of `/v1/messages/count_tokens`. Members without a description of their own are those of Anthropic."""

    spellings: ClassVar[Mapping[str, str]] = {
        "stop_sequences": "stop", "thinking.budget_tokens": "thinking_budget", "output_format": "response_format",
        "output_config.format": "response_format", "output_config.effort": "reasoning_effort"}

    model: Name | None = None
    messages: list[AnyObject] = Field(min_length=1, max_length=4096)
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    thinking: AnyObject | None = Field(default=None, description="`type`: enabled, adaptive or disabled; "
                                       "`budget_tokens`: as thinking_budget; `display`: omitted hides the thought.")
    output_config: AnyObject | None = Field(default=None, description="`format`: a JSON schema; `effort`: as "
                                                                      "reasoning_effort.")
    output_format: AnyObject | None = None
    cache_control: Any = Field(default=None, description="No effect: every prompt is cached.")
    context_management: Any = Field(default=None, description="No effect.")


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, description="Less where the context has less room.")
    stream: bool = False
    stop_sequences: list[StopString] | None = Field(default=None, max_length=16)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = Field(default=None, description="longdraft's own, as in chats.")
    metadata: Any = Field(default=None, description="`user_id` is written to the log.")
    service_tier: Any = Field(default=None, description="No effect.")
    inference_geo: Any = Field(default=None, description="No effect.")
    betas: Any = Field(default=None, description="No effect.")
    thread: Any = Field(default=None, description="Refused: no conversation is stored. Anthropic's clients then send "
                                                  "all messages.")
    longdraft: LongdraftOptions | None = None


def to_chat(body: CountRequest, variables: frozenset[str]) -> dict[str, Any]:
    """The same request as a chat. variables: of the chat template. Raises ApiError for what cannot be one."""
    system = _without_nonce(text_of(body.system, "system"))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{index}")
    if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    chat = {"model": body.model, "messages": messages, **_tools(body.tools, body.tool_choice),
            "continue_final_message": _is_begun(messages[-1]),
            "reasoning_effort": effort_of((body.output_config or {}).get("effort"), "output_config.effort")}
    if body.thinking is not None:
        chat["thinking"] = {name: value for name, value in body.thinking.items() if name != "display"}
        if body.thinking.get("type") not in _THINKING:
            raise refused("thinking.type", body.thinking.get("type"), ", ".join(_THINKING))
    # Without `thinking` a model that can leave it out does so. Others think as they do in a chat.
    options = template_options(variables, False if body.thinking is None else None)
    form = body.output_format or (body.output_config or {}).get("format")
    if isinstance(form, Mapping):
        schema = {"name": "output", "schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        if body.thread is not None:
            raise ApiError(400, "thread is not supported: this server stores no conversations; send all messages",
                           param="thread", code="unsupported",
                           details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]})
        chat |= {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences,
                 "temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "seed": body.seed,
                 "user": (body.metadata or {}).get("user_id") if is_object(body.metadata) else None,
                 "longdraft": body.longdraft}
    return without_none(chat | {"chat_template_kwargs": options})


def _is_begun(last: Mapping[str, Any]) -> bool:
    """Whether the last message is the beginning of the answer. ApiError for white space at its end, as Anthropic's
    server refuses it: the next word would be unlikely."""
    is_begun = last["role"] == "assistant" and "tool_calls" not in last
    if is_begun and last["content"] != last["content"].rstrip():
        raise refused("messages", last["content"][-20:], "a last message of the assistant without white space at its "
                                                         "end")
    return is_begun


def _without_nonce(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(_NONCE))


def _messages(message: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """The messages of a chat for one message, whose blocks may be results of several calls."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refused(f"{place}.role", role, "user, assistant or system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    texts, results, calls, thoughts = [], [], [], []
    for index, block in enumerate(objects(content, f"{place}.content")):
        here, kind = f"{place}.content.{index}", block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use" and role == "assistant":
            calls.append({"id": block.get("id"), "type": "function", "function": {
                "name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}})
        elif kind == "tool_result" and role == "user":
            prefix = "Error: " if block.get("is_error") else ""
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"),
                            "content": prefix + text_of(block.get("content"), f"{here}.content")})
        elif kind == "thinking" and role == "assistant":
            thoughts.append(block.get("thinking") or carried(block.get("signature")))
        elif kind != "redacted_thinking":
            raise refused(here, block, f"blocks of the type {', '.join(_IDLE)}")
    own: dict[str, Any] = {"role": role, "content": "".join(texts)}
    if calls:
        own["tool_calls"] = calls
    if thought := "".join(map(str, thoughts)):
        own["reasoning_content"] = thought
    return results + ([own] if texts or calls or thought or not results else [])


def _tools(tools: Any, choice: Any) -> dict[str, Any]:
    """The tools of a chat. Tools that Anthropic's own servers run are left out."""
    given = objects(tools, "tools") if tools is not None else []
    own = [tool for tool in given if tool.get("type", "custom") in ("custom", None)]
    left_out("tools", [tool.get("type") for tool in given if tool not in own])
    chosen: dict[str, Any] = {"tools": [{"type": "function", "function": without_none({
        "name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema"),
        "strict": tool.get("strict")})} for tool in own] or None}
    if choice is None:
        return chosen
    kinds = {"auto": "auto", "any": "required", "none": "none", "tool": {
        "type": "function", "function": {"name": choice.get("name") if is_object(choice) else None}}}
    if not is_object(choice) or choice.get("type") not in kinds:
        raise refused("tool_choice", choice, "{'type': 'auto'}, 'any', 'none', or 'tool' with a name")
    parallel = False if choice.get("disable_parallel_tool_use") else None
    return chosen | {"tool_choice": kinds[choice["type"]], "parallel_tool_calls": parallel}


class MessagesReply(TextReply):
    """The reply to one request of Anthropic's messages. Its first event says how much of the prompt was cached."""

    def __init__(self, options: ResponseOptions, model: str, tokenizer: Tokenizer, jobs: list[GenerationJob], *,
                 hides_thinking: bool = False, context_limit: int = 0) -> None:
        """hides_thinking: thoughts are carried in signatures only; context_limit: tokens of prompt and text."""
        super().__init__(options, jobs)
        self._model = model
        self._stops = StopSearch(tokenizer, self._job.params.stop)
        self._hides, self._limit = hides_thinking, context_limit
        self._has_begun = False
        self._kind = ""  # of the block that is open
        self._index = -1
        self._thought = ""  # of the block that is open

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        yield from self._start()
        for part in self._choice.read(events):
            yield from self._part(part)
        self._stops.add(events)

    def end(self) -> Iterator[bytes]:
        yield from self._start()
        yield from self._close()
        reason, sequence = self._stop()
        yield named_event({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": sequence},
                           "usage": self._usage()})
        yield named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield named_event(anthropic_error(error))

    def add(self, job: GenerationJob, events: list[Event]) -> None:
        super().add(job, events)
        self._stops.add(events)

    def whole(self) -> Iterator[bytes]:
        reason, sequence = self._stop()
        yield as_json(self._message(self._blocks(), reason, sequence))

    def _blocks(self) -> list[dict[str, Any]]:
        """The blocks of a whole answer, in their order. A call that was cut is left out."""
        blocks: list[dict[str, Any]] = []
        groups: list[list[Part]] = []
        for part in self._choice.parts:
            is_more = part.kind == "arguments" or (groups and part.kind == groups[-1][0].kind != "call")
            if is_more and groups:
                groups[-1].append(part)
            else:
                groups.append([part])
        for group in groups:
            answer = put_together(group)
            if answer.calls:
                call, = answer.calls
                arguments = parsed_arguments(call.arguments)
                if arguments is not None:
                    blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
            elif answer.reasoning:
                blocks.append({"type": "thinking", "thinking": "" if self._hides else answer.reasoning,
                               "signature": self._signature(answer.reasoning)})
            elif answer.content:
                blocks.append({"type": "text", "text": answer.content})
        return blocks

    def _message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {"id": self._options.id, "type": "message", "role": "assistant", "model": self._model,
                "content": content, "stop_reason": reason, "stop_sequence": sequence, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        cached = self._job.cached_tokens
        return {"input_tokens": self._options.prompt_tokens - cached, "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0, "output_tokens": self._job.num_tokens}

    def _start(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], None, None)
            message["usage"]["output_tokens"] = 0
            yield named_event({"type": "message_start", "message": message})

    def _part(self, part: Part) -> Iterator[bytes]:
        kind = {"thought": "thinking", "text": "text"}.get(part.kind, "tool_use")
        if part.kind == "call" or (part.kind != "arguments" and kind != self._kind):
            yield from self._close()
            self._kind, self._index, self._thought = kind, self._index + 1, ""
            empty: dict[str, dict[str, Any]] = {
                "text": {"text": ""}, "thinking": {"thinking": "", "signature": ""},
                "tool_use": {"id": part.id, "name": part.text, "input": {}}}
            yield named_event({"type": "content_block_start", "index": self._index,
                               "content_block": {"type": kind, **empty[kind]}})
            if part.kind == "call":
                return
        if part.kind == "thought":
            self._thought += part.text
            if self._hides:
                return
        key = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}[kind]
        name = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}[kind]
        yield self._delta({"type": name, key: part.text})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": self._signature(self._thought)})
        yield named_event({"type": "content_block_stop", "index": self._index})
        self._kind = ""

    def _signature(self, thought: str) -> str:
        """A thought that is shown needs no copy."""
        return carry(thought if self._hides else "")

    def _stop(self) -> tuple[str, str | None]:
        """The reason for the end, and the stop text that ended it."""
        choice, job = self._choice, self._job
        if choice.finish_reason in ("length", "loop"):
            is_full = self._options.prompt_tokens + job.num_tokens >= self._limit > 0
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if choice.finish_reason == "tool_calls":
            return "tool_use", None
        if choice.end == "stop" and (stop := self._stops.stop) is not None:
            return "stop_sequence", stop
        return "end_turn", None

