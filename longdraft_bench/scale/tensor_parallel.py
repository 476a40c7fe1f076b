"""Tensor parallelism on this machine's cores, which needs no GPUs; `longdraft bench scale ranks`.

    torchrun --nproc-per-node 2 -m longdraft bench scale ranks MODEL --tokens 40

A text is written in turns by all ranks with one thread each, by rank 0 alone with one thread, and by rank 0 alone
with as many threads as ranks. Reported are medians of the ratios of neighbouring turns, and the time of a sum. The
texts of one process and of several may differ (docs/scale.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from longdraft import kernels, parallel
from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft_bench.timing import in_rounds, median_ratio, seconds_of

_PROMPT = "It was the best of times, it was the worst of times, " * 8
_SUMS = 200  # timed sums of each size
_ROWS = (1, 16)  # whose sums are timed


def measure(model: str, tokens: int, rounds: int) -> Record | None:
    """The figures, on rank 0; None on the other ranks, which follow it."""
    _, size = parallel.in_torchrun()
    shared = load(model, drafter="plain", threads=1, tensor_parallel=size)
    group = parallel.join(size, "cpu")
    sums = {rows: statistics.median(_sum_seconds(group, rows * shared.model.config.hidden_size) for _ in range(_SUMS))
            for rows in _ROWS}
    if shared.is_follower:
        shared.follow()
        return None
    alone = load(model, drafter="plain", threads=1)
    hashes: dict[str, set[str]] = {}

    def writes(name: str, engine: Engine, threads: int) -> Callable[[], float]:
        def seconds_per_token() -> float:
            kernels.set_threads(threads)
            params = SamplingParams(max_new_tokens=tokens, seed=1, ignore_eos=True, on_loop="off")
            *_, last = engine.generate(_PROMPT, params)
            assert last.stats is not None
            hashes.setdefault(name, set()).add(last.stats["sha256_tokens"])
            return float(last.stats["decode_seconds"]) / tokens

        return seconds_per_token

    engines = {"shared": (shared, 1), "one thread": (alone, 1), f"{size} threads": (alone, size)}
    turns = in_rounds({name: writes(name, *given) for name, given in engines.items()}, rounds)
    shared.close()
    return {"ranks": size, "ms_per_token": {name: statistics.median(times) * 1e3 for name, times in turns.items()},
            "shared_to": {name: median_ratio(times, turns["shared"]) for name, times in turns.items()
                          if name != "shared"},
            "sum_microseconds": {rows: seconds * 1e6 for rows, seconds in sums.items()},
            "is_one_text": len(set().union(*hashes.values())) == 1}


def _sum_seconds(group: parallel.ProcessGroup, numbers: int) -> float:
    part = torch.ones(numbers)
    return seconds_of(lambda: group.sum(part))
