"""Replies to clients: OpenAI's objects, whole or as chunks of a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from longdraft.request.events import Event, TokenLogprob
from longdraft.request.tools import ToolRequest, parsed_arguments
from longdraft.server.errors import ApiError
from longdraft.server.jobs import GenerationJob
from longdraft.text.tokenizer import Tokenizer
from longdraft.text.tools.reader import (
    Part,
    ToolReader,
    WholeAnswer,
    chat_message,
    finish_reason_of,
    put_together,
)

EVENTS = "text/event-stream"
_LARGE = 8192  # tokens of a reply
_LOGPROB_COST = 16  # tokens that take as long to encode as the log-probabilities of one
MAX_STEPS = 256  # of a text that a reply is given in one turn of the event loop: reading a token takes microseconds
_SLICE = 256  # tokens whose log-probabilities are encoded at a time
ObjectType = Literal["text_completion", "chat.completion"]


@dataclass(frozen=True)
class ResponseOptions:
    """How to answer a request.

    object_type    the `object` of the reply
    id             the request's id
    prompt_tokens  of all prompts
    echo           the prompt's text for each job, sent before its own text
    logprobs       send log-probabilities
    details        send tokens, their drafters and the progress with each chunk
    n              texts for each prompt
    has_prompt_progress  send chunks with `prompt_progress` while prompts are read
    new_reader     divides an answer into thinking, text and calls; takes the seed. None: all of it is text
    tools          of the request
    warnings       returns what of the request could not be honoured
    """

    object_type: ObjectType
    id: str
    prompt_tokens: int
    is_stream: bool
    includes_usage: bool = False
    echo: list[str] | None = None
    logprobs: bool = False
    details: bool = False
    n: int = 1
    has_prompt_progress: bool = False
    new_reader: Callable[..., ToolReader] | None = None
    tools: ToolRequest | None = None
    warnings: Callable[[], Sequence[str]] = tuple

    @property
    def max_steps(self) -> int:
        """Steps of a text that a stream of it is given in one turn of the event loop."""
        return MAX_STEPS // _LOGPROB_COST if self.logprobs else MAX_STEPS


@dataclass
class Choice:
    """One text of a reply, so far."""

    job: GenerationJob
    reader: ToolReader | None
    tools: ToolRequest | None
    parts: list[Part] = field(default_factory=list)  # of a whole reply
    num_calls: int = 0  # so far
    arguments: list[str] = field(default_factory=list)  # of the latest call, so far
    has_whole_call: bool = False  # at the end: the latest call is complete
    end: str | None = None  # why the text ended, by longdraft's name
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stats: dict[str, Any] | None = None  # of the finished text
    prompt_done: int = 0  # tokens in the last chunk with `prompt_progress`

    @property
    def answer(self) -> WholeAnswer:
        """The whole answer, of the parts that were collected."""
        return put_together(self.parts)

    @classmethod
    def of(cls, options: ResponseOptions, job: GenerationJob) -> Choice:
        reader = options.new_reader(seed=job.params.seed) if options.new_reader else None
        return cls(job, reader, options.tools)

    def read(self, events: list[Event]) -> list[Part]:
        """The parts of new events. Notes the end of the text."""
        reason = next((event.finish_reason for event in events if event.finish_reason), None)
        if self.reader is None:
            parts = [Part("text", "".join(event.text for event in events))]
        else:
            parts = self.reader.read(events, is_end=reason is not None)
        for part in parts:
            if part.kind == "call":
                self.num_calls, self.arguments = self.num_calls + 1, []
            elif part.kind == "arguments":
                self.arguments.append(part.text)
        if reason:
            self.has_whole_call = self.num_calls > 0 and parsed_arguments("".join(self.arguments)) is not None
            self.end = reason
            self.finish_reason = finish_reason_of(reason, self.tools, has_whole_call=self.has_whole_call)
        self.stats = events[-1].stats
        return parts


class TextOffsets:
    """Where the tokens of a text begin in it, in characters. Those of one character begin at the same place."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = tokenizer.stream()
        self._end = 0  # of the tokens so far

    def next(self, token: int, text: str) -> int:
        """The place of the next token. text: that it adds"""
        start = self._end
        self._end += len(self._decoder.push(token))
        return max(start, self._end - len(text))  # what came before may have been held back


