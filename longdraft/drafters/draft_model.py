"""A smaller model of the same vocabulary drafts a chain (Leviathan et al. 2023; MagicDec with a standalone draft)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longdraft.core import Context
from longdraft.drafters.chain import Chain
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import check
from longdraft.model.routine import Routine
from longdraft.model.transformer import Transformer
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.tree import Tree, Trie

DRAFT = "draft"
_BUDGET, _SINKS, _REFRESH = 1024, 4, 256


@dataclass(frozen=True)
class DraftModelOptions:
    """Options of `draft-model`.

    model    the smaller model: a bundled name, a folder or a hub id; its tokenizer must be the target's;
             default: the one in the model's own folder `draft`
    chain    tokens drafted in each step
    width    guesses at each place of the chain, which follows the best
    cache    streaming: it reads the first tokens and the latest; full: all of the text its context allows
    budget   tokens that it reads at most (streaming)
    sinks    first tokens of the text that it always reads (streaming)
    refresh  tokens written until a full window moves up (streaming)
    """

    model: str = ""
    chain: int = 4
    width: int = 1
    cache: Literal["streaming", "full"] = "streaming"
    budget: int = _BUDGET
    sinks: int = _SINKS
    refresh: int = _REFRESH

    def __post_init__(self) -> None:
        check(1 <= self.chain <= 64, "chain", self.chain, "1 to 64")
        check(1 <= self.width <= 16, "width", self.width, "1 to 16")
        check(self.cache in ("streaming", "full"), "cache", self.cache, "streaming or full")
        check_window(self.budget, self.sinks, self.refresh)
        is_default = (self.budget, self.sinks, self.refresh) == (_BUDGET, _SINKS, _REFRESH)
        check(self.cache == "streaming" or is_default, "cache", self.cache, "streaming, with budget, sinks or refresh")

    @property
    def reads(self) -> int:
        """Rows that the model's rotations must reach; 0: all of its context."""
        return self.budget if self.cache == "streaming" else 0


def check_window(budget: int, sinks: int, refresh: int) -> None:
    check(sinks >= 0, "sinks", sinks, "0 or more")
    check(refresh >= 1, "refresh", refresh, "1 or more")
    check(budget > sinks + refresh, "budget", budget, f"more than sinks + refresh ({sinks + refresh})")


def streaming(model: Transformer, target: Transformer, budget: int, sinks: int, refresh: int) -> StreamingDraftModel:
    """A model that reads a window of the text. UsageError where its context is smaller than the window."""
    most = model.config.max_positions
    check(budget <= most, "budget", budget, f"at most {most}, the draft model's context")
    return StreamingDraftModel(model, target.config.vocab_size, budget, sinks, refresh)


class DraftModelDrafter:
    def __init__(self, options: DraftModelOptions, draft: Transformer, target: Transformer, sampler: Sampler) -> None:
        self._length = options.chain
        if options.cache == "full":
            most = draft.config.max_positions
            self._follower = StreamingDraftModel(draft, target.config.vocab_size, most, _SINKS, refresh=max(1, most // 4))
        else:
            self._follower = streaming(draft, target, options.budget, options.sinks, options.refresh)
        self._chain = Chain(self._follower, sampler, options.width, DRAFT)

    @property
    def nbytes(self) -> int:
        return self._follower.cache.nbytes

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._follower.begin(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = Trie(context.last)
        yield from self._chain.grow(trie, context, [context.last], min(self._length, max_depth))
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        """Nothing: the next proposal reads what has become text."""
