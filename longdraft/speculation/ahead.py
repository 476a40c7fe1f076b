"""Plain decoding that runs ahead of Python: several tokens are computed before the host reads one.

    host     a b c d e f g h | read all eight | a step for each, without a forward   | ...
    device   [ graph of four tokens ][ graph of four tokens ]                          [ ...

A plain step ends with a wait of the host, which then launches the next step while the device idles: 0.35 ms on an H200
(notebook/2026-11.md). Here the device goes on by itself. It runs a chain of drafts with the target's own weights and
cache (longdraft/kernels/cuda/model_chain.py), whose best guesses are the tokens that the target chooses: the same
kernels rank them, after the same rows. Rows are written where the cache has them, and states that a head taps are
kept. Tokens after the end of a text are dropped.

The compiled CPU kernels do the same in one call (longdraft/kernels/cpu/chain.py), from the embedding to the choice: a
step in Python takes a millisecond, because the weights have driven it out of the processor's caches.
"""

from __future__ import annotations

from time import perf_counter

from longdraft.cache.full import FullCache
from longdraft.kernels import Taps
from longdraft.kernels.chain_plan import DraftStores
from longdraft.kernels.launched import finished
from longdraft.kernels.switches import is_on
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.drafter import Accepted

WRITES_AHEAD = is_on("WRITES_AHEAD")
MOST = 8  # tokens
_GRAPH = 4  # tokens of a graph: counts are multiples, so that no other graph is captured
LONG_TEXT = 256  # new tokens, and tokens that may follow, from which graphs of its own pay for a text
_BURST_SECONDS = 0.04  # of what a processor computes ahead: a reader does not see that tokens come together


class PlainAhead:
    """Tokens of one text's plain decoding that were computed ahead.

    clock    of the request, which says whether others share its forwards; None: it runs alone
    is_long  the text is so long that graphs of its own pay for it
    """

    def __init__(self, model: Transformer, cache: FullCache, sampler: Sampler, clock: CostClock | None = None,
                 is_long: bool = False) -> None:
        self._model, self._cache, self._sampler, self._clock = model, cache, sampler, clock
        self._tokens: list[int] = []
        self._taps: Taps | None = None  # of the rows that the tokens were computed from
        self._length = 0  # length of the text that the first of them follows
        self._is_begun = is_long
        self._is_possible = WRITES_AHEAD and not cache.states
        self._burst = 1  # tokens that a processor computes ahead

    def forget(self) -> None:
        """Drop the tokens that follow: the text was cut, and goes on in another way."""
        self._tokens, self._taps = [], None

    @property
    def _is_on_device(self) -> bool:
        return self._sampler.on_device is not None

    @property
    def spare(self) -> int:
        """Tokens for which there must be room after those that are computed."""
        return _GRAPH if self._is_on_device else 0  # a capture writes rows of a graph beyond

    def step(self, context: Context, max_tokens: int) -> Accepted | None:
        """The outcome of the next step, as that of `Step.run`; None where a step has to compute it."""
        if not self._tokens or self._length != len(context):
            self._length, self._tokens = len(context), self._computed(context, max_tokens)
        if not self._tokens:
            return None
        self._length += 1
        self._cache.skip(1, self._next_taps())
        token = self._tokens.pop(0)
        context.extend([token])
        return Accepted((token,), (0,), (), None)

    def _next_taps(self) -> Taps | None:
        """The tapped states of the row of the next token."""
        if self._taps is None:
            return None
        layers, rows = self._taps
        self._taps = Taps(layers, rows[:, 1:])
        return Taps(layers, rows[:, :1])

    def _computed(self, context: Context, max_tokens: int) -> list[int]:
        """The tokens that follow the text, as many as pay; none where that is not possible."""
        cache, model = self._cache, self._model
        is_alone = self._clock is None or self._clock.batch_size == 1
        if not self._is_possible or not is_alone or cache.length + 1 != len(context):
            return []
        is_on_device = self._is_on_device
        count = self._graph_tokens(context, max_tokens) if is_on_device else min(self._burst, max_tokens)
        ranker = self._sampler.ranker(context, model.config.vocab_size, 1) if count > 0 else None
        if ranker is None:
            return []
        began = perf_counter()
        if not is_on_device:
            cache.reserve(cache.length + count)
        self._taps = cache.new_taps(count)
        stores = DraftStores(cache.stores, cache.length, taps=self._taps)
        drafted = finished(ranker.draft(model.chain_plan(stores, [context.last], cache.length, count)))
        tokens = [tokens[0] for tokens, _ in drafted or () if tokens]
        self._is_possible = drafted is not None  # it depends on the model and its taps alone
        if not is_on_device:
            fitting = _BURST_SECONDS * len(tokens) / (perf_counter() - began)
            self._burst = max(1, min(MOST, int(fitting)))
        return tokens

    def _graph_tokens(self, context: Context, max_tokens: int) -> int:
        """How many tokens a device computes ahead."""
        self._is_begun = self._is_begun or min(context.num_new, max_tokens) >= LONG_TEXT
        if not self._is_begun:
            return 0
        return min(MOST, max_tokens // _GRAPH * _GRAPH - self.spare)
