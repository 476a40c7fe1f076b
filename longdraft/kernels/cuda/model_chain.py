"""Chains of drafts with a model: each token reads the weights once for all texts.

    host     one upload ->                                                                  <- guesses of all texts
    device   graph of four places, graph of one: embed | layers | head | penalty, noise, best guesses | next tokens

The two graphs are replayed as often as it takes. Tokens and settings are in the entries of `chain_rows`, the stores and
remainders of several texts in the tables of `ForwardBuffers`. The graphs of a text by itself read its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longdraft.kernels.chain_plan import DraftStores, DraftWeights
from longdraft.kernels.cuda.chain_forward import ChainForward
from longdraft.kernels.cuda.chain_rows import ChainRows, Chains, RowsShape, TextDraft, in_graphs
from longdraft.kernels.cuda.choices import LogitsSource
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import padded_size
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.text_rows import TextNeeds
from longdraft.kernels.weights import Geometry

MAX_HEADS = 2  # with which a model drafts
MOST_TAPPED = 16  # tokens of a chain whose tapped states are kept, those of a capture beyond its end included


class ChainDecoder(Protocol):
    """The layers of a model that drafts: `CudaDecoder`."""

    ops: CudaOperations
    geometry: Geometry

    def chain_forward(self, stores: Sequence[CudaStore], has_remainder: bool, texts: int = 1,
                      room: int | None = None, taps: tuple[int, ...] = ()) -> ChainForward: ...


class TextChain(NamedTuple):
    """A text's part of a launch. decoder: of the weights that draft."""

    draft: TextDraft
    decoder: ChainDecoder
    stores: DraftStores

    @property
    def graphs(self) -> GraphCache:
        return self.decoder.ops.graphs


class _Shape(NamedTuple):
    """What the memory of some chains depends on, besides that of their rows.

    has_remainder  whether a text has one
    stores         of several texts: the stores' format, and positions that one has at most; of a text by itself: the
                   serials of its stores, and the layers that are tapped
    """

    rows: RowsShape
    has_remainder: bool
    stores: object


class _Buffers:
    """The memory of chains of one shape."""

    def __init__(self, decoder: ChainDecoder, head: CudaLinear, shape: _Shape, stores: Sequence[CudaStore],
                 room: int | None, taps: tuple[int, ...]) -> None:
        """stores: of one text; room: positions that a store of several texts has; taps: layers of a text by itself that
        are tapped."""
        texts, device = shape.rows.texts, decoder.ops.device
        self.forward = decoder.chain_forward(stores, shape.has_remainder, texts, room, taps)
        self.rows = ChainRows(shape.rows, self.forward.cos.shape[1], device)
        self.normed, self.sums = torch.empty_like(self.forward.x), torch.empty(head.num_sums(texts), device=device)
        self.logits = torch.empty(texts, head.out_features, device=device)
        tapped = self.forward.tapped
        self._tapped = tapped.new_zeros(len(tapped), MOST_TAPPED, tapped.shape[2])  # a row's, at place % MOST_TAPPED

    def keep_taps(self) -> None:
        """Keep the tapped states of the row of a text by itself, before its place goes on."""
        if len(self._tapped):
            self._tapped.index_copy_(1, self.forward.where[:1] % MOST_TAPPED, self.forward.tapped)

    def copy_taps(self, chain: DraftStores) -> None:
        """Copy the tapped states of the chain's rows, as many as it has room for."""
        if chain.taps:
            first, rows = chain.length % MOST_TAPPED, chain.taps.rows
            before = min(rows.shape[1], MOST_TAPPED - first)
            rows[:, :before].copy_(self._tapped[:, first : first + before])
            rows[:, before:].copy_(self._tapped[:, : rows.shape[1] - before])

    def inputs(self, chains: Sequence[TextChain]) -> tuple[Tensor, Tensor]:
        """What `load` gets."""
        drafts = [chain.draft for chain in chains]
        placed = self.forward.inputs([chain.stores for chain in chains], [draft.places for draft in drafts])
        return placed, self.rows.inputs(drafts)

    def load(self, placed: Tensor, staged: Tensor, needs: TextNeeds) -> None:
        """Set the state from which the chains begin: two copies, and a launch or two."""
        self.forward.upload(placed)
        self.rows.load(staged, needs)


class ModelChains(Chains[TextChain, _Buffers]):
    """Chains with one model's weights."""

    def __init__(self, weights: DraftWeights) -> None:
        super().__init__()
        self._weights = weights

    def _buffers_for(self, chains: Sequence[TextChain]) -> _Buffers:
        head, decoder = self._weights.head, chains[0].decoder
        assert isinstance(head, CudaLinear)
        stores = [cuda_stores(chain.stores.stores) for chain in chains]
        rows = RowsShape.of([chain.draft for chain in chains], head.out_features)
        has_remainder = any(chain.stores.remainder is not None for chain in chains)
        room: int | None = None
        taps: tuple[int, ...] = ()
        key: object
        if len(chains) == 1:
            taps = chains[0].stores.taps.layers if chains[0].stores.taps else ()
            key = tuple(store.serial for store in stores[0]), taps
        else:
            room = padded_size(max(store.room for own in stores for store in own))
            key = stores[0][0].format, room
        shape = _Shape(rows, has_remainder, key)
        return self._buffers.get(shape, lambda: _Buffers(decoder, head, shape, stores[0], room, taps))

    def _end(self, buffers: _Buffers, parts: Sequence[TextChain]) -> None:
        buffers.copy_taps(parts[0].stores)

    def _sizes(self, parts: Sequence[TextChain]) -> list[int]:
        return in_graphs(max(part.draft.places for part in parts))

    def _run(self, buffers: _Buffers, first: TextChain, size: int, needs: TextNeeds) -> None:
        """`size` tokens of each text."""
        decoder, stores = first.decoder, cuda_stores(first.stores.stores)
        weights, geometry, rows, forward = self._weights, decoder.geometry, buffers.rows, buffers.forward
        head = weights.head
        assert isinstance(head, CudaLinear) and weights.norm is not None
        source = LogitsSource(decoder.ops.graphs, decoder.ops.tile, weights.norm, geometry.eps, geometry.rounds_once,
                              head, weights.logits_divisor, weights.logits_cap)
        for _ in range(size):
            forward.embed(weights, lambda table, factor, x: rows.embed(table, factor, x, forward.cos, forward.sin))
            forward.run(stores)
            buffers.keep_taps()
            source.launch(forward.x, buffers.normed, buffers.sums, buffers.logits)
            rows.rank(buffers.logits, needs)
            rows.end(forward.where)
