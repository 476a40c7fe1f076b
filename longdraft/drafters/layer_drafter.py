"""The common parts of the drafters of trained layers that read the text, with suffix guesses beside them.

    ChainDrafter   a chain, token by token: `glide` and `eagle`, which differ in the `DraftModel` of the chain
    SlotDrafter    the likeliest tree of guesses that are made in one pass, by a `SlotModel`: `block`, and `eagle` with
                   a head of P-EAGLE
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from longdraft.drafters.chain import Chain, DraftModel
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.marginal_tree import MarginalTrees, Slot
from longdraft.drafters.options import ChainOptions
from longdraft.drafters.suffix import SuffixMatcher, SuffixOptions
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine


class Rotate(Protocol):
    """cos and sin [R, D / 2] float32 of positions; see `Transformer.rotations`."""

    def __call__(self, positions: Sequence[int], on_host: bool = False) -> tuple[Tensor, Tensor]: ...


def rotations_after(rotate: Rotate, position: int, length: int) -> tuple[Tensor, Tensor]:
    """The rotations of a plan's rows: those of `length` tokens but the last, the first of them at `position`."""
    cos, sin = rotate(range(position, position + max(1, length - 1)), on_host=True)
    return cos[: length - 1], sin[: length - 1]


class ReadsRows(Protocol):
    """Trained layers with the rows of the text that they have read."""

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""


class LayerDrafter(ABC):
    """Drafts with trained layers, and adds what followed the longest suffix of the text after the root.

    has_suffix  whether suffix guesses are added
    """

    def __init__(self, layers: ReadsRows, has_suffix: bool, params: SamplingParams) -> None:
        self._layers = layers
        self._suffix = SuffixMatcher(SuffixOptions(), params) if has_suffix else None

    @property
    def nbytes(self) -> int:
        return self._layers.nbytes + (self._suffix.nbytes if self._suffix else 0)

    def inherit(self, earlier: LayerDrafter, num_retracted: int) -> None:
        self._suffix = earlier._suffix

    def begin(self, context: Context, verified: Verified | None) -> None:
        if self._suffix:
            self._suffix.update(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = yield from self._draft(context, max_depth)
        if self._suffix:
            self._suffix.add_matches(trie, 0, context, (), max_depth)
        return trie.tree()

    @abstractmethod
    def _draft(self, context: Context, max_depth: int) -> Routine[Trie]:
        """The guesses of the layers."""

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.begin(context, accepted.verified)


class ChainModel(ReadsRows, DraftModel, Protocol):
    """Trained layers that guess one token after the other."""


class SlotModel(ReadsRows, Protocol):
    """Trained layers that guess the tokens of several places in one pass."""

    def learn(self, verified: Verified) -> None:
        """The target's results for rows that are now part of the text."""

    def slots(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[list[Slot]]:
        """The candidates of the places after `path`: the last token of the text, then drafted tokens. They are
        `max_depth` at most, 1 or more; none while the state of the last row is not known."""


class ChainDrafter(LayerDrafter):
    """Drafts a chain.

    source  name of the guesses in the statistics
    """

    def __init__(self, draft_model: ChainModel, source: str, options: ChainOptions, sampler: Sampler,
                 params: SamplingParams) -> None:
        super().__init__(draft_model, options.suffix, params)
        self._length = options.chain
        self.confidence = Confidence()
        self._chain = Chain(draft_model, sampler, options.width, source, options.margin, self.confidence)

    def _draft(self, context: Context, max_depth: int) -> Routine[Trie]:
        trie = Trie(context.last)
        yield from self._chain.draft(trie, context, [context.last], min(self._length, max_depth))
        return trie

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.confidence.learn(accepted.tokens)
        super().observe(context, accepted)


class SlotDrafter(LayerDrafter):
    """Drafts the likeliest tree of the candidates of all places.

    source  name of the guesses in the statistics
    nodes   guesses of the tree at most
    """

    def __init__(self, draft_model: SlotModel, source: str, nodes: int, has_suffix: bool,
                 params: SamplingParams) -> None:
        super().__init__(draft_model, has_suffix, params)
        self._draft_model = draft_model
        self._num_nodes = nodes
        self._trees = MarginalTrees(source)

    def begin(self, context: Context, verified: Verified | None) -> None:
        super().begin(context, verified)
        if verified:
            self._draft_model.learn(verified)

    def _draft(self, context: Context, max_depth: int) -> Routine[Trie]:
        slots = (yield from self._draft_model.slots(context, [context.last], max_depth)) if max_depth else []
        return Trie.of(self._trees.grow(context.last, slots, self._num_nodes))

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._trees.learn(accepted.tokens)
        super().observe(context, accepted)
