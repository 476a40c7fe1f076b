"""Coordination of ranks: rank 0 leads, and the other ranks follow.

Rank 0 broadcasts each request. Before each unit of work (a prefill forward or a step) it broadcasts whether to go on.
Decisions within a unit need no messages, because equal logits lead to equal decisions on all ranks. The clock is the
exception: where the drafter `auto` reads it, all ranks use rank 0's time.

The message before each unit holds rank 0's position in the text. A rank at another position, because its machine
computes differently, ends the run with an error instead of writing a wrong text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft.errors import UsageError, WorkerError
from longdraft.parallel.group import ProcessGroup
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams


class Request(NamedTuple):
    """A text to generate. `written`: the new token ids of earlier runs; `prompt_logprobs` as in `Engine.generate`."""

    prompt: NDArray[np.int32]
    params: SamplingParams
    written: NDArray[np.int32]
    prompt_logprobs: int | None


class RequestStopped(Exception):
    """Raised on followers when rank 0 stops the text."""


class SingleProcess:
    """A process that holds the whole model. There are no other ranks to coordinate."""

    is_follower = False

    def agree(self, seconds: float) -> float:
        """The time that all ranks base their decisions on, in seconds: rank 0's."""
        return seconds

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return number

    def start_request(self, request: Request) -> None:
        """Announce a text. UsageError if the ranks are working on another one."""

    def synchronized(self, context: Context) -> AbstractContextManager[None]:
        """Context manager around each unit of work on the text."""
        return nullcontext()

    def end_request(self, *, is_finished: bool) -> None:
        """Announce that the text is finished or stopped."""

    def shut_down(self) -> None:
        """Announce that there are no more requests."""


class RankGroup(SingleProcess):
    """The ranks of a run.

    Methods raise WorkerError if a rank has ended, and RequestStopped, on followers, if rank 0 stops the text.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.is_follower = group.rank > 0
        self._is_busy = self._is_shut_down = False
        self._are_followers_waiting = False  # for rank 0's next message about the text

    def agree(self, seconds: float) -> float:
        return self._group.broadcast_numbers((seconds,))[0]

    def smallest(self, number: int) -> int:
        return int(self._group.concatenate(torch.tensor([[number]])).min())

    def next_request(self) -> Request | None:
        """On followers: wait for the next request. None if there are no more, or rank 0 has ended."""
        try:
            request: Request | None = self._group.broadcast_object(None)
        except WorkerError:
            return None
        return request

    def start_request(self, request: Request) -> None:
        if self.is_follower:
            return
        if self._is_busy:
            raise UsageError("another text is being written; ranks work on one text at a time, end or close it first")
        self._group.broadcast_object(request)
        self._is_busy = self._are_followers_waiting = True

    @contextmanager
    def synchronized(self, context: Context) -> Iterator[None]:
        position = (float(len(context)), float(context.last))
        self._are_followers_waiting = False
        continues, *leader_position = self._group.broadcast_numbers((1.0, *position))
        if not continues:
            raise RequestStopped
        if tuple(leader_position) != position:
            raise WorkerError(f"rank {self._group.rank} is at token {position[0]:.0f}, rank 0 at "
                              f"{leader_position[0]:.0f}: their machines compute differently; use equal machines")
        yield
        self._are_followers_waiting = True

    def end_request(self, *, is_finished: bool) -> None:
        if not self.is_follower and self._are_followers_waiting and not is_finished:
            with suppress(WorkerError):
                self._group.broadcast_numbers((0.0, 0.0, 0.0))
        self._is_busy = self._are_followers_waiting = False

    def shut_down(self) -> None:
        if not self.is_follower and not self._is_shut_down and not self._is_busy:
            with suppress(WorkerError):  # a rank that has ended needs no message
                self._group.broadcast_object(None)
        self._is_shut_down = True
