"""The interface of KV caches, and the full cache: every position of the text, for every layer.

Only a cache moves its rows. A forward appends its rows provisionally; verification decides which of them are text;
`commit` keeps those, in order, and drops the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longdraft.cache.taps import TapLog
from longdraft.kernels import Kernels, KVStore, LayersKV


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
        """Keep these provisional rows, in this order; drop the others."""

    def place(self, rows: Tensor, positions: Tensor) -> None:
        """Begin a commit on the device, before the host has read which rows it is: put rows [N] at positions [N], where
        the position is not negative. Complete it by `commit` with the same rows."""


class FullCache:
    """Committed rows of all layers, in stores that grow by blocks (`KVStore.reserve`).

    windows  positions that each layer's attention sees; 0, or an empty sequence: all. Every row is held in any case
    taps     holds the tapped states of the rows; None: no layer is tapped
    """

    def __init__(self, kernels: Kernels, num_layers: int, num_kv_heads: int, head_dim: int,
                 windows: Sequence[int] = (), taps: TapLog | None = None) -> None:
        self._kernels = kernels
        self.num_kv_heads = num_kv_heads
        self.taps = taps
        self.windows = tuple(windows) or (0,) * num_layers
        self.stores: list[KVStore] = [kernels.new_store(num_kv_heads, head_dim) for _ in range(num_layers)]
        self.length = 0
        self._tail: LayersKV | None = None
        self._is_placed = False

    def reserve(self, length: int) -> None:
        """Make room for `length` rows."""
        for store in self.stores:
            store.reserve(length)

    def append(self, k: Tensor, v: Tensor) -> LayersKV:
        self.reserve(self.length + k.shape[1])
        taps = self.taps.append(k.shape[1]) if self.taps else None
        self._tail = LayersKV(self.stores, self.length, k, v, taps=taps)
        return self._tail

    def commit(self, rows: Sequence[int]) -> None:
        assert self._tail is not None or not len(rows), "commit without a forward"
        if self._tail is not None and len(rows) and not self._is_placed:
            self._kernels.keep(self._tail, rows)
        if self.taps:
            self.taps.commit(rows)
        self._tail, self._is_placed = None, False
        self.length += len(rows)

    def place(self, rows: Tensor, positions: Tensor) -> None:
        assert self._tail is not None, "place without a forward"
        self._kernels.scatter_rows(self._tail, rows, positions)
        self._is_placed = True

    def copy_from(self, other: FullCache, length: int) -> None:
        """Hold the first `length` rows of another cache of the same model, and no others."""
        assert 0 <= length <= other.length and self.taps is None
        self.reserve(length)
        heads = other.num_kv_heads
        self._kernels.copy(other.stores, self.stores, torch.arange(length).expand(len(self.stores), heads, -1), 0)
        self.length = length

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        assert 0 <= length <= self.length and self.taps is None
        self.length = length

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


_RANDOM_BLOCK = 4096  # positions


def fill_randomly(store: KVStore, positions: int, shape: tuple[int, int], kernels: Kernels) -> None:
    """Write random keys and values [positions, *shape] to a store, to time what reads them. They repeat every 4,096
    positions and are the same each time."""
    generator = torch.Generator(kernels.device).manual_seed(1)
    k, v = (torch.randn(min(positions, _RANDOM_BLOCK), *shape, generator=generator, device=kernels.device).to(
        kernels.dtype) for _ in range(2))
    for start in range(0, positions, _RANDOM_BLOCK):
        count = min(_RANDOM_BLOCK, positions - start)
        store.write(start, k[:count], v[:count])
