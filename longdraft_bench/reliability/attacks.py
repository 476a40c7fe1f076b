"""Attack a server and measure what is left for other clients, for docs/security.md; `longdraft bench server attacks`.

    longdraft bench server attacks                    # all attacks, some four minutes
    longdraft bench server attacks stops prompts      # two of them

stops    bodies with 200,000 stop strings       idle     1,100 connections that send nothing
prompts  60 prompts of 2 MB at the same time    items    bodies of 8 MiB of wrong items
grammars rules that recurse and multiply        phrases  1,000 banned phrases of 200 letters
letters  1,000,000 letters without a break      chunks   bodies in chunks of one byte, and 12,500 headers
exports  books of 1,600,000 and of 2,000 chapters

The server, the attacker, a client that asks for /health, /ready and /metrics in turn, and an honest client that asks
for texts are processes of this machine. The honest client's speed is compared with its speed before the attack, and its
texts with the library's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil

from longdraft.engine.loading import load
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft_bench.document import EXAMPLE, in_checkout
from longdraft_bench.reliability.server_process import (
    COMPLETIONS,
    JSON,
    Body,
    left_over,
    library_text,
    probe_seconds,
    server,
)

HONEST: Body = {"prompt": "The ship", "max_tokens": 200, "stream": False,
                "longdraft": {"min_p": 0.1, "drafter": "suffix"}}
SEEDS = 4
PROBED = ("/health", "/ready", "/metrics")  # in turn
PROBE_S = 0.01  # between two requests
MAX_ALONE_S = 10.0  # of the honest client before an attack
PAUSE_S = 0.2  # of an attacker between an answer and its next request; Retry-After says 5 s


class HonestText(NamedTuple):
    """A text of the honest client; None if the server refused it."""

    seed: int
    text: str | None
    seconds: float


def probe(url: str, ends: Event, results: Connection) -> None:
    """Send (path, seconds) of requests for PROBED."""
    seconds: list[tuple[str, float]] = []
    results.send("started")
    for path in itertools.cycle(PROBED):
        if ends.is_set():
            break
        seconds.append((path, probe_seconds(url, path)))
        time.sleep(PROBE_S)
    results.send(seconds)


def honest(url: str, ends: Event, results: Connection) -> None:
    """Ask for texts, one after the other, and send them."""
    texts: list[HonestText] = []
    with httpx.Client(timeout=60) as client:
        results.send("started")
        while not ends.is_set():
            seed = len(texts) % SEEDS
            began = time.perf_counter()
            text = None
            with contextlib.suppress(httpx.HTTPError):
                reply = client.post(url + COMPLETIONS, json=HONEST | {"seed": seed})
                text = reply.json()["choices"][0]["text"] if reply.status_code == 200 else None
            texts.append(HonestText(seed, text, time.perf_counter() - began))
    results.send(texts)


Work = Callable[[str, Event, Connection], None]


@contextlib.contextmanager
def beside(work: Work, url: str) -> Iterator[list[Any]]:
    """Run `work` in another process until the block ends, which begins when that process has sent that it has started.
    Yields a list that has its result then."""
    context = multiprocessing.get_context("spawn")
    ends = context.Event()
    ours, theirs = context.Pipe(False)
    result: list[Any] = []
    child = context.Process(target=work, args=(url, ends, theirs), daemon=True)
    child.start()
    try:
        ours.recv()
        yield result
    finally:
        ends.set()
        result += ours.recv()
        child.join()


async def repeat(url: str, bodies: list[bytes], path: str, until: float) -> dict[str, int]:
    """Send the bodies at the same time, again and again. Returns the number of answers of each status."""
    statuses: dict[str, int] = {}

    async def sender(body: bytes) -> None:
        async with httpx.AsyncClient(timeout=60, headers=JSON) as client:
            while time.monotonic() < until:
                try:
                    status = str((await client.post(url + path, content=body)).status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                statuses[status] = statuses.get(status, 0) + 1
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*map(sender, bodies))
    return statuses


async def stops(url: str, until: float) -> dict[str, int]:
    body = json.dumps({"prompt": "It was", "max_tokens": 50, "stop": [f"<{i}>" for i in range(200_000)]}).encode()
    return await repeat(url, [body] * 2, COMPLETIONS, until)


async def prompts(url: str, until: float) -> dict[str, int]:
    text = in_checkout(EXAMPLE).read_text(encoding="utf-8")
    sizes = (2_000_000, 1_800_000)  # beyond the largest possible context, and just below
    bodies = [json.dumps({"prompt": (text * (size // len(text) + 1))[:size], "max_tokens": 50}).encode()
              for size in sizes]
    return await repeat(url, bodies * 30, COMPLETIONS, until)


async def idle(url: str, until: float) -> dict[str, int]:
    parts = urlsplit(url)
    opened = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(1100)]
    await asyncio.sleep(until - time.monotonic())
    closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in opened)
    for _, writer in opened:
        writer.close()
    return {"opened": len(opened), "closed by the server": closed}


async def items(url: str, until: float) -> dict[str, int]:
    wrong = b"[" + b"null," * (8 * 2**20 // 5 - 10) + b"null]"
    return await repeat(url, [b'{"tokens":' + wrong[:-40] + b"null]}"] * 2, "/detokenize", until)


def heavy_grammars() -> list[Body]:
    """Structured outputs that take the grammar engine minutes, gigabytes or its stack, unless something ends it."""
    def chain(name: str, equals: str, length: int) -> str:
        rules = [f"r{i} {equals} r{i + 1}" for i in range(length)]
        return "\n".join([f"{name} {equals} r0", *rules, f'r{length} {equals} "x"'])

    def definitions(length: int, keyword: str) -> Body:
        names = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(length)]
        links = {f"d{i}": {"allOf": [name]} if keyword == "allOf" else {"type": "array", keyword: name}
                 for i, name in enumerate(names)}
        return {"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}

    alternatives = " | ".join(f'"w{i}"' for i in range(50_000))
    doubled = "\n".join(["start: T0", *(f"T{i}: T{i + 1} T{i + 1}" for i in range(20)), 'T20: "x"'])
    properties = {f"p{i}": {"type": "string"} for i in range(10_000)}
    lexemes = " | ".join(f"/[a-z ]*{chr(97 + i % 26)}[a-z ]{{{i % 9 + 1}}}[0-9 ]*{i}/" for i in range(30))
    return [{"grammar": chain("start", ":", 3000)}, {"grammar": chain("start", ":", 40_000)},
            {"grammar": chain("root", "::=", 5000)}, {"grammar": f"start: {alternatives}"}, {"grammar": doubled},
            {"grammar": f"start: ({lexemes})+"}, {"guided_json": definitions(1500, "items")},
            {"guided_json": definitions(1500, "allOf")},
            {"guided_json": {"type": "object", "properties": properties}}]


async def grammars(url: str, until: float) -> dict[str, int]:
    bodies = [{"prompt": "a", "max_tokens": 50, "n": 2, **grammar, "structured_after": f"<{i}>" if i else ""}
              for i in range(3) for grammar in heavy_grammars()]  # known ones are answered at once
    return await repeat(url, [json.dumps(body).encode() for body in bodies], COMPLETIONS, until)


async def phrases(url: str, until: float) -> dict[str, int]:
    bodies = [{"prompt": "a", "max_tokens": 50, "banned_strings": [f"{i:06}{j:06}" * 16 for j in range(1000)]}
              for i in range(4)]
    return await repeat(url, [json.dumps(body).encode() for body in bodies], COMPLETIONS, until)


async def letters(url: str, until: float) -> dict[str, int]:
    bodies = [{"prompt": letter * 1_000_000, "max_tokens": 50} for letter in "a -1"]
    return await repeat(url, [json.dumps(body).encode() for body in bodies], COMPLETIONS, until)


async def chunks(url: str, until: float) -> dict[str, int]:
    """30 connections. Returns how often the server closed one, and how often it took all that was sent."""
    parts, counts = urlsplit(url), {"closed by the server": 0, "read to the end": 0}
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode()
    tiny = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 10**6
    headers = b"".join(b"X-%d: 1\r\n" % i for i in range(12_500)) + b"Content-Length: 0\r\n\r\n"

    async def sender(content: bytes) -> None:
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            try:
                writer.write(head + content)
                await asyncio.wait_for(writer.drain(), 60)
                await asyncio.wait_for(reader.read(), 60)
                counts["read to the end"] += 1
            except (OSError, TimeoutError):
                counts["closed by the server"] += 1
            finally:
                writer.close()
            await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(sender(headers if i % 3 == 0 else tiny) for i in range(30)))
    return counts


async def exports(url: str, until: float) -> dict[str, int]:
    bodies = [{"text": "# a\n" * 1_600_000}, {"text": ("# a\n" + "word " * 400) * 2000},
              {"text": ("# a\n" + "word " * 400) * 2000, "format": "markdown"}]
    return await repeat(url, [json.dumps(body).encode() for body in bodies] * 2, "/v1/longdraft/export", until)


ATTACKS: dict[str, Callable[[str, float], Coroutine[Any, Any, dict[str, int]]]] = {
    "stops": stops, "prompts": prompts, "idle": idle, "items": items, "grammars": grammars, "phrases": phrases,
    "letters": letters, "chunks": chunks, "exports": exports}


@cache
def expected_texts() -> list[str]:
    """The honest client's texts by the library, by seed."""
    engine = load("novelist", drafter="plain")
    return [library_text(engine, HONEST | {"seed": seed}) for seed in range(SEEDS)]


