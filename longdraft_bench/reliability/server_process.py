"""A server in a process of its own, and what its clients share: bodies, expected texts, streams, what is left over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import httpx

import longdraft

COMPLETIONS = "/v1/completions"
PROMPTS = ("It was", "The ship", "She had not", "In the year 1843", "\"No,\" said the")
SOUND_BODIES = [json.dumps(each).encode() for each in (  # to be damaged
    {"prompt": "a", "max_tokens": 1, "temperature": 0.5, "stop": ["x"], "logit_bias": {"5": 1.5}},
    {"prompt": [5, 6], "max_tokens": 2, "n": 2, "stream": True,
     "longdraft": {"min_p": 0.1, "journal": False, "drafter": "auto"}},
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    {"tokens": [1, 2, 3]}, {"prompt": "a", "add_special_tokens": False})]


@contextmanager
def server(*options: str, on_line: Callable[[str], object] = len) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and URL of a server that is started like a user starts it. `on_line` gets each line of its log."""
    command = [sys.executable, "-m", "longdraft", "serve", "--port", "0", "--log-level", "info", *options]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    url = next(found.group() for line in child.stderr if (found := re.search(r"http://[\d.]+:\d+", line)))
    threading.Thread(target=lambda: [None for line in child.stderr or () if on_line(line) is Ellipsis],
                     daemon=True).start()
    try:
        yield child, url
    finally:
        child.kill()
        child.wait()


def library_text(engine: longdraft.Engine, asked: dict) -> str:
    params = engine.params(max_new_tokens=asked["max_tokens"], seed=asked["seed"], min_p=0.1)
    return "".join(event.text for event in engine.generate(asked["prompt"], params))


def left_over(url: str) -> dict[str, int]:
    """The texts and the reserved bytes that a server has: none, once its clients have gone."""
    ready = httpx.get(url + "/ready", timeout=60).json()
    return {"jobs_after": ready["running"] + ready["waiting"], "reserved_bytes_after": ready["reserved_bytes"]}


def chunks(reply: httpx.Response) -> Iterator[dict]:
    """The objects of a stream."""
    return (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {"))


async def async_chunks(reply: httpx.Response) -> AsyncIterator[dict]:
    """The objects of a stream of an asynchronous client."""
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])
