"""TokenSwift's drafter: one forward of the target over a partial cache, chained heads, n-grams, one trie.

    root ─ partial-cache forward ─ h_0 ── LM head ─────── token 1
                                    └ head 1 ─ head 2 ─ head 3 ── tokens 2, 3, 4

Candidates at each depth are ranked with the noise that the target will use. They are combined as the
tree template says (the paper's [1, 3, 3, 3]: one first token, three children for each node below), and
behind each first token stand the n-grams that followed it before. The default template is the one that
was fastest where it was measured (docs/notebook.md); where rows are cheaper, wider ones pay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from longdraft.cache.full import FullCache
from longdraft.cache.partial import CacheMode, PartialBudget, PartialCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.ngram import DelayedTable, NgramOptions
from longdraft.drafters.table import RANKED
from longdraft.errors import UsageError, check
from longdraft.model.heads import Heads
from longdraft.model.transformer import Rows, Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

SELF, HEADS = "self", "heads"
_MAX_NODES = 1024


@dataclass(frozen=True)
class TokenSwiftOptions:
    """Options of `tokenswift`.

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
    """

    tree: tuple[int, ...] = (1, 1)
    continuations: int = 2
    seen: int = 2
    order: int = 4
    capacity: int = 262_144
    delay: int = -1
    budget: int = 512
    sinks: int = 16
    recent: int = 128
    room: int = 128
    cache: CacheMode = "dynamic"

    def __post_init__(self) -> None:
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
        return total

    def ngrams(self) -> NgramOptions:
        return NgramOptions(max(1, self.continuations), self.seen, self.order, self.capacity, self.delay)


class TokenSwiftDrafter:
    def __init__(self, options: TokenSwiftOptions, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, heads: Heads) -> None:
        if len(options.tree) > len(heads) + 1:
            raise UsageError(f"tree {list(options.tree)} is {len(options.tree)} deep; allowed: at most "
                             f"{len(heads) + 1} with {len(heads)} heads")
        self._options = options
        self._model = model
        self._sampler = sampler
        self._heads = heads
        self._table = DelayedTable(options.ngrams(), params) if options.continuations else None
        size = PartialBudget(options.budget, options.sinks, options.recent, options.room)
        config = model.config
        self.partial = PartialCache(cache, model.kernels, config.num_kv_heads, config.head_dim, size, options.cache)

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._follow(context, verified)

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._follow(context, accepted.verified)

    def _follow(self, context: Context, verified: Verified | None) -> None:
        self.partial.refresh((lambda: verified.queries) if verified else None)
        if self._table:
            self._table.follow(context)

    def propose(self, context: Context, max_depth: int) -> Tree:
        trie = Trie(context.last)
        if max_depth == 0:
            return trie.tree()
        level = [0]
        for depth, candidates in enumerate(self._candidates(context, min(max_depth, len(self._options.tree)))):
            source = SELF if depth == 0 else HEADS
            level = [trie.add(node, token, source) for node in level for token in candidates]
            if depth == 0 and self._table:
                for node, token in zip(level, candidates, strict=True):
                    self._table.graft(trie, node, token, max_depth - 1)
        return trie.tree()

    def _candidates(self, context: Context, depth: int) -> list[list[int]]:
        """Ranked guesses for each of the next `depth` tokens."""
        position = len(context) - 1
        result = self._model.forward(Rows([context.last], [position], [-1]), self.partial)
        self.partial.commit(())
        logits = self._model.logits(result.hidden)
        if depth > 1:
            logits = torch.cat([logits, self._heads.logits(result.hidden)])
        return [self._sampler.rank(logits[i], position + 1 + i, context, self._options.tree[i])
                for i in range(depth)]
