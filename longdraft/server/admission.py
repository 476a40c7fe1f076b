"""Limits before a text is queued: bodies in memory, and work in threads. Requests beyond them get 429.

    ids = await admission.prepare(request, TokenizeRequest, lambda body: engine.encode(body.prompt))

Small bodies have threads of their own, so that no small request waits behind large ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from fastapi import Request

from longdraft.server.body_types import StrictModel
from longdraft.server.errors import CLIENT_CLOSED, ApiError, retry_later
from longdraft.server.logs import log_event
from longdraft.server.metrics import ServerMetrics
from longdraft.server.schemas import parse_body
from longdraft.server.settings import ServerSettings

SMALL_BODY = 1 << 16  # bytes; preparing a larger one may take seconds
_SMALL_THREADS, _MAX_SMALL = 2, 128  # more threads would starve the event loop; requests in the threads and their queue
_MAX_LARGE = 8  # bodies that are read, wait or are prepared at the same time
_PARTS = 2  # of large bodies that are taken in one turn of the event loop
# Of threads for large bodies, exports and beginnings of texts, and of a text whose masks are slow, in times of their
# work: so that texts that are being written get most of the processor.
REST = 2.0
_BODIES = 8  # largest bodies that may be in memory together
_MAX_UNKNOWN = 1000  # names of unknown parameters in the log
_DISCONNECT_POLL_S = 0.25  # how often to check that a waiting client is still connected
_JSON_TYPES = ("json", "+json")
_OF_BROWSERS = ("origin", "referer", "sec-fetch-site")  # headers, of which each POST of a web page has one at least

Model = TypeVar("Model", bound=StrictModel)
T = TypeVar("T")


class Turnstile:
    """Lets a few requests, or parts of bodies, pass in each turn of the event loop, in order of arrival.

    A hundred that arrive together would otherwise pass in one turn, of a millisecond each, and /health would wait for
    several such turns: for its connection, its headers and its answer.
    """

    def __init__(self, each: int = 2) -> None:
        """each: how many pass in a turn."""
        self._semaphore = asyncio.Semaphore(each)

    async def enter(self) -> None:
        async with self._semaphore:
            await asyncio.sleep(0)  # until the next turn


class BoundedThreads:
    """Threads for slow work, with a bounded queue. Its methods belong to the event loop.

    rest  how long a thread rests after its work, in times of what that took, so that others have the processor
    """

    def __init__(self, name: str, num_threads: int, max_pending: int, metrics: ServerMetrics, *,
                 rest: float = 0.0) -> None:
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._name = name
        self._max_pending = max_pending
        self._metrics = metrics
        self._num_pending = 0
        self._rest = rest
        self._rests_until = 0.0  # monotonic time

    def require_room(self) -> None:
        """Raise ApiError (429) if the queue is full."""
        if self._num_pending >= self._max_pending:
            raise _overloaded(self._metrics, f"{self._num_pending} {self._name} requests are being prepared; allowed: "
                                             f"{self._max_pending}; retry later")

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """The result of `work`, which is not begun if the client disconnects while it waits in the queue."""
        self.require_room()
        loop = asyncio.get_running_loop()
        self._num_pending += 1
        task = self._executor.submit(self._do, work)
        task.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        result = asyncio.wrap_future(task)
        try:
            while not (await asyncio.wait([result], timeout=_DISCONNECT_POLL_S))[0]:
                if await request.is_disconnected():
                    raise _client_closed()
            return result.result()
        finally:
            result.cancel()  # does nothing once the work has begun

    async def each(self, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
        """The pieces, each of which is made in these threads, when the one before was sent."""
        take = partial(next, pieces, None)
        while (piece := await asyncio.wrap_future(self._executor.submit(self._do, take))) is not None:
            yield piece

    def _do(self, work: Callable[[], T]) -> T:
        """Do the work, not before the thread has rested from the last one."""
        time.sleep(max(0.0, self._rests_until - time.monotonic()))
        began = time.monotonic()
        try:
            return work()
        finally:
            now = time.monotonic()
            self._rests_until = now + (now - began) * self._rest

    def _leave(self) -> None:
        self._num_pending -= 1


@dataclass
class _Body:
    """A request's body as far as it is read. is_large: it counts as one of the large bodies."""

    content: bytearray = field(default_factory=bytearray)
    is_large: bool = False


