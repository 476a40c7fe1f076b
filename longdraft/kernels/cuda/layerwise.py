"""All layers of a model for a few rows, operation by operation: for layers that `decoder.CudaDecoder` does not have.

Those are delta layers, mixtures of experts, norms on both sides, several rotations, sinks and heads of several sizes.
Each operation is row-invariant, so the texts are those of plain decoding.

The rows of one text, or of several texts, run as a CUDA graph for each bucket of rows (`captured_layers`). Texts of
which only some have a remainder are launched by the host, kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.chain_plan import DraftWeights
from longdraft.kernels.cuda import delta
from longdraft.kernels.cuda.captured_chain import CapturedChain
from longdraft.kernels.cuda.captured_layers import CapturedLayers
from longdraft.kernels.cuda.forward_buffers import EmbeddedRows
from longdraft.kernels.cuda.graph_cache import BUCKETS
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed
from longdraft.kernels.cuda.model_chain import MAX_HEADS, ModelChains
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.prefill import prefill
from longdraft.kernels.cuda.shared_forward import (
    MAX_SHARED,
    can_share,
    in_groups,
    rows_of_each,
    shared_sizes,
    stores_of,
)
from longdraft.kernels.interface import LayersKV, RemainderMaps
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.switches import is_on
from longdraft.kernels.weights import Geometry, LayerWeights

CAPTURES_LAYERS = is_on("CAPTURES_LAYERS")  # False: the host launches every kernel
CHAINS_LAYERS = is_on("CHAINS_LAYERS")  # False: chains of drafts go token by token
_MAX_BUFFERS = 64  # of requests that are still running; a request that ends frees its own


class CudaLayerwiseDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`."""

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        self.ops, self._layers, self.geometry = ops, tuple(layers), geometry
        self._chains: RecentlyUsed[object, ModelChains] = RecentlyUsed(2 * MAX_HEADS)
        self._few_rows = LayerwiseDecoder(ops, layers, geometry)
        self._buffers = RecentlyUsed[object, CapturedLayers](_MAX_BUFFERS)
        self._shared_buffers = RecentlyUsed[object, CapturedLayers](MAX_SHARED)
        places_states = delta.PLACES_STATES and len({layer.delta.shape for layer in layers if layer.delta}) <= 1
        self._can_pad = all(layer.is_causal for layer in layers)  # else a row would see the padding
        self._can_capture = all((layer.delta is None or places_states)
                                and (layer.experts is None or ops.groups_experts(layer.experts)) for layer in layers)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """The rows of all texts together, or one text after another if a chunk of a prompt is among them."""
        if not any(kv.is_prompt for kv in texts):
            rows, is_captured = EmbeddedRows(x, cos, sin), CAPTURES_LAYERS and self._can_capture
            if is_captured and len(texts) == 1 and len(x) <= BUCKETS[-1]:
                return self._replayed(rows, texts, parents)
            is_alike = len({(kv.remainder is None, self._can_pad or kv.k.shape[1]) for kv in texts}) == 1
            if is_captured and len(texts) > 1 and can_share(texts) and is_alike:
                return in_groups(self._shared, rows, texts, parents)
            return self._few_rows.forward(x, cos, sin, texts, parents)
        if len(texts) == 1:
            return prefill(self.ops, self._layers, self.geometry, x, cos, sin, texts[0], parents)
        return in_groups(lambda rows, text, parents: self.forward(*rows, text, parents), EmbeddedRows(x, cos, sin),
                         texts, parents, 1)

    def _replayed(self, rows: EmbeddedRows, texts: Sequence[LayersKV],
                  parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """The rows of one text, by the graph of their bucket."""
        (kv,), (stores,) = texts, stores_of(texts)
        bucket = rows_of_each(texts) if self._can_pad else len(rows.x)
        taps = kv.taps.layers if kv.taps else ()
        key = bucket, taps, kv.remainder is not None, tuple(store.serial for store in stores)

        buffers = self._buffers.get(key, lambda: self._new_buffers(rows, kv, bucket), stores[0])
        return self._run(buffers, rows, texts, parents)

    def _shared(self, rows: EmbeddedRows, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """The rows of several texts, by the graph of so many texts and rows."""
        kv, stores = texts[0], stores_of(texts)
        size, num, room = shared_sizes(texts, stores)
        size = size if self._can_pad else kv.k.shape[1]
        taps = kv.taps.layers if kv.taps else ()
        key = num, size, room, taps, kv.remainder is not None, stores[0][0].format
        buffers = self._shared_buffers.get(key, lambda: self._new_buffers(rows, kv, num * size, num, room))
        return self._run(buffers, rows, texts, parents)

    def _new_buffers(self, rows: EmbeddedRows, kv: LayersKV, count: int, texts: int = 1,
                     room: int | None = None) -> CapturedLayers:
        return CapturedLayers(self.ops, self._layers, self.geometry, count, rows, kv, texts, room)

    def _run(self, buffers: CapturedLayers, rows: EmbeddedRows, texts: Sequence[LayersKV],
             parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        buffers.load(rows, texts, parents)
        self.ops.graphs.run(buffers, partial(buffers.run, cuda_stores(texts[0].stores)))
        return buffers.results(texts)

    @property
    def drafts_chains(self) -> bool:
        return CAPTURES_LAYERS and CHAINS_LAYERS and self._can_capture

    def chain_forward(self, stores: Sequence[CudaStore], remainder: RemainderMaps, texts: int = 1,
                      room: int | None = None, taps: tuple[int, ...] = ()) -> CapturedChain:
        """See `chain_forward.ChainDecoder`, as for the next two."""
        return CapturedChain(self.ops, self._layers, self.geometry, stores, remainder is not None, texts, room, taps)

    def chain_key(self, remainder: RemainderMaps) -> object:
        return remainder is not None  # where the maps are is uploaded

    def model_chains(self, weights: DraftWeights, has_remainder: bool) -> ModelChains:
        """Texts with a remainder and texts without one do not share a graph: the remainder contains the sinks."""
        return self._chains.get((id(weights.head), has_remainder), lambda: ModelChains(weights))
