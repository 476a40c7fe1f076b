"""TriForce (arXiv 2404.11912): a hierarchy of three. What is cheap guesses for what is better guesses for the target.

    1  a small model on a window of the text (or, without one, the n-gram table)     guesses some tokens
    2  the target on a retrieval cache: chunks of 8 positions by their mean key      keeps what it agrees with, adds one
    3  the target on the full cache, the step that every drafter serves              keeps what it agrees with, adds one

Level 2 is the step of longdraft/speculation/step.py once more: propose, forward, choose, walk, commit, again until
`chain` tokens are drafted. It chooses with the noise of the target, so no level needs the corrections of rejection
sampling (whose inner one the published code omits). Its drafted rows are dropped when the target has spoken.

The retrieval cache is chosen anew every `stride` tokens, and when fewer than `floor` of the drafts of late were
accepted. (The published code never does, and cannot write more than its budget.)
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longdraft.cache import select
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.chain import Chain
from longdraft.drafters.draft_model import DRAFT, check_window, streaming
from longdraft.drafters.ngram import DelayedTable, NgramOptions
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import check
from longdraft.model.routine import Routine, atomic
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.sampling.sampler import DAMAGED, Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.verify import walk
from longdraft.tree import Tree, Trie

RETRIEVAL = "retrieval"
CHUNK = 8
_RECENT = 32  # last positions that the retrieval cache always holds
_WINDOW, _SINKS, _REFRESH = 256, 4, 64  # of the small model
_REMEMBERED = 16  # steps that the rolling acceptance is computed from


@dataclass(frozen=True)
class TriForceOptions:
    """Options of `triforce`.

    model      a smaller model of the same vocabulary for level 1; default: the one in the model's
               own folder `draft`, else the text's n-grams
    guesses    tokens guessed for each forward of level 2 at most (the paper: 1 to 2)
    chain      tokens drafted by level 2 in each step (the paper: 6)
    budget     rows of the retrieval cache for each layer and KV head at each choice (the paper: 4096)
    stride     tokens written between two choices
    floor      accepted drafts, of the last steps' drafts, below which the choice is made anew; 0: never
    remainder  level 2 counts what the keys that are left out would give, as fitted to the verified tokens
    window     tokens that the small model reads at most (the paper: 256)
    sinks      first tokens of the text that the small model always reads
    refresh    tokens written until the small model's window moves up
    """

    model: str = ""
    guesses: int = 2
    chain: int = 8
    budget: int = 256
    stride: int = 128
    floor: float = 0.3
    remainder: bool = True
    window: int = _WINDOW
    sinks: int = _SINKS
    refresh: int = _REFRESH

    def __post_init__(self) -> None:
        check(1 <= self.guesses <= 16, "guesses", self.guesses, "1 to 16")
        check(1 <= self.chain <= 64, "chain", self.chain, "1 to 64")
        least = _RECENT + 2 * CHUNK
        check(self.budget >= least, "budget", self.budget, f"at least {least}")
        check(self.stride >= 1, "stride", self.stride, "1 or more")
        check(0 <= self.floor < 1, "floor", self.floor, "0 to below 1", "0 chooses by the stride alone")
        check_window(self.window, self.sinks, self.refresh)

    @property
    def reads(self) -> int:
        """Rows that the small model's rotations must reach."""
        return self.window


class Guesser(Protocol):
    """Level 1: a tree of guesses behind drafted tokens."""

    @property
    def nbytes(self) -> int: ...

    def begin(self, context: Context) -> None: ...

    def guess(self, context: Context, path: Sequence[int], num: int) -> Routine[Tree]:
        """At most `num` tokens deep, on the last token of `path` (the root of the text, then drafted tokens)."""


class SmallModel:
    def __init__(self, follower: StreamingDraftModel, sampler: Sampler) -> None:
        self._follower = follower
        self._chain = Chain(follower, sampler, 1, DRAFT)

    @property
    def nbytes(self) -> int:
        return self._follower.cache.nbytes

    def begin(self, context: Context) -> None:
        self._follower.begin(context)

    def guess(self, context: Context, path: Sequence[int], num: int) -> Routine[Tree]:
        trie = Trie(path[-1])
        yield from self._chain.grow(trie, context, path, num)
        return trie.tree()


