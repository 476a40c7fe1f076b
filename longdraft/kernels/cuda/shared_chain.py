"""Chains of drafts of several texts in one graph: each token reads the weights once for all of them.

    host     one upload ->                                                                  <- guesses of all texts
    device   graph of four places, graph of one: embed | layers | head | penalty, noise, best guesses | next tokens

A text has the guesses, scores, keys and values of its chain alone (`drafting.DraftChain`). What differs between texts
is in device memory: tokens and settings in the entries of `jit_shared_choice`, stores and remainders in the tables of
`ForwardBuffers`. So a graph belongs to a number of texts, and a text that begins or ends captures nothing. Chains may
have unlike lengths: a text that has reached the end of its own stays there while others go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cuda import jit_choice, jit_shared_choice
from longdraft.kernels.cuda.choice import MAX_CHAIN, LogitsSource, TokenChooser
from longdraft.kernels.cuda.drafting import embed_place, end_place, in_graphs, new_outcome, new_rotations, rank_rows
from longdraft.kernels.cuda.forward_buffers import DecoderOfLayers, ForwardBuffers
from longdraft.kernels.cuda.graph_cache import new_owner
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed, ceil_div, chained, on_device, padded_size, require, staged_parts
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.shared_choice import (
    MAX_FRESH,
    TextRows,
    append_tokens,
    entry_of,
    longest_window,
    most_banned,
)
from longdraft.kernels.cuda.support import BLOCK
from longdraft.kernels.native_draft import DraftStores, DraftWeights

_ENTRY = jit_shared_choice.ENTRY.value
_MAX_TEXTS = 64  # of a graph
_MAX_BUFFERS = 4  # numbers of texts: the logits of 64 take up to 65 MB
_FILTERS = dict(HAS_CUT=False, HAS_MIN_P=True, HAS_ETA=False, HAS_FLOOR=False)


class TextChain(NamedTuple):
    """A text's part of a launch; see `DraftChain.launch`, whose arguments are the last five.

    decoder  of the weights that draft
    chooser  of the request, whose rules `shared_choice.can_share`
    fresh    the request's tokens that the chooser does not hold yet
    width    guesses at each place at most
    """

    decoder: DecoderOfLayers
    chooser: TokenChooser
    fresh: NDArray[np.int32]
    width: int
    stores: DraftStores
    rotations: tuple[Tensor, Tensor]
    path: Sequence[int]
    required: int
    within: float

    @property
    def places(self) -> int:
        """Tokens of the chain."""
        return len(self.rotations[0])

    @property
    def new_tokens(self) -> list[int]:
        """Tokens that are uploaded with the settings: of the text, and of the path after it; none if these are many."""
        new = [*self.fresh.tolist(), *self.path]
        return new if len(new) <= MAX_FRESH else []

    def prepared(self) -> TextChain:
        """This chain, for whose tokens the chooser has room. Many new tokens are copied by themselves."""
        if len(self.fresh) + len(self.path) <= MAX_FRESH:
            self.chooser.make_room(len(self.fresh) + len(self.path) + MAX_CHAIN)
            return self
        self.chooser.extend(self.fresh, self.chooser.length)
        self.chooser.place(self.path)
        return self._replace(fresh=self.fresh[:0])


class _Shape(NamedTuple):
    """What the memory of some chains depends on: numbers of texts, of positions that a store has at most, of tokens of
    a window, and of guesses; whether a text has a remainder; the stores' dtype."""

    texts: int
    room: int
    window: int
    width: int
    has_remainder: bool
    element: torch.dtype


