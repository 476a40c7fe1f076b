"""Rank 0 leads. It tells the others what to write and, between two units of work, whether to go on; they follow.

A unit is what all ranks do alike: a forward over some of the prompt, or a step. Within one nobody is told anything,
because equal logits lead to equal decisions (but for the clock, where the drafter `auto` looks at it: it is rank 0's).
With its word to go on the leader says how far its text is: a rank that is elsewhere, because its machine computes
otherwise, ends the run rather than writing nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.core import Context, SamplingParams
from longdraft.errors import UsageError, WorkerError
from longdraft.parallel.group import Group


class Request(NamedTuple):
    """A text to write: `written` of its tokens are there already."""

    prompt: NDArray[np.int32]
    params: SamplingParams
    written: NDArray[np.int32]


class Stopped(Exception):
    """The leader does not go on with the text."""


class SingleProcess:
    """A process that works by itself: nobody is told anything."""

    follows = False

    def agree(self, seconds: float) -> float:
        """A time by which decisions are made: rank 0's."""
        return seconds

    def begin(self, request: Request) -> None:
        """A text begins."""

    def unit(self, context: Context) -> AbstractContextManager[None]:
        """Around each unit of work on the text."""
        return nullcontext()

    def end(self, *, is_finished: bool) -> None:
        """The text came to its end, or is left."""

    def dismiss(self) -> None:
        """No text will come any more."""


class RankGroup(SingleProcess):
    """The ranks of a run. WorkerError where one is gone; Stopped, on the others, where the leader stops."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.follows = group.rank > 0
        self._is_busy = self._is_dismissed = False
        self._are_waiting = False  # the others, for the leader's word

    def agree(self, seconds: float) -> float:
        return self._group.numbers((seconds,))[0]

    def listen(self) -> Request | None:
        """The next text, for those who follow; None: the leader wants no more, or is gone."""
        try:
            request: Request | None = self._group.object(None)
        except WorkerError:
            return None
        return request

    def begin(self, request: Request) -> None:
        if self.follows:
            return
        if self._is_busy:
            raise UsageError("another text is being written; ranks work on one text at a time, end or close it first")
        self._group.object(request)
        self._is_busy = self._are_waiting = True

    @contextmanager
    def _together(self, context: Context) -> Iterator[None]:
        place = (float(len(context)), float(context.last))
        self._are_waiting = False
        goes_on, *leaders = self._group.numbers((1.0, *place))
        if not goes_on:
            raise Stopped
        if tuple(leaders) != place:
            raise WorkerError(f"rank {self._group.rank} is at token {place[0]:.0f}, rank 0 at {leaders[0]:.0f}: their "
                              "machines compute differently")
        yield
        self._are_waiting = True

    def unit(self, context: Context) -> AbstractContextManager[None]:
        return self._together(context)

    def end(self, *, is_finished: bool) -> None:
        if not self.follows and self._are_waiting and not is_finished:
            with suppress(WorkerError):
                self._group.numbers((0.0, 0.0, 0.0))
        self._is_busy = self._are_waiting = False

    def dismiss(self) -> None:
        if not self.follows and not self._is_dismissed and not self._is_busy:
            with suppress(WorkerError):  # who is gone need not be told
                self._group.object(None)
        self._is_dismissed = True
