"""Plain decoding on a device that runs ahead of the host: several tokens are computed before the host reads one.

    host     a b c d e f g h | read all eight | a step for each, without a forward   | ...
    device   [ graph of four tokens ][ graph of four tokens ]                          [ ...

A plain step ends with a wait of the host, which then launches the next step while the device idles: 0.35 ms on an H200
(notebook/2026-11.md). Here the device goes on by itself. It runs a chain of drafts with the target's own weights and
cache (longdraft/kernels/cuda/model_chain.py), whose best guesses are the tokens that the target chooses: the same
kernels rank them, after the same rows. Rows are written where the cache has them. Tokens after the end of a text are
dropped.
"""

from __future__ import annotations

from longdraft.cache.full import FullCache
from longdraft.kernels.chain_plan import DraftStores
from longdraft.kernels.launched import finished
from longdraft.kernels.switches import is_on
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Accepted
from longdraft.speculation.routine import CostClock

WRITES_AHEAD = is_on("WRITES_AHEAD")
MOST = 8  # tokens
_GRAPH = 4  # tokens of a graph: counts are multiples, so that no other graph is captured
LONG_TEXT = 256  # new tokens, and tokens that may follow, from which graphs of its own pay for a text


class PlainAhead:
    """Tokens of one text's plain decoding that were computed ahead.

    clock  of the request, which says whether others share its forwards; None: it runs alone
    """

    def __init__(self, model: Transformer, cache: FullCache, sampler: Sampler, clock: CostClock | None = None) -> None:
        self._model, self._cache, self._sampler, self._clock = model, cache, sampler, clock
        self._tokens: list[int] = []
        self._place = 0  # length of the text that the first of them follows
        self._is_begun = False

    def step(self, context: Context, max_tokens: int) -> Accepted | None:
        """The outcome of the next step, as that of `Step.run`; None where a step has to compute it."""
        if not self._tokens or self._place != len(context):
            self._place, self._tokens = len(context), self._computed(context, max_tokens)
        if not self._tokens:
            return None
        self._place += 1
        self._cache.skip(1)
        token = self._tokens.pop(0)
        context.extend([token])
        return Accepted((token,), (0,), (), None)

    def _computed(self, context: Context, max_tokens: int) -> list[int]:
        """The tokens that follow the text, as many as pay; none where that is not possible."""
        cache, model, is_on_device = self._cache, self._model, self._sampler.on_device is not None
        self._is_begun = self._is_begun or min(context.num_new, max_tokens) >= LONG_TEXT
        count = min(MOST, max_tokens // _GRAPH * _GRAPH - _GRAPH)  # a capture writes rows of a graph beyond
        is_alone = self._clock is None or self._clock.batch_size == 1
        can_run = WRITES_AHEAD and is_on_device and is_alone and self._is_begun and count > 0
        if not can_run or cache.taps or cache.states or cache.length + 1 != len(context):
            return []
        ranker = self._sampler.ranker(context, model.config.vocab_size, 1)
        if ranker is None:
            return []
        stores = DraftStores(cache.stores, cache.length)
        drafted = finished(ranker.draft(model.chain_plan(stores, [context.last], cache.length, count)))
        return [tokens[0] for tokens, _ in drafted or () if tokens]
