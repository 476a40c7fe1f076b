"""Concurrent requests: equality with sequential ones, scheduling, memory, isolation of failures."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch

from helpers import serving
from longdraft import kernels
from longdraft.checkpoint.sizing import LARGEST_TREE
from longdraft.engine.generation import Generation
from longdraft.request.sampling_params import SamplingParams
from longdraft.server import scheduler
from longdraft.server.jobs import EventQueue, GenerationJob
from longdraft.server.metrics import ServerMetrics
from longdraft.server.prepare import Preparer
from longdraft.server.scheduler import Scheduler
from longdraft.server.schemas import CompletionRequest
from longdraft.server.settings import ServerSettings, cache_budget
from longdraft.system import machine

EVERYWHERE = kernels.available()[-2]  # the variant for every processor of this kind

pytestmark = pytest.mark.full

engine = pytest.fixture(scope="module")(serving.talker)
server = pytest.fixture(scope="module")(serving.opened)


def test_concurrent_texts_equal_those_generated_alone(server, engine):
    def ask(i):
        body = {"prompt": "The ship", "max_tokens": 40 + i, "seed": i, "longdraft": {
            "min_p": 0.1, "drafter": ["plain", "suffix", "auto", "magicdec"][i % 4]}}
        return httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(ask, range(12)))
    assert texts == [serving.written(engine, "The ship", seed=i, max_new_tokens=40 + i) for i in range(12)]
    serving.wait_for(lambda: server.scheduler.num_jobs == 0)
    assert server.scheduler.load()["reserved_bytes"] == 0


@pytest.mark.parametrize("slow_s", [-1.0, 0.001])
def test_a_text_whose_own_work_is_long_rests_while_others_are_written_and_is_the_same_text(
        server, engine, monkeypatch, slow_s):
    monkeypatch.setattr(scheduler, "_SLOW_S", slow_s)

    def ask(i):
        body = {"prompt": "The ship", "max_tokens": 30, "seed": i, "longdraft": {"min_p": 0.1, "drafter": "suffix"}}
        return httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(ask, range(4)))
    assert texts == [serving.written(engine, "The ship", seed=i, max_new_tokens=30) for i in range(4)]


@pytest.fixture
def running(engine):
    """A scheduler whose texts begin apart when they are let, and how many have begun."""
    loop = asyncio.new_event_loop()
    scheduler = Scheduler(engine, ServerSettings(memory_bytes=1 << 30), ServerMetrics("tiny"))
    begun, lets_begin = list[str](), threading.Event()

    def start(name, **options):
        begun.append(name)
        assert lets_begin.wait(30)
        return engine.generate("The ship", params)

    params = SamplingParams(max_new_tokens=5, seed=1)
    jobs = [GenerationJob(name, 0, EventQueue(loop), partial(start, name), params, 2, 1 << 20, begins_apart=True)
            for name in "abc"]
    scheduler.start()
    scheduler.submit(jobs)
    serving.wait_for(lambda: begun == ["a"])
    yield SimpleNamespace(scheduler=scheduler, jobs=jobs, begun=begun, lets_begin=lets_begin)
    lets_begin.set()
    scheduler.close()
    loop.close()


def test_a_text_that_is_cancelled_before_it_begins_never_begins(running):
    for job in running.jobs:
        running.scheduler.cancel(job)
    serving.wait_for(lambda: [job.state for job in running.jobs[1:]] == ["cancelled"] * 2)
    running.lets_begin.set()
    serving.wait_for(lambda: running.scheduler.num_jobs == 0)
    assert running.begun == ["a"] and running.jobs[0].generation is None


def test_a_text_that_fails_while_it_begins_is_closed_when_it_has_begun(running, engine, monkeypatch):
    """As by a bug in a round; it holds its journal and its caches until then."""
    closed = list[object]()
    monkeypatch.setattr(Generation, "close", lambda self: closed.append(self))
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_begin", lambda self, job: 1 / 0)
        patch.setattr(Scheduler, "_round", lambda self: 1 / 0)
        serving.wait_for(lambda: all(job.state == "failed" for job in running.jobs))
    assert not closed
    running.lets_begin.set()
    serving.wait_for(lambda: len(closed) == 1)
    assert running.begun == ["a"] and all(job.generation is None for job in running.jobs)


def batch_of(own_seconds):
    return type("Batch", (dict,), {"own_seconds": own_seconds})(dict.fromkeys(own_seconds))


def test_texts_with_long_work_take_turns_and_rest_while_others_are_written():
    jobs = {number: SimpleNamespace(is_slow=False, turn=0.0) for number in range(4)}
    resting = SimpleNamespace(_batch=batch_of({0: 0.001, 1: 0.1, 2: 0.2, 3: 0.1}), _slow_rest_until=0.0)
    assert Scheduler._awake(resting, jobs) == [0]
    assert resting._slow_rest_until > time.monotonic() + 0.1
    met = []
    for _ in range(6):
        resting._batch.own_seconds = {0: 0.001}
        resting._slow_rest_until = 0.0
        fast, slow = Scheduler._awake(resting, jobs)
        met.append(slow)
        assert fast == 0
    assert met == [1, 2, 3, 1, 2, 3]
    resting._batch.own_seconds = {0: 0.001, 2: 0.001}  # its work is short again
    resting._slow_rest_until = math.inf
    assert Scheduler._awake(resting, jobs) == [0, 2]


def test_a_text_with_long_work_takes_part_in_rounds_that_have_no_other():
    jobs = {1: SimpleNamespace(is_slow=True, turn=0.0)}
    resting = SimpleNamespace(_batch=batch_of({1: 0.1}), _slow_rest_until=math.inf)
    assert Scheduler._awake(resting, jobs) == [1]


def test_texts_with_a_grammar_leave_memory_and_slow_texts_leave_places_to_others():
    def job(num_bytes, grammar=None, is_slow=False):
        params = SamplingParams(structured_outputs=("regex", grammar) if grammar else ())
        return SimpleNamespace(num_bytes=num_bytes, params=params, is_slow=is_slow)

    def scheduler_of(running, waiting):
        here = SimpleNamespace(_settings=SimpleNamespace(max_running=4, memory_bytes=100), _running=running,
                               _waiting=waiting, _reserved=sum(each.num_bytes for each in running))
        here._fits = partial(Scheduler._fits, here)
        return here

    grammars, plain = [job(30, "a+") for _ in range(3)], job(10)
    assert Scheduler._next(scheduler_of(grammars[:1], [grammars[2], plain])) is grammars[2]
    assert Scheduler._next(scheduler_of(grammars[:2], [grammars[2], plain])) is plain
    assert Scheduler._next(scheduler_of(grammars[:2], [grammars[2], job(50)])) is None
    assert Scheduler._next(scheduler_of([], [job(100, "a+")])).num_bytes == 100
    slow = [job(1, "a+", is_slow=True) for _ in range(6)]
    assert Scheduler._next(scheduler_of([*slow, job(1)], [plain])) is plain
    assert Scheduler._next(scheduler_of([*slow, job(1), job(1)], [plain])) is None


def test_a_short_text_does_not_wait_for_a_long_one(server):
    with httpx.stream("POST", server.url + "/v1/completions", timeout=60,
                      json={"prompt": "It was", "max_tokens": 50_000, "stream": True}) as long:
        lines = long.iter_lines()
        next(lines)
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "The", "max_tokens": 20}, timeout=30)
        assert reply.json()["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("drafter", ["plain", "auto"])
def test_a_disconnect_frees_the_engine_within_a_second(server, stream, drafter):
    body = json.dumps({"prompt": "It was", "max_tokens": 100_000, "stream": stream, "longdraft": {"drafter": drafter}})
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall((head + body).encode())
        serving.wait_for(lambda: any(job.num_tokens for job in server.scheduler.jobs() if job.ended is None))
    assert serving.wait_for(lambda: server.scheduler.num_jobs == 0) < 1.0


def test_a_full_queue_gets_429(engine):
    with serving.running(engine, max_running=1, max_queued=1) as server:
        long = {"prompt": "It was", "max_tokens": 50_000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=long) as first, \
                httpx.stream("POST", server.url + "/v1/completions", json=long) as second:
            lines = first.iter_lines(), second.iter_lines()  # a garbage-collected iterator would disconnect
            assert next(lines[0]) and "queued" in next(lines[1])
            reply = httpx.post(server.url + "/v1/completions", json=long)
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["code"] == "queue_full"


def test_requests_wait_for_the_memory_budget(engine):
    with serving.running(engine, memory_bytes=64 << 20) as server:
        reply = httpx.post(server.url + "/v1/completions", json={"prompt": "It was", "max_tokens": 100_000})
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "memory_exceeded"
        scored = {"prompt": [[7] * 5000] * 4, "max_tokens": 1, "logprobs": 20, "echo": True}  # 70 MB in the reply
        reply = httpx.post(server.url + "/v1/completions", json=scored)
        assert reply.status_code == 400 and reply.json()["error"]["code"] == "memory_exceeded"
        one = {"prompt": "It was", "max_tokens": 2500, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=one) as first, \
                httpx.stream("POST", server.url + "/v1/completions", json=one) as second:
            lines = first.iter_lines(), second.iter_lines()
            assert next(lines[0]) and "queued" in next(lines[1])
            assert server.scheduler.load()["waiting"] == 1  # there is a free place, but no memory


def bytes_of(engine, tokens: int, logprobs: int | None = None, **extension) -> int:
    """The memory that a text of so many tokens reserves."""
    request = CompletionRequest(prompt=[5] * 10, max_tokens=tokens - 10, longdraft=extension, logprobs=logprobs)
    with asyncio.Runner() as runner:
        return Preparer(engine, ServerSettings()).completion(request, EventQueue(runner.get_loop())).jobs[0].num_bytes


@pytest.mark.parametrize("name, dtype, width", [
    ("reference", "bfloat16", 4), ("reference", "float32", 4), (EVERYWHERE, "bfloat16", 2), (EVERYWHERE, "float32", 4)])
def test_the_budget_counts_the_cache_of_each_kernel(tiny, name, dtype, width):
    engine = serving.load(tiny["mha"], drafter="plain", dtype=dtype, kernels_name=name)
    config = engine.model.config
    each = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    assert bytes_of(engine, 1010) - bytes_of(engine, 10 + 1) == pytest.approx(1.15 * 999 * each, abs=1)


def test_the_budget_counts_the_drafters_memory(engine):
    each, plain = engine.model.cache_bytes_per_token, bytes_of(engine, 5000, drafter="plain")
    for budget, rows in ((200, 200 + 64), (10**9, 5000)):  # and those that join until rows are selected again
        options = {"drafter": "magicdec", "drafter_options": {"budget": budget}}
        assert bytes_of(engine, 5000, **options) - plain == rows * each
    assert bytes_of(engine, 5000, drafter="auto") > plain, "its draft model has a cache too"


def test_the_budget_counts_log_probabilities(engine):
    plain, few, many = (bytes_of(engine, 5000, given) for given in (None, 0, 20))
    assert few > plain and many - plain > 4990 * 20 * 100


def test_a_text_that_times_out_in_the_queue_cannot_be_resumed(engine, tmp_path):
    with serving.running(engine, max_running=1, journals=tmp_path, journal_from=100) as server:
        long = {"prompt": "It was", "max_tokens": 50_000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=long) as first:
            lines = first.iter_lines()
            next(lines)
            body = {"prompt": "It was", "max_tokens": 5000, "longdraft": {"timeout": 0.2}}
            reply = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
    assert reply.status_code == 408 and "resume" not in reply.json()["error"]["message"]


def test_the_budget_counts_the_cache_on_a_device(tiny, monkeypatch):
    """Eight bits, with a scale for each key and value. The whole cache is reserved, with room for draft trees."""
    engine = serving.load(tiny["mha"], drafter="plain", dtype="float32")
    kernels, config = engine.model.kernels, engine.model.config
    monkeypatch.setattr(kernels, "dtype", torch.float16)
    monkeypatch.setattr(kernels, "is_device", True, raising=False)
    monkeypatch.setattr(kernels, "cache_bytes", lambda head_dim: 2 * (head_dim + 4), raising=False)
    each = 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4)
    assert bytes_of(engine, 1010) - bytes_of(engine, 10 + 1) == pytest.approx(1.15 * 999 * each, abs=1)
    assert bytes_of(engine, 1010) >= (1010 + LARGEST_TREE) * each


def test_the_budget_is_a_share_of_free_device_or_system_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    system = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 1 << 20 < cache_budget() < system, "without /proc and control group"
    (tmp_path / "meminfo").write_text("MemTotal: 64000 kB\nMemAvailable:   50000 kB\n")
    assert cache_budget() == int(0.8 * 50_000 * 1024)
    assert cache_budget(10 << 30) == 8 << 30, "of the device"
    (tmp_path / "memory.max").write_text(f"{20 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{20 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {4 << 20}\nfile {16 << 20}\ninactive_file {15 << 20}\nactive_file 1\n")
    assert cache_budget() == 12 << 20, "inactive file pages count as free"
    (tmp_path / "memory.max").write_text("max\n")
    assert cache_budget() == int(0.8 * 50_000 * 1024)


def test_a_text_times_out(server):
    body = {"prompt": "It was", "max_tokens": 100_000, "longdraft": {"timeout": 0.3}}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert reply.status_code == 408 and reply.json()["error"]["code"] == "timeout"


def test_running_out_of_memory_fails_only_that_text(server, engine, monkeypatch):
    from longdraft.engine.generation import Generation

    advance = Generation.advance

    def poisoned(self, *given, **options):
        if self.params.seed == 666 and len(self.tokens) > 3:
            raise MemoryError
        return advance(self, *given, **options)

    monkeypatch.setattr(Generation, "advance", poisoned)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(httpx.post, server.url + "/v1/completions", timeout=60,
                             json={"prompt": "The ship", "max_tokens": 30, "seed": seed, "longdraft": {"min_p": 0.1}})
                 for seed in (7, 666, 8)]
    good, bad, other = (each.result() for each in asked)
    assert bad.status_code == 503 and bad.json()["error"]["code"] == "out_of_memory"
    assert good.json()["choices"][0]["text"] == serving.written(engine, "The ship")
    assert other.status_code == 200
    assert server.scheduler.load()["reserved_bytes"] == 0 and server.scheduler.is_alive


def test_a_failure_in_a_stream_is_an_error_in_the_stream(server, monkeypatch):
    from longdraft.engine.generation import Generation

    def fail(self, *given, **options):
        raise ZeroDivisionError

    monkeypatch.setattr(Generation, "advance", fail)
    with pytest.raises(openai.APIError, match="internal error"):
        list(serving.client(server).completions.create(model="novelist", prompt="a", stream=True))
