"""Chains of several texts from trained layers in one graph: each token reads the layers once for all texts.

It is `layer_chain` with a row for each text. A text has the guesses, scores, keys and values that it has there. Tokens
and settings are in the entries of `chain_rows`, the addresses of the stores in a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.chain_plan import DraftLayers
from longdraft.kernels.cuda.chain_rows import ChainRows, RowsShape, SharedDrafts, TextDraft
from longdraft.kernels.cuda.drafting import in_graphs
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.launch import padded_size, staged_parts
from longdraft.kernels.cuda.layer_chain import LayerRows, RowPlaces
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

    @property
    def graphs(self) -> GraphCache:
        return self.ops.graphs


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


class SharedLayers(SharedDrafts[TextLayers, _Buffers]):
    """Chains of several texts with one set of layers."""

    name = "layer chains"

    def _buffers_for(self, parts: Sequence[TextLayers]) -> _Buffers:
        first = parts[0]
        rooms = tuple(padded_size(max(store.capacity for store in own))
                      for own in zip(*(part.stores for part in parts), strict=True))
        shape = _Shape(RowsShape.of([part.draft for part in parts], first.vocabulary), rooms)
        return self._buffers.get(shape, lambda: _Buffers(shape, first))

    def _sizes(self, places: int) -> list[int]:
        return [0, *in_graphs(places - 1)]

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
