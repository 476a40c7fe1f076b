"""All layers of a model for a few rows, as CUDA graphs.

A forward's positions and tree are read from device memory, so a graph serves every step as long as the stores do not
grow. Numbers of rows are rounded up to a *bucket*: padding changes only the time, by little, and few graphs serve all
numbers of rows. Rows of more than the largest bucket are launched kernel by kernel, and so are mixtures whose experts
are not multiplied together: the host reads which experts are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.chain_plan import DraftWeights
from longdraft.kernels.cuda.chain_forward import ChainForward
from longdraft.kernels.cuda.forward_buffers import EmbeddedRows, Embedding, ForwardBuffers
from longdraft.kernels.cuda.graph_cache import BUCKETS, bucket_of
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed, require
from longdraft.kernels.cuda.layers import CudaLayers
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.model_chain import MAX_HEADS, ModelChains
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.prefill import prefill
from longdraft.kernels.cuda.shared_forward import (
    MAX_ROWS,
    MAX_SHARED,
    TextResults,
    can_share,
    in_groups,
    shared_sizes,
    stores_of,
)
from longdraft.kernels.interface import LayersKV, TokenRows
from longdraft.kernels.weights import Geometry, LayerWeights

_MAX_BUFFERS = 64  # of requests that are still running; a request that ends frees its own


class CudaDecoder:
    """See :class:`longdraft.kernels.interface.Decoder` and `TokenDecoder`. ValueError where the geometry does not fit
    the kernels.

    can_capture  whether the layers can be part of a graph
    """

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        heads, kv_heads, dim = geometry[:3]
        require(heads % kv_heads == 0 and dim % 2 == 0, "query heads in groups of KV heads, an even dim", geometry)
        self.ops, self.geometry, self.layers = ops, geometry, CudaLayers(ops, layers, geometry)
        self.can_capture = all(layer.experts is None or ops.groups_experts(layer.experts) for layer in layers)
        self._can_pad = all(layer.is_causal for layer in layers)  # else a row would see the padding
        # What rows have besides their keys, if their text has no remainder: a remainder contains it.
        self._has_own_remainder = any(layer.sinks is not None or not layer.is_causal for layer in layers)
        self._buffers = RecentlyUsed[object, ForwardBuffers](_MAX_BUFFERS)
        self._shared_buffers = RecentlyUsed[object, ForwardBuffers](MAX_SHARED)
        self._spares: dict[object, CudaStore] = {}
        self._chains: RecentlyUsed[object, ModelChains] = RecentlyUsed(2 * MAX_HEADS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        return self._forward(EmbeddedRows(x, cos, sin), texts, parents)

    def forward_tokens(self, rows: TokenRows, texts: Sequence[LayersKV],
                       parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        table = rows.table
        require(len(rows.tokens) > 0 and min(rows.tokens) >= 0 and max(rows.tokens) < table.out_features,
                f"token ids below {table.out_features}", rows.tokens)
        return self._forward(rows, texts, parents)

    def _forward(self, rows: TokenRows | EmbeddedRows, texts: Sequence[LayersKV],
                 parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """Run several texts together where that is possible, otherwise one after another, each with the graph of its
        own rows and cache."""
        if len(texts) == 1:
            return self._forward_text(rows, texts[0], parents)
        kinds = {(kv.remainder is None and self._has_own_remainder, self._can_pad or kv.k.shape[1], kv.is_prompt)
                 for kv in texts}
        if len(kinds) == 1 and not texts[0].is_prompt and self.can_capture and can_share(texts):
            return in_groups(self._shared, rows, texts, parents)
        return in_groups(lambda rows, text, parents: self._forward_text(rows, text[0], parents), rows, texts, parents,
                         1)

    def _shared(self, rows: TokenRows | EmbeddedRows, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """The rows of several texts, by the graph of so many texts and rows."""
        stores, taps = stores_of(texts), texts[0].taps.layers if texts[0].taps else ()
        size, num, room = shared_sizes(texts, stores)
        size = size if self._can_pad else texts[0].k.shape[1]
        has_remainder = any(kv.remainder is not None for kv in texts)
        embedding, given = _embedding_of(rows), self._width_given(rows)
        key = num, size, room, taps, embedding and id(embedding.table), given, stores[0][0].format, has_remainder
        buffers = self._shared_buffers.get(key, lambda: ForwardBuffers(
            self.layers, num * size, stores[0], has_remainder, taps, embedding, num, room, given))
        buffers.load(rows, texts, parents, self.spares_like(stores[0]))
        return self._run(buffers, stores[0], texts)

    def spares_like(self, stores: Sequence[CudaStore]) -> list[CudaStore]:
        """The stores that padding texts write to, in place of a text's."""
        for store in stores:
            if (key := _form_of(store)) not in self._spares:
                self._spares[key] = store.empty_like()
                self._spares[key].reserve_drafts(MAX_ROWS)
        return [self._spares[_form_of(store)] for store in stores]

    def _forward_text(self, inputs: TokenRows | EmbeddedRows, kv: LayersKV,
                      parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        rows, stores = len(parents), cuda_stores(kv.stores)
        room = min(store.room for store in stores)
        require(kv.length <= room, f"a length of at most {room} positions", kv.length)
        if isinstance(inputs, EmbeddedRows) and kv.is_prompt and kv.remainder is None:
            return prefill(self.ops, self.layers.layers, self.geometry, *inputs, kv, parents)
        for store in stores:
            store.reserve_drafts(max(rows, BUCKETS[-1]))
        size = bucket_of(rows) if self._can_pad and self.can_capture else rows
        buffers = self.buffers_for(size, stores, kv.remainder is not None, kv.taps.layers if kv.taps else (),
                                   _embedding_of(inputs), self._width_given(inputs))
        buffers.load(inputs, [kv], parents)
        return self._run(buffers, stores, [kv])

    def _width_given(self, rows: TokenRows | EmbeddedRows) -> int:
        return rows.x.shape[1] - self.layers.hidden if isinstance(rows, EmbeddedRows) else 0

    def buffers_for(self, rows: int, stores: Sequence[CudaStore], has_remainder: bool, taps: tuple[int, ...] = (),
                    embedding: Embedding | None = None, width_given: int = 0) -> ForwardBuffers:
        """The buffers for `rows` rows over these stores. The most recently used ones are kept."""
        key = (rows, has_remainder, taps, tuple(store.serial for store in stores), embedding and id(embedding.table),
               width_given)

        def make() -> ForwardBuffers:
            return ForwardBuffers(self.layers, rows, stores, has_remainder, taps, embedding, width_given=width_given)

        if rows > BUCKETS[-1]:
            return make()
        return self._buffers.get(key, make, stores[0])  # no later cache has the serials of one that is freed

    def _run(self, buffers: ForwardBuffers, stores: Sequence[CudaStore],
             texts: Sequence[LayersKV]) -> tuple[Tensor, AttentionOutput]:
        """The layers over loaded buffers. stores: of one text"""
        if self.can_capture and buffers.rows <= BUCKETS[-1]:
            self.ops.graphs.run(buffers, partial(self.layers.run, buffers, stores))
        else:
            self.layers.run(buffers, stores)
        return TextResults.of(buffers).hand_out(texts)

    def chain_forward(self, stores: Sequence[CudaStore], has_remainder: bool, texts: int = 1,
                      room: int | None = None, taps: tuple[int, ...] = ()) -> ChainForward:
        """The rows of chains of so many texts. stores: of one of them; room: positions that a store has at most; taps:
        layers that are tapped, of a text by itself."""
        given = self.layers.width_given
        if texts == 1:
            return ChainForward(self.layers, self.buffers_for(1, stores, has_remainder, taps, None, given))
        buffers = ForwardBuffers(self.layers, texts, stores, has_remainder, (), None, texts, room, given)
        return ChainForward(self.layers, buffers, self.spares_like(stores))

    def model_chains(self, weights: DraftWeights, has_remainder: bool) -> ModelChains:
        """What drafts chains of several texts with these layers. weights: besides the layers. Texts with a remainder
        and texts without one share no graph where rows have a remainder of their own."""
        key = id(weights.head), has_remainder and self._has_own_remainder
        return self._chains.get(key, lambda: ModelChains(weights))


def _embedding_of(rows: TokenRows | EmbeddedRows) -> Embedding | None:
    if isinstance(rows, EmbeddedRows):
        return None
    assert isinstance(rows.table, CudaLinear)
    return Embedding(rows.table, rows.factor)


def _form_of(store: CudaStore) -> object:
    return store.shape, store.format, store.score_cap
