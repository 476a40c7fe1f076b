"""TokenSwift's drafter: one forward of the target over a partial cache, chained heads, n-grams, one trie.

    root ─ forward on the partial cache ─ h_0 ── LM head ─────── token 1
                                           └ head 1 ─ head 2 ─ head 3 ── tokens 2, 3, 4

With `chain` > 1 that many tokens are drafted by forwards of the model, one behind the other (the self-speculation
of MagicDec), and the template stands at the end of the chain.

Candidates at each depth are ranked with the noise that the target will use. They are combined as the
tree template says (the paper's [1, 3, 3, 3]: one first token, three children for each node below), and
behind each first token stand the n-grams that followed it before. The defaults were measured on the bundled
model and a CPU (docs/notebook.md), where rows are dear; where they are cheaper, wider templates pay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.cache.full import FullCache
from longdraft.cache.partial import CacheMode, PartialBudget, PartialCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.ngram import DelayedTable, NgramOptions
from longdraft.drafters.ngram_table import RANKED
from longdraft.drafters.suffix import SuffixOptions, SuffixText
from longdraft.errors import UsageError, check
from longdraft.model.heads import Heads
from longdraft.model.routine import Routine
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

SELF, HEADS = "self", "heads"
_MAX_NODES = 1024


@dataclass(frozen=True)
class TokenSwiftOptions:
    """Options of `tokenswift`.

    chain          tokens drafted by forwards on the partial cache, one behind the other (the paper: 1)
    width          guesses at each place of the chain at most; it follows the best
    margin         how much less likely than the best the others may look, as a logarithm: 1 is exp(1) times
    remainder      drafts count what the keys that are left out would give them, as fitted to the verified tokens
    tree           children of each node, depth by depth; at most one depth more than there are heads
                   (the paper: 1,3,3,3)
    continuations  n-grams grafted behind each first token at most; 0: none (the paper: 20)
    seen           how often an n-gram must have stood in the text to be tried (the paper: 1)
    order          tokens of an n-gram
    capacity       n-grams remembered at most
    delay          as for `ngram`
    budget         rows of the partial cache for each layer and KV head (the paper: the prompt's length)
    sinks          first positions always held
    recent         last positions always held when the partial cache is chosen
    room           rows left free for what comes until it is chosen again
    cache          dynamic | static | full: how the partial cache is kept (ablation)
    suffix         graft in what followed the longest suffix of the text before, behind the root
    """

    chain: int = 8
    width: int = 2
    margin: float = 0.5
    remainder: bool = True
    tree: tuple[int, ...] = (1, 1)
    continuations: int = 1
    seen: int = 2
    order: int = 4
    capacity: int = 262_144
    delay: int = -1
    budget: int = 256
    sinks: int = 16
    recent: int = 64
    room: int = 64
    cache: CacheMode = "dynamic"
    suffix: bool = False

    def __post_init__(self) -> None:
        check(1 <= self.chain <= 64, "chain", self.chain, "1 to 64")
        check(1 <= self.width <= 16, "width", self.width, "1 to 16")
        check(self.margin >= 0, "margin", self.margin, "0 or more")
        check(len(self.tree) >= 1 and all(width >= 1 for width in self.tree), "tree", list(self.tree),
              "whole numbers of 1 or more, such as 1,3,3,3")
        check(self.num_nodes <= _MAX_NODES, "tree", list(self.tree), f"at most {_MAX_NODES} nodes")
        check(0 <= self.continuations <= RANKED, "continuations", self.continuations, f"0 to {RANKED}")
        check(self.cache in ("dynamic", "static", "full"), "cache", self.cache, "dynamic, static or full")
        PartialBudget(self.budget, self.sinks, self.recent, self.room)
        self.ngrams()

    @property
    def num_nodes(self) -> int:
        total, level = 0, 1
        for width in self.tree:
            level *= width
            total += level
            if total > _MAX_NODES:  # by far, maybe
                break
        return total

    def ngrams(self) -> NgramOptions:
        return NgramOptions(max(1, self.continuations), self.seen, self.order, self.capacity, self.delay)


class TokenSwiftDrafter:
    """`partial`: a partial cache to share, instead of one of its own."""

    def __init__(self, options: TokenSwiftOptions, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, heads: Heads, partial: PartialCache | None = None) -> None:
        if len(options.tree) > len(heads) + 1:
            raise UsageError(f"tree {list(options.tree)} is {len(options.tree)} deep; allowed: at most "
                             f"{len(heads) + 1} with {len(heads)} heads")
        self._options = options
        self._sampler = sampler
        self._heads = heads
        self._table = DelayedTable(options.ngrams(), params) if options.continuations else None
        size = PartialBudget(options.budget, options.sinks, options.recent, options.room)
        config = model.config
        self._is_shared = partial is not None
        self.partial = partial or PartialCache(cache, model.kernels, config.num_kv_heads, config.head_dim, size,
                                               options.cache, options.remainder)
        self._reader = SelfDraftModel(model, self.partial)
        self._chain = Chain(self._reader, sampler, options.width, SELF, options.margin)
        self._suffix = SuffixText(SuffixOptions(), params) if options.suffix else None

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._follow(context, verified)

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._follow(context, accepted.verified)

    @property
    def nbytes(self) -> int:
        own = 0 if self._is_shared else self.partial.nbytes
        return own + (self._suffix.nbytes if self._suffix else 0)

    def _follow(self, context: Context, verified: Verified | None) -> None:
        self.partial.refresh((lambda: verified.attention_output) if verified else None)
        if self._table:
            self._table.follow(context)
        if self._suffix:
            self._suffix.follow(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = Trie(context.last)
        # The template keeps its depth where that is limited: it costs no forwards.
        chain = min(self._options.chain, max_depth, max(1, max_depth + 1 - len(self._options.tree)))
        if chain:
            node, path = yield from self._chain.grow(trie, context, [context.last], chain - 1)
            if len(path) == chain:
                yield from self._spread(trie, node, context, path, max_depth - chain + 1)
            self.partial.forget()
        if self._suffix:
            self._suffix.graft(trie, 0, context, (), max_depth)
        return trie.tree()

    def _spread(self, trie: Trie, node: int, context: Context, path: list[int], max_depth: int) -> Routine[None]:
        """The template below the end of the chain, and n-grams behind its first tokens."""
        template = self._options.tree[:max_depth]
        result = yield from self._reader.forward(context, path)
        logits = result.logits
        if len(template) > 1:
            logits = torch.cat([logits, self._heads.logits(result.hidden)])
        level = [node]
        for ahead, width in enumerate(template):
            candidates = self._sampler.rank(logits[ahead], context, path[1:], width, ahead)
            source = HEADS if ahead else SELF
            level = [trie.add(parent, token, source) for parent in level for token in candidates]
            if ahead == 0 and self._table:
                for child, token in zip(level, candidates, strict=True):
                    self._table.graft(trie, child, token, max_depth - 1)
