"""Attack a server and measure what is left for others, for docs/security.md. Needs longdraft[dev].

    python benchmarks/attacks.py                    # all four attacks, some two minutes
    python benchmarks/attacks.py stops prompts      # two of them
    python benchmarks/attacks.py --json FILE

stops    bodies with 200,000 stop strings       idle     1,100 connections that send nothing
prompts  60 prompts of 2 MB at the same time    items    bodies of 8 MiB of wrong items

The server, the attacker, a client that asks for /health, /ready and /metrics in turn, and an honest client that asks
for texts are processes of this machine. The honest client's speed is compared with its speed before the attack, and its
texts with the library's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from server_process import COMPLETIONS, left_over, library_text, server

import longdraft
from longdraft.report.table import Table

HONEST = {"prompt": "The ship", "max_tokens": 200, "stream": False, "longdraft": {"min_p": 0.1, "drafter": "suffix"}}
SEEDS = 4
PROBED, PROBE_S = ("/health", "/ready", "/metrics"), 0.01  # in turn, with so long a pause between two requests
PAUSE_S = 0.2  # of an attacker between an answer and its next request; Retry-After says 5 s
JSON = {"Content-Type": "application/json"}


def probe(url: str, ends: Event, found: Any) -> None:
    """(path, seconds) of requests for PROBED, each on a connection of its own."""
    parts, seconds = urlsplit(url), []
    for path in itertools.cycle(PROBED):
        if ends.is_set():
            break
        request = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
        began = time.perf_counter()
        try:
            with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
                connection.sendall(request)
                answer = connection.recv(65536)
            is_good = answer.startswith(b"HTTP/1.1 200")
        except OSError:
            is_good = False
        seconds.append((path, time.perf_counter() - began if is_good else float("inf")))
        time.sleep(PROBE_S)
    found.send(seconds)


def honest(url: str, ends: Event, found: Any) -> None:
    """Texts one after the other: (seed, text, seconds), or (seed, status, seconds) of a refusal."""
    texts = []
    with httpx.Client(timeout=60) as client:
        while not ends.is_set():
            seed, began = len(texts) % SEEDS, time.perf_counter()
            try:
                reply = client.post(url + COMPLETIONS, json=HONEST | {"seed": seed})
                text = reply.json()["choices"][0]["text"] if reply.status_code == 200 else reply.status_code
            except httpx.HTTPError as error:
                text = repr(error)
            texts.append((seed, text, time.perf_counter() - began))
    found.send(texts)


@contextlib.contextmanager
def beside(work: Callable, url: str) -> Iterator[list]:
    """Run `work` in another process until the block ends. Yields a list that has its result then."""
    context = multiprocessing.get_context("spawn")
    ends, (ours, theirs), result = context.Event(), context.Pipe(False), []
    child = context.Process(target=work, args=(url, ends, theirs), daemon=True)
    child.start()
    try:
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
    text = (Path(__file__).parent.parent / "examples" / "chapter.txt").read_text()
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


ATTACKS: dict[str, Callable[[str, float], Coroutine[Any, Any, dict[str, int]]]] = {
    "stops": stops, "prompts": prompts, "idle": idle, "items": items}


def measure(name: str, url: str, process: psutil.Process, args: argparse.Namespace) -> dict:
    """The figures of one attack."""
    with beside(honest, url) as alone:
        time.sleep(args.seconds / 2)
    peak = [0.0]

    async def attack() -> dict[str, int]:
        until = time.monotonic() + args.seconds
        task = asyncio.create_task(ATTACKS[name](url, until))
        while not task.done():
            peak[0] = max(peak[0], process.memory_info().rss / 2**20)
            await asyncio.sleep(0.05)
        return await task

    with beside(honest, url) as texts, beside(probe, url) as probed:
        time.sleep(1.5)  # both processes have started
        statuses = asyncio.run(attack())
    time.sleep(1)
    began = time.perf_counter()
    after = httpx.post(url + COMPLETIONS, json=HONEST | {"seed": 0}, timeout=60)
    seconds_after = time.perf_counter() - began
    load = left_over(url)
    engine = longdraft.load("novelist", drafter="plain")
    expected = [library_text(engine, HONEST | {"seed": seed}) for seed in range(SEEDS)]
    latencies = {path: sorted(1e3 * seconds for of, seconds in probed if of == path) for path in PROBED}

    def speed(found: list) -> float:
        """Texts per second, refused ones excluded."""
        return sum(isinstance(text, str) for _, text, _ in found) / sum(seconds for *_, seconds in found)

    return {
        "attack": name, "answers": statuses, "probes": len(probed),
        **{f"{path[1:]}_ms_median": found[len(found) // 2] for path, found in latencies.items()},
        **{f"{path[1:]}_ms_worst": found[-1] for path, found in latencies.items()},
        "honest_texts": len(texts), "honest_equal": sum(text == expected[seed] for seed, text, _ in texts),
        "honest_share_of_speed": speed(texts) / speed(alone), "peak_mib": peak[0],
        "status_after": after.status_code, "seconds_after": seconds_after,
        "resident_mib_after": process.memory_info().rss / 2**20, **load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", choices=[*ATTACKS, []], default=[])
    parser.add_argument("--seconds", type=float, default=10, help="length of each attack")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    found = []
    with server("--journals", "none", "--memory-mib", "512") as (child, url):
        process = psutil.Process(child.pid)
        before = process.memory_info().rss / 2**20
        for name in args.attacks or ATTACKS:
            found.append(measure(name, url, process, args))
            print(json.dumps(found[-1]), flush=True)
    rows = [[each["attack"], f"{each['health_ms_median']:.0f} / {each['health_ms_worst']:.0f}",
             f"{each['ready_ms_worst']:.0f}, {each['metrics_ms_worst']:.0f}",
             f"{each['honest_equal']} of {each['honest_texts']}", f"{each['honest_share_of_speed']:.2f}",
             f"{each['peak_mib']:.0f}", f"{each['seconds_after']:.2f}"] for each in found]
    table = Table("Attacks", ["attack", "/health, ms, median / worst", "/ready, /metrics, worst",
                              "honest texts that are equal", "share of their speed", "peak memory, MiB",
                              "a request 1 s later, s"], rows)
    print(f"resident memory at the start: {before:.0f} MiB")
    table.show()
    if args.json:
        args.json.write_text(json.dumps({"resident_mib_before": before, "attacks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