class _Buffers:
    """The memory of chains of one shape."""

    def __init__(self, decoder: DecoderOfLayers, head: CudaLinear, shape: _Shape, stores: Sequence[CudaStore]) -> None:
        texts, device, half = shape.texts, decoder.ops.device, decoder.geometry.head_dim // 2
        vocabulary, blocks = head.out_features, ceil_div(head.out_features, BLOCK)

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.shape, self.serial = shape, new_owner()
        self.forward = ForwardBuffers(decoder, texts, stores, shape.has_remainder, (), None, texts, shape.room)
        self.parts = staged_parts(2 * _ENTRY * texts, MAX_FRESH * texts, (MAX_CHAIN + 1) * texts * 2 * half)
        self.staged = zeros(self.parts[-1].stop, dtype=torch.int32)
        entries, self.fresh, rotations = (self.staged[part] for part in self.parts)
        self.rotations = rotations.view(torch.float32).view(new_rotations(texts, half, torch.device("meta")).shape)
        int32, self.padding = torch.int32, zeros(1, dtype=torch.int32)
        self.rows = TextRows(zeros(texts, dtype=int32), zeros(texts, 1, dtype=int32), zeros(texts, dtype=int32),
                             torch.arange(texts, dtype=int32, device=device), entries.view(torch.int64),
                             zeros(texts, shape.window, dtype=int32), zeros(texts, shape.window))
        self.normed, self.sums = torch.empty_like(self.forward.x), zeros(head.num_sums(texts))
        self.logits = zeros(texts, vocabulary)
        self.bests, self.best_ids = zeros(texts, blocks), zeros(texts, blocks, dtype=int32)
        self.scores = zeros(texts, blocks, shape.width, dtype=torch.float64)
        self.ids = zeros(texts, blocks, shape.width, dtype=int32)
        self.outcome, first = new_outcome(texts, device), stores[0]
        self.spare = CudaStore(device, first.dtype, first.element, first.heads, first.dim)  # of padding texts
        self.spare.reserve_drafts(1)

    def inputs(self, chains: Sequence[TextChain]) -> tuple[Tensor, Tensor]:
        """What `load` gets: of the forward, and of the chains as far as they go. A padding text has no places."""
        placed, staged = (np.zeros(len(part), dtype=np.int32) for part in (self.forward.staged, self.staged))
        self.forward.place_texts(placed, [(chain.stores.length, chain.stores.length) for chain in chains],
                                 [cuda_stores(chain.stores.stores) for chain in chains],
                                 [chain.stores.remainder for chain in chains], self.spare)
        placed[self.forward.parts[3]] = -1  # a row's parent is the last committed position
        parts = [staged[part] for part in self.parts]
        entries, fresh = parts[0].view(np.int64).reshape(-1, _ENTRY), parts[1].reshape(-1, MAX_FRESH)
        rotations = parts[2].view(np.float32).reshape(self.rotations.shape)
        entries[:, 0], entries[:, 1] = self.padding.data_ptr(), 1
        for text, chain in enumerate(chains):
            new, length = chain.new_tokens, chain.chooser.length + len(chain.fresh) + len(chain.path)
            fresh[text, : len(new)] = new
            entries[text] = entry_of(chain.chooser, chain.required, length, len(new))
            entries[text, 4:7] = 0, chain.places, chain.width
            entries[text].view(np.float64)[18] = chain.within
            for turn, part in enumerate(chain.rotations):
                rotations[: chain.places, text, turn] = part.numpy()
        most = max(chain.places for chain in chains)
        end = self.parts[2].start + most * rotations[0].size
        return torch.from_numpy(placed), torch.from_numpy(staged[:end])

    def load(self, placed: Tensor, staged: Tensor) -> None:
        """Set the state from which the chains begin: two copies and a launch."""
        self.forward.staged.copy_(placed, non_blocking=True)
        self.staged[: len(staged)].copy_(staged, non_blocking=True)
        append_tokens(self.rows.entries, self.fresh)


