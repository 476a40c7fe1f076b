"""The window of the repetition penalty: the last W tokens of the text, exact for every node of a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longdraft.request.context import Context
from longdraft.sampling.process import penalise


class PenaltyWindow:
    """Counts of the last `size` tokens of a context, and their penalty. An update costs time in proportion to the new
    tokens.

        text                 ... a b c d e f g              a window of 4 tokens
        at the root g                 [d e f g]
        at node y of g-x-y                [f g x y]         x and y are added, d and e are removed
    """

    def __init__(self, size: int, penalty: float) -> None:
        self._size = size
        self._penalty = penalty
        self._num_seen = 0
        self._counts: Counter[int] = Counter()

    def penalised(self, raw: NDArray[np.float32], context: Context,
                  paths: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Logits [R, V] with the penalty; row i is after the text and the tokens of paths[i]."""
        self._update(context)
        rows = raw.copy()
        common = np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))
        rows[:, common] = penalise(raw[:, common], self._penalty)
        for row, unchanged, path in zip(rows, raw, paths, strict=True):
            if path:
                added, removed = self._difference(context, path)
                row[removed] = unchanged[removed]
                row[added] = penalise(unchanged[added], self._penalty)
        return rows

    def _update(self, context: Context) -> None:
        """Count the tokens that the context has gained since the last call."""
        start = len(context) - self._size
        for token in context.slice(max(self._num_seen, start), len(context)).tolist():
            self._counts[token] += 1
        for token in context.slice(self._num_seen - self._size, min(self._num_seen, start)).tolist():
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        self._num_seen = len(context)

    def _difference(self, context: Context, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens that `path`, written after the text, adds to the window, and tokens that it removes."""
        overflow = max(0, len(context) + len(path) - self._size)
        oldest = max(0, len(context) - self._size)
        oldest_tokens = Counter(context.slice(oldest, overflow).tolist())
        inside = set(path[-self._size :])
        added = inside - self._counts.keys()
        removed = {token for token, count in oldest_tokens.items() if self._counts[token] == count} - inside
        return list(added), list(removed)
