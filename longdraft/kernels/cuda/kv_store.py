"""Keys and values of one layer on the device: two tensors [Hkv, slots, D].

    slots   [ 0 .. room ): one per position of the text | [ room .. capacity ): drafted rows ]

Drafted rows have slots of their own. A forward with a length shorter than the text (glide's layer runs one over the
target's store) therefore overwrites no committed row. Formats of fewer bits have scales for each row of a head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_key_weights, jit_kv_store
from longdraft.kernels.cuda.cache_format import CacheFormat
from longdraft.kernels.cuda.launch import (
    TRITON_DTYPES,
    UNFUSED,
    ceil_div,
    chained,
    on_device,
    padded_size,
    require,
    triton_dtype,
)
from longdraft.kernels.interface import KVStore, Positions

_MIN_ROOM, _MIN_DRAFT_SLOTS = 256, 128
_LONG_ROOM, _LONG_DRAFT_SLOTS = 8192, 1024  # a long store must not be moved for a large tree
_ROWS_PER_COPY_PROGRAM = 32
_serials = itertools.count()


class CudaStore:
    """See :class:`longdraft.kernels.interface.KVStore`. Growing moves the store: `reserve` the full length beforehand.

    dtype    of the rows that are written and read
    format   how they are kept: see `jit_cache_rows`
    score_cap  see `Kernels.new_store`
    serial   changes with each allocation. CUDA graphs and address tables are valid for one serial only
    addresses  where keys, values and their scales are, and the number of slots, as `jit_kv_store` reads them
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, format: CacheFormat, num_kv_heads: int, head_dim: int,
                 score_cap: float = 0.0) -> None:
        require(head_dim % 2 == 0, "an even head_dim", head_dim)
        self._device, self.dtype, self.format = device, dtype, format
        self.heads, self.dim, self.score_cap = num_kv_heads, head_dim, score_cap
        self.room = self.num_drafts = self._appended = 0
        self.tables: dict[tuple[int, ...], Tensor] = {}  # see `address_table`
        self.k, self.v, self.k_scale, self.v_scale = self._empty(0)
        self.serial = next(_serials)
        self.addresses = self._addresses()

    def _allocate(self, room: int, num_drafts: int) -> None:
        held = (self.k, self.v, self.k_scale, self.v_scale)
        self.k, self.v, self.k_scale, self.v_scale = self._empty(room + num_drafts)
        for old, new in zip(held, (self.k, self.v, self.k_scale, self.v_scale), strict=True):
            new[:, : self.room] = old[:, : self.room]
        self.room, self.num_drafts, self.serial = room, num_drafts, next(_serials)
        self.tables, self.addresses = {}, self._addresses()

    def _addresses(self) -> list[int]:
        return [*(part.data_ptr() for part in (self.k, self.v, self.k_scale, self.v_scale)), self.capacity]

    def _empty(self, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values [Hkv, slots, D], and their scales [Hkv, slots]. Values of 4 bits: bytes [Hkv, slots, D / 2],
        with scales and least numbers [Hkv, slots, 2]. The exact format has scales [1, 1] that nothing reads."""
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        keys, rows = (torch.int8 if self.format.is_scaled else self.dtype), (self.heads, slots)
        scales = rows if self.format.is_scaled else (1, 1)
        if self.format.is_packed:
            values, value_scales = zeros(torch.uint8, *rows, self.dim // 2), zeros(torch.float32, *rows, 2)
        else:
            values, value_scales = zeros(keys, *rows, self.dim), zeros(torch.float32, *scales)
        return zeros(keys, *rows, self.dim), values, zeros(torch.float32, *scales), value_scales

    def empty_like(self) -> CudaStore:
        """A store of the same form."""
        return CudaStore(self._device, self.dtype, self.format, self.heads, self.dim, self.score_cap)

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads, self.dim

    def reserve(self, length: int) -> None:
        if length > self.room:
            grown = length if not self.room else max(length, self.room + self.room // 2)
            room = ceil_div(max(grown, _MIN_ROOM), 64) * 64
            drafts = _MIN_DRAFT_SLOTS if room < _LONG_ROOM else _LONG_DRAFT_SLOTS
            self._allocate(room, max(self.num_drafts, drafts))

    def reserve_drafts(self, rows: int) -> None:
        """Make room for `rows` drafted rows."""
        self.reserve(1)
        if rows > self.num_drafts:
            self._allocate(self.room, padded_size(rows))

    @property
    def capacity(self) -> int:
        """Number of slots, those of drafted rows included."""
        return self.room + self.num_drafts

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        self._write(start, k, v)

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        self._write(start, k.transpose(0, 1), v.transpose(0, 1))

    def _write(self, start: int, k: Tensor, v: Tensor) -> None:
        require(start >= 0 and k.shape == v.shape, "as many values as keys", (start, k.shape, v.shape))
        if len(k):
            self.reserve(start + len(k))
            index = torch.arange(len(k), device=self._device)
            scatter_rows(k[None], v[None], [self], index, index + start)

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.to(self._device, non_blocking=True)
        heads = torch.arange(self.heads, device=self._device)[:, None]
        return self._numbers([part[heads, positions] for part in self._parts])

    def read_range(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, end - first, D] of positions first .. end - 1, in `dtype`."""
        return self._numbers([part[:, first:end] for part in self._parts])

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        """Keys and values, and their scales in a format that has them."""
        return (self.k, self.v, self.k_scale, self.v_scale) if self.format.is_scaled else (self.k, self.v)

    def _numbers(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values in `dtype` from the same rows of all parts."""
        k, v, *scales = parts
        if not scales:
            return k, v
        if self.format.is_packed:
            scale, least = scales[1].unbind(-1)
            values = torch.cat([v & 15, v >> 4], -1) * scale[..., None] + least[..., None]
        else:
            values = v * scales[1][..., None]
        keys = k * scales[0][..., None]
        return keys.to(self.dtype), values.to(self.dtype)

    def weights(self, queries: Tensor, length: int) -> Tensor:
        queries = queries.to(self._device, self.dtype).contiguous()
        require(queries.shape[2] == self.dim and queries.shape[1] % self.heads == 0,
                "queries [Q, H, D] of the store's heads", queries.shape)
        require(0 < length <= self.room, f"1 to {self.room} positions", length)
        return _summed_weights(self, queries, length)

    def append(self, source: KVStore, first: int, count: int) -> None:
        """Every row is copied, after those that were appended before."""
        other, = cuda_stores([source])
        at, self._appended = self._appended, self._appended + count
        self.reserve(self._appended)
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            mine[:, at : self._appended] = theirs[:, first : first + count]

    def bytes_of(self, count: int) -> int:
        slots = max(_MIN_ROOM, ceil_div(count, 64) * 64) + _MIN_DRAFT_SLOTS
        return self.heads * slots * self.format.row_bytes(self.dim, self.dtype)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)


def cuda_stores(stores: Sequence[KVStore]) -> list[CudaStore]:
    """The same stores, of which each must be a `CudaStore`; otherwise ValueError."""
    checked = [store for store in stores if isinstance(store, CudaStore)]
    require(len(checked) == len(stores), "stores of these kernels", [type(store).__name__ for store in stores])
    return checked


def address_table(stores: Sequence[CudaStore]) -> Tensor:
    """The stores' addresses and capacities, int64 [L, 5], as the kernels of `jit_kv_store` read them.

    The first store keeps the table as long as it keeps its memory, because graphs read the table.
    """
    tables, key = stores[0].tables, tuple(store.serial for store in stores)
    if key not in tables:
        tables[key] = torch.tensor([store.addresses for store in stores], dtype=torch.int64, device=stores[0].k.device)
    return tables[key]


def _summed_weights(store: CudaStore, q: Tensor, length: int) -> Tensor:
    """`KVStore.weights` of queries q [Q, H, D]; needs memory for a number of each query head and position."""
    is_float, device = q.dtype == torch.float32, q.device
    block, lanes = (32, 16) if is_float else (64, 64) if store.dim <= 128 else (32, 16)
    num_lanes, num_blocks = len(q) * q.shape[1] // store.heads, ceil_div(length, block)
    shape = (store.heads, num_lanes, num_blocks)
    best, sums, shares = (torch.empty(shape, device=device) for _ in range(3))
    weights = torch.empty(*shape[:2], length, dtype=q.dtype if is_float else torch.float16, device=device)
    out = torch.empty(store.heads, length, device=device)
    with on_device(device):
        jit_key_weights.score_keys_kernel[(num_blocks, store.heads)](
            q, store.k, store.k_scale, weights, best, sums, num_lanes, length, store.capacity,
            math.log2(math.e) / math.sqrt(store.dim), store.score_cap * math.log2(math.e), KV_HEADS=store.heads,
            GROUP=q.shape[1] // store.heads, DIM=store.dim, PADDED=padded_size(store.dim), LANES=lanes, BLOCK=block,
            HAS_CAP=store.score_cap > 0, num_warps=8 if store.dim > 128 else 4,
            **chained(device))
        jit_key_weights.share_of_blocks_kernel[(store.heads * num_lanes,)](best, sums, shares, num_blocks, BLOCK=1024,
                                                                          **chained(device))
        jit_key_weights.sum_weights_kernel[(num_blocks, store.heads)](weights, shares, out, num_lanes, length,
                                                                      LANES=lanes, BLOCK=block, **chained(device))
    return out


class RowsOfTexts(NamedTuple):
    """Stores of several texts, for `scatter_rows`.

    table  int64 [L, texts, 5] of L stores, or [texts, 5] of one: `CudaStore.addresses`, on the device
    texts  int32 [N]: the text of each row, on the device
    """

    table: Tensor
    texts: Tensor


def scatter_rows(k: Tensor, v: Tensor, stores: Sequence[CudaStore], rows: Tensor, targets: Tensor,
                 shared: RowsOfTexts | None = None) -> None:
    """Write rows [N] of k, v [L, T, Hkv, D] to slots targets [N] of the L stores.

    `rows` and `targets` are on the device. A row with a negative target is skipped.

    shared  the stores of several texts, which have the form of `stores`, one text's
    """
    first = stores[0]
    require(k.shape == v.shape and k.shape[2:] == (first.heads, first.dim), f"[L, T, {first.heads}, {first.dim}]",
            k.shape)
    k, v = (x.to(first.k.device, first.dtype) for x in (k, v))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    half = first.dim // 2
    table, num_texts = (address_table(stores), 1) if shared is None else (shared.table, shared.table.shape[-2])
    with on_device(first.k.device):
        jit_kv_store.scatter_rows_kernel[(len(rows), first.heads, len(stores))](
            k, v, table, rows, targets, rows if shared is None else shared.texts, num_texts, k.stride(0), v.stride(0),
            k.stride(1), v.stride(1), k.stride(2), v.stride(2), HALF=half, PADDED=padded_size(half),
            KEY=triton_dtype(first.k), VALUE=triton_dtype(first.v), HAS_TEXTS=shared is not None,
            TARGET_STRIDE=targets.stride(0), num_warps=1, **UNFUSED)


def move_rows(stores: Sequence[CudaStore], moves: Tensor, turns: Tensor, tables: Tensor | None) -> None:
    """Move rows of stores: see `move_rows_kernel`.

    tables  int64 [L, T, 5]: the stores of several texts, which have the form of `stores`; None: these
    """
    first, half = stores[0], stores[0].dim // 2
    with on_device(first.k.device):
        jit_kv_store.move_rows_kernel[(moves.shape[1], first.heads, len(moves) * len(stores))](
            address_table(stores) if tables is None else tables, moves, turns, HALF=half, PADDED=padded_size(half),
            KEY=triton_dtype(first.k), VALUE=triton_dtype(first.v), DTYPE=TRITON_DTYPES[first.dtype],
            TEXTS=len(moves), num_warps=1, **UNFUSED)


def copy_rows(sources: Sequence[CudaStore], targets: Sequence[CudaStore], positions: Positions, start: int) -> None:
    """Copy the rows at positions [L, Hkv, N] of each source to start, start + 1, ... of its target, bit for bit."""
    first, is_run = sources[0], isinstance(positions, range)
    count = len(positions) if isinstance(positions, range) else positions.shape[-1]
    require(all(s.format is first.format and s.dim == first.dim for s in (*sources, *targets)), "stores of one shape",
            [(s.dim, s.format) for s in (*sources, *targets)])
    for store in targets:
        store.reserve(start + count)
    if not count:
        return
    run_start = positions[0] if isinstance(positions, range) else 0
    table = address_table(sources)
    listed = table if isinstance(positions, range) else positions.to(first.k.device, torch.int64).contiguous()
    grid = (ceil_div(count, _ROWS_PER_COPY_PROGRAM), first.heads, len(sources))
    with on_device(first.k.device):
        jit_kv_store.copy_rows_kernel[grid](
            table, address_table(targets), listed, count, start, run_start, KV_HEADS=first.heads, DIM=first.dim,
            PADDED=padded_size(first.dim), BLOCK=_ROWS_PER_COPY_PROGRAM, KEY=triton_dtype(first.k),
            VALUE=triton_dtype(first.v), IS_RUN=is_run, num_warps=8, **UNFUSED)
