"""Chains of drafts from trained layers (longdraft/parts/eagle.py and glide.py), wholly on the device.

    first token   logits of the text's last row | edit, rank
    each further  best guess after the text | embed | layers | logits | edit, rank

Three CUDA graphs, of the first token, of one and of four further ones, are replayed as often as it takes. The layers
run operation by operation, as from the host, but places are read from the device's memory. The host waits once for a
chain. Chains of several texts run in the same way in `shared_layers`, with a row for each text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.chain_plan import DraftLayers
from longdraft.kernels.cuda.attention import AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.choice import MAX_CHAIN, TokenChooser
from longdraft.kernels.cuda.drafting import (
    DraftRanking,
    embed_place,
    end_place,
    in_graphs,
    new_rotations,
)
from longdraft.kernels.cuda.graph_cache import new_owner
from longdraft.kernels.cuda.kv_store import CudaStore, RowsOfTexts, cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import on_device, require
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import KV


class RowPlaces(NamedTuple):
    """Where the rows of T texts are, on the device.

    where   int64 [2 T]: rows of a text that are visible, and the slot of its next row, the one after them
    read    as `where`, for a store that is only read: the row's own key is the last of the visible ones
    tables  int64 [L, T, 5]: the stores of the texts (`CudaStore.addresses`); None: there is one text
    rooms   slots that one of them has at most, for each of L stores; of one text they are not needed
    """

    where: Tensor
    read: Tensor
    tables: Tensor | None = None
    rooms: Sequence[int] = ()


class _PlacedOperations(CudaOperations):
    """Operations whose attention is that of one row of each text, at `places`.

    stores  of one text; the last one is only read if `has_read`
    """

    def __init__(self, ops: CudaOperations, places: RowPlaces, stores: Sequence[CudaStore], has_read: bool) -> None:
        self.__dict__.update(ops.__dict__)
        rows, device = len(places.where) // 2, ops.device
        self._places, self._serials = places, [store.serial for store in stores]
        self._read = len(stores) - 1 if has_read else None
        self._rows = torch.arange(rows, device=device)
        self._texts = self._rows.to(torch.int32)
        self._work: dict[int, AttentionWorkspace] = {}  # by the store's index

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,), places = cuda_stores([kv.store]), self._places
        rows, heads, dim = q.shape
        q = q.to(self.dtype).contiguous()
        plan, index = self.attention_plan(heads, store.heads, dim), self._serials.index(store.serial)
        room = places.rooms[index] if places.rooms else store.capacity
        table = None if places.tables is None else places.tables[index]
        if index not in self._work:
            self._work[index] = AttentionWorkspace(plan, rows, room, self.device, rows)
        where = places.where
        if index == self._read:
            where = places.read
        else:
            texts = None if table is None else RowsOfTexts(table, self._texts)
            scatter_rows(kv.k[None], kv.v[None], [store], self._rows, where.view(-1, 2)[:, 1], texts)
        out, lse = torch.empty_like(q), torch.empty(rows, heads, device=self.device)
        tree_attention(plan, self._work[index], q, store, where, room, window, None, out, lse, table)
        return AttentionOutput(q, out, lse, q)


class LayerRows:
    """The rows of T texts from which layers go on to the next tokens.

    stores    of one text; the last one is only read if `has_read`
    row       a row [1, hidden] of the layers' output
    """

    def __init__(self, ops: CudaOperations, places: RowPlaces, stores: Sequence[CudaStore], has_read: bool, width: int,
                 row: Tensor) -> None:
        """width: of the embeddings."""
        rows, dim, device = len(places.where) // 2, stores[0].dim, ops.device
        self._stores, self._ops = stores, _PlacedOperations(ops, places, stores, has_read)
        self.row = torch.zeros(rows, row.shape[1], dtype=row.dtype, device=device)
        self.embedded = torch.zeros(rows, width, dtype=ops.dtype, device=device)
        self.cos, self.sin = (torch.zeros(rows, dim // 2, device=device) for _ in range(2))

    def go_on(self, layers: DraftLayers) -> None:
        """Compute the next rows, from `embedded`, `cos` and `sin`."""
        self.row.copy_(layers.next_row(self._ops, self.row, self.embedded, (self.cos, self.sin), self._stores))


class LayerChain:
    """Chains of one request with one set of layers over its rows.

    stores      of each layer; the last one is only read if `has_read`
    vocabulary  number of logits
    width       guesses at each place at most
    """

    def __init__(self, layers: DraftLayers, ops: CudaOperations, stores: Sequence[CudaStore], has_read: bool,
                 chooser: TokenChooser, vocabulary: int, width: int, row: Tensor) -> None:
        """row: one of those that `launch` gets."""
        table, self._factor = layers.embedding
        assert isinstance(table, CudaLinear)
        self._layers, self._chooser, self._table = layers, chooser, table
        self._graphs, self._ranking = ops.graphs, DraftRanking(chooser, vocabulary, width, ops.device)
        where, read = (torch.zeros(2, dtype=torch.int64, device=ops.device) for _ in range(2))
        self._places = RowPlaces(where, read)
        self._rows = LayerRows(ops, self._places, stores, has_read, table.in_features, row)
        self._rotations = new_rotations(1, stores[0].dim // 2, ops.device)
        self._key = new_owner()
        ops.graphs.own(self, self._key)

    def launch(self, row: Tensor, length: int, num_read: int, rotations: tuple[Tensor, Tensor], required: int,
               within: float) -> Tensor:
        """Launch what drafts one token, and one more for each row of `rotations`. Returns the outcome [1 + N, 18].

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
            self._rows.row.copy_(row)
            self._rotations[1 : count + 1, 0].copy_(torch.stack(rotations, 1))
            self._places.where.fill_(length - 1)  # the text's last row, which `_next_row` goes on from
            self._places.read.fill_(num_read - 1)

        with on_device(text.device):
            self._graphs.run_in_turn([(("layer chain", self._key, size, has_bans, self._chooser.place_serial),
                                       partial(self._run, size, text, has_bans))
                                      for size in (0, *in_graphs(count))], begin)
        return self._ranking.outcome[: count + 1]

    def _run(self, count: int, text: Tensor, has_bans: bool) -> None:
        """`count` tokens after the one that is ranked, which is ranked first if `count` is 0."""
        for _ in range(count):
            self._next_row(text)
            self._rank(has_bans)
        if not count:
            self._rank(has_bans)

    def _rank(self, has_bans: bool) -> None:
        self._ranking.rank(self._layers.logits(self._rows.row), has_bans)

    def _next_row(self, text: Tensor) -> None:
        """The row of the best guess, which is appended to the text."""
        ranking, rows = self._ranking, self._rows
        end_place(text, ranking.state, self._places.where, ranking.outcome)
        embed_place(text, ranking.state, self._table, self._factor, self._rotations, rows.embedded, rows.cos, rows.sin)
        rows.go_on(self._layers)
