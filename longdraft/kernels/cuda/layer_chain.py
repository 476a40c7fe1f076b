"""Chains of drafts from trained layers (longdraft/parts/eagle.py and glide.py), wholly on the device.

    first token   logits of the text's last row | edit, rank
    each further  best guess after the text | embed | layers | logits | edit, rank

Three CUDA graphs, of the first token, of one and of four further ones, are replayed as often as it takes. Each token
reads the layers once for all texts. The layers run operation by operation, as from the host, but places are read from
the device's memory, and so are the addresses of the stores of several texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.chain_plan import DraftLayers
from longdraft.kernels.cuda.attention import AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.chain_rows import ChainRows, Chains, RowsShape, TextDraft, in_graphs
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore, RowsOfTexts, cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import padded_size, staged_parts
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.text_rows import TextNeeds
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


class TextLayers(NamedTuple):
    """A text's part of a launch.

    vocabulary  number of logits
    stores      of each layer; the last one is only read if `has_read`
    row         [1, hidden], the layers' output for the text's last token
    length      rows of the stores that are visible; the drafts' rows are written after them
    num_read    rows that are visible of the store that is only read
    """

    draft: TextDraft
    layers: DraftLayers
    ops: CudaOperations
    vocabulary: int
    stores: Sequence[CudaStore]
    has_read: bool
    row: Tensor
    length: int
    num_read: int

    @property
    def graphs(self) -> GraphCache:
        return self.ops.graphs


class _Shape(NamedTuple):
    """What the memory of some chains depends on, besides that of their rows: of several texts the slots that each store
    has at most, of a text by itself the serials of its stores."""

    rows: RowsShape
    stores: tuple[int, ...]


class _Buffers:
    """The memory of chains of one shape.

    part   of any text
    rooms  slots that each store of several texts has at most; none: there is one text
    """

    def __init__(self, shape: RowsShape, part: TextLayers, rooms: tuple[int, ...]) -> None:
        texts, device, (table, _) = shape.texts, part.ops.device, part.layers.embedding
        num = len(part.stores) if rooms else 0  # of tables
        assert isinstance(table, CudaLinear)
        self.rows = ChainRows(shape, part.stores[0].dim // 2, device)
        self._parts = staged_parts(4 * texts, 4 * texts, 2 * 5 * num * texts)
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=device)
        where, read, tables = (self._staged[each].view(torch.int64) for each in self._parts)
        self.where = where
        places = RowPlaces(where, read, tables.view(num, texts, 5) if rooms else None, rooms)
        self.layers = LayerRows(part.ops, places, part.stores, part.has_read, table.in_features, part.row)
        self._spares = [CudaStore(device, store.dtype, store.element, store.heads, store.dim)
                        for store in part.stores[:num]]
        for spare in self._spares:  # of padding texts
            spare.reserve_drafts(1)

    def inputs(self, parts: Sequence[TextLayers]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What `load` gets."""
        staged = np.zeros(len(self._staged), dtype=np.int32)
        where, read, tables = (staged[each].view(np.int64) for each in self._parts)
        if self._spares:
            tables = tables.reshape(len(self._spares), -1, 5)
            tables[:] = np.array([spare.addresses for spare in self._spares])[:, None]
        for text, part in enumerate(parts):
            where[2 * text : 2 * text + 2] = part.length - 1  # the last row, from which the next one goes on
            read[2 * text : 2 * text + 2] = part.num_read - 1
            if self._spares:
                tables[:, text] = [store.addresses for store in part.stores]
        return torch.from_numpy(staged), self.rows.inputs([part.draft for part in parts]), [part.row for part in parts]

    def load(self, placed: Tensor, staged: Tensor, rows: Sequence[Tensor], needs: TextNeeds) -> None:
        """Set the state from which the chains begin: three copies, and a launch or two."""
        self._staged.copy_(placed, non_blocking=True)
        self.rows.load(staged, needs)
        torch.cat(list(rows), out=self.layers.row[: len(rows)])


class LayerChains(Chains[TextLayers, _Buffers]):
    """Chains with one set of layers."""

    name = "layer chains"

    def _buffers_for(self, parts: Sequence[TextLayers]) -> _Buffers:
        first = parts[0]
        rows, rooms = RowsShape.of([part.draft for part in parts], first.vocabulary), tuple[int, ...]()
        if len(parts) > 1:
            rooms = tuple(padded_size(max(store.capacity for store in own))
                          for own in zip(*(part.stores for part in parts), strict=True))
        shape = _Shape(rows, rooms or tuple(store.serial for store in first.stores))
        return self._buffers.get(shape, lambda: _Buffers(rows, first, rooms))

    def _sizes(self, parts: Sequence[TextLayers]) -> list[int]:
        return [0, *in_graphs(max(part.draft.places for part in parts) - 1)]

    def _run(self, buffers: _Buffers, first: TextLayers, size: int, needs: TextNeeds) -> None:
        """`size` tokens of each text after those that are ranked, which are ranked first if `size` is 0."""
        layers, rows, own, (table, factor) = first.layers, buffers.rows, buffers.layers, first.layers.embedding
        assert isinstance(table, CudaLinear)
        for _ in range(size):
            rows.end(buffers.where)
            rows.embed(table, factor, own.embedded, own.cos, own.sin)
            own.go_on(layers)
            rows.rank(layers.logits(own.row), needs)
        if not size:
            rows.rank(layers.logits(own.row), needs)
