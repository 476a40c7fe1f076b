"""Skeletons of faster steps: what the boundaries between kernels cost, and what a persistent kernel could stream."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from longdraft.kernels.cuda import jit_rows
from longdraft.kernels.cuda.launch import UNFUSED, chained, shared_bytes
from longdraft_bench.cuda.models import Bench
from longdraft_bench.cuda.plan import CudaPlan
from longdraft_bench.cuda.speed import graph_us

SOURCE = Path(__file__).with_name("skeleton.cu")
_THREADS, _MOST_STAGES, _CHUNK_BYTES = 512, 24, 16
_LAUNCHES, _WIDTH = 200, 1024
_PHASES = (5, 7)  # barriers of a layer
_PATIENCE = 1 << 30  # clock ticks, half a second or more, for which a program waits for others


def boundaries(plan: CudaPlan, bench: Bench) -> dict[str, Any]:
    """Microseconds of a tiny kernel in a graph of many that follow one another, chained and not."""
    kernels = bench.kernels()
    x = torch.ones(1, _WIDTH, dtype=kernels.dtype, device=kernels.device)
    weight, out = torch.ones_like(x[0]), torch.empty_like(x)

    def measure(options: dict[str, Any]) -> float:
        def work() -> None:
            jit_rows.rms_norm_kernel[(1,)](x, weight, out, 1e-6, WIDTH=_WIDTH, PADDED=_WIDTH, ROUNDS_ONCE=True,
                                           num_warps=4, **options)

        return graph_us(kernels.device, [work] * (_LAUNCHES if plan.device == "cuda" else 2), plan.repeats)

    found = {"unchained_us": measure(UNFUSED | {"IS_CHAINED": False}), "chained_us": measure(chained(kernels.device))}
    return found | {"gain_us": found["unchained_us"] - found["chained_us"]}


def ring(plan: CudaPlan, bench: Bench, name: str) -> dict[str, Any]:
    """Milliseconds in which a persistent kernel streams the weights of a model, with 0, 5 and 7 barriers in a layer,
    and microseconds of a barrier."""
    size, layers = plan.decide.streams[name]
    if plan.device != "cuda":
        return {"left_out": "the interpreter runs no CUDA C++: a test runs the skeleton with a shim"}
    device = bench.kernels().device
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    chunk, sums = _THREADS * _CHUNK_BYTES, torch.zeros(programs * _THREADS, dtype=torch.int32, device=device)
    stages = min(_MOST_STAGES, shared_bytes(device) // chunk)
    kernel = _compiled(stages)
    weights = torch.zeros((size + programs * chunk * layers * max(_PHASES)) // 4, dtype=torch.int32, device=device)
    times: dict[str, Any] = {}
    for phases in (1, *_PHASES):  # one phase without a barrier streams as fast as any number of them
        chunks = -(-size // (programs * chunk * layers * phases))
        counter, failed = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))

        def work(chunks: int = chunks, phases: int = phases, counter: torch.Tensor = counter,
                 failed: torch.Tensor = failed) -> None:
            counter.zero_()
            kernel((programs, 1, 1), (_THREADS, 1, 1),
                   [weights, counter, sums, failed, _PATIENCE, chunks, phases * layers, int(phases > 1)],
                   shared_mem=stages * chunk)

        times[f"{phases if phases > 1 else 0} barriers"] = graph_us(device, [work], plan.repeats) / 1e3
        bench.keep(times)
        if failed.item():
            raise RuntimeError(f"programs waited for each other for more than {_PATIENCE} clock ticks")
    gained = times[f"{_PHASES[-1]} barriers"] - times["0 barriers"]
    return {"bytes": size, "programs": programs, **times, "barrier_us": gained * 1e3 / (_PHASES[-1] * layers),
            "bytes_per_s": size / times["0 barriers"] * 1e3}


@cache
def _compiled(stages: int) -> Any:
    """The skeleton, compiled by the CUDA libraries that PyTorch has."""
    source = SOURCE.read_text(encoding="utf-8")
    made = torch.cuda._compile_kernel(source, "ring", nvcc_options=[f"-DSTAGES={stages}"])
    made.set_shared_memory_config(stages * _THREADS * _CHUNK_BYTES)
    return made
