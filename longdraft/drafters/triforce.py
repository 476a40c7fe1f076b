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
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.draft_model import DRAFT, windowed
from longdraft.drafters.draft_vocabulary import (
    AUTO_VOCABULARY,
    DraftVocabulary,
    VocabularySize,
    check_draft_vocabulary,
    vocabulary_size,
)
from longdraft.drafters.eagle import EAGLE, EagleDraftModel, EagleOptions, ParallelEagleModel
from longdraft.drafters.layer_drafter import SlotModel
from longdraft.drafters.marginal_tree import MarginalTrees
from longdraft.drafters.ngram import NgramMatcher, NgramOptions
from longdraft.drafters.options import DrafterOptions, check_window
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import check
from longdraft.kernels.chain_plan import Ranked
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.parts.block import BlockHead
from longdraft.parts.draft_copy import AUTO_WEIGHTS, check_draft_weights
from longdraft.parts.eagle import Eagle
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.sampling.sampler import NO_TOKEN, Sampler
from longdraft.speculation.abilities import HoldsMemory
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine, atomic

RETRIEVAL = "retrieval"  # the source of the tokens that level 2 adds, in the statistics
AUTO_FIRST = "auto"
FIRST_LEVELS = (AUTO_FIRST, "head", "model", "ngrams")
RETRIEVAL_CHUNK = 8  # positions that the retrieval cache selects together
_RECENT = 32  # last positions that the retrieval cache always holds
_WINDOW, _SINKS, _REFRESH = 256, 4, 64  # defaults of the small model's window
Reader = EagleDraftModel | BlockModel  # what a head drafts with
_RATED_STEPS = 16  # last steps over which acceptance is averaged


