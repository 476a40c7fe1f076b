"""The compiled module's weights and stores of keys and values, and the checks of what is passed to the module.

The C++ code relies on these checks.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

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
        found = []
        for start, size in self.native.memory:
            array = (ctypes.c_ubyte * size).from_address(start) if size else (ctypes.c_ubyte * 0)()
            array.owner = self.native  # type: ignore[attr-defined]  # lives as long as the view
            found.append(memoryview(array).cast("B"))
        return found


class CpuStore:
    """See :class:`longdraft.kernels.interface.KVStore`. `csrc/layout.h` draws the layout."""

    def __init__(self, kernels: _cpu.Kernels, dtype: torch.dtype, num_kv_heads: int, head_dim: int,
                 score_cap: float = 0.0) -> None:
        self.kernels, self.dtype = kernels, dtype
        self._heads, self._dim = num_kv_heads, head_dim
        self.native = _cpu.Store(dtype == torch.bfloat16, num_kv_heads, head_dim, score_cap)
        self.kind = dtype == torch.bfloat16, num_kv_heads, head_dim

    @property
    def shape(self) -> tuple[int, int]:
        return self._heads, self._dim

    def reserve(self, length: int) -> None:
        self.native.reserve(length)

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        k, v = self.as_rows(k), self.as_rows(v)
        require(start >= 0 and len(k) == len(v), "a start of 0 or more and as many values as keys",
                 (start, k.shape, v.shape))
        self.kernels.write(self.native, start, 0, len(k), *strided(k), *strided(v), len(k))

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        self.write(start, k.transpose(0, 1), v.transpose(0, 1))

    def as_rows(self, x: Tensor) -> Tensor:
        """Check x [T, Hkv, D] and convert it to the store's dtype, with contiguous heads; a view where possible."""
        x = x.to(self.dtype)
        require(x.shape[1:] == (self._heads, self._dim), f"[T, {self._heads}, {self._dim}]", x.shape)
        return x if x.stride(-1) == 1 else x.contiguous()

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.to(torch.int64).contiguous()
        require(positions.ndim == 2 and len(positions) == self._heads, f"[{self._heads}, N]", positions.shape)
        if positions.numel():
            low, high = (int(bound) for bound in positions.aminmax())
            require(low >= 0 and high < self.native.capacity, f"positions below {self.native.capacity}", (low, high))
        k = torch.empty(*positions.shape, self._dim, dtype=self.dtype)
        v = torch.empty_like(k)
        self.kernels.read(self.native, positions.data_ptr(), positions.shape[1], k.data_ptr(), v.data_ptr())
        return k, v

    def weights(self, queries: Tensor, length: int) -> Tensor:
        queries = queries.to(self.dtype).contiguous()
        num, heads, dim = queries.shape
        require(dim == self._dim and heads % self._heads == 0, "queries [Q, H, D] of the store's heads", queries.shape)
        require(0 < length <= self.native.capacity, f"1 to {self.native.capacity} positions", length)
        out = torch.empty(self._heads, length)
        self.kernels.weights(self.native, length, queries.data_ptr(), num, heads, 1 / math.sqrt(dim), out.data_ptr())
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


def address(x: Tensor | None) -> int:
    """Of a tensor's data; 0 for None."""
    return 0 if x is None else x.data_ptr()


def native_stores(dtype: torch.dtype, stores: Sequence[KVStore], num_layers: int) -> list[_cpu.Store]:
    """The compiled module's stores of so many layers. ValueError for stores of other kernels or another dtype."""
    is_bf16 = dtype == torch.bfloat16
    native = [store.native for store in stores if isinstance(store, CpuStore) and store.kind[0] == is_bf16]
    if len(native) != num_layers or len(stores) != num_layers:
        refuse(f"{num_layers} stores of {dtype}", len(native))
    return native


def strided(x: Tensor) -> tuple[int, int, int]:
    """Address, row stride and head stride, as the compiled module takes them."""
    return x.data_ptr(), x.stride(0), x.stride(1)


def require_length(length: int, stores: Sequence[_cpu.Store]) -> None:
    """ValueError unless all stores hold so many positions."""
    capacity = min([store.capacity for store in stores])
    require(0 <= length <= capacity, f"a length of 0 to {capacity} positions", length)


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


def are_layers(x: Tensor, layer_stride: int) -> bool:
    """Whether x [L, T, Hkv, D] is contiguous within each layer, with this stride between layers."""
    strides, wanted = x.stride(), (layer_stride, x.shape[2] * x.shape[3], x.shape[3], 1)
    return strides == wanted or all(
        size == 1 or stride == to for size, stride, to in zip(x.shape, strides, wanted, strict=True))


def remainder_address(remainder: Tensor | None, shape: tuple[int, ...]) -> int:
    """Of a checked remainder; 0 for None."""
    if remainder is not None:
        require_tensor("a remainder", remainder, shape, torch.float32)
    return address(remainder)


class WholeAttention(NamedTuple):
    """The attention of the last rows of a text to the full cache, in all layers, beside stores of a partial cache.

    layer_rows  rows from a layer to the next one
    """

    stores: list[_cpu.Store]
    rows: int
    heads: int
    layer_rows: int
    queries: Tensor
    output: Tensor
    lse: Tensor
    content: Tensor

    @classmethod
    def of(cls, dtype: torch.dtype, stores: Sequence[KVStore], length: int, whole: AttentionOutput) -> WholeAttention:
        """Checked. The stores have `length` positions; the rows are the last of them."""
        num_layers, rows, heads, dim = whole.queries.shape
        layer_rows = whole.lse.stride(0) // heads
        strides = (layer_rows * heads * dim, heads * dim, dim, 1)
        are_apart = all(part.stride() == strides for part in (whole.queries, whole.output, whole.content))
        if not are_apart or whole.lse.stride() != (layer_rows * heads, heads, 1):
            whole, layer_rows = AttentionOutput(*(part.contiguous() for part in whole)), rows
        q, output, lse, content = whole
        fits = all(part.dtype == dtype and part.shape == q.shape for part in (q, output, content))
        require(fits and lse.dtype == torch.float32 and lse.shape == q.shape[:3], f"rows of {dtype}", q.dtype)
        native = native_stores(dtype, stores, num_layers)
        fits = all((store.heads, store.dim) == (native[0].heads, dim) and 0 < rows <= length <= store.capacity
                   for store in native) and heads % native[0].heads == 0
        require(fits, f"query heads of {dim} in groups of KV heads, and rows within the stores' positions",
                (heads, length))
        return cls(native, rows, heads, layer_rows, q, output, lse, content)

    def arguments(self, length: int) -> tuple[list[_cpu.Store], int, int, int, int, int, int, int]:
        """As the compiled module takes them."""
        return (self.stores, length, self.rows, self.heads, self.layer_rows, self.queries.data_ptr(),
                self.output.data_ptr(), self.lse.data_ptr())
