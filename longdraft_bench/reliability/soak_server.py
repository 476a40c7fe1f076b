"""Honest and hostile clients of one server for an hour; `longdraft bench soak server`.

Honest clients ask for texts, with and without streams and journals, by every drafter. Some cancel a text and resume it.
Each text must equal the library's. Beside them one attack follows another: those of attacks.py, damaged bodies, bodies
that stop in the middle, clients that leave, and journals that are listed, resumed and removed. Memory, file descriptors
and threads are sampled all the time.

The figures leave out answers of /health in whose time the client itself did not run: on a busy machine, or stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from longdraft.engine.loading import load
from longdraft_bench.reliability import attacks
from longdraft_bench.reliability.server_process import (
    COMPLETIONS,
    DRAFTERS,
    GENERATIONS,
    JSON,
    PROMPTS,
    SOUND_BODIES,
    Body,
    async_chunks,
    damage,
    left_over,
    library_text,
    probe_seconds,
    server,
    text_key,
)

SEEDS = 6
LENGTHS = (60, 240)
HONEST = 3  # clients
ATTACK_S = 6.0
PAUSE_S = 4.0  # between two attacks
SAMPLE_S = 5.0
PROBE_S = 0.1
MEMORY_MIB = 512  # for the caches of texts
ABSENT_S = 0.05  # the client itself did not run for longer than this: its answer says nothing about the server
PATIENCE_S = 900  # of clients: the whole group of processes may be stopped for minutes


class _Sample(NamedTuple):
    """Of the server's process."""

    resident_mib: float
    descriptors: int
    threads: int


class Soak:
    """One run: what the clients saw, and samples of the server's process."""

    def __init__(self, url: str, expected: dict[str, str], seed: int) -> None:
        self.url, self._expected, self._seed = url, expected, seed
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.samples: list[_Sample] = []

    async def run(self, until: float, process: psutil.Process) -> None:
        await asyncio.gather(*(self._honest(number, until) for number in range(HONEST)), self._attack(until),
                             self._sample(until, process))

    async def _sample(self, until: float, process: psutil.Process) -> None:
        pause = min(SAMPLE_S, (until - time.monotonic()) / 8)  # at least two samples in each quarter
        while time.monotonic() < until:
            self.samples.append(_Sample(process.memory_info().rss / 2**20, process.num_fds(),
                                        process.num_threads()))
            await asyncio.sleep(pause)

    async def _honest(self, number: int, until: float) -> None:
        """Ask for texts, one after the other, and compare them."""
        rng = random.Random(self._seed + number)
        turn = 0
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            while time.monotonic() < until:
                turn += 1
                asked: Body = {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(SEEDS),
                               "max_tokens": rng.choice(LENGTHS), "stream": rng.random() < 0.5}
                own: Body = {"min_p": 0.1, "drafter": rng.choice(DRAFTERS)}
                is_cut = rng.random() < 0.2
                if is_cut or rng.random() < 0.2:
                    own["journal"] = f"honest-{number}-{turn}"
                try:
                    text = await self._text(client, asked | {"longdraft": own}, is_cut)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.failures.append(f"honest request failed: {error!r}")
                    continue
                if text is None:  # refused with 429
                    await asyncio.sleep(0.5)
                    continue
                self.counts["honest texts"] += 1
                self.counts["honest texts equal"] += text == self._expected[text_key(asked)]
                if "journal" in own:
                    await client.delete(f"{self.url}{GENERATIONS}/{own['journal']}")

    async def _text(self, client: httpx.AsyncClient, asked: Body, is_cut: bool) -> str | None:
        """The whole text; with `is_cut`, that of a stream which is cancelled and resumed. None: the server is busy."""
        if not is_cut:
            return await self._whole(client, COMPLETIONS, asked)
        name = asked["longdraft"]["journal"]
        async with client.stream("POST", self.url + COMPLETIONS, json=asked | {"stream": True}) as reply:
            if reply.status_code in (429, 503):
                self.counts[f"honest {reply.status_code}"] += 1
                return None
            pieces: list[str] = []
            async for chunk in async_chunks(reply):
                if "error" in chunk:
                    break  # cancelled
                pieces.append(chunk["choices"][0]["text"])
                if len(pieces) == 3:
                    await client.post(f"{self.url}{GENERATIONS}/{name}/cancel")
            else:
                self.counts["texts that were finished before they were cancelled"] += 1
                return "".join(pieces)
        self.counts["texts that were cut and resumed"] += 1
        while (text := await self._whole(client, f"{GENERATIONS}/{name}/resume", {"stream": False})) is None:
            await asyncio.sleep(0.2)
        return text

    async def _whole(self, client: httpx.AsyncClient, path: str, asked: Body) -> str | None:
        text = ""
        async with client.stream("POST", self.url + path, json=asked) as reply:
            if reply.status_code in (429, 503):
                self.counts[f"honest {reply.status_code}"] += 1
                return None
            if reply.status_code != 200:
                raise ValueError(f"{reply.status_code} {(await reply.aread())[:300]!r}")
            if not asked["stream"]:
                return str(json.loads(await reply.aread())["choices"][0]["text"])
            async for chunk in async_chunks(reply):
                if "error" in chunk:
                    raise ValueError(f"{chunk['error']}")
                text += chunk["choices"][0]["text"]
        return text

    async def _attack(self, until: float) -> None:
        rng = random.Random(self._seed)
        works = list(ATTACKS)
        while time.monotonic() < until:
            name = works[self.counts["attacks"] % len(works)]
            self.counts["attacks"] += 1
            try:
                answers = await ATTACKS[name](self.url, min(until, time.monotonic() + ATTACK_S), rng)
            except (OSError, httpx.HTTPError) as error:
                answers = {type(error).__name__: 1}
            for status, count in answers.items():
                self.counts[f"{name}: {status}"] += count
                if status.startswith("5") and status != "503":
                    self.failures.append(f"{name} got status {status}")
            await asyncio.sleep(PAUSE_S)


