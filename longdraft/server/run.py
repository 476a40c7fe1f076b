"""Listen on a socket until a signal, then drain: running texts finish or keep a journal."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, cast

import uvicorn

from longdraft.engine.engine import Engine
from longdraft.errors import UsageError, check
from longdraft.server.app import App
from longdraft.server.connections import ConnectionTable, HttpProtocol
from longdraft.server.logs import flush_log, log_event
from longdraft.server.settings import ServerSettings

_MAX_HEADER_BYTES = 65_536  # of the request line and the headers
_KEEP_ALIVE_S = 75
_SWITCH_INTERVAL_S = 0.00005  # of Python's threads: requests need many short turns beside the engine thread
_BACKLOG = 2048  # connections that wait in the system
_ACCEPTED = 32  # of them in a turn of the event loop; so often does asyncio try without file descriptors, too
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_REPEAT_S = 60.0  # between two lines of the log about them
_SHUTDOWN_S = 5  # for open responses, after all texts have ended


class HttpServer(uvicorn.Server):
    """uvicorn's server, which drains at the first SIGTERM, SIGINT or SIGHUP and ends immediately at the second."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        table = ConnectionTable(settings.max_connections, settings.max_connections_per_address)
        protocol = cast("type[asyncio.Protocol]", partial(HttpProtocol, table=table))
        super().__init__(uvicorn.Config(
            app, host=settings.host, port=settings.port, http=protocol, ws="none", lifespan="on", log_config=None,
            backlog=_ACCEPTED, access_log=False, server_header=False, h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S, ssl_certfile=settings.certfile, ssl_keyfile=settings.keyfile))
        self._scheduler, self._settings = app.service.scheduler, settings
        self._drain_until: float | None = None  # monotonic time
        self._closing: threading.Thread | None = None
        self._last_refusal = -math.inf  # of the system, to accept a connection: monotonic time

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs. Unlike uvicorn's, this does not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS
                  if signal.getsignal(number) is not signal.SIG_IGN}  # as nohup does with SIGHUP
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is not None:
            os._exit(128 + sig)  # at once: whatever was shown is in the journals
        self._drain_until = time.monotonic() + self._settings.drain_s
        self._scheduler.drain()
        log_event("draining", signal=signal.Signals(sig).name, texts=self._scheduler.num_jobs,
                  at_most_s=self._settings.drain_s)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An error in the event loop. The loop reports each connection that it cannot accept, thousands in a second."""
        error = context.get("exception")
        if self.should_exit and "_start_serving" in context.get("message", ""):
            return  # asyncio tries again to accept connections, after the socket was closed
        if not (isinstance(error, OSError) and error.errno in _NO_RESOURCES):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._last_refusal > _REPEAT_S:
            self._last_refusal = time.monotonic()
            log_event("connections_refused", level=logging.ERROR, reason=error.strerror,
                      cure="raise the limit of open files (ulimit -n), or lower --max-connections")

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        if self.started and self._settings.ollama_port is not None:
            self.servers.append(await self._listen(self._settings.ollama_port))
        for server in getattr(self, "servers", ()):
            for listening in server.sockets:
                with socket.socket(fileno=os.dup(listening.fileno())) as same:
                    same.listen(_BACKLOG)
        for server in getattr(self, "servers", ()):
            host, port = server.sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            log_event("listening", url=f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}",
                      model=self._settings.model_name)

    async def _listen(self, port: int) -> asyncio.Server:
        """Serve another port as the first one."""
        config = self.config
        protocol = partial(cast(Any, config.http_protocol_class), config=config, server_state=self.server_state,
                           app_state=self.lifespan.state)
        return await asyncio.get_running_loop().create_server(protocol, config.host, port, ssl=config.ssl,
                                                              backlog=config.backlog)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this ten times a second: exit once all texts have ended, or the time for them is over."""
        if self._drain_until is not None and self._closing is None and (
                not self._scheduler.num_jobs or time.monotonic() > self._drain_until):
            self._closing = threading.Thread(target=self._scheduler.close, daemon=True)
            self._closing.start()
        if self._closing is not None and not self._closing.is_alive():
            self.should_exit = True
        return await super().on_tick(counter)


def require_usable(settings: ServerSettings) -> None:
    """Create the folder of journals. Raises UsageError if no file can be written to it, or nothing can listen on the
    address."""
    if settings.journals:
        try:
            settings.journals.mkdir(parents=True, exist_ok=True, mode=0o700)
            tempfile.TemporaryFile(dir=settings.journals).close()
        except OSError as error:
            raise UsageError(f"--journals {settings.journals} cannot be written to: {error.strerror}; choose another "
                             "folder, or `none`") from error
    _require_free(settings.host, settings.port, "--port")
    if settings.ollama_port is not None:
        check(settings.ollama_port != settings.port or not settings.port, "--ollama-port", settings.ollama_port,
              "another port than --port")
        _require_free(settings.host, settings.ollama_port, "--ollama-port")


def _require_free(host: str, port: int, option: str) -> None:
    """UsageError if nothing can listen on a port. option: that sets it"""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                                     flags=socket.AI_PASSIVE):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, True)
                probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no name of a host"
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; choose another {option} or --host") from error


def run_server(engine: Engine, settings: ServerSettings) -> int:
    """Serve until a signal. Returns the exit status: 2 if the address is no longer available.

    Raises UsageError as `require_usable`.
    """
    require_usable(settings)
    if settings.journals and settings.journals.stat().st_mode & 0o077:
        log_event("journals_readable", level=logging.WARNING, folder=str(settings.journals),
                  warning="other users can list the journals; chmod 700 prevents that")
    if not settings.is_local and not settings.api_keys:
        log_event("open_to_all", level=logging.WARNING, host=settings.host,
                  warning="anyone who can reach this port can use the server")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = HttpServer(App(engine, settings), settings)
    with _frozen_objects(), suppress(SystemExit):  # raised by uvicorn if the port is taken
        server.run()
    flush_log()
    if not server.started:
        print(f"longdraft: cannot listen on {settings.host}:{settings.port}; choose another --port or --host",
              file=sys.stderr)
        return 2
    return 0


@contextmanager
def _frozen_objects() -> Iterator[None]:
    """Take what exists now out of garbage collections, until the server ends.

    A full collection visits all objects and stops all threads: with the modules of PyTorch that is 150 to 350 ms, in
    which not even /health is answered. What lives now lives as long as the server. At exit it must be collected:
    otherwise nanobind reports all objects of the kernels as leaked.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
