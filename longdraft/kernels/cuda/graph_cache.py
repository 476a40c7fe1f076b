"""A cache of captured CUDA graphs. A replay launches all kernels of a forward with one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_MAX_GRAPHS = 128  # buckets of rows times the caches of a drafter, for several requests


class GraphCache:
    """CUDA graphs by key, of which the most recently used are kept. On the CPU the work runs directly.

    The work behind a key must be replayable: it reads and writes the same memory each time, allocates none, leaves its
    inputs unchanged, and does not depend on values that the host computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, Any] = {}

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay the graph of `key`. The first call captures it from `work`."""
        if not self.is_on:
            work()
            return
        graph = self._graphs.pop(key, None) or self._capture(work)
        self._graphs[key] = graph
        while len(self._graphs) > _MAX_GRAPHS:
            self.drop(next(iter(self._graphs)))
        graph.replay()

    def _capture(self, work: Callable[[], None]) -> Any:
        with torch.cuda.device(self._device):
            work()  # compiles kernels that are not compiled yet, which is not allowed during a capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        return graph

    def drop(self, key: Hashable) -> None:
        """Free the graph of `key`, if there is one."""
        self._graphs.pop(key, None)
