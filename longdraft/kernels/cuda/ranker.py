"""Chains of drafts on a device: whole chains in CUDA graphs, those of one text or of several (see `chain_rows`)."""

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
    PairScores,
    PlaceRows,
    Ranked,
    TrainedHeads,
    TrainedLayers,
)
from longdraft.kernels.cuda.chain_rows import MAX_WIDTH, Chains, TextDraft, ranked_places
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.device_text import DeviceText
from longdraft.kernels.cuda.head_places import GivenLogits, HeadPlaces, PairPlaces, TextHeads, TextLogits, TextPairs
from longdraft.kernels.cuda.kv_store import cuda_stores
from longdraft.kernels.cuda.launch import RecentlyUsed
from longdraft.kernels.cuda.layer_chain import LayerChains, TextLayers
from longdraft.kernels.cuda.model_chain import MOST_TAPPED, ModelChains, TextChain
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.cuda.text_rows import can_share
from longdraft.kernels.interface import Kernels
from longdraft.kernels.launched import Launched, LaunchedWork, LaunchesTogether, Shareable
from longdraft.kernels.switches import is_on

DRAFTS_LAYERS = is_on("DRAFTS_LAYERS")  # False: trained layers, heads and small draft models are run from the host
SHARES_CHAINS = is_on("SHARES_CHAINS")  # False: each text's chain is drafted by its own graphs

_MAX_PLACES = 32  # kinds of places of all requests: each number of unknown tokens in front of them is one
_MAX_CHAINS = 4  # of one request: the models, layers and heads with which it drafts in turn

# What drafts the chains of several texts: with these layers; with these heads, by whether they guess the first token;
# places whose logits are there.
_shared_layers: WeakKeyDictionary[DraftLayers, LayerChains] = WeakKeyDictionary()
_shared_heads: WeakKeyDictionary[Heads, dict[bool, HeadPlaces]] = WeakKeyDictionary()
_shared_places: WeakKeyDictionary[Kernels, RecentlyUsed[object, Chains[Any, Any]]] = WeakKeyDictionary()


class Text(Protocol):
    """The tokens of a text (`Context`)."""

    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """The tokens [start, stop)."""


