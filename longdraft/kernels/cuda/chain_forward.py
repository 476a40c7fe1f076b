"""The layers of chains of drafts: one row of each text, whose place goes on from token to token on the device.

A row is written where its text's cache has it, so the next row sees it as a committed one. A delta layer has three
states: the one that the chain continues, which no row changes, and two that rows write to in turn. Their addresses
change places on the device after each row. A text whose chain has ended stays at its end: it writes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longdraft.kernels.chain_plan import DraftStores, DraftWeights
from longdraft.kernels.cuda.forward_buffers import ForwardBuffers, TextPlaces
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.layers import CudaLayers
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.layer_inputs import LayerInputs

# Writes the rows of a table, times a factor, of the texts' last tokens; and the rotations of their places.
Embed = Callable[[CudaLinear, float, Tensor], None]
_TURNED = (2, 3, 7, 8, 4, 5, 6, 2, 3)  # where a row finds the parts of its entry (`jit_delta`) in the one before


class ChainForward:
    """The memory of T texts' rows, and what runs the layers over it.

    where     int64 [2 T]: rows of each text's stores that are visible, and the slot of its next row, the one after them
    x         [T, hidden]: the rows that leave the layers
    cos, sin  [T, S D / 2] of the rows, as for `Decoder.forward`
    tapped    [taps, T, hidden]: the rows that entered the tapped layers
    """

    def __init__(self, layers: CudaLayers, buffers: ForwardBuffers, spares: Sequence[CudaStore] = ()) -> None:
        """spares: the stores of padding texts; none: there is one text."""
        self._layers, self._buffers, self._spares = layers, buffers, spares
        self.where, self.x, self.cos, self.sin = buffers.where, buffers.x, buffers.cos, buffers.sin
        self.tapped = buffers.tapped
        self._order = torch.tensor(_TURNED, device=layers.ops.device)

    def inputs(self, chains: Sequence[DraftStores], places: Sequence[int]) -> Tensor:
        """What `upload` gets, for chains of so many tokens."""
        texts = [TextPlaces((chain.length, chain.length), cuda_stores(chain.stores), chain.remainder,
                            [*zip(*chain.states, strict=True)]) for chain in chains]  # a row's slot is its place
        staged, inputs = self._buffers.staged_of(texts, self._spares)
        if self._buffers.deltas:
            inputs.ends[: len(chains)] = [chain.length + count for chain, count in zip(chains, places, strict=True)]
        return staged

    def upload(self, staged: Tensor) -> None:
        """Set the state from which the chains begin, by one copy."""
        self._buffers.upload(staged)

    def embed(self, weights: DraftWeights, embed: Embed) -> None:
        """Set the layers' inputs."""
        assert isinstance(weights.embedding, CudaLinear)
        embed(weights.embedding, weights.embedding_factor, self._buffers.x_in)
        if weights.inputs is not None and self._buffers.given is not None:
            self._embed_given(weights.inputs, self._buffers.given, embed)

    def _embed_given(self, inputs: LayerInputs, given: Tensor, embed: Embed) -> None:
        assert isinstance(inputs.table, CudaLinear)
        x, ops = self._buffers.x_in, self._layers.ops
        embed(inputs.table, inputs.factors(x.shape[1], ops.dtype)[1], given)
        given.copy_(inputs.combined(ops, x, given, self._layers.geometry.eps))

    def run(self, stores: Sequence[CudaStore]) -> None:
        """All layers. stores: of one text. The launches do not depend on the buffers' contents, as a graph requires."""
        buffers = self._buffers
        if not buffers.deltas:
            self._layers.run(buffers, stores)
            return
        is_active = buffers.inputs.where[:, 0] < buffers.inputs.ends
        buffers.inputs.counts.copy_(is_active)
        self._layers.run(buffers, stores)
        states = buffers.inputs.states
        states.copy_(torch.where(is_active[:, None], states.index_select(2, self._order), states))