def measure(name: str, url: str, process: psutil.Process, seconds: float) -> Record:
    """The figures of one attack of so many seconds."""
    with beside(honest, url) as alone:
        time.sleep(min(seconds / 2, MAX_ALONE_S))
    peak_mib = 0.0

    async def attack() -> dict[str, int]:
        nonlocal peak_mib
        task = asyncio.ensure_future(ATTACKS[name](url, time.monotonic() + seconds))
        while not task.done():
            peak_mib = max(peak_mib, process.memory_info().rss / 2**20)
            await asyncio.sleep(0.05)
        return await task

    with beside(honest, url) as texts, beside(probe, url) as probed:
        statuses = asyncio.run(attack())
    time.sleep(1)
    began = time.perf_counter()
    after = httpx.post(url + COMPLETIONS, json=HONEST | {"seed": 0}, timeout=60)
    seconds_after = time.perf_counter() - began
    load_after = left_over(url)
    expected = expected_texts()
    latencies = {path: sorted(1e3 * taken for of, taken in probed if of == path) for path in PROBED}
    return {
        "attack": name, "answers": statuses, "probes": len(probed),
        **{f"{path[1:]}_ms_median": taken[len(taken) // 2] for path, taken in latencies.items()},
        **{f"{path[1:]}_ms_worst": taken[-1] for path, taken in latencies.items()},
        "honest_texts": len(texts), "honest_seconds": sum(text.seconds for text in texts),
        "load_average": os.getloadavg()[0], "honest_equal": sum(text.text == expected[text.seed] for text in texts),
        "honest_share_of_speed": _texts_per_second(texts) / _texts_per_second(alone), "peak_mib": peak_mib,
        "status_after": after.status_code, "seconds_after": seconds_after,
        "resident_mib_after": process.memory_info().rss / 2**20, **load_after}


def _texts_per_second(texts: Sequence[HonestText]) -> float:
    """Refused ones excluded."""
    return sum(text.text is not None for text in texts) / sum(text.seconds for text in texts)


def measure_all(names: Sequence[str], seconds: float) -> Record:
    """The named attacks on one server, one after the other."""
    with server("--journals", "none", "--memory-mib", "512") as (child, url):
        process = psutil.Process(child.pid)
        before = process.memory_info().rss / 2**20
        return {"resident_mib_before": before, "attacks": [measure(name, url, process, seconds) for name in names]}


def table(document: Record) -> Table:
    rows = [[each["attack"], f"{each['health_ms_median']:.0f} / {each['health_ms_worst']:.0f}",
             f"{each['ready_ms_worst']:.0f}, {each['metrics_ms_worst']:.0f}",
             f"{each['honest_equal']} of {each['honest_texts']}", f"{each['honest_share_of_speed']:.2f}",
             f"{each['peak_mib']:.0f}", f"{each['seconds_after']:.2f}"] for each in document["attacks"]]
    columns = ["attack", "/health, ms, median / worst", "/ready, /metrics, worst", "honest texts that are equal",
               "share of their speed", "peak memory, MiB", "a request 1 s later, s"]
    return Table("Attacks", columns, rows, f"Resident memory at the start: {document['resident_mib_before']:.0f} MiB.")
