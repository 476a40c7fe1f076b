"""Hostile load: idle and slow connections, and too many of them."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time

import httpx
import pytest

from helpers import serving
from longdraft.server import connections

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def engine():
    return serving.load("novelist")


@pytest.fixture(scope="module")
def server(engine):
    with serving.running(engine, max_connections_per_address=8, stall_s=0.5) as found:
        yield found


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(65536) == b""
    return True


def test_idle_connections_give_way_to_new_ones(server):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(40)]
        for _ in range(3):
            assert httpx.get(server.url + "/health").status_code == 200
        body = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
        assert all(is_closed(each) for each in idle[:32])


def test_slow_requests_leave_room_for_health(engine):
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    with serving.running(engine, max_connections_per_address=8, stall_s=30) as server:
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(connect(server)).sendall(head)
            for path in ("/health", "/ready", "/metrics"):
                assert httpx.get(server.url + path).status_code == 200
            refused = httpx.get(server.url + "/version")
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_connections"
        serving.wait_for(lambda: httpx.get(server.url + "/version").status_code == 200)


def trickle(server, first: bytes, seconds: float) -> tuple[bytes, float]:
    """Send a byte each 50 ms until the server answers or closes: its answer, and the time it took."""
    began = time.monotonic()
    with connect(server) as connection:
        connection.sendall(first)
        connection.settimeout(0.05)
        while time.monotonic() - began < seconds:
            try:
                return connection.recv(65536), time.monotonic() - began
            except TimeoutError:
                connection.sendall(b"a")
            except ConnectionResetError:
                return b"", time.monotonic() - began
    raise AssertionError("the server waited too long")


def exchange(server, data: bytes, *, half_closes: bool = False) -> bytes:
    """What the server answers until it closes the connection."""
    with connect(server) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            if half_closes:
                connection.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                found += part
        return found


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"], ids=["alone", "pipelined"])
@pytest.mark.parametrize("count, status", [(90, b" 200 "), (12_000, b" 400 ")])
def test_a_request_has_at_most_a_hundred_headers(server, first, count, status):
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + b"a:b\r\n" * count + b"\r\n"
    answer = exchange(server, first + head)
    assert status in answer
    assert (b"more than 100 headers; send fewer" in answer) == (count > 100)
    assert httpx.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("size, count, is_read", [(1, 100, True), (1, 30_000, False), (9, 30_000, False),
                                                  (80, 6_000, True)])
def test_a_body_of_very_many_tiny_chunks_is_refused(server, size, count, is_read):
    body = b'{"prompt": "a"' + b" " * size * count + b"}"
    answer = exchange(server, CHUNKED + b"Connection: close\r\n\r\n" + chunked(body, size))
    assert (b" 200 " in answer) == is_read and (b" 400 " in answer) != is_read


def test_a_turn_of_the_event_loop_parses_a_few_chunks(server, monkeypatch):
    """A read of 5,000 chunks is parsed in many turns, in which other connections are served."""
    turns, handle = [], connections.HttpProtocol.handle_events

    def counted(self):
        before = self._parser._num_chunks
        handle(self)
        turns.append(self._parser._num_chunks - before)

    monkeypatch.setattr(connections.HttpProtocol, "handle_events", counted)
    body = b'{"prompt": "a"' + b" " * 100 + b"}"
    assert b" 200 " in exchange(server, CHUNKED + b"Connection: close\r\n\r\n" + chunked(body, 1))
    assert max(turns) <= connections._CHUNKS_IN_A_TURN and sum(turns) == len(body)


@pytest.mark.parametrize("path, host", [(b"/nowhere", b"localhost"), (b"/tokenize", b"evil.example"),
                                        (b"/version", b"localhost")])
@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5000000\r\n"])
def test_the_connection_of_a_refused_request_is_closed_before_its_body_is_read(server, path, host, framing):
    head = b"POST " + path + b" HTTP/1.1\r\nHost: " + host + b"\r\n" + framing + b"\r\n"
    answer = exchange(server, head)  # returns once the server closes: no body is sent
    assert answer.startswith(b"HTTP/1.1 4") and b"connection: close" in answer.lower()


def test_the_connection_of_a_refused_small_request_stays_open(server):
    with httpx.Client(base_url=server.url) as client:
        replies = [client.post("/nowhere", json={}), client.post("/tokenize", json={"what": 1})]
    assert [reply.headers.get("connection") for reply in replies] == [None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_sending_side_gets_its_answer(server, stream):
    body = json.dumps({"prompt": "a", "max_tokens": 200, "stream": stream}).encode()
    head = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body))
    answer = exchange(server, head + body, half_closes=True)
    assert b" 200 " in answer and (b"[DONE]" if stream else b'"finish_reason"') in answer


def test_a_client_that_closes_its_sending_side_within_its_body_is_gone(server):
    assert exchange(server, HEAD + b"Content-Length: 100\r\n\r\n{", half_closes=True) == b""


def test_the_deadlines_of_headers_and_bodies_are_totals(server, monkeypatch):
    monkeypatch.setattr(connections, "_HEADER_TIMEOUT_S", 0.4)
    answer, seconds = trickle(server, b"GET /health HTTP/1.1\r\nX: ", 5)
    assert answer == b"" and 0.2 < seconds < 3
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
    answer, seconds = trickle(server, head, 5)
    assert b" 408 " in answer and 0.4 < seconds < 3


def table(monkeypatch, total: int, each: int, limit: int = 1 << 20) -> connections.ConnectionTable:
    monkeypatch.setattr(connections, "raise_file_limit", lambda: limit)
    return connections.ConnectionTable(total, each)


class FakeConnection:
    def __init__(self, network: str, is_answering: bool = False) -> None:
        self.network, self.is_answering, self.is_open, self.transport = network, is_answering, True, self

    def abort(self) -> None:
        self.is_open = False


def test_the_address_with_most_connections_gives_way(monkeypatch):
    found = table(monkeypatch, 5, 4)
    first = [FakeConnection("a") for _ in range(3)]
    other = FakeConnection("b")
    assert all(found.add(each) for each in [*first, other])
    found.touch(first[0])
    assert all(found.add(FakeConnection("c")) for _ in range(2))
    assert [each.is_open for each in first] == [True, False, True] and other.is_open


def test_busy_connections_stay_and_surplus_ones_are_bounded(monkeypatch):
    found = table(monkeypatch, 5, 4)
    assert all(found.add(FakeConnection("a", is_answering=True)) for _ in range(4))
    surplus = [FakeConnection("a", is_answering=True) for _ in range(connections._RESERVE + 2)]
    assert not any(found.add(each) for each in surplus)
    assert [each.is_open for each in surplus] == [True] * (connections._RESERVE + 1) + [False]


def test_connections_stay_within_the_limit_of_open_files(monkeypatch):
    assert table(monkeypatch, 10_000, 10_000, 1024)._max_total == 1024 - 256 - 64
    asked = []
    monkeypatch.undo()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    assert connections.raise_file_limit() == 4096
    assert asked == [(resource.RLIMIT_NOFILE, (4096, 4096))]


@pytest.mark.parametrize("first, second, is_one", [
    ("192.0.2.1", "192.0.2.2", False), ("2001:db8::1", "2001:db8::2:3", True),
    ("2001:db8::1", "2001:db8:0:1::1", False), ("::ffff:192.0.2.1", "192.0.2.1", True), ("", "", True)])
def test_an_ipv6_network_counts_as_one_address(first, second, is_one):
    assert (connections._network_of(first) == connections._network_of(second)) is is_one
