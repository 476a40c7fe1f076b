"""A row of a job's input becomes a request; a request and its text become a record.

There are two kinds of rows, which one file may mix: longdraft's own, and those of OpenAI's batch API:

    {"id": "a", "prompt": "It was", "max_new_tokens": 500, "seed": 3}       or `messages`: a chat
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 500}}

A record is a function of row, model and settings. It holds no times and no random numbers, so a job writes the same
bytes with any workers and after any number of interruptions.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from longdraft.errors import UsageError
from longdraft.request.openai_body import (
    THINKING_FIELDS,
    UNSUPPORTED,
    ThinkingRequest,
    joined_settings,
    known_spellings,
    read_thinking,
    unsupported,
)
from longdraft.request.sampling_params import ALIASES, SamplingParams
from longdraft.request.tools import FIELDS as TOOL_FIELDS
from longdraft.request.tools import ToolRequest, history, is_shallow, parse_tools, parsed_arguments
from longdraft.system.files import require_text
from longdraft.text.tools.reader import WholeAnswer, chat_message, finish_reason_of

Row = Mapping[str, Any]
OutputRecord = dict[str, Any]
RequestKind = Literal["simple", "chat", "completion"]

_URLS: dict[str, RequestKind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_RESERVED = re.compile(r"line \d+")
_MAX_DEPTH = 64  # of nested objects and lists: pickling and writing them recurse
_SIMPLE = ("id", "prompt", "messages", "chat_options", "metadata")
# Of OpenAI's body: fields that are not sampling settings, and fields that are supported with these values only.
_OTHER_FIELDS = ("model", "messages", "prompt", "chat_template_kwargs", "user", "longdraft", "cache_salt")
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "n": (1,), "stream": (False,), "stream_options": (), "logprobs": (False, 0), "top_logprobs": (0,), "echo": (False,)}
_ALLOWED_IN_CHATS = {name: idle for name, idle in _ALLOWED_VALUES.items() if name not in TOOL_FIELDS}


@dataclass(frozen=True)
class BatchRequest:
    """One text to write.

    key       the row's id, unique in the job
    prompt    a text, token ids, or messages (if kind is chat, or `is_chat`)
    settings  sampling settings, by longdraft's names
    problem   why the text cannot be written; the other fields have no meaning then
    tools     functions that the answer may call
    thinking  what the chat asks of the model's thinking, beside the settings
    """

    key: str
    kind: RequestKind = "simple"
    prompt: Any = ""
    is_chat: bool = False
    chat_options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    metadata: Any = None
    problem: str = ""
    tools: ToolRequest | None = None
    thinking: ThinkingRequest = field(default_factory=lambda: read_thinking({}))


class RowProgress(NamedTuple):
    """The progress of a row: `tokens` so far, `resumed` of them from a journal, and its record once it is done."""

    key: str
    tokens: int
    resumed: int = 0
    record: OutputRecord | None = None


def parse(row: Row | str, line: int, model: str) -> BatchRequest:
    """The request of a row. A text instead of a row is the reason why the line has no row.

    line   line number of the input, from 1; it names a row without an id
    model  the name that a body may give the job's model
    """
    key = f"line {line}"
    kind: RequestKind = "simple"
    metadata = None
    try:
        if isinstance(row, str):
            raise UsageError(row)
        is_flat = is_shallow(row, _MAX_DEPTH)
        metadata = _plain(row.get("metadata")) if is_flat else None
        row = {name: value for name, value in row.items() if value is not None}  # empty cells of a table
        is_openai = "custom_id" in row
        kind = "completion" if is_openai else "simple"  # records of errors have one of these two forms
        key = _key(row, "custom_id" if is_openai else "id")
        if not is_flat:
            raise UsageError(f"the row nests lists or objects more than {_MAX_DEPTH} deep; allowed: {_MAX_DEPTH}")
        return _openai(key, row, model) if is_openai else _simple(key, row, metadata)
    except UsageError as error:
        return BatchRequest(key, kind, metadata=metadata, problem=str(error))


def _plain(value: Any) -> Any:
    """The value with everything that JSON lacks (times, bytes, decimals, NaN) as text."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    is_json = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)


