"""All layers of a model for a few rows, with fixed buffers and one CUDA graph per bucket of rows and cache.

A forward of 5 rows runs as one of 8, the next bucket. Results do not depend on the number of rows, so the padding
changes only the time, by little, and few graphs serve all numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.chain_plan import DraftWeights
from longdraft.kernels.cuda import jit_rows
from longdraft.kernels.cuda.attention import tree_attention
from longdraft.kernels.cuda.chain_forward import FixedForward
from longdraft.kernels.cuda.forward_buffers import (
    EmbeddedRows,
    Embedding,
    ForwardBuffers,
    maps_of_all,
    weights_of,
)
from longdraft.kernels.cuda.graph_cache import BUCKETS, bucket_of
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed, ceil_div, chained, on_device, padded_size, require
from longdraft.kernels.cuda.linear import CudaLinear, PartialSums
from longdraft.kernels.cuda.model_chain import MAX_HEADS, ModelChains
from longdraft.kernels.cuda.operations import MAP_BLOCK, MAP_COLUMNS, CudaOperations
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
from longdraft.kernels.interface import LayersKV, RemainderMaps, TokenRows
from longdraft.kernels.weights import Geometry, LayerWeights

_NORM_WARPS = 8  # of the program that adds a row and norms it
_MAX_BUFFERS = 64  # of requests that are still running; a request that ends frees its own
# Bucket of rows; where the remainder's maps are; taps; serials of the stores; id of the embedding table
Key = tuple[int, int | None, tuple[int, ...], tuple[int, ...], int | None]


class CudaDecoder:
    """See :class:`longdraft.kernels.interface.Decoder` and `TokenDecoder`. ValueError where the geometry does not fit
    the kernels."""

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        heads, kv_heads, dim = geometry[:3]
        require(heads % kv_heads == 0 and dim % 2 == 0, "query heads in groups of KV heads, an even dim", geometry)
        self.ops, self.layers, self.geometry = ops, tuple(layers), geometry
        self.hidden = len(layers[0].attention_norm)
        self.plan = ops.attention_plan(heads, kv_heads, dim)
        self._buffers = RecentlyUsed[Key, ForwardBuffers](_MAX_BUFFERS)
        self._shared_buffers = RecentlyUsed[object, ForwardBuffers](MAX_SHARED)
        self._spare: CudaStore | None = None
        self._chains: RecentlyUsed[int, ModelChains] = RecentlyUsed(MAX_HEADS)

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
        if isinstance(rows, TokenRows) and can_share(texts):
            return in_groups(self._shared, rows, texts, parents)
        return in_groups(lambda rows, text, parents: self._forward_text(rows, text[0], parents), rows, texts, parents,
                         1)

    def _shared(self, rows: TokenRows, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """The rows of several texts, by the graph of so many texts and rows."""
        stores, table, taps = stores_of(texts), rows.table, texts[0].taps.layers if texts[0].taps else ()
        assert isinstance(table, CudaLinear)
        size, num, room = shared_sizes(texts, stores)
        has_remainder = any(kv.remainder is not None for kv in texts)
        key = num, size, room, taps, id(table), stores[0][0].format, has_remainder
        buffers = self._shared_buffers.get(key, lambda: ForwardBuffers(
            self, num * size, stores[0], has_remainder, taps, Embedding(table, rows.factor), num, room))
        buffers.load(rows, texts, parents, self._spare_like(stores[0][0]))
        self.ops.graphs.run(buffers, partial(self.run_layers, buffers, stores[0]))
        return TextResults.of(buffers).hand_out(texts)

    def _spare_like(self, store: CudaStore) -> CudaStore:
        """The store that padding texts write to."""
        if self._spare is None or self._spare.format is not store.format:
            self._spare = store.empty_like()
            self._spare.reserve_drafts(MAX_ROWS)
        return self._spare

    def _forward_text(self, inputs: TokenRows | EmbeddedRows, kv: LayersKV,
                      parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        rows, stores = len(parents), cuda_stores(kv.stores)
        room = min(store.room for store in stores)
        require(kv.length <= room, f"a length of at most {room} positions", kv.length)
        embedding = None
        if isinstance(inputs, TokenRows):
            assert isinstance(inputs.table, CudaLinear)
            embedding = Embedding(inputs.table, inputs.factor)
        elif kv.is_prompt and kv.remainder is None:
            return prefill(self.ops, self.layers, self.geometry, *inputs, kv, parents)
        for store in stores:
            store.reserve_drafts(max(rows, BUCKETS[-1]))
        taps = kv.taps.layers if kv.taps else ()
        buffers = self.buffers_for(rows, stores, maps_of_all(kv.remainder), taps, embedding)
        buffers.load(inputs, [kv], parents)
        if buffers.rows in BUCKETS:
            self.ops.graphs.run(buffers, partial(self.run_layers, buffers, stores))
        else:
            self.run_layers(buffers, stores)
        return TextResults.of(buffers).hand_out([kv])

    def buffers_for(self, rows: int, stores: Sequence[CudaStore], remainder: Tensor | None,
                    taps: tuple[int, ...] = (), embedding: Embedding | None = None) -> ForwardBuffers:
        """The buffers for `rows` rows over these stores. The most recently used ones are kept.

        remainder  the memory of the maps, which the buffers keep: a fit writes its maps where they were
        """
        bucket = bucket_of(rows)
        serials = tuple(store.serial for store in stores)
        place = None if remainder is None else remainder.data_ptr()
        key = (bucket, place, taps, serials, None if embedding is None else id(embedding.table))

        def make() -> ForwardBuffers:
            return ForwardBuffers(self, bucket, stores, remainder is not None, taps, embedding, remainder=remainder)

        if bucket not in BUCKETS:
            return make()
        return self._buffers.get(key, make, stores[0])  # no later cache has the serials of one that is freed

    drafts_chains = True

    def chain_forward(self, stores: Sequence[CudaStore], remainder: RemainderMaps, texts: int = 1,
                      room: int | None = None, taps: tuple[int, ...] = ()) -> FixedForward:
        """See `chain_forward.ChainDecoder`, as for the next two."""
        if texts == 1:
            return FixedForward(self, self.buffers_for(1, stores, maps_of_all(remainder), taps), None)
        buffers = ForwardBuffers(self, texts, stores, remainder is not None, (), None, texts, room)
        return FixedForward(self, buffers, self._spare_like(stores[0]))

    def chain_key(self, remainder: RemainderMaps) -> object:
        maps = maps_of_all(remainder)
        return None if maps is None else maps.data_ptr()  # the layers read it there

    def model_chains(self, weights: DraftWeights, has_remainder: bool) -> ModelChains:
        return self._chains.get(id(weights.head), lambda: ModelChains(weights))

    def run_layers(self, buffers: ForwardBuffers, stores: Sequence[CudaStore], source: Tensor | None = None) -> None:
        """All layers over the buffers. The launches do not depend on the buffers' contents, as a graph requires.

        source  [R, K], the input of the first layer's queries, keys and values; None: its residual after its norm
        """
        geometry, post_norm = self.geometry, self.geometry.post_norm
        if buffers.embedding:
            buffers.embedding.of_tokens(buffers.tokens, buffers.x_in)
        if buffers.text_rows > 1:  # a row by itself is its own path
            buffers.work.set_tree(buffers.parents)
        x = buffers.x_in
        if source is None:
            source = x if post_norm else self.ops.rms_norm_into(x, self.layers[0].attention_norm, geometry.eps,
                                                                geometry.rounds_once, buffers.normed)
        for index, layer in enumerate(self.layers):
            qkv, out, gate_up, down = weights_of(layer)
            self._finish_qkv(buffers, stores[index], index, layer, self._product(buffers, source, qkv))
            self._attention(buffers, stores[index], index, layer.window)
            projected = self._product(buffers, buffers.output[index].view(buffers.rows, -1), out)
            self._add_and_norm(buffers, x, projected, layer.attention_norm, layer.mlp_norm, buffers.x)
            inner = self._swiglu(buffers, buffers.x if post_norm else buffers.normed, gate_up)
            is_last = index + 1 == len(self.layers)
            # A tapped layer's input is written where its tap is read: a copy would interrupt the chain of kernels.
            x = buffers.x if is_last or index + 1 not in buffers.taps else buffers.tap(index + 1)
            self._add_and_norm(buffers, buffers.x, self._product(buffers, inner, down), layer.mlp_norm,
                               None if is_last else self.layers[index + 1].attention_norm, x)
            source = x if post_norm else buffers.normed
        for entered, rows in ((0, buffers.x_in), (len(self.layers), buffers.x)):
            if entered in buffers.taps:
                buffers.tap(entered).copy_(rows)

    def _product(self, buffers: ForwardBuffers, x: Tensor, weight: CudaLinear) -> PartialSums:
        return weight.partial_sums(x, self.ops.tile, buffers.sums)

    def _finish_qkv(self, buffers: ForwardBuffers, store: CudaStore, index: int, layer: LayerWeights,
                    parts: PartialSums) -> None:
        """Norms and rotation of queries and keys; keys and values are also written to the store's draft slots."""
        heads, kv_heads, dim, eps = self.geometry[:4]
        half = dim // 2
        table = None if buffers.table is None else buffers.table[index]
        norms = 0 if layer.q_norm is None else 1 if layer.q_norm.shape == (dim,) else 2
        q_norm, k_norm = (parts.sums if norm is None else norm for norm in (layer.q_norm, layer.k_norm))
        with on_device(buffers.x.device):
            jit_rows.finish_qkv_kernel[(buffers.rows, heads + 2 * kv_heads)](
                *parts.arguments(), q_norm, k_norm, buffers.cos, buffers.sin, buffers.where, buffers.content[index],
                buffers.q[index], buffers.k[index], buffers.v[index], store.k, store.v, store.k_scale, store.v_scale,
                buffers.where if table is None else table, buffers.rows, store.capacity, buffers.text_rows, eps,
                self.geometry.query_factor, HEADS=heads, KV_HEADS=kv_heads, HALF=half, PADDED=padded_size(half),
                ALL_PADDED=padded_size(heads * dim), NORMS=norms, ROTATES=layer.rotates,
                ROUNDS_ONCE=self.geometry.rounds_once, HAS_TABLE=table is not None, **parts.options(), num_warps=1,
                **chained(buffers.x.device))

    def _attention(self, buffers: ForwardBuffers, store: CudaStore, index: int, window: int) -> None:
        heads, _, dim = self.geometry[:3]
        row_remainder = buffers.row_remainder
        if row_remainder is not None:
            function, table = buffers.remainder, buffers.maps
            with on_device(buffers.x.device):
                jit_rows.map_remainder_kernel[(buffers.rows, heads, ceil_div(dim + 1, MAP_COLUMNS))](
                    buffers.content[index], row_remainder if function is None else function,
                    buffers.where if table is None else table, row_remainder, index, buffers.text_rows, HEADS=heads,
                    DIM=dim, COLUMNS=MAP_COLUMNS, BLOCK=MAP_BLOCK, HAS_TABLE=table is not None,
                    **chained(buffers.x.device))
        tree_attention(buffers.work, buffers.q[index], store, buffers.where, buffers.room, window, row_remainder,
                       buffers.output[index], buffers.lse[index],
                       None if buffers.table is None else buffers.table[index])

    def _swiglu(self, buffers: ForwardBuffers, source: Tensor, gate_up: CudaLinear) -> Tensor:
        width = gate_up.out_features // 2
        out = buffers.inner.view(-1)[: buffers.rows * width].view(buffers.rows, width)
        gate_up.multiply_gated(source, self.ops.tile, out, buffers.sums)
        return out

    def _add_and_norm(self, buffers: ForwardBuffers, x: Tensor, parts: PartialSums, own_norm: Tensor,
                      next_norm: Tensor | None, out: Tensor) -> None:
        """Write x plus the product to `out`, and its norm for the next linear to `buffers.normed`."""
        post_norm, factor = self.geometry.post_norm, self.geometry.residual_factor
        norms_next = next_norm is not None and not post_norm
        with on_device(x.device):
            jit_rows.add_and_norm_kernel[(buffers.rows,)](
                x, *parts.arguments(), own_norm, next_norm if norms_next else own_norm, out, buffers.normed,
                buffers.rows, factor, self.geometry.eps, WIDTH=self.hidden, PADDED=padded_size(self.hidden),
                HAS_FACTOR=factor != 1, NORMS_OWN=post_norm, NORMS_NEXT=norms_next,
                ROUNDS_ONCE=self.geometry.rounds_once, **parts.options(), num_warps=_NORM_WARPS,
                **chained(buffers.x.device))


def has_fixed_launches(layer: LayerWeights, geometry: Geometry) -> bool:
    """Whether `CudaDecoder` has this layer."""
    parts = (layer.experts, layer.delta, layer.attention_post_norm, layer.mlp_post_norm, layer.sinks, layer.v_norm,
             layer.heads, layer.beside, layer.extra, layer.source, layer.attention_conv, layer.mlp_conv)
    is_usual = layer.is_causal and not layer.is_gated and layer.scalar == 1
    return is_usual and not geometry.has_gelu and geometry.num_ropes == 1 and all(part is None for part in parts)
