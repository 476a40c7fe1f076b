"""Chains of drafts from trained layers (longdraft/model/eagle.py and glide.py), wholly on the device.

    first token   logits of the text's last row | edit, rank
    each further  best guess after the text | embed | layers | logits | edit, rank

Three CUDA graphs, of the first token, of one and of four further ones, are replayed as often as it takes. The layers
run operation by operation, as from the host, but places are read from the device's memory. The host waits once for a
chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda.attention import AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.choice import MAX_CHAIN, TokenChooser
from longdraft.kernels.cuda.drafting import (
    DraftRanking,
    embed_place,
    end_place,
    in_graphs,
    new_rotations,
    until_end,
)
from longdraft.kernels.cuda.graph_cache import new_owner
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import on_device, require
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import KV, KVStore
from longdraft.kernels.launched import LaunchedWork
from longdraft.kernels.layer import LayerOperations
from longdraft.kernels.native_draft import ChainEnd, Ranked
from longdraft.kernels.weights import Linear


class DraftLayers(Protocol):
    """Trained layers that draft, without the text that they have read."""

    @property
    def embedding(self) -> tuple[Linear, float]:
        """The table of token embeddings, and the factor that multiplies these."""

    def next_row(self, ops: LayerOperations, row: Tensor, embedded: Tensor, rotations: tuple[Tensor, Tensor],
                 stores: Sequence[KVStore]) -> Tensor:
        """The layers' output [1, hidden] for a drafted token, from the row before it and the token's embedding.

        ops        in which the attention knows the place of the token, whatever `KV.length` says. Keys and values are
                   written there, except to a store that is only read
        rotations  cos, sin [1, D / 2] of its position
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [1, V] float32 of the layers' output [1, hidden]."""


class _PlacedOperations(CudaOperations):
    """Operations whose attention is that of a single row after as many rows as `where` [2] on the device says.

    read  a store that is only read, and the `where` for it: the row's own key is the last of the visible ones
    """

    def __init__(self, ops: CudaOperations, where: Tensor, read: tuple[CudaStore, Tensor] | None) -> None:
        self.__dict__.update(ops.__dict__)
        self._where, self._read = where, read
        self._row = torch.zeros(1, dtype=torch.int64, device=ops.device)
        self._work: dict[int, AttentionWorkspace] = {}  # by the store's serial

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,) = cuda_stores([kv.store])
        _, heads, dim = q.shape
        q = q.to(self.dtype).contiguous()
        plan = self.attention_plan(heads, store.heads, dim)
        if store.serial not in self._work:
            self._work[store.serial] = AttentionWorkspace(plan, 1, store.capacity, self.device)
        where = self._where
        if self._read and store is self._read[0]:
            where = self._read[1]
        else:
            scatter_rows(kv.k[None], kv.v[None], [store], self._row, where[1:])
        out, lse = torch.empty_like(q), torch.empty(1, heads, device=self.device)
        tree_attention(plan, self._work[store.serial], q, store, where, store.capacity, window, None, out, lse)
        return AttentionOutput(q, out, lse, q)


class LayerChain:
    """Chains of one request with one set of layers over its rows.

    stores      of each layer
    read        another store that they read; None: they read none
    vocabulary  number of logits
    width       guesses at each place at most
    """

    def __init__(self, layers: DraftLayers, ops: CudaOperations, stores: Sequence[CudaStore], read: CudaStore | None,
                 chooser: TokenChooser, vocabulary: int, width: int, row: Tensor) -> None:
        """row: one of those that `draft` gets."""
        table, self._factor = layers.embedding
        assert isinstance(table, CudaLinear)
        device, dim = ops.device, stores[0].dim
        self._layers, self._chooser, self._table = layers, chooser, table
        self._stores = stores if read is None else (*stores, read)
        self._graphs, self._ranking = ops.graphs, DraftRanking(chooser, vocabulary, width, device)
        self._where, self._read_where = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
        self._ops = _PlacedOperations(ops, self._where, None if read is None else (read, self._read_where))
        self._rotations = new_rotations(1, dim // 2, device)
        self._cos, self._sin = (torch.zeros(1, dim // 2, device=device) for _ in range(2))
        self._row = torch.empty_like(row)
        self._embedded = torch.empty(1, table.in_features, dtype=ops.dtype, device=device)
        self._key = new_owner()
        ops.graphs.own(self, self._key)

    def draft(self, row: Tensor, length: int, num_read: int, rotations: tuple[Tensor, Tensor], required: int,
              within: float, end: ChainEnd) -> LaunchedWork[list[Ranked]]:
        """Draft one token, and one more for each row of `rotations`; what `end` cuts off is drafted and dropped.

        row        [1, hidden], the layers' output for the text's last token
        length     rows of the stores that are visible; the drafts' rows are written after them
        num_read   rows that are visible of the store that is only read
        rotations  cos, sin [N, D / 2] float32, N < 64
        required   tokens that must be written before the text may end
        """
        count, has_bans = len(rotations[0]), required > 0
        require(count < MAX_CHAIN, f"chains of at most {MAX_CHAIN} tokens", count + 1)
        self._chooser.place(())
        text = self._chooser.text

        def begin() -> None:
            self._ranking.begin(within, self._chooser.length, required)
            self._row.copy_(row)
            self._rotations[1 : count + 1, 0].copy_(torch.stack(rotations, 1))
            self._where.fill_(length - 1)  # the text's last row, which `_next_row` goes on from
            self._read_where.fill_(num_read - 1)

        with on_device(self._where.device):
            self._graphs.run_in_turn([(("layer chain", self._key, size, has_bans, self._chooser.place_serial),
                                       partial(self._places, size, text, has_bans))
                                      for size in (0, *in_graphs(count))], begin)
        return until_end((yield from self._ranking.read(count + 1)), end)

    def _places(self, count: int, text: Tensor, has_bans: bool) -> None:
        """`count` tokens after the one that is ranked, which is ranked first if `count` is 0."""
        for _ in range(count):
            self._next_row(text)
            self._rank(has_bans)
        if not count:
            self._rank(has_bans)

    def _rank(self, has_bans: bool) -> None:
        self._ranking.rank(self._layers.logits(self._row), has_bans)

    def _next_row(self, text: Tensor) -> None:
        """The row of the best guess, which is appended to the text."""
        ranking = self._ranking
        end_place(text, ranking.state, self._where, ranking.outcome)
        embed_place(text, ranking.state, self._table, self._factor, self._rotations, self._embedded, self._cos,
                    self._sin)
        rotations = self._cos, self._sin
        self._row.copy_(self._layers.next_row(self._ops, self._row, self._embedded, rotations, self._stores))
