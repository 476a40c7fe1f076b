"""A whole chain of draft tokens in one call of the compiled module (csrc/draft.h).

The step-by-step chain in longdraft/drafters/chain.py gives the same tokens, bit for bit. Between two tokens it returns
to Python, which takes longer than the arithmetic of a small model.

The chains of several texts of a batch are drafted at the same time, each on one thread (`ChainsApart`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cpu.decoder import CpuDecoder
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import Decoder, Kernels, KVStore, RemainderMaps
from longdraft.kernels.launched import HostWork, LaunchedWork
from longdraft.kernels.layer_inputs import LayerInputs
from longdraft.kernels.weights import Linear

with suppress(ImportError):
    from longdraft.kernels.cpu import _cpu


class PartOfVocabulary:
    """Some tokens of a vocabulary, and a head that gives logits of these alone.

    ids   [N] int64, ascending
    head  the rows of a model's head for these tokens: [N, hidden], packed
    """

    def __init__(self, kernels: CpuKernels, head: CpuLinear, ids: Tensor) -> None:
        """The rows `ids` of a whole head. They are copied."""
        tokens, self.ids, self._size = ids.tolist(), ids, head.out_features
        self.head = CpuLinear(kernels.native.take_rows(head.native, tokens))
        self.native = _cpu.PartOfVocabulary(tokens, self._size)

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + self.ids.nbytes + self._size * 4  # the place of each token

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [R, N] of these tokens in a row of the whole vocabulary [R, V]: -inf elsewhere."""
        row = logits.new_full((len(logits), self._size), -torch.inf)
        row[:, self.ids] = logits
        return row


class DraftWeights(NamedTuple):
    """The parts of a draft model besides its layers. The norm [hidden] is the one before the head.

    embedding_factor  multiplies the embeddings
    logits_cap        soft cap of the logits; 0: none
    part              the tokens of the head's rows; None: the whole vocabulary
    inputs            of the layers, besides the embedding; None: they have none
    """

    embedding: Linear
    norm: Tensor
    head: Linear
    logits_divisor: float
    part: PartOfVocabulary | None = None
    embedding_factor: float = 1.0
    logits_cap: float = 0.0
    inputs: LayerInputs | None = None


class DraftStores(NamedTuple):
    """The rows that a chain continues: `length` positions of each layer's store. Drafted rows are written after them.

    remainder  as in `LayersKV`
    states     for each delta layer: the state that the chain continues, and two that its rows write to in turn. The
               chain's first row writes to the first of them
    """

    stores: Sequence[KVStore]
    length: int
    remainder: RemainderMaps
    states: Sequence[tuple[DeltaState, DeltaState, DeltaState]] = ()


class Ranked(NamedTuple):
    """Guesses for one place, best first.

    lead  how far the best guess's score is ahead of the next token's that the filters leave; inf if they leave one.
          The smaller it is, the likelier does the target choose another token than the drafter's best guess
    """

    tokens: list[int]
    lead: float


class ChainEnd(NamedTuple):
    """When a chain ends early: as soon as P(all its tokens become text) is below `least`.

    edges  ascending leads
    rates  len(edges) + 1 probabilities: rates[i] of a token with edges[i - 1] <= lead < edges[i]
    """

    edges: tuple[float, ...]
    rates: tuple[float, ...]
    least: float

    def rate(self, lead: float) -> float:
        """P(a token with this lead is right)."""
        return self.rates[bisect_right(self.edges, lead)]


NEVER = ChainEnd((), (1.0,), 0.0)  # chains of full length


class Ranking(NamedTuple):
    """How the guesses of a chain are ranked.

    choice        the request's compiled sampler, up to date with the text
    width         guesses at each place at most
    within        largest gap between a guess's score and the best one's
    banned_depth  places before this one may not be ends of the text
    """

    choice: _cpu.Choice
    width: int
    within: float
    banned_depth: int


