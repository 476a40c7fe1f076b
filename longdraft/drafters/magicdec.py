"""MagicDec's self-speculation (arXiv 2408.11049): the target drafts a chain for itself on a compressed cache.

    [ sinks | the window ]                            selection=streaming (StreamingLLM)
    [ sinks | heavy hitters, pooled | the latest ]    selection=snapkv (SnapKV)

The original chooses once, after the prompt, and so stops after some 100 tokens; here the choice is made anew every
`refresh` tokens. Rows drafted on the compressed cache never stay: verification's own take their place. No heads
are needed. What the keys left out would have given is merged in as the remainder (longdraft/cache/partial.py),
without which a window this small forgets too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longdraft.cache import select
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.suffix import SuffixOptions, SuffixText
from longdraft.errors import check
from longdraft.model.routine import Routine
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

SELF = "self"
_WINDOW = 32  # latest rows that SnapKV always holds


@dataclass(frozen=True)
class MagicDecOptions:
    """Options of `magicdec`.

    chain      tokens drafted in each step (the paper: 3 to 7, without the remainder)
    width      guesses at each place of the chain at most; it follows the best
    margin     how much less likely than the best the others may look, as a logarithm: 1 is exp(1) times
    selection  streaming | snapkv
    budget     rows of the compressed cache for each layer and KV head at each choice (the paper: 257, 4097)
    sinks      first positions of the text, always held
    refresh    tokens written between two choices; their rows join the cache meanwhile
    remainder  drafts count what the keys that are left out would give them, as fitted to the verified tokens
    suffix     graft in what followed the longest suffix of the text before: behind the root, where a text that
               repeats itself is guessed farther than the chain reaches, and behind the chain
    """

    chain: int = 8
    width: int = 2
    margin: float = 0.5
    selection: Literal["streaming", "snapkv"] = "streaming"
    budget: int = 192
    sinks: int = 16
    refresh: int = 64
    remainder: bool = True
    suffix: bool = True

    def __post_init__(self) -> None:
        check(1 <= self.chain <= 64, "chain", self.chain, "1 to 64")
        check(1 <= self.width <= 16, "width", self.width, "1 to 16")
        check(self.margin >= 0, "margin", self.margin, "0 or more")
        check(self.selection in ("streaming", "snapkv"), "selection", self.selection, "streaming or snapkv")
        check(self.sinks >= 0, "sinks", self.sinks, "0 or more")
        check(self.refresh >= 1, "refresh", self.refresh, "1 or more")
        least = self.sinks + self.window
        check(self.budget >= least, "budget", self.budget, f"at least {least} (sinks and the latest rows)")

    @property
    def window(self) -> int:
        return _WINDOW if self.selection == "snapkv" else 1


def new_partial(options: MagicDecOptions, model: Transformer, cache: FullCache) -> PartialCache:
    """The compressed cache that the options describe."""
    config = model.config
    if options.selection == "snapkv":
        selection, latest = select.pooled(options.budget, options.sinks, options.window), options.window
    else:
        selection = select.streaming(config.num_kv_heads, options.budget, options.sinks)
        latest = options.budget - options.sinks
    size = PartialBudget(options.budget + options.refresh, options.sinks, latest, options.refresh)
    return PartialCache(cache, model.kernels, config.num_kv_heads, config.head_dim, size,
                        has_remainder=options.remainder, selection=selection)


class MagicDecDrafter:
    """`partial`: a compressed cache to share; its memory is counted here."""

    def __init__(self, options: MagicDecOptions, model: Transformer, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, partial: PartialCache | None = None) -> None:
        self._length = options.chain
        self.partial = partial or new_partial(options, model, cache)
        self._chain = Chain(SelfDraftModel(model, self.partial), sampler, options.width, SELF, options.margin)
        self._text = SuffixText(SuffixOptions(), params) if options.suffix else None

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + (self._text.nbytes if self._text else 0)

    def begin(self, context: Context, verified: Verified | None) -> None:
        self.partial.refresh((lambda: verified.attention_output) if verified else None)
        if self._text:
            self._text.follow(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = Trie(context.last)
        node, path = yield from self._chain.grow(trie, context, [context.last], min(self._length, max_depth))
        self.partial.forget()
        if self._text:
            self._text.graft(trie, 0, context, (), max_depth)
            if node and max_depth > len(path) - 1:
                self._text.graft(trie, node, context, path[1:], max_depth - len(path) + 1)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self.begin(context, accepted.verified)
