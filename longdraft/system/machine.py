"""This machine: a description for reports, its read bandwidth, and its memory."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import mmap
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import Kernels
from longdraft.system import processor
from longdraft.version import __version__

_ROUNDS = 9  # the bandwidth is that of the fastest round; other processes may disturb some rounds
_SHORTEST_S = 1e-9  # a clock may not see a shorter time
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def read_bandwidth(memory: int) -> float:
    """Measure only the read bandwidth, in bytes/s. This takes one or two seconds."""
    return max(read_rates(affordable(memory), _ROUNDS).values())


def read_rates(memory: int, rounds: int) -> dict[str, float]:
    """Method of reading -> bytes/s of its fastest round. In a round all methods take turns, on `memory` bytes."""
    methods = _read_methods(memory)
    fastest_s = dict.fromkeys(methods, math.inf)
    for turn in range(rounds + 1):
        for name, method in methods.items():
            began = time.perf_counter()
            method.read()
            seconds = time.perf_counter() - began
            if turn:  # the first round warms up
                fastest_s[name] = min(fastest_s[name], seconds)
    return {name: method.nbytes / max(fastest_s[name], _SHORTEST_S) for name, method in methods.items()}


class _ReadMethod(NamedTuple):
    """A function that reads memory, and the bytes that it reads."""

    read: Callable[[], object]
    nbytes: int


def _read_methods(memory: int) -> dict[str, _ReadMethod]:
    data = _zeroed_bytes(memory)
    floats = data.view(torch.float32)
    half = len(floats) // 2
    width = min(4096, len(floats))
    matrix, vector = floats[: len(floats) // width * width].view(-1, width), torch.ones(width)
    return {
        "sum of float32": _ReadMethod(floats.sum, len(data)),
        "maximum of bytes": _ReadMethod(data.max, len(data)),
        "dot product": _ReadMethod(lambda: torch.dot(floats[:half], floats[half : 2 * half]), half * 8),
        "matrix times vector": _ReadMethod(lambda: matrix @ vector, matrix.numel() * 4),
    }


def _zeroed_bytes(nbytes: int) -> Tensor:
    """Zeroed memory, on huge pages where the system has them: uint8 [nbytes]."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def description(kernels: Kernels | None = None) -> dict[str, Any]:
    """The machine and the software versions that a measurement depends on."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor.name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "memory_bytes": memory_bytes(),
        "last_level_cache_bytes": processor.last_level_cache(),
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
    memory = min(memory, available_memory() // 4)
    return max(1, memory // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_bytes() -> int | None:
    """Bytes of memory in all; None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def available_memory() -> int:
    """Bytes of available memory, within the limit of the control group. Half of all memory, or one GiB, if the system
    does not report it."""
    free = processor.macos_available_memory() or (memory_bytes() or 1 << 31) // 2
    with contextlib.suppress(OSError, ValueError, StopIteration):
        free = _read_counter(_PROC / "meminfo", "MemAvailable:") * 1024
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            # The group's usage includes inactive file pages, which the kernel reclaims on demand.
            used = int((_CGROUP / "memory.current").read_text()) - _read_counter(_CGROUP / "memory.stat",
                                                                                 "inactive_file")
            free = max(0, min(free, int(limit) - used))
    return free


def _read_counter(file: Path, name: str) -> int:
    """The number beside `name` in a file with a name and a number on each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == name)


def return_free_memory() -> None:
    """Give freed memory back to the system where the C library is glibc; elsewhere do nothing.

    glibc keeps what was freed between blocks in use, so a process stays as large as its busiest moment. This takes 2
    ms, and some 30 ms if there is much to give back.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


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
