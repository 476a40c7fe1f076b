"""This machine: a description for reports, and its measured limits (read bandwidth, peak arithmetic).

Each limit is the best of several methods. It is an upper bound, and benchmarks report kernels as a share of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
import os
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import Kernels
from longdraft.system.timing import interleaved
from longdraft.version import __version__

_MATRIX_SIZES = (256, 512, 1024, 2048, 4096)  # rows and columns of the square matrices that are multiplied
_MOST_PRODUCT_S = 0.5  # seconds of one product; larger matrices are not tried
_PROBE_ROUNDS = 4  # of `bandwidth_probe`
_MIN_ROUNDS = 9  # a limit is the fastest round, and other processes may disturb some rounds


class Limits(NamedTuple):
    """The most that this machine was measured to do with the threads in use. `details` records the methods."""

    read_bandwidth: float  # bytes/s
    peak: dict[str, float]  # dtype -> floating-point operations/s of a matrix product
    details: dict[str, Any]


def limits(memory: int, repeats: int) -> Limits:
    """Measure all limits. `memory` is the number of bytes that the bandwidth measurement reads."""
    repeats = max(repeats, _MIN_ROUNDS)
    reads = _read_rates(memory, repeats)
    products = {name: _product_rates(dtype, memory, repeats)
                for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))}
    peak = {name: max(found.values()) for name, found in products.items()}
    # Products in bfloat16 may use float32. PyTorch's are slow where the processor has no instruction for them.
    peak["bfloat16"] = max(peak.values())
    details = {
        "read_bandwidth_gb_per_s": max(reads.values()) / 1e9,
        "read_bandwidth_methods": {name: rate / 1e9 for name, rate in reads.items()},
        "read_bytes": memory,
        "peak_gflop_per_s": {name: rate / 1e9 for name, rate in peak.items()},
        "peak_methods": {name: {f"matmul {size}": rate / 1e9 for size, rate in found.items()}
                         for name, found in products.items()},
    }
    return Limits(max(reads.values()), peak, details)


def read_bandwidth(memory: int) -> float:
    """Measure only the read bandwidth, in bytes/s. This takes one or two seconds."""
    return max(_read_rates(affordable(memory), _MIN_ROUNDS).values())


def bandwidth_probe(memory: int) -> Callable[[], float]:
    """A function that measures the read bandwidth, in bytes/s, anew each time.

    For ratios on machines whose bandwidth changes from second to second: measure it in turns with what is compared.
    After a call, PyTorch's threads poll for some milliseconds.
    """
    methods = _read_methods(affordable(memory))

    def measure() -> float:
        timings = interleaved([call for call, _ in methods.values()], _PROBE_ROUNDS)
        return max(size / timing.low_s for (_, size), timing in zip(methods.values(), timings, strict=True))

    return measure


def _read_rates(memory: int, repeats: int) -> dict[str, float]:
    """Method -> bytes/s of its fastest round."""
    methods = _read_methods(memory)
    timings = interleaved([call for call, _ in methods.values()], repeats)
    return {name: size / timing.low_s for (name, (_, size)), timing in zip(methods.items(), timings, strict=True)}


def _read_methods(memory: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Ways of reading: name -> a function, and the bytes that it reads."""
    data = _zeroed_bytes(memory)
    floats = data.view(torch.float32)
    half = len(floats) // 2
    width = min(4096, len(floats))
    matrix, vector = floats[: len(floats) // width * width].view(-1, width), torch.ones(width)
    return {
        "sum of float32": (floats.sum, len(data)),
        "maximum of bytes": (data.max, len(data)),
        "dot product": (lambda: torch.dot(floats[:half], floats[half : 2 * half]), half * 8),
        "matrix times vector": (lambda: matrix @ vector, matrix.numel() * 4),
    }


def _zeroed_bytes(nbytes: int) -> Tensor:
    """Zeroed memory, on huge pages where the system has them: uint8 [nbytes]."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


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


def description(kernels: Kernels | None = None) -> dict[str, Any]:
    """The machine and the software versions that a measurement depends on."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
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
    """`memory` bytes, or a quarter of the available memory if that is less, as a whole number of pages."""
    available = _meminfo("MemAvailable")
    memory = memory if available is None else min(memory, available // 4)
    return max(1, memory // mmap.PAGESIZE) * mmap.PAGESIZE


def available_memory() -> int:
    """Bytes of available memory, or one GiB if the system does not report it."""
    return _meminfo("MemAvailable") or 1 << 30


def return_free_memory() -> None:
    """Give freed memory back to the system where the C library is glibc; elsewhere do nothing.

    glibc keeps what was freed between blocks in use, so a process stays as large as its busiest moment. This takes 2
    ms, and some 30 ms if there is much to give back.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def processor() -> str:
    """The processor's name and its vector units that the kernels can use."""
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
    """The commit of the checkout that contains this file, or None outside of a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError):
        asked = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True,
                               text=True, check=False)
        return asked.stdout.strip() or None
    return None
