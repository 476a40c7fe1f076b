"""TriForce (arXiv 2404.11912): three levels of models, each of which drafts for the next.

    1  a small model on a window of the text,        drafts `guesses` tokens
       or else the text's n-grams
    2  the target on a retrieval cache: chunks of    verifies them and adds one, repeatedly, until `chain` tokens
       8 positions, selected by their mean key       are drafted
    3  the target on the full cache                  verifies those

Level 2 repeats the step of longdraft/speculation/step.py on its own cache: propose, forward, choose, walk, commit. It
chooses with the target's noise, so no level needs the corrections of rejection sampling (the published code omits the
inner one). The rows of its drafts are dropped before the target verifies.

The rows of the retrieval cache are selected again every `stride` tokens, and when fewer than `floor` of the recent
drafts were accepted. (The published code selects once, and cannot write more tokens than its budget.)
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longdraft.cache import row_selection
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.drafters.chain import Chain
from longdraft.drafters.draft_model import DRAFT, windowed
from longdraft.drafters.ngram import NgramMatcher, NgramOptions
from longdraft.drafters.options import DrafterOptions, check_window
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import check
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine, atomic
from longdraft.speculation.verify import accepted_path

RETRIEVAL = "retrieval"  # the source of the tokens that level 2 adds, in the statistics
RETRIEVAL_CHUNK = 8  # positions that the retrieval cache selects together
_RECENT = 32  # last positions that the retrieval cache always holds
_WINDOW, _SINKS, _REFRESH = 256, 4, 64  # defaults of the small model's window
_RATED_STEPS = 16  # last steps over which acceptance is averaged


@dataclass(frozen=True)
class TriForceOptions(DrafterOptions):
    """Options of `triforce`.

    model      the small model of level 1, with the target's tokenizer; default: the one in the sub-folder `draft` of
               the target's folder, else the text's n-grams
    guesses    tokens drafted by level 1 for each forward of level 2 at most (the paper: 1 to 2)
    chain      tokens drafted by level 2 in each step (the paper: 6)
    budget     rows of the retrieval cache for each layer and KV head at each selection (the paper: 4096)
    stride     tokens written between two selections
    floor      share of the recent drafts that were accepted, below which rows are selected again; 0: never
    remainder  level 2 includes an estimate of what the keys outside its cache give, fitted to verified tokens
    window     tokens that the small model reads at most (the paper: 256)
    sinks      first tokens of the text that the small model always reads
    refresh    tokens written until the small model's window moves
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
        least = _RECENT + 2 * RETRIEVAL_CHUNK
        check(self.budget >= least, "budget", self.budget, f"at least {least}")
        check(self.stride >= 1, "stride", self.stride, "1 or more")
        check(0 <= self.floor < 1, "floor", self.floor, "0 to below 1", "0 selects by the stride alone")
        check_window(self.window, self.sinks, self.refresh)

    @property
    def draft_model(self) -> str:
        return self.model

    @property
    def draft_window(self) -> int:
        return self.window

    @property
    def partial_rows(self) -> int:
        return self.budget


class FirstLevel(Protocol):
    """Level 1: drafts after the text and the tokens that level 2 has accepted."""

    @property
    def nbytes(self) -> int:
        """Memory of its caches."""

    def read_prompt(self, context: Context) -> Routine[None]:
        """Read the prompt."""

    def begin(self, context: Context) -> None:
        """Read what of the prompt `read_prompt` has not read."""

    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[Tree]:
        """A tree on the last token of `path` (the text's last token, then drafted tokens)."""


class FirstLevelModel:
    """A small model that drafts a chain."""

    def __init__(self, model: StreamingDraftModel, sampler: Sampler) -> None:
        self._model = model
        self._chain = Chain(model, sampler, 1, DRAFT)

    @property
    def nbytes(self) -> int:
        return self._model.cache.nbytes

    def read_prompt(self, context: Context) -> Routine[None]:
        yield from self._model.read_prompt(context)

    def begin(self, context: Context) -> None:
        self._model.begin(context)

    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[Tree]:
        trie = Trie(path[-1])
        yield from self._chain.draft(trie, context, path, max_depth)
        return trie.tree()


