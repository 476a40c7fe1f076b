"""What the drafters of the text's own passages have in common: `ngram`, which has a table, and `suffix`, an index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, Trie
from longdraft.speculation.drafter import Accepted, Verified
from longdraft.speculation.routine import atomic


class DelayedTokens:
    """Gives each token of a growing text once, when `delay` more tokens have been written.

    After a cut of the text it goes on with the new tokens. Those that were taken back and given before remain given.

    delay  a number of tokens; -1: the penalty window of `params` if there is a penalty, else 0
    """

    def __init__(self, delay: int, params: SamplingParams) -> None:
        self._delay = delay
        if delay < 0:
            self._delay = params.penalty_window if params.repetition_penalty != 1 else 0
        self._end = 0

    def take(self, context: Context) -> NDArray[np.int32]:
        """The tokens [N] that have become due since the last call."""
        start = min(self._end, len(context))
        self._end = max(start, len(context) - self._delay)
        return context.slice(start, self._end)


class Matcher(Protocol):
    """What followed the end of a text earlier in it."""

    @property
    def nbytes(self) -> int:
        """Memory of what the text's own tokens fill."""

    def update(self, context: Context) -> None:
        """Read the tokens that the text has gained."""

    def add_matches(self, trie: Trie, node: int, context: Context, path: Sequence[int], max_depth: int) -> None:
        """Add what followed the end of the text and `path` earlier below `node`.

        path       tokens from the root's child to `node`
        max_depth  of the guesses below `node`
        """


M = TypeVar("M", bound=Matcher)


class MatchDrafter(Generic[M]):
    """Drafts what a matcher finds. A cut of the text leaves it what was read: wrong guesses are no harm."""

    reads_text_only = True

    def __init__(self, matcher: M) -> None:
        self._matcher = matcher

    @property
    def nbytes(self) -> int:
        return self._matcher.nbytes

    def inherit(self, earlier: MatchDrafter[M], num_retracted: int) -> None:
        self._matcher = earlier._matcher

    def begin(self, context: Context, verified: Verified | None) -> None:
        self._matcher.update(context)

    @atomic
    def propose(self, context: Context, max_depth: int) -> Tree:
        trie = Trie(context.last)
        self._matcher.add_matches(trie, 0, context, (), max_depth)
        return trie.tree()

    def observe(self, context: Context, accepted: Accepted) -> None:
        self._matcher.update(context)
