"""OpenAI's responses: `/v1/responses` and `POST /v1/responses/input_tokens`. Only detached ones are kept, for a while.

    response.created, response.in_progress, then for each item response.output_item.added, its deltas, and
    response.output_item.done; then response.completed, response.incomplete or response.failed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from longdraft.request.events import Event
from longdraft.server.body_types import AnyObject, Name, StrictModel, Utf8Text
from longdraft.server.doors.blocks import (
    TextReply,
    carried,
    carry,
    is_object,
    left_out,
    named_event,
    objects,
    refused,
    template_options,
    text_of,
    without_none,
)
from longdraft.server.errors import ApiError
from longdraft.server.jobs import GenerationJob
from longdraft.server.replies import ResponseOptions, as_json
from longdraft.server.schemas import LongdraftOptions
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.reader import Part

_TEXTS = ("input_text", "output_text", "text")
_NO_EFFECT = "No effect."
_LOGPROBS = "message.output_text.logprobs"  # of `include`
_SUMMARIES = ("summary", "generate_summary")  # of thoughts: the whole thought is sent


class InputTokensRequest(StrictModel):
    """The body of `/v1/responses/input_tokens`."""

    spellings: ClassVar[Mapping[str, str]] = {
        "input": "messages", "max_output_tokens": "max_tokens", "text.format": "response_format",
        "reasoning.effort": "reasoning_effort"}

    model: Name | None = None
    input: Any = Field(description="A text, or a list of messages, function_call, function_call_output and reasoning.")
    instructions: Utf8Text | None = None
    tools: Any = Field(default=None, description="Functions, and namespaces of functions. Others are left out.")
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: AnyObject | None = Field(default=None, description="`effort`, and the other members of a chat's "
                                                                  "`reasoning`. `summary` has no effect.")
    text: AnyObject | None = Field(default=None, description="`format`: text, json_object or json_schema; "
                                                              "`verbosity`: medium.")
    truncation: Any = Field(default=None, description=_NO_EFFECT)
    previous_response_id: Any = Field(default=None, description="Refused: nothing is stored.")
    conversation: Any = Field(default=None, description="Refused: nothing is stored.")


class ResponsesRequest(InputTokensRequest):
    max_output_tokens: int | None = Field(default=None, ge=1, description="Less where the context has less room.")
    stream: bool = False
    background: bool = Field(default=False, description="The text goes on without its client, as with "
                                                        "longdraft.detach, and the reply does not wait for it.")
    stream_options: Any = Field(default=None, description=_NO_EFFECT)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(default=None, description="longdraft's own, as in chats.")
    include: list[Name] | None = Field(default=None, max_length=64, description="`reasoning.encrypted_content`: carry "
                                       "thoughts. `message.output_text.logprobs` is refused.")
    user: Name | None = None
    store: Any = Field(default=None, description=_NO_EFFECT)
    metadata: Any = Field(default=None, description="Sent back.")
    client_metadata: Any = Field(default=None, description=_NO_EFFECT)
    prompt_cache_key: Any = Field(default=None, description=_NO_EFFECT)
    prompt_cache_options: Any = Field(default=None, description=_NO_EFFECT)
    prompt_cache_retention: Any = Field(default=None, description=_NO_EFFECT)
    max_tool_calls: Any = Field(default=None, description="No effect: no tools are run here.")
    safety_identifier: Any = Field(default=None, description=_NO_EFFECT)
    service_tier: Any = Field(default=None, description=_NO_EFFECT)
    top_logprobs: Any = Field(default=None, description="0: responses have no log-probabilities.")
    longdraft: LongdraftOptions | None = None


def to_chat(body: InputTokensRequest, variables: frozenset[str]) -> dict[str, Any]:
    """The same request as a chat. variables: of the chat template. Raises ApiError for what cannot be one."""
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise ApiError(400, f"{name} is not supported: this server stores no responses; send the whole input",
                           param=name, code="unsupported")
    if (body.text or {}).get("verbosity") not in (None, "medium"):
        raise refused("text.verbosity", (body.text or {})["verbosity"], "medium")
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _messages(body.input)
    reasoning = {name: value for name, value in (body.reasoning or {}).items() if name not in _SUMMARIES}
    chat = {"model": body.model, "messages": messages, "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _format((body.text or {}).get("format")), **_tools(body.tools, body.tool_choice),
            "reasoning": reasoning or None, "chat_template_kwargs": template_options(variables, None)}
    if isinstance(body, ResponsesRequest):
        if body.top_logprobs not in (None, 0):
            raise refused("top_logprobs", body.top_logprobs, "0; chats and completions have log-probabilities")
        if _LOGPROBS in (body.include or ()):
            raise refused("include", _LOGPROBS, "no log-probabilities; chats and completions have them")
        chat |= {"max_tokens": body.max_output_tokens, "stream": body.stream, "temperature": body.temperature,
                 "top_p": body.top_p, "seed": body.seed, "user": body.user,
                 "longdraft": (body.longdraft or LongdraftOptions()).model_copy(update={"detach": True})
                 if body.background else body.longdraft}
    return without_none(chat)


def _format(form: Any) -> dict[str, Any] | None:
    if not is_object(form) or form.get("type") in (None, "text"):
        return None
    if form["type"] == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": form.get("name") or "output",
                                                       "schema": form.get("schema")}}
    return {"type": form["type"]}


def _messages(items: Any) -> list[dict[str, Any]]:
    """The messages of a chat. Items of the assistant in a row are one message."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(objects(items, "input")):
        place, kind, role = f"input.{index}", item.get("type", "message"), item.get("role")
        if kind == "message" and role != "assistant":
            messages.append({"role": role, "content": text_of(item.get("content"), f"{place}.content", _TEXTS)})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"),
                             "content": text_of(item.get("output"), f"{place}.output", _TEXTS)})
        elif kind in ("message", "function_call", "reasoning"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _add_to(messages[-1], kind, item, place)
        else:
            raise refused(place, item, "items of the type message, function_call, function_call_output and reasoning")
    return messages


def _add_to(message: dict[str, Any], kind: str, item: Mapping[str, Any], place: str) -> None:
    """Add an item to a message of the assistant."""
    if kind == "message":
        message["content"] += text_of(item.get("content"), f"{place}.content", (*_TEXTS, "refusal"))
    elif kind == "function_call":
        message.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": {
            "name": item.get("name"), "arguments": item.get("arguments") or "{}"}})
    else:
        thought = text_of(item.get("content"), f"{place}.content", ("reasoning_text", "text")) or carried(
            item.get("encrypted_content"))
        if thought:
            message["reasoning_content"] = message.get("reasoning_content", "") + thought


