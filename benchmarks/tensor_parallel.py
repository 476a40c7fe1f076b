"""Measure tensor parallelism on this machine's cores, which needs no GPUs.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py MODEL --tokens 40

A text is written in turns by all ranks with one thread each, by rank 0 alone with one thread, and by rank 0 alone
with as many threads as ranks. The last line is JSON: medians of the ratios of neighbouring turns, and the time of a
sum. The texts of one process and of several may differ (docs/scale.md).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import longdraft
from longdraft import kernels, parallel
from longdraft.request.sampling_params import SamplingParams

PROMPT = "It was the best of times, it was the worst of times, " * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="bundled name, model folder or hub id")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of a text; default: 40")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    given = parser.parse_args()
    _, size = parallel.in_torchrun()
    shared = longdraft.load(given.model, drafter="plain", threads=1, tensor_parallel=size)
    group = parallel.join(size, "cpu")
    sums = {rows: [sum_seconds(group, rows * shared.model.config.hidden_size) for _ in range(200)] for rows in (1, 16)}
    if shared.is_follower:
        shared.follow()
        return
    alone = longdraft.load(given.model, drafter="plain", threads=1)
    turns: dict[str, list[float]] = {"shared": [], "one thread": [], f"{size} threads": []}
    hashes = set()
    for _ in range(given.rounds):
        for name in turns:
            kernels.set_threads(size if name.endswith("threads") else 1)
            seconds, sha256 = write(shared if name == "shared" else alone, given.tokens)
            turns[name].append(seconds / given.tokens)
            hashes.add((name == "shared", sha256))
    shared.close()
    print(json.dumps({
        "model": given.model, "ranks": size, "tokens": given.tokens, "rounds": given.rounds,
        "ms_per_token": {name: statistics.median(times) * 1e3 for name, times in turns.items()},
        "shared_to": {name: statistics.median(b / a for a, b in zip(turns["shared"], times, strict=True))
                      for name, times in turns.items() if name != "shared"},
        "sum_microseconds": {rows: statistics.median(times) * 1e6 for rows, times in sums.items()},
        "is_one_text": len({sha256 for _, sha256 in hashes}) == 1}))


def sum_seconds(group: parallel.ProcessGroup, numbers: int) -> float:
    part = torch.ones(numbers)
    began = time.perf_counter()
    group.sum(part)
    return time.perf_counter() - began


def write(engine: longdraft.Engine, tokens: int) -> tuple[float, str]:
    params = SamplingParams(max_new_tokens=tokens, seed=1, ignore_eos=True, on_loop="off")
    *_, last = engine.generate(PROMPT, params)
    return last.stats["decode_seconds"], last.stats["sha256_tokens"]


if __name__ == "__main__":
    main()
