"""Keys and values of one layer on the device: [Hkv, positions | drafts, D], one position after the other.

    [ positions 0 .. room ) [ drafted rows ]

Drafted rows have slots of their own behind the room: whoever reads a store with another length than the text's (glide's
layer does) overwrites nothing. With 8 bits every row of a head has a float32 scale of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_store
from longdraft.kernels.cuda.launch import ceil_div, element_of, on, padded, require

FP8 = torch.float8_e4m3fn
_LEAST_ROOM, _LEAST_DRAFTS = 256, 128
_LONG, _MOST_DRAFTS = 8192, 1024
_COPIED_AT_ONCE = 32
_serials = itertools.count()


class CudaStore:
    """See :class:`longdraft.kernels.interface.KVStore`. `reserve` beforehand what a text will need: growing moves it.

    serial  another number for each allocation: what was captured or tabled with one is good for that one
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, element: torch.dtype, num_kv_heads: int,
                 head_dim: int) -> None:
        require(head_dim % 2 == 0, "an even head_dim", head_dim)
        self._device, self.dtype, self.element = device, dtype, element
        self.heads, self.dim = num_kv_heads, head_dim
        self.is_scaled = element == FP8
        self.room = self.num_drafts = 0
        self.k, self.v, self.k_scale, self.v_scale = self._empty(0)
        self.serial = next(_serials)

    def _allocate(self, room: int, num_drafts: int) -> None:
        held = (self.k, self.v, self.k_scale, self.v_scale)
        self.k, self.v, self.k_scale, self.v_scale = self._empty(room + num_drafts)
        for old, new in zip(held, (self.k, self.v, self.k_scale, self.v_scale), strict=True):
            new[:, : self.room] = old[:, : self.room]
        self.room, self.num_drafts, self.serial = room, num_drafts, next(_serials)

    def _empty(self, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values and their scales (one number that nobody reads, where there are none)."""
        shape = (self.heads, slots, self.dim)
        k, v = (torch.zeros(shape, dtype=self.element, device=self._device) for _ in range(2))
        scales = shape[:2] if self.is_scaled else (1, 1)
        return k, v, torch.zeros(scales, device=self._device), torch.zeros(scales, device=self._device)

    def reserve(self, length: int) -> None:
        if length > self.room:
            grown = length if not self.room else max(length, self.room + self.room // 2)
            room = ceil_div(max(grown, _LEAST_ROOM), 64) * 64
            # A long store should never have to move for a large tree.
            drafts = _LEAST_DRAFTS if room < _LONG else _MOST_DRAFTS
            self._allocate(room, max(self.num_drafts, drafts))

    def reserve_drafts(self, rows: int) -> None:
        """Slots for so many drafted rows."""
        self.reserve(1)
        if rows > self.num_drafts:
            self._allocate(self.room, padded(rows))

    @property
    def capacity(self) -> int:
        """Slots in all."""
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
            place(k[None], v[None], [self], table([self]), index, index + start)

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.to(self._device)
        heads = torch.arange(self.heads, device=self._device)[:, None]
        # As bytes: not every dtype can be indexed.
        k, v = (part.view(torch.uint8)[heads, positions].view(self.element) for part in (self.k, self.v))
        if not self.is_scaled:
            return k, v
        scales = self.k_scale[heads, positions][..., None], self.v_scale[heads, positions][..., None]
        return (k.float() * scales[0]).to(self.dtype), (v.float() * scales[1]).to(self.dtype)

    def weights(self, queries: Tensor, length: int) -> Tensor:
        """One query at a time, so that no more than its scores are in memory."""
        grouped = queries.to(self._device, self.dtype).view(len(queries), self.heads, -1, self.dim)
        keys = self.k[:, :length].to(self.dtype).transpose(1, 2)
        total = torch.zeros(self.heads, length, device=self._device)
        for query in grouped:  # [Hkv, g, D]
            scores = torch.bmm(query, keys).float() / math.sqrt(self.dim)
            if self.is_scaled:
                scores = scores * self.k_scale[:, None, :length]
            total += scores.softmax(-1).sum(1)
        return total

    @property
    def nbytes(self) -> int:
        scales = self.k_scale.nbytes + self.v_scale.nbytes if self.is_scaled else 0
        return self.k.nbytes + self.v.nbytes + scales


_tables: dict[tuple[int, ...], Tensor] = {}
_TABLES_KEPT = 64


def table(stores: Sequence[CudaStore]) -> Tensor:
    """The stores' addresses and sizes, int64 [L, 5], as `jit_store` reads them."""
    key = tuple(store.serial for store in stores)
    found = _tables.get(key)
    if found is None:
        rows = [[*(part.data_ptr() for part in (s.k, s.v, s.k_scale, s.v_scale)), s.capacity] for s in stores]
        while len(_tables) >= _TABLES_KEPT:
            del _tables[next(iter(_tables))]
        found = _tables[key] = torch.tensor(rows, dtype=torch.int64, device=stores[0].k.device)
    return found


def place(k: Tensor, v: Tensor, stores: Sequence[CudaStore], addresses: Tensor, rows: Tensor, targets: Tensor) -> None:
    """Rows [N] of k, v [L, T, Hkv, D] to positions targets [N] of every layer; none where a target is negative."""
    first = stores[0]
    require(k.shape == v.shape and k.shape[2:] == (first.heads, first.dim), f"[L, T, {first.heads}, {first.dim}]",
            k.shape)
    k, v = (x.to(first.k.device, first.dtype) for x in (k, v))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    half = first.dim // 2
    with on(first.k.device):
        jit_store.place[(len(rows), first.heads, len(stores))](
            k, v, addresses, rows, targets, k.stride(0), v.stride(0), k.stride(1), v.stride(1), k.stride(2),
            v.stride(2), HALF=half, PADDED=padded(half), ELEMENT=element_of(first.k), IS_SCALED=first.is_scaled,
            num_warps=1)


def copy(sources: Sequence[CudaStore], targets: Sequence[CudaStore], positions: Tensor, start: int) -> None:
    """Rows at positions [L, Hkv, N] to positions start, start + 1, ... of the targets, bit for bit."""
    first, count = sources[0], positions.shape[-1]
    require(all(s.element == first.element and s.dim == first.dim for s in (*sources, *targets)), "stores of one shape",
            first.dim)
    for store in targets:
        store.reserve(start + count)
    if not count:
        return
    positions = positions.to(first.k.device, torch.int64).contiguous()
    grid = (ceil_div(count, _COPIED_AT_ONCE), first.heads, len(sources))
    with on(first.k.device):
        jit_store.copy[grid](table(sources), table(targets), positions, count, start, KV_HEADS=first.heads,
                             DIM=first.dim, PADDED=padded(first.dim), BLOCK=_COPIED_AT_ONCE,
                             ELEMENT=element_of(first.k), IS_SCALED=first.is_scaled)
