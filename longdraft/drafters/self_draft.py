"""The self-drafting chain of `tokenswift` and `magicdec`: the target itself drafts, on a partial KV cache.

    root ─┬─ t1 ── t2 ── ... ── tN ─┬─ a ─┬─ x        t1 .. tN  one forward of the target on the partial cache each
          ├─ t1'                    │     └─ g1 ── g2  t1'       a second guess where the first is unsure
          │                         └─ b ─── x        a, b      one more forward; then x: trained heads on its row
          └─ s1 ── s2 ── s3                           g, s      n-grams after a and b; suffix matches

One class drafts for both; they differ in their parts:

    tokenswift  (ICML 2025, arXiv 2502.18890)   a tree of trained heads and n-grams at the end of the chain;
                                                the partial cache holds sinks, heavy hitters and recent rows
    magicdec    (arXiv 2408.11049)              no heads; suffix matches after the root and after the chain;
                                                the partial cache is StreamingLLM's or SnapKV's

Every guess is ranked with the noise that the target will use (longdraft/sampling/sampler.py). The partial cache adds
the *remainder*: what the keys that it leaves out would give (longdraft/cache/partial.py). Without it, a cache this
small loses too much of the text. Drafted rows never stay in the cache: verification computes the rows that do.

MagicDec's published code selects its rows once, after the prompt, and stops after about 100 tokens; here, rows are
selected again every `refresh` tokens. The default trees were measured with the bundled model on a CPU
(notebook/2026-11.md), where rows are expensive. Wider trees pay where rows are cheap.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import ClassVar, Literal

from longdraft.cache import row_selection
from longdraft.cache.full import FullCache
from longdraft.cache.partial import CacheMode, PartialBudget, PartialCache
from longdraft.cache.taps import TapLog
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.draft_vocabulary import (
    AUTO_VOCABULARY,
    DraftVocabulary,
    VocabularySize,
    check_draft_vocabulary,
    vocabulary_size,
)
from longdraft.drafters.medusa import HEADS
from longdraft.drafters.ngram import NgramMatcher, NgramOptions
from longdraft.drafters.ngram_table import RANKED
from longdraft.drafters.options import ChainOptions
from longdraft.drafters.suffix import SuffixMatcher, SuffixOptions
from longdraft.drafters.template import MAX_NODES, ranked_heads
from longdraft.errors import UsageError, check
from longdraft.kernels.chain_plan import Heads
from longdraft.model.transformer import Transformer
from longdraft.parallel import shard_of
from longdraft.parts.draft_copy import AUTO_WEIGHTS, check_draft_weights
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine

SELF = "self"  # the source of the chain's guesses in the statistics
SelectionKind = Literal["heavy-hitters", "streaming", "snapkv"]  # how the rows of the partial cache are chosen
_SNAPKV_RECENT = 32  # last rows that SnapKV's selection always holds
AUTO_BUDGET = "auto"
_MOST_ROWS = 16_384
_SHARE_OF_WEIGHTS = 1 / 4  # of the bytes of the weights that a draft token reads: rows that take no more cost little


def _cost_little(model: Transformer, rows: int) -> bool:
    """Whether so many rows of a partial cache cost little beside the weights of `model`, which drafts. On a device
    that was not measured; ranks, whose shares of the weights differ, must do the same."""
    kernels = model.kernels
    if kernels.is_device or shard_of(kernels).size > 1:
        return False
    layers = [(each.num_kv_heads * kernels.cache_bytes(each.head_dim), each.window)
              for each in model.config.kv_attention]
    num_bytes = sum(size * min(rows, window or rows) for size, window in layers)
    return num_bytes <= _SHARE_OF_WEIGHTS * model.weights_bytes


def whole_rows(model: Transformer) -> int:
    """Tokens of a text up to which drafts read the full cache with `budget=auto`."""
    rows = _MOST_ROWS
    while rows and not _cost_little(model, rows):
        rows //= 2
    return rows


def selected_rows(model: Transformer, least: int) -> int:
    """Rows that are selected of a longer text with `budget=auto`."""
    window = max((each.window for each in model.config.kv_attention), default=0)
    return window if window > least and _cost_little(model, window) else least


@dataclass(frozen=True)
class SelfDraftOptions(ChainOptions):
    """Options of both drafters. A `chain` has 1 token in the paper of TokenSwift, 3 to 7 in that of MagicDec. With
    `suffix`, a chain without a template has matches after its end too: a repeated passage can be longer.

    least      the chain ends early where its next token is accepted with less than this probability, as far as the
               scores of its tokens and the outcomes of earlier ones tell; 0: never. `auto` sets it by cost
    remainder  drafts include an estimate of what the keys outside the partial cache give, fitted to verified tokens
    budget     auto | number of rows of the partial cache for each layer and KV head, at each selection for `magicdec`
               (TokenSwift: the prompt's length; MagicDec: 257, 4097). auto: 256, for `magicdec` 192. On a CPU, in one
               process, where the rows take at most a quarter of the bytes of the weights that a draft token reads: as
               many as the longest sliding window of a layer has, and drafts of a text of up to 16,384 tokens (8,192,
               4,096, ...) read the full cache, unless the model has delta layers or a head that reads its states
    sinks      first positions of the text, always held
    draft_weights  auto | same | file | int8 | int4: weights that the chain drafts with; the target verifies with its
               own. file: the numbers of the quantised file that the target was expanded from. auto, on a CPU: file
               where such a file takes less than 0.45 of the target's weights, else int4 where the weights are larger
               than the cache of 16,384 tokens, else int8 where they have 4 MiB or more, else same
    draft_vocabulary  auto | all | number of tokens that the chain can guess, the likely ones of the text.
               auto: 32,768 where that saves a fifth of what a draft token reads, else all
    """

    chain: int = 8
    least: float = 0.0
    remainder: bool = True
    budget: int | str = AUTO_BUDGET
    sinks: int = 16
    draft_weights: str = AUTO_WEIGHTS
    draft_vocabulary: VocabularySize = AUTO_VOCABULARY

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 <= self.least < 1, "least", self.least, "0 to below 1")
        is_known = isinstance(self.budget, int) or self.budget == AUTO_BUDGET
        check(is_known, "budget", self.budget, "auto, or a number of rows")
        check_draft_weights(self.draft_weights)
        check_draft_vocabulary(self.draft_vocabulary)

    def partial_rows(self, model: Transformer) -> int:
        return self.partial_budget(model).budget

    def partial_budget(self, model: Transformer) -> PartialBudget:
        """How the rows of a partial cache on which `model` drafts are divided."""
        if isinstance(self.budget, int):
            return self._divided(self.budget)
        return self._divided(selected_rows(model, self._least), whole_rows(model))

    @property
    @abstractmethod
    def _least(self) -> int:
        """Rows that `budget=auto` selects where nothing says otherwise."""

    @abstractmethod
    def _divided(self, rows: int, whole: int = 0) -> PartialBudget:
        """How so many rows are divided. whole: as in `PartialBudget`"""

    @property
    def copy_weights(self) -> str:
        return self.draft_weights


@dataclass(frozen=True)
class TokenSwiftOptions(SelfDraftOptions):
    """Options of `tokenswift`.

    tree           children of each node, depth by depth; at most one depth more than there are heads
                   (the paper: 1,3,3,3)
    continuations  n-grams added after each first guess of the tree at most; 0: none (the paper: 20)
    seen           number of times an n-gram must have occurred in the text to be tried (the paper: 1)
    order          tokens of an n-gram
    capacity       n-grams stored at most
    delay          as for `ngram`
    recent         last positions always held when rows are selected
    room           rows left free for new tokens until rows are selected again
    cache          dynamic | static | full: how the partial cache is maintained (longdraft/cache/partial.py)
    """

    suffix: bool = False
    tree: tuple[int, ...] = (1, 1)
    continuations: int = 1
    seen: int = 2
    order: int = 4
    capacity: int = 262_144
    delay: int = -1
    recent: int = 64
    room: int = 64
    cache: CacheMode = "dynamic"
    selection: ClassVar[SelectionKind] = "heavy-hitters"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(len(self.tree) >= 1 and all(width >= 1 for width in self.tree), "tree", list(self.tree),
              "whole numbers of 1 or more, such as 1,3,3,3")
        nodes = accumulate(accumulate(self.tree, mul))  # of the template, up to each depth
        check(all(num <= MAX_NODES for num in nodes), "tree", list(self.tree), f"at most {MAX_NODES} nodes")
        check(0 <= self.continuations <= RANKED, "continuations", self.continuations, f"0 to {RANKED}")
        check(self.cache in ("dynamic", "static", "full"), "cache", self.cache, "dynamic, static or full")
        _ = self.ngrams  # which checks its values, as the next line does
        self._divided(self.budget if isinstance(self.budget, int) else self._least)

    @property
    def ngrams(self) -> NgramOptions | None:
        """The options of the table whose n-grams follow the template's first guesses; None: no table."""
        options = NgramOptions(max(1, self.continuations), self.seen, self.order, self.capacity, self.delay)
        return options if self.continuations else None

    @property
    def _least(self) -> int:
        return max(256, self.sinks + self.recent + self.room)

    def _divided(self, rows: int, whole: int = 0) -> PartialBudget:
        return PartialBudget(rows, self.sinks, self.recent, self.room, whole)


@dataclass(frozen=True)
class MagicDecOptions(SelfDraftOptions):
    """Options of `magicdec`.

    selection  streaming | snapkv
    refresh    tokens written between two selections; their rows join the cache meanwhile
    """

    selection: SelectionKind = "streaming"
    refresh: int = 64
    tree: ClassVar[tuple[int, ...]] = ()
    ngrams: ClassVar[None] = None
    cache: ClassVar[CacheMode] = "dynamic"

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.selection in ("streaming", "snapkv"), "selection", self.selection, "streaming or snapkv")
        check(self.sinks >= 0, "sinks", self.sinks, "0 or more")
        check(self.refresh >= 1, "refresh", self.refresh, "1 or more")
        if isinstance(self.budget, int):
            check(self.budget >= self._held_rows, "budget", self.budget,
                  f"at least {self._held_rows} (sinks and the latest rows)")

    @property
    def _held_rows(self) -> int:
        return self.sinks + (_SNAPKV_RECENT if self.selection == "snapkv" else 1)

    @property
    def _least(self) -> int:
        return max(192, self._held_rows)

    def _divided(self, rows: int, whole: int = 0) -> PartialBudget:
        recent = _SNAPKV_RECENT if self.selection == "snapkv" else rows - self.sinks
        return PartialBudget(rows + self.refresh, self.sinks, recent, self.refresh, whole)


