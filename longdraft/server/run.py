"""From an application to a socket, and back at the first signal: drain, keep what is unfinished, leave."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from longdraft.engine import Engine
from longdraft.errors import UsageError
from longdraft.server.app import App
from longdraft.server.logs import record
from longdraft.server.settings import Settings

_HEADER_BYTES = 65_536  # of a request line and its headers
_HEADER_S = 30.0  # for them to come
_KEEP_ALIVE_S = 75
_UNREAD_S = 300  # that what was sent may lie unread, after which the system ends the connection
_CONNECTIONS = 1024
_SWITCH_S = 0.001  # Python's threads: requests need many short turns beside the engine's thread
_FLUSH_S = 5  # for the last words of streams, once all texts have ended


class Protocol(H11Protocol):
    """uvicorn's own, that does not wait for ever for the headers of a request: of the first one, and of those behind
    it, of which something has come (uvicorn's own patience, between requests, ends there)."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # else one that is to be closed waits for its reader for ever
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT,
                                                          _UNREAD_S * 1000)
        self._patience: asyncio.TimerHandle | None = None
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self._is_answering:
            self._be_patient()
        elif self._patience is None:
            self._patience = self.loop.call_later(_HEADER_S, self._give_up)

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _be_patient(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self._is_answering:
            self.transport.abort()


class Server(uvicorn.Server):
    """A first SIGTERM or SIGINT drains; a second ends at once."""

    def __init__(self, app: App, settings: Settings) -> None:
        super().__init__(uvicorn.Config(
            app, host=settings.host, port=settings.port, http=Protocol, ws="none", lifespan="on", log_config=None,
            access_log=False, server_header=False, h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S, limit_concurrency=_CONNECTIONS, timeout_graceful_shutdown=_FLUSH_S))
        self._app, self._settings = app, settings
        self._drain_until: float | None = None
        self._closing: asyncio.Future[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours, and the process's own again afterwards; uvicorn's raise the signal once more at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is not None:
            self.should_exit = self.force_exit = True
            return
        self._drain_until = time.monotonic() + self._settings.drain_s
        self._app.service.scheduler.drain()
        record("draining", signal=signal.Signals(sig).name, texts=self._app.service.scheduler.num_jobs,
               at_most_s=self._settings.drain_s)

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for server in getattr(self, "servers", ()):
            host, port = server.sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            record("listening", url=f"http://{shown}:{port}", model=self._settings.model_name)
            break

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until is not None and self._closing is None:
            scheduler = self._app.service.scheduler
            if not scheduler.num_jobs or time.monotonic() > self._drain_until:
                self._closing = asyncio.ensure_future(asyncio.to_thread(scheduler.close))
        if self._closing is not None and self._closing.done():
            self.should_exit = True
        return await super().on_tick(counter)


def serve(engine: Engine, settings: Settings) -> int:
    """Until a signal; returns the exit status."""
    if settings.journals:
        try:
            settings.journals.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UsageError(f"--journals cannot use {settings.journals}: {error.strerror}; choose another place, or "
                             "`none`") from error
    if not settings.is_local and not settings.api_keys:
        record("open_to_all", level=30, host=settings.host,
               warning="anybody who reaches this port can use the server; give --api-key")
    sys.setswitchinterval(_SWITCH_S)
    server = Server(App(engine, settings), settings)
    with suppress(SystemExit):  # uvicorn's word for a port that is taken
        server.run()
    if not server.started:
        print(f"longdraft: cannot listen on {settings.host}:{settings.port}; choose another --port or --host",
              file=sys.stderr)
        return 2
    return 0
