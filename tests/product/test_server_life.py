"""Journals over HTTP, shutdown, kill -9, and clients that misbehave."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from helpers import serving
from longdraft.engine.engine import Engine
from longdraft.journal.format import FILE
from longdraft.server import journals
from longdraft.server.journals import JournalFolder
from longdraft.server.replies import event_stream
from longdraft.text import stream as text_stream
from longdraft.text.stream import TextStream

pytestmark = pytest.mark.full

URL = "/v1/longdraft/generations"
BODY = {"prompt": "The ship", "max_tokens": 400, "seed": 7, "stream": True, "longdraft": {"min_p": 0.1}}


@pytest.fixture(scope="module")
def engine():
    return serving.load("novelist")


@pytest.fixture
def server(engine, tmp_path):
    with serving.running(engine, journals=tmp_path / "journals", journal_from=5000, stall_s=1.0) as found:
        yield found


@functools.lru_cache
def uncut(engine, count=400) -> str:
    return "".join(e.text for e in engine.generate("The ship", engine.params(max_new_tokens=count, seed=7, min_p=0.1)))


def body(count=400, **extension):
    return BODY | {"max_tokens": count, "longdraft": {"min_p": 0.1, **extension}}


def read_some(url, body, least=20) -> str:
    """Read `least` chunks of a stream, then disconnect."""
    text, count = "", 0
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                count += 1
                if count >= least:
                    break
    return text


def resume(url, name, **body) -> str:
    reply = httpx.post(f"{url}{URL}/{name}/resume", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def listed(url) -> dict[str, dict]:
    return {each["id"]: each for each in httpx.get(url + URL).json()["data"]}


def test_an_interrupted_text_is_resumed_by_its_id(server, engine):
    shown = read_some(server.url, body(2000, journal="mine"))
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    about = listed(server.url)["mine"]
    assert about["state"] == "cut" and about["resumable"] and about["title"] == "The ship"
    detail = httpx.get(f"{server.url}{URL}/mine").json()
    assert detail["text"].startswith(shown) and detail["sampling"]["seed"] == 7
    assert resume(server.url, "mine", drafter="suffix") == uncut(engine, 2000)
    assert listed(server.url)["mine"]["state"] == "finished"
    assert resume(server.url, "mine") == uncut(engine, 2000)  # again, after its end


def test_other_texts_are_written_while_a_long_journal_is_resumed(server, engine, monkeypatch):
    """Reading the journal, and decoding its tokens, do not hold up the engine."""
    read_some(server.url, body(800, journal="mine"))
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    gate, begin, push = threading.Event(), Engine.resume, TextStream.push
    monkeypatch.setattr(Engine, "resume", lambda *given, **options: gate.wait(20) and begin(*given, **options))
    monkeypatch.setattr(text_stream, "_REPLAYED", 8)
    states = []

    def pushed(self, tokens):  # while the journal's tokens are decoded
        states.append(sorted(job.state for job in server.scheduler.jobs() if job.ended is None))
        return push(self, tokens)

    with ThreadPoolExecutor(1) as pool:
        resumed = pool.submit(resume, server.url, "mine")
        serving.wait_for(lambda: any(job.state == "prefill" for job in server.scheduler.jobs()))
        short = {"prompt": "a", "max_tokens": 5}
        assert httpx.post(server.url + "/v1/completions", json=short, timeout=10).status_code == 200
        with httpx.stream("POST", server.url + "/v1/completions", json=body(3000, journal=False), timeout=30) as reply:
            lines = reply.iter_lines()
            next(line for line in lines if line.startswith("data: "))
            monkeypatch.setattr(TextStream, "push", pushed)
            gate.set()
            serving.wait_for(lambda: states.count(["prefill", "running"]) > 9)
        assert resumed.result(60) == uncut(engine, 800)


def test_a_resumed_stream_starts_with_the_existing_text(server, engine):
    shown = read_some(server.url, body(journal="mine"))
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    reply = httpx.post(f"{server.url}{URL}/mine/resume", json={"stream": True, "details": True}, timeout=60)
    chunks = serving.events(reply.text)
    assert chunks[0]["choices"][0]["text"].startswith(shown)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == uncut(engine)
    assert sum(len(chunk["longdraft"]["tokens"]) for chunk in chunks) == 400


def test_a_journal_belongs_to_one_text(server):
    read_some(server.url, body(50_000, journal="mine"), least=1)
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    reply = httpx.post(server.url + "/v1/completions", json=body(journal="mine"))
    assert reply.status_code == 409 and reply.json()["error"]["code"] == "journal_exists"
    with httpx.stream("POST", f"{server.url}{URL}/mine/resume", json={"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        serving.wait_for(lambda: listed(server.url)["mine"]["state"] == "running")
        assert httpx.post(f"{server.url}{URL}/mine/resume", json={}).status_code == 409
        assert httpx.delete(f"{server.url}{URL}/mine").status_code == 409
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    assert httpx.delete(f"{server.url}{URL}/mine").json() == {"id": "mine", "deleted": True}
    for reply in (httpx.get(f"{server.url}{URL}/x"), httpx.delete(f"{server.url}{URL}/mine"),
                  httpx.post(f"{server.url}{URL}/mine/resume", json={}), httpx.post(f"{server.url}{URL}/x/cancel")):
        assert reply.status_code == 404


def test_a_text_can_be_cancelled_by_another_client(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    stream = iter(client.completions.create(model="novelist", prompt="It was", max_tokens=50_000, stream=True,
                                            extra_body={"longdraft": {"journal": "far"}}))
    next(stream)
    assert httpx.post(f"{server.url}{URL}/far/cancel").status_code == 200
    with pytest.raises(openai.APIError, match="cancelled"):
        list(stream)
    assert serving.wait_for(lambda: server.scheduler.num_jobs == 0) < 1.0
    assert listed(server.url)["far"]["new_tokens"] > 0


def test_automatic_journals_are_removed_with_their_texts(engine, tmp_path):
    with serving.running(engine, journals=tmp_path, journal_from=10) as server:
        read_some(server.url, body(), least=3)
        serving.wait_for(lambda: server.scheduler.num_jobs == 0)
        assert httpx.post(server.url + "/v1/completions", json=body(20) | {"stream": False}).status_code == 200
        assert list(tmp_path.iterdir()) == []


def test_a_cancelled_text_can_be_resumed(engine, tmp_path):
    """Even if its journal was automatic."""
    with serving.running(engine, journals=tmp_path, journal_from=10) as server, \
            httpx.stream("POST", server.url + "/v1/completions", json=body(), timeout=30) as reply:
        lines = reply.iter_lines()
        while not next(lines).startswith("data: {"):
            pass
        name = reply.headers["x-generation-id"]
        assert httpx.post(f"{server.url}{URL}/{name}/cancel").status_code == 200
        assert any('"cancelled"' in line for line in lines)
        assert listed(server.url)[name]["resumable"]
        assert resume(server.url, name) == uncut(engine)


def test_journals_are_listed_and_pruned_at_the_same_time(engine, tmp_path, monkeypatch):
    class Slow(dict):
        def items(self):
            for item in super().items():
                time.sleep(0.002)
                yield item

    monkeypatch.setattr(journals, "read_journal", lambda folder: folder)
    monkeypatch.setattr(JournalFolder, "_summarise", lambda self, name, found: {"id": name, "state": "finished"})
    for i in range(60):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / FILE).touch()
    found = JournalFolder(tmp_path, engine.tokenizer)
    found._summaries = Slow({str(i): ((0, 0), {}) for i in range(30)})
    with ThreadPoolExecutor(2) as pool:
        listing = pool.submit(found.list)
        for i in range(30, 60):
            assert found.summary(str(i))["id"] == str(i)
            time.sleep(0.001)
        assert len(listing.result()) == 60


def test_old_journals_are_pruned_and_unfinished_ones_kept(server):
    for i in range(3):
        httpx.post(server.url + "/v1/completions", json=body(3, journal=f"whole-{i}"), timeout=30)
    read_some(server.url, body(journal="cut"), least=1)
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    settings = dataclasses.replace(server.app.service.settings, keep_finished=1)
    server.app.service.journals.prune(settings)
    assert {path.name for path in server.app.service.journals.root.iterdir()} == {"whole-2", "cut"}


def test_a_damaged_journal_is_listed_and_refused(server):
    folder = server.app.service.journals.root / "bad"
    folder.mkdir(parents=True)
    (folder / "text.journal").write_bytes(b"nonsense")
    assert listed(server.url)["bad"]["state"] == "unreadable"
    assert str(folder.parent) not in listed(server.url)["bad"]["error"]
    assert httpx.post(f"{server.url}{URL}/bad/resume", json={}).status_code == 409
    assert httpx.get(f"{server.url}{URL}/bad").status_code == 409


# Shutdown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_finishes_short_texts_and_keeps_journals_of_long_ones(engine, tmp_path, number):
    options = ("--journals", str(tmp_path / "journals"), "--drain", "1", "--journal-from", "1000000")
    with serving.process(tmp_path / "server", *options) as server, httpx.stream(
            "POST", server.url + "/v1/completions", json=BODY | {"max_tokens": 5000}, timeout=30) as reply:
        lines = reply.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        server.child.kill(number)
        serving.wait_for(lambda: "draining" in server.child.stderr)
        assert httpx.get(server.url + "/ready").status_code == 503
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2][6:])["error"]
        name = error["message"].rpartition("/generations/")[2].removesuffix("/resume")
        assert error["code"] == "draining" and server.child.wait(10) == 0
        assert "leaked" not in server.child.stderr  # nanobind reports objects that outlive the interpreter
    with serving.process(tmp_path / "server", "--journals", str(tmp_path / "journals")) as server:
        assert listed(server.url)[name]["resumable"]
        assert resume(server.url, name) == uncut(engine, 5000)


def test_kill_nine_loses_no_text_that_was_sent(engine, tmp_path):
    with serving.process(tmp_path / "server", "--journals", str(tmp_path / "journals")) as server:
        text, began = "", time.monotonic()
        with httpx.stream("POST", server.url + "/v1/completions", json=body(700, journal="mine"), timeout=30) as reply:
            try:
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if len(text) > 300:
                            server.child.kill(signal.SIGKILL)
            except httpx.HTTPError:
                pass
        assert time.monotonic() - began < 30
    with serving.process(tmp_path / "server", "--journals", str(tmp_path / "journals")) as server:
        whole = resume(server.url, "mine")
    assert whole.startswith(text) and whole == uncut(engine, 700)


def test_invalid_options_give_one_line(capfd, tmp_path):
    from longdraft.__main__ import run

    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options in (["--port", "99999"], ["--max-running", "0"], ["--log-format", "xml"], ["--stall", "0"],
                        ["--journals", str(tmp_path / "file" / "x")], ["--journals", "/proc"], ["--api-key", ""],
                        ["--memory-mib", "0"], ["--timeout", "-1"], ["--host", "a..b", "--no-key"],
                        ["--host", "192.0.2.1", "--no-key"],
                        ["--port", str(taken.getsockname()[1]), "--journals", "none"]):  # the model is missing too
            assert run(["serve", "--log-level", "error", "--model", str(tmp_path / "missing"), *options]) == 2, options
            shown, = capfd.readouterr().err.splitlines()
            assert shown.startswith("longdraft: ") and "missing" not in shown, options


# Clients that misbehave


def ask(server, data: bytes, wait_s: float = 5.0) -> bytes:
    """The server's answer, until it closes the connection or `wait_s` seconds have passed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait_s) as connection:
        connection.sendall(data)
        found = b""
        try:
            while chunk := connection.recv(65536):
                found += chunk
        except (TimeoutError, ConnectionResetError):
            pass
        return found


