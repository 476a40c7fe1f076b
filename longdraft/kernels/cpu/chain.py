"""Chains of drafts in the compiled module (csrc/draft.h): a whole chain in one call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from longdraft.kernels.chain_plan import NEVER, ChainEnd, ChainPlan, ModelLayers, Ranked
from longdraft.kernels.cpu.decoder import CpuDecoder
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.launched import HostWork, LaunchedWork

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
        layers = plan.layers
        assert isinstance(layers, ModelLayers) and isinstance(layers.decoder, CpuDecoder)
        decoder, weights, cache = layers.decoder, layers.weights, plan.stores
        embedding, head, inputs = weights.embedding, weights.head, weights.inputs
        assert isinstance(embedding, CpuLinear) and isinstance(head, CpuLinear)
        cos, sin = (part.contiguous() for part in plan.rotations)
        stores, remainders = decoder.draft_arguments(cache.stores, cache.length, cache.remainder, cos, sin)
        chain = _cpu.chain(
            decoder.native, embedding.native, head.native, weights.norm.data_ptr(), weights.embedding_factor,
            weights.logits_divisor, weights.logits_cap, stores, cache.length, remainders,
            decoder.chain_arguments(cache.states), self.choice, len(cos), self.length + len(plan.path) - 1,
            self.width, self.within, self.banned_depth, *end, plan.path[0], plan.path[1:], cos.data_ptr(),
            sin.data_ptr(), None if weights.part is None else weights.part.native,
            [part.native for part in inputs[:2] if isinstance(part, CpuLinear)] if inputs else [],
            0 if inputs is None else decoder.checked_norm(inputs.norm).data_ptr(),
            inputs.factors(embedding.native.k, decoder.dtype) if inputs else [])
        return NativeChain(decoder.kernels, chain, (decoder, weights, cache, self.choice, cos, sin))


def supports(plan: ChainPlan) -> bool:
    """Whether the compiled module can draft a chain, and it pays to draft it by itself."""
    layers = plan.layers
    if plan.shares_forwards or not isinstance(layers, ModelLayers) or not isinstance(layers.decoder, CpuDecoder):
        return False
    inputs = layers.weights.inputs
    tables = [layers.weights.embedding, layers.weights.head, *(inputs[:2] if inputs else ())]
    return {type(table) for table in tables} == {CpuLinear}


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
