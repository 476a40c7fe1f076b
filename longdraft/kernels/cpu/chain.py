"""Chains of drafts in the compiled module (csrc/draft.h): a whole chain in one call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from longdraft.kernels.chain_plan import (
    NEVER,
    ChainEnd,
    ChainPlan,
    ModelLayers,
    Ranked,
    ReadsUnreadRows,
    TrainedLayers,
)
from longdraft.kernels.cpu.decoder import CpuDecoder
from longdraft.kernels.cpu.store import CpuLinear, native_stores
from longdraft.kernels.launched import HostWork, LaunchedWork
from longdraft.kernels.weights import Linear

with suppress(ImportError):  # chains go step by step instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu


class CompiledRanker(NamedTuple):
    """See `Ranker`.

    choice        the request's compiled sampler, up to date with the text
    length        tokens of the text
    width         guesses for each token at most
    within        largest gap between a guess's score and the best one's
    banned_depth  tokens before this one may not be ends of the text
    """

    choice: _cpu.Choice
    length: int
    width: int
    within: float
    banned_depth: int

    def draft(self, plan: ChainPlan, end: ChainEnd = NEVER) -> LaunchedWork[list[Ranked] | None]:
        """See `Ranker`."""
        if not supports(plan):
            return None
        chain = self._chain(plan, end)
        work = HostWork(_chains_apart(chain.kernels.name), chain, chain.draft)
        yield work
        ranked: list[Ranked] = work.read()
        return ranked

    def _chain(self, plan: ChainPlan, end: ChainEnd) -> NativeChain:
        layers, cache = _model_layers(plan), plan.stores
        assert layers and isinstance(layers.decoder, CpuDecoder)
        decoder, model = layers.decoder, _models.get(layers)
        if model is None:
            model = _models[layers] = _native_model(layers)
        cos, sin = (part.contiguous() for part in plan.rotations)
        tapped, taps = cache.taps or ((), None)
        trained = plan.layers if isinstance(plan.layers, TrainedLayers) else None
        unread = _unread(trained) if trained and trained.unread else None
        chain = _cpu.Chain(
            model=model, stores=native_stores(decoder.dtype, cache.stores, len(cache.stores)), length=cache.length,
            remainder=cache.remainder, states=cache.states, choice=self.choice,
            position=self.length + len(plan.path) - 1, width=self.width, within=self.within,
            banned_depth=self.banned_depth, end=end, path=plan.path, cos=cos, sin=sin,
            tapped=tapped, taps=taps, row=trained.row if trained else None, unread=unread, count=plan.num_tokens)
        return NativeChain(decoder.kernels, chain, (layers, plan, self.choice, cos, sin, unread))


def _unread(trained: TrainedLayers) -> tuple[Sequence[int], Tensor, Tensor, Tensor]:
    """The rows that are read before, as the compiled module takes them: their rows have moved already."""
    layers, unread = cast(ReadsUnreadRows, trained.layers), trained.unread
    assert unread is not None and not unread.moves
    cos, sin = (part.contiguous() for part in unread.rotations)
    return unread.tokens, layers.fuse(unread.states), cos, sin


_models: WeakKeyDictionary[ModelLayers, _cpu.DraftModel] = WeakKeyDictionary()


def _native_model(layers: ModelLayers) -> _cpu.DraftModel:
    """The model as the compiled module reads it, where it is."""
    decoder, weights = layers.decoder, layers.weights
    inputs, feedback = weights.inputs, weights.feedback
    assert isinstance(decoder, CpuDecoder)
    embedding, head, *others = [part.native for part in _tables(layers) if isinstance(part, CpuLinear)]
    return _cpu.DraftModel(
        decoder=decoder.native, embedding=embedding, head=head, norm=weights.norm,
        embedding_factor=weights.embedding_factor, logits_divisor=weights.logits_divisor,
        logits_cap=weights.logits_cap, part=None if weights.part is None else weights.part.native,
        inputs=None if inputs is None else (others[0], others[1]),
        input_norm=None if inputs is None else inputs.norm,
        input_factors=() if inputs is None else inputs.factors(embedding.k, decoder.dtype),
        feedback=None if feedback is None else (others[0] if feedback.joined else None, *feedback[1:]))


def supports(plan: ChainPlan) -> bool:
    """Whether the compiled module can draft a chain, and it pays to draft it by itself."""
    layers = None if plan.shares_forwards else _model_layers(plan)
    if layers is None or not isinstance(layers.decoder, CpuDecoder):
        return False
    return all(isinstance(table, CpuLinear) for table in _tables(layers))


def _model_layers(plan: ChainPlan) -> ModelLayers | None:
    """What computes the logits; None: something else than the layers of a decoder."""
    layers = plan.layers
    if isinstance(layers, TrainedLayers):
        return None if layers.read else layers.layers.model_layers
    return layers if isinstance(layers, ModelLayers) else None


def _tables(layers: ModelLayers) -> list[Linear]:
    """The matrices besides those of the layers: embedding, head, and those of the layers' inputs or of the feedback."""
    weights, feedback = layers.weights, layers.weights.feedback
    joined = [feedback.joined] if feedback and feedback.joined else []
    return [weights.embedding, weights.head, *(weights.inputs[:2] if weights.inputs else ()), *joined]


class NativeChain(NamedTuple):
    """A chain as the compiled module takes it, which refers to `held`."""

    kernels: _cpu.Kernels
    chain: _cpu.Chain
    held: object

    def draft(self) -> list[Ranked]:
        """On all threads."""
        return [Ranked(*each) for each in self.kernels.draft(self.chain)]


class ChainsApart:
    """Drafts the chains of several texts at the same time. Each chain has one thread: threads that share the small
    products of one chain wait for each other more than they compute."""

    def launch(self, parts: Sequence[NativeChain]) -> list[list[Ranked]]:
        chains = parts[0].kernels.draft_apart([part.chain for part in parts])
        return [[Ranked(*each) for each in chain] for chain in chains]


@cache
def _chains_apart(variant: str) -> ChainsApart:
    """The same for all texts that one variant of the kernels computes: their weights are packed for it."""
    return ChainsApart()
