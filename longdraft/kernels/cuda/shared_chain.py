"""Chains of drafts of several texts in one graph: each token reads the weights once for all of them.

    host     one upload ->                                                                  <- guesses of all texts
    device   graph of four places, graph of one: embed | layers | head | penalty, noise, best guesses | next tokens

A text has the guesses, scores, keys and values of its chain alone (`drafting.DraftChain`). Tokens and settings are in
the entries of `chain_rows`, stores and remainders in the tables of `ForwardBuffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.chain_plan import DraftStores, DraftWeights
from longdraft.kernels.cuda.chain_forward import ChainDecoder
from longdraft.kernels.cuda.chain_rows import ChainRows, RowsShape, SharedDrafts, TextDraft
from longdraft.kernels.cuda.choice import LogitsSource
from longdraft.kernels.cuda.drafting import in_graphs
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import padded_size
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.text_rows import TextNeeds
from longdraft.kernels.interface import RemainderMaps

MAX_HEADS = 2  # with which a model drafts


class TextChain(NamedTuple):
    """A text's part of a launch. decoder: of the weights that draft."""

    draft: TextDraft
    decoder: ChainDecoder
    stores: DraftStores

    @property
    def graphs(self) -> GraphCache:
        return self.decoder.ops.graphs


class _Shape(NamedTuple):
    """What the memory of some chains depends on: that of their rows; positions that a store has at most; whether a text
    has a remainder; the stores' dtype."""

    rows: RowsShape
    room: int
    has_remainder: bool
    element: torch.dtype


class _Buffers:
    """The memory of chains of one shape."""

    def __init__(self, decoder: ChainDecoder, head: CudaLinear, shape: _Shape, stores: Sequence[CudaStore],
                 remainder: RemainderMaps) -> None:
        """stores: of one text; remainder: of one that has any."""
        texts, device = shape.rows.texts, decoder.ops.device
        self.forward = decoder.chain_forward(stores, remainder, texts, shape.room)
        self.rows = ChainRows(shape.rows, self.forward.cos.shape[1], device)
        self.normed, self.sums = torch.empty_like(self.forward.x), torch.empty(head.num_sums(texts), device=device)
        self.logits = torch.empty(texts, head.out_features, device=device)

    def inputs(self, chains: Sequence[TextChain]) -> tuple[Tensor, Tensor]:
        """What `load` gets."""
        drafts = [chain.draft for chain in chains]
        placed = self.forward.inputs([chain.stores for chain in chains], [draft.places for draft in drafts])
        return placed, self.rows.inputs(drafts)

    def load(self, placed: Tensor, staged: Tensor) -> None:
        """Set the state from which the chains begin: two copies and a launch."""
        self.forward.upload(placed)
        self.rows.load(staged)


class SharedChains(SharedDrafts[TextChain, _Buffers]):
    """Chains of several texts with one model's weights."""

    name = "chains"

    def __init__(self, weights: DraftWeights) -> None:
        super().__init__()
        self._weights = weights

    def _buffers_for(self, chains: Sequence[TextChain]) -> _Buffers:
        head, decoder = self._weights.head, chains[0].decoder
        assert isinstance(head, CudaLinear)
        stores = [cuda_stores(chain.stores.stores) for chain in chains]
        room = padded_size(max(store.room for own in stores for store in own))
        remainder = next((chain.stores.remainder for chain in chains if chain.stores.remainder is not None), None)
        shape = _Shape(RowsShape.of([chain.draft for chain in chains], head.out_features), room,
                       remainder is not None, stores[0][0].element)
        return self._buffers.get(shape, lambda: _Buffers(decoder, head, shape, stores[0], remainder))

    def _sizes(self, places: int) -> list[int]:
        return in_graphs(places)

    def _run(self, buffers: _Buffers, first: TextChain, size: int, needs: TextNeeds) -> None:
        """`size` tokens of each text."""
        decoder, stores = first.decoder, cuda_stores(first.stores.stores)
        weights, geometry, rows, forward = self._weights, decoder.geometry, buffers.rows, buffers.forward
        head = weights.head
        assert isinstance(head, CudaLinear)
        source = LogitsSource(decoder.ops.graphs, decoder.ops.tile, weights.norm, geometry.eps, geometry.rounds_once,
                              head, weights.logits_divisor, weights.logits_cap)
        for _ in range(size):
            forward.embed(weights, lambda table, factor, x: rows.embed(table, factor, x, forward.cos, forward.sin))
            forward.run(stores)
            source.launch(forward.x, buffers.normed, buffers.sums, buffers.logits)
            rows.rank(buffers.logits, needs)
            rows.end(forward.where)
