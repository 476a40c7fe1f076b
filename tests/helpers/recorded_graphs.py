"""CUDA graphs as Triton's interpreter can have them: a replay repeats the launches and operations of the first run.

A graph holds addresses and numbers, not Python code. So work that reads a number on the host, or whose buffers were
replaced since, is replayed with what was there at first, and a test that compares the result fails as it would on a
device. Work that waits for the host cannot be captured, and fails at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from longdraft.kernels.cuda.graph_cache import GraphCache

_WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique")  # operations whose results the host needs
UNSET = ("empty", "new_empty", "empty_like", "empty_strided")  # whose results hold anything


class Recording(TorchDispatchMode):
    """Runs work, and remembers its launches and operations with the memory that they have."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self._calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::").rstrip("_")
        assert name not in _WAITS, f"{func} in a graph waits for the device"
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **kwargs))
        elif name not in UNSET:
            given = {part.untyped_storage().data_ptr() for part in tree_leaves((args, kwargs))
                     if isinstance(part, torch.Tensor)}
            made = [part for part in tree_leaves(result) if isinstance(part, torch.Tensor)]
            if any(part.untyped_storage().data_ptr() not in given for part in made):  # not a view
                self._calls.append(lambda: self._repeat(func, args, kwargs, made))
        return result

    @staticmethod
    def _repeat(func: Any, args: Any, kwargs: Any, made: list[torch.Tensor]) -> None:
        """Repeat an operation, with its results where they were."""
        again = [part for part in tree_leaves(func(*args, **kwargs)) if isinstance(part, torch.Tensor)]
        for old, new in zip(made, again, strict=True):
            old.copy_(new)

    @contextmanager
    def launches(self) -> Any:
        """A context in which launches are remembered."""
        run = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                run(executor, *args, **kwargs)
            self._calls.append(lambda: executor(*args, **kwargs))

        interpreter.GridExecutor.__call__ = launch
        try:
            yield
        finally:
            interpreter.GridExecutor.__call__ = run


class RecordedGraphs(GraphCache):
    """As `GraphCache` on a device. The first run of some work records it; later ones replay the record."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_on = True
        self.replays = 0

    def holds(self, owner: object, key: Hashable = None) -> bool:
        """Whether this work is recorded."""
        return self._key(owner, key) in self._graphs

    def run(self, owner: object, work: Callable[[], None], key: Hashable = None) -> None:
        self._dropped.clear()
        if self.holds(owner, key):
            self.replays += 1
            self._graphs[self._key(owner, key)].replay()
            return
        recording = self._graphs[self._key(owner, key)] = Recording()
        with ExitStack() as stack:
            stack.enter_context(recording.launches())
            stack.enter_context(recording)
            work()

    def run_in_turn(self, owner: object, pieces: Sequence[tuple[Hashable, Callable[[], None]]],
                    begin: Callable[[], None]) -> None:
        begin()
        for key, work in pieces:
            self.run(owner, work, key)


class RanGraph(NamedTuple):
    """See `GraphCache.run`."""

    owner: Any
    key: Any


def watched(patch: pytest.MonkeyPatch, graphs: GraphCache) -> list[RanGraph]:
    """The graphs that run from now on, as long as the patch lasts."""
    ran, run = list[RanGraph](), graphs.run

    def noted(owner: object, work: Callable[[], None], key: Hashable = None) -> None:
        ran.append(RanGraph(owner, key))
        run(owner, work, key)

    patch.setattr(graphs, "run", noted)
    return ran
