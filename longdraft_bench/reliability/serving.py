"""A server under load and with faulty clients, for docs/server.md; `longdraft bench server`.

    longdraft bench server latency                     # time to first token, tokens/s beside the command line
    longdraft bench server load --clients 128 --seconds 180
    longdraft bench server malformed --count 10000
    longdraft bench server recovery --kills 5          # kill -9, restart, resume
    longdraft bench server slow --readers 64           # readers that take a few bytes per second

Each measurement starts its own server.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from longdraft.engine.loading import load
from longdraft.engine.run_statistics import sha256_tokens
from longdraft.report.turns import Record
from longdraft_bench.reliability.server_process import (
    COMPLETIONS,
    DRAFTERS,
    GENERATIONS,
    JSON,
    PROMPTS,
    SOUND_BODIES,
    Body,
    async_chunks,
    chunks,
    damage,
    left_over,
    library_text,
    server,
    text_key,
)
from longdraft_bench.timing import median_ratio

_HUNG_UP = 0
_FAILED = -1
_STREAM_ERROR = 599


class Answer(NamedTuple):
    """An answer to a client: the HTTP status, or _HUNG_UP, _FAILED or _STREAM_ERROR.

    first_s  seconds until the first piece of a stream
    """

    status: int
    text: str = ""
    seconds: float = 0.0
    first_s: float | None = None


Asked = tuple[Body, Answer]


def body(rng: random.Random, tokens: int, *, stream: bool) -> Body:
    return {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(12), "max_tokens": tokens, "stream": stream,
            "longdraft": {"min_p": 0.1, "drafter": rng.choice(DRAFTERS)}}


async def ask(client: httpx.AsyncClient, url: str, asked: Body, patience: float | None) -> Answer:
    """One request. The client disconnects after `patience` seconds."""
    began = time.monotonic()
    first_s, text = None, ""
    try:
        async with asyncio.timeout(patience):
            async with client.stream("POST", url + COMPLETIONS, json=asked) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                elif asked["stream"]:
                    async for chunk in async_chunks(reply):
                        first_s = first_s or time.monotonic() - began
                        if "error" in chunk:
                            return Answer(_STREAM_ERROR)
                        text += chunk["choices"][0]["text"]
                else:
                    text = json.loads(await reply.aread())["choices"][0]["text"]
        return Answer(reply.status_code, text, time.monotonic() - began, first_s)
    except TimeoutError:
        return Answer(_HUNG_UP)
    except httpx.HTTPError:
        return Answer(_FAILED)


async def _run_client(number: int, url: str, until: float, tokens: int, answers: list[Asked]) -> None:
    """Send requests until a time; a third of them is cut by disconnecting."""
    rng = random.Random(number)
    async with httpx.AsyncClient(timeout=None) as client:
        while time.monotonic() < until:
            asked = body(rng, rng.choice([tokens // 4, tokens]), stream=rng.random() < 0.7)
            answer = await ask(client, url, asked, rng.uniform(0.05, 3) if rng.random() < 0.33 else None)
            answers.append((asked, answer))
            if answer.status == 429:
                await asyncio.sleep(rng.uniform(0.2, 1.5))


def under_load(clients: int, seconds: int, tokens: int) -> Record:
    """Many clients for minutes. Each whole text is compared with the library's."""
    answers: list[Asked] = []
    resident: list[float] = []
    with server("--journals", "none", "--max-running", "8", "--max-queued", "48") as (child, url):
        process = psutil.Process(child.pid)

        async def run() -> None:
            until = time.monotonic() + seconds
            tasks = [asyncio.create_task(_run_client(number, url, until, tokens, answers))
                     for number in range(clients)]
            while time.monotonic() < until:
                resident.append(process.memory_info().rss / 2**20)
                await asyncio.sleep(seconds / 40)
            await asyncio.gather(*tasks)

        asyncio.run(run())
        time.sleep(1.5)
        after = left_over(url)
    engine = load("novelist", drafter="plain", cache_ram=0)
    expected: dict[str, str] = {}
    whole = equal = 0
    for asked, answer in answers:
        if answer.status == 200:
            key = text_key(asked)
            if key not in expected:
                expected[key] = library_text(engine, asked)
            whole += 1
            equal += answer.text == expected[key]
    states = [answer.status for _, answer in answers]
    half = len(resident) // 2
    times = sorted(answer.first_s for _, answer in answers if answer.first_s)
    return {
        "clients": clients, "seconds": seconds, "requests": len(answers), "finished": whole, "equal": equal,
        "different_texts": len(expected), "hung_up": states.count(_HUNG_UP), "refused_429": states.count(429),
        "other": sorted({state for state in states if state not in (_HUNG_UP, 200, 429)}),
        "first_token_s_median": statistics.median(times), "first_token_s_p95": times[int(0.95 * len(times))],
        "resident_mib_second_quarter": statistics.median(resident[half // 2 : half]),
        "resident_mib_last_quarter": statistics.median(resident[-half // 2 :]),
        **after}


def latency(tokens: int, repeats: int) -> Record:
    """One client: the command line and the server write the same text in turns."""
    options = ["--max-new-tokens", str(tokens), "--seed", "7", "--min-p", "0.1"]
    asked = {"prompt": "It was", "max_tokens": tokens, "seed": 7, "stream": True, "longdraft": {"min_p": 0.1}}
    firsts: list[float] = []
    of_server: list[float] = []
    of_request: list[float] = []
    of_command: list[float] = []
    with server("--journals", "none") as (_, url), tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        for _ in range(repeats):
            subprocess.run([sys.executable, "-m", "longdraft", "generate", "It was", *options, "--quiet", "--output",
                            str(Path(folder) / "text"), "--stats", str(stats)], check=True)
            written = json.loads(stats.read_text())
            of_command.append(written["tokens_per_second"])
            began = time.monotonic()
            first_s = 0.0
            last: Body = {}
            with httpx.stream("POST", url + COMPLETIONS, json=asked, timeout=None) as reply:
                for chunk in chunks(reply):
                    first_s = first_s or time.monotonic() - began
                    last = chunk
            firsts.append(first_s)
            of_server.append(last["longdraft"]["stats"]["tokens_per_second"])
            of_request.append(tokens / (time.monotonic() - began))
            assert last["longdraft"]["stats"]["sha256_tokens"] == written["sha256_tokens"]
    return {"tokens": tokens, "repeats": repeats, "first_token_ms": 1e3 * statistics.median(firsts),
            "command_line_tokens_per_second": statistics.median(of_command),
            "server_tokens_per_second": statistics.median(of_server), "as_fast": median_ratio(of_server, of_command),
            "as_fast_each": [ours / line for ours, line in zip(of_server, of_command, strict=True)],
            "server_whole_request_tokens_per_second": statistics.median(of_request)}


def malformed(count: int, seed: int) -> Record:
    """Valid bodies with bytes changed, cut and repeated; then one valid request. Raises AssertionError for a 5xx."""
    rng = random.Random(seed)
    paths = (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize", f"{GENERATIONS}/a/resume")
    counts: dict[int, int] = {}
    resident: list[float] = []
    with server("--journals", "none", "--timeout", "2") as (child, url), httpx.Client(timeout=60) as client:
        process = psutil.Process(child.pid)
        for number in range(count):
            if number % max(1, count // 10) == 0:
                resident.append(process.memory_info().rss / 2**20)
            data = damage(rng, rng.choice(SOUND_BODIES))
            path = rng.choice(paths)
            try:
                reply = client.post(url + path, content=data, headers=JSON)
            except httpx.HTTPError as error:
                raise AssertionError(f"request {number} to {path} got {error!r}, the server's status is "
                                     f"{child.poll()}: {data!r}") from error
            counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
            assert reply.status_code < 500, (data, reply.text)
        assert client.post(url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        after = left_over(url)
    return {"requests": count, "by_status": dict(sorted(counts.items())),
            "resident_mib_by_tenths": [round(mib, 1) for mib in resident], **after}


def recovery(num_kills: int, tokens: int, seed: int) -> Record:
    """kill -9 at random moments, restart on the same journals, resume; the result must equal the uncut text."""
    rng = random.Random(seed)
    seconds: list[float] = []
    kills = lost = 0
    shown = ""
    digest: str | None = None
    path = COMPLETIONS
    asked: Body = {"prompt": "The ship", "seed": 7, "max_tokens": tokens, "stream": True,
                   "longdraft": {"min_p": 0.1, "journal": "one"}}
    with tempfile.TemporaryDirectory() as folder:
        while digest is None:
            began = time.monotonic()
            with server("--journals", folder) as (child, url):
                if kills:
                    seconds.append(time.monotonic() - began)
                text = ""
                wait = rng.uniform(0.3, 3.0) if kills < num_kills else None
                timer = threading.Timer(wait, child.kill) if wait else None
                try:
                    with httpx.stream("POST", url + path, json=asked, timeout=None) as reply:
                        for chunk in chunks(reply):
                            if timer and not timer.is_alive() and not text:
                                timer.start()
                            text += chunk["choices"][0]["text"]
                            if chunk["choices"][0]["finish_reason"]:
                                digest = chunk["longdraft"]["stats"]["sha256_tokens"]
                except httpx.HTTPError:
                    kills += 1
                finally:
                    if timer:
                        timer.cancel()
                lost += not text.startswith(shown)
                shown = text
                path = f"{GENERATIONS}/one/resume"
                asked = {"stream": True}
    engine = load("novelist", drafter="plain", cache_ram=0)
    generation = engine.generate("The ship", engine.params(max_new_tokens=tokens, seed=7, min_p=0.1))
    for _ in generation:
        pass
    return {"kills": kills, "tokens": tokens, "is_equal": digest == sha256_tokens(generation.tokens),
            "shown_text_lost": lost, "restart_s_median": statistics.median(seconds)}


async def _read_slowly(url: str, asked: Body, until: asyncio.Event) -> str:
    """Read a stream with the smallest socket buffer: 100 bytes per second until `until` is set, then the rest."""
    host, port = url.removeprefix("http://").split(":")
    pipe = socket.socket()
    pipe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    pipe.setblocking(False)
    await asyncio.get_running_loop().sock_connect(pipe, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=pipe, limit=256)
    content = json.dumps(asked).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    got = bytearray()
    while not until.is_set():
        got += await reader.read(100)
        await asyncio.sleep(1)
    while part := await reader.read(1 << 16):
        got += part
    writer.close()
    assert got.startswith(b"HTTP/1.1 200"), bytes(got[:300])
    events = re.findall(rb"^data: ({.*})\r?$", bytes(got), re.MULTILINE)
    return "".join(json.loads(event)["choices"][0]["text"] for event in events if b'"choices":[{' in event)


def slow_readers(num_readers: int, tokens: int, seconds: int) -> Record:
    """Readers that take a few bytes per second: their cost for the server and for a fast client, and their texts."""
    texts: list[tuple[Body, str]] = []
    quick: dict[str, list[float]] = {"before": [], "beside": []}
    options = ("--journals", "none", "--max-running", "8", "--max-queued", "256", "--timeout", "3600")
    with server(*options) as (child, url):
        process = psutil.Process(child.pid)
        resident: dict[str, float] = {}

        async def time_quick(name: str) -> None:
            asked = {"prompt": "It was", "max_tokens": 500, "seed": 7, "stream": True, "longdraft": {"min_p": 0.1}}
            async with httpx.AsyncClient(timeout=None) as client:
                for _ in range(5):
                    answer = await ask(client, url, asked, None)
                    assert answer.status == 200, answer
                    quick[name].append(answer.seconds)

        async def run() -> None:
            await time_quick("before")
            resident["before"] = process.memory_info().rss / 2**20
            until = asyncio.Event()
            asked: list[Body] = [
                {"prompt": PROMPTS[number % 5], "seed": number, "max_tokens": tokens, "stream": True,
                 "longdraft": {"min_p": 0.1, "drafter": "suffix", "details": True}} for number in range(num_readers)]
            readers = [asyncio.create_task(_read_slowly(url, each, until)) for each in asked]
            await asyncio.sleep(3)
            async with httpx.AsyncClient() as client:
                while (ready := (await client.get(url + "/ready")).json())["running"] + ready["waiting"]:
                    await asyncio.sleep(1)  # the server finishes all texts, although the readers are slow
            await asyncio.sleep(seconds)
            resident["beside"] = process.memory_info().rss / 2**20
            await time_quick("beside")
            until.set()
            texts.extend(zip(asked, await asyncio.gather(*readers), strict=True))

        asyncio.run(run())
        time.sleep(1.5)
        resident["after"] = process.memory_info().rss / 2**20
        after = left_over(url)
    engine = load("novelist", drafter="plain", cache_ram=0)
    return {"readers": num_readers, "tokens": tokens, "seconds_of_waiting": seconds,
            "equal": sum(text == library_text(engine, asked) for asked, text in texts),
            "quick_s_before": statistics.median(quick["before"]), "quick_s_beside": statistics.median(quick["beside"]),
            **{f"resident_mib_{name}": mib for name, mib in resident.items()}, **after}
