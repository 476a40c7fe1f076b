"""The memory of a server after its texts and requests have ended."""

from __future__ import annotations

import pickle
import weakref

import httpx
import pytest

from helpers import serving
from longdraft.engine.engine import Engine
from longdraft.server import app as application
from longdraft.server.jobs import EventQueue
from longdraft.system import machine

pytestmark = pytest.mark.full

URL = "/v1/longdraft/generations"


@pytest.fixture(scope="module")
def engine():
    return serving.load("novelist")


@pytest.fixture
def server(engine, tmp_path):
    with serving.running(engine, journals=tmp_path / "journals") as found:
        yield found


def write(server, count=400, **extension) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", timeout=60, json={
        "prompt": "The ship", "max_tokens": count, "seed": 7, "longdraft": {"min_p": 0.1, **extension}})


def test_a_text_that_has_ended_leaves_nothing_in_memory(server, monkeypatch):
    """Neither its caches nor its prompt, although the server lists the last hundred texts."""
    written: list[weakref.ref] = []

    def recorded(begin):
        def call(*given, **options):
            generation = begin(*given, **options)
            written.append(weakref.ref(generation))
            return generation

        return call

    for name in ("generate", "resume"):
        monkeypatch.setattr(Engine, name, recorded(getattr(Engine, name)))
    assert write(server, 50_000, journal="mine", timeout=0.2).status_code == 408
    with httpx.stream("POST", f"{server.url}{URL}/mine/resume", json={"stream": True}, timeout=60) as reply:
        next(line for line in reply.iter_lines() if line.startswith("data: "))
    assert write(server, 5).status_code == 200
    serving.wait_for(lambda: [each() for each in written] == [None] * 3)
    jobs = server.scheduler.jobs()
    assert len(jobs) == 3 and not any(getattr(job.start, "args", ()) for job in jobs)  # their prompts


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_has_ended_keeps_the_beginning_of_long_settings(server, stream):
    """The reply has them whole; the list of the last hundred texts, which hold them in memory, has not."""
    body = {"prompt": "The ship", "max_tokens": 3, "seed": 7, "stop": ["x" * 1024] * 16, "stream": stream,
            "longdraft": {"banned_strings": [f"{number:0200}" for number in range(1000)]},
            "logit_bias": {str(token): -1 for token in range(1000)}}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    whole = serving.events(reply.text)[-1]["longdraft"] if stream else reply.json()["longdraft"]
    assert len(whole["stats"]["sampling"]["banned_strings"]) == 1000 == len(whole["stats"]["sampling"]["logit_bias"])
    (job,) = server.scheduler.jobs()
    assert len(pickle.dumps((job.params, job.stats))) < 20_000
    shown = httpx.get(f"{server.url}{URL}/{job.id}").json()
    assert shown["sampling"]["stop"][0] == "x" * 100 + "…" and shown["sampling"]["seed"] == 7
    assert shown["sampling"] == shown["stats"]["sampling"] and shown["finish_reason"] == "length"


def test_a_whole_reply_does_not_wake_the_event_loop_at_each_step(server, monkeypatch):
    """And what comes after the reply is dropped."""
    taken, queues, take = [], [], EventQueue.take

    async def counted(self, timeout_s):
        queues.append(self)
        taken.append(await take(self, timeout_s))
        return taken[-1]

    monkeypatch.setattr(EventQueue, "take", counted)
    reply = write(server, drafter="plain")  # 400 steps, however well a drafter would guess
    assert reply.json()["usage"]["completion_tokens"] == 400
    steps = [sum(map(len, news.events.values())) for news in taken if news.events]
    assert sum(steps) > 390 and max(steps) > sum(steps) / 3 and len(steps) < 6
    queues[0].end(server.scheduler.jobs()[0], None)
    assert not queues[0]._news.ended


def test_freed_memory_is_given_back_at_intervals(engine, monkeypatch):
    calls = []
    monkeypatch.setattr(application, "_MEMORY_INTERVAL_S", 0.01)
    monkeypatch.setattr(machine, "return_free_memory", lambda: calls.append(1))
    with serving.running(engine):
        serving.wait_for(lambda: len(calls) > 2)
