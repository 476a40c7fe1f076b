"""Time the tilings of products, and the cuts of attention's positions, on a CUDA device; `bench cuda-tilings`.

    longdraft bench cuda-tilings > benchmarks/results/cuda-h200-tilings.txt

For each weight of Llama-3.1-8B and Qwen2.5-1.5B it prints the floor (bytes over the copy's rate) and the fastest
tilings: microseconds of 1 and of 16 rows, rows of a program (t16, t64), and columns, block, stages and splits as in
`longdraft.kernels.cuda.linear.Tiling`. The copies of a weight do not fit into the second-level cache together. Kernels
are compiled in parallel processes first. It takes some three minutes on a machine of 16 cores.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from longdraft.kernels.cuda import few_bits, jit_few_bits, jit_linear
from longdraft.kernels.cuda.attention import Splits
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.launch import ceil_div, chained
from longdraft.kernels.cuda.linear import Tiling
from longdraft_bench.cuda import models, plan, speed

_WEIGHTS = {"8B qkv": (6144, 4096), "8B out": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
            "1.5B qkv": (2048, 1536), "1.5B out": (1536, 1536), "1.5B gate_up": (17920, 1536),
            "1.5B down": (1536, 8960)}
_HEADS = {"8B": (32, 8, 128), "1.5B": (12, 2, 128)}
_CUTS = (None, Splits(128, 64, 512), Splits(256, 64, 1024), Splits(512, 16, 2048))
_BLOCKS = ((64, 128, 3), (64, 128, 4), (64, 64, 6), (128, 64, 4), (128, 64, 3))  # columns, block, stages
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
_PROGRAMS = range(110, 1100)
_PROCESSES, _REPEATS, _LISTED = 14, 15, 6
_DTYPES = {"none": torch.bfloat16, "int8": torch.int8, "int4": torch.int32}


class Job(NamedTuple):
    """One product with one tiling."""

    out: int
    inner: int
    quantize: str
    rows: int
    tiling: Tiling


def jobs(out: int, inner: int, quantize: str) -> list[Job]:
    if quantize == "int4":
        return [Job(out, inner, quantize, 16, Tiling(128, 128, stages, splits))
                for stages in (3, 4) for splits in _SPLITS
                if ceil_div(out, 128) * splits <= _PROGRAMS[-1] and inner // 128 >= 2 * splits]
    return [Job(out, inner, quantize, rows, Tiling(columns, block, stages, splits))
            for rows in (16, 64) for columns, block, stages in _BLOCKS for splits in _SPLITS
            if ceil_div(out, columns) * splits in _PROGRAMS and inner >= 128 * splits]


def compile_kernel(job: Job) -> None:
    """Put the machine code into Triton's cache."""
    options = chained(torch.device("cuda")) | {"num_warps": 4, "grid": (1, 1, 1)}
    sizes = {"OUT": job.out, "INNER": job.inner, "ROWS": job.rows, "COLUMNS": job.tiling.columns,
             "SPLITS": job.tiling.splits}
    if job.quantize == "int4":
        form = few_bits.Form(4, few_bits.ZERO, 0).options()
        jit_few_bits.few_bits_kernel.warmup(torch.bfloat16, torch.int32, torch.float32, 5,
                                            BLOCKS=ceil_div(job.inner, 128), STAGES=job.tiling.stages, STRIDE=job.out,
                                            **form, **sizes, **options)
    else:
        jit_linear.few_rows_kernel.warmup(torch.bfloat16, _DTYPES[job.quantize], torch.float32, 5,
                                          BLOCK=job.tiling.block, PREFETCHED=256, num_stages=job.tiling.stages, **sizes,
                                          **options)


def measure() -> None:
    """Compile all kernels in parallel processes, then time and print them."""
    all_jobs = [job for sizes in _WEIGHTS.values() for quantize in _DTYPES for job in jobs(*sizes, quantize)]
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        pool.map(compile_kernel, all_jobs, chunksize=4)
    bench = models.Bench(plan.ON_DEVICE, "", time.time() + 600, Path("."))
    rate = float(speed.copy_rate(plan.ON_DEVICE, bench)["bytes_per_s"])
    chosen = bench.kernels("triton-16")
    assert isinstance(chosen, CudaKernels)
    for name, sizes in _WEIGHTS.items():
        for quantize in _DTYPES:
            print(name, quantize, *timed(chosen, rate, jobs(*sizes, quantize)), sep="; ", flush=True)
    for model, shape in _HEADS.items():
        for cut in _CUTS:
            kernels = CudaKernels("cuda", "bfloat16", "triton-16", cut)
            print(f"{model} attention, {cut}", *(f"{context}: {attention_us(kernels, shape, context, 1):.1f}"
                  f"/{attention_us(kernels, shape, context, 16):.1f}" for context in plan.ON_DEVICE.contexts), sep="; ")


def timed(chosen: CudaKernels, rate: float, tried: list[Job]) -> list[str]:
    """The floor, and the fastest of some tilings of one weight."""
    weights = speed.weight_copies(plan.ON_DEVICE, chosen, tried[0].out, tried[0].inner, tried[0].quantize)
    assert all(isinstance(weight, few_bits.CudaFewBits) == (tried[0].quantize == "int4") for weight in weights)
    results = []
    for job in tried:
        us = []
        for rows in (1, 16):
            x = torch.randn(rows, job.inner, device=chosen.device).to(chosen.dtype)
            for weight in weights:
                weight.tiling = job.tiling
            work = [partial(weight.partial_sums, x, job.rows) for weight in weights]
            us.append(speed.graph_us(chosen.device, work, _REPEATS))
        results.append((us, job))
    fastest = sorted(results, key=lambda each: each[0])[:_LISTED]
    return [f"floor {weights[0].nbytes / rate * 1e6:.1f}",
            *(f"{one:.1f}/{sixteen:.1f} t{job.rows} {tuple(job.tiling)}" for (one, sixteen), job in fastest)]


def attention_us(chosen: CudaKernels, shape: tuple[int, int, int], context: int, rows: int) -> float:
    _, attend = speed.attention_of(chosen, shape, context, rows)
    return speed.graph_us(chosen.device, [attend], _REPEATS)
