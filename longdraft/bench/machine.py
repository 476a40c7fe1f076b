"""The limits of this machine, measured: read bandwidth, and the arithmetic of a matrix product.

Each is the best of several methods, so that it is a bound: what a kernel reaches is told as a part of it.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longdraft.bench.measure import Limits, interleaved
from longdraft.kernels import Kernels
from longdraft.version import __version__

_SIZES = (256, 512, 1024, 2048, 4096)  # of square matrices
_ROUNDS = 9  # at least: a limit is the best round, and one may be disturbed


def limits(memory: int, repeats: int) -> Limits:
    """Measured with the threads in use; `memory` bytes are read for the bandwidth."""
    repeats = max(repeats, _ROUNDS)
    reads = _reads(memory, repeats)
    products = {name: _products(dtype, memory, repeats)
                for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))}
    details = {
        "read_bandwidth_gb_per_s": max(reads.values()) / 1e9,
        "read_bandwidth_methods": {name: rate / 1e9 for name, rate in reads.items()},
        "read_bytes": memory,
        "peak_gflop_per_s": {name: max(found.values()) / 1e9 for name, found in products.items()},
        "peak_methods": {name: {f"matmul {size}": rate / 1e9 for size, rate in found.items()}
                         for name, found in products.items()},
    }
    return Limits(max(reads.values()), {name: max(found.values()) for name, found in products.items()}, details)


def read_bandwidth(memory: int) -> float:
    """Bytes a second: the first part of `limits`, which takes a second or two."""
    return max(_reads(affordable(memory), _ROUNDS).values())


def _reads(memory: int, repeats: int) -> dict[str, float]:
    """Bytes a second by method, the best round of each."""
    data = _large(memory)
    floats = data.view(torch.float32)
    half = len(floats) // 2
    width = min(4096, len(floats))
    matrix, vector = floats[: len(floats) // width * width].view(-1, width), torch.ones(width)
    methods: dict[str, tuple[Callable[[], object], int]] = {
        "sum of float32": (floats.sum, len(data)),
        "maximum of bytes": (data.max, len(data)),
        "dot product": (lambda: torch.dot(floats[:half], floats[half : 2 * half]), half * 8),
        "matrix times vector": (lambda: matrix @ vector, matrix.numel() * 4),
    }
    timings = interleaved([work for work, _ in methods.values()], repeats)
    return {name: size / timing.low_s for (name, (_, size)), timing in zip(methods.items(), timings, strict=True)}


def _large(nbytes: int) -> Tensor:
    """Zeroed bytes, on huge pages where the system has them."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _products(dtype: torch.dtype, memory: int, repeats: int) -> dict[int, float]:
    """Operations a second of square products by size, the best round of each."""
    sizes = [size for size in _SIZES if 3 * size * size * dtype.itemsize <= memory] or [_SIZES[0]]
    pairs = [(torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)) for size in sizes]
    timings = interleaved([partial(torch.matmul, a, b) for a, b in pairs], repeats)
    return {size: 2 * size**3 / timing.low_s for size, timing in zip(sizes, timings, strict=True)}


def describe(kernels: Kernels | None = None) -> dict[str, Any]:
    """Where and with what a figure was measured."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "memory_bytes": _meminfo("MemTotal"),
        "last_level_cache_bytes": _last_level_cache(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "longdraft": __version__,
        "commit": _commit(),
    }
    return about if kernels is None else about | {"kernels": kernels.name, "dtype": dtype_name(kernels)}


def dtype_name(kernels: Kernels) -> str:
    return str(kernels.dtype).removeprefix("torch.")


def affordable(memory: int) -> int:
    """`memory`, or a quarter of what is free where that is less: a whole number of pages."""
    free = _meminfo("MemAvailable")
    memory = memory if free is None else min(memory, free // 4)
    return max(1, memory // mmap.PAGESIZE) * mmap.PAGESIZE


def free_memory() -> int:
    """Bytes that are free, or a gibibyte where nobody says."""
    return _meminfo("MemAvailable") or 1 << 30


def _processor() -> str:
    """Its name, and those of its units that matter here."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        flags = found.get("flags", "").split()
        units = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
        if "model name" in found:
            return f"{found['model name']} ({' '.join(units)})" if units else found["model name"]
    return platform.processor() or platform.machine()


def _meminfo(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return None


def _last_level_cache() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        text = max(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")).read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    return None


def _commit() -> str | None:
    """The commit of the checkout that this runs from, if it is one."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError):
        asked = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True,
                               text=True, check=False)
        return asked.stdout.strip() or None
    return None