def _tools(tools: Any, choice: Any) -> dict[str, Any]:
    """The tools of a chat. Those that OpenAI's own servers run are left out."""
    functions: list[dict[str, Any]] = []
    others = []
    for tool in objects(tools, "tools") if tools is not None else []:
        if tool.get("type") == "function":
            functions.append(_function(tool, ""))
        elif tool.get("type") == "namespace":
            functions += [_function(each, f"{tool.get('name')}__")
                          for each in objects(tool.get("tools"), "tools") if each.get("type") == "function"]
        else:
            others.append(tool.get("type"))
    left_out("tools", others)
    return {"tools": functions or None, "tool_choice": choice}


def _function(tool: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    about = {name: tool.get(name) for name in ("description", "parameters", "strict")}
    return {"type": "function", "function": without_none({"name": f"{prefix}{tool.get('name')}", **about})}


class ResponsesReply(TextReply):
    """The reply to one request of OpenAI's responses."""

    is_numbered = True

    def __init__(self, options: ResponseOptions, model: str, tokenizer: Tokenizer, jobs: list[GenerationJob], *,
                 body: ResponsesRequest) -> None:
        super().__init__(options, jobs)
        self._model, self._body = model, body
        self._created = int(self._job.created)
        self._number = -1  # of the latest event
        self._items: list[dict[str, Any]] = []  # that are complete
        self._item: dict[str, Any] | None = None  # that is open
        self._text = ""  # of the open item

    def begin(self) -> Iterator[bytes]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        for part in self._choice.read(events):
            yield from self._part(part)

    def end(self) -> Iterator[bytes]:
        yield from self._close(self._last_status)
        status = self._status
        yield self._event(f"response.{status}", response=self._response(status))

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield self._event("response.failed", response=self._failed(error))

    def so_far(self, error: ApiError | None) -> dict[str, Any]:
        """The response of a detached text, which may go on. error: that ended it"""
        if error is not None:
            return self._failed(error)
        if self._choice.finish_reason:
            return self._ended()
        return self._response("queued" if self._job.state == "queued" else "in_progress")

    def _failed(self, error: ApiError) -> dict[str, Any]:
        is_cancelled = error.code == "cancelled"
        about = {"code": error.code or "server_error", "message": str(error)}
        return self._response("cancelled" if is_cancelled else "failed") | {"error": None if is_cancelled else about}

    def add(self, job: GenerationJob, events: list[Event]) -> None:
        for _ in self.news(job, events):
            pass

    def whole(self) -> Iterator[bytes]:
        yield as_json(self._ended())

    def _ended(self) -> dict[str, Any]:
        """The response after the end of the text."""
        for _ in self._close(self._last_status):
            pass
        return self._response(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason in ("length", "loop") else "completed"

    @property
    def _last_status(self) -> str:
        """The status of the item that the text ends in."""
        is_call = self._item is not None and self._item["type"] == "function_call"
        return ("completed" if self._choice.has_whole_call else "incomplete") if is_call else self._status

    def _event(self, kind: str, **content: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number, **content})

    def _part(self, part: Part) -> Iterator[bytes]:
        kind = {"thought": "reasoning", "text": "message"}.get(part.kind, "function_call")
        if part.kind == "call" or (part.kind != "arguments" and (self._item or {}).get("type") != kind):
            yield from self._close()
            yield from self._open(kind, part)
            if part.kind == "call":
                return
        self._text += part.text
        name = {"thought": "reasoning_text", "text": "output_text", "arguments": "function_call_arguments"}[part.kind]
        about: dict[str, dict[str, Any]] = {"output_text": {"content_index": 0, "logprobs": []},
                                            "reasoning_text": {"content_index": 0}}
        yield self._event(f"response.{name}.delta", **self._place, **about.get(name, {}), delta=part.text)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": (self._item or {}).get("id"), "output_index": len(self._items)}

    def _open(self, kind: str, part: Part) -> Iterator[bytes]:
        number = f"{self._options.id.removeprefix('resp_')}{len(self._items):02d}"
        about: dict[str, dict[str, Any]] = {
            "reasoning": {"id": f"rs_{number}", "summary": [], "content": []},
            "message": {"id": f"msg_{number}", "role": "assistant", "status": "in_progress", "content": []},
            "function_call": {"id": f"fc_{number}", "call_id": part.id, "name": part.text, "arguments": "",
                              "status": "in_progress"}}
        self._item, self._text = {"type": kind, **about[kind]}, ""
        yield self._event("response.output_item.added", output_index=len(self._items), item=self._item)
        if kind == "message":
            yield self._event("response.content_part.added", **self._place, content_index=0, part=_output_text(""))

    def _close(self, status: str = "completed") -> Iterator[bytes]:
        """End the open item. status: of a message or call"""
        if self._item is None:
            return
        item, text = self._with_text(self._item), self._text
        if item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", **self._place, content_index=0, text=text)
        elif item["type"] == "message":
            yield self._event("response.output_text.done", **self._place, content_index=0, text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place, content_index=0, part=_output_text(text))
            item["status"] = status
        else:
            yield self._event("response.function_call_arguments.done", **self._place, name=item["name"], arguments=text)
            item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._item = None

    def _with_text(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The open item with its text so far."""
        text = self._text
        if item["type"] == "reasoning":
            is_carried = "reasoning.encrypted_content" in (self._body.include or ())
            return {**item, "content": [{"type": "reasoning_text", "text": text}],
                    **({"encrypted_content": carry(text)} if is_carried else {})}
        return {**item, **({"content": [_output_text(text)]} if item["type"] == "message" else {"arguments": text})}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        is_cut = status == "incomplete"
        return {
            "id": self._options.id, "object": "response", "created_at": self._created, "status": status,
            "model": self._model, "error": None, "background": body.background,
            "output": [*self._items, *([self._with_text(self._item)] if self._item else [])],
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False, "temperature": self._job.params.temperature, "top_p": self._job.params.top_p,
            "text": body.text or {"format": {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [], "truncation": "disabled", "user": body.user,
            "usage": None if status in ("queued", "in_progress") else self._usage()}

    def _usage(self) -> dict[str, Any]:
        read, written = self._options.prompt_tokens, self._job.num_tokens
        return {"input_tokens": read, "input_tokens_details": {"cached_tokens": self._job.cached_tokens},
                "output_tokens": written, "output_tokens_details": {"reasoning_tokens": self._job.reasoning_tokens},
                "total_tokens": read + written}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
