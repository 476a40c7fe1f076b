"""Texts that outlive their clients: the events of such a text are kept, and any client with its key can read on.

    POST /v1/chat/completions  {"stream": true, "longdraft": {"detach": true}}       id: chatcmpl-1:40 on each chunk
    GET /v1/longdraft/generations/chatcmpl-1/events?from=40                           what comes behind 40 tokens

A reply is a function of the events. So a new reader makes its own from the beginning, and sends what the client has not
seen. All of this runs in the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from longdraft.request.events import Event
from longdraft.server.errors import ApiError, retry_later
from longdraft.server.jobs import GenerationJob
from longdraft.server.prepare import PreparedRequest
from longdraft.server.replies import NewReply, Reply, progress_comment

_MAX_KEPT = 64  # texts; each holds its tokens and their text
_POLL_S = 0.5  # how often a text is asked whether a client still reads it


class DetachedText:
    """One text, and its events so far.

    make_reply  a new reply in the format of the request, or in another one
    key_label   of the key whose client may read it
    """

    def __init__(self, prepared: PreparedRequest, make_reply: Callable[[NewReply | None], Reply], detach_s: float,
                 cancel: Callable[[GenerationJob, BaseException], None]) -> None:
        self.job, = prepared.jobs
        self.is_stream = prepared.options.is_stream
        self.make_reply = make_reply
        self.key_label = prepared.events.key_label
        self.error: BaseException | None = None
        self.is_ended = False
        self._prepared, self._detach_s, self._cancel = prepared, detach_s, cancel
        self._max_steps = prepared.options.max_steps
        self._events: list[Event] = []
        self._reply: Reply | None = None  # of `so_far`
        self._num_told = 0  # events that it has
        self._telling = asyncio.Lock()
        self._changed = asyncio.Event()
        self._num_readers = 0
        self._unread_since = time.monotonic()

    async def collect(self) -> None:
        """Keep the events until the text has ended, and for a while after it. A text without a reader is cancelled."""
        while not self.is_ended:
            news = await self._prepared.events.take(_POLL_S)
            self._events += news.events.get(self.job, ())
            if self.job in news.ended:
                self.error, self.is_ended = news.ended[self.job], True
            self._changed.set()
            self._changed = asyncio.Event()
            if not self._num_readers and time.monotonic() - self._unread_since > self._detach_s:
                self._cancel(self.job, ApiError(408, f"no client read the text for {self._detach_s:g} s",
                                                code="detached"))
        self._prepared.events.close()
        await asyncio.sleep(self._detach_s)

    async def so_far(self) -> Reply:
        """The reply in the request's format with all events so far. A client that asks for it is a reader."""
        self._unread_since = time.monotonic()
        async with self._telling:
            self._reply = self._reply or self.make_reply(None)
            while new := self._events[self._num_told : self._num_told + self._max_steps]:
                self._num_told += len(new)
                self._reply.add(self.job, new)
                await asyncio.sleep(0)
        return self._reply

    async def batches(self, interval_s: float) -> AsyncIterator[list[Event]]:
        """All events, from the first one on, as they come; an empty list after `interval_s` seconds without any."""
        self._num_readers += 1
        position = 0
        try:
            while position < len(self._events) or not self.is_ended:
                changed = self._changed
                if position == len(self._events):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(interval_s):
                            await changed.wait()
                batch = self._events[position : position + self._max_steps]
                position += len(batch)
                if batch or not self.is_ended:
                    yield batch
                await asyncio.sleep(0)
        finally:
            self._num_readers -= 1
            self._unread_since = time.monotonic()

    async def stream(self, reply: Reply, num_seen: int, interval_s: float,
                     to_error: Callable[[BaseException], ApiError]) -> AsyncIterator[bytes]:
        """The pieces of a reply behind the first `num_seen` tokens, each with an id from which a client can go on."""
        count = 0
        begun = list(reply.begin())
        for piece in begun if num_seen == 0 else ():
            yield self._named(piece, 0)
        async for batch in self.batches(interval_s):
            if not batch:
                yield progress_comment({"id": self.job.id, **self.job.progress()})
            seen, new = _split(batch, max(0, num_seen - count))
            for events, is_new in ((seen, False), (new, True)):
                # Numbered pieces must not depend on how many steps a reader gets together.
                for step in [[event] for event in events] if reply.is_numbered else [events] if events else []:
                    count += sum(len(event.tokens) for event in step)
                    for piece in reply.news(self.job, step):
                        if is_new:
                            yield self._named(piece, count)
        for piece in reply.failure(to_error(self.error)) if self.error else reply.end():
            yield self._named(piece, count)

    def _named(self, piece: bytes, count: int) -> bytes:
        return f"id: {self.job.id}:{count}\n".encode() + piece


async def behind(pieces: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    """The pieces of a stream without the first `count` of them. Comments do not count."""
    async for piece in pieces:
        if count and not piece.startswith(b":"):
            count -= 1
        else:
            yield piece


def _split(events: list[Event], count: int) -> tuple[list[Event], list[Event]]:
    """The events of the first `count` tokens, and the remaining events. An event may be in both."""
    before: list[Event] = []
    for index, event in enumerate(events):
        size = len(event.tokens)
        if size > count or event.finish_reason:  # the end of a text is always sent
            first, last = _part(event, 0, count), _part(event, count, size)
            seen = [first._replace(finish_reason=None, stats=None)] if count else []
            return [*before, *seen], [last, *events[index + 1 :]]
        before.append(event)
        count -= size
    return before, []


def _part(event: Event, start: int, end: int) -> Event:
    """An event with some of its tokens."""
    pieces = event.pieces[start:end]
    return event._replace(tokens=event.tokens[start:end], pieces=pieces, text="".join(pieces),
                          sources=event.sources[start:end], logprobs=event.logprobs[start:end])


class DetachedTexts:
    """The texts of one server that outlive their clients."""

    def __init__(self) -> None:
        self._texts: dict[str, DetachedText] = {}
        self._names: dict[tuple[str | None, str], str] = {}  # labels of keys and names of conversations -> ids
        self._tasks: set[asyncio.Task[None]] = set()

    def require_room(self) -> None:
        """Raise ApiError (429) if too many texts are kept."""
        if len(self._texts) >= _MAX_KEPT:
            raise retry_later(f"{len(self._texts)} texts are kept for clients that left; allowed: {_MAX_KEPT}; retry "
                              "later", "too_many_detached")

    def add(self, text: DetachedText, conversation: str = "") -> None:
        """Keep a text, which may be found by the name of its conversation, too."""
        name = text.job.id
        self._texts[name] = text
        if conversation:
            self._names[text.key_label, conversation] = name
        task = asyncio.ensure_future(text.collect())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._drop(name, done))

    def _drop(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._texts.pop(name, None)
        self._names = {named: own for named, own in self._names.items() if own != name}

    def find(self, name: str, key_label: str | None) -> DetachedText | None:
        """A text by its id or its conversation, for the client that has its key; None if there is none."""
        text = self._texts.get(name)
        if text is None or text.key_label != key_label:
            text = self._texts.get(self._names.get((key_label, name), ""))
        return text

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
