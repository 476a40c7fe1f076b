"""An index of what followed every piece of a text: the compiled suffix automaton, or its obvious twin.

    index = new_index(capacity=0, longest=16)
    index.extend(np.array([5, 6, 7, 5, 6], np.int32))
    index.guess(np.array([5], np.int32), budget=4, depth=2, min_match=1, seen=1, contexts=2, min_probability=0.1)

The definitions stand in csrc/suffix.h. The twin is what the tests compare with and what serves where the compiled
module is missing: it agrees to the last bit, and takes time in proportion to how often the last token stood in the
text.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

try:
    from longdraft.kernels._cpu import SuffixIndex
except ImportError:
    SuffixIndex = None  # type: ignore[assignment, misc]

RECENT = 16  # successors of a context that are looked at, the latest first
MAX_CONTEXTS = 8
ESCAPE = 8.0
SEPARATOR = -1  # stands between texts: it is indexed, but, like all that is negative, never guessed

Tokens = NDArray[np.int32]
Guesses = tuple[list[int], list[int], list[float]]


class Index(Protocol):
    """Texts taken in token by token, and trees of what may come next."""

    @property
    def nbytes(self) -> int:
        """Memory held."""

    def __len__(self) -> int:
        """Tokens indexed: all of them, or with a capacity at least half as many of the last ones."""

    def extend(self, tokens: Tokens) -> None:
        """Take in the next tokens of the text."""

    def guess(self, tail: Tokens, budget: int, depth: int, min_match: int, seen: int, contexts: int,
              min_probability: float) -> Guesses:
        """Tokens, parents (-1: the end of `tail`) and probabilities of what may follow `tail`, likeliest first."""


def new_index(capacity: int, longest: int) -> Index:
    """An empty index. capacity: tokens held at most, 0 for any number; longest: of a context, in tokens."""
    return ObviousIndex(capacity, longest) if SuffixIndex is None else SuffixIndex(capacity, longest)


class _Context(NamedTuple):
    """A suffix of the text so far: where in the indexed text a token follows it, and which tokens those are."""

    length: int
    followed: list[int]  # positions of the tokens behind it, in order
    successors: dict[int, int]  # token -> how often

    def latest(self, text: Sequence[int]) -> Iterable[int]:
        """The RECENT successors that were seen last, the latest first."""
        latest = dict.fromkeys(text[position] for position in reversed(self.followed))
        return list(latest)[:RECENT]


class ObviousIndex:
    """csrc/suffix.h in the obvious way: lists of the places where a piece of text ends."""

    def __init__(self, capacity: int, longest: int) -> None:
        self._half, self._longest = capacity // 2, longest
        self._text: list[int] = []
        self._ends: dict[int, list[int]] = defaultdict(list)  # token -> positions behind it

    def __len__(self) -> int:
        return len(self._text)

    @property
    def nbytes(self) -> int:
        """About: a token stands in one list, its position in another."""
        return 48 * len(self._text)

    def extend(self, tokens: Tokens) -> None:
        for token in tokens.tolist():
            self._text.append(token)
            self._ends[token].append(len(self._text))
            if self._half and len(self._text) == 2 * self._half:
                self._forget()

    def _forget(self) -> None:
        kept, self._text = self._text[self._half:], []
        self._ends.clear()
        self.extend(np.array(kept, np.int32))

    def guess(self, tail: Tokens, budget: int, depth: int, min_match: int, seen: int, contexts: int,
              min_probability: float) -> Guesses:
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        candidates: list[tuple[int, int, list[int], float]] = []  # token, parent, path, probability
        queue: list[tuple[float, int]] = []

        def grow(path: list[int], parent: int, probability: float) -> None:
            if len(path) >= depth:
                return
            behind = self._contexts((tail.tolist() + path)[-self._longest:], min_match, seen, contexts)
            for token, estimate in self._estimates(behind).items():
                if token >= 0 and probability * estimate >= min_probability:
                    heapq.heappush(queue, (-probability * estimate, len(candidates)))
                    candidates.append((token, parent, [*path, token], probability * estimate))

        grow([], -1, 1.0)
        while queue and len(tokens) < budget:
            token, parent, path, probability = candidates[heapq.heappop(queue)[1]]
            tokens.append(token)
            parents.append(parent)
            probabilities.append(probability)
            grow(path, len(tokens) - 1, probability)
        return tokens, parents, probabilities

    def _contexts(self, tail: list[int], min_match: int, seen: int, contexts: int) -> list[_Context]:
        """The contexts of `tail`, the longest first."""
        by_length: list[list[int]] = []  # where the last 1, 2, ... tokens of the tail end
        ends = self._ends.get(tail[-1], []) if tail else []
        while ends:
            by_length.append(ends)
            length = len(by_length) + 1
            if length > len(tail):
                break
            ends = [end for end in ends if end >= length and self._text[end - length] == tail[-length]]
        found: list[_Context] = []
        for length in range(len(by_length), min_match - 1, -1):
            ends = by_length[length - 1]
            is_new = length == len(by_length) or len(ends) > len(by_length[length])
            followed = ends[:-1] if ends[-1] == len(self._text) else ends
            if is_new and len(followed) >= seen and len(found) < contexts:
                successors: dict[int, int] = defaultdict(int)
                for position in followed:
                    successors[self._text[position]] += 1
                found.append(_Context(length, followed, successors))
        return found

    def _estimates(self, behind: list[_Context]) -> dict[int, float]:
        """Token -> its probability behind these contexts."""
        estimates: dict[int, float] = {}
        for context in behind:
            for token in context.latest(self._text):
                estimate = 0.0
                for shorter in reversed(behind):
                    seen = len(shorter.followed)
                    escape = ESCAPE * len(shorter.successors) / (seen * shorter.length)
                    estimate = (shorter.successors.get(token, 0) + escape * estimate) / (seen + escape)
                estimates.setdefault(token, estimate)
        return estimates
