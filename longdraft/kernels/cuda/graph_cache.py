"""A cache of captured CUDA graphs. A replay launches all kernels of a forward with one call."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from longdraft.kernels.cuda.launch import stop_chaining

log = logging.getLogger(__name__)
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of rows; a larger forward runs unpadded and without a graph
_MAX_GRAPHS = 128  # buckets of rows times the caches of a drafter, for several requests


def bucket_of(rows: int) -> int:
    """The number of rows as which a forward of `rows` rows runs."""
    return next((size for size in BUCKETS if size >= rows), rows)


class _Key(NamedTuple):
    """Of a graph. owner: its `id`, as long as it lives."""

    owner: int
    key: Hashable


class GraphCache:
    """CUDA graphs, of which the most recently used are kept. On the CPU the work runs directly.

    A graph belongs to an owner, the object whose memory it uses: it is freed when the owner is. A key tells the graphs
    of an owner apart. The work of a graph must be replayable: it reads and writes the same memory each time, keeps
    none that it allocates (which belongs to the graph), leaves its inputs unchanged, and does not depend on values that
    the host computes.

    Work that cannot be captured on this device runs kernel by kernel; `failures` says why.

    A graph that is destroyed during a capture breaks it. So the collector of cyclic garbage is off during a capture,
    and the finaliser of an owner, which may run at any time, only remembers what to destroy.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = device.type == "cuda"
        self.recent: deque[Any] = deque(maxlen=2)  # that ran last; of a plain step: layers, choice
        self.failures: list[str] = []
        self._device = device
        self._graphs: dict[_Key, Any] = {}  # None: the work cannot be captured
        self._dropped: list[Any] = []
        self._owners: set[int] = set()

    def run(self, owner: object, work: Callable[[], None], key: Hashable = None) -> None:
        """Replay a graph. The first call captures it from `work`."""
        if not self.is_on:
            work()
            return
        self._dropped.clear()
        whole = self._key(owner, key)
        graph = self._graphs.pop(whole) if whole in self._graphs else self._capture(work)
        self._graphs[whole] = graph
        while len(self._graphs) > _MAX_GRAPHS:
            self._drop(next(iter(self._graphs)))
        if graph is None:
            work()
        else:
            self.recent.append(graph)
            graph.replay()

    def run_in_turn(self, owner: object, pieces: Sequence[tuple[Hashable, Callable[[], None]]],
                    begin: Callable[[], None]) -> None:
        """Replay an owner's graphs of these keys in order, each of which goes on from where the one before ended.

        begin  sets the state from which the first one goes on; a capture, which changes it, comes before
        """
        begin()
        keys = {key: self._key(owner, key) for key, _ in pieces} if self.is_on else {}
        missing = {keys[key]: work for key, work in pieces if self.is_on and keys[key] not in self._graphs}
        if missing:
            self._dropped.clear()
            found = {key: self._capture(work) for key, work in missing.items()}
            begin()
            held = {key: self._graphs.pop(key) for key in keys.values() if key in self._graphs}
            self._graphs |= held | found  # the most recently used: `run` drops others
        for key, work in pieces:
            self.run(owner, work, key)

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

    def _key(self, owner: object, key: Hashable) -> _Key:
        """The key of a graph, which is freed when the owner is."""
        if id(owner) not in self._owners:
            self._owners.add(id(owner))
            weakref.finalize(owner, _drop_owned, weakref.ref(self), id(owner)).atexit = False
        return _Key(id(owner), key)

    def _drop(self, key: _Key) -> None:
        """Free the graph of `key`, if there is one, at the next `run`."""
        if (graph := self._graphs.pop(key, None)) is not None:
            if graph in self.recent:
                self.recent.clear()
            self._dropped.append(graph)

    def drop_owned(self, owner: int) -> None:
        """Free the graphs of an owner that is freed."""
        self._owners.discard(owner)
        for key in [key for key in list(self._graphs) if key.owner == owner]:
            self._drop(key)


def _drop_owned(graphs: weakref.ref[GraphCache], owner: int) -> None:
    if found := graphs():
        found.drop_owned(owner)


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
