"""An index of what followed every piece of a text: the compiled suffix automaton, or its Python reference.

    index = new_index(capacity=0, longest=16)
    index.extend(np.array([5, 6, 7, 5, 6], np.int32))
    index.guess(np.array([5], np.int32), budget=4, depth=2, min_match=1, seen=1, contexts=2, min_probability=0.1)

csrc/suffix.h holds the definitions. The reference returns the same numbers to the last bit. The tests compare the two,
and the reference serves where the compiled module is missing. Its time grows with the number of earlier occurrences of
the last token.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

try:
    from longdraft.kernels.cpu._cpu import SuffixIndex
except ImportError:
    SuffixIndex = None  # type: ignore[assignment, misc]

RECENT = 16  # successors of a context that are considered, the latest first
MAX_CONTEXTS = 8  # largest number of matches that estimate a token together
ESCAPE = 8.0  # weight of shorter contexts: E of csrc/suffix.h
SEPARATOR = -1  # separates texts: it is indexed, but, like every negative id, never guessed

TokenArray = NDArray[np.int32]
Guesses = tuple[list[int], list[int], list[float]]  # tokens, parents, probabilities


class Index(Protocol):
    """An index of texts that gives trees of likely continuations."""

    @property
    def nbytes(self) -> int:
        """Memory of the index."""

    def __len__(self) -> int:
        """Tokens indexed: all of them, or, with a capacity, at least half as many of the last ones."""

    def extend(self, tokens: TokenArray) -> None:
        """Index the next tokens of the text."""

    def guess(self, tail: TokenArray, budget: int, depth: int, min_match: int, seen: int, contexts: int,
              min_probability: float) -> Guesses:
        """Tokens, parents (-1: the end of `tail`) and probabilities of likely continuations of `tail`, best first."""


def new_index(capacity: int, longest: int) -> Index:
    """An empty index. capacity: tokens indexed at most, 0 for any number; longest: tokens of a context at most."""
    return ReferenceIndex(capacity, longest) if SuffixIndex is None else SuffixIndex(capacity, longest)


class _Context(NamedTuple):
    """A suffix of the text that occurred earlier: where a token follows it, and which tokens those are."""

    length: int
    followed: list[int]  # positions of the tokens after its occurrences, ascending
    successors: dict[int, int]  # token -> number of occurrences

    def latest(self, text: Sequence[int]) -> Iterable[int]:
        """The RECENT successors that occurred last, the latest first."""
        latest = dict.fromkeys(text[position] for position in reversed(self.followed))
        return list(latest)[:RECENT]


class ReferenceIndex:
    """csrc/suffix.h in plain Python: lists of the positions where each token occurred."""

    def __init__(self, capacity: int, longest: int) -> None:
        self._half, self._longest = capacity // 2, longest
        self._text: list[int] = []
        self._ends: dict[int, list[int]] = defaultdict(list)  # token -> positions after it

    def __len__(self) -> int:
        return len(self._text)

    @property
    def nbytes(self) -> int:
        """An estimate: each token is in one list, its position in another."""
        return 48 * len(self._text)

    def extend(self, tokens: TokenArray) -> None:
        for token in tokens.tolist():
            self._text.append(token)
            self._ends[token].append(len(self._text))
            if self._half and len(self._text) == 2 * self._half:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        kept, self._text = self._text[self._half:], []
        self._ends.clear()
        self.extend(np.array(kept, np.int32))

    def guess(self, tail: TokenArray, budget: int, depth: int, min_match: int, seen: int, contexts: int,
              min_probability: float) -> Guesses:
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        candidates: list[tuple[int, int, list[int], float]] = []  # token, parent, path, probability
        queue: list[tuple[float, int]] = []

        def grow(path: list[int], parent: int, probability: float) -> None:
            if len(path) >= depth:
                return
            before = self._contexts((tail.tolist() + path)[-self._longest:], min_match, seen, contexts)
            for token, estimate in self._estimates(before).items():
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
        by_length: list[list[int]] = []  # positions after the occurrences of the last 1, 2, ... tokens of the tail
        ends = self._ends.get(tail[-1], []) if tail else []
        while ends:
            by_length.append(ends)
            length = len(by_length) + 1
            if length > len(tail):
                break
            ends = [end for end in ends if end >= length and self._text[end - length] == tail[-length]]
        chosen: list[_Context] = []
        for length in range(len(by_length), min_match - 1, -1):
            ends = by_length[length - 1]
            is_new = length == len(by_length) or len(ends) > len(by_length[length])
            followed = ends[:-1] if ends[-1] == len(self._text) else ends
            if is_new and len(followed) >= seen and len(chosen) < contexts:
                successors: dict[int, int] = defaultdict(int)
                for position in followed:
                    successors[self._text[position]] += 1
                chosen.append(_Context(length, followed, successors))
        return chosen

    def _estimates(self, contexts: list[_Context]) -> dict[int, float]:
        """Token -> its estimated probability after these contexts."""
        estimates: dict[int, float] = {}
        for context in contexts:
            for token in context.latest(self._text):
                estimate = 0.0
                for shorter in reversed(contexts):
                    seen = len(shorter.followed)
                    escape = ESCAPE * len(shorter.successors) / (seen * shorter.length)
                    estimate = (shorter.successors.get(token, 0) + escape * estimate) / (seen + escape)
                estimates.setdefault(token, estimate)
        return estimates