def test_a_stalled_body_gets_408(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    assert b" 408 " in ask(server, head + b"Content-Length: 1000\r\n\r\n{\"prompt\"")
    assert httpx.get(server.url + "/health").status_code == 200


def test_oversized_headers_are_refused(server):
    head = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: "
    assert b" 200 " not in ask(server, head + b"a" * 200_000 + b"\r\n\r\n")
    assert b" 400 " in ask(server, b"nonsense\r\n\r\n")
    assert httpx.get(server.url + "/health").status_code == 200


def test_a_stream_ends_when_its_client_stops_reading():
    """The socket accepts no more data: the stream ends and its texts are cancelled."""
    left = []

    async def pieces():
        while True:
            yield b"data: {}\n\n"

    async def main():
        taken = 0

        async def send(message):
            nonlocal taken
            taken += 1
            if taken > 5:
                await asyncio.sleep(60)

        async def receive():
            await asyncio.sleep(60)

        began = time.monotonic()
        await event_stream(pieces(), 0.05, lambda: left.append(True), {})({"type": "http"}, receive, send)
        return time.monotonic() - began

    assert asyncio.run(main()) < 5 and left == [True]


def test_malformed_requests_do_not_harm_the_server(server):
    """A sample; `longdraft bench server malformed` sends thousands."""
    import random

    from longdraft.engine.run_statistics import peak_memory_bytes

    draw, before = random.Random(1), peak_memory_bytes()
    good = json.dumps({"prompt": "a", "max_tokens": 1, "longdraft": {"min_p": 0.1}}).encode()
    with httpx.Client(timeout=30) as client:
        for _ in range(300):
            data = bytearray(good)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            reply = client.post(server.url + "/v1/completions", content=bytes(data),
                                headers={"Content-Type": "application/json"})
            assert reply.status_code < 500, (data, reply.text)
            assert reply.status_code == 200 or "error" in reply.json()
    assert server.scheduler.is_alive and peak_memory_bytes() - before < 200 << 20
