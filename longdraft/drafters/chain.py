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
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.draft_vocabulary import DraftVocabulary
from longdraft.kernels.chain_plan import NEVER, ChainEnd, ChainPlan, Ranked
from longdraft.kernels.launched import LaunchedWork
from longdraft.model.transformer import Forward, ForwardRequest, Rows, Transformer
from longdraft.request.context import Context
from longdraft.request.tree import Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.routine import Routine


class DraftModel(Protocol):
    """A model that gives logits after the text and drafted tokens."""

    @property
    def vocabulary(self) -> int:
        """Number of logits."""

    def next_logits(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        """Logits [1, V] after `path`: the last token of the text, then drafted tokens. None: the model is still
        reading the text, and drafts nothing in this step."""

    def plan(self, context: Context, path: Sequence[int], length: int) -> ChainPlan | None:
        """The chain of `length` tokens after `path`, 1 or more, to be drafted in one call; None: it goes step by step.
        A plan holds until the next call of a method."""

    def has_drafted(self, context: Context, path: Sequence[int], drafted: Sequence[Ranked]) -> None:
        """The plan was carried out, with these guesses."""


class Chain(NamedTuple):
    """How a chain is drafted.

    draft_model  the model whose logits are ranked
    sampler      ranks guesses with the target's noise (`Sampler.ranked`)
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
        end = self.confidence.end() if self.confidence else NEVER
        drafted = yield from self.in_one_call(context, path, length, end)
        if drafted is None:
            drafted = yield from self.step_by_step(context, path, length, end)
        node = 0
        best, leads = list[int](), list[float]()
        for tokens, lead in drafted:
            parent = node
            for rank, token in enumerate(tokens):
                child = trie.add(parent, token, self.source)
                if rank == 0:
                    node = child
                    best.append(token)
            leads.append(lead)
        if self.confidence:
            self.confidence.expect(best, leads)
        return node, [*path, *best]

    def in_one_call(self, context: Context, path: Sequence[int], length: int,
                    end: ChainEnd = NEVER) -> LaunchedWork[list[Ranked] | None]:
        """The guesses of `step_by_step`, without a return to Python for each token; None where that is not possible."""
        if length < 1:
            return None
        ranker = self.sampler.ranker(context, self.draft_model.vocabulary, self.width, self.margin)
        plan = None if ranker is None else self.draft_model.plan(context, path, length)
        if ranker is None or plan is None:
            return None
        drafted = yield from ranker.draft(plan, end)
        if drafted is not None:
            self.draft_model.has_drafted(context, path, drafted)
        return drafted

    def step_by_step(self, context: Context, path: Sequence[int], length: int,
                     end: ChainEnd = NEVER) -> Routine[list[Ranked]]:
        """The guesses of a chain after `path`, token by token, with a forward of the draft model for each. This defines
        the guesses of a chain."""
        drafted: list[Ranked] = []
        path = list(path)
        reached = 1.0  # P(all tokens so far become text)
        while len(drafted) < length and reached >= end.least:
            logits = yield from self.draft_model.next_logits(context, path)
            if logits is None:
                break
            ranked = yield from self.sampler.rank_later(logits[0], context, path[1:], self.width, within=self.margin)
            drafted.append(ranked)
            if not ranked.tokens:
                break
            path.append(ranked.tokens[0])
            reached *= end.rate(ranked.lead)
        return drafted


SMALL_BYTES = 16 << 20  # of weights that processors' caches hold: texts gain little by reading them together


def shares_forwards(model: Transformer, clock: CostClock | None) -> bool:
    """Whether a text's drafts with this model share forwards with those of others, where a forward reads the weights
    once for all. False: the text runs alone, or the weights are so small that one call for a whole chain gains more.

    clock  of the request; None: the request runs alone
    """
    return clock is not None and clock.batch_size > 1 and model.weights_bytes > SMALL_BYTES


class SelfDraftModel:
    """The target on a partial cache. Each call computes the row of the last token of `path`; the rows of the tokens
    before it are in the cache until `PartialCache.drop_drafts`."""

    def __init__(self, model: Transformer, cache: PartialCache, clock: CostClock | None = None,
                 vocabulary: DraftVocabulary | None = None) -> None:
        """clock: of the request; None: the request runs alone. vocabulary: the tokens that are guessed; None: all."""
        self._whole_model = model
        self._cache = cache
        self._clock = clock
        self._draft_vocabulary = vocabulary

    @property
    def vocabulary(self) -> int:
        return self._whole_model.config.vocab_size

    def _model(self, context: Context) -> Transformer:
        """The model that drafts now. Where requests share forwards, it is the one with the whole vocabulary."""
        if self._draft_vocabulary is None or shares_forwards(self._whole_model, self._clock):
            return self._whole_model
        return self._draft_vocabulary.model(context)

    def plan(self, context: Context, path: Sequence[int], length: int) -> ChainPlan:
        shares = shares_forwards(self._whole_model, self._clock)
        return self._model(context).chain_plan(self._cache.draft_stores, path, len(context) - 2 + len(path), length,
                                               shares)

    def has_drafted(self, context: Context, path: Sequence[int], drafted: Sequence[Ranked]) -> None:
        self._cache.add_drafts(len(drafted))

    def next_logits(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        return (yield from self.forward(context, path)).logits

    def forward(self, context: Context, path: Sequence[int]) -> Routine[Forward]:
        """The row of the last token of `path`, and its logits [1, V]."""
        position = len(context) - 2 + len(path)
        result = yield ForwardRequest(self._model(context), Rows(path[-1:], [position], [-1]), self._cache, 1)
        self._cache.commit([0])
        return result
