"""The compiled module's weights and stores of keys and values, and the checks of what is passed to the module.

The C++ code relies on these checks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.interface import STORE_BLOCK, KVStore

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu

_GROWTH = 256  # positions by which a small first block grows


class CpuLinear:
    """A weight packed in tiles of 64 rows. `csrc/layout.h` describes the layout."""

    def __init__(self, native: _cpu.Linear) -> None:
        self.native = native
        self.out_features = native.n

    @property
    def nbytes(self) -> int:
        return self.native.nbytes

    def memory(self) -> list[memoryview]:
        """The bytes of the tiles, the scale, the bias and the order, in place; empty for what the weight has not."""
        return [part.data for part in self.native.memory]


class CpuStore:
    """See :class:`longdraft.kernels.interface.KVStore`. `csrc/layout.h` draws the layout."""

    def __init__(self, kernels: _cpu.Kernels, dtype: torch.dtype, num_kv_heads: int, head_dim: int,
                 score_cap: float) -> None:
        self.kernels, self.dtype = kernels, dtype
        self._heads, self._dim = num_kv_heads, head_dim
        self.native = _cpu.Store(dtype == torch.bfloat16, num_kv_heads, head_dim, score_cap)

    @property
    def shape(self) -> tuple[int, int]:
        return self._heads, self._dim

    def reserve(self, length: int) -> None:
        self.native.reserve(length)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        self.kernels.write(self.native, start, self.as_rows(k), self.as_rows(v))

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        self.write(start, k.transpose(0, 1), v.transpose(0, 1))

    def as_rows(self, x: Tensor) -> Tensor:
        """Convert x [T, Hkv, D] to the store's dtype, with contiguous heads; a view where possible."""
        x = x.to(self.dtype)
        return x if x.stride(-1) == 1 else x.contiguous()

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.to(torch.int64).contiguous()
        k = torch.empty(*positions.shape, self._dim, dtype=self.dtype)
        v = torch.empty_like(k)
        self.kernels.read(self.native, positions, k, v)
        return k, v

    def weights(self, queries: Tensor, length: int) -> Tensor:
        require(0 < length <= self.native.capacity, f"1 to {self.native.capacity} positions", length)
        out = torch.empty(self._heads, length)
        self.kernels.weights(self.native, length, queries.to(self.dtype).contiguous(), 1 / math.sqrt(self._dim), out)
        return out

    def append(self, source: KVStore, first: int, count: int) -> None:
        if not isinstance(source, CpuStore):
            raise TypeError(f"CPU kernels want a CpuStore, got {type(source).__name__}")
        self.native.append(source.native, first, count)

    def bytes_of(self, count: int) -> int:
        step = _GROWTH if count < STORE_BLOCK else STORE_BLOCK
        return self.native.bytes_of(-(-count // step) * step)

    @property
    def nbytes(self) -> int:
        return self.native.nbytes


def native_stores(dtype: torch.dtype, stores: Sequence[KVStore], num_layers: int) -> list[_cpu.Store]:
    """The compiled module's stores of so many layers. ValueError for stores of other kernels or another dtype."""
    native = [store.native for store in stores if isinstance(store, CpuStore) and store.dtype == dtype]
    if len(native) != num_layers or len(stores) != num_layers:
        refuse(f"{num_layers} stores of {dtype}", len(native))
    return native


def require_tensor(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """ValueError unless x has this shape and dtype and is contiguous."""
    if not (x.shape == shape and x.dtype == dtype and x.is_contiguous()):
        refuse(f"{name} {shape} of {dtype}, contiguous", (x.shape, x.dtype, x.stride()))


def require(condition: bool, wanted: str, got: object) -> None:
    """ValueError unless the condition holds."""
    if not condition:
        refuse(wanted, got)


def refuse(wanted: str, got: object) -> NoReturn:
    """ValueError. Called by itself where a step should not format `wanted` for nothing."""
    raise ValueError(f"CPU kernels want {wanted}, got {got}")


def evenly_strided(whole: AttentionOutput) -> AttentionOutput:
    """The attention of some rows in all layers, whose layers are equally far apart in all tensors; a view where
    possible."""
    rows = whole.lse.stride(0) // whole.lse.shape[2]  # from a layer to the next one
    _, _, heads, dim = whole.queries.shape
    strides = (rows * heads * dim, heads * dim, dim, 1)
    is_even = all(part.stride() == strides for part in (whole.queries, whole.output, whole.content))
    if is_even and whole.lse.stride() == (rows * heads, heads, 1):
        return whole
    return AttentionOutput(*(part.contiguous() for part in whole))
