"""Chains: tokens drafted by forwards of a model, one behind the other.

What `tokenswift`, `magicdec`, `draft-model` and `triforce` share; they differ in who reads: the target itself
on a partial cache, or a smaller model on a cache of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from longdraft.cache.partial import PartialCache
from longdraft.core import Context
from longdraft.model.routine import Routine
from longdraft.model.transformer import Forward, ForwardRequest, Rows, Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.tree import Trie


class DraftModel(Protocol):
    """A model that reads the text and what is drafted behind it."""

    def read(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        """Logits [1, V] behind `path`: the last token of the text, then drafted ones. None: nothing to say yet."""


class Chain(NamedTuple):
    """How a chain grows. At most `width` guesses stand at each place and the chain follows the best; the others cost
    a row of verification each, no draft, and are made where the draft is unsure: where their score (`Sampler.rank`)
    is within `margin` of the best one's."""

    reader: DraftModel
    sampler: Sampler
    width: int
    source: str
    margin: float = math.inf

    def grow(self, trie: Trie, context: Context, path: Sequence[int], length: int) -> Routine[tuple[int, list[int]]]:
        """Add `length` tokens to a trie whose root is the end of `path`; the chain's last node, and the path to it."""
        node, path = 0, list(path)
        for _ in range(length):
            logits = yield from self.reader.read(context, path)
            guesses = [] if logits is None else self.sampler.rank(logits[0], context, path[1:], self.width,
                                                                    within=self.margin)
            if not guesses:
                break
            node, *_ = [trie.add(node, guess, self.source) for guess in guesses]
            path.append(guesses[0])
        return node, path


class SelfDraftModel:
    """The target on a partial cache. Each call reads the last token of `path`; what was read for those before it
    is in the cache until its `forget`."""

    def __init__(self, model: Transformer, cache: PartialCache) -> None:
        self._model = model
        self._cache = cache

    def read(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        return (yield from self.forward(context, path)).logits

    def forward(self, context: Context, path: Sequence[int]) -> Routine[Forward]:
        """The row of the last token of `path`, and its logits."""
        position = len(context) - 2 + len(path)
        result = yield ForwardRequest(self._model, Rows(path[-1:], [position], [-1]), self._cache, 1)
        self._cache.commit([0])
        return result
