"""The interface of drafters: a drafter proposes a tree of tokens. A wrong proposal costs time, never a wrong token.

To add a drafter, write a class with the methods of `Drafter` in a module of longdraft/drafters/ and register it by
name in longdraft/drafters/__init__.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

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


@runtime_checkable
class DecodesPlainly(Protocol):
    """A drafter that can say how many of the next steps are plain decoding, independently of their outcome."""

    @property
    def plain_steps(self) -> int:
        """Number of these steps. Their tokens may be computed ahead, and `observe` then gets no `Accepted.verified`."""


@runtime_checkable
class ReadsPrompt(Protocol):
    """A drafter with a model of its own that reads the text."""

    def read_prompt(self, context: Context) -> Routine[None]:
        """Read all of the context but its last token, in forwards of limited size. `begin` comes after this, and reads
        what was not read, in one go: where a text is cut, and in measurements."""


@runtime_checkable
class HoldsMemory(Protocol):
    """A drafter with caches of its own."""

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of this request. Weights, which requests share, are not counted."""


@runtime_checkable
class HasSummary(Protocol):
    """A drafter with figures of its own for the statistics."""

    def summary(self, num_tokens: int) -> dict[str, Any]:
        """Figures over the first `num_tokens` observed tokens. Later ones are after the end of the text."""

    def inherit(self, earlier: Any, num_retracted: int) -> None:
        """Continue the figures of `earlier`, a drafter of the same class and text. The last tokens that it observed,
        `num_retracted` of them, were taken back."""


@runtime_checkable
class ReadsText(Protocol):
    """A drafter whose drafts depend on the text alone and need no forwards: any time is good for one."""

    reads_text_only: bool


@runtime_checkable
class ReadsStates(Protocol):
    """A drafter that reads states of the target, which forwards have to copy for it."""

    def follow(self, is_wanted: bool) -> None:
        """Whether forwards copy these states from now on. After a gap the drafter reads on after it, and drafts nothing
        before the state of the text's last row is known."""


def plain_steps_of(drafter: Drafter) -> int:
    """How many of the next steps are plain decoding for certain."""
    return drafter.plain_steps if isinstance(drafter, DecodesPlainly) else 0


def memory_of(drafter: Drafter) -> int:
    """Bytes of the drafter's own caches; 0 if it has none."""
    return drafter.nbytes if isinstance(drafter, HoldsMemory) else 0
