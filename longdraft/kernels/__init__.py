"""Arithmetic behind one interface. `choose` picks an implementation once; the engine reports which."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from longdraft.errors import UsageError
from longdraft.kernels import cpu
from longdraft.kernels.interface import (
    KV,
    AttentionOutput,
    Decoder,
    Geometry,
    Kernels,
    KVStore,
    LayersKV,
    LayerWeights,
    Linear,
)
from longdraft.kernels.reference import ReferenceKernels

__all__ = ["KV", "AttentionOutput", "Decoder", "Geometry", "KVStore", "Kernels", "LayerWeights", "LayersKV", "Linear",
           "available", "choose", "set_threads", "single_threaded_torch", "threads"]

log = logging.getLogger(__name__)
VARIABLE = "LONGDRAFT_KERNELS"
REFERENCE = "reference"


def available(device: str = "cpu") -> list[str]:
    """What LONGDRAFT_KERNELS may name on this device, the fastest first."""
    return [*(cpu.variants() if device == "cpu" else _cuda_names()), REFERENCE]


def _cuda_names() -> list[str]:
    """Those of Triton, where it is installed."""
    if importlib.util.find_spec("triton") is None:
        return []
    from longdraft.kernels.cuda.kernels import NAMES

    return list(NAMES)


def choose(device: str, dtype: str, name: str | None = None) -> Kernels:
    """The fastest kernels that serve this device and dtype ("float32" or "bfloat16").

    `name`, else the environment variable LONGDRAFT_KERNELS, asks for certain ones (see `available`). Where
    the compiled kernels are missing the reference serves, and a warning says so.
    """
    asked = name or os.environ.get(VARIABLE, "auto")
    if device == "cpu" and asked.startswith("triton-") and os.environ.get("TRITON_INTERPRET") == "1":
        return _on_cuda(device, dtype, asked)  # interpreted, for tests
    if asked not in ("auto", *available(device)):
        where = "here" if device == "cpu" else f"on {device}"
        raise UsageError(f"{VARIABLE} is {asked!r}; allowed {where}: auto, {', '.join(available(device))}")
    if asked == REFERENCE:
        return ReferenceKernels(device, dtype)
    if device != "cpu":
        return _on_cuda(device, dtype, available(device)[0] if asked == "auto" else asked)
    if not cpu.variants():
        log.warning("the compiled CPU kernels are missing (%s), the slow reference serves; "
                    "reinstall longdraft with a C++ compiler at hand", cpu.WHY_MISSING)
        return ReferenceKernels(device, dtype)
    return cpu.CpuKernels(cpu.variants()[0] if asked == "auto" else asked, dtype)


def _on_cuda(device: str, dtype: str, name: str) -> Kernels:
    """Triton's kernels of this name; the reference where Triton is missing, which a warning says."""
    if name == REFERENCE:
        log.warning("Triton is missing, the slow reference serves; install it (PyTorch for CUDA brings it)")
        return ReferenceKernels(device, dtype)
    from longdraft.kernels.cuda.kernels import CudaKernels

    if device != "cpu":
        capability = torch.cuda.get_device_capability(device)
        wanted = (8, 9) if name.endswith("-fp8") else (8, 0)
        if capability < wanted:
            raise UsageError(f"{VARIABLE} {name!r} needs a device of compute capability {wanted[0]}.{wanted[1]} or "
                             f"more, this one has {capability[0]}.{capability[1]}; "
                             f"{'leave -fp8 out' if wanted == (8, 9) else 'use --device cpu'}")
    return CudaKernels(device, dtype, name)


def set_threads(count: int) -> None:
    """Threads for arithmetic on the CPU, PyTorch's and ours. Results do not depend on it."""
    torch.set_num_threads(count)
    cpu.set_threads(count)


def threads(kernels: Kernels) -> int:
    """How many threads these kernels use on the CPU."""
    return cpu.threads() if _has_threads(kernels) else torch.get_num_threads()


def _has_threads(kernels: Kernels) -> bool:
    """Whether they are the compiled ones, be it each rank's own (longdraft/parallel)."""
    return isinstance(getattr(kernels, "local", kernels), cpu.CpuKernels)


@contextmanager
def single_threaded_torch(kernels: Kernels) -> Iterator[None]:
    """Within this, PyTorch works in one thread where the compiled kernels have threads of their own.

    Its other threads go on spinning for a while after each of its operations, on the very cores that ours need:
    two to three times slower drafts (docs/notebook.md).
    """
    before = torch.get_num_threads()
    if not _has_threads(kernels) or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


cpu.set_threads(torch.get_num_threads())
