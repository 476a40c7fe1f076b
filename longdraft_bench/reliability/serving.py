"""Measure a server under load and with faulty clients, for docs/server.md. Needs longdraft[dev].

    python benchmarks/serving.py latency                     # time to first token, tokens/s beside the command line
    python benchmarks/serving.py load --clients 128 --seconds 180
    python benchmarks/serving.py malformed --count 10000
    python benchmarks/serving.py recovery --kills 5          # kill -9, restart, resume
    python benchmarks/serving.py slow --readers 64           # readers that take a few bytes per second

Each command starts its own server, prints a table and one line of JSON; --json FILE writes it to a file.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
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

import httpx
import psutil
from server_process import COMPLETIONS, PROMPTS, SOUND_BODIES, async_chunks, chunks, left_over, library_text, server

import longdraft
from longdraft.engine.run_statistics import sha256_tokens
from longdraft.report.table import Table


def body(rng: random.Random, tokens: int, *, stream: bool) -> dict:
    drafter = rng.choice(["plain", "suffix", "tokenswift", "magicdec", "auto"])
    return {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(12), "max_tokens": tokens, "stream": stream,
            "longdraft": {"min_p": 0.1, "drafter": drafter}}


async def ask(client: httpx.AsyncClient, url: str, asked: dict, patience: float | None) -> dict:
    """One request. The client disconnects after `patience` seconds."""
    began, first, text, status = time.monotonic(), None, "", 0
    try:
        async with asyncio.timeout(patience):
            async with client.stream("POST", url + COMPLETIONS, json=asked) as reply:
                status = reply.status_code
                if status != 200:
                    await reply.aread()
                elif asked["stream"]:
                    async for chunk in async_chunks(reply):
                        first = first or time.monotonic() - began
                        if "error" in chunk:
                            return {"status": 599, "error": chunk["error"]}
                        text += chunk["choices"][0]["text"]
                else:
                    text = json.loads(await reply.aread())["choices"][0]["text"]
        return {"status": status, "first": first, "seconds": time.monotonic() - began, "text": text}
    except TimeoutError:
        return {"status": 0}
    except httpx.HTTPError as error:
        return {"status": -1, "error": repr(error)}


async def run_client(number: int, url: str, until: float, tokens: int, found: list) -> None:
    """Send requests until a time; a third of them is cut by disconnecting."""
    rng = random.Random(number)
    async with httpx.AsyncClient(timeout=None) as client:
        while time.monotonic() < until:
            asked = body(rng, rng.choice([tokens // 4, tokens]), stream=rng.random() < 0.7)
            answer = await ask(client, url, asked, rng.uniform(0.05, 3) if rng.random() < 0.33 else None)
            found.append((asked, answer))
            if answer["status"] == 429:
                await asyncio.sleep(rng.uniform(0.2, 1.5))


def load(args: argparse.Namespace) -> dict:
    with server("--journals", "none", "--max-running", "8", "--max-queued", "48") as (child, url):
        process = psutil.Process(child.pid)
        found: list = []
        resident: list[float] = []

        async def run() -> None:
            until = time.monotonic() + args.seconds
            clients = [asyncio.create_task(run_client(i, url, until, args.tokens, found)) for i in range(args.clients)]
            while time.monotonic() < until:
                resident.append(process.memory_info().rss / 2**20)
                await asyncio.sleep(args.seconds / 40)
            await asyncio.gather(*clients)

        asyncio.run(run())
        time.sleep(1.5)
        after = left_over(url)
    engine = longdraft.load("novelist", drafter="plain", cache_ram=0)
    expected: dict[str, str] = {}
    whole = equal = 0
    for asked, answer in found:
        if answer["status"] == 200:
            key = json.dumps([asked["prompt"], asked["seed"], asked["max_tokens"]])
            if key not in expected:
                expected[key] = library_text(engine, asked)
            whole += 1
            equal += answer["text"] == expected[key]
    states = [answer["status"] for _, answer in found]
    half = len(resident) // 2
    times = sorted(answer["first"] for _, answer in found if answer.get("first"))
    return {
        "clients": args.clients, "seconds": args.seconds, "requests": len(found), "finished": whole, "equal": equal,
        "different_texts": len(expected), "hung_up": states.count(0), "refused_429": states.count(429),
        "other": sorted({s for s in states if s not in (0, 200, 429)}),
        "first_token_s_median": statistics.median(times), "first_token_s_p95": times[int(0.95 * len(times))],
        "resident_mib_second_quarter": statistics.median(resident[half // 2 : half]),
        "resident_mib_last_quarter": statistics.median(resident[-half // 2 :]),
        **after}


def latency(args: argparse.Namespace) -> dict:
    """One client: the command line and the server write the same text in turns."""
    options = ["--max-new-tokens", str(args.tokens), "--seed", "7", "--min-p", "0.1"]
    asked = {"prompt": "It was", "max_tokens": args.tokens, "seed": 7, "stream": True, "longdraft": {"min_p": 0.1}}
    firsts, rates, wholes, lines = [], [], [], []
    with server("--journals", "none") as (_, url), tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        for _ in range(args.repeats):
            subprocess.run([sys.executable, "-m", "longdraft", "generate", "It was", *options, "--quiet", "--output",
                            str(Path(folder) / "text"), "--stats", str(stats)], check=True)
            lines.append(json.loads(stats.read_text())["tokens_per_second"])
            began, first, last = time.monotonic(), 0.0, {}
            with httpx.stream("POST", url + COMPLETIONS, json=asked, timeout=None) as reply:
                for chunk in chunks(reply):
                    first, last = first or time.monotonic() - began, chunk
            firsts.append(first)
            rates.append(last["longdraft"]["stats"]["tokens_per_second"])
            wholes.append(args.tokens / (time.monotonic() - began))
            assert last["longdraft"]["stats"]["sha256_tokens"] == json.loads(stats.read_text())["sha256_tokens"]
    pairs = [ours / line for ours, line in zip(rates, lines, strict=True)]
    return {"tokens": args.tokens, "repeats": args.repeats, "first_token_ms": 1e3 * statistics.median(firsts),
            "command_line_tokens_per_second": statistics.median(lines),
            "server_tokens_per_second": statistics.median(rates), "as_fast": statistics.median(pairs),
            "as_fast_each": pairs, "server_whole_request_tokens_per_second": statistics.median(wholes)}


def malformed(args: argparse.Namespace) -> dict:
    """Valid bodies with bytes changed, cut and repeated; then one valid request."""
    rng = random.Random(args.seed)
    paths = (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/longdraft/generations/a/resume")
    counts: dict[int, int] = {}
    with server("--journals", "none", "--timeout", "2") as (child, url), httpx.Client(timeout=60) as client:
        process, resident = psutil.Process(child.pid), []
        for number in range(args.count):
            if number % max(1, args.count // 10) == 0:
                resident.append(process.memory_info().rss / 2**20)
            data = bytearray(rng.choice(SOUND_BODIES))
            for _ in range(rng.randint(1, 5)):
                at = rng.randrange(len(data))
                change = rng.choice(["flip", "cut", "double", "insert"])
                if change == "flip":
                    data[at] = rng.randrange(256)
                elif change == "cut":
                    del data[at : at + rng.randint(1, 8)]
                elif change == "double":
                    data[at:at] = data[at : at + rng.randint(1, 40)]
                else:
                    data[at:at] = rng.choice([b"[" * 2000, b"\x00", b"\\ud800", b"1e999", b"null", b"-0", b"9" * 400])
                if not data:
                    data = bytearray(b"{")
            path = rng.choice(paths)
            try:
                reply = client.post(url + path, content=bytes(data), headers={"Content-Type": "application/json"})
            except httpx.HTTPError as error:
                raise SystemExit(f"request {number} to {path} got {error!r}, the server's status is {child.poll()}: "
                                 f"{bytes(data)!r}") from error
            counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
            assert reply.status_code < 500, (bytes(data), reply.text)
        assert client.post(url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        after = left_over(url)
    return {"requests": args.count, "by_status": dict(sorted(counts.items())),
            "resident_mib_by_tenths": [round(mib, 1) for mib in resident], **after}


def recovery(args: argparse.Namespace) -> dict:
    """kill -9 at random moments, restart on the same journals, resume; the result must equal the uncut text."""
    rng, seconds, kills, lost = random.Random(args.seed), [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        options, name, shown = ("--journals", folder), "one", ""
        path, asked = COMPLETIONS, {"prompt": "The ship", "seed": 7, "max_tokens": args.tokens, "stream": True,
                                    "longdraft": {"min_p": 0.1, "journal": name}}
        digest = None
        while digest is None:
            began = time.monotonic()
            with server(*options) as (child, url):
                if kills:
                    seconds.append(time.monotonic() - began)
                text = ""
                wait = rng.uniform(0.3, 3.0) if kills < args.kills else None
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
                path, asked = f"/v1/longdraft/generations/{name}/resume", {"stream": True}
    engine = longdraft.load("novelist", drafter="plain", cache_ram=0)
    generation = engine.generate("The ship", engine.params(max_new_tokens=args.tokens, seed=7, min_p=0.1))
    for _ in generation:
        pass
    return {"kills": kills, "tokens": args.tokens, "is_equal": digest == sha256_tokens(generation.tokens),
            "shown_text_lost": lost, "restart_s_median": statistics.median(seconds)}


async def read_slowly(url: str, asked: dict, until: asyncio.Event) -> str:
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


def slow(args: argparse.Namespace) -> dict:
    """Readers that take a few bytes per second: their cost for the server and for a fast client, and their texts."""
    found: list[tuple[dict, str]] = []
    quick: dict[str, list[float]] = {"before": [], "beside": []}
    options = ("--journals", "none", "--max-running", "8", "--max-queued", "256", "--timeout", "3600")
    with server(*options) as (child, url):
        process = psutil.Process(child.pid)
        resident = {}

        async def time_quick(name: str) -> None:
            asked = {"prompt": "It was", "max_tokens": 500, "seed": 7, "stream": True, "longdraft": {"min_p": 0.1}}
            async with httpx.AsyncClient(timeout=None) as client:
                for _ in range(5):
                    answer = await ask(client, url, asked, None)
                    assert answer["status"] == 200, answer
                    quick[name].append(answer["seconds"])

        async def run() -> None:
            await time_quick("before")
            resident["before"] = process.memory_info().rss / 2**20
            until = asyncio.Event()
            asked = [{"prompt": PROMPTS[i % 5], "seed": i, "max_tokens": args.tokens, "stream": True,
                      "longdraft": {"min_p": 0.1, "drafter": "suffix", "details": True}} for i in range(args.readers)]
            readers = [asyncio.create_task(read_slowly(url, each, until)) for each in asked]
            await asyncio.sleep(3)
            async with httpx.AsyncClient() as client:
                while (ready := (await client.get(url + "/ready")).json())["running"] + ready["waiting"]:
                    await asyncio.sleep(1)  # the server finishes all texts, although the readers are slow
            await asyncio.sleep(args.seconds)
            resident["beside"] = process.memory_info().rss / 2**20
            await time_quick("beside")
            until.set()
            found.extend(zip(asked, await asyncio.gather(*readers), strict=True))

        asyncio.run(run())
        time.sleep(1.5)
        resident["after"] = process.memory_info().rss / 2**20
        after = left_over(url)
    engine = longdraft.load("novelist", drafter="plain", cache_ram=0)
    return {"readers": args.readers, "tokens": args.tokens, "seconds_of_waiting": args.seconds,
            "equal": sum(text == library_text(engine, asked) for asked, text in found),
            "quick_s_before": statistics.median(quick["before"]), "quick_s_beside": statistics.median(quick["beside"]),
            **{f"resident_mib_{name}": mib for name, mib in resident.items()}, **after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run, options in (("load", load, (("clients", 128), ("seconds", 180), ("tokens", 200))),
                               ("latency", latency, (("tokens", 1000), ("repeats", 5))),
                               ("malformed", malformed, (("count", 10_000), ("seed", 1))),
                               ("recovery", recovery, (("kills", 5), ("tokens", 3000), ("seed", 1))),
                               ("slow", slow, (("readers", 64), ("tokens", 1000), ("seconds", 60)))):
        command = commands.add_parser(name, help=(run.__doc__ or "many clients for minutes").splitlines()[0])
        for option, default in options:
            command.add_argument(f"--{option}", type=int, default=default)
        command.add_argument("--json", type=Path)
        command.set_defaults(run=run, name=name)
    args = parser.parse_args()
    result = {"benchmark": f"serving {args.name}", "date": datetime.date.today().isoformat(),
              "longdraft_version": longdraft.__version__, **args.run(args)}
    Table(result["benchmark"], ["", "value"], [[key, str(value)] for key, value in result.items()]).show()
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
