"""Ollama's API: `/api/chat` and `/api/generate`, and what its clients read before them.

A stream is one JSON object a line. A call of a function comes whole, with its arguments as an object. One that was
cut is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from longdraft.checkpoint.config_file import read_json
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.engine.engine import Engine
from longdraft.request.events import Event, TokenLogprob
from longdraft.request.tools import parsed_arguments
from longdraft.server.body_types import AnyObject, Name, StrictModel, Utf8Text, one_of
from longdraft.server.doors.blocks import (
    SettingNames,
    TextReply,
    effort_of,
    is_object,
    objects,
    refused,
    template_options,
    without_none,
)
from longdraft.server.errors import ApiError
from longdraft.server.jobs import GenerationJob
from longdraft.server.replies import ResponseOptions, as_json, list_pieces, logprobs_of, pieces_around, token_logprobs
from longdraft.server.schemas import MAX_LOGPROBS, LongdraftOptions
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.reader import Call, Part

VERSION = "0.6.4"  # of Ollama's API: clients ask for this one or a later one
_LATEST = ":latest"
_OPTIONS = SettingNames(
    {"num_predict": "max_tokens", "repeat_last_n": "penalty_window", "repeat_penalty": "repetition_penalty"} | {
        name: name for name in ("seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty",
                                "frequency_penalty", "stop")},
    # How Ollama runs a model. None of these changes a text here.
    idle=("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "numa",
          "low_vram", "f16_kv", "vocab_only", "logits_all", "penalize_newline", "mirostat_tau", "mirostat_eta"),
    off={"mirostat": (0,), "tfs_z": (1,)})

_NoTemplate = Annotated[Literal[""], one_of("empty: --chat-template replaces the model's template")]
EMPTY_MESSAGE, EMPTY_RESPONSE = {"message": {"role": "assistant", "content": ""}}, {"response": ""}


class Body(StrictModel):
    spellings: ClassVar[Mapping[str, str]] = {f"options.{name}": own for name, own in _OPTIONS.names.items()} | {
        "format": "response_format"}

    model: Name
    stream: bool = True
    think: Any = Field(default=None, description="true, false, or a level, as reasoning_effort.")
    format: Any = Field(default=None, description="`json`, or a JSON schema.")
    options: AnyObject | None = Field(default=None, description="Sampling settings by Ollama's names.")
    logprobs: bool = Field(default=False, description="The reply has the log-probabilities of its tokens.")
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS,
                              description="With `logprobs`: so many of the likeliest tokens, too.")
    keep_alive: Any = Field(default=None, description="0 where nothing is asked: the answer says `unload`.")
    longdraft: LongdraftOptions | None = None


class ChatBody(Body):
    messages: list[AnyObject] = Field(max_length=4096)
    tools: Any = None


class GenerateBody(Body):
    prompt: Utf8Text = ""
    system: Utf8Text | None = None
    suffix: Annotated[Literal[""], one_of("empty: no text is filled in")] = ""
    template: _NoTemplate = ""
    images: Annotated[list[Any] | None, Field(max_length=0), one_of("empty: this server reads texts")] = None
    context: Annotated[list[int] | None, Field(max_length=0), one_of("empty: /api/chat has conversations")] = None
    raw: bool = Field(default=False, description="Continue the prompt, without the chat template.")


class ShowBody(StrictModel):
    model: Name | None = None
    name: Name | None = None
    verbose: bool = False
    system: Any = Field(default=None, description="No effect.")
    template: _NoTemplate = ""
    options: Any = Field(default=None, description="No effect.")


def chat_of(body: ChatBody, variables: frozenset[str]) -> dict[str, Any]:
    """The same request as a chat. variables: of the chat template. Raises ApiError for what cannot be one."""
    return _chat(body, variables) | without_none({"messages": _messages(body.messages), "tools": body.tools or None})


def generate_chat_of(body: GenerateBody, variables: frozenset[str]) -> dict[str, Any]:
    """A prompt as a chat of one message."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat(body, variables) | {"messages": [*system, {"role": "user", "content": body.prompt}]}


