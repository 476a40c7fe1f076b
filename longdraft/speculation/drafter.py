"""What a drafter is: something that guesses a tree. A bad one is slow, never wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from longdraft.core import Context
from longdraft.kernels import AttentionOutput
from longdraft.model.routine import Routine
from longdraft.model.transformer import Forward
from longdraft.tree import Tree


class Verified(NamedTuple):
    """What the target computed for the rows that have just become text: some rows of a forward."""

    result: Forward
    rows: Sequence[int]

    @property
    def hidden(self) -> Tensor:
        """[rows, hidden], the last layer's output before the final norm."""
        return self.result.hidden[list(self.rows)]

    @property
    def attention_output(self) -> AttentionOutput:
        """What all layers' attention did for these rows."""
        return self.result.attention_output.rows(self.rows)


class Accepted(NamedTuple):
    """The outcome of a step.

    tokens    what was written: the accepted guesses, then the one the target adds
    rows      nodes of the tree that became text, root first; len(rows) == len(tokens)
    sources   who guessed tokens[:-1]
    verified  the target's rows along `rows`
    drafted   guesses of the tree
    depth     how far ahead they went
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    sources: tuple[str, ...]
    verified: Verified
    drafted: int = 0
    depth: int = 0


class Drafter(Protocol):
    """Proposes continuations of the text. Holds the state of one request."""

    def begin(self, context: Context, verified: Verified | None) -> None:
        """The prompt is in the cache but for its last token; `verified` are its last rows (None: no rows)."""

    def propose(self, context: Context, max_depth: int) -> Routine[Tree]:
        """A tree on the last token, at most `max_depth` deep; the root alone is plain decoding.

        What forwards it takes are asked for (longdraft/model/routine.py), so that several texts draft together; a drafter
        that takes none is a function with `atomic`.
        """

    def observe(self, context: Context, accepted: Accepted) -> None:
        """A step is done: `accepted.tokens` end the context, their rows but the last's are committed."""


@runtime_checkable
class HoldsMemory(Protocol):
    """A drafter with caches of its own may say how large they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of this request; weights, which requests share, are not counted."""


@runtime_checkable
class Counts(Protocol):
    """A drafter that counts what was written."""

    def summary(self) -> dict[str, Any]:
        """What it counted, for the statistics."""

    def cut(self, count: int) -> None:
        """The last `count` tokens of the last step lie behind the text's end."""


def memory_of(drafter: Drafter) -> int:
    return drafter.nbytes if isinstance(drafter, HoldsMemory) else 0
