"""What verified rows see in a partial cache that holds them: the attention of all layers in one CUDA graph.

The host would take longer to launch two kernels for each layer than the device takes to run them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.cuda.attention import AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.graph_cache import BUCKETS, GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.launch import RecentlyUsed
from longdraft.kernels.cuda.operations import CudaOperations

_MAX_HELD = 16  # numbers of rows, times the partial caches that are in use


class PartialAttention:
    """The buffers for up to `rows` rows over one partial cache."""

    def __init__(self, ops: CudaOperations, stores: Sequence[CudaStore], heads: int, rows: int) -> None:
        layers, dim, device = len(stores), stores[0].dim, ops.device
        self._rows, self._stores = rows, stores
        self._plan = ops.attention_plan(heads, stores[0].heads, dim)
        self._room = min(store.room for store in stores)
        self._work = AttentionWorkspace(self._plan, rows, self._room, device)
        self._inputs = torch.zeros(4 + rows, dtype=torch.int32, device=device)  # where, as two int64, then parents
        self._queries = torch.zeros(layers, rows, heads, dim, dtype=ops.dtype, device=device)
        self._output = torch.empty_like(self._queries)
        self._lse = torch.empty(layers, rows, heads, device=device)

    def run(self, graphs: GraphCache, queries: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The attention of queries [L, T, H, D], the last T of `length` rows: output, lse [L, T, H]. Valid until next.

        Padding rows follow the committed rows; their results are not read.
        """
        count = queries.shape[1]
        inputs = torch.full((4 + self._rows,), -1, dtype=torch.int32)
        inputs[:4].view(torch.int64).fill_(length - count)
        inputs[4 : 4 + count] = torch.arange(-1, count - 1)
        self._inputs.copy_(inputs, non_blocking=True)
        self._queries[:, :count].copy_(queries)
        if self._rows in BUCKETS:
            graphs.run(self, self._attend)
        else:
            self._attend()
        return self._output[:, :count], self._lse[:, :count]

    def _attend(self) -> None:
        where, parents = self._inputs[:4].view(torch.int64), self._inputs[4:]
        self._work.set_tree(parents)
        for layer, store in enumerate(self._stores):
            tree_attention(self._plan, self._work, self._queries[layer], store, where, self._room, 0, None,
                           self._output[layer], self._lse[layer])


class PartialAttentions:
    """The buffers of the partial caches in use. The most recently used ones are kept."""

    def __init__(self, ops: CudaOperations) -> None:
        self._ops = ops
        self._held: RecentlyUsed[object, PartialAttention] = RecentlyUsed(_MAX_HELD, ops.graphs.drop)

    def run(self, stores: Sequence[CudaStore], queries: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """See `PartialAttention.run`."""
        rows, heads = queries.shape[1:3]
        bucket = next((size for size in BUCKETS if size >= rows), rows)
        for store in stores:
            store.reserve_drafts(BUCKETS[-1])  # padding rows have slots, too
        key = (bucket, heads, tuple(store.serial for store in stores))
        held = self._held.get(key, lambda: PartialAttention(self._ops, stores, heads, bucket))
        return held.run(self._ops.graphs, queries, length)