def completion_of(body: GenerateBody) -> dict[str, Any]:
    """A prompt as it is. Raises ApiError for a request to think: the prompt may have begun a thought, or not."""
    if body.think:
        raise refused("think", body.think, "false where the prompt is continued as it is (`raw`, or a model without a "
                                           "chat template)")
    return _settings(body) | {"prompt": body.prompt} | ({"logprobs": body.top_logprobs} if body.logprobs else {})


def _chat(body: Body, variables: frozenset[str]) -> dict[str, Any]:
    """The settings of a chat."""
    chat = _settings(body) | {"chat_template_kwargs": template_options(variables, None)}
    if body.logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if isinstance(body.think, bool):
        return chat | {"thinking": {"type": "enabled" if body.think else "disabled"}}
    return chat | without_none({"reasoning_effort": effort_of(body.think, "think")})


def _settings(body: Body) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": own_name(body.model), "stream": body.stream}
    extension: dict[str, Any] = body.longdraft.model_dump(exclude_unset=True) if body.longdraft else {}
    read = _OPTIONS.read(body.options or {}, "options.")
    settings |= {name: value for name, value in read.items() if name not in extension}
    form = body.format
    if form == "json":
        settings["response_format"] = {"type": "json_object"}
    elif is_object(form):
        settings["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": form}}
    elif form not in (None, ""):
        raise refused("format", form, "'json' or a JSON schema")
    return settings | ({"longdraft": extension} if extension else {})