class FirstLevelNgrams:
    """The n-grams of the text."""

    nbytes = 0

    def __init__(self, params: SamplingParams) -> None:
        self._matcher = NgramMatcher(NgramOptions(continuations=1), params)

    @atomic
    def read_prompt(self, context: Context) -> None:
        self._matcher.update(context)

    def begin(self, context: Context) -> None:
        self._matcher.update(context)

    @atomic
    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Tree:
        self._matcher.update(context)
        trie = Trie(path[-1])
        self._matcher.add_matches(trie, 0, path[-1], max_depth)
        return trie.tree()


class TriForceDrafter:
    def __init__(self, options: TriForceOptions, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, draft: Transformer | None, clock: CostClock | None = None) -> None:
        """clock: of the request; None: the request runs alone."""
        self._options = options
        self._model = model
        self._sampler = sampler
        self._first_level: FirstLevel = FirstLevelNgrams(params)
        is_default = (options.window, options.sinks, options.refresh) == (_WINDOW, _SINKS, _REFRESH)
        check(draft is not None or is_default, "model", options.model, "a smaller model, with window, sinks or refresh")
        if draft is not None:
            small = windowed(draft, model, options.window, options.sinks, options.refresh, clock)
            self._first_level = FirstLevelModel(small, sampler)
        self._chunks = row_selection.Chunks(len(cache.stores), options.budget, _RECENT, RETRIEVAL_CHUNK)
        size = PartialBudget(options.budget + options.stride, RETRIEVAL_CHUNK, _RECENT, options.stride)
        self.partial = PartialCache(cache, model.kernels, size, has_remainder=options.remainder,
                                    selection=self._chunks)
        self._num_drafted = 0  # tokens of the last proposal
        self._rates: deque[float] = deque(maxlen=_RATED_STEPS)  # share of the drafts accepted in each of the last steps

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self._chunks.nbytes + self._first_level.nbytes

    def read_prompt(self, context: Context) -> Routine[None]:
        yield from self._first_level.read_prompt(context)

    def begin(self, context: Context, verified: Verified | None) -> None:
        self.partial.update(verified.attention if verified else None)
        self._first_level.begin(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        """Steps of level 2 on the retrieval cache until the chain is long enough."""
        trie, node, path = Trie(context.last), 0, [context.last]
        length = min(self._options.chain, max_depth)
        while len(path) <= length:
            num_guesses = min(self._options.guesses, length - len(path))
            tree = yield from self._first_level.propose(context, path, num_guesses)
            rows = tree_rows(tree, len(context) - 2 + len(path))
            result = yield ForwardRequest(self._model, rows, self.partial, len(tree))
            choices = self._choose(result.logits, tree, context, path)
            walked = accepted_path(tree, choices)
            self.partial.commit(walked)
            if choices[walked[-1]] == NO_TOKEN:
                break
            sources = [*(tree.sources[step] for step in walked[1:]), RETRIEVAL]
            for step, source in zip(walked, sources, strict=True):
                node = trie.add(node, choices[step], source)
                path.append(choices[step])
        self.partial.drop_drafts()
        self._num_drafted = len(path) - 1
        return trie.tree()

    def _choose(self, logits: Tensor, tree: Tree, context: Context, path: Sequence[int]) -> list[int]:
        """Level 2's token after each node of a tree on the last token of `path`, chosen with the target's noise."""
        paths = [[*path[1:], *(tree.tokens[step] for step in tree.path(node)[1:])] for node in range(len(tree))]
        best = [self._sampler.ranked(row, context, drafted, 1) for row, drafted in zip(logits, paths, strict=True)]
        return [guess.tokens[0] if guess.tokens else NO_TOKEN for guess in best]

    def observe(self, context: Context, accepted: Accepted) -> None:
        if self._num_drafted:
            self._rates.append(len(accepted.sources) / self._num_drafted)
            self._num_drafted = 0
        if len(self._rates) == _RATED_STEPS and statistics.fmean(self._rates) < self._options.floor:
            self.partial.select_again()
            self._rates.clear()
        verified = accepted.verified
        assert verified is not None
        self.partial.update(verified.attention)
