"""A server in a process of its own, and what its clients share: bodies, damage, expected texts, streams, probes."""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx

from longdraft.engine.engine import Engine

Body = dict[str, Any]  # of a request, or an object of a stream
JSON = {"Content-Type": "application/json"}
GENERATIONS = "/v1/longdraft/generations"
COMPLETIONS = "/v1/completions"
DRAFTERS = ("plain", "suffix", "tokenswift", "magicdec", "auto")
PROMPTS = ("It was", "The ship", "She had not", "In the year 1843", "\"No,\" said the")
SOUND_BODIES = [json.dumps(each).encode() for each in (  # to be damaged
    {"prompt": "a", "max_tokens": 1, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.5}},
    {"prompt": [5, 6], "max_tokens": 2, "n": 2, "stream": True,
     "longdraft": {"min_p": 0.1, "journal": False, "drafter": "auto"}},
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    {"tokens": [1, 2, 3]}, {"prompt": "a", "add_special_tokens": False})]


@contextlib.contextmanager
def server(*options: str, on_line: Callable[[str], object] = len) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and URL of a server that is started as a user starts it. `on_line` gets each line of its log."""
    command = [sys.executable, "-m", "longdraft", "serve", "--port", "0", "--log-level", "info", *options]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    url = next(match.group() for line in child.stderr if (match := re.search(r"http://[\d.]+:\d+", line)))
    threading.Thread(target=lambda: [None for line in child.stderr or () if on_line(line) is Ellipsis],
                     daemon=True).start()
    try:
        yield child, url
    finally:
        child.kill()
        child.wait()


def text_key(asked: Body) -> str:
    """Equal for requests of one text."""
    return json.dumps([asked["prompt"], asked["seed"], asked["max_tokens"]])


def library_text(engine: Engine, asked: Body) -> str:
    params = engine.params(max_new_tokens=asked["max_tokens"], seed=asked["seed"], min_p=0.1)
    return "".join(event.text for event in engine.generate(asked["prompt"], params))


def left_over(url: str) -> dict[str, int]:
    """The texts and the reserved bytes that a server has: none, once its clients have gone."""
    ready = httpx.get(url + "/ready", timeout=60).json()
    return {"jobs_after": ready["running"] + ready["waiting"], "reserved_bytes_after": ready["reserved_bytes"]}


def chunks(reply: httpx.Response) -> Iterator[Body]:
    """The objects of a stream."""
    return (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))


async def async_chunks(reply: httpx.Response) -> AsyncIterator[Body]:
    """The objects of a stream of an asynchronous client."""
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def damage(rng: random.Random, body: bytes) -> bytes:
    """A body with bytes changed, cut, repeated and inserted."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 5)):
        position = rng.randrange(len(data))
        change = rng.choice(["flip", "cut", "double", "insert"])
        if change == "flip":
            data[position] = rng.randrange(256)
        elif change == "cut":
            del data[position : position + rng.randint(1, 8)]
        elif change == "double":
            data[position:position] = data[position : position + rng.randint(1, 40)]
        else:
            data[position:position] = rng.choice(_INSERTED)
        if not data:
            data = bytearray(b"{")
    return bytes(data)


_INSERTED: Sequence[bytes] = (b"[" * 2000, b"\x00", b"\\ud800", b"1e999", b"null", b"-0", b"9" * 400)


def probe_seconds(url: str, path: str) -> float:
    """Seconds of a GET request on a connection of its own; infinite if the answer is not 200."""
    parts = urlsplit(url)
    request = f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()
    began = time.perf_counter()
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=60) as connection:
            connection.sendall(request)
            is_good = connection.recv(65536).startswith(b"HTTP/1.1 200")
    except OSError:
        is_good = False
    return time.perf_counter() - began if is_good else math.inf
