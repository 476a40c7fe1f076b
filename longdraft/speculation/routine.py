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
from longdraft.kernels.launched import HostWork, Launched, read_together
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


def run_together(routines: Sequence[Routine[T]]) -> list[T]:
    """Run several routines as a batch runs those of its texts: one wait for what all have launched, and one forward for
    each model; returns their results. Raises the first error of a routine."""
    ended: dict[int, T] = {}

    def advanced(index: int, result: Forward | Exception | None = None) -> ForwardRequest | Launched | None:
        """What the routine needs next; None: it has ended."""
        try:
            if isinstance(result, Exception):
                return routines[index].throw(result)
            return next(routines[index]) if result is None else routines[index].send(result)
        except StopIteration as end:
            ended[index] = end.value
            return None

    needs = [advanced(index) for index in range(len(routines))]
    while any(needs):
        if launched := {index: need for index, need in enumerate(needs) if isinstance(need, Launched)}:
            read_together(list(launched.values()))
            for index in launched:
                needs[index] = advanced(index)
            continue
        requests = {index: need for index, need in enumerate(needs) if isinstance(need, ForwardRequest)}
        results = run_batched(list(requests.values()), lambda indices, seconds: None)
        for index, result in zip(requests, results, strict=True):
            needs[index] = advanced(index, result)
    return [ended[index] for index in range(len(routines))]


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
