"""The arithmetic of a model, in several implementations of one interface.

    interface.py   the interface: what every implementation computes, and the property of row invariance
    reference.py   the reference in plain PyTorch, which defines the results; slow
    cpu/           compiled C++ kernels (csrc/), in variants for different processors
    cuda/          Triton kernels for CUDA devices
    formats/       the formats of quantised weights
    chain_plan.py  what a drafter wants to be drafted in one call

`choose` selects one when a model is loaded; the engine reports its name.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from longdraft.errors import UsageError
from longdraft.kernels.attention_output import AttentionOutput, AttentionRows
from longdraft.kernels.cpu import native
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.interface import KV, Decoder, Kernels, KVStore, LayersKV, Taps
from longdraft.kernels.reference import ReferenceKernels
from longdraft.kernels.weights import Geometry, LayerWeights, Linear

__all__ = ["KV", "AttentionOutput", "AttentionRows", "Decoder", "Geometry", "KVStore", "Kernels", "LayerWeights",
           "LayersKV", "Linear", "Taps", "available", "choose", "set_threads", "single_threaded_torch", "threads"]

log = logging.getLogger(__name__)
VARIABLE = "LONGDRAFT_KERNELS"  # the environment variable that selects the kernels
REFERENCE = "reference"


def available(device: str = "cpu") -> list[str]:
    """The allowed values of LONGDRAFT_KERNELS on this device, fastest first."""
    return [*(native.variants() if device == "cpu" else _cuda_names()), REFERENCE]


def _cuda_names() -> list[str]:
    """The names of the Triton kernels; empty where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return []
    from longdraft.kernels.cuda.kernels import NAMES

    return list(NAMES)


def choose(device: str, dtype: str, name: str | None = None) -> Kernels:
    """The fastest kernels for this device and dtype ("float32", "bfloat16" or, on CUDA devices, "float16").

    `name`, or else the environment variable LONGDRAFT_KERNELS, selects others: "auto" or one of `available`. Logs a
    warning and returns the reference where the compiled kernels are missing. Raises UsageError for a name that is not
    allowed, or that the device cannot run.
    """
    asked = name or os.environ.get(VARIABLE, "auto")
    if device == "cpu" and asked.startswith("triton-") and os.environ.get("TRITON_INTERPRET") == "1":
        return _on_cuda(device, dtype, asked)  # Triton's interpreter, for tests
    if asked not in ("auto", *available(device)):
        where = "here" if device == "cpu" else f"on {device}"
        raise UsageError(f"{VARIABLE} is {asked!r}; allowed {where}: auto, {', '.join(available(device))}")
    if asked == REFERENCE:
        return ReferenceKernels(device, dtype)
    if device != "cpu":
        return _on_cuda(device, dtype, available(device)[0] if asked == "auto" else asked)
    if not native.variants():
        log.warning("the compiled CPU kernels are missing (%s), using the slow reference kernels; "
                    "to get the compiled ones, reinstall longdraft with a C++ compiler installed", native.IMPORT_ERROR)
        return ReferenceKernels(device, dtype)
    return CpuKernels(native.variants()[0] if asked == "auto" else asked, dtype)


def _on_cuda(device: str, dtype: str, name: str) -> Kernels:
    """The Triton kernels of this name. Without Triton, logs a warning and returns the reference."""
    if name == REFERENCE:
        log.warning("Triton is missing, using the slow reference kernels; "
                    "to get it, install PyTorch for CUDA, which includes it")
        return ReferenceKernels(device, dtype)
    from longdraft.kernels.cuda.kernels import CudaKernels

    if device != "cpu":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            raise UsageError(f"{VARIABLE} {name!r} needs a device of compute capability 8.0 or more, this one has "
                             f"{capability[0]}.{capability[1]}; use --device cpu")
    return CudaKernels(device, dtype, name)


def set_threads(count: int) -> None:
    """Set the number of CPU threads of PyTorch and of the compiled kernels. Results do not depend on it."""
    torch.set_num_threads(count)
    native.set_threads(count)


def threads(kernels: Kernels) -> int:
    """The number of CPU threads that these kernels use."""
    return native.threads() if is_compiled(kernels) else torch.get_num_threads()


def is_compiled(kernels: Kernels) -> bool:
    """Whether these are the compiled CPU kernels, directly or as the local kernels of a rank (longdraft/parallel)."""
    return isinstance(getattr(kernels, "local", kernels), CpuKernels)


class single_threaded_torch:
    """A context in which PyTorch uses one thread, if `kernels` are the compiled ones, which have their own threads.

    After each operation, PyTorch's threads spin for a while on the cores that the compiled kernels need. That makes
    drafting two to three times slower (notebook/2026-11.md). Each step enters it, so it is no generator.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._before = torch.get_num_threads()
        self._changes = self._before > 1 and is_compiled(kernels)

    def __enter__(self) -> None:
        if self._changes:
            torch.set_num_threads(1)

    def __exit__(self, *exc: object) -> None:
        if self._changes:
            torch.set_num_threads(self._before)


native.set_threads(torch.get_num_threads())
