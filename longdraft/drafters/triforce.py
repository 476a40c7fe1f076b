"""TriForce (arXiv 2404.11912): three levels of models, each of which drafts for the next.

    1  an EAGLE or block head, a small model on      drafts `guesses` tokens
       a window of the text, or its n-grams
    2  the target, or a quantised copy of it, on a   verifies them and adds one, repeatedly, until `chain` tokens
       retrieval cache: chunks of 8 positions,       are drafted
       selected by their mean key
    3  the target on the full cache                  verifies those

The paper has a small model and the target's own weights. A head reads the states that level 2 computes for the tokens
it accepts, as it reads those of the target for the text.

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

from torch import Tensor

from longdraft.cache import row_selection
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.cache.taps import TapLog
from longdraft.drafters.block import BLOCK, BlockModel, BlockOptions
from longdraft.drafters.chain import Chain, DraftModel
from longdraft.drafters.draft_model import DRAFT, windowed
from longdraft.drafters.eagle import EAGLE, EagleDraftModel, EagleOptions, ParallelEagleModel
from longdraft.drafters.layer_drafter import SlotModel
from longdraft.drafters.marginal_tree import MarginalTrees
from longdraft.drafters.ngram import NgramMatcher, NgramOptions
from longdraft.drafters.options import DrafterOptions, check_window
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import check
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.parts.block import BlockHead
from longdraft.parts.draft_copy import AUTO as AUTO_WEIGHTS
from longdraft.parts.draft_copy import SAME, check_draft_weights
from longdraft.parts.eagle import Eagle
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine, atomic
from longdraft.speculation.verify import accepted_path

RETRIEVAL = "retrieval"  # the source of the tokens that level 2 adds, in the statistics
AUTO_FIRST = "auto"
FIRST_LEVELS = (AUTO_FIRST, "head", "model", "ngrams")
RETRIEVAL_CHUNK = 8  # positions that the retrieval cache selects together
_RECENT = 32  # last positions that the retrieval cache always holds
_WINDOW, _SINKS, _REFRESH = 256, 4, 64  # defaults of the small model's window
_RATED_STEPS = 16  # last steps over which acceptance is averaged


@dataclass(frozen=True)
class TriForceOptions(DrafterOptions):
    """Options of `triforce`.

    first      auto | head | model | ngrams: level 1. auto: `model` where it is given, else the target's EAGLE or block
               head, else the small model in the sub-folder `draft` of the target's folder, else the text's n-grams
    model      the small model of level 1, with the target's tokenizer; default: the one in the sub-folder `draft`
    guesses    tokens drafted by level 1 for each forward of level 2 at most (the paper: 1 to 2)
    chain      tokens drafted by level 2 in each step (the paper: 6)
    budget     rows of the retrieval cache for each layer and KV head at each selection (the paper: 4096)
    stride     tokens written between two selections
    floor      share of the recent drafts that were accepted, below which rows are selected again; 0: never
    draft_weights  auto | same | file | int8 | int4: weights of level 2, as for `magicdec` (the paper: same)
    remainder  level 2 includes an estimate of what the keys outside its cache give, fitted to verified tokens
    window     tokens that the small model reads at most (the paper: 256)
    sinks      first tokens of the text that the small model always reads
    refresh    tokens written until the small model's window moves
    """

    first: str = AUTO_FIRST
    model: str = ""
    guesses: int = 2
    chain: int = 8
    budget: int = 256
    stride: int = 128
    floor: float = 0.3
    draft_weights: str = AUTO_WEIGHTS
    remainder: bool = True
    window: int = _WINDOW
    sinks: int = _SINKS
    refresh: int = _REFRESH

    def __post_init__(self) -> None:
        check(self.first in FIRST_LEVELS, "first", self.first, ", ".join(FIRST_LEVELS))
        check(not self.model or self.first in (AUTO_FIRST, "model"), "first", self.first, "auto or model with `model`")
        check(1 <= self.guesses <= 16, "guesses", self.guesses, "1 to 16")
        check(1 <= self.chain <= 64, "chain", self.chain, "1 to 64")
        least = _RECENT + 2 * RETRIEVAL_CHUNK
        check(self.budget >= least, "budget", self.budget, f"at least {least}")
        check(self.stride >= 1, "stride", self.stride, "1 or more")
        check(0 <= self.floor < 1, "floor", self.floor, "0 to below 1", "0 selects by the stride alone")
        check_draft_weights(self.draft_weights)
        check_window(self.window, self.sinks, self.refresh)

    @property
    def copy_weights(self) -> str:
        return self.draft_weights

    @property
    def head_weights(self) -> str:
        return AUTO_WEIGHTS

    @property
    def draft_model(self) -> str:
        return self.model

    @property
    def draft_window(self) -> int:
        return self.window

    @property
    def partial_rows(self) -> int:
        return self.budget


class FirstLevel:
    """Level 1: drafts after the text and the tokens that level 2 has accepted."""

    @property
    def nbytes(self) -> int:
        """Memory of its caches."""
        return 0

    @atomic
    def read_prompt(self, context: Context) -> None:
        """Read the prompt."""

    def begin(self, context: Context) -> None:
        """Read what of the prompt `read_prompt` has not read."""

    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[Tree]:
        """A tree on the last token of `path` (the text's last token, then drafted tokens)."""
        raise NotImplementedError

    def learn(self, tokens: Sequence[int]) -> None:
        """Level 2 chose these tokens after the root of the latest tree."""


class FirstLevelChain(FirstLevel):
    """A model or a head that drafts a chain."""

    def __init__(self, draft_model: DraftModel, sampler: Sampler, source: str) -> None:
        self._chain = Chain(draft_model, sampler, 1, source)

    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[Tree]:
        trie = Trie(path[-1])
        yield from self._chain.draft(trie, context, path, max_depth)
        return trie.tree()


class FirstLevelModel(FirstLevelChain):
    """A small model."""

    def __init__(self, model: StreamingDraftModel, sampler: Sampler) -> None:
        super().__init__(model, sampler, DRAFT)
        self._model = model

    @property
    def nbytes(self) -> int:
        return self._model.cache.nbytes

    def read_prompt(self, context: Context) -> Routine[None]:
        yield from self._model.read_prompt(context)

    def begin(self, context: Context) -> None:
        self._model.begin(context)


class FirstLevelSlots(FirstLevel):
    """A head that guesses several tokens in one pass."""

    def __init__(self, model: SlotModel, source: str) -> None:
        self._model = model
        self._trees = MarginalTrees(source)

    @atomic
    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Tree:
        slots = self._model.slots(context, path, max_depth) if max_depth else []
        return self._trees.grow(path[-1], slots, max_depth)

    def learn(self, tokens: Sequence[int]) -> None:
        self._trees.learn(tokens)


class FirstLevelNgrams(FirstLevel):
    """The n-grams of the text."""

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
                 params: SamplingParams, draft: Transformer | None, clock: CostClock | None = None,
                 head: Eagle | BlockHead | None = None, copy: Transformer | None = None) -> None:
        """What the options leave out is not used.

        draft  the small model
        clock  of the request; None: the request runs alone
        copy   of the target, for level 2
        """
        self._options = options
        self._model = copy if copy is not None and options.draft_weights != SAME else model
        self._sampler = sampler
        first = options.first
        if first == AUTO_FIRST:
            first = ("model" if options.model else "head" if head is not None else
                     "model" if draft is not None else "ngrams")
        check(first != "head" or head is not None, "first", first, "auto, model or ngrams",
              "the model has no EAGLE or block head; --heads names one")
        check(first != "model" or draft is not None, "first", first, "auto, head or ngrams",
              "the model has no small model in its sub-folder `draft`; the option `model` names one")
        is_default = (options.window, options.sinks, options.refresh) == (_WINDOW, _SINKS, _REFRESH)
        check(first == "model" or is_default, "model", options.model, "a smaller model, with window, sinks or refresh")
        states: TapLog | None = None  # of drafted tokens, from level 2
        if cache.taps:
            cache.taps.follow(first == "head")
        self._first_level: FirstLevel
        if first == "head":
            assert head is not None
            states = TapLog(model.kernels, head.taps, model.config.hidden_size)
            self._first_level = _first_level_of(head, options, cache, sampler, states)
        elif first == "model":
            assert draft is not None
            small = windowed(draft, model, options.window, options.sinks, options.refresh, clock)
            self._first_level = FirstLevelModel(small, sampler)
        else:
            self._first_level = FirstLevelNgrams(params)
        self._chunks = row_selection.Chunks(len(cache.stores), options.budget, _RECENT, RETRIEVAL_CHUNK)
        size = PartialBudget(options.budget + options.stride, RETRIEVAL_CHUNK, _RECENT, options.stride)
        self.partial = PartialCache(cache, model.kernels, size, has_remainder=options.remainder,
                                    selection=self._chunks, taps=states)
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
            self._first_level.learn([choices[step] for step in walked])
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


def _first_level_of(head: Eagle | BlockHead, options: TriForceOptions, cache: FullCache, sampler: Sampler,
                    states: TapLog) -> FirstLevel:
    """states: of drafted tokens"""
    longest = options.chain + options.guesses
    if isinstance(head, BlockHead):
        return FirstLevelSlots(BlockModel(BlockOptions(), head, cache, sampler, states, longest), BLOCK)
    rows = EagleDraftModel.of(EagleOptions(chain=longest), head, cache, states)
    if head.config.is_parallel:
        return FirstLevelSlots(ParallelEagleModel(rows, head, sampler, options.guesses), EAGLE)
    return FirstLevelChain(rows, sampler, EAGLE)
