"""Chains of drafts of one request on a device: whole chains in CUDA graphs, with or without those of other texts.

    a model         DraftChain   in `drafting`,     of several texts SharedChains in `shared_chain`
    trained layers  LayerChain   in `layer_chain`,                   SharedLayers in `shared_layers`
    heads           HeadPlaces   in `head_places`,                   SharedHeads  in `head_places`
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.chain_plan import (
    NEVER,
    ChainEnd,
    ChainPlan,
    DraftLayers,
    Heads,
    ModelLayers,
    Ranked,
    TrainedHeads,
    TrainedLayers,
)
from longdraft.kernels.cuda.chain_rows import TextDraft
from longdraft.kernels.cuda.choice import TokenChooser
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.drafting import (
    MAX_CHAINS,
    MAX_WIDTH,
    DraftChain,
    launch_chain,
    ranked_places,
    until_end,
)
from longdraft.kernels.cuda.head_places import HeadPlaces, SharedHeads, TextHeads
from longdraft.kernels.cuda.kv_store import cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed
from longdraft.kernels.cuda.layer_chain import LayerChain
from longdraft.kernels.cuda.layerwise import CudaLayerwiseDecoder
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.shared_chain import TextChain
from longdraft.kernels.cuda.shared_layers import SharedLayers, TextLayers
from longdraft.kernels.cuda.text_rows import can_share
from longdraft.kernels.interface import Kernels
from longdraft.kernels.launched import Launched, LaunchedWork, LaunchesTogether, Shareable
from longdraft.kernels.switches import is_on

DRAFTS_LAYERS = is_on("DRAFTS_LAYERS")  # False: trained layers, heads and small draft models are run from the host
SHARES_CHAINS = is_on("SHARES_CHAINS")  # False: each text's chain is drafted by its own graphs

# What drafts the chains of several texts: with these layers; with these heads, by whether they guess the first token.
_shared_layers: WeakKeyDictionary[DraftLayers, SharedLayers] = WeakKeyDictionary()
_shared_heads: WeakKeyDictionary[Heads, dict[bool, SharedHeads]] = WeakKeyDictionary()


class Text(Protocol):
    """The tokens of a text (`Context`)."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """The tokens [start, stop)."""


class RequestDrafts:
    """What drafts the chains of one request, and keeps their memory and graphs.

    chooser  of the request
    kernels  of the target
    """

    def __init__(self, chooser: TokenChooser, kernels: Kernels) -> None:
        self.chooser, self.kernels = chooser, kernels
        self.can_share = can_share(chooser.rules)
        self.chains: RecentlyUsed[object, DraftChain] = RecentlyUsed(MAX_CHAINS)
        self.layer_chain: tuple[object, LayerChain] | None = None
        self.heads: tuple[object, HeadPlaces] | None = None

    def update(self, text: Text) -> None:
        """Give the chooser the tokens of the text that it does not hold yet."""
        start = self.chooser.length
        if start < len(text):
            self.chooser.extend(text.slice(start, len(text)), start)


class DeviceRanker(NamedTuple):
    """See `Ranker`.

    width     guesses for each token at most
    within    largest gap between a guess's score and the best one's
    required  tokens that must still be written before the text may end
    """

    drafts: RequestDrafts
    text: Text
    width: int
    within: float
    required: int

    def draft(self, plan: ChainPlan, end: ChainEnd = NEVER) -> LaunchedWork[list[Ranked] | None]:
        """See `Ranker`. Unlike `Sampler.ranked`, it leaves out guesses that the filters remove."""
        if not self._supports(plan):
            return None
        if isinstance(plan.layers, ModelLayers):
            work = self._model_chain(plan, plan.layers)
        elif isinstance(plan.layers, TrainedLayers):
            work = self._layer_chain(plan, plan.layers)
        else:
            work = self._head_places(plan, plan.layers)
        yield work
        places = ranked_places(work.read())
        return places if isinstance(plan.layers, TrainedHeads) else until_end(places, end)

    def _supports(self, plan: ChainPlan) -> bool:
        """Whether graphs can hold a chain, and it pays to draft it by itself, or with those of other texts."""
        layers = plan.layers
        if self.width > MAX_WIDTH or (plan.shares_forwards and not self._shares_chains):
            return False
        if isinstance(layers, ModelLayers):
            can_run = isinstance(layers.decoder, CudaDecoder | CudaLayerwiseDecoder) and layers.decoder.drafts_chains
            writes_start = any(last is first for first, _, last in plan.stores.states)  # a capture runs the chain twice
            return can_run and not writes_start and (DRAFTS_LAYERS or not plan.is_smaller)
        # Kernels of a rank have a share of the weights.
        kernels = layers.kernels if isinstance(layers, TrainedLayers) else self.drafts.kernels
        return DRAFTS_LAYERS and isinstance(kernels, CudaOperations)

    @property
    def _shares_chains(self) -> bool:
        return SHARES_CHAINS and self.drafts.can_share

    def _model_chain(self, plan: ChainPlan, layers: ModelLayers) -> Launched:
        decoder, weights, stores = layers.decoder, layers.weights, plan.stores
        assert isinstance(decoder, CudaDecoder | CudaLayerwiseDecoder)
        for store in stores.stores:
            store.reserve(stores.length + plan.num_tokens + 1)
        part = TextChain(self._draft_of(plan), decoder, stores)
        cos, sin = plan.rotations

        def alone() -> Tensor:
            drafts, path = self._updated(), plan.path[1:]
            return launch_chain(decoder, weights, stores, drafts.chooser, drafts.chains, self.width, (cos, sin), path,
                                self.required - len(path), self.within)

        return self._work(lambda: decoder.shared_chains(weights, stores.remainder is not None), part, alone)

    def _layer_chain(self, plan: ChainPlan, trained: TrainedLayers) -> Launched:
        layers, ops, row, read = trained
        assert isinstance(ops, CudaOperations)
        stores = [*cuda_stores(plan.stores.stores), *(cuda_stores(read[:1]) if read else ())]
        part = TextLayers(self._draft_of(plan), layers, ops, layers.vocabulary, stores, read is not None, row,
                          plan.stores.length, read[1] if read else 0)

        def alone() -> Tensor:
            drafts, draft = self._updated(), part.draft
            key = (id(layers), self.width, *(store.serial for store in stores))
            if drafts.layer_chain is None or drafts.layer_chain[0] != key:
                chain = LayerChain(layers, ops, stores, part.has_read, drafts.chooser, part.vocabulary, self.width, row)
                drafts.layer_chain = key, chain
            cos, sin = plan.rotations
            return drafts.layer_chain[1].launch(row, part.length, part.num_read, (cos, sin), draft.required,
                                                draft.within)

        return self._work(lambda: _shared_layers.setdefault(layers, SharedLayers()), part, alone)

    def _head_places(self, plan: ChainPlan, trained: TrainedHeads) -> Launched:
        (heads, row, first), kernels = trained, self.drafts.kernels
        assert isinstance(kernels, CudaOperations)
        part = TextHeads(self._draft_of(plan), heads, kernels.graphs, heads.vocabulary, row, first)

        def alone() -> Tensor:
            drafts, draft, key = self._updated(), part.draft, (id(heads), self.width)
            if drafts.heads is None or drafts.heads[0] != key:
                drafts.heads = key, HeadPlaces(heads, part.graphs, drafts.chooser, part.vocabulary, self.width, row)
            return drafts.heads[1].launch(row, first, plan.num_tokens, draft.path, draft.required)

        by_first = partial(_shared_heads.setdefault, heads, {})
        return self._work(lambda: by_first().setdefault(first is None, SharedHeads()), part, alone)

    def _work(self, shared: Callable[[], LaunchesTogether], part: Any, alone: Callable[[], Tensor]) -> Launched:
        """The work of a chain. shared: returns what launches it together with other texts'"""
        return Shareable(shared(), part, alone) if self._shares_chains else Launched(alone())

    def _draft_of(self, plan: ChainPlan) -> TextDraft:
        drafted, chooser = plan.path[1:], self.drafts.chooser
        return TextDraft(chooser, self.text.slice(chooser.length, len(self.text)), drafted, plan.num_tokens, self.width,
                         self.required - len(drafted), self.within, plan.rotations)

    def _updated(self) -> RequestDrafts:
        self.drafts.update(self.text)
        return self.drafts