def can_part(kernels: Kernels, head: Linear) -> bool:
    """Whether `part_of_vocabulary` can take rows of this head."""
    return isinstance(kernels, CpuKernels) and isinstance(head, CpuLinear) and not head.native.is_grouped


def part_of_vocabulary(kernels: Kernels, head: Linear, ids: Tensor) -> PartOfVocabulary:
    """The tokens `ids` [N] int64, ascending, of a head's vocabulary."""
    assert isinstance(kernels, CpuKernels) and isinstance(head, CpuLinear)
    return PartOfVocabulary(kernels, head, ids)


def supports(kernels: Kernels, decoder: Decoder, weights: DraftWeights) -> bool:
    """Whether `draft_chain` can draft with this model."""
    tables = [weights.embedding, weights.head, *(weights.inputs[:2] if weights.inputs else ())]
    return (isinstance(kernels, CpuKernels) and isinstance(decoder, CpuDecoder)
            and {type(table) for table in tables} == {CpuLinear})


class NativeChain(NamedTuple):
    """A chain as the compiled module takes it, which refers to `held`."""

    kernels: _cpu.Kernels
    chain: _cpu.Chain
    held: object

    def draft(self) -> list[Ranked]:
        """On all threads."""
        return [Ranked(*place) for place in self.kernels.draft(self.chain)]


class ChainsApart:
    """Drafts the chains of several texts at the same time. Each chain has one thread: threads that share the small
    products of one chain wait for each other more than they compute."""

    def launch(self, parts: Sequence[NativeChain]) -> list[list[Ranked]]:
        found = parts[0].kernels.draft_apart([part.chain for part in parts])
        return [[Ranked(*place) for place in places] for places in found]


@cache
def _chains_apart(variant: str) -> ChainsApart:
    """The same for all texts that one variant of the kernels computes: their weights are packed for it."""
    return ChainsApart()


def draft_chain(kernels: Kernels, decoder: Decoder, weights: DraftWeights, cache: DraftStores, ranking: Ranking,
                end: ChainEnd, root: int, path: Sequence[int], rotations: tuple[Tensor, Tensor],
                position: int) -> LaunchedWork[list[Ranked]]:
    """Draft a token for each row of `rotations`, or fewer if `end` says so.

    root       the last token of the text
    path       drafted tokens after it, which the chain continues
    rotations  cos, sin [N, D / 2] float32 of the N rows
    position   of the first drafted token in the text

    Returns the guesses for each place; the chain follows the best. The last place has none where logits are not finite.
    One row for each place was written to the stores.
    """
    assert isinstance(kernels, CpuKernels) and isinstance(decoder, CpuDecoder)
    embedding, head = weights.embedding, weights.head
    assert isinstance(embedding, CpuLinear) and isinstance(head, CpuLinear)
    cos, sin = (part.contiguous() for part in rotations)
    stores, remainders = decoder.draft_arguments(cache.stores, cache.length, cache.remainder, cos, sin)
    inputs = weights.inputs
    chain = _cpu.chain(
        decoder.native, embedding.native, head.native, weights.norm.data_ptr(), weights.embedding_factor,
        weights.logits_divisor, weights.logits_cap, stores, cache.length, remainders,
        decoder.chain_arguments(cache.states), ranking.choice, len(cos), position,
        ranking.width, ranking.within, ranking.banned_depth, *end, root, path, cos.data_ptr(), sin.data_ptr(),
        None if weights.part is None else weights.part.native,
        [part.native for part in inputs[:2] if isinstance(part, CpuLinear)] if inputs else [],
        0 if inputs is None else decoder.checked_norm(inputs.norm).data_ptr(),
        inputs.factors(embedding.native.k, kernels.dtype) if inputs else [])
    native = NativeChain(kernels.native, chain, (decoder, weights, cache, ranking, cos, sin))
    work = HostWork(_chains_apart(kernels.native.name), native, native.draft)
    yield work
    places: list[Ranked] = work.read()
    return places