class Admission:
    """Reads and prepares requests within the server's limits."""

    def __init__(self, settings: ServerSettings, max_values: int, metrics: ServerMetrics) -> None:
        """max_values: of all lists and objects of a body together, about."""
        self._settings = settings
        self._max_values = max_values
        self._metrics = metrics
        self._unknown: set[str] = set()  # parameters that were left out, of which the log has one line each
        self._on_unknown = self._log_unknown if settings.unknown_parameters == "warn" else None
        self._num_bytes = 0  # of all bodies that are being read or prepared
        self._num_large = 0  # of them, the large ones
        self._small = BoundedThreads("small", _SMALL_THREADS, _MAX_SMALL, metrics)
        self._large = BoundedThreads("large", 1, _MAX_LARGE, metrics, rest=REST)
        self._parts = Turnstile(_PARTS)  # of large bodies

    def _log_unknown(self, name: str) -> None:
        """Log an unknown parameter once."""
        if name not in self._unknown and len(self._unknown) < _MAX_UNKNOWN:
            self._unknown.add(name)
            log_event("unknown_parameter", level=logging.WARNING, name=name[:100])

    async def prepare(self, request: Request, model: type[Model], work: Callable[[Model], T],
                      threads: BoundedThreads | None = None) -> T:
        """The result of `work` for a request's body. Reading is limited in size and time; `work` runs in a thread: in
        one of `threads`, or of those for bodies of its size.

        Raises ApiError: 400 for an invalid body, 408 for a slow one, 413 for a large one, 429 for too many.
        """
        declared = request.headers.get("content-length", "0")
        if len(declared) > 20 or int(declared) > self._settings.max_body_bytes:  # h11 accepts digits only
            raise self._too_large()
        body = _Body()
        self._require_room(int(declared), body)
        try:
            await self._read(request, body)
            if body.content:
                _require_json(request)
            return await (threads or self._threads_for(len(body.content))).run(
                request, lambda: _spelled(work, parse_body(model, body.content or b"{}", self._on_unknown)))
        finally:
            self._num_bytes -= len(body.content)
            self._num_large -= body.is_large

    async def _read(self, request: Request, body: _Body) -> None:
        """Read the request's body, and count its bytes."""
        try:
            async with asyncio.timeout(self._settings.stall_s):
                num_values, is_whole = 0, False
                while not is_whole:  # `request.stream()` does the same, at several times the cost for a refused body
                    if body.is_large:  # meanwhile the connection is not read
                        await self._parts.enter()
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise _client_closed()
                    part = message.get("body", b"")
                    is_whole = not message.get("more_body", False)
                    body.content += part
                    self._num_bytes += len(part)
                    num_values += part.count(b",")
                    if len(body.content) > self._settings.max_body_bytes:
                        raise self._too_large()
                    if num_values > self._max_values:  # parsing them would hold up all other requests
                        raise ApiError(400, f"the body has more than {self._max_values:,} values; send several "
                                       "requests", code="too_many_values")
                    if part:
                        self._require_memory(self._num_bytes)
                    if len(body.content) > SMALL_BODY and not body.is_large:  # its size was not announced
                        self._require_room(len(body.content), body)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._settings.stall_s:g} s", code="body_timeout",
                           headers={"Connection": "close"}) from None

    def _require_room(self, num_bytes: int, body: _Body) -> None:
        """Raise ApiError (429) if there is no room for one more body, of `num_bytes`; a large one is counted."""
        self._require_memory(self._num_bytes - len(body.content) + num_bytes)
        self._threads_for(num_bytes).require_room()
        if num_bytes > SMALL_BODY and self._num_large >= _MAX_LARGE:
            raise _overloaded(self._metrics, f"{self._num_large} large requests are being prepared; allowed: "
                                             f"{_MAX_LARGE}; retry later")
        body.is_large = num_bytes > SMALL_BODY
        self._num_large += body.is_large

    def _require_memory(self, num_bytes: int) -> None:
        """Raise ApiError (429) if all bodies together may not have `num_bytes`."""
        if num_bytes > _BODIES * self._settings.max_body_bytes:
            raise _overloaded(self._metrics, "the bodies of other requests fill the memory for bodies; retry later")

    def _threads_for(self, num_bytes: int) -> BoundedThreads:
        return self._large if num_bytes > SMALL_BODY else self._small

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._settings.max_body_bytes:,} bytes; send less, or raise "
                        "--max-body-mib", code="request_too_large")


def _spelled(work: Callable[[Model], T], body: Model) -> T:
    """The result of `work`, whose errors name parameters as the body does."""
    try:
        return work(body)
    except ApiError as error:
        given = (name for name, own in body.spellings.items()
                 if own == error.param and name.partition(".")[0] in body.model_fields_set)
        if error.param and (name := next(given, "")):
            error.detail, error.param = error.detail.replace(error.param, name, 1), name
        raise


def _overloaded(metrics: ServerMetrics, message: str) -> ApiError:
    metrics.count_failure("overloaded")
    return retry_later(message, "too_many_requests")


def _require_json(request: Request) -> None:
    """Browsers send no other types: a web page could send them to this server without the browser's permission. Other
    clients, such as curl, name any type."""
    if not any(name in request.headers for name in _OF_BROWSERS):
        return
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (media_type.startswith("application/") and media_type.endswith(_JSON_TYPES)):
        raise ApiError(400, "the body is not JSON; send Content-Type: application/json", code="invalid_json")


def _client_closed() -> ApiError:
    return ApiError(CLIENT_CLOSED, "the client has disconnected", code="disconnected")