def _key(row: Row, name: str) -> str:
    key = row.get(name)
    key = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
    if key is None:
        raise UsageError(f"the row has no {name}; give it a text or an integer that no other row has")
    if not isinstance(key, str) or not key or _RESERVED.fullmatch(key):
        raise UsageError(f"{name} is {str(key)[:80]!r}; allowed: a text or an integer that no other row has, "
                         "except 'line N'")
    require_text(key, name, "write whole characters")
    return key


def _simple(key: str, row: Row, metadata: Any) -> BatchRequest:
    settings = {name: value for name, value in row.items() if name not in _SIMPLE}
    if ("prompt" in row) == ("messages" in row):
        raise UsageError("the row has both prompt and messages, or neither; give one of them")
    is_chat = "messages" in row
    return BatchRequest(key, "simple", _messages(row["messages"]) if is_chat else _prompt(row["prompt"]), is_chat,
                _options(row, "chat_options"), _settings(settings), metadata)


def _kind(row: Row) -> RequestKind:
    url, method = row.get("url"), row.get("method", "POST")
    if url is None:
        raise UsageError(f"the row has no url; allowed: {' or '.join(_URLS)}, or prompt or messages in the row itself")
    if method != "POST" or not isinstance(url, str) or url not in _URLS:
        raise UsageError(f"the request is {method} {url!r}; allowed: POST {' or '.join(_URLS)}")
    return _URLS[url]


def _openai(key: str, row: Row, model: str) -> BatchRequest:
    kind, body = _kind(row), row.get("body")
    if not isinstance(body, dict):
        raise UsageError("the row's body is missing or no JSON object; it is the request")
    body = {name: value for name, value in body.items() if value is not None}
    if body.get("model") not in (None, model):
        raise UsageError(f"the body asks for model {str(body['model'])[:80]!r}, the job has {model!r}; use that name "
                         "or give --served-model-name")
    known = _ALLOWED_VALUES if kind == "completion" else _ALLOWED_IN_CHATS
    if refused := unsupported(body, known):
        name, allowed = refused
        raise UsageError(f"{name} is {str(body[name])[:80]!r}; supported: {allowed}")
    wanted, other = ("messages", "prompt") if kind == "chat" else ("prompt", "messages")
    if wanted not in body or other in body:
        raise UsageError(f"a body for {row['url']} has {wanted}, and no {other}")
    prompt = _messages(body["messages"]) if kind == "chat" else _prompt(body["prompt"])
    tools = parse_tools(body) if kind == "chat" else None
    thinking = read_thinking(body if kind == "chat" else {})
    others = (*_OTHER_FIELDS, *_ALLOWED_VALUES, *(THINKING_FIELDS if kind == "chat" else ()))
    settings = {name: value for name, value in body.items() if name not in others} | thinking.settings
    settings = joined_settings(settings, _options(body, "longdraft", "settings that OpenAI has no name for"))
    return BatchRequest(key, kind, prompt, kind == "chat", _options(body, "chat_template_kwargs"), _settings(settings),
                        tools=tools, thinking=thinking)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The settings, checked, by longdraft's names: `max_tokens` becomes `max_new_tokens`."""
    given = known_spellings(given)
    structure = SamplingParams.from_names(given).structured_outputs
    settings = {ALIASES.get(name, name): value for name, value in given.items() if value is not None}
    settings.pop("structured_outputs", None)
    return settings | ({"structured_outputs": structure} if structure else {})


def _prompt(prompt: Any) -> Any:
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise UsageError(f"prompt is {str(prompt)[:80]!r}; allowed: one text, or token ids")
    return prompt


def _messages(messages: Any) -> list[dict[str, Any]]:
    is_list = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not messages or not is_list or not all(isinstance(each.get("role"), str) for each in messages):
        raise UsageError(f"messages is {str(messages)[:80]!r}; allowed: a list of objects with role and content")
    history(messages)
    return [_message(each) for each in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text. Calls of tools may have no content; their template shows them."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text"
                                         and isinstance(part.get("text"), str) for part in content):
        return {**message, "content": "".join(part["text"] for part in content)}
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise UsageError(f"the content of a message is {_shown(content)}; allowed: a text, or a list of parts with the "
                         "type text")
    return message