@dataclass(frozen=True)
class TriForceOptions(DrafterOptions):
    """Options of `triforce`.

    first      auto | head | model | ngrams: level 1. head: the target's EAGLE or block head. model: the small model, or
               the text's n-grams where there is none. auto: `model` if it is given, else a head if there is one
    model      the small model of level 1, with the target's tokenizer; default: the one in the sub-folder `draft` of
               the target's folder
    guesses    tokens drafted by level 1 for each forward of level 2 at most (the paper: 1 to 2)
    chain      tokens drafted by level 2 in each step (the paper: 6)
    budget     rows of the retrieval cache for each layer and KV head at each selection (the paper: 4096)
    stride     tokens written between two selections
    floor      share of the recent drafts that were accepted, below which rows are selected again; 0: never
    least      as for `magicdec`: the chain of level 2 ends early where its next token is less likely
    draft_weights  auto | same | file | int8 | int4: weights of level 2, as for `magicdec` (the paper: same)
    draft_vocabulary  auto | all | number of tokens that level 2 can choose, as for `magicdec`
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
    least: float = 0.0
    draft_weights: str = AUTO_WEIGHTS
    draft_vocabulary: VocabularySize = AUTO_VOCABULARY
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
        check(0 <= self.least < 1, "least", self.least, "0 to below 1")
        check_draft_weights(self.draft_weights)
        check_draft_vocabulary(self.draft_vocabulary)
        check_window(self.window, self.sinks, self.refresh, "window")

    @property
    def copy_weights(self) -> str:
        return self.draft_weights

    @property
    def head_weights(self) -> str:
        return AUTO_WEIGHTS

    @property
    def may_use_head(self) -> bool:
        return self.first == "head" or (self.first == AUTO_FIRST and not self.model)

    @property
    def draft_model(self) -> str:
        return self.model

    @property
    def draft_window(self) -> int:
        return self.window

    def partial_rows(self, model: Transformer) -> int:
        return self.budget


class FirstLevel:
    """Level 1: drafts after the text and the tokens that level 2 has accepted."""

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

    def read_prompt(self, context: Context) -> Routine[None]:
        yield from self._model.read_prompt(context)

    def begin(self, context: Context) -> None:
        self._model.begin(context)


class FirstLevelSlots(FirstLevel):
    """A head that guesses several tokens in one pass."""

    def __init__(self, model: SlotModel, source: str) -> None:
        self._model = model
        self._trees = MarginalTrees(source)

    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[Tree]:
        slots = (yield from self._model.slots(context, path, max_depth)) if max_depth else []
        return self._trees.grow(path[-1], slots, max_depth)

    def learn(self, tokens: Sequence[int]) -> None:
        self._trees.learn(tokens)


class FirstLevelNgrams(FirstLevel):
    """The n-grams of the text."""

    def __init__(self, params: SamplingParams) -> None:
        self._matcher = NgramMatcher(NgramOptions(continuations=1), params)

    @property
    def nbytes(self) -> int:
        return self._matcher.nbytes

    def begin(self, context: Context) -> None:
        self._matcher.update(context)

    @atomic
    def propose(self, context: Context, path: Sequence[int], max_depth: int) -> Tree:
        self._matcher.update(context)
        trie = Trie(path[-1])
        self._matcher.add_matches(trie, 0, context, path[1:], max_depth)
        return trie.tree()


class TriForceDrafter:
    """Drafts with three levels of models. A part that the options do not ask for is not used.

    draft    the small model
    clock    of the request; None: the request runs alone
    head     of the target
    copy     of the target, for level 2
    partial  a partial cache that several drafters of one request share, for level 2; None: the drafter makes its own
    reader   what the head drafts with, shared likewise. It reads the states of `partial`
    """

    def __init__(self, options: TriForceOptions, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, draft: Transformer | None, clock: CostClock | None,
                 head: Eagle | BlockHead | None, copy: Transformer | None, partial: PartialCache | None,
                 reader: Reader | None) -> None:
        self._options = options
        self._model = model if copy is None else copy
        self._sampler = sampler
        size = vocabulary_size(options.draft_vocabulary, self._model)
        self._vocabulary = DraftVocabulary(self._model, size) if size else None
        first = _first_of(options, has_head=head is not None, has_model=draft is not None)
        is_default = (options.window, options.sinks, options.refresh) == (_WINDOW, _SINKS, _REFRESH)
        check(first == "model" or is_default, "model", options.model, "a smaller model, with window, sinks or refresh")
        self._taps = cache.taps
        self.follow(first == "head")
        own: list[HoldsMemory] = [self._vocabulary] if self._vocabulary else []  # parts whose memory is this drafter's
        if partial is None:
            states = tapped_drafts(head, model) if first == "head" and head else None
            chunks = row_selection.Chunks(len(cache.stores), options.budget, _RECENT, RETRIEVAL_CHUNK)
            rows = PartialBudget(options.budget + options.stride, RETRIEVAL_CHUNK, _RECENT, options.stride)
            partial = PartialCache(cache, model.kernels, rows, has_remainder=options.remainder, selection=chunks,
                                   taps=states)
            own += [chunks, partial]
        self.partial = partial
        self._first_level: FirstLevel = FirstLevelNgrams(params)
        if first == "head" and head is not None:
            if reader is None:
                assert partial.taps is not None, "the head reads the states of level 2"
                reader = new_reader(head, cache, sampler, partial.taps, options.chain + options.guesses)
                own.append(reader)
            self._first_level = _with_head(head, reader, sampler, options.guesses)
        elif first == "model" and draft is not None:
            small = windowed(draft, model, options.window, options.sinks, options.refresh, clock, "window")
            self._first_level = FirstLevelModel(small, sampler)
            own.append(small.cache)
        self._own = own
        self.confidence = Confidence(options.least)
        self._num_drafted = 0  # tokens of the last proposal
        self._rates: deque[float] = deque(maxlen=_RATED_STEPS)  # share of the drafts accepted in each of the last steps

    @property
    def nbytes(self) -> int:
        """Memory of the drafter's own caches and n-grams; what is shared is not counted."""
        ngrams = self._first_level.nbytes if isinstance(self._first_level, FirstLevelNgrams) else 0
        return ngrams + sum(part.nbytes for part in self._own)

    def follow(self, is_wanted: bool) -> None:
        """Whether the target's forwards copy the states that a head reads."""
        if self._taps:
            self._taps.follow(is_wanted)

    def read_prompt(self, context: Context) -> Routine[None]:
        yield from self._first_level.read_prompt(context)

    def inherit(self, earlier: TriForceDrafter, num_retracted: int) -> None:
        if isinstance(earlier._first_level, FirstLevelNgrams):
            self._first_level = earlier._first_level

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._update(verified)
        self._first_level.begin(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        """Steps of level 2 on the retrieval cache until the chain is long enough, or a further token is not likely."""
        trie, node, path, leads = Trie(context.last), 0, [context.last], list[float]()
        model = self._vocabulary.model(context) if self._vocabulary else self._model
        length, end, reached = min(self._options.chain, max_depth), self.confidence.end(), 1.0
        while len(path) <= length and reached >= end.least:
            num_guesses = min(self._options.guesses, length - len(path))
            tree = yield from self._first_level.propose(context, path, num_guesses)
            rows = tree_rows(tree, len(context) - 2 + len(path))
            result = yield ForwardRequest(model, rows, self.partial, len(tree))
            ranked = self._choose(result.logits, tree, context, path)
            choices = [each.tokens[0] if each.tokens else NO_TOKEN for each in ranked]
            walked = tree.along(choices)
            self.partial.commit(walked)
            self._first_level.learn([choices[step] for step in walked])
            if choices[walked[-1]] == NO_TOKEN:
                break
            sources = [*(tree.sources[step] for step in walked[1:]), RETRIEVAL]
            for step, source in zip(walked, sources, strict=True):
                node = trie.add(node, choices[step], source)
                path.append(choices[step])
                leads.append(ranked[step].lead)
                reached *= end.rate(ranked[step].lead)
        self.partial.drop_drafts()
        self._num_drafted = len(path) - 1
        self.confidence.expect(path[1:], leads)
        return trie.tree()

    def _choose(self, logits: Tensor, tree: Tree, context: Context, path: Sequence[int]) -> list[Ranked]:
        """Level 2's token after each node of a tree on the last token of `path`, chosen with the target's noise."""
        paths = [[*path[1:], *(tree.tokens[step] for step in tree.path(node)[1:])] for node in range(len(tree))]
        return [self._sampler.ranked(row, context, drafted, 1) for row, drafted in zip(logits, paths, strict=True)]

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.confidence.learn(accepted.tokens)
        if self._num_drafted:
            self._rates.append(len(accepted.sources) / self._num_drafted)
            self._num_drafted = 0
        if len(self._rates) == _RATED_STEPS and statistics.fmean(self._rates) < self._options.floor:
            self.partial.select_again()
            self._rates.clear()
        self._update(accepted.verified)

    def _update(self, verified: Verified | None) -> None:
        self.partial.update(verified.attention if verified else None)
        if self._vocabulary and verified:
            self._vocabulary.learn(verified)


def _first_of(options: TriForceOptions, *, has_head: bool, has_model: bool) -> str:
    """What level 1 is: head, model or ngrams. UsageError if there is no such part."""
    first = options.first
    if first == AUTO_FIRST:
        first = "head" if has_head and options.may_use_head else "model"
    check(first != "head" or has_head, "first", first, "auto, model or ngrams",
          "the model has no EAGLE or block head; --heads names one")
    return "ngrams" if first == "model" and not has_model else first


def tapped_drafts(head: Eagle | BlockHead, model: Transformer) -> TapLog:
    """A log for the states of level 2 that a head reads. model: the target"""
    return TapLog(model.kernels, head.taps, model.config.hidden_size)


def new_reader(head: Eagle | BlockHead, cache: FullCache, sampler: Sampler, states: TapLog, longest: int,
               draft_vocabulary: VocabularySize = AUTO_VOCABULARY) -> Reader:
    """What a head drafts with, after the text and after drafted tokens.

    states   of drafted tokens
    longest  of these at most
    """
    if isinstance(head, BlockHead):
        return BlockModel(BlockOptions(draft_vocabulary=draft_vocabulary), head, cache, sampler, states, longest)
    return EagleDraftModel.of(EagleOptions(), head, cache, states, longest)


def _with_head(head: Eagle | BlockHead, reader: Reader, sampler: Sampler, guesses: int) -> FirstLevel:
    if isinstance(reader, BlockModel):
        return FirstLevelSlots(reader, BLOCK)
    assert isinstance(head, Eagle)
    if head.config.is_parallel:
        return FirstLevelSlots(ParallelEagleModel(reader, head, sampler, guesses), EAGLE)
    return FirstLevelChain(reader, sampler, EAGLE)
