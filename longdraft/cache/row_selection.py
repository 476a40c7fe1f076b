"""Which positions of the text a partial cache holds, for each layer and KV head.

    heavy_hitters   sinks, the positions with most attention from the last queries, the latest (TokenSwift 3.2, H2O)
    pooled          the same, with attention averaged over neighbours (SnapKV, MagicDec)
    streaming       sinks and the latest, without queries (StreamingLLM, MagicDec)
    Chunks          chunk 0, the chunks whose mean key has most attention, the latest (TriForce 4.1)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.kernels import KVStore

# A selection takes a layer's index, its store, the number of committed positions, and the last accepted tokens' queries
# [Q, H, D]. It returns positions [Hkv, N], ascending; N is the same for every layer.
Selection = Callable[[int, KVStore, int, Tensor], Tensor]

_POOL = 5  # positions that `pooled` averages over (SnapKV's kernel)
_CHUNKS_READ = 512  # chunks whose keys are read together; bounds the memory


def heaviest_positions(weights: Tensor, budget: int, sinks: int, recent: int) -> Tensor:
    """Positions [Hkv, min(budget, n)], ascending, from weights [Hkv, n].

    The first `sinks`, the last `recent`, and between them the heaviest of each KV head; all if n is at most `budget`.

        [ sinks | ............ the heaviest (budget - sinks - recent) ............ | recent ]
    """
    num_kv_heads, length = weights.shape
    if length <= budget:
        return torch.arange(length, device=weights.device).expand(num_kv_heads, -1)
    heavy = budget - sinks - recent
    assert heavy >= 0
    middle = weights[:, sinks : length - recent]
    chosen = middle.topk(heavy, dim=-1).indices + sinks
    ends = torch.cat([torch.arange(sinks, device=weights.device),
                      torch.arange(length - recent, length, device=weights.device)])
    return torch.cat([chosen, ends.expand(num_kv_heads, -1)], -1).sort(-1).values


def latest(length: int, budget: int, sinks: int) -> Tensor:
    """Positions [min(budget, length)]: the first `sinks` and the last of the text (StreamingLLM)."""
    if length <= budget:
        return torch.arange(length)
    return torch.cat([torch.arange(sinks), torch.arange(length - (budget - sinks), length)])


def heavy_hitters(budget: int, sinks: int, recent: int) -> Selection:
    """Select by the attention of the last accepted tokens."""
    def select(layer: int, store: KVStore, length: int, queries: Tensor) -> Tensor:
        return heaviest_positions(store.weights(queries, length), budget, sinks, recent)
    return select


def pooled(budget: int, sinks: int, recent: int) -> Selection:
    """Select by the same attention, averaged over each position's neighbours (SnapKV)."""
    def select(layer: int, store: KVStore, length: int, queries: Tensor) -> Tensor:
        weights = functional.avg_pool1d(store.weights(queries, length), _POOL, stride=1, padding=_POOL // 2)
        return heaviest_positions(weights, budget, sinks, recent)
    return select


def streaming(budget: int, sinks: int) -> Selection:
    """Select the first and the last positions, whatever the queries."""
    return lambda layer, store, length, queries: latest(length, budget, sinks).expand(store.shape[0], -1)


class Chunks:
    """Select chunks of `size` positions by the attention of the last query to each chunk's mean key.

        [ chunk 0 | ........ the heaviest chunks ........ | the last `recent` and the rest of their chunk ]

    The weight of a chunk is the sum over a KV head's query heads of their softmax over the chunks. The mean of a
    chunk's keys, with their rotation, is computed once. A selection costs one product for each chunk.
    """

    def __init__(self, num_layers: int, budget: int, recent: int, size: int = 8) -> None:
        assert budget >= recent + 2 * size
        self._budget, self._recent, self._size = budget, recent, size
        self._means: list[Tensor | None] = [None] * num_layers  # [Hkv, chunks, D] in the cache's dtype

    def __call__(self, layer: int, store: KVStore, length: int, queries: Tensor) -> Tensor:
        size, device, heads = self._size, queries.device, store.shape[0]
        if length <= self._budget:
            return torch.arange(length, device=device).expand(heads, -1)
        means = self._update_means(layer, store, length // size, device)
        tail = (length - self._recent) // size  # first chunk with a recent position
        num = (self._budget - (length - tail * size)) // size - 1
        query = queries[-1].float().reshape(heads, -1, means.shape[-1]) / math.sqrt(means.shape[-1])
        scores = query @ means[:, 1:tail].float().transpose(1, 2)  # [Hkv, g, tail - 1]
        heavy = scores.softmax(-1).sum(1).topk(num, dim=-1).indices.sort(-1).values + 1
        latest_chunks = torch.arange(tail, -(-length // size), device=device).expand(heads, -1)
        chunks = torch.cat([torch.zeros_like(heavy[:, :1]), heavy, latest_chunks], -1)
        inside = chunks[..., None] * size + torch.arange(size, device=device)
        return inside.flatten(1)[:, : (1 + num) * size + length - tail * size]  # the last chunk may be incomplete

    def _update_means(self, layer: int, store: KVStore, count: int, device: torch.device) -> Tensor:
        """Mean keys [Hkv, count, D] of the first `count` chunks; those of new chunks are computed, some at a time."""
        means = self._means[layer]
        parts, num_known = ([], 0) if means is None else ([means], means.shape[1])
        for start in range(num_known, count, _CHUNKS_READ):
            num = min(_CHUNKS_READ, count - start)
            at = torch.arange(start * self._size, (start + num) * self._size, device=device)
            keys, _ = store.read(at.expand(store.shape[0], -1))
            mean = keys.float().view(store.shape[0], num, self._size, -1).mean(2)
            parts.append(mean.to(keys.dtype))
        means = self._means[layer] = torch.cat(parts, 1)
        return means

    @property
    def nbytes(self) -> int:
        return sum(means.nbytes for means in self._means if means is not None)