# Attacks: (url, until, rng) -> number of answers of each status


async def damaged(url: str, until: float, rng: random.Random) -> dict[str, int]:
    """Bodies with bytes changed, left out and repeated."""
    statuses: Counter[str] = Counter()
    paths = (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize", f"{GENERATIONS}/none/resume")
    async with httpx.AsyncClient(timeout=PATIENCE_S, headers=JSON) as client:
        while time.monotonic() < until:
            reply = await client.post(url + rng.choice(paths), content=damage(rng, rng.choice(SOUND_BODIES)))
            statuses[str(reply.status_code)] += 1
            await asyncio.sleep(0.01)
    return statuses


async def halves(url: str, until: float, rng: random.Random) -> dict[str, int]:
    """Connections that send half of their headers, or half of a body."""
    parts = urlsplit(url)
    statuses: Counter[str] = Counter()
    head = f"POST /tokenize HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    opened = []
    while time.monotonic() < until:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        size = rng.choice([100, 500_000])
        sent = (head + f"Content-Length: {size}\r\n\r\n").encode() + b'{"prompt": "' + b"a" * (size // 2)
        with contextlib.suppress(ConnectionError):
            writer.write(rng.choice([head[: rng.randrange(len(head))].encode(), sent]))
        opened.append(writer)
        statuses["opened"] += 1
        await asyncio.sleep(0.05)
    for writer in opened:
        writer.close()
    return statuses


async def leavers(url: str, until: float, rng: random.Random) -> dict[str, int]:
    """Large requests whose clients leave: many texts, log-probabilities, long texts with journals."""
    statuses: Counter[str] = Counter()

    async def one() -> None:
        asked = rng.choice([
            {"prompt": "It was", "max_tokens": 3000, "n": 4}, {"prompt": "It was", "max_tokens": 2000, "logprobs": 20},
            {"prompt": "a b " * 2000, "max_tokens": 2000}, {"prompt": "It was", "max_tokens": 3000, "stream": True,
                                                             "longdraft": {"drafter": "tokenswift", "details": True}}])
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client, asyncio.timeout(rng.uniform(0.05, 1.5)):
                reply = await client.post(url + COMPLETIONS, json=asked | {"seed": rng.randrange(1000)})
                statuses[str(reply.status_code)] += 1
        except TimeoutError:
            statuses["left"] += 1

    while time.monotonic() < until:
        await asyncio.gather(*(one() for _ in range(4)))
    return statuses


async def vandals(url: str, until: float, rng: random.Random) -> dict[str, int]:
    """Journals are listed, looked at, resumed twice and removed while they are written."""
    statuses: Counter[str] = Counter()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        while time.monotonic() < until:
            name = f"vandal-{rng.randrange(4)}"
            journal = f"{url}{GENERATIONS}/{name}"
            begin = {"prompt": "It was", "max_tokens": 300, "seed": rng.randrange(99), "longdraft": {"journal": name}}
            calls = [client.post(url + COMPLETIONS, json=begin), client.get(url + GENERATIONS), client.get(journal),
                     client.post(journal + "/cancel"), client.post(journal + "/resume", json={"stream": False}),
                     client.post(journal + "/resume", json={"stream": True}), client.delete(journal),
                     client.get(f"{url}{GENERATIONS}/..%2f..%2fetc")]
            for reply in await asyncio.gather(*rng.sample(calls, len(calls))):
                statuses[str(reply.status_code)] += 1
            await asyncio.sleep(0.05)
    return statuses


Attack = Callable[[str, float, random.Random], Coroutine[Any, Any, dict[str, int]]]


def _without_chance(work: Callable[[str, float], Coroutine[Any, Any, dict[str, int]]]) -> Attack:
    return lambda url, until, rng: work(url, until)


ATTACKS: dict[str, Attack] = {
    **{name: _without_chance(work) for name, work in attacks.ATTACKS.items()},
    "damaged": damaged, "halves": halves, "leavers": leavers, "vandals": vandals}


class _Probed(NamedTuple):
    """Seconds of requests for /health, and how many of them were left out."""

    seconds: list[float]
    left_out: int


class _Heartbeat(threading.Thread):
    """Measures the longest pause in which this process did not run."""

    def __init__(self, ends: Event) -> None:
        super().__init__(daemon=True)
        self._ends = ends
        self.longest_s = 0.0

    def run(self) -> None:
        last = time.monotonic()
        while not self._ends.is_set():
            time.sleep(0.005)
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last)
            last = now


def probe(url: str, ends: Event, results: Connection) -> None:
    """Send the figures of requests for /health, each on a connection of its own."""
    seconds: list[float] = []
    left_out = 0
    heartbeat = _Heartbeat(ends)
    heartbeat.start()
    while not ends.is_set():
        heartbeat.longest_s = 0.0
        taken = probe_seconds(url, "/health")
        time.sleep(PROBE_S)  # and the heartbeat notices a pause
        if heartbeat.longest_s > ABSENT_S:
            left_out += 1
        else:
            seconds.append(taken)
    results.send(_Probed(seconds, left_out))


def run(seconds: float, seed: int) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each failure."""
    asked: list[Body] = [{"prompt": prompt, "seed": number, "max_tokens": tokens}
             for prompt in PROMPTS for number in range(SEEDS) for tokens in LENGTHS]
    engine = load("novelist", drafter="plain", cache_ram=0)
    expected = {text_key(each): library_text(engine, each) for each in asked}
    tracebacks: list[str] = []
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    ours, theirs = context.Pipe(False)
    with tempfile.TemporaryDirectory() as folder:
        options = ("--journals", folder, "--memory-mib", str(MEMORY_MIB), "--keep-finished", "20", "--journals-mib",
                   "64")
        with server(*options, on_line=lambda line: tracebacks.append(line) if "Traceback" in line else None
                    ) as (child, url):
            prober = context.Process(target=probe, args=(url, ends, theirs), daemon=True)
            prober.start()
            soak = Soak(url, expected, seed)
            process = psutil.Process(child.pid)
            descriptors_before = process.num_fds()
            resident_before = process.memory_info().rss / 2**20
            asyncio.run(soak.run(time.monotonic() + seconds, process))
            ends.set()
            probed: _Probed = ours.recv()
            after, last = _settle(url)
            figures = _figures(soak, process, sorted(probed.seconds), probed.left_out) | after | {
                "descriptors_before": descriptors_before, "resident_mib_before": resident_before,
                "last_request_equal": last == expected[text_key(asked[0])], "tracebacks": len(tracebacks),
                "exit": child.poll(), "journal_files_after": sum(path.is_file() for path in Path(folder).rglob("*"))}
    failures = soak.failures + _judge(figures)
    return {"seconds": seconds, **figures, "failures": len(failures)}, failures


def _settle(url: str) -> tuple[dict[str, int], str]:
    """What is left once all texts should have ended, and the text of a last request."""
    deadline = time.monotonic() + 120
    while (after := left_over(url))["jobs_after"] and time.monotonic() < deadline:
        time.sleep(0.5)
    body = {"prompt": PROMPTS[0], "seed": 0, "max_tokens": LENGTHS[0], "longdraft": {"min_p": 0.1}}
    last = httpx.post(url + COMPLETIONS, json=body, timeout=60).json()["choices"][0]["text"]
    time.sleep(2)  # connections are closed
    return after, last


def _figures(soak: Soak, process: psutil.Process, latencies: list[float], left_out: int) -> dict[str, Any]:
    resident = [sample.resident_mib for sample in soak.samples]
    quarter = len(resident) // 4
    return {"counts": dict(sorted(soak.counts.items())),
            "health_requests": len(latencies), "health_left_out": left_out,
            **{f"health_ms_{name}": 1e3 * latencies[min(len(latencies) - 1, int(share * len(latencies)))]
               for name, share in (("median", 0.5), ("p99", 0.99), ("p999", 0.999), ("worst", 1.0))},
            "health_beyond_100_ms": sum(each > 0.1 for each in latencies),
            **{f"resident_mib_quarter_{i + 1}": statistics.median(resident[i * quarter : (i + 1) * quarter])
               for i in range(4)},
            "resident_mib_peak": max(resident), "resident_mib_after": process.memory_info().rss / 2**20,
            "descriptors_peak": max(sample.descriptors for sample in soak.samples),
            "descriptors_after": process.num_fds(),
            "threads_peak": max(sample.threads for sample in soak.samples), "threads_after": process.num_threads()}


def _judge(figures: dict[str, Any]) -> list[str]:
    """What is wrong with the figures."""
    counts = figures["counts"]
    checks = {
        "an honest text differs, or there is none": 0 < counts.get("honest texts", 0) == counts["honest texts equal"],
        "the last request differs": figures["last_request_equal"],
        "memory grows": figures["resident_mib_quarter_4"] - figures["resident_mib_quarter_2"] < 32,
        "memory exceeds its budget": figures["resident_mib_peak"] - figures["resident_mib_before"] < MEMORY_MIB,
        "descriptors remain open": figures["descriptors_after"] - figures["descriptors_before"] < 16,
        "texts or reserved bytes remain": not figures["jobs_after"] and not figures["reserved_bytes_after"],
        "the server logged a traceback": not figures["tracebacks"], "the server ended": figures["exit"] is None}
    return [what for what, is_good in checks.items() if not is_good]
