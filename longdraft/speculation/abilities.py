"""What a drafter can be able to do beyond `Drafter` (longdraft/speculation/drafter.py): methods that it may have."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from longdraft.request.context import Context
from longdraft.speculation.drafter import Drafter
from longdraft.speculation.routine import Routine


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


@runtime_checkable
class Inherits(Protocol):
    """A drafter that takes over from the one before a cut of the text what grows with the text."""

    def inherit(self, earlier: Any, num_retracted: int) -> None:
        """Take over indexes and figures of `earlier`, a drafter of the same class and text. The last tokens that it
        observed, `num_retracted` of them, were taken back. `begin` comes after this."""


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
    """How many of the next steps are plain decoding, whatever their outcome: `plain_steps` of a drafter that knows it.
    Their tokens may be computed ahead, and `observe` then gets no `Accepted.verified`."""
    steps: int = getattr(drafter, "plain_steps", 0)  # a protocol's check would take 30 µs of each step
    return steps


def memory_of(drafter: Drafter) -> int:
    """Bytes of the drafter's own caches; 0 if it has none."""
    return drafter.nbytes if isinstance(drafter, HoldsMemory) else 0
