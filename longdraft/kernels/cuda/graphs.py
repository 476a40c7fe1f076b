"""Work on fixed memory, captured once as a CUDA graph and then replayed; on the CPU it is simply done."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

_KEPT = 128  # graphs: buckets of rows by stages of drafting, for some texts


class Graphs:
    """Graphs by key. The work behind a key must read and write the same memory each time, allocate none, leave its
    inputs as they are, and not depend on anything that the host decides."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, Any] = {}

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        if not self.is_on:
            work()
            return
        graph = self._graphs.pop(key, None) or self._capture(work)
        self._graphs[key] = graph
        while len(self._graphs) > _KEPT:
            self.drop(next(iter(self._graphs)))
        graph.replay()

    def _capture(self, work: Callable[[], None]) -> Any:
        with torch.cuda.device(self._device):
            work()  # compiles what is not compiled yet, which a capture must not
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
        return graph

    def drop(self, key: Hashable) -> None:
        self._graphs.pop(key, None)
