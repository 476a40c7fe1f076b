"""The measured limits of this machine: read bandwidth, and arithmetic of matrix products; `longdraft bench machine`.

Each limit is the best of several methods. It is an upper bound, and kernels are reported as a share of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from longdraft.system import machine
from longdraft_bench.timing import interleaved

_MATRIX_SIZES = (256, 512, 1024, 2048, 4096)  # rows and columns of the square matrices that are multiplied
_MOST_PRODUCT_S = 0.5  # seconds of one product; larger matrices are not tried
_MIN_ROUNDS = 9  # a limit is the fastest round, and other processes may disturb some rounds


class Limits(NamedTuple):
    """The most that this machine was measured to do with the threads in use. `details` records the methods."""

    read_bandwidth: float  # bytes/s
    peak: dict[str, float]  # dtype -> floating-point operations/s of a matrix product
    details: dict[str, Any]


def limits(memory: int, repeats: int) -> Limits:
    """Measure all limits. `memory` is the number of bytes that the bandwidth measurement reads."""
    repeats = max(repeats, _MIN_ROUNDS)
    reads = machine.read_rates(memory, repeats)
    products = {name: _product_rates(dtype, memory, repeats)
                for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))}
    peak = {name: max(rates.values()) for name, rates in products.items()}
    # Products in bfloat16 may use float32. PyTorch's are slow where the processor has no instruction for them.
    peak["bfloat16"] = max(peak.values())
    details = {
        "read_bandwidth_gb_per_s": max(reads.values()) / 1e9,
        "read_bandwidth_methods": {name: rate / 1e9 for name, rate in reads.items()},
        "read_bytes": memory,
        "peak_gflop_per_s": {name: rate / 1e9 for name, rate in peak.items()},
        "peak_methods": {name: {f"matmul {size}": rate / 1e9 for size, rate in rates.items()}
                         for name, rates in products.items()},
    }
    return Limits(max(reads.values()), peak, details)


def _product_rates(dtype: torch.dtype, memory: int, repeats: int) -> dict[int, float]:
    """Size of square matrices -> operations/s of the fastest round of their product."""
    sizes = [size for size in _MATRIX_SIZES if 3 * size * size * dtype.itemsize <= memory] or [_MATRIX_SIZES[0]]
    calls = {}
    for size in sizes:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        calls[size] = partial(torch.matmul, a, b)
        # Without instructions for bfloat16, PyTorch takes minutes for the largest product.
        if interleaved([calls[size]], 1)[0].low_s > _MOST_PRODUCT_S / 8:  # the next size has 8 times as many operations
            break
    timings = interleaved(list(calls.values()), repeats)
    return {size: 2 * size**3 / timing.low_s for size, timing in zip(calls, timings, strict=True)}
