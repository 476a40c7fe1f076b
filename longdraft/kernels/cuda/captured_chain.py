"""Chains of drafts with layers that run operation by operation, wholly on the device.

A row is written where its text's cache has it, so the next row sees it as a committed one. A delta layer has three
states: the one that the chain continues, which no row changes, and two that rows write to in turn. Their addresses
change places on the device after each row. A text whose chain has ended stays at its end: it writes no state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.chain_plan import DraftStores, DraftWeights
from longdraft.kernels.cuda.captured_layers import CapturedLayers, TextPlaces
from longdraft.kernels.cuda.chain_forward import Embed
from longdraft.kernels.cuda.forward_buffers import EmbeddedRows
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import LayersKV, Taps
from longdraft.kernels.layer_inputs import LayerInputs
from longdraft.kernels.weights import Geometry, LayerWeights

_TURNED = (2, 3, 7, 8, 4, 5, 6, 2, 3)  # where a row finds the parts of its entry (`jit_delta`) in the one before


class CapturedChain(CapturedLayers):
    """See `chain_forward.ChainForward`."""

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry,
                 stores: Sequence[CudaStore], has_remainder: bool, texts: int, room: int | None,
                 taps: tuple[int, ...]) -> None:
        hidden = len(layers[0].attention_norm)
        own = sum(layer.extra.out.in_features for layer in layers if layer.extra and isinstance(layer.extra.out,
                                                                                                CudaLinear))
        heads, dim = (max(sizes) for sizes in zip(*(store.shape for store in stores), strict=True))
        x, turns = torch.empty(0, hidden + own, dtype=ops.dtype), torch.empty(0, geometry.num_ropes * (dim // 2))
        k = torch.empty(len(stores), 0, heads, dim, dtype=ops.dtype)
        text = LayersKV(stores, 0, k, k, [k] * len(stores) if has_remainder else None, taps=Taps(taps, x))
        super().__init__(ops, layers, geometry, texts, EmbeddedRows(x, turns, turns), text, texts, room, is_chain=True)
        self._eps, self._dense = geometry.eps, ops
        self._x_in, self._given = (torch.zeros(texts, width, dtype=ops.dtype, device=ops.device)
                                   for width in (hidden, own))
        self._x_in = self._x_in if own else self._x
        self.x, self.cos, self.sin = torch.zeros_like(self._x_in), self._cos, self._sin
        self._order = torch.tensor(_TURNED, device=ops.device)
        self._spares = [store.empty_like() for store in stores] if texts > 1 else []
        for spare in self._spares:  # of padding texts
            spare.reserve_drafts(1)

    def inputs(self, chains: Sequence[DraftStores], places: Sequence[int]) -> Tensor:
        """See `ChainForward`. A padding text has states of the first one, which it does not write."""
        staged, inputs = self._new_inputs()
        inputs.where[:], inputs.counts[:], inputs.targets[:] = 0, 0, 0
        for text, (chain, count) in enumerate(zip(chains, places, strict=True)):
            inputs.where[2 * text : 2 * text + 2] = chain.length  # a row's slot is its place
            inputs.targets[text] = chain.length + count
        texts = [TextPlaces(cuda_stores(chain.stores), chain.remainder, [*zip(*chain.states, strict=True)])
                 for chain in chains]
        self._load_addresses(inputs, texts, texts[0]._replace(stores=self._spares))
        return staged

    def embed(self, weights: DraftWeights, embed: Embed) -> None:
        table, own, hidden = weights.embedding, weights.inputs, self._x_in.shape[1]
        assert isinstance(table, CudaLinear)
        embed(table, weights.embedding_factor, self._x_in)
        if own is not None:
            self._x[:, :hidden].copy_(self._x_in)
            self._x[:, hidden:].copy_(self._inputs_of_layers(own, embed))

    def _inputs_of_layers(self, own: LayerInputs, embed: Embed) -> Tensor:
        assert isinstance(own.table, CudaLinear)
        embed(own.table, own.factors(self._x_in.shape[1], self._dense.dtype)[1], self._given)
        return own.combined(self._dense, self._x_in, self._given, self._eps)

    def run(self, stores: Sequence[CudaStore]) -> None:
        if self._deltas:
            is_active = self.where.view(-1, 2)[:, 0] < self._targets
            self._counts.copy_(is_active)
        super().run(stores)
        assert self._result is not None
        self.x.copy_(self._result[0])
        if self._deltas:
            turned = self._states.index_select(2, self._order)
            self._states.copy_(torch.where(is_active[:, None], turned, self._states))