class Ngrams:
    nbytes = 0

    def __init__(self, params: SamplingParams) -> None:
        self._table = DelayedTable(NgramOptions(continuations=1), params)

    def begin(self, context: Context) -> None:
        self._table.follow(context)

    @atomic
    def guess(self, context: Context, path: Sequence[int], num: int) -> Tree:
        self._table.follow(context)
        trie = Trie(path[-1])
        self._table.graft(trie, 0, path[-1], num)
        return trie.tree()


class TriForceDrafter:
    def __init__(self, options: TriForceOptions, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, draft: Transformer | None) -> None:
        self._options = options
        self._model = model
        self._sampler = sampler
        self._guesser: Guesser = Ngrams(params)
        is_default = (options.window, options.sinks, options.refresh) == (_WINDOW, _SINKS, _REFRESH)
        check(draft is not None or is_default, "model", options.model, "a smaller model, with window, sinks or refresh")
        if draft is not None:
            follower = streaming(draft, model, options.window, options.sinks, options.refresh)
            self._guesser = SmallModel(follower, sampler)
        config = model.config
        self._chunks = select.Chunks(config.num_layers, config.num_kv_heads, options.budget, _RECENT, CHUNK)
        size = PartialBudget(options.budget + options.stride, CHUNK, _RECENT, options.stride)
        self.partial = PartialCache(cache, model.kernels, config.num_kv_heads, config.head_dim, size,
                                    has_remainder=options.remainder, selection=self._chunks)
        self._num_drafted = 0  # tokens of the last proposal
        self._rates: deque[float] = deque(maxlen=_REMEMBERED)  # accepted drafts of drafts, step by step

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self._chunks.nbytes + self._guesser.nbytes

    def begin(self, context: Context, verified: Verified | None) -> None:
        self.partial.refresh((lambda: verified.attention_output) if verified else None)
        self._guesser.begin(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        """Level 2, nested: its own steps on the retrieval cache until the chain is long enough."""
        trie, node, path = Trie(context.last), 0, [context.last]
        most = min(self._options.chain, max_depth)
        while len(path) <= most:
            tree = yield from self._guesser.guess(context, path, min(self._options.guesses, most - len(path)))
            result = yield ForwardRequest(self._model, tree_rows(tree, len(context) - 2 + len(path)), self.partial, len(tree))
            choices = self._choose(result.logits, tree, context, path)
            walked = walk(tree, choices)
            self.partial.commit(walked)
            if choices[walked[-1]] == DAMAGED:
                break
            sources = [*(tree.sources[step] for step in walked[1:]), RETRIEVAL]
            for step, source in zip(walked, sources, strict=True):
                node = trie.add(node, choices[step], source)
                path.append(choices[step])
        self.partial.forget()
        self._num_drafted = len(path) - 1
        return trie.tree()

    def _choose(self, logits: Tensor, tree: Tree, context: Context, path: Sequence[int]) -> list[int]:
        """Level 2's token behind each node of a tree that stands on the end of `path`, with the target's noise."""
        behind = [[*path[1:], *(tree.tokens[step] for step in tree.path(node)[1:])] for node in range(len(tree))]
        best = [self._sampler.rank(row, context, drafted, 1) for row, drafted in zip(logits, behind, strict=True)]
        return [guess[0] if guess else DAMAGED for guess in best]

    def observe(self, context: Context, accepted: Accepted) -> None:
        if self._num_drafted:
            self._rates.append(len(accepted.sources) / self._num_drafted)
            self._num_drafted = 0
        if len(self._rates) == _REMEMBERED and statistics.fmean(self._rates) < self._options.floor:
            self.partial.expire()
            self._rates.clear()
        self.partial.refresh(lambda: accepted.verified.attention_output)
