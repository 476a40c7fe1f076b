"""Runs one engine in a process of its own: a JSON request on each line of stdin, its answer on stdout.

    python serve.py transformers
    {"do": "open", "folder": "...", "threads": 2, "longest": 4096, "needs": ["torch"], "options": {}}
    {"version": "5.0"}
    {"do": "greedy", "prompt": [5, 6, 7], "count": 3}                                {"tokens": [8, 9, 10]}
    {"do": "fill", "length": 2048, "within_s": 60}                       {"cache": "random", "length": 2048}
    {"do": "steps", "count": 2}                                                  {"seconds": [0.01, 0.01]}
    {"do": "prefill", "tokens": [5, 6, 7]}                                               {"seconds": 0.02}
    {"do": "together", "slots": 4, "count": 1}                     {"seconds": [0.02], "processor_s": 0.04}

    python serve.py transformers writer
    {"do": "open", ..., "options": {"draft": null}}
    {"do": "write", "prompt": [5, 6, 7], "count": 64, "settings": {"lookup": 5}}
                                           {"tokens": [8, 9, ...], "seconds": 0.2, "peak_memory_bytes": 1000000}

Where a package that it needs is missing, "open" is answered so: {"missing": ["gguf"]}. An error ends the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol


class Engine(Protocol):
    """What `with_NAME.Engine(folder, threads, longest, **options)` gives."""

    version: str

    def prefill(self, tokens: Sequence[int]) -> None:
        """Forget what was, read these."""

    def fill(self, length: int, limit_s: float) -> tuple[str, int]:
        """Forget what was, reach `length` positions: how ("random" or "prefill"), and how many of them."""

    def step(self, token: int) -> int:
        """One step of plain decoding: the likeliest token behind this one."""

    def together(self, tokens: Sequence[int]) -> list[int]:
        """The same for texts in slots of their own, side by side. `fill` fills all slots."""


class Writer(Protocol):
    """What `with_NAME.Writer(folder, threads, longest, **options)` gives: the engine's own generation, as its users
    call it. Greedy; texts do not end by themselves."""

    version: str

    def write(self, prompt: Sequence[int], count: int, **settings: Any) -> Sequence[int]:
        """Forget what was; `count` new token ids behind the prompt, drafted as the settings say."""


def main(name: str, kind: str = "Engine") -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not stand between answers
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if engine is None:
            missing = [package for package in request["needs"] if _is_missing(package)]
            if not missing:
                module = importlib.import_module(f"with_{name}")
                build = getattr(module, kind.capitalize())
                engine = build(request["folder"], request["threads"], request["longest"], **request["options"])
            answer = {"missing": missing} if engine is None else {"version": engine.version}
        else:
            answer = _answer(engine, request)
        print(json.dumps(answer), file=answers, flush=True)


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # a part of a package that is missing
        return True


def _answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "write":
        began = time.perf_counter()
        tokens = engine.write(request["prompt"], request["count"], **request["settings"])
        return {"seconds": time.perf_counter() - began, "tokens": [int(token) for token in tokens],
                "peak_memory_bytes": _peak_memory_bytes()}
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
    if request["do"] == "together":
        slots = [5] * request["slots"]
        engine.together(slots)  # wakes the threads and fills the processor's caches, after another engine's turn
        began = time.process_time()
        seconds = [_seconds(lambda: engine.together(slots)) for _ in range(request["count"])]
        return {"seconds": seconds, "processor_s": time.process_time() - began}
    assert request["do"] == "steps"
    return {"seconds": [_seconds(lambda: engine.step(5)) for _ in range(request["count"])]}


def _peak_memory_bytes() -> int:
    """Of this program alone: what the system tells of a process begins with its parent's where it can."""
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
