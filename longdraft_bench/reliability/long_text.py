"""Memory and time for each step of one journalled text; `longdraft bench soak long`.

    longdraft bench soak long --tokens 100000

Resident memory is compared with the caches, and the time of a step with a line over the length.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from longdraft.engine.loading import load
from longdraft.report.turns import Record
from longdraft.speculation.abilities import memory_of
from longdraft_bench.reliability.kills import PROMPT, params

MOST_BYTES_PER_TOKEN = 200  # beyond the caches


def run(tokens: int, drafter: str, every: int, threads: int | None) -> Record:
    """The figures, and in `rows` a sample every `every` tokens."""
    engine = load("novelist", drafter=drafter, threads=threads)
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        generation = engine.generate(PROMPT, params(tokens, 7), journal=Path(folder) / "journal")
        times: list[float] = []
        began = time.perf_counter()
        for event in generation:
            now = time.perf_counter()
            times.append(now - began)
            length = len(generation.tokens)
            if length >= every * (len(rows) + 1) or event.finish_reason:
                rows.append({"tokens": length, "resident_bytes": _resident_bytes(), "steps": len(times),
                             "seconds_per_step": statistics.median(times), "cache_bytes": generation.step.cache.nbytes,
                             "drafter_bytes": memory_of(generation.step.drafter)})
                times = []
            began = time.perf_counter()
    stats = generation.stats()
    return {"tokens": tokens, "drafter": drafter, **growth(rows), "finish_reason": stats["finish_reason"],
            "sha256_tokens": stats["sha256_tokens"], "tokens_per_second": stats["tokens_per_second"], "rows": rows}


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """Bytes per token of the second half, and the distance of median step times from a line over the length."""
    half = rows[len(rows) // 2 :]
    tokens = half[-1]["tokens"] - half[0]["tokens"]
    resident = half[-1]["resident_bytes"] - half[0]["resident_bytes"]
    caches = sum(half[-1][name] - half[0][name] for name in ("cache_bytes", "drafter_bytes"))
    x = np.array([row["tokens"] for row in rows[1:]])
    seconds = np.array([row["seconds_per_step"] for row in rows[1:]])
    each, at_zero = np.polyfit(x, seconds, 1, w=1 / seconds)  # minimises relative errors
    apart = np.abs(seconds - (at_zero + each * x)) / (at_zero + each * x)
    return {"resident_bytes_per_token": resident / tokens,
            "bytes_per_token_beyond_the_caches": (resident - caches) / tokens,
            "microseconds_per_step": float(1e6 * at_zero), "and_for_each_1000_tokens": float(1e9 * each),
            "mean_distance_from_the_line": float(apart.mean()), "largest_distance": float(apart.max())}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
