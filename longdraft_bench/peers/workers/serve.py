"""Run one engine in its own process: one JSON request per line of stdin, its answer on stdout.

    python serve.py transformers steps
    {"do": "open", "folder": "...", "threads": 2, "longest": 4096, "needs": ["torch"], "options": {}}
    {"version": "5.0"}
    {"do": "greedy", "prompt": [5, 6, 7], "count": 3}                                {"tokens": [8, 9, 10]}
    {"do": "fill", "length": 2048, "within_s": 60}                       {"cache": "random", "length": 2048}
    {"do": "steps", "count": 2}                                                  {"seconds": [0.01, 0.01]}
    {"do": "prefill", "tokens": [5, 6, 7]}                                               {"seconds": 0.02}
    {"do": "together", "slots": 4, "count": 1}                     {"seconds": [0.02], "processor_s": 0.04}
    {"do": "nats", "tokens": [5, 6, 7]}                                            {"nats_per_token": 3.2}

    python serve.py transformers texts
    {"do": "open", ..., "options": {"draft": null}}
    {"do": "write", "prompt": [5, 6, 7], "count": 64, "settings": {"lookup": 5}}
                          {"tokens": [8, 9, ...], "first_s": 0.02, "seconds": 0.2, "peak_memory_bytes": 1000000}

If a package is missing, the answer to "open" is {"missing": ["gguf"]}. An exception ends the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol


class StepEngine(Protocol):
    """`with_NAME.StepEngine(folder, threads, longest, **options)`: single steps of greedy plain decoding."""

    version: str

    def prefill(self, tokens: Sequence[int]) -> None:
        """Clear the cache and read these tokens."""

    def fill(self, length: int, limit_s: float) -> tuple[str, int]:
        """Clear the cache and reach `length` positions. Returns how ("random" or "prefill") and the length reached."""

    def step(self, token: int) -> int:
        """One step of plain decoding: the most likely token after this one."""

    def together(self, tokens: Sequence[int]) -> list[int]:
        """One step of several texts side by side, each in a slot of its own. `fill` fills all slots."""

    def nats(self, tokens: Sequence[int]) -> float:
        """Clear the cache and read these tokens: the mean of -log p of each token but the first. llama.cpp only."""


class TextEngine(Protocol):
    """`with_NAME.TextEngine(folder, threads, longest, **options)`: the engine's own generation. Greedy; end-of-text
    tokens are ignored."""

    version: str

    def write(self, prompt: Sequence[int], count: int, **settings: Any) -> Iterable[int]:
        """Clear the cache; `count` new token ids after the prompt, drafted as the settings say. An iterator yields
        each when it is written."""


ROLES = {"steps": "StepEngine", "texts": "TextEngine"}


def main(name: str, role: str = "steps") -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if engine is None:
            missing = [package for package in request["needs"] if _is_missing(package)]
            if not missing:
                build = getattr(importlib.import_module(f"with_{name}"), ROLES[role])
                engine = build(request["folder"], request["threads"], request["longest"], **request["options"])
            answer = {"missing": missing} if engine is None else {"version": engine.version}
        else:
            answer = _answer(engine, request)
        print(json.dumps(answer), file=answers, flush=True)


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # the package of a missing submodule
        return True


def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "write":
        return _written(engine, request)
    if request["do"] == "greedy":
        *prompt, token = request["prompt"]
        engine.prefill(prompt)
        tokens = [token := engine.step(token) for _ in range(request["count"])]
        return {"tokens": tokens}
    if request["do"] == "fill":
        kind, length = engine.fill(request["length"], request["within_s"])
        engine.step(5)
        return {"cache": kind, "length": length}
    if request["do"] == "prefill":
        return {"seconds": _seconds(lambda: engine.prefill(request["tokens"]))}
    if request["do"] == "nats":
        return {"nats_per_token": engine.nats(request["tokens"])}
    if request["do"] == "together":
        slots = [5] * request["slots"]
        engine.together(slots)  # wakes the threads and refills the processor's caches
        began = time.process_time()
        seconds = [_seconds(lambda: engine.together(slots)) for _ in range(request["count"])]
        return {"seconds": seconds, "processor_s": time.process_time() - began}
    assert request["do"] == "steps"
    return {"seconds": [_seconds(lambda: engine.step(5)) for _ in range(request["count"])]}


def _written(engine: TextEngine, request: dict[str, Any]) -> dict[str, Any]:
    """A text and its seconds; those to the first token, `first_s`, only of an engine that yields its tokens."""
    began = time.perf_counter()
    tokens = engine.write(request["prompt"], request["count"], **request["settings"])
    answer: dict[str, Any] = {}
    written: list[int] = []
    for token in tokens:
        if isinstance(tokens, Iterator) and not written:
            answer["first_s"] = time.perf_counter() - began
        written.append(int(token))
    return answer | {"seconds": time.perf_counter() - began, "tokens": written,
                     "peak_memory_bytes": _peak_memory_bytes()}


def _peak_memory_bytes() -> int:
    """Peak memory of this program. getrusage would include the memory of the parent process before exec."""
    try:
        with open("/proc/self/status") as file:
            return 1024 * int(next(line for line in file if line.startswith("VmHWM")).split()[1])
    except (OSError, StopIteration):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