def _messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat. Calls have no ids: results belong to them by name, and in their order."""
    messages: list[dict[str, Any]] = []
    waiting: list[tuple[str, Any]] = []  # ids and functions of calls without a result
    for index, message in enumerate(given):
        if message.get("images"):
            raise refused(f"messages.{index}.images", message["images"], "none: this server reads texts")
        own = without_none({"role": message.get("role"), "content": message.get("content") or "",
                            "reasoning_content": message.get("thinking") or None})
        if message.get("tool_calls"):
            own["tool_calls"] = []
            for call in objects(message["tool_calls"], f"messages.{index}.tool_calls"):
                function = call.get("function")
                if not isinstance(function, Mapping):
                    raise refused(f"messages.{index}.tool_calls", call, "objects with a function: {name, arguments}")
                waiting.append((call.get("id") or f"call_{index}_{len(waiting)}", function.get("name")))
                own["tool_calls"].append({"id": waiting[-1][0], "type": "function", "function": {
                    "name": function.get("name"), "arguments": json.dumps(function.get("arguments") or {})}})
        if message.get("role") == "tool":
            named = [each for each in waiting if message.get("tool_call_id") == each[0]
                     or message.get("tool_name", each[1]) == each[1]]
            if named:
                own["tool_call_id"] = named[0][0]
                waiting.remove(named[0])
        messages.append(own)
    return messages


class OllamaReply(TextReply):
    """The reply to `/api/chat` or, with `is_chat` false, to `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(self, options: ResponseOptions, model: str, tokenizer: Tokenizer, jobs: list[GenerationJob], *,
                 is_chat: bool = True) -> None:
        super().__init__(options, jobs)
        self._model, self._tokenizer, self._is_chat = model, tokenizer, is_chat
        self._entries: list[TokenLogprob] = []  # that no line of a stream has yet
        self._call: Call | None = None  # that is not complete yet
        self._num_sent = 0  # calls of a stream

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        self._entries += logprobs_of(events)
        for part in self._choice.read(events):
            yield from self._part(part)

    def _part(self, part: Part) -> Iterator[bytes]:
        if part.kind == "arguments":
            assert self._call is not None, "arguments follow the beginning of a call"
            self._call = self._call._replace(arguments=self._call.arguments + part.text)
            return
        yield from self._end_call()
        if part.kind == "call":
            self._call = Call(part.id, part.text, "")
        else:
            thought, text = (part.text, "") if part.kind == "thought" else ("", part.text)
            yield self._line(self._content(thought, text, []))

    def _end_call(self) -> Iterator[bytes]:
        call, self._call = self._call, None
        if call is not None and parsed_arguments(call.arguments) is not None:
            yield self._line(self._content("", "", [call]))
            self._num_sent += 1

    def end(self) -> Iterator[bytes]:
        yield from self._end_call()
        yield self._line(self._content("", "", []) | self._figures())

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield as_json({"error": str(error)}) + b"\n"

    def whole(self) -> Iterator[bytes]:
        answer = self._choice.answer
        content = self._content(answer.reasoning, answer.content, answer.calls) | self._figures()
        return pieces_around(partial(self._object, content), [list_pieces(self._choice.logprobs, self._logprobs)])

    def _content(self, thought: str, text: str, calls: list[Call]) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        if not self._is_chat:
            return {"response": text, **thinking}
        functions = [{"function": {"index": index, "name": call.name, "arguments": arguments}}
                     for index, call in enumerate(calls, self._num_sent)
                     if (arguments := parsed_arguments(call.arguments)) is not None]
        message = {"role": "assistant", "content": text, **thinking}
        return {"message": message | ({"tool_calls": functions} if functions else {})}

    def _line(self, content: dict[str, Any]) -> bytes:
        entries, self._entries = self._entries, []
        return as_json(self._object(content, self._logprobs(entries))) + b"\n"

    def _object(self, content: dict[str, Any], logprobs: list[dict[str, Any]] | str) -> dict[str, Any]:
        shown = {"logprobs": logprobs} if self._options.logprobs and logprobs else {}
        return {"model": self._model, "created_at": now(), "done": False, **shown} | content

    def _logprobs(self, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        return token_logprobs(entries, self._tokenizer)

    def _figures(self) -> dict[str, Any]:
        """The members of the last line. Durations are in nanoseconds."""
        job, stats = self._job, self._job.stats or {}
        decoding = stats.get("decode_seconds", 0.0)
        total = (job.ended or time.monotonic()) - job.arrived
        return {"done": True, "done_reason": "length" if self._choice.finish_reason == "length" else "stop",
                "total_duration": int(total * 1e9), "load_duration": 0,
                "prompt_eval_count": self._options.prompt_tokens,
                "prompt_eval_duration": int(stats.get("prefill_seconds", 0.0) * 1e9),
                "eval_count": job.num_tokens, "eval_duration": int(decoding * 1e9)}


def own_name(model: str) -> str:
    """The name of a model without the label that Ollama's clients add."""
    return model.removesuffix(_LATEST)


def loaded(body: Body) -> dict[str, Any]:
    """The answer to a request that asks for no text, without its empty text."""
    return {"model": body.model, "created_at": now(), "done": True,
            "done_reason": "unload" if body.keep_alive in (0, "0", "0s") else "load"}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def model_object(name: str, engine: Engine, started: float) -> dict[str, Any]:
    """The model as lists of models have it."""
    return {"name": name, "model": name, "modified_at": datetime.fromtimestamp(started, UTC).isoformat(),
            "size": 0, "digest": engine.fingerprint.removeprefix("fp_"), "details": _details(engine)}


def _details(engine: Engine) -> dict[str, Any]:
    folder = engine.loaded.files.folder
    is_gguf = folder.is_file()
    family = str(open_gguf(folder).values.get("general.architecture") if is_gguf else
                 read_json(folder / "config.json").get("model_type") or "unknown")
    return {"parent_model": "", "format": "gguf" if is_gguf else "safetensors",
            "family": family, "families": [family], "parameter_size": "",
            "quantization_level": engine.model.weights.quantize}


def shown_model(engine: Engine, context_limit: int, thinks: bool) -> dict[str, Any]:
    """What `/api/show` says of the model."""
    template = engine.tokenizer.chat_template
    details = _details(engine)
    capabilities = ["completion", *(["tools"] if template else []), *(["thinking"] if thinks else [])]
    return {"capabilities": capabilities, "details": details, "parameters": "", "license": "", "modelfile": "",
            "template": template.source if template else "", "model_info": {
                "general.architecture": details["family"], f"{details['family']}.context_length": context_limit}}