def new_partial_cache(options: TokenSwiftOptions | MagicDecOptions, model: Transformer, cache: FullCache,
                      taps: TapLog | None = None) -> PartialCache:
    """The partial cache over `cache` that the options describe, on which `model` drafts. taps: gets the tapped states
    of its drafts"""
    size = options.partial_budget(model)
    if options.selection == "streaming":
        selection = row_selection.streaming(size.selected, size.sinks)
    else:
        select_by_weight = row_selection.pooled if options.selection == "snapkv" else row_selection.heavy_hitters
        selection = select_by_weight(size.selected, size.sinks, size.recent)
    return PartialCache(cache, model.kernels, size, options.cache, options.remainder, selection, taps)


class SelfDrafter:
    """Drafts with the target on a partial cache.

    copy     a quantised copy of the target that drafts in its place; None: the target itself
    clock    of the request; None: the request runs alone
    heads    trained heads, which the template needs from its second depth on
    partial  a partial cache that several drafters of one request share; None: the drafter makes its own
    """

    def __init__(self, options: TokenSwiftOptions | MagicDecOptions, model: Transformer, cache: FullCache,
                 sampler: Sampler, params: SamplingParams, heads: Heads | None,
                 partial: PartialCache | None, copy: Transformer | None, clock: CostClock | None) -> None:
        num_heads = len(heads) if heads else 0
        if len(options.tree) > num_heads + 1:
            raise UsageError(f"tree {list(options.tree)} is {len(options.tree)} deep; allowed: at most "
                             f"{num_heads + 1} with {num_heads} heads")
        self._options = options
        self._sampler = sampler
        self._heads = heads
        self._is_shared = partial is not None
        drafting = copy or model
        self.partial = partial or new_partial_cache(options, drafting, cache)
        size = vocabulary_size(options.draft_vocabulary, drafting)
        self._vocabulary = DraftVocabulary(drafting, size) if size else None
        self._draft_model = SelfDraftModel(drafting, self.partial, clock, self._vocabulary)
        self.confidence = Confidence(options.least)
        self._chain = Chain(self._draft_model, sampler, options.width, SELF, options.margin, self.confidence)
        self._ngrams = NgramMatcher(options.ngrams, params) if options.ngrams else None
        self._suffix = SuffixMatcher(SuffixOptions(), params) if options.suffix else None

    @property
    def nbytes(self) -> int:
        """Memory of the drafter's own caches, tables and draft vocabulary; a shared partial cache is not counted."""
        partial = 0 if self._is_shared else self.partial.nbytes
        return partial + sum(part.nbytes for part in (self._ngrams, self._suffix, self._vocabulary) if part)

    def inherit(self, earlier: SelfDrafter, num_retracted: int) -> None:
        self._ngrams, self._suffix = earlier._ngrams, earlier._suffix

    def begin(self, context: Context, verified: Verified | None) -> None:
        self.partial.update(verified.attention if verified else None)
        if self._ngrams:
            self._ngrams.update(context)
        if self._suffix:
            self._suffix.update(context)
        if self._vocabulary and verified:
            self._vocabulary.learn(verified)

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.confidence.learn(accepted.tokens)
        self.begin(context, accepted.verified)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie, template = Trie(context.last), self._options.tree
        # Where the depth is limited, the chain gives way to the template, which needs no forwards.
        num_forwards = min(self._options.chain, max_depth, max(1, max_depth + 1 - len(template)))
        try:
            node, path = yield from self._chain.draft(trie, context, [context.last], num_forwards - bool(template))
            if template and len(path) == num_forwards:
                yield from self._add_template(trie, node, context, path, max_depth - num_forwards + 1)
        finally:  # a request that ends meanwhile leaves no drafts in a cache whose rows others may take
            self.partial.drop_drafts()
        if self._suffix:
            self._suffix.add_matches(trie, 0, context, (), max_depth)
            if not template and 1 < len(path) <= max_depth:
                self._suffix.add_matches(trie, node, context, path[1:], max_depth - len(path) + 1)
        return trie.tree()

    def _add_template(self, trie: Trie, node: int, context: Context, path: list[int], max_depth: int) -> Routine[None]:
        """The last forward of the chain, the template below `node`, and n-grams after the template's first guesses."""
        template = self._options.tree[:max_depth]
        result = yield from self._draft_model.forward(context, path)
        places = yield from ranked_heads(self._sampler, self._heads, result.hidden, result.logits, context, path[1:],
                                         template)
        parents = [node]
        for ahead, guesses in enumerate(places):
            parents = [trie.add(parent, token, HEADS if ahead else SELF) for parent in parents for token in guesses]
            if ahead == 0 and self._ngrams:
                for parent, token in zip(parents, guesses, strict=True):
                    self._ngrams.add_matches(trie, parent, context, [token], max_depth - 1)
