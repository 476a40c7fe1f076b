"""Arithmetic behind one interface. `choose` picks an implementation once; the engine reports which."""

from __future__ import annotations

from longdraft.kernels.interface import KV, Kernels, KVStore, Linear
from longdraft.kernels.reference import ReferenceKernels

__all__ = ["KV", "KVStore", "Kernels", "Linear", "choose"]


def choose(device: str, dtype: str) -> Kernels:
    """The fastest kernels that serve this device and dtype ("float32" or "bfloat16")."""
    return ReferenceKernels(device, dtype)