class Reply(Protocol):
    """A request's reply in the format of one API. A stream is begin, news and prompt_news, and end or failure."""

    @property
    def is_large(self) -> bool:
        """Whether encoding the whole reply would keep the event loop from other requests."""

    @property
    def media_type(self) -> str:
        """Of a stream. Only events have comments with the progress between them."""

    @property
    def is_numbered(self) -> bool:
        """Whether the pieces have numbers, which every reader of a detached text must see alike."""

    def begin(self) -> Iterator[bytes]:
        """The pieces before any token."""

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        """The pieces for all the events that arrived together."""

    def prompt_news(self, job: GenerationJob) -> Iterator[bytes]:
        """How much of a prompt is read, if the client requested it and anything is new."""

    def end(self) -> Iterator[bytes]:
        """The pieces after all texts."""

    def failure(self, error: ApiError) -> Iterator[bytes]:
        """The pieces in place of the rest."""

    def add(self, job: GenerationJob, events: list[Event]) -> None:
        """Collect events for `whole`."""

    def whole(self) -> Iterator[bytes]:
        """The reply of a request without a stream, in pieces of limited size."""


NewReply = Callable[[ResponseOptions, str, Tokenizer, list[GenerationJob]], Reply]
"""Makes the reply of a request from its options, the model's name, the tokenizer and the texts."""


