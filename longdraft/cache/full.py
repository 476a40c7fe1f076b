"""The cache interface, and the full cache: every position of the text, for every layer.

Only a cache moves cache rows. A forward appends its rows provisionally; the walk decides which of them
are text; `commit` keeps those, in order, and drops the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels import KV, Kernels, KVStore


class KVCache(Protocol):
    """What a model forward needs of a cache."""

    @property
    def length(self) -> int:
        """Committed rows."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> KV:
        """Provisional rows k, v [T, Hkv, D] of one layer at the tail; returns what attention reads.

        The cache keeps the tensors themselves: they may be filled after this call, before `commit`.
        """

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these provisional rows, in this order; drop the others."""


class FullCache:
    """Committed rows of all layers in stores that grow by blocks and never copy what they hold."""

    def __init__(self, kernels: Kernels, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.stores: list[KVStore] = [kernels.new_store(num_kv_heads, head_dim) for _ in range(num_layers)]
        self.length = 0
        self._tail: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> KV:
        self.stores[layer].reserve(self.length + len(k))
        self._tail[layer] = (k, v)
        return KV(self.stores[layer], self.length, k, v)

    def commit(self, rows: Sequence[int]) -> None:
        kept = torch.tensor(rows, dtype=torch.int64)
        for layer, store in enumerate(self.stores):
            tail = self._tail[layer]
            assert tail is not None or not len(kept), "commit without a forward"
            if tail is not None and len(kept):
                store.keep(self.length, *tail, kept)
            self._tail[layer] = None
        self.length += len(kept)

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        assert 0 <= length <= self.length
        self.length = length

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)
