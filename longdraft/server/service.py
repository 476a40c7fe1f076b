"""The parts of one server, and the path of a request through them: prepare, schedule, answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, TypeVar, cast

from fastapi import Depends, Request
from fastapi.responses import Response, StreamingResponse

from longdraft.book.export import epub_pieces, markdown_pieces, parse_chapters
from longdraft.engine.engine import Engine
from longdraft.errors import LongdraftError
from longdraft.server.admission import REST, Admission, BoundedThreads
from longdraft.server.body_types import StrictModel
from longdraft.server.detached import DetachedText, DetachedTexts, behind
from longdraft.server.errors import CLIENT_CLOSED, ApiError, retry_later, to_api_error
from longdraft.server.jobs import EventQueue, GenerationJob
from longdraft.server.journals import JournalFolder
from longdraft.server.keys import KeyRing
from longdraft.server.metrics import ServerMetrics
from longdraft.server.prepare import PreparedRequest, Preparer
from longdraft.server.replies import EVENTS, MAX_STEPS, NewReply, Reply, TimedStream, event_stream, progress_comment
from longdraft.server.scheduler import Scheduler
from longdraft.server.schemas import ExportRequest
from longdraft.server.settings import ServerSettings

_MIN_VALUES = 1 << 18  # of a body: a parser takes some 20 ms for so many
_MAX_FILES = 32  # requests that read the folder of journals
_MAX_GRAMMARS = 8  # requests whose grammar is not known yet: each may take seconds, and delays these only
_MAX_EXPORTS = 8  # that are prepared or sent: each holds its text, and its latest chapter as a page
_CHUNK_INTERVAL_S = 0.01  # steps of a text that come faster than this share a chunk
_PROMPT_PROGRESS_S = 0.25  # between chunks with `prompt_progress`
_DISCONNECT_POLL_S = 0.25  # how often to check that the client of a non-streaming request is still connected
Model = TypeVar("Model", bound=StrictModel)
Prepared = TypeVar("Prepared", bound=PreparedRequest | Response)


class Service:
    """An engine with everything that serves it."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_name)
        self.keys = KeyRing(settings, self.metrics)
        self.preparer = Preparer(engine, settings)
        self.journals = JournalFolder(settings.journals, engine.tokenizer) if settings.journals else None
        self.scheduler = Scheduler(engine, settings, self.metrics, self.journals)
        self.started = time.time()
        self._prepare_engine()
        self.admission = Admission(settings, max(_MIN_VALUES, 2 * self.preparer.context_limit), self.metrics)
        self.grammars = BoundedThreads("grammar", 1, _MAX_GRAMMARS, self.metrics)
        self.files = BoundedThreads("file", 1, _MAX_FILES, self.metrics)
        self.detached = DetachedTexts()
        self._exporting = BoundedThreads("export", 1, _MAX_EXPORTS, self.metrics, rest=REST)
        self._num_exports = 0  # that are being sent

    def _prepare_engine(self) -> None:
        """Do now what would otherwise delay the first texts: hash the weights, compile the chat template."""
        tokenizer = self.engine.tokenizer
        with contextlib.suppress(LongdraftError):  # a request that needs it is refused with the reason
            _ = self.engine.fingerprint, tokenizer.longest_token, self.engine.is_tuned_for_chat

    async def respond(self, request: Request, model: type[Model],
                      prepare: Callable[[Model, EventQueue], PreparedRequest | Response]) -> Response:
        """Generate a request's texts and send them, as a stream or whole. See `prepare` and `answer`. A response in
        place of texts is sent as it is."""
        prepared = await self.prepare(request, model, prepare)
        return prepared if isinstance(prepared, Response) else await self.answer(request, prepared)

    async def prepare(self, request: Request, model: type[Model],
                      prepare: Callable[[Model, EventQueue], Prepared]) -> Prepared:
        """The texts of a request, none of which is scheduled yet.

        model    of the body
        prepare  turns the body into jobs, which write to the given queue; runs in a thread

        Raises ApiError where the request is invalid, or the server has no room for it.
        """
        label = getattr(request.state, "key_label", None)
        events = EventQueue(asyncio.get_running_loop(), label, partial(self.keys.charge, label))
        prepared = await self.admission.prepare(request, model, lambda body: prepare(body, events))
        if isinstance(prepared, PreparedRequest) and prepared.check_grammar is not None:
            await self.grammars.run(request, prepared.check_grammar)
        return prepared

    async def answer(self, request: Request, prepared: PreparedRequest) -> Response:
        """Write the texts of a request, and send them. Raises ApiError where the server has no room for it."""
        jobs = prepared.jobs
        if prepared.is_detached or request.headers.get("x-conversation-id"):
            return await self._read(request, self.detach(request, prepared))
        reply = self._new_reply(prepared)
        self.scheduler.submit(jobs)
        if prepared.options.is_stream:
            return event_stream(self._stream(prepared, reply), self.settings.stall_s, lambda: self._close(prepared),
                                {"X-Generation-Id": jobs[0].id}, reply.media_type)
        try:
            return await self._whole(request, prepared, reply)
        finally:
            self._close(prepared)

    def _new_reply(self, prepared: PreparedRequest, other: NewReply | None = None) -> Reply:
        """The reply in the request's own format, or in another one."""
        return (other or prepared.new_reply)(prepared.options, self.settings.model_name, self.engine.tokenizer,
                                             prepared.jobs)

    def detach(self, request: Request, prepared: PreparedRequest) -> DetachedText:
        """Begin a text that goes on when its client leaves. Raises ApiError as `answer` does."""
        if len(prepared.jobs) > 1:
            raise ApiError(400, f"a detached request has one text, and this one asks for {len(prepared.jobs)}; send "
                           "several requests", param="longdraft.detach", code="invalid_value")
        self.detached.require_room()
        if prepared.options.is_stream:
            _require_events(self._new_reply(prepared))
        text = DetachedText(prepared, partial(self._new_reply, prepared), self.settings.detach_s, self.scheduler.cancel)
        self.scheduler.submit(prepared.jobs)
        self.detached.add(text, request.headers.get("x-conversation-id", ""))
        return text

    async def _read(self, request: Request, text: DetachedText) -> Response:
        """The reply of a detached text."""
        if text.is_stream:
            return self.read_on(text, 0)
        reply = text.make_reply(None)
        async for batch in text.batches(_DISCONNECT_POLL_S):
            if batch:
                reply.add(text.job, batch)
            elif await request.is_disconnected():
                return Response(status_code=CLIENT_CLOSED)
        if text.error is not None:
            raise self.api_error(text.error)
        return _whole_response(reply, {"X-Generation-Id": text.job.id})

    def read_on(self, text: DetachedText, num_seen: int, other: NewReply | None = None, num_pieces: int = 0
                ) -> Response:
        """A stream of what comes behind `num_seen` tokens, or behind `num_pieces` pieces. other: a format in place of
        the request's own"""
        reply = text.make_reply(other)
        _require_events(reply)
        pieces = behind(text.stream(reply, num_seen, self.settings.progress_s, self.api_error), num_pieces)
        return event_stream(pieces, self.settings.stall_s, lambda: None, {"X-Generation-Id": text.job.id})

    async def export(self, request: Request) -> Response:
        """A text as a file, which is made and sent a chapter at a time. Raises ApiError."""
        book, body = await self.admission.prepare(request, ExportRequest, lambda body: (parse_chapters(
            body.text, body.title, body.author, body.language), body), self._exporting)
        if self._num_exports >= _MAX_EXPORTS:
            raise retry_later(f"{self._num_exports} exports are being sent; allowed: {_MAX_EXPORTS}; retry later",
                              "too_many_requests")
        is_markdown = body.format == "markdown"
        self._num_exports += 1
        return TimedStream(self._exporting.each(markdown_pieces(book) if is_markdown else epub_pieces(book)),
                           self.settings.stall_s, self._end_export,
                           "text/markdown; charset=utf-8" if is_markdown else "application/epub+zip")

    def _end_export(self) -> None:
        self._num_exports -= 1

    def api_error(self, error: BaseException) -> ApiError:
        """The client's view of an exception, without the server's folders."""
        api_error = to_api_error(error)
        for path, name in ((str(self.engine.loaded.files.folder), self.settings.model_name),
                           (f"{self.settings.journals}{os.sep}", ""),
                           (str(self.settings.journals), "the folder of journals")):
            api_error.detail = api_error.detail.replace(path, name)
        return api_error

    def _close(self, prepared: PreparedRequest) -> None:
        """The request has ended: cancel its jobs, which finished ones ignore, and drop what its client did not read."""
        for job in prepared.jobs:
            self.scheduler.cancel(job)
        prepared.events.close()

    async def _whole(self, request: Request, prepared: PreparedRequest, reply: Reply) -> Response:
        pending = set(prepared.jobs)
        prepared.events.wakes_at = MAX_STEPS  # one step would make the event loop compete with the engine each time
        while pending:
            events, ended = await prepared.events.take(_DISCONNECT_POLL_S)
            for job, new in events.items():
                reply.add(job, new)
            for job, error in ended.items():
                pending.discard(job)
                if error is not None:
                    raise self.api_error(error)
            if pending and await request.is_disconnected():
                return Response(status_code=CLIENT_CLOSED)
        return _whole_response(reply)

    async def _stream(self, prepared: PreparedRequest, reply: Reply) -> AsyncIterator[bytes]:
        for piece in reply.begin():
            yield piece
        has_comments = reply.media_type == EVENTS
        if has_comments:
            yield self._progress(prepared.jobs[0])
        pending, last_progress = set(prepared.jobs), time.monotonic()
        max_steps = prepared.options.max_steps  # of a chunk: a client that was slow gets several chunks
        while pending:
            next_progress = last_progress + self.settings.progress_s
            wait_s = max(0.0, next_progress - time.monotonic())
            if prepared.options.has_prompt_progress and any(job.state in ("queued", "prefill") for job in pending):
                wait_s = min(wait_s, _PROMPT_PROGRESS_S)
            events, ended = await prepared.events.take(wait_s)
            for job in prepared.jobs:
                for piece in reply.prompt_news(job):
                    yield piece
            for job, new in events.items():
                for start in range(0, len(new), max_steps):
                    for piece in reply.news(job, new[start : start + max_steps]):
                        yield piece
                    await asyncio.sleep(0)
            for job, error in ended.items():
                pending.discard(job)
                if error is not None:
                    for piece in reply.failure(self.api_error(error)):
                        yield piece
                    return
            if time.monotonic() >= next_progress:
                last_progress = time.monotonic()
                for job in pending if has_comments else ():
                    yield self._progress(job)
            if pending:
                await asyncio.sleep(_CHUNK_INTERVAL_S)
        for piece in reply.end():
            yield piece

    def _progress(self, job: GenerationJob) -> bytes:
        position = {"position": self.scheduler.position(job)} if job.state == "queued" else {}
        return progress_comment({"id": job.id, **job.progress(), **position})


def _whole_response(reply: Reply, headers: dict[str, str] | None = None) -> Response:
    """The reply to a request without a stream."""
    if reply.is_large:  # Starlette takes the pieces in a thread
        return StreamingResponse(reply.whole(), headers=headers, media_type="application/json")
    return Response(b"".join(reply.whole()), headers=headers, media_type="application/json")


def _require_events(reply: Reply) -> None:
    """Raise ApiError for a reply whose stream has no place for ids."""
    if reply.media_type != EVENTS:
        raise ApiError(400, "a detached text is read as events; give door=chat or door=messages, or stream false",
                       param="door", code="invalid_value")


async def _service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


ServiceDependency = Annotated[Service, Depends(_service_of)]  # for routes
