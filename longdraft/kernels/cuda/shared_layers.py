"""Chains of several texts from trained layers in one graph: each token reads the layers once for all texts.

It is `layer_chain` with a row for each text. A text has the guesses, scores, keys and values that it has there. Tokens
and settings are in the entries of `chain_rows`, the addresses of the stores in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.cuda.chain_rows import (
    MAX_BUFFERS,
    ChainRows,
    RowsShape,
    SharedDrafts,
    TextDraft,
    has_launched,
    needs_of,
)
from longdraft.kernels.cuda.drafting import in_graphs
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.launch import RecentlyUsed, on_device, padded_size, staged_parts
from longdraft.kernels.cuda.layer_chain import DraftLayers, LayerRows, RowPlaces
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.text_rows import TextNeeds


class TextLayers(NamedTuple):
    """A text's part of a launch. See `LayerChain`, and `LayerChain.launch` for `row` to `num_read`.

    stores  of each layer; the last one is only read if `has_read`
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


class _Shape(NamedTuple):
    """What the memory of some chains depends on: that of their rows, and slots that each store has at most."""

    rows: RowsShape
    rooms: tuple[int, ...]


class _Buffers:
    """The memory of chains of one shape. part: of any text."""

    def __init__(self, shape: _Shape, part: TextLayers) -> None:
        texts, num, device, (table, _) = shape.rows.texts, len(part.stores), part.ops.device, part.layers.embedding
        assert isinstance(table, CudaLinear)
        self.rows = ChainRows(shape.rows, part.stores[0].dim // 2, device)
        self._parts = staged_parts(4 * texts, 4 * texts, 2 * 5 * num * texts)
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=device)
        where, read, tables = (self._staged[each].view(torch.int64) for each in self._parts)
        self.where = where
        self.layers = LayerRows(part.ops, RowPlaces(where, read, tables.view(num, texts, 5), shape.rooms), part.stores,
                                part.has_read, table.in_features, part.row)
        self._spares = [CudaStore(device, store.dtype, store.element, store.heads, store.dim) for store in part.stores]
        for spare in self._spares:  # of padding texts
            spare.reserve_drafts(1)

    def inputs(self, parts: Sequence[TextLayers]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What `load` gets."""
        staged = np.zeros(len(self._staged), dtype=np.int32)
        where, read, tables = (staged[each].view(np.int64) for each in self._parts)
        tables = tables.reshape(len(self._spares), -1, 5)
        tables[:] = np.array([spare.addresses for spare in self._spares])[:, None]
        for text, part in enumerate(parts):
            where[2 * text : 2 * text + 2] = part.length - 1  # the last row, from which the next one goes on
            read[2 * text : 2 * text + 2] = part.num_read - 1
            tables[:, text] = [store.addresses for store in part.stores]
        return torch.from_numpy(staged), self.rows.inputs([part.draft for part in parts]), [part.row for part in parts]

    def load(self, placed: Tensor, staged: Tensor, rows: Sequence[Tensor]) -> None:
        """Set the state from which the chains begin: three copies and a launch."""
        self._staged.copy_(placed, non_blocking=True)
        self.rows.load(staged)
        torch.cat(list(rows), out=self.layers.row[: len(rows)])


class SharedLayers(SharedDrafts[TextLayers]):
    """Chains of several texts with one set of layers."""

    def __init__(self) -> None:
        self._buffers: RecentlyUsed[_Shape, _Buffers] = RecentlyUsed(MAX_BUFFERS)

    def _launch(self, given: Sequence[TextLayers]) -> Tensor:
        parts = [part._replace(draft=part.draft.prepared()) for part in given]
        first, drafts = parts[0], [part.draft for part in parts]
        rooms = tuple(padded_size(max(store.capacity for store in own))
                      for own in zip(*(part.stores for part in parts), strict=True))
        shape, needs, graphs = _Shape(RowsShape.of(drafts, first.vocabulary), rooms), needs_of(drafts), first.ops.graphs
        buffers = self._buffers.get(shape, lambda: _Buffers(shape, first))
        graphs.own(buffers, serial := buffers.rows.serial)
        sizes = (0, *in_graphs(max(draft.places for draft in drafts) - 1))
        pieces = [(("layer chains", serial, size, needs), partial(self._run, buffers, first.layers, size, needs))
                  for size in sizes]
        with on_device(first.ops.device):
            graphs.run_in_turn(pieces, partial(buffers.load, *buffers.inputs(parts)))
        has_launched(drafts)
        return buffers.rows.outcome

    @staticmethod
    def _run(buffers: _Buffers, layers: DraftLayers, count: int, needs: TextNeeds) -> None:
        """`count` tokens of each text after those that are ranked, which are ranked first if `count` is 0."""
        rows, own, (table, factor) = buffers.rows, buffers.layers, layers.embedding
        assert isinstance(table, CudaLinear)
        for _ in range(count):
            rows.end(buffers.where)
            rows.embed(table, factor, own.embedded, own.cos, own.sin)
            own.go_on(layers)
            rows.rank(layers.logits(own.row), needs)
        if not count:
            rows.rank(layers.logits(own.row), needs)
