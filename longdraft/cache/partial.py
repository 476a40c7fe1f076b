"""A small cache over a full one: sinks, heavy hitters, recent rows (TokenSwift 3.2, StreamingLLM, H2O).

    [ sinks | heavy hitters | recent rows, growing to the budget ]

Chosen for each layer and KV head by the attention of the last accepted tokens' queries. Each step
appends only its new rows; when the budget is full, the choice is made again. A prompt shorter than the
budget is held whole. Keys carry their rotation, so their order here is free.

Modes (the paper's ablation, table 5): "dynamic" as above; "static" is chosen once after the prompt and
never changes; "full" drafts on a view of the full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longdraft.cache import select
from longdraft.cache.full import FullCache
from longdraft.errors import check
from longdraft.kernels import KV, Kernels

CacheMode = Literal["dynamic", "static", "full"]


@dataclass(frozen=True)
class PartialBudget:
    """How a partial cache divides its rows.

    budget  rows held for each layer and KV head at most
    sinks   first positions of the text, always held
    recent  last positions always held at a selection; the rows written since then join them
    room    rows left free at a selection for those to come; the rest of the budget holds heavy hitters
    """

    budget: int = 512
    sinks: int = 16
    recent: int = 128
    room: int = 128

    def __post_init__(self) -> None:
        check(self.sinks >= 0, "sinks", self.sinks, "0 or more")
        check(self.recent >= 1, "recent", self.recent, "1 or more")
        check(self.room >= 1, "room", self.room, "1 or more")
        check(self.budget >= self.sinks + self.recent + self.room, "budget", self.budget,
              f"at least sinks + recent + room ({self.sinks + self.recent + self.room})")


class PartialCache:
    """Rows of `full` held for drafting; itself a KVCache.

    `refresh(queries)` after the prompt and after every step brings in what `full` gained. `queries()`
    gives those of the last accepted tokens, [layers][Q, H, D]; it is called only where a choice is made.
    """

    def __init__(self, full: FullCache, kernels: Kernels, num_kv_heads: int, head_dim: int,
                 size: PartialBudget, mode: CacheMode = "dynamic") -> None:
        self._full = full
        self._size = size
        self._mode = mode
        self._rows = FullCache(kernels, len(full.stores), num_kv_heads, head_dim)
        self._num_kv_heads = num_kv_heads
        self._device = kernels.device
        self._seen = 0  # committed rows of the full cache that were taken in or left out
        self.num_selections = 0

    @property
    def length(self) -> int:
        return self._full.length if self._mode == "full" else self._rows.length

    def append(self, layer: int, k: Tensor, v: Tensor) -> KV:
        return (self._full if self._mode == "full" else self._rows).append(layer, k, v)

    def commit(self, rows: Sequence[int]) -> None:
        """Drafted rows are guesses of rows that verification will write: none of them is kept."""
        assert not rows, "a partial cache takes its rows from the full one"
        (self._full if self._mode == "full" else self._rows).commit(())

    def refresh(self, queries: Callable[[], Sequence[Tensor]] | None) -> None:
        """Take in the rows the full cache gained, or choose anew where the budget is full."""
        new = self._full.length - self._seen
        if self._mode == "full" or (self._mode == "static" and self.num_selections):
            return
        if self._rows.length + new <= self._size.budget:
            self._copy(torch.arange(self._seen, self._full.length).expand(self._num_kv_heads, -1))
        elif queries is not None:
            self._select(queries())
        else:  # nothing to ask with: keep the sinks and the latest
            size = self._size
            held = torch.arange(self._full.length)
            self._restart([torch.cat([held[: size.sinks], held[-(size.budget - size.sinks - size.room):]]).expand(
                self._num_kv_heads, -1)] * len(self._rows.stores))
        self._seen = self._full.length
        if self._mode == "static":
            self.num_selections = max(1, self.num_selections)

    def _select(self, queries: Sequence[Tensor]) -> None:
        size, length = self._size, self._full.length
        held = size.budget - size.room
        self._restart([
            select.positions(store.weights(asked, length), held, size.sinks, size.recent)
            for store, asked in zip(self._full.stores, queries, strict=True)
        ])
        self.num_selections += 1

    def _restart(self, positions: Sequence[Tensor]) -> None:
        self._rows.length = 0
        for source, target, chosen in zip(self._full.stores, self._rows.stores, positions, strict=True):
            target.write_heads(0, *source.read(chosen.to(self._device)))
        self._rows.length = positions[0].shape[1]

    def _copy(self, positions: Tensor) -> None:
        """Append the rows at these positions [Hkv, N] of the full cache."""
        for source, target in zip(self._full.stores, self._rows.stores, strict=True):
            target.write_heads(self._rows.length, *source.read(positions.to(self._device)))
        self._rows.length += positions.shape[1]

    @property
    def nbytes(self) -> int:
        return 0 if self._mode == "full" else self._rows.nbytes