def _shown(value: Any) -> str:
    return "null or missing" if value is None else repr(str(value)[:80])


def _options(row: Row, name: str, of: str = "the chat template's variables") -> dict[str, Any]:
    options = row.get(name) or {}
    if not isinstance(options, dict):
        raise UsageError(f"{name} is {str(options)[:80]!r}; allowed: an object of {of}")
    return options


def seed_of(key: str, seed: int) -> int:
    """The seed of a row without one: a hash of its id and the job's seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest(), "little") >> 1


def text_record(request: BatchRequest, text: str, answer: WholeAnswer, stats: Mapping[str, Any], model: str,
                fingerprint: str) -> OutputRecord:
    """The record of a text.

    answer       its parts, for a chat of OpenAI's batch API
    fingerprint  `Engine.fingerprint` of the worker
    """
    facts = {name: stats[name] for name in ("finish_reason", "seed", "sha256_tokens")}
    if request.kind == "simple":
        counts = {name: stats[name] for name in ("prompt_tokens", "new_tokens")}
        return _with_metadata(request, {"id": request.key, "text": text, **counts, **facts,
                                     "system_fingerprint": fingerprint})
    number = hashlib.blake2b(f"{fingerprint} {request.key}".encode(), digest_size=12).hexdigest()
    has_whole_call = bool(answer.calls) and parsed_arguments(answer.calls[-1].arguments) is not None
    reason = finish_reason_of(stats["finish_reason"], request.tools, has_whole_call=has_whole_call)
    choice: OutputRecord = {"index": 0, "logprobs": None, "finish_reason": reason}
    choice |= {"message": chat_message(answer, request.tools)} if request.kind == "chat" else {"text": text}
    name, prefix = ("chat.completion", "chatcmpl") if request.kind == "chat" else ("text_completion", "cmpl")
    prompt, new = stats["prompt_tokens"], stats["new_tokens"]
    body = {"id": f"{prefix}-{number}", "object": name, "created": 0, "model": model, "choices": [choice],
            "usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new},
            "system_fingerprint": fingerprint, "longdraft": facts}
    return {"id": f"batch_req_{number}", "custom_id": request.key, "error": None,
            "response": {"status_code": 200, "request_id": number, "body": body}}


def error_record(request: BatchRequest, code: str, message: str) -> OutputRecord:
    """The record of a row without a text. code: invalid_request | model_error | out_of_memory | worker_lost"""
    error = {"code": code, "message": message}
    if request.kind == "simple":
        return _with_metadata(request, {"id": request.key, "error": error})
    number = hashlib.blake2b(request.key.encode(), digest_size=12).hexdigest()
    return {"id": f"batch_req_{number}", "custom_id": request.key, "response": None, "error": error}


def _with_metadata(request: BatchRequest, record: OutputRecord) -> OutputRecord:
    return record if request.metadata is None else {**record, "metadata": request.metadata}


def key_of(record: Mapping[str, Any]) -> str | None:
    """The row's id, from its record; None if this is not a record."""
    key = record.get("custom_id", record.get("id"))
    return key if isinstance(key, str) and ("text" in record or "error" in record) else None


def is_failed(record: Mapping[str, Any]) -> bool:
    return record.get("error") is not None


def fingerprint_of(record: Mapping[str, Any]) -> str | None:
    """The fingerprint of the engine that wrote the record's text; None without a text."""
    body = (record.get("response") or {}).get("body") or record
    found = body.get("system_fingerprint")
    return found if isinstance(found, str) else None


def num_tokens(record: Mapping[str, Any]) -> int:
    """The number of new tokens of a record's text."""
    usage = ((record.get("response") or {}).get("body") or {}).get("usage") or {}
    return int(record.get("new_tokens", usage.get("completion_tokens", 0)))
