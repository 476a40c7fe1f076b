"""The interface of drafters: a drafter proposes a tree of tokens. A wrong proposal costs time, never a wrong token.

longdraft/drafters/ has the drafters; CONTRIBUTING.md has the steps to add one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from longdraft.kernels import AttentionRows
from longdraft.model.transformer import Forward
from longdraft.request.context import Context
from longdraft.request.events import TokenLogprob
from longdraft.request.tree import Tree
from longdraft.speculation.routine import Routine


class Verified(NamedTuple):
    """The target's results for rows that are now part of the text: some rows of a forward."""

    result: Forward
    rows: Sequence[int]

    @property
    def hidden(self) -> Tensor:
        """The last layer's output before the final norm, [rows, hidden]."""
        return self.result.hidden[list(self.rows)]

    @property
    def attention(self) -> AttentionRows:
        """The attention of all layers for these rows."""
        return AttentionRows(self.result.attention_output, self.rows)


class Accepted(NamedTuple):
    """The outcome of a step.

    tokens    the new tokens: the accepted drafted ones, then the one that the target adds
    rows      nodes of the tree that became text, root first; len(rows) == len(tokens)
    sources   the drafter of each of tokens[:-1]
    verified  the target's rows along `rows`; None where the token was computed ahead, in plain decoding
    drafted   number of drafted tokens in the tree
    depth     depth of the tree
    logprobs  of each token, if the request asked for them
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    sources: tuple[str, ...]
    verified: Verified | None
    drafted: int = 0
    depth: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class Drafter(Protocol):
    """Proposes continuations of the text. Holds the state of one request."""

    def begin(self, context: Context, verified: Verified | None) -> None:
        """The prefill is done: the cache holds all of the context but its last token.

        verified  the last rows of the prefill; None if there are none
        """

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        """A tree below the last token of the context, at most `max_depth` deep. The root alone is plain decoding.

        The drafter yields the forwards that it needs (longdraft/speculation/routine.py), so that a batch can run the
        forwards of several requests together. A drafter without forwards is a plain function with `@atomic`.
        """

    def observe(self, context: Context, accepted: Accepted) -> None:
        """A step is done: `context` ends with `accepted.tokens`, and the cache holds all but the last of them."""
