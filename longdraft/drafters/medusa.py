"""Medusa's drafter (arXiv 2401.10774): trained heads on the last verified row, one tree, no forward of its own.

    the last verified row ─┬─ LM head ── the root (already chosen)
                           ├─ head 1 ─── guesses at depth 1
                           └─ head 2 ─── guesses at depth 2

The guesses of each depth are ranked once, with the noise that the target will use. They are combined by their estimated
probabilities (longdraft/drafters/marginal_tree.py), or as a template says (longdraft/drafters/template.py). The heads
are Medusa's or TokenSwift's, which read the same row. Medusa's published code accepts typical tokens, which changes the
distribution; here the target's own choice decides, as for every drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longdraft.drafters import template
from longdraft.drafters.marginal_tree import MAX_NODES, SHORTLIST, MarginalTrees, Slot
from longdraft.drafters.options import DrafterOptions
from longdraft.errors import UsageError, check
from longdraft.kernels.chain_plan import Heads
from longdraft.request.context import Context
from longdraft.request.tree import Tree, Trie, root_only
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine

HEADS = "heads"  # the source of the guesses in the statistics
_BEST = "best-"  # begins the trees of the likeliest guesses


@dataclass(frozen=True)
class MedusaOptions(DrafterOptions):
    """Options of `medusa`.

    tree  best-N (the N likeliest guesses), widths (1,3: one guess, three after it), choices ("0 1 0.0": ranks from the
          root), or mc_sim_7b_63; at most as deep as there are heads. The default was measured with the bundled model's
          weak heads (notebook/2026-11.md); larger trees pay with better heads.
    """

    tree: str = "best-3"

    def __post_init__(self) -> None:
        if self.tree.startswith(_BEST):
            digits = self.tree.removeprefix(_BEST)
            check(digits.isdecimal() and 1 <= int(digits) <= MAX_NODES, "tree", self.tree,
                  f"{_BEST}1 to {_BEST}{MAX_NODES}")
        else:
            template.parse_template(self.tree)

    @property
    def num_best(self) -> int:
        """Nodes of a tree of the likeliest guesses; 0: the tree is a template."""
        return int(self.tree.removeprefix(_BEST)) if self.tree.startswith(_BEST) else 0


class MedusaDrafter:
    def __init__(self, options: MedusaOptions, sampler: Sampler, heads: Heads) -> None:
        self._num_best = options.num_best
        self._choices = () if self._num_best else template.parse_template(options.tree)
        if self._choices and template.depth(self._choices) > len(heads):
            raise UsageError(f"tree {options.tree!r} is {template.depth(self._choices)} deep; allowed: at most "
                             f"{len(heads)}, the number of heads")
        self._widths = [1 + max(path[depth] for path in self._choices if len(path) > depth)
                        for depth in range(template.depth(self._choices) if self._choices else 0)]
        self._trees = MarginalTrees(HEADS)
        self._sampler = sampler
        self._heads = heads
        self._hidden: Tensor | None = None  # [1, hidden] of the row that the root was chosen from

    def begin(self, context: Context, verified: Verified | None) -> None:
        # The prompt's last token is the first root; its own row is computed by the first verification.
        self._hidden = verified.hidden[-1:] if verified else None

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        if self._hidden is None or not max_depth:
            return root_only(context.last)
        if self._num_best:
            return (yield from self._best(self._heads.logits(self._hidden)[:max_depth], context))
        ranked = yield from template.ranked_heads(self._sampler, self._heads, self._hidden, None, context, (),
                                                  self._widths[:max_depth])
        trie = Trie(context.last)
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in self._choices:
            place, rank = len(path) - 1, path[-1]
            if place < len(ranked) and rank < len(ranked[place]) and path[:-1] in nodes:
                nodes[path] = trie.add(nodes[path[:-1]], ranked[place][rank], HEADS)
        return trie.tree()

    def _best(self, logits: Tensor, context: Context) -> Routine[Tree]:
        """The tree of the likeliest guesses from logits [slots, V]."""
        shortlists = yield from self._sampler.shortlists(logits, context, SHORTLIST)
        slots = [Slot(*shortlist) for shortlist in shortlists]
        return self._trees.grow(context.last, slots, self._num_best)

    def observe(self, context: Context, accepted: Accepted) -> None:
        assert accepted.verified
        self._trees.learn(accepted.tokens)
        self._hidden = accepted.verified.hidden[-1:]
