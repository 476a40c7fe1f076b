"""The layers of chains of drafts: one row of each text, whose place goes on from token to token on the device.

    FixedForward   the layers of `decoder.CudaDecoder`
    CapturedChain  layers that run operation by operation (`captured_chain`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.chain_plan import DraftStores, DraftWeights
from longdraft.kernels.cuda.forward_buffers import DecoderOfLayers, ForwardBuffers
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import RemainderMaps
from longdraft.kernels.launched import LaunchesTogether
from longdraft.kernels.weights import Geometry

# Writes the rows of a table, times a factor, of the texts' last tokens; and the rotations of their places.
Embed = Callable[[CudaLinear, float, Tensor], None]


class ChainForward(Protocol):
    """The memory of T texts' rows, and what runs the layers over it.

    where     int64 [2 T]: rows of each text's stores that are visible, and the slot of its next row, the one after them
    x         [T, hidden]: the rows that leave the layers
    cos, sin  [T, S D / 2] of the rows, as for `Decoder.forward`
    tapped    [taps, T, hidden]: the rows that entered the tapped layers
    """

    where: Tensor
    x: Tensor
    cos: Tensor
    sin: Tensor
    tapped: Tensor

    def inputs(self, chains: Sequence[DraftStores], places: Sequence[int]) -> Tensor:
        """What `upload` gets, for chains of so many tokens."""

    def upload(self, staged: Tensor) -> None:
        """Set the state from which the chains begin, by one copy."""

    def embed(self, weights: DraftWeights, embed: Embed) -> None:
        """Set the layers' inputs."""

    def run(self, stores: Sequence[CudaStore]) -> None:
        """All layers. stores: of one text. The launches do not depend on the buffers' contents, as a graph requires."""


class ChainDecoder(Protocol):
    """The layers of a model that drafts: `CudaDecoder` and `CudaLayerwiseDecoder`.

    drafts_chains  whether they can be part of a graph
    """

    ops: CudaOperations
    geometry: Geometry

    @property
    def drafts_chains(self) -> bool: ...

    def chain_forward(self, stores: Sequence[CudaStore], remainder: RemainderMaps, texts: int = 1,
                      room: int | None = None, taps: tuple[int, ...] = ()) -> ChainForward:
        """The rows of so many texts. stores, remainder: of one of them; room: positions that a store has at most; taps:
        layers that are tapped, of a text by itself."""

    def chain_key(self, remainder: RemainderMaps) -> object:
        """What the graphs of a text's chain depend on besides its stores."""

    def model_chains(self, weights: DraftWeights, has_remainder: bool) -> LaunchesTogether:
        """What drafts chains of several texts with these layers. weights: besides the layers."""


class FixedForward:
    """See `ChainForward`. spare: the store of padding texts; None: there is one text."""

    def __init__(self, decoder: DecoderOfLayers, buffers: ForwardBuffers, spare: CudaStore | None) -> None:
        self._decoder, self._buffers, self._spare = decoder, buffers, spare
        self.where, self.x, self.cos, self.sin = buffers.where, buffers.x, buffers.cos, buffers.sin
        self.tapped = buffers.tapped

    def inputs(self, chains: Sequence[DraftStores], places: Sequence[int]) -> Tensor:
        buffers = self._buffers
        staged = np.zeros(len(buffers.staged), dtype=np.int32)
        where = [(chain.length, chain.length) for chain in chains]  # a row's slot is its place
        if self._spare is None:
            staged[buffers.parts[0]].view(np.int64)[:] = where[0]
        else:
            buffers.place_texts(staged, where, [cuda_stores(chain.stores) for chain in chains],
                                [chain.remainder for chain in chains], self._spare)
        staged[buffers.parts[3]] = -1  # a row's parent is the last committed position
        return torch.from_numpy(staged)

    def upload(self, staged: Tensor) -> None:
        self._buffers.staged.copy_(staged, non_blocking=True)

    def embed(self, weights: DraftWeights, embed: Embed) -> None:
        assert isinstance(weights.embedding, CudaLinear)
        embed(weights.embedding, weights.embedding_factor, self._buffers.x_in)

    def run(self, stores: Sequence[CudaStore]) -> None:
        self._decoder.run_layers(self._buffers, stores)
