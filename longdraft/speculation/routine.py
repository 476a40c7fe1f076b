"""Routines: generators that yield the forwards they need and are sent the results.

Prefill, drafting and verification are routines. A routine that runs alone gets one forward for each of its requests.
A batch runs several routines and serves their requests with one forward per model. The weights are therefore read once
for the drafts, verifications and prompts of all texts:

    def propose(self, context, max_depth):                      # a routine
        result = yield ForwardRequest(model, rows, cache, 1)    # suspended until the forward is done
        return tree_of(result.logits)

A routine also yields when it has launched work on a device (`Launched`), so that other texts launch theirs before the
host waits, or before it launches work that texts can do together (`Shareable`). It is then resumed without a value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from longdraft.errors import translated_error
from longdraft.kernels.launched import HostWork, Launched
from longdraft.model.transformer import Forward, ForwardRequest

T = TypeVar("T")
P = ParamSpec("P")
Routine = Generator[ForwardRequest | Launched, Forward, T]


def atomic(function: Callable[P, T]) -> Callable[P, Routine[T]]:
    """Decorator: turns a plain function into a routine that requests no forward."""

    @wraps(function)
    def routine(*args: P.args, **kwargs: P.kwargs) -> Routine[T]:
        yield from ()  # makes this a generator
        return function(*args, **kwargs)

    return routine


def run_alone(routine: Routine[T], on_one_thread: bool = False) -> T:
    """Run a routine with one forward for each request; returns the routine's result.

    on_one_thread  do work of the processor as it is done beside that of other texts
    """
    try:
        request = next(routine)
        while True:
            if isinstance(request, Launched):
                if on_one_thread and isinstance(request, HostWork):
                    request.launch_on_one_thread()
                request = next(routine)
            else:
                request = routine.send(request.model.forward_batch([request])[0])
    except StopIteration as end:
        result: T = end.value
        return result


def run_batched(requests: Sequence[ForwardRequest],
                spent: Callable[[Sequence[int], float], None]) -> list[Forward | Exception]:
    """The result of each request, from one forward for each model. A request that fails gets its error instead.

    spent  called after each forward with the indices of its requests and its duration in seconds

    If a forward of several requests fails (for example because one cache has no memory left), each request is run
    by itself. The failed forward has changed nothing, because its cache rows are provisional.
    """
    results: dict[int, Forward | Exception] = {}
    groups: dict[object, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(request.model.identity, []).append(index)
    for indices in groups.values():
        began = time.perf_counter()
        results |= zip(indices, _run_together([requests[index] for index in indices]), strict=True)
        spent(indices, time.perf_counter() - began)
    return [results[index] for index in range(len(requests))]


def _run_together(requests: Sequence[ForwardRequest]) -> Sequence[Forward | Exception]:
    try:
        return requests[0].model.forward_batch(requests)
    except Exception as error:  # any error becomes the result of the request that caused it
        if len(requests) == 1:
            return [translated_error(error)]
        return [result for request in requests for result in _run_together([request])]


class CostClock:
    """Measures the cost of one text: the time of its own work, and its share of the forwards and rounds that it takes
    part in.

    batch_size  number of texts that currently share forwards
    together    number of texts whose latest launched work was done together
    sharers     number of texts that shared the latest verification
    """

    def __init__(self, always: bool = False, agree: Callable[[float], float] = float) -> None:
        """always: start now, for a text generated alone; agree: maps this rank's number to that of all ranks."""
        self.batch_size = self.together = self.sharers = 1
        self._charged = 0.0
        self.agree = agree
        self._since = time.perf_counter() if always else None  # start of the text's own work; None: stopped

    def __call__(self) -> float:
        """Cost so far, in seconds."""
        return self.agree(self._charged + (0.0 if self._since is None else time.perf_counter() - self._since))

    @property
    def charged(self) -> float:
        """Cost up to the latest `stop` or `charge`, in seconds, on this rank."""
        return self._charged

    def charge(self, seconds: float) -> None:
        """Add the text's share of what several texts do together, in seconds."""
        self._charged += seconds

    def start(self, batch_size: int = 1) -> None:
        """Start the clock of the text's own work."""
        self.batch_size, self.together = batch_size, min(self.together, batch_size)
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop the clock of the text's own work."""
        if self._since is not None:
            self._charged += time.perf_counter() - self._since
        self._since = None
