"""The interface of KV caches, and the full cache: every position of the text, for every layer.

A forward appends its rows provisionally; verification decides which of them are text; `commit` keeps those, in order,
and drops all other provisional rows. On a device, the accepted rows are moved before the host has read which they are:
by `place`, or by a kernel for several caches, whose caller then calls `has_placed`. `commit` follows in both cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from longdraft.cache.states import StateCache
from longdraft.cache.taps import TapLog
from longdraft.kernels import Kernels, KVStore, LayersKV, Taps
from longdraft.kernels.interface import STORE_BLOCK

_ROWS_RESERVED = 64  # at a time, at least; stores grow by multiples of it


class KVCache(Protocol):
    """A cache that a model forward reads and appends to."""

    @property
    def length(self) -> int:
        """Committed rows."""

    def append(self, k: Tensor, v: Tensor) -> LayersKV:
        """Append provisional rows k, v [L, T, Hkv, D] of all layers; returns what attention reads.

        The cache keeps the tensors themselves: the caller may fill them after this call, before `commit`.
        """

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these provisional rows, in this order; drop all other provisional rows."""


class FullCache:
    """Committed rows of all layers with attention, in stores that grow by blocks (`KVStore.reserve`).

    shapes   KV heads and their dimension, of each layer
    windows  positions that each layer's attention sees; 0, or an empty sequence: all. Every row is held in any case
    taps     holds the tapped states of the rows; None: no layer is tapped
    states   of the delta layers; None: the model has none
    score_cap  soft cap of attention scores; 0: none
    sinks    [H] of each layer (`LayerWeights.sinks`); empty: no layer has any
    """

    def __init__(self, kernels: Kernels, shapes: Sequence[tuple[int, int]],
                 windows: Sequence[int] = (), taps: TapLog | None = None,
                 states: StateCache | None = None, score_cap: float = 0.0, sinks: Sequence[Tensor] = ()) -> None:
        self._kernels = kernels
        self.taps = taps
        self.states = states
        self.shapes = tuple(shapes)
        self.windows = tuple(windows) or (0,) * len(shapes)
        self.score_cap = score_cap
        self.sinks = sinks
        # The layers of each shape: operations on several stores take stores of one shape.
        self.groups = [[layer for layer, other in enumerate(self.shapes) if other == shape]
                       for shape in dict.fromkeys(self.shapes)]
        self.stores = self._new_stores()
        self.length = 0
        self._reserved = 0  # rows for which the stores have room
        self._tail: LayersKV | None = None
        self._is_placed = False

    def _new_stores(self) -> list[KVStore]:
        return [self._kernels.new_store(heads, dim, self.score_cap) for heads, dim in self.shapes]

    def reserve(self, length: int) -> None:
        """Make room for `length` rows, and for some more, so that few steps have to."""
        if length > self._reserved:
            length = -(-length // _ROWS_RESERVED) * _ROWS_RESERVED
            for store in self.stores:
                store.reserve(length)
            self._reserved = length

    def append(self, k: Tensor, v: Tensor) -> LayersKV:
        self.reserve(self.length + k.shape[1])
        taps = self.new_taps(k.shape[1])
        deltas = self.states.append(k.shape[1]) if self.states else ()
        self._tail, self._is_placed = LayersKV(self.stores, self.length, k, v, taps=taps, deltas=deltas), False
        return self._tail

    def new_taps(self, count: int) -> Taps | None:
        """Where a forward puts the tapped states of `count` rows; None: it need not copy any."""
        return self.taps.append(count) if self.taps and self.taps.is_on else None

    def commit(self, rows: Sequence[int]) -> None:
        assert self._tail is not None or not len(rows), "commit without a forward"
        if self._tail is not None and len(rows) and not self._is_placed:
            self._kernels.keep(self._tail, rows)
        if self.taps and self._tail is not None and self._tail.taps is not None:
            self.taps.commit(self._tail.taps, rows, self.length)
        if self.states:
            self.states.commit(rows)
        self._tail = None
        self.length += len(rows)

    def place(self, rows: Tensor, positions: Tensor) -> None:
        """Begin a commit on the device, before the host has read which rows it is: put rows [N] at positions [N], where
        the position is not negative. Complete it by `commit` with the same rows."""
        assert self._tail is not None, "place without a forward"
        self._kernels.scatter_rows(self._tail, rows, positions)
        self.has_placed()

    def has_placed(self) -> None:
        """Note that a launched kernel does what `place` does, for several caches together."""
        self._is_placed = True

    def copy_block(self, start: int, count: int) -> list[KVStore]:
        """Stores with the rows [start, start + count) of each layer, as `adopt` takes them.

        start  a multiple of STORE_BLOCK; count: at most STORE_BLOCK. Whole blocks are shared, not copied
        """
        assert start % STORE_BLOCK == 0 and 0 < count <= STORE_BLOCK and start + count <= self.length
        stores = self._new_stores()
        for store, source in zip(stores, self.stores, strict=True):
            store.append(source, start, count)
        return stores

    def block_bytes(self, count: int) -> int:
        """Bytes of the stores that `copy_block` returns for `count` rows."""
        return sum(store.bytes_of(count) for store in self.stores)

    def adopt(self, stores: Sequence[KVStore], count: int) -> None:
        """Append the first `count` rows of stores that `copy_block` made. This text has the same tokens up to there.

        The cache holds whole blocks, or nothing. States of tapped layers are not known.
        """
        assert self.length % STORE_BLOCK == 0 and self._tail is None
        assert self._kernels.is_device or self._rows_bytes == self.block_bytes(self.length), "rows go after those held"
        for store, source in zip(self.stores, stores, strict=True):
            store.append(source, 0, count)
        self.skip(count)

    def fill(self, start: int, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        """Write each layer's rows k, v [Hkv, N, D] to positions start, start + 1, ..., at the length or after it. They
        are not committed."""
        assert start >= self.length and self._tail is None
        self.reserve(start + k[0].shape[1])
        for store, keys, values in zip(self.stores, k, v, strict=True):
            store.write_heads(start, keys, values)

    def skip(self, count: int, taps: Taps | None = None) -> None:
        """Commit `count` rows that others wrote to the stores. taps: of these rows; None: they are not known"""
        if self.taps and taps:
            self.taps.commit(taps, range(count), self.length)
        self.length += count

    def clear(self) -> None:
        """Drop all rows."""
        self._tail = None
        self.length = 0
        if self.taps:
            self.taps.truncate(0)
        if self.states:
            self.states.reset()

    @property
    def provisional(self) -> tuple[list[Tensor], list[Tensor]]:
        """Each layer's k, v [T, Hkv, D] of the rows that were appended and not yet committed."""
        assert self._tail is not None
        layers = [self._tail.layer(index) for index in range(len(self.stores))]
        return [layer.k for layer in layers], [layer.v for layer in layers]

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        assert 0 <= length <= self.length
        if self.states:
            self.states.truncate(length)
        if self.taps:
            self.taps.truncate(length)
        self.length = length

    @property
    def can_adopt(self) -> bool:
        """Whether rows of another text can be its first ones. A cache with blocks of its own cannot share others."""
        return not self.length and (self._kernels.is_device or not self._rows_bytes)

    @property
    def _rows_bytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    @property
    def nbytes(self) -> int:
        return self._rows_bytes + (self.states.nbytes if self.states else 0)
