"""A chain from a smaller model of the same vocabulary (Leviathan et al. 2023; MagicDec with a standalone draft)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longdraft.drafters.chain import Chain
from longdraft.drafters.confidence import Confidence
from longdraft.drafters.options import DrafterOptions, check_chain, check_window
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import check
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.tree import Tree, Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import Routine

DRAFT = "draft"  # the source of the guesses in the statistics
_BUDGET, _SINKS, _REFRESH = 1024, 4, 256


@dataclass(frozen=True)
class DraftModelOptions(DrafterOptions):
    """Options of `draft-model`.

    model    the draft model: a bundled name, a folder or a hub id; its tokenizer must be the target's;
             default: the one in the sub-folder `draft` of the target's folder
    chain    tokens drafted in each step
    width    guesses at each place of the chain; the chain continues with the best one
    cache    streaming: the draft model reads the first tokens and the latest; full: all of the text its context allows
    budget   tokens that the draft model reads at most (streaming)
    sinks    first tokens of the text that the draft model always reads (streaming)
    refresh  tokens written until a full window moves (streaming)
    """

    model: str = ""
    chain: int = 4
    width: int = 1
    cache: Literal["streaming", "full"] = "streaming"
    budget: int = _BUDGET
    sinks: int = _SINKS
    refresh: int = _REFRESH

    def __post_init__(self) -> None:
        check_chain(self.chain, self.width)
        check(self.cache in ("streaming", "full"), "cache", self.cache, "streaming or full")
        check_window(self.budget, self.sinks, self.refresh)
        is_default = (self.budget, self.sinks, self.refresh) == (_BUDGET, _SINKS, _REFRESH)
        check(self.cache == "streaming" or is_default, "cache", self.cache, "streaming, with budget, sinks or refresh")

    @property
    def draft_model(self) -> str:
        return self.model

    @property
    def draft_window(self) -> int:
        return self.budget if self.cache == "streaming" else 0


def windowed(model: Transformer, target: Transformer, budget: int, sinks: int, refresh: int, clock: CostClock | None,
             name: str = "budget") -> StreamingDraftModel:
    """`model` as a drafter of `target` that reads a window of the text. UsageError if its context is smaller.

    clock  of the request; None: the request runs alone
    name   of the option that is its budget
    """
    most = model.config.max_positions
    check(budget <= most, name, budget, f"at most {most}, the draft model's context")
    check_window(budget, sinks, refresh, name)
    return StreamingDraftModel(model, target.config.vocab_size, budget, sinks, refresh, clock)


class DraftModelDrafter:
    """Drafts a chain with a smaller model.

    clock  of the request; None: the request runs alone
    """

    def __init__(self, options: DraftModelOptions, draft: Transformer, target: Transformer, sampler: Sampler,
                 clock: CostClock | None) -> None:
        self._length = options.chain
        if options.cache == "full":
            most = draft.config.max_positions
            self._draft_model = windowed(draft, target, most, _SINKS, max(1, most // 4), clock)
        else:
            self._draft_model = windowed(draft, target, options.budget, options.sinks, options.refresh, clock)
        self.confidence = Confidence()
        self._chain = Chain(self._draft_model, sampler, options.width, DRAFT, confidence=self.confidence)

    @property
    def nbytes(self) -> int:
        return self._draft_model.cache.nbytes

    def read_prompt(self, context: Context) -> Routine[None]:
        yield from self._draft_model.read_prompt(context)

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._draft_model.begin(context)

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        trie = Trie(context.last)
        yield from self._chain.draft(trie, context, [context.last], min(self._length, max_depth))
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        """The next proposal reads the new tokens."""
        self.confidence.learn(accepted.tokens)