class SharedChains:
    """Chains of several texts with one model's weights."""

    def __init__(self, weights: DraftWeights) -> None:
        self._weights = weights
        self._buffers: RecentlyUsed[_Shape, _Buffers] = RecentlyUsed(_MAX_BUFFERS)

    def launch(self, chains: Sequence[TextChain]) -> list[Tensor]:
        """Launch the chains. Returns the outcome of each: [N, 18] int64, of its places (`drafting.ranked_places`)."""
        outcomes = []
        for first in range(0, len(chains), _MAX_TEXTS):
            some = chains[first : first + _MAX_TEXTS]
            outcome = self._launch(some)
            if len(chains) > _MAX_TEXTS:
                outcome = outcome.clone()  # the next ones may have the same memory
            outcomes += [outcome[: chain.places, text] for text, chain in enumerate(some)]
        return outcomes

    def _launch(self, given: Sequence[TextChain]) -> Tensor:
        """Launch chains that fit into one graph. Returns the outcome [places, T, 18]."""
        chains = [chain.prepared() for chain in given]
        decoder, graphs = chains[0].decoder, chains[0].decoder.ops.graphs
        stores = [cuda_stores(chain.stores.stores) for chain in chains]
        most = max(chain.places for chain in chains)
        require(most <= MAX_CHAIN, f"chains of at most {MAX_CHAIN} tokens", most)
        buffers = self._buffers_for(chains, stores)
        inputs = buffers.inputs(chains)
        bans = most_banned([(chain.chooser, chain.required) for chain in chains])
        graphs.own(buffers, buffers.serial)
        pieces = [(("chains", buffers.serial, size, bans),
                   partial(self._places, decoder, buffers, stores[0], size, bans)) for size in in_graphs(most)]
        with on_device(decoder.ops.device):
            graphs.run_in_turn(pieces, partial(buffers.load, *inputs))
        for chain in chains:
            chain.chooser.has_appended(len(chain.fresh))
        return buffers.outcome

    def _buffers_for(self, chains: Sequence[TextChain], stores: Sequence[Sequence[CudaStore]]) -> _Buffers:
        head, decoder = self._weights.head, chains[0].decoder
        assert isinstance(head, CudaLinear)
        room = padded_size(max(store.room for own in stores for store in own))
        width = max(2, *(chain.width for chain in chains))  # two show the lead
        has_remainder = any(chain.stores.remainder is not None for chain in chains)
        shape = _Shape(padded_size(len(chains), 2), room, longest_window([chain.chooser for chain in chains]), width,
                       has_remainder, stores[0][0].element)
        return self._buffers.get(shape, lambda: _Buffers(decoder, head, shape, stores[0]))

    def _places(self, decoder: DecoderOfLayers, buffers: _Buffers, stores: Sequence[CudaStore], count: int,
                bans: int) -> None:
        """`count` tokens of each text. The launches do not depend on the buffers' contents, as a graph requires."""
        for _ in range(count):
            self._place(decoder, buffers, stores, bans)

    def _place(self, decoder: DecoderOfLayers, buffers: _Buffers, stores: Sequence[CudaStore], bans: int) -> None:
        weights, geometry, forward, logits = self._weights, decoder.geometry, buffers.forward, buffers.logits
        embedding, head, entries = weights.embedding, weights.head, buffers.rows.entries
        assert isinstance(embedding, CudaLinear) and isinstance(head, CudaLinear)
        state, settings = entries[1:], entries.view(torch.float64)[13:]
        embed_place(buffers.fresh, state, embedding, weights.embedding_factor, buffers.rotations, forward.x_in,
                    forward.cos, forward.sin, _ENTRY)
        decoder.run_layers(forward, stores)
        LogitsSource(decoder.ops.graphs, decoder.ops.tile, weights.norm, geometry.eps, geometry.rounds_once, head,
                     weights.logits_divisor).launch(forward.x, buffers.normed, buffers.sums, logits)
        buffers.rows.edit(logits, bans)
        (rows, vocabulary), blocks = logits.shape, buffers.bests.shape[1]
        jit_choice.block_maxima_kernel[(rows, blocks)](logits, buffers.bests, buffers.best_ids, vocabulary, blocks,
                                                       BLOCK=BLOCK, **chained(logits.device))
        rank_rows(logits, buffers.bests, state, settings, (entries, entries, entries), buffers.scores, buffers.ids,
                  buffers.outcome, _ENTRY, HAS_NOISE=True, **_FILTERS)
        end_place(buffers.fresh, state, forward.where, buffers.outcome, _ENTRY)
