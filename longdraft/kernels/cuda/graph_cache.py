"""A cache of captured CUDA graphs. A replay launches all kernels of a forward with one call."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from longdraft.kernels.cuda.launch import stop_chaining

log = logging.getLogger(__name__)
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of rows; a larger forward runs unpadded and without a graph
_serials = itertools.count()
_MAX_GRAPHS = 128  # buckets of rows times the caches of a drafter, for several requests


def bucket_of(rows: int) -> int:
    """The number of rows as which a forward of `rows` rows runs."""
    return next((size for size in BUCKETS if size >= rows), rows)


class GraphCache:
    """CUDA graphs by key, of which the most recently used are kept. On the CPU the work runs directly.

    The work of a key must be replayable: it reads and writes the same memory each time, allocates none, leaves its
    inputs unchanged, and does not depend on values that the host computes.

    Work that cannot be captured on this device runs kernel by kernel; `failures` says why.

    A graph that is destroyed during a capture breaks it. So the collector of cyclic garbage is off during a capture,
    and `drop`, which a finaliser may call at any time, only remembers what to destroy.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = device.type == "cuda"
        self.recent: deque[Any] = deque(maxlen=2)  # that ran last; of a plain step: layers, choice
        self.failures: list[str] = []
        self._device = device
        self._graphs: dict[Hashable, Any] = {}  # None: the work cannot be captured
        self._dropped: list[Any] = []
        self._owners: set[int] = set()

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the graph of `key`. The first call captures it from `work`."""
        if not self.is_on:
            work()
            return
        self._dropped.clear()
        graph = self._graphs.pop(key) if key in self._graphs else self._capture(work)
        self._graphs[key] = graph
        while len(self._graphs) > _MAX_GRAPHS:
            self.drop(next(iter(self._graphs)))
        if graph is None:
            work()
        else:
            self.recent.append(graph)
            graph.replay()

    def run_in_turn(self, pieces: Sequence[tuple[Hashable, Callable[[], None]]], begin: Callable[[], None]) -> None:
        """Replay the graphs of these keys in order, each of which goes on from where the one before ended.

        begin  sets the state from which the first one goes on; a capture, which changes it, comes before
        """
        begin()
        missing = {key: work for key, work in pieces if self.is_on and key not in self._graphs}
        if missing:
            self._dropped.clear()
            found = {key: self._capture(work) for key, work in missing.items()}
            begin()
            held = {key: self._graphs.pop(key) for key, _ in pieces if key in self._graphs}
            self._graphs |= held | found  # the most recently used: `run` drops others
        for key, work in pieces:
            self.run(key, work)

    def _capture(self, work: Callable[[], None]) -> Any:
        """The graph of `work`, which is run once or twice; None if it cannot be captured, with kernels that are chained
        or not."""
        graph, reason = self._captured(work)
        if reason is None or isinstance(reason, torch.OutOfMemoryError) or not stop_chaining(self._device):
            return graph
        return self._captured(work)[0]

    def _captured(self, work: Callable[[], None]) -> tuple[Any, BaseException | None]:
        """The graph, or why there is none."""
        with torch.cuda.device(self._device), without_collection():
            work()  # compiles kernels that are not compiled yet, which is not allowed during a capture
            torch.cuda.synchronize()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            try:
                with torch.cuda.stream(stream):
                    graph.capture_begin(capture_error_mode="thread_local")
                    try:
                        work()
                    finally:
                        graph.capture_end()
            except RuntimeError as error:
                reason = error.__context__ or error  # of the work; or what the end of the capture says
                self.failures.append(f"{reason}"[:500])
                log.warning("a CUDA graph cannot be captured, so its kernels are launched one by one: %s",
                            self.failures[-1])
                return None, reason
            torch.cuda.current_stream().wait_stream(stream)
        return graph, None

    def drop(self, key: Hashable) -> None:
        """Free the graph of `key`, if there is one, at the next `run`."""
        if (graph := self._graphs.pop(key, None)) is not None:
            if graph in self.recent:
                self.recent.clear()
            self._dropped.append(graph)

    def own(self, owner: object, serial: int) -> None:
        """Free the graphs of the keys (..., serial, ...) when their owner is freed: they use its memory."""
        if serial not in self._owners:
            self._owners.add(serial)
            weakref.finalize(owner, _drop_owned, weakref.ref(self), serial).atexit = False

    def drop_owned(self, serial: int) -> None:
        """Free the graphs of an owner, as `drop` does."""
        self._owners.discard(serial)
        for key in [key for key in list(self._graphs) if isinstance(key, tuple) and key[1:2] == (serial,)]:
            self.drop(key)


def new_owner() -> int:
    """The serial of an object whose memory graphs use: the second part of their keys."""
    return next(_serials)


def _drop_owned(graphs: weakref.ref[GraphCache], serial: int) -> None:
    if found := graphs():
        found.drop_owned(serial)


@contextmanager
def without_collection() -> Iterator[None]:
    """A context in which no cyclic garbage is collected."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
