"""A smaller model that reads along: a reader for chains, with a cache of its own that follows text and drafts.

What it has read and what is asked are compared token by token only where it had read guesses; those that became text
stay, the rest is rolled back, and what is missing is read in one forward (at most CHUNK tokens of it in a step).

With a budget it reads a window of the text, as a text of its own: the first `sinks` tokens and the latest, at
positions 0, 1, 2, ... When the budget is full, the window moves up and is read anew.

    text     0 1 2 3 . . . . . . . 60 61 62 ... 99          budget 64, sinks 4, refresh 20
    rows     0 1 2 3               4  5  6  ... 43          44 rows, and 20 more until the window moves again

This is what StreamingLLM approximates by keeping old rows under new positions; read anew, rows have never seen what
has left the window, positions stay within those the model was trained on, however long the text, and it costs
(budget - refresh) / refresh rows for each token written, many in one forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.core import Context
from longdraft.model.routine import Routine, run_alone
from longdraft.model.transformer import Forward, ForwardRequest, Transformer, chain_rows

CHUNK = 512  # tokens read in one forward
MANY = 64  # tokens from which they are read as a prompt's are: guesses need not be exact


class StreamingDraftModel:
    """Reads text and drafts with `model`, at most `budget` rows of them."""

    def __init__(self, model: Transformer, vocab_size: int, budget: int, sinks: int, refresh: int) -> None:
        assert sinks >= 0 and refresh >= 1 and sinks + refresh < budget <= model.config.max_positions
        self._model = model
        self._vocab_size = vocab_size  # the target's
        self._budget, self._sinks, self._refresh = budget, sinks, refresh
        self.cache = model.new_cache()
        self._start = sinks  # the place in the text of the first row behind the sinks
        self._guesses: list[int] = []  # the last tokens read, as far as they were not text then

    def begin(self, context: Context) -> None:
        """Read the prompt, but for its last token."""
        end = len(context) - 1
        while self._place(self.cache.length) < end:
            run_alone(self._read_on(context, (), end))

    def read(self, context: Context, path: Sequence[int]) -> Routine[Tensor | None]:
        """Logits [1, V] behind `path` (the root, then drafted tokens); None while it is far behind the text."""
        end = len(context) - 1 + len(path)
        self._roll_back(context, path, end)
        result = yield from self._read_on(context, path, end)
        place = self._place(self.cache.length)
        self._guesses = _tokens(context, path, len(context), place)
        return self._fit(result.logits) if place == end else None

    def _roll_back(self, context: Context, path: Sequence[int], end: int) -> None:
        """Drop the rows of guesses that are neither text nor `path`; at least the last of `path` is to be read."""
        place = self._place(self.cache.length)
        first = place - len(self._guesses)
        asked = _tokens(context, path, first, min(place, end))
        agreed = next((i for i, (a, b) in enumerate(zip(asked, self._guesses)) if a != b), len(asked))
        num_wrong = place - min(first + agreed, end - 1)
        if num_wrong > self.cache.length - self._sinks and self._start > self._sinks:
            self._move(end)  # the window holds nothing but wrong guesses
        else:
            self.cache.truncate(self.cache.length - num_wrong)

    def _read_on(self, context: Context, path: Sequence[int], end: int) -> Routine[Forward]:
        """Read up to place `end`, at most CHUNK tokens; with logits behind the last of them."""
        behind = max(self.cache.length, self._sinks)
        if behind + end - self._place(behind) > self._budget:
            self._move(end)
        row = self.cache.length
        tokens = _tokens(context, path, row, min(self._sinks, end)) if row < self._sinks else []
        tokens += _tokens(context, path, self._place(max(row, self._sinks)), end)
        known = self._model.config.vocab_size - 1  # ids beyond it are padding, never text: any row will do
        rows = chain_rows([min(token, known) for token in tokens[:CHUNK]], row)
        result = yield ForwardRequest(self._model, rows, self.cache, 1, is_prompt=len(rows.tokens) > MANY)
        self.cache.commit(range(len(rows.tokens)))
        return result

    def _place(self, row: int) -> int:
        """Which place of the text (and the drafts behind it) a row holds."""
        return row if row < self._sinks else row - self._sinks + self._start

    def _move(self, end: int) -> None:
        """Empty the cache, for a window that leaves `refresh` rows free when it has been read up to `end`."""
        self._start = max(self._sinks, end - (self._budget - self._sinks - self._refresh))
        self.cache.truncate(0)

    def _fit(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: models pad theirs to different sizes."""
        surplus = self._vocab_size - logits.shape[1]
        return functional.pad(logits, (0, surplus), value=-torch.inf) if surplus else logits


def _tokens(context: Context, path: Sequence[int], start: int, stop: int) -> list[int]:
    """Tokens of places [start, stop) of the text with `path`, whose first token is the text's last, behind it."""
    length = len(context)
    text: list[int] = context.slice(start, min(stop, length)).tolist()
    return text + list(path[max(start, length) - length + 1 : max(stop, length) - length + 1])