class RequestDrafts:
    """What drafts the chains of one request, and keeps their memory and graphs.

    held     the request's tokens and rules on the device
    kernels  of the target
    """

    def __init__(self, held: DeviceText, kernels: Kernels) -> None:
        self.held, self.kernels = held, kernels
        self.can_share = can_share(held.rules)
        self._chains: RecentlyUsed[object, Chains[Any, Any]] = RecentlyUsed(_MAX_CHAINS)

    def chains(self, key: object, make: Callable[[], Chains[Any, Any]]) -> Chains[Any, Any]:
        """The request's own chains with what `key` names; graphs of theirs read this request's memory only."""
        return self._chains.get(key, make)

    def update(self, text: Text) -> None:
        """Upload the tokens of the text that the device does not hold yet."""
        start = self.held.length
        if start < len(text):
            self.held.extend(text.slice(start, len(text)), start)

    def ranked(self, draft: TextDraft, logits: Tensor, ahead: int) -> LaunchedWork[Tensor]:
        """The guesses of logits [P, V] float32 of P places, as [P, 34] on the host: see `ranked_places`. Logits of
        several places are ranked together with those of other texts.

        ahead  unknown tokens between the text and the first place
        """
        assert isinstance(self.kernels, CudaOperations)
        part = TextLogits(draft, self.kernels.graphs, logits)
        return (yield from self._places(part, ("logits", ahead), lambda: GivenLogits(ahead), len(logits) > 1))

    def paired(self, draft: TextDraft, places: PlaceRows, pairs: PairScores, before: int, ahead: int
               ) -> LaunchedWork[Tensor]:
        """The guesses of places whose logits depend on the token before: see `scored_pairs`. before: the first one's"""
        assert isinstance(self.kernels, CudaOperations)
        part = TextPairs(draft, self.kernels.graphs, places, before, pairs)
        return (yield from self._places(part, (pairs, ahead), lambda: PairPlaces(ahead)))

    def _places(self, part: Any, key: object, make: Callable[[], Chains[Any, Any]], shares: bool = True
                ) -> LaunchedWork[Tensor]:
        """Launch and read the guesses of a text's places, with those of other texts where it `shares`."""
        if shares and SHARES_CHAINS and self.can_share:
            places = _shared_places.setdefault(self.kernels, RecentlyUsed(_MAX_PLACES)).get(key, make)
            work: Launched = Shareable(places, part, lambda: places.launch([part])[0])
        else:
            work = Launched(self.chains(key, make).launch([part])[0])
        yield work
        return work.read()


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
        return places if isinstance(plan.layers, TrainedHeads) else _until_end(places, end)

    def _supports(self, plan: ChainPlan) -> bool:
        """Whether graphs can hold a chain, and it pays to draft it by itself, or with those of other texts."""
        layers = plan.layers
        if self.width > MAX_WIDTH or (plan.shares_forwards and not self._shares_chains):
            return False
        if isinstance(layers, ModelLayers):
            can_run = isinstance(layers.decoder, CudaDecoder) and layers.decoder.can_capture
            writes_start = any(last is first for first, _, last in plan.stores.states)  # a capture runs the chain twice
            keeps_taps = plan.stores.taps is None or plan.num_tokens <= MOST_TAPPED
            return can_run and not writes_start and keeps_taps and (DRAFTS_LAYERS or not plan.is_smaller)
        # Kernels of a rank have a share of the weights.
        kernels = layers.kernels if isinstance(layers, TrainedLayers) else self.drafts.kernels
        return DRAFTS_LAYERS and isinstance(kernels, CudaOperations)

    @property
    def _shares_chains(self) -> bool:
        return SHARES_CHAINS and self.drafts.can_share

    def _model_chain(self, plan: ChainPlan, layers: ModelLayers) -> Launched:
        decoder, weights, stores = layers.decoder, layers.weights, plan.stores
        assert isinstance(decoder, CudaDecoder)
        for store in stores.stores:
            store.reserve(stores.length + plan.num_tokens + 1)
        part = TextChain(self._draft_of(plan), decoder, stores)
        shared = None if stores.taps else partial(decoder.model_chains, weights, stores.remainder is not None)
        return self._work(part, shared, (id(decoder), id(weights.head)), lambda: ModelChains(weights))

    def _layer_chain(self, plan: ChainPlan, trained: TrainedLayers) -> Launched:
        layers, ops, row, read, unread = trained
        assert isinstance(ops, CudaOperations)
        stores = [*cuda_stores(plan.stores.stores), *(cuda_stores(read[:1]) if read else ())]
        part = TextLayers(self._draft_of(plan), layers, ops, layers.vocabulary, stores, read is not None, row,
                          plan.stores.length, read[1] if read else 0, unread)
        return self._work(part, lambda: _shared_layers.setdefault(layers, LayerChains()), id(layers), LayerChains)

    def _head_places(self, plan: ChainPlan, trained: TrainedHeads) -> Launched:
        (heads, row, first), kernels = trained, self.drafts.kernels
        assert isinstance(kernels, CudaOperations)
        part = TextHeads(self._draft_of(plan), heads, kernels.graphs, heads.vocabulary, row, first)
        by_first = partial(_shared_heads.setdefault, heads, {})
        return self._work(part, lambda: by_first().setdefault(first is None, HeadPlaces()),
                          (id(heads), first is None), HeadPlaces)

    def _work(self, part: Any, shared: Callable[[], LaunchesTogether] | None, key: object,
              own: Callable[[], Chains[Any, Any]]) -> Launched:
        """The work of a chain.

        shared    returns what launches it together with other texts'; None: nothing does
        key, own  see `RequestDrafts.chains`
        """
        def alone() -> Tensor:
            return self.drafts.chains(key, own).launch([part])[0]

        return Shareable(shared(), part, alone) if shared and self._shares_chains else Launched(alone())

    def _draft_of(self, plan: ChainPlan) -> TextDraft:
        drafted, held = plan.path[1:], self.drafts.held
        return TextDraft(held, held.length, self.text.slice(held.length, len(self.text)), drafted, plan.num_tokens,
                         self.width, self.required - len(drafted), self.within, plan.rotations)


def _until_end(places: list[Ranked], end: ChainEnd) -> list[Ranked]:
    """The places up to the first without a guess, and as far as `end` lets a chain go."""
    kept: list[Ranked] = []
    reached = 1.0
    for place in places:
        if reached < end.least:
            break
        kept.append(place)
        if not place.tokens:
            break
        reached *= end.rate(place.lead)
    return kept
