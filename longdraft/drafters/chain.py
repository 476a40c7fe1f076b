"""Draft chains: a model drafts one token after the other, each with a forward.

`tokenswift`, `magicdec`, `draft-model`, `glide`, `eagle` and `triforce` draft chains. They differ in the model that
drafts: the target itself on a partial KV cache, a smaller model with a cache of its own, or a trained layer.

    root ─┬─ best ─┬─ best ── best        width 2: the chain continues with the best guess of each place;
          └─ next  └─ next                a second guess is added where its score is within `margin` of the best one's
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from longdraft.cache.partial import PartialCache
from longdraft.drafters.auto.confidence import Confidence
from longdraft.drafters.draft_vocabulary import DraftVocabulary
from longdraft.kernels.launched import LaunchedWork
from longdraft.kernels.native_draft import NEVER, ChainEnd, Ranked
from longdraft.model.transformer import Forward, ForwardRequest, Rows, Transformer
from longdraft.request.context import Context
from longdraft.request.tree import Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import CostClock, Routine


class DraftModel(Protocol):
    """A model that gives logits after the text and drafted tokens."""

    def next_logits(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        """Logits [1, V] after `path`: the last token of the text, then drafted tokens. None: the model is still
        reading the text, and drafts nothing in this step."""

    def draft_natively(self, context: Context, path: Sequence[int], length: int, sampler: Sampler, width: int,
                       margin: float, end: ChainEnd) -> LaunchedWork[list[Ranked] | None]:
        """The guesses of a chain after `path`, place by place, in one call. None where that is not possible: see
        `Chain._step_by_step`, which gives the same guesses."""


class Chain(NamedTuple):
    """How a chain is drafted.

    draft_model  the model whose logits are ranked
    sampler      ranks guesses with the target's noise (`Sampler.rank`)
    width        guesses at each place at most; each costs a row of verification, only the best one costs a forward
    source       name of the guesses in the statistics
    margin       largest gap between a further guess's score and the best one's, in nats
    confidence   says where chains end; None: they have the length that is asked for
    """

    draft_model: DraftModel
    sampler: Sampler
    width: int
    source: str
    margin: float = math.inf
    confidence: Confidence | None = None

    def draft(self, trie: Trie, context: Context, path: Sequence[int], length: int) -> Routine[tuple[int, list[int]]]:
        """Add a chain of up to `length` tokens to a trie whose root is the last token of `path`.

        Returns the chain's last node, and `path` with the chain's tokens. The chain is shorter where the model has no
        guess, and where `confidence` ends it.
        """
        node, path, end = 0, list(path), self.confidence.end() if self.confidence else NEVER
        places = yield from self.draft_model.draft_natively(context, path, length, self.sampler, self.width,
                                                            self.margin, end)
        if places is None:
            places = yield from self._step_by_step(context, path, length, end)
        best, leads = list[int](), list[float]()
        for tokens, lead in places:
            parent = node
            for place, token in enumerate(tokens):
                child = trie.add(parent, token, self.source)
                if place == 0:
                    node = child
                    best.append(token)
            leads.append(lead)
        if self.confidence:
            self.confidence.expect(best, leads)
        return node, path + best

    def _step_by_step(self, context: Context, path: Sequence[int], length: int, end: ChainEnd
                      ) -> Routine[list[Ranked]]:
        """The guesses of a chain after `path`, place by place, with a forward of the draft model for each."""
        places: list[Ranked] = []
        path, reached = list(path), 1.0  # P(all tokens so far become text)
        while len(places) < length and reached >= end.least:
            logits = yield from self.draft_model.next_logits(context, path)
            if logits is None:
                break
            places.append((yield from self.sampler.rank_later(logits[0], context, path[1:], self.width,
                                                              within=self.margin)))
            if not places[-1].tokens:
                break
            path.append(places[-1].tokens[0])
            reached *= end.rate(places[-1].lead)
        return places


_SMALL_BYTES = 16 << 20  # of weights that processors' caches hold: texts gain little by reading them together


class SelfDraftModel:
    """The target on a partial cache. Each call computes the row of the last token of `path`; the rows of the tokens
    before it are in the cache until `PartialCache.drop_drafts`."""

    def __init__(self, model: Transformer, cache: PartialCache, clock: CostClock | None = None,
                 vocabulary: DraftVocabulary | None = None) -> None:
        """clock: of the request; None: the request runs alone. vocabulary: the tokens that are guessed; None: all."""
        self._whole_model = model
        self._cache = cache
        self._clock = clock
        self._vocabulary = vocabulary
        self._is_small = model.weights_bytes <= _SMALL_BYTES

    @property
    def _drafts_alone(self) -> bool:
        """Whether drafts of this request share no forwards with those of others: there are none, or the weights are so
        small that to read them together gains less than one call for the whole chain."""
        return self._is_small or self._clock is None or self._clock.batch_size == 1

    def _model(self, context: Context) -> Transformer:
        """The model that drafts now. Where requests share forwards, it is the one with the whole vocabulary."""
        return self._vocabulary.model(context) if self._vocabulary and self._drafts_alone else self._whole_model

    def draft_natively(self, context: Context, path: Sequence[int], length: int, sampler: Sampler, width: int,
                       margin: float, end: ChainEnd) -> LaunchedWork[list[Ranked] | None]:
        """The guesses of a chain after `path`, place by place, drafted in one call. None where that is not possible,
        or where requests share the forwards of their drafts, which read the weights once for all. A device reads them
        once for the chains of all requests."""
        shares_chains = sampler.on_device is not None and sampler.on_device.shares_chains
        if length < 1 or not (self._drafts_alone or shares_chains):
            return None
        model = self._model(context)
        ranking = sampler.native_ranking(context, model.config.vocab_size, width, margin)
        if ranking is None:
            return None
        places = yield from model.draft_chain(self._cache.draft_stores, ranking, end, path[0], path[1:],
                                              len(context) + len(path) - 1, length)
        if places is not None:
            self._cache.add_drafts(len(places))
        return places

    def next_logits(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        return (yield from self.forward(context, path)).logits

    def forward(self, context: Context, path: Sequence[int]) -> Routine[Forward]:
        """The row of the last token of `path`, and its logits [1, V]."""
        position = len(context) - 2 + len(path)
        result = yield ForwardRequest(self._model(context), Rows(path[-1:], [position], [-1]), self._cache, 1)
        self._cache.commit([0])
        return result
