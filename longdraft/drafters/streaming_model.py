"""A draft model with a KV cache of its own that follows the text and its drafts.

Rows of drafted tokens that became text stay in the cache; rows of rejected ones are dropped. What is missing is read in
one forward, at most CHUNK tokens of it in a step. Tokens are compared only where the cache holds drafts.

With a budget, the model reads a window of the text: the first `sinks` tokens and the latest ones, at positions 0, 1, 2,
... When the window is full, it moves to the end of the text and is read again.

    text     0 1 2 3 . . . . . . . 60 61 62 ... 99          budget 64, sinks 4, refresh 20
    rows     0 1 2 3               4  5  6  ... 43          44 rows, and 20 more until the window moves again

StreamingLLM approximates this: it keeps old rows at new positions. Here, rows never depend on tokens that have left the
window, and positions stay within the model's context, however long the text. The cost is (budget - refresh) / refresh
rows for each token written, many in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.drafters.chain import shares_forwards
from longdraft.kernels.chain_plan import ChainPlan, DraftStores, Ranked
from longdraft.model.transformer import Forward, ForwardRequest, Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.request.tree import common_prefix
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.routine import Routine, run_alone

CHUNK = 512  # tokens read in one forward at most
PROMPT_LIKE = 64  # tokens from which a forward uses the kernels for prompts: drafts need not be exact


class StreamingDraftModel:
    """Reads the text and drafts with `model`. Implements `DraftModel` (longdraft/drafters/chain.py).

    vocabulary  number of the target's tokens
    budget      rows of the cache at most; no more than the model's context
    sinks       first tokens of the text that stay in the window
    refresh     rows left free when the window moves
    clock       of the request; None: the request runs alone
    """

    def __init__(self, model: Transformer, vocabulary: int, budget: int, sinks: int, refresh: int,
                 clock: CostClock | None = None) -> None:
        assert sinks >= 0 and refresh >= 1 and sinks + refresh < budget <= model.config.max_positions
        self._model = model
        self.vocabulary = vocabulary
        self._budget, self._sinks, self._refresh = budget, sinks, refresh
        self._clock = clock
        self.cache = model.new_cache()
        self._clear()
        self._start = sinks  # place in the text of the first row after the sinks
        self._drafts: list[int] = []  # the last tokens read, as far as they were drafts at that time

    def read_prompt(self, context: Context) -> Routine[None]:
        """Read the prompt without its last token."""
        end = len(context) - 1
        while self._place(self.cache.length) < end:
            yield from self._read_on(context, (), end)
            self._settle(end)

    def begin(self, context: Context) -> None:
        """Read what `read_prompt` has not read."""
        run_alone(self.read_prompt(context))

    def next_logits(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        """Logits [1, V] after `path` (the root, then drafted tokens); None if CHUNK tokens did not reach its end."""
        end = len(context) - 1 + len(path)
        self._roll_back(context, path, end)
        self._settle(len(context) - 1)
        result = yield from self._read_on(context, path, end)
        self._note_drafts(context, path)
        return self._fit_vocabulary(result.logits) if self._place(self.cache.length) == end else None

    def plan(self, context: Context, path: Sequence[int], length: int) -> ChainPlan | None:
        """See `DraftModel`. Only for a model with the target's vocabulary, where neither the window moves nor much text
        is left to read."""
        if self.cache.states or self._model.config.vocab_size != self.vocabulary:
            return None
        last = len(context) - 2 + len(path)  # the place of the last token of `path`
        self._roll_back(context, path, last + 1)
        self._note_drafts(context, path)
        after_sinks = max(self.cache.length, self._sinks)
        missing = last - self._place(self.cache.length)
        if missing >= CHUNK or after_sinks + last + length - self._place(after_sinks) > self._budget:
            return None
        if missing > 0:
            run_alone(self._read_on(context, path, last))
        row = self.cache.length
        plan = self._model.chain_plan(DraftStores(self.cache.stores, row), path, row, length,
                                      shares_forwards(self._model, self._clock))
        return plan._replace(is_smaller=True)

    def has_drafted(self, context: Context, path: Sequence[int], drafted: Sequence[Ranked]) -> None:
        self.cache.skip(len(drafted))
        self._note_drafts(context, [*path, *(tokens[0] for tokens, _ in drafted if tokens)])

    def _note_drafts(self, context: Context, path: Sequence[int]) -> None:
        """The rows after those of the text are of drafted tokens of `path`."""
        self._drafts = _tokens(context, path, len(context), self._place(self.cache.length))

    def _roll_back(self, context: Context, path: Sequence[int], end: int) -> None:
        """Drop the rows of drafts that are neither text nor in `path`, and always the row of the last token of `path`,
        which is read for its logits."""
        place = self._place(self.cache.length)
        first = place - len(self._drafts)
        wanted = _tokens(context, path, first, min(place, end))
        num_dropped = place - min(first + common_prefix(wanted, self._drafts), end - 1)
        if num_dropped > self.cache.length - self._sinks and self._start > self._sinks:
            self._move_window(end)  # it holds wrong drafts only
        else:
            self.cache.truncate(self.cache.length - num_dropped)

    def _read_on(self, context: Context, path: Sequence[int], end: int) -> Routine[Forward]:
        """Read up to place `end`, at most CHUNK tokens; the result has the logits of the last one read."""
        after_sinks = max(self.cache.length, self._sinks)
        if after_sinks + end - self._place(after_sinks) > self._budget:
            self._move_window(end)
        row = self.cache.length
        tokens = _tokens(context, path, row, min(self._sinks, end)) if row < self._sinks else []
        tokens += _tokens(context, path, self._place(max(row, self._sinks)), end)
        largest = self._model.config.vocab_size - 1  # larger ids are the target's padding and never text
        rows = chain_rows([min(token, largest) for token in tokens[:CHUNK]], row)
        result = yield ForwardRequest(self._model, rows, self.cache, 1, is_prompt=len(rows.tokens) > PROMPT_LIKE)
        self.cache.commit(range(len(rows.tokens)))
        return result

    def _settle(self, place: int) -> None:
        """Rows of the text in front of this place are never dropped, so delta layers need not keep their inputs."""
        if self.cache.states:
            self.cache.states.settle(place if place < self._sinks else place - self._start + self._sinks)

    def _clear(self) -> None:
        """Drop all rows. Delta layers keep the inputs of later ones, because drafts are taken back."""
        self.cache.clear()
        if self.cache.states:
            self.cache.states.hold(0)

    def _place(self, row: int) -> int:
        """Place in the text, and the drafts after it, of a row of the cache."""
        return row if row < self._sinks else row - self._sinks + self._start

    def _move_window(self, end: int) -> None:
        """Empty the cache; when the new window has been read up to `end`, `refresh` rows are free."""
        self._start = max(self._sinks, end - (self._budget - self._sinks - self._refresh))
        self._clear()

    def _fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [1, V] over the target's vocabulary: models pad theirs to different sizes."""
        surplus = self.vocabulary - logits.shape[1]
        return functional.pad(logits, (0, surplus), value=-torch.inf) if surplus else logits


def _tokens(context: Context, path: Sequence[int], start: int, stop: int) -> list[int]:
    """Tokens at places [start, stop) of the text with `path` after it; `path` begins with the text's last token."""
    length = len(context)
    text: list[int] = context.slice(start, min(stop, length)).tolist()
    return text + list(path[max(start, length) - length + 1 : max(stop, length) - length + 1])
