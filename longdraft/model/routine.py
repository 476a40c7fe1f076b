"""Routines: generators that yield the forwards they need and are sent the results.

Reading a prompt, drafting and verifying are routines. A routine that runs alone gets a forward of its own for each
request. A batch runs several routines and answers their requests with one forward per model, so that the weights are
read once for drafts, verifications and prompts of all texts:

    def propose(self, context, max_depth):                      # a routine
        result = yield ForwardRequest(model, rows, cache, 1)    # suspended until the forward is done
        return tree_of(result.logits)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from longdraft.errors import translate_memory_errors
from longdraft.model.transformer import Forward, ForwardRequest

T = TypeVar("T")
P = ParamSpec("P")
Routine = Generator[ForwardRequest, Forward, T]


def atomic(function: Callable[P, T]) -> Callable[P, Routine[T]]:
    """Decorator: a plain function as a routine that needs no forward."""

    @wraps(function)
    def routine(*args: P.args, **kwargs: P.kwargs) -> Routine[T]:
        yield from ()  # makes this a generator
        return function(*args, **kwargs)

    return routine


def run_alone(routine: Routine[T]) -> T:
    """The routine's result. Each request is a forward of its own."""
    try:
        request = next(routine)
        while True:
            request = routine.send(request.model.forward_batch([request])[0])
    except StopIteration as end:
        result: T = end.value
        return result


def run_batched(requests: Sequence[ForwardRequest],
                spent: Callable[[Sequence[int], float], None]) -> list[Forward | Exception]:
    """The result of each request, from one forward for each model. A request that fails gets its error instead.

    spent  called after each forward with the indices of its requests, and its seconds

    If a forward of several requests fails (for example because one cache has no memory left), each request is run
    by itself. The failed forward has changed nothing: its cache rows are provisional.
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
        with translate_memory_errors():
            return requests[0].model.forward_batch(requests)
    except Exception as error:  # any error becomes the result of the request that caused it
        if len(requests) == 1:
            return [error]
        return [result for request in requests for result in _run_together([request])]


class CostClock:
    """Measures what one text costs: the time of its own work, and its share of the forwards that it takes part in.

    batch_size  number of texts that share forwards now
    """

    def __init__(self, always: bool = False, agree: Callable[[float], float] = lambda seconds: seconds) -> None:
        """always: run from now on, for a text that is written alone; agree: returns the time that all ranks use."""
        self.batch_size = 1
        self._charged = 0.0
        self._agree = agree
        self._since = time.perf_counter() if always else None  # start of the text's own work; None: stopped

    def __call__(self) -> float:
        """Seconds so far."""
        return self._agree(self._so_far())

    def _so_far(self) -> float:
        return self._charged + (0.0 if self._since is None else time.perf_counter() - self._since)

    def charge(self, seconds: float) -> None:
        """Add the text's share of a forward."""
        self._charged += seconds

    def start(self, batch_size: int = 1) -> None:
        """The text's own work begins."""
        self.batch_size = batch_size
        self._since = time.perf_counter()

    def stop(self) -> None:
        """The text's own work is suspended."""
        self._charged, self._since = self._so_far(), None
