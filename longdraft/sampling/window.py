"""Which tokens the repetition penalty sees: the last W of the text, exact for every node of a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longdraft.core import Context


class PenaltyWindow:
    """Counts of the last `size` tokens of a context, kept up to date with work bounded by what is new.

        text      ... a b c d e f g          a window of 4 ends with the root g
        at g           [d e f g]
        at node y of g-x-y:  [f g x y]       two tokens came in, the two oldest left
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen = 0
        self._counts: Counter[int] = Counter()

    def sync(self, context: Context) -> None:
        """Take in the tokens that the context gained since the last call."""
        for token in context.slice(max(self._seen, len(context) - self._size), len(context)).tolist():
            self._counts[token] += 1
        for token in context.slice(self._seen - self._size, min(self._seen, len(context) - self._size)).tolist():
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        self._seen = len(context)

    def tokens(self) -> NDArray[np.int64]:
        """The distinct tokens of the window that ends with the root, in no particular order."""
        return np.fromiter(self._counts, dtype=np.int64, count=len(self._counts))

    def change(self, context: Context, path: Sequence[int]) -> tuple[set[int], set[int]]:
        """Tokens that come in and that leave when `path` (root excluded) is written behind the text."""
        assert self._seen == len(context)
        overflow = max(0, len(context) + len(path) - self._size)
        oldest = max(0, len(context) - self._size)
        gone = Counter(context.slice(oldest, overflow).tolist())
        inside = set(path[-self._size :])
        added = inside - self._counts.keys()
        left = {token for token, count in gone.items() if self._counts[token] == count} - inside
        return added, left
