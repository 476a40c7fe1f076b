"""Connections: a largest number for each client address and in all, time limits for the headers of a request, and a
largest number of headers and of tiny chunks.

A new connection beyond a limit takes the place of the one that has been without a request for longest. If all of them
have a request, the new one is surplus: it is served /health, /ready and /metrics only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import sys
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

_HEADER_TIMEOUT_S = 30.0
_UNACKNOWLEDGED_S = 300  # the system closes a connection whose client acknowledges no data for so long
# The option of a socket, and its value, by the system: Linux counts milliseconds, macOS seconds.
_UNACKNOWLEDGED = ((socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_S * 1000) if hasattr(socket, "TCP_USER_TIMEOUT")
                   else (0x80, _UNACKNOWLEDGED_S) if sys.platform == "darwin"  # TCP_RXT_CONNDROPTIME
                   else None)
_MACOS_FILES = 10240  # open files that macOS allows where it reports no limit (OPEN_MAX)
_MAX_READ = 1 << 15  # bytes that asyncio reads at once: other connections wait meanwhile
_MAX_HEADERS = 100  # of a request; parsing 12,000, which fit into the limit of bytes, takes 40 ms
_MAX_CHUNKS, _LEAST_CHUNK = 128, 64  # of a body: chunks of any size, and one more for so many bytes
_CHUNKS_IN_A_TURN = 16  # that a connection parses in a turn of the event loop; each takes 15 microseconds
_PROBE_S = 0.25  # between two signs of life to a client that has closed its sending side
_RESERVE = 64  # surplus connections
_OTHER_FILES = 256  # file descriptors for everything but connections: weights, journals, libraries
_IPV6_NETWORK = 64  # bits: a client has all addresses of such a network


class ConnectionTable:
    """The open connections by client address, those without a request for longest first."""

    def __init__(self, max_total: int, max_per_address: int) -> None:
        """Raises the process's limit of open files as far as the system allows, and stays within it."""
        self._max_total = max(1, min(max_total, raise_file_limit() - _OTHER_FILES - _RESERVE))
        self._max_per_address = max_per_address
        self._by_address: dict[str, dict[HttpProtocol, None]] = {}
        self._total = 0

    def add(self, connection: HttpProtocol) -> bool:
        """Add a connection, closing an idle one for it if necessary. Returns False if it is surplus.

        If all surplus connections are in use too, this one is closed at once.
        """
        group = self._by_address.get(connection.network, {})
        is_room = True
        if len(group) >= self._max_per_address:
            is_room = self._close_idle(group)
        elif self._total >= self._max_total:
            is_room = self._close_idle(max(self._by_address.values(), key=len))
        self._by_address.setdefault(connection.network, {})[connection] = None
        self._total += 1
        if self._total > self._max_total + _RESERVE:
            connection.transport.abort()
        return is_room

    def touch(self, connection: HttpProtocol) -> None:
        """A request of the connection has ended."""
        group = self._by_address.get(connection.network, {})
        if connection in group:
            group[connection] = group.pop(connection)

    def remove(self, connection: HttpProtocol) -> None:
        group = self._by_address.get(connection.network, {})
        if connection in group:
            del group[connection]
            self._total -= 1
            if not group:
                self._by_address.pop(connection.network)

    def _close_idle(self, group: dict[HttpProtocol, None]) -> bool:
        """Close the connection that has been idle for longest; returns whether there is one."""
        idle = next((each for each in group if not each.is_answering), None)
        if idle is not None:
            self.remove(idle)
            idle.transport.abort()
        return idle is not None


class _HeaderLines(ReceiveBuffer):
    """h11's buffer, which refuses too many headers before they are parsed."""

    has_too_many = False

    def maybe_extract_lines(self) -> list[bytearray] | None:
        lines: list[bytearray] | None = super().maybe_extract_lines()
        if lines is not None and len(lines) > 1 + _MAX_HEADERS:
            self.has_too_many = True
            raise h11.RemoteProtocolError("too many headers", error_status_hint=431)
        return lines


class _Parser(h11.Connection):
    """h11's parser, which parses a few chunks of a body in each turn of the event loop.

    A chunk of one byte costs as much as one of 32 KiB, and a read holds 5,000 of them.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self._receive_buffer = self.lines = _HeaderLines()
        self.chunks_left = 0  # of this turn
        self._num_chunks = self._num_bytes = 0  # of the body

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.chunks_left <= 0:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self.chunks_left -= 1
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if self._num_chunks > _MAX_CHUNKS + self._num_bytes // _LEAST_CHUNK:
                raise h11.RemoteProtocolError("too many chunks")
        return event


class HttpProtocol(H11Protocol):
    """uvicorn's protocol, with an entry in a ConnectionTable and a time limit for the headers of a request.

    uvicorn limits only the idle time between requests. This limit also holds for a new connection, and for the headers
    of a later request once its first byte has arrived. It is for all of the headers, however they arrive.
    """

    def __init__(self, *args: Any, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._parser = _Parser(self.config.h11_max_incomplete_event_size or 0)
        self._table = table
        self.network = ""
        self._has_ended = False  # the client has closed its sending side

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if _UNACKNOWLEDGED:  # otherwise a closing connection waits for its client without limit
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, *_UNACKNOWLEDGED)
        transport.max_size = _MAX_READ
        self._header_timer: asyncio.TimerHandle | None = None
        self._start_timer()
        self.network = _network_of(self.client[0] if self.client else "")
        if not self._table.add(self):
            self.app_state = {**self.app_state, "is_surplus": True}  # part of each request's scope

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timer()

    def handle_events(self) -> None:
        self._parser.chunks_left = _CHUNKS_IN_A_TURN
        super().handle_events()
        if self._parser.chunks_left <= 0:
            self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            self.handle_events()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state is not h11.SEND_RESPONSE and self.conn.our_state is not h11.IDLE:
            self.transport.abort()  # the answer has begun
            return
        if self._parser.lines.has_too_many:
            msg = f"The request has more than {_MAX_HEADERS} headers; send fewer."
        super().send_400_response(msg)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # uvicorn's returns nothing
        """A client may close its sending side after its request, and read the answer. (Not with TLS.)"""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or not self.is_answering or cycle.more_body or self.scheme == "https":
            return None  # closes the connection
        self._has_ended = True
        self._probe()
        return True

    def _probe(self) -> None:
        """Write something to a client that may have left: its system answers that, and the connection is lost. Nothing
        else tells it from one that has closed its sending side only."""
        if not self.is_answering or self.transport.is_closing():
            return
        if self.scope["http_version"] != "1.1":  # knows no informational responses
            self.transport.abort()
        elif not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self.loop.call_later(_PROBE_S, self._probe)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._table.touch(self)
        if self._has_ended and not self.is_answering:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._table.remove(self)
        super().connection_lost(exc)

    @property
    def is_answering(self) -> bool:
        """Whether the headers of a request have arrived, and its response is not complete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.response_complete

    def _start_timer(self) -> None:
        if self.is_answering:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(_HEADER_TIMEOUT_S, self._on_header_timeout)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        if not self.is_answering:
            self.transport.abort()


def _network_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed), _IPV6_NETWORK), strict=False))


def raise_file_limit() -> int:
    """Raise the limit of open files to the largest one that the process may have; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, _MACOS_FILES):
        if soft == hard or (limit == _MACOS_FILES and soft >= limit):
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
            break
        except (OSError, ValueError):  # macOS has a lower limit than the one that it reports
            pass
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
