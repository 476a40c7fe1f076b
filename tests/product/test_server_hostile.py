"""Hostile load: bodies that cost more than they should, too many requests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
from types import SimpleNamespace

import httpx
import pytest
from pydantic import ValidationError

from helpers import serving
from longdraft.errors import UsageError
from longdraft.server import admission
from longdraft.server import run as running
from longdraft.server.admission import BoundedThreads, Turnstile
from longdraft.server.app import App
from longdraft.server.body_types import MAX_STOP_LENGTH, MAX_STOPS
from longdraft.server.errors import ApiError
from longdraft.server.metrics import ServerMetrics
from longdraft.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from longdraft.server.settings import ServerSettings

pytestmark = pytest.mark.full

COUNT = 100_000  # items of a hostile list
MESSAGE = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def engine():
    return serving.load("novelist")


@pytest.fixture(scope="module")
def server(engine):
    with serving.running(engine, max_connections_per_address=8, stall_s=0.5) as found:
        yield found


def send(app: App, path: str, body: bytes, method: str = "POST", **headers: str) -> httpx.Response:
    """A request to the application without a socket."""
    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.request(method, path, content=body,
                                        headers={"Content-Type": "application/json", **headers})

    return asyncio.run(post())


# Bodies


@pytest.mark.parametrize("model, body", [
    (DetokenizeRequest, {"tokens": [None] * COUNT}),
    (CompletionRequest, {"prompt": "a", "stop": [None] * COUNT}),
    (CompletionRequest, {"prompt": "a", "stop": ["x"] * COUNT}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["x"] * COUNT}),
    (CompletionRequest, {"prompt": "a", "longdraft": {"stop_token_ids": [None] * COUNT}}),
    (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(COUNT)), "x")}),
    (CompletionRequest, {"prompt": "a", "longdraft": {"drafter_options": dict.fromkeys(map(str, range(COUNT)))}}),
    (CompletionRequest, {"prompt": "a", **dict.fromkeys(map(str, range(COUNT)))}),
    (CompletionRequest, {"prompt": [None] * COUNT}),
    (ChatRequest, {"messages": [None] * COUNT}),
    (ChatRequest, {"messages": [MESSAGE] * COUNT}),
    (ChatRequest, {"messages": [{"role": "user", "content": [None] * COUNT}]}),
    (ChatRequest, {"messages": [MESSAGE], "chat_template_kwargs": dict.fromkeys(map(str, range(COUNT)))}),
    (TokenizeRequest, {"messages": [{}] * COUNT}),
], ids=lambda value: str(value)[:60])
def test_a_long_list_or_object_gives_few_errors(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 4


def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(engine, monkeypatch):
    monkeypatch.setattr(admission, "parse_body", lambda *given: pytest.fail("it was parsed"))
    reply = send(App(engine, ServerSettings()), "/detokenize", b'{"tokens": [' + b"{}," * 300_000 + b"{}]}")
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "too_many_values"


def test_an_error_quotes_little_of_the_body(engine):
    app = App(engine, ServerSettings())
    for body in ({"prompt": "a", "x" * 100_000: 1}, {"prompt": "a", "model": "x" * 200},
                 {"prompt": "a", "longdraft": {"drafter": "suffix", "drafter_options": {"x" * 100_000: 1}}}):
        reply = send(app, "/v1/completions", json.dumps(body).encode())
        assert reply.status_code in (400, 404) and len(reply.content) < 2000


@pytest.mark.parametrize("stop", [["x"] * (MAX_STOPS + 1), "x" * (MAX_STOP_LENGTH + 1), ["x" * (MAX_STOP_LENGTH + 1)]])
def test_stop_texts_have_a_largest_number_and_length(engine, stop):
    reply = send(App(engine, ServerSettings()), "/v1/completions", json.dumps({"prompt": "a", "stop": stop}).encode())
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "stop"


def test_a_text_beyond_the_context_is_refused_before_it_is_tokenised(engine, monkeypatch):
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *a, **o: pytest.fail("it was tokenised"))
    app, text = App(engine, ServerSettings()), "a " * (engine.model.config.max_positions * 8)
    assert len(text) > engine.model.config.max_positions * engine.tokenizer.longest_token
    for path, body in (("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})):
        reply = send(app, path, json.dumps(body).encode())
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded", reply.text


def test_a_long_text_is_tokenised_in_blocks_until_it_exceeds_the_context(engine, monkeypatch):
    tokenizer, lengths = engine.tokenizer, []
    encode = type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda self, text, **o: lengths.append(len(text)) or encode(
        self, text, **o))
    text = "The ship sailed on. " * 50_000
    count = len(encode(tokenizer, text))
    assert tokenizer.has_more_tokens(text, 1000) and sum(lengths) < len(text) / 2
    assert tokenizer.has_more_tokens(text, count - 2000)
    assert not tokenizer.has_more_tokens(text, count) and max(lengths) < len(text) / 3
    app = App(engine, ServerSettings())
    lengths.clear()
    reply = send(app, "/v1/completions", json.dumps({"prompt": "a b " * 200_000}).encode())
    assert reply.json()["error"]["code"] == "context_length_exceeded" and sum(lengths) < 800_000


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_tokenised(engine, work):
    text = "The ship sailed on. " * 20_000
    ids = engine.tokenizer.encode(text)
    ended, ticks = threading.Event(), []
    thread = threading.Thread(target=lambda: [ticks.append(1) for _ in iter(lambda: ended.wait(1e-3), True)])
    thread.start()
    before = len(ticks)
    for _ in range(1 if work == "encode" else 10):
        engine.tokenizer.encode(text) if work == "encode" else engine.tokenizer.decode(ids)
    found = len(ticks) - before
    ended.set()
    thread.join()
    assert found > 10


# Too many requests


class Caller:
    """A request of a client that hangs up when told."""

    def __init__(self) -> None:
        self.has_left = False

    async def is_disconnected(self) -> bool:
        return self.has_left


def test_work_beyond_the_queue_gets_429_and_that_of_a_client_who_left_is_not_done(monkeypatch):
    monkeypatch.setattr(admission, "_DISCONNECT_POLL_S", 0.01)

    async def main():
        threads, gate, done = BoundedThreads("small", 1, 2, ServerMetrics("m")), threading.Event(), []
        stays, leaves = Caller(), Caller()
        first = asyncio.create_task(threads.run(stays, lambda: gate.wait(10) and done.append("first")))
        second = asyncio.create_task(threads.run(leaves, lambda: done.append("second")))
        await asyncio.sleep(0.02)
        with pytest.raises(ApiError) as refused:
            await threads.run(stays, lambda: done.append("third"))
        assert refused.value.status_code == 429 and int(refused.value.headers["Retry-After"]) > 0
        leaves.has_left = True
        with pytest.raises(ApiError) as left:
            await second
        assert left.value.status_code == 499
        await asyncio.sleep(0)
        third = asyncio.create_task(threads.run(stays, lambda: done.append("third")))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, third)
        assert done == ["first", "third"]
        await asyncio.sleep(0.01)
        threads.require_room()

    asyncio.run(main())


def test_small_requests_do_not_wait_for_large_ones(engine, monkeypatch):
    """Large ones get 429 when their queue is full, before their bodies are read."""
    app, gate = App(engine, ServerSettings()), threading.Event()
    small, large = b'{"prompt": "a"}', json.dumps({"prompt": "a" * 100_000}).encode()
    encode = type(engine.tokenizer).encode
    monkeypatch.setattr(type(engine.tokenizer), "encode",
                        lambda self, text, **o: encode(self, text, **o) if len(text) < 99 or gate.wait(20) else None)

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30,
                                     headers={"Content-Type": "application/json"}) as client:
            held = [asyncio.create_task(client.post("/tokenize", content=large)) for _ in range(admission._MAX_LARGE)]
            while app.service.admission._large._num_pending < admission._MAX_LARGE:
                await asyncio.sleep(0.01)
            refused = await client.post("/tokenize", content=large)
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert (await client.post("/tokenize", content=small)).json()["count"] == 1
            gate.set()
            assert {(await each).status_code for each in held} == {200}
        assert app.service.admission._num_bytes == 0

    asyncio.run(main())


@pytest.mark.parametrize("is_announced", [True, False])
def test_large_bodies_are_read_only_if_they_will_be_prepared_and_a_few_parts_at_a_time(
        engine, monkeypatch, is_announced):
    app, gate, turn, parts = App(engine, ServerSettings()), threading.Event(), [0], []
    encode = type(engine.tokenizer).encode
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *a, **o: gate.wait(20) and encode(*a, **o))
    text, count = b'{"prompt": "' + b"a" * 100_000 + b'"}', admission._MAX_LARGE + 5

    async def body(number):
        for start in range(0, len(text), 4000):
            parts.append((turn[0], number, start))
            yield text[start : start + 4000]

    async def main():
        headers = {"Content-Type": "application/json"} | ({"Content-Length": str(len(text))} if is_announced else {})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=30,
                                     headers=headers) as client:
            asked = [asyncio.create_task(client.post("/tokenize", content=body(number))) for number in range(count)]
            while app.service.admission._large._num_pending < admission._MAX_LARGE:
                turn[0] += 1
                await asyncio.sleep(0)
            gate.set()
            return [(await each).status_code for each in asked]

    statuses = asyncio.run(main())
    assert sorted(statuses) == [200] * admission._MAX_LARGE + [429] * 5
    read = [sum(number == of for _, of, _ in parts) * 4000 for number in range(count)]
    refused = [read[number] for number in range(count) if statuses[number] == 429]
    assert max(refused) <= (0 if is_announced else admission.SMALL_BODY + 8000) < len(text)
    turns = [turn for turn, _, start in parts if is_announced or start > admission.SMALL_BODY + 8000]
    assert max(map(turns.count, turns)) <= admission._PARTS
    assert app.service.admission._num_large == app.service.admission._num_bytes == 0


def test_the_thread_for_large_bodies_rests(monkeypatch):
    now, slept = [0.0], []
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    threads = BoundedThreads("large", 1, 4, ServerMetrics("m"), rest=2.0)
    threads._do(lambda: now.append(now.pop() + 3.0))
    now[0] += 1.0
    threads._do(lambda: None)
    assert slept == [0.0, 5.0]  # six seconds after three of work, of which one has passed


def test_bodies_share_a_bounded_memory(engine, monkeypatch):
    monkeypatch.setattr(admission, "_BODIES", 1)
    app = App(engine, ServerSettings(max_body_bytes=10_000))

    async def main():
        held, half = asyncio.Event(), b" " * 6000

        async def slow():
            yield half
            await held.wait()
            yield b'{"prompt": "a"}'

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost",
                                     headers={"Content-Type": "application/json"}) as client:
            first = asyncio.create_task(client.post("/tokenize", content=slow()))
            while app.service.admission._num_bytes < len(half):
                await asyncio.sleep(0.001)
            assert (await client.post("/tokenize", content=half)).status_code == 429
            held.set()
            assert (await first).status_code == 200
            assert (await client.post("/tokenize", content=half)).status_code == 400  # read, and found to be empty
        assert app.service.admission._num_bytes == 0

    asyncio.run(main())


# Many requests at the same time


def test_requests_that_arrive_together_begin_in_several_turns_of_the_event_loop():
    async def main():
        stile, begun, turns = Turnstile(each=2), [], []

        async def request(number):
            await stile.enter()
            begun.append(number)

        async def count():
            while len(begun) < 9:
                turns.append(len(begun))
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(request(number)) for number in range(10)]
        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        tasks[4].cancel()
        await asyncio.gather(*tasks, counting, return_exceptions=True)
        assert begun == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(turns)) and len(turns) > 4
        await stile.enter()  # nothing waits any more

    asyncio.run(main())


def test_health_is_answered_before_requests_that_arrived_earlier(engine):
    app, done = App(engine, ServerSettings()), []

    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            async def ask(path):
                await client.get(path)
                done.append(path)

            await asyncio.gather(*(ask("/version") for _ in range(40)), ask("/health"), ask("/ready"), ask("/metrics"))

    asyncio.run(main())
    assert max(done.index(path) for path in ("/health", "/ready", "/metrics")) < 30


def test_what_a_server_has_loaded_is_no_work_for_the_garbage_collector(engine, monkeypatch):
    """While it runs. Afterwards everything can be collected, or nanobind would report all kernels as leaked."""
    counts = []
    monkeypatch.setattr(running.HttpServer, "run",
                        lambda self: counts.extend((gc.get_freeze_count(), len(gc.get_objects()))))
    running.run_server(engine, ServerSettings(port=0))
    frozen, visited = counts
    assert frozen > 50_000 and visited < frozen / 2 and gc.get_freeze_count() == 0


# Hosts


@pytest.mark.parametrize("settings, host, status", [
    ({"allowed_hosts": ("good.example",)}, "evil.example", 403),
    ({"allowed_hosts": ("good.example",)}, "localhost", 403),
    ({"allowed_hosts": ("good.example",)}, "good.example", 200), ({}, "evil.example", 200)])
def test_allowed_hosts_hold_off_loopback_too(engine, settings, host, status):
    app = App(engine, ServerSettings(host="0.0.0.0", allows_no_key=True, **settings))
    assert send(app, "/tokenize", b'{"prompt": "a"}', Host=host).status_code == status


NAMES = ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "writer.local", "Writer.Local:80")
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "localhost@evil.example", "127.0.0.1.nip.io",
           "127.0.0.2", "0.0.0.0", "[::2]", "", "[", "localhost, evil.example", "//localhost")


@pytest.mark.parametrize("method, path, body", [
    ("POST", "/tokenize", b'{"prompt": "a"}'), ("GET", "/version", b""), ("GET", "/v1/longdraft/generations", b""),
    ("OPTIONS", "/version", b"")])
def test_a_local_server_without_a_key_answers_to_its_names_only(engine, tmp_path, method, path, body):
    """A web page can give its own name the address of the loopback (DNS rebinding). With a key it gains nothing."""
    given = {"journals": tmp_path, "allowed_hosts": ("Writer.local",), "cors_origins": ("https://good.example",)}
    app, with_key = App(engine, ServerSettings(**given)), App(engine, ServerSettings(**given, api_keys=("secret",)))
    for host in NAMES + FOREIGN:
        for origin in ({}, {"Origin": "https://good.example"}, {"Origin": f"http://{host}"}):
            if body and host in FOREIGN and origin.get("Origin", "").startswith("http:"):
                continue  # refused for its origin as well
            reply = send(app, path, body, method=method, Host=host, **origin)
            assert (reply.status_code == 403) == (host in FOREIGN), (host, origin, reply.text)
            allowed = reply.headers.get("access-control-allow-origin")
            assert allowed in (None, "https://good.example")
    reply = send(with_key, path, body, method=method, Host="other.example", Authorization="Bearer secret")
    assert reply.status_code != 403


@pytest.mark.parametrize("host", ["http://a", "a:80", "a/b", "a b", ""])
def test_an_allowed_host_has_no_scheme_and_no_port(host):
    with pytest.raises(UsageError, match="leave scheme and port out"):
        ServerSettings(allowed_hosts=(host,))
