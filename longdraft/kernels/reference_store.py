"""The KV store of the reference kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from longdraft.kernels.interface import STORE_BLOCK, KVStore

SPLIT = STORE_BLOCK  # one call reduces a block, and the results are merged in order


class ReferenceStore:
    """Blocks of SPLIT positions [Hkv, SPLIT, D] float32. Positions that were never written are zeros."""

    def __init__(self, num_kv_heads: int, head_dim: int, device: torch.device, score_cap: float) -> None:
        self.num_kv_heads = num_kv_heads
        self.score_cap = score_cap
        self._shape = (num_kv_heads, SPLIT, head_dim)
        self._device = device
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self._shared: set[int] = set()  # blocks that another store has too

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_kv_heads, self._shape[2]

    def reserve(self, length: int) -> None:
        while len(self.k) * SPLIT < length:
            self.k.append(torch.zeros(self._shape, device=self._device))
            self.v.append(torch.zeros(self._shape, device=self._device))

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        self.write_heads(start, k.transpose(0, 1), v.transpose(0, 1))

    def write_heads(self, start: int, k: Tensor, v: Tensor) -> None:
        done = 0
        total = k.shape[1]
        self.reserve(start + total)
        while done < total:
            block, offset = divmod(start + done, SPLIT)
            count = min(total - done, SPLIT - offset)
            if block in self._shared:
                self.k[block], self.v[block] = self.k[block].clone(), self.v[block].clone()
                self._shared.discard(block)
            self.k[block][:, offset : offset + count] = k[:, done : done + count]
            self.v[block][:, offset : offset + count] = v[:, done : done + count]
            done += count

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        heads = torch.arange(self._shape[0], device=self._device)[:, None]
        k = torch.empty(*positions.shape, self._shape[2], device=self._device)
        v = torch.empty_like(k)
        for block in range(len(self.k)):
            inside = positions // SPLIT == block
            head = heads.expand_as(positions)[inside]
            offset = positions[inside] - block * SPLIT
            k[inside] = self.k[block][head, offset]
            v[inside] = self.v[block][head, offset]
        return k, v

    def weights(self, queries: Tensor, length: int) -> Tensor:
        num_kv_heads, _, head_dim = self._shape
        grouped = queries.float().transpose(0, 1).reshape(num_kv_heads, -1, head_dim)  # [Hkv, g * Q, D]
        scores = torch.cat([grouped @ block.transpose(1, 2) for block in self.k], -1)[..., :length]
        return self.capped(scores / math.sqrt(head_dim)).softmax(-1).sum(1)

    def capped(self, scores: Tensor) -> Tensor:
        """Scores with the soft cap of the store."""
        return scores if not self.score_cap else (scores / self.score_cap).tanh() * self.score_cap

    def append(self, source: KVStore, first: int, count: int) -> None:
        assert isinstance(source, ReferenceStore) and first % SPLIT == 0
        for block in range(first // SPLIT, -(-(first + count) // SPLIT)):
            is_whole = first + count >= (block + 1) * SPLIT
            if is_whole:
                self._shared.add(len(self.k))
                source._shared.add(block)
            self.k.append(source.k[block] if is_whole else source.k[block].clone())
            self.v.append(source.v[block] if is_whole else source.v[block].clone())

    def bytes_of(self, count: int) -> int:
        heads, positions, dim = self._shape
        return 2 * 4 * heads * dim * positions * -(-count // positions)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.k + self.v)