class ReplyBuilder:
    """Replies of completions and chats, in OpenAI's format."""

    media_type = EVENTS
    is_numbered = False

    def __init__(self, options: ResponseOptions, model: str, tokenizer: Tokenizer, jobs: list[GenerationJob]) -> None:
        self._options = options
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._choices = {job: Choice.of(options, job) for job in jobs}
        self._offsets = {job: TextOffsets(tokenizer) for job in jobs}
        self._echo = dict(zip(jobs, options.echo, strict=True)) if options.echo else {}

    @property
    def _is_chat(self) -> bool:
        return self._options.object_type == "chat.completion"

    def begin(self) -> Iterator[bytes]:
        for chunk in self._first_chunks():
            yield data_event(chunk)

    def news(self, job: GenerationJob, events: list[Event]) -> Iterator[bytes]:
        for chunk in self._chunks(job, events):
            yield data_event(chunk)

    def prompt_news(self, job: GenerationJob) -> Iterator[bytes]:
        if chunk := self._prompt_progress(job):
            yield data_event(chunk)

    def end(self) -> Iterator[bytes]:
        if self._options.includes_usage:
            yield data_event(self._envelope(".chunk") | {"choices": [], "usage": self._usage()})
        yield DONE

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield data_event(error.body)
        yield DONE

    def _first_chunks(self) -> Iterable[dict[str, Any]]:
        """The chunks before any token: the roles of a chat, or the echoed prompts."""
        for job in self._choices:
            if self._is_chat:
                yield self._chunk(job, {"delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                        "finish_reason": None})
            elif job in self._echo:
                yield self._chunk(job, {"text": self._echo[job], "logprobs": None, "finish_reason": None})

    def _chunks(self, job: GenerationJob, events: list[Event]) -> Iterator[dict[str, Any]]:
        """The chunks for all the events that arrived together: one, and with tools one for each part of the answer and
        one for its end. The last one has acceptance and statistics."""
        choice = self._choices[job]
        first_call = choice.num_calls
        parts = choice.read(events)
        texts = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("thought", "text")}
        content: dict[str, Any] = {"text": texts["text"]}
        if self._options.tools:
            deltas = [*self._deltas(parts, first_call)]
            if choice.finish_reason or not deltas:
                deltas.append({"delta": {}})
            content = deltas.pop()
            for delta in deltas:
                yield self._chunk(job, {**delta, "logprobs": None, "finish_reason": None})
        elif self._is_chat:
            delta = {"reasoning_content": texts["thought"]} if texts["thought"] else {}
            has_text = texts["text"] or not texts["thought"]
            content = {"delta": delta | ({"content": texts["text"]} if has_text else {})}
        content |= {"logprobs": self._logprobs(logprobs_of(events), self._offsets[job]),
                    "finish_reason": choice.finish_reason}
        chunk = self._chunk(job, content)
        if self._options.details:
            chunk["longdraft"] = self._details(job, events)
        if choice.finish_reason:
            chunk["metrics"] = {"speculative_decoding": job.acceptance.report()}
            chunk["longdraft"] = chunk.get("longdraft", {}) | self._summary(job)
        yield chunk

    def _deltas(self, parts: list[Part], first_call: int) -> Iterator[dict[str, Any]]:
        """A delta for each part. first_call: the number of calls before them"""
        is_legacy, index = bool(self._options.tools and self._options.tools.is_legacy), first_call - 1
        for part in parts:
            if part.kind in ("thought", "text"):
                yield {"delta": {"reasoning_content" if part.kind == "thought" else "content": part.text}}
                continue
            begins = part.kind == "call"
            index += begins
            function = {"name": part.text, "arguments": ""} if begins else {"arguments": part.text}
            about = {"id": part.id, "type": "function"} if begins else {}
            yield {"delta": {"function_call": function} if is_legacy else {
                "tool_calls": [{"index": index, **about, "function": function}]}}

    def _prompt_progress(self, job: GenerationJob) -> dict[str, Any] | None:
        """A chunk that says how much of a prompt is read, as llama.cpp sends it; None if nothing is new."""
        done, total = job.prefill
        if not self._options.has_prompt_progress or not total or done == self._choices[job].prompt_done:
            return None
        self._choices[job].prompt_done = done
        content: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        seconds = time.monotonic() - (job.started or job.arrived)
        return self._chunk(job, content | {"logprobs": None, "finish_reason": None}) | {"prompt_progress": {
            "total": total, "cache": job.cached_tokens, "processed": done, "time_ms": round(seconds * 1000)}}

    def add(self, job: GenerationJob, events: list[Event]) -> None:
        """Collect events for `whole`."""
        choice = self._choices[job]
        choice.parts += choice.read(events)
        for event in events:
            choice.logprobs += (*event.prompt_logprobs, *event.logprobs)

    @property
    def is_large(self) -> bool:
        return is_large(sum(job.num_tokens for job in self._choices),
                        sum(len(choice.logprobs) for choice in self._choices.values()))

    def whole(self) -> Iterator[bytes]:
        """The reply of a request without `stream`, as JSON in pieces of limited size."""
        choices = [choice for choice in self._choices.values() if choice.logprobs]
        return pieces_around(self._whole, map(self._logprob_pieces, choices))

    def _logprob_pieces(self, choice: Choice) -> Iterator[bytes]:
        """The log-probabilities of a whole text as JSON."""
        entries = choice.logprobs
        shape = self._logprobs(entries[:1], TextOffsets(self._tokenizer)) or {}
        separator = "{"
        for key, value in shape.items():
            yield f"{separator}{json.dumps(key)}:".encode()
            separator = ","
            if not isinstance(value, list):
                yield json.dumps(value).encode()
                continue
            yield from list_pieces(entries, self._encoder(key))
        yield b"}"

    def _encoder(self, key: str) -> Callable[[list[TokenLogprob]], Sequence[object]]:
        """Encodes a list of the log-probabilities, one slice after the other."""
        offsets = TextOffsets(self._tokenizer)
        return lambda part: (self._logprobs(part, offsets) or {})[key]

    def _whole(self, mark: str) -> dict[str, Any]:
        """The reply, with `mark` in the place of log-probabilities."""
        choices = []
        for job, choice in self._choices.items():
            answer = choice.answer
            content: dict[str, Any] = {"text": self._echo.get(job, "") + answer.content}
            if self._is_chat:
                content = {"message": chat_message(answer, self._options.tools)}
            has_logprobs = self._options.logprobs and choice.logprobs
            choices.append({"index": job.index, **content, "logprobs": mark if has_logprobs else None,
                            "finish_reason": choice.finish_reason, "longdraft": self._summary(job),
                            "metrics": {"speculative_decoding": job.acceptance.report()}})
        reply = self._envelope("") | {"choices": choices, "usage": self._usage()}
        if len(choices) == 1:  # as in vLLM
            reply |= {name: choices[0].pop(name) for name in ("metrics", "longdraft")}
        return reply

    def _usage(self) -> dict[str, Any]:
        written = sum(job.num_tokens for job in self._choices)
        jobs = list(self._choices)
        # Of several texts of one prompt, the first reads the prompt, and the prefix tree serves it to the rest.
        cached = sum(min(job.cached_tokens for job in jobs[start : start + self._options.n])
                     for start in range(0, len(jobs), self._options.n))
        return {"prompt_tokens": self._options.prompt_tokens, "completion_tokens": written,
                "total_tokens": self._options.prompt_tokens + written,
                "prompt_tokens_details": {"cached_tokens": cached},
                "completion_tokens_details": {"reasoning_tokens": sum(job.reasoning_tokens for job in jobs)}}

    def _envelope(self, suffix: str) -> dict[str, Any]:
        object_type = self._options.object_type + (suffix if self._is_chat else "")
        return {"id": self._options.id, "object": object_type, "created": self._created, "model": self._model,
                "system_fingerprint": None}

    def _chunk(self, job: GenerationJob, content: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._options.includes_usage else {}
        return self._envelope(".chunk") | {"choices": [{"index": job.index, **content}]} | usage

    def _summary(self, job: GenerationJob) -> dict[str, Any]:
        warnings = list(self._options.warnings())
        return {"id": job.id, "seed": job.params.seed, "journal": job.resume_id if job.keeps_journal else None,
                "finish_reason": job.finish_reason, "stats": self._choices[job].stats,
                **({"warnings": warnings} if warnings else {})}

    def _details(self, job: GenerationJob, events: list[Event]) -> dict[str, Any]:
        return {"id": job.id, "seed": job.params.seed,
                "tokens": [token for event in events for token in event.tokens],
                "pieces": [piece for event in events for piece in event.pieces],
                "sources": [source for event in events for source in event.sources],
                "steps": [len(event.tokens) for event in events],
                "progress": job.progress()}

    def _logprobs(self, entries: list[TokenLogprob], offsets: TextOffsets) -> dict[str, Any] | None:
        """Log-probabilities as the API sends them. offsets: that have read the tokens before them"""
        if not self._options.logprobs or not entries:
            return None
        if self._is_chat:
            return {"content": token_logprobs(entries, self._tokenizer), "refusal": None}
        texts = [self._tokenizer.text_of(e.token) for e in entries]
        return {"tokens": texts, "token_logprobs": [e.logprob for e in entries],
                "text_offset": [offsets.next(e.token, text) for e, text in zip(entries, texts, strict=True)],
                "top_logprobs": [self._top_by_text(e) for e in entries]}

    def _top_by_text(self, entry: TokenLogprob) -> dict[str, float] | None:
        """The likeliest tokens and the sampled one by their text, which the format uses as key. Of equal texts the
        likeliest remains."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in sorted([*entry.top, (entry.token, entry.logprob)], key=lambda each: -each[1]):
            top.setdefault(self._tokenizer.text_of(token), value)
        return top


DONE = b"data: [DONE]\n\n"


def is_large(num_tokens: int, num_logprobs: int) -> bool:
    """Whether encoding a whole reply would keep the event loop from other requests. num_logprobs: tokens that have
    log-probabilities"""
    return num_tokens + _LOGPROB_COST * num_logprobs > _LARGE


def logprobs_of(events: Iterable[Event]) -> list[TokenLogprob]:
    return [entry for event in events for entry in event.logprobs]


def token_logprobs(entries: Iterable[TokenLogprob], tokenizer: Tokenizer, *, has_ids: bool = False
                   ) -> list[dict[str, Any]]:
    """Log-probabilities as chats have them. has_ids: with the ids of the tokens"""
    def described(token: int, logprob: float | None) -> dict[str, Any]:
        text = tokenizer.text_of(token)
        about = {"token": text, "logprob": logprob, "bytes": tokenizer.bytes_of(token, text)}
        return {"id": token, **about} if has_ids else about

    return [described(entry.token, entry.logprob) | {"top_logprobs": [described(*pair) for pair in entry.top]}
            for entry in entries]


def pieces_around(content: Callable[[str], object], lists: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A content as JSON, in pieces. content: makes it, with a mark in the place of each of the `lists`; lists: which
    are encoded one piece after the other"""
    mark = secrets.token_hex(16)
    first, *others = as_json(content(mark)).split(f'"{mark}"'.encode())
    yield first
    for pieces, other in zip(lists, others, strict=False):
        yield from pieces
        yield other


def list_pieces(entries: list[TokenLogprob], encoded: Callable[[list[TokenLogprob]], Sequence[object]]
                ) -> Iterator[bytes]:
    """A list with an item for each entry as JSON, in pieces. encoded: the items of some entries"""
    yield b"["
    for start in range(0, len(entries), _SLICE):
        yield (b"," if start else b"") + as_json(encoded(entries[start : start + _SLICE]))[1:-1]
    yield b"]"


def as_json(content: object) -> bytes:
    """JSON without white space, in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def data_event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + as_json(content) + b"\n\n"


def progress_comment(content: dict[str, Any]) -> bytes:
    """A comment, which clients ignore and which keeps proxies from closing the connection."""
    return b": progress " + json.dumps(content).encode() + b"\n\n"


def event_stream(pieces: AsyncIterator[bytes], stall_s: float, on_close: Callable[[], None],
                 headers: dict[str, str], media_type: str = EVENTS) -> TimedStream:
    """A response of server-sent events, or of another type in pieces."""
    return TimedStream(pieces, stall_s, on_close, media_type,
                       {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers})


class TimedStream(StreamingResponse):
    """A response in pieces, until the client disconnects or reads nothing for `stall_s` seconds.

    on_close  called when the stream is over, for whatever reason
    """

    def __init__(self, pieces: AsyncIterator[bytes], stall_s: float, on_close: Callable[[], None], media_type: str,
                 headers: dict[str, str] | None = None) -> None:
        super().__init__(pieces, headers=headers, media_type=media_type)
        self._stall_s, self._on_close = stall_s, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError:
                raise ClientDisconnect from None

        with suppress(ClientDisconnect):
            await super().stream_response(send_in_time)
