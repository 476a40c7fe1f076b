"""Out of memory: whichever allocation of a request fails, the failure is one clear error and harms nothing else.

The n-th operation of PyTorch or array of NumPy fails as these libraries fail, for n = 1, 2, ... to the request's end.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import longdraft
from helpers import serving
from helpers.equality import prompt_of
from longdraft.cache.full import FullCache
from longdraft.journal.format import FILE
from longdraft.request.sampling_params import SamplingParams
from longdraft.server.scheduler import Scheduler

PARAMS = SamplingParams(max_new_tokens=12, seed=5, min_p=0.1, repetition_penalty=1.1, ignore_eos=True)
PROMPT = prompt_of(200)  # some chunks of a cache, and a match in the prefix tree
TORCH = "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 8 bytes"


class FailingAllocations(TorchDispatchMode):
    """The `at`-th operation of PyTorch, or call of a NumPy function that makes an array, fails. calls: until now."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count(RuntimeError(TORCH))
        return function(*args, **(kwargs or {}))

    def count(self, error: Exception) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise error

    @contextmanager
    def active(self):
        def failing(make):
            def call(*given, **options):
                self.count(np._core._exceptions._ArrayMemoryError((8,), np.dtype(float)))
                return make(*given, **options)
            return call

        with pytest.MonkeyPatch.context() as patch, self:
            for name in ("zeros", "empty", "concatenate", "full"):
                patch.setattr(np, name, failing(getattr(np, name)))
            yield self


def places():
    """1, 2, ... 20, then larger and larger steps."""
    at = 1
    while True:
        yield at
        at += 1 + max(0, at - 20) // 4


def check_one_line(error: MemoryError) -> None:
    assert "allocate" in str(error) and "\n" not in str(error)


@pytest.mark.full
def test_any_allocation_may_fail_and_the_next_request_is_right(tiny, tmp_path):
    engine = longdraft.load(str(tiny["gqa"]), drafter="tokenswift", cache_ram=64)
    *_, last = engine.generate(PROMPT, PARAMS)
    expected, failures = last.stats["sha256_tokens"], 0
    gc.collect()
    caches = sum(isinstance(each, FullCache) for each in gc.get_objects())
    for at in places():
        journal, generation = tmp_path / str(at), None
        with FailingAllocations(at).active() as allocations:
            try:
                generation = engine.generate(PROMPT, PARAMS, journal=journal, cache_salt=str(at))
                *_, last = generation
            except MemoryError as error:
                check_one_line(error)
                failures += 1
        if allocations.calls < at:
            break
        generation = None
        again = engine.resume if (journal / FILE).exists() else None
        *_, last = again(journal) if again else engine.generate(PROMPT, PARAMS)
        assert last.stats["sha256_tokens"] == expected, at
        *_, last = engine.generate(PROMPT, PARAMS, cache_salt=str(at))  # with rows that the failed text gave
        assert last.stats["sha256_tokens"] == expected, at
    assert failures > 25 and last.stats["sha256_tokens"] == expected
    generation = last = None
    gc.collect()
    assert sum(isinstance(each, FullCache) for each in gc.get_objects()) <= caches
    assert not sum(piece.leases for piece in engine.loaded.prefixes._pieces)


def test_any_allocation_of_a_server_may_fail_and_the_next_request_is_right(tiny, monkeypatch):
    engine, turn = serving.load(tiny["gqa"], drafter="tokenswift"), Scheduler._round
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "longdraft": {"min_p": 0.1}}
    with serving.running(engine) as server:
        def ask() -> httpx.Response:
            return httpx.post(server.url + "/v1/completions", json=body, timeout=60)

        expected, failures = ask().json()["choices"][0]["text"], 0
        for at in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377):
            allocations = FailingAllocations(at)

            def failing(self, allocations=allocations):
                with allocations.active():
                    turn(self)

            with monkeypatch.context() as patch:
                patch.setattr(Scheduler, "_round", failing)
                reply = ask()
            if reply.status_code != 200:
                assert reply.status_code == 503 and reply.json()["error"]["code"] == "out_of_memory", reply.text
                failures += 1
            assert ask().json()["choices"][0]["text"] == expected
            assert server.scheduler.load()["reserved_bytes"] == 0 and server.scheduler.is_alive
        assert failures > 6
