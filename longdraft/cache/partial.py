"""A small cache over a full one: sinks, heavy hitters, recent rows (TokenSwift 3.2, StreamingLLM, H2O).

    [ sinks | heavy hitters | recent rows, growing to the budget ]   + the remainder

Chosen for each layer and KV head by the attention of the last accepted tokens' queries. Each step
appends only its new rows; when the budget is full, the choice is made again. A prompt shorter than the
budget is held whole. Keys carry their rotation, so their order here is free.

A layer that sees only a window of the text holds the latest rows and no others, once the text is longer than that:
without gaps, so that its attention, which counts rows, cuts where the full cache's does.

The *remainder* is what the keys left out gave a verified row: for each layer and query head an output and a
log-sum-exp, "full minus partial". Drafts merge it into their attention as one more key, as a function of their query
that is fitted to the verified rows (remainder.py), so that a small cache need not forget the mass of a long text.

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
from longdraft.cache.remainder import Remainder
from longdraft.errors import check
from longdraft.kernels import AttentionOutput, Kernels, LayersKV

CacheMode = Literal["dynamic", "static", "full"]
_ASKING = 8  # last verified rows whose queries choose


@dataclass(frozen=True)
class PartialBudget:
    """How a partial cache divides its rows.

    budget  rows held for each layer and KV head at most
    sinks   first positions of the text, always held
    recent  last positions always held at a selection; the rows written since then join them
    room    rows left free at a selection for those to come; the rest of the budget holds heavy hitters
    """

    budget: int = 256
    sinks: int = 16
    recent: int = 64
    room: int = 64

    def __post_init__(self) -> None:
        check(self.sinks >= 0, "sinks", self.sinks, "0 or more")
        check(self.recent >= 1, "recent", self.recent, "1 or more")
        check(self.room >= 1, "room", self.room, "1 or more")
        check(self.budget >= self.sinks + self.recent + self.room, "budget", self.budget,
              f"at least sinks + recent + room ({self.sinks + self.recent + self.room})")

    @property
    def held(self) -> int:
        """Rows held right after a selection."""
        return self.budget - self.room


class PartialCache:
    """Rows of `full` held for drafting; itself a KVCache.

    `refresh(attended)` after the prompt and after every step brings in what `full` gained. `attended()` gives
    what each layer's attention did for the last accepted tokens; it is called only where it is needed.
    """

    def __init__(self, full: FullCache, kernels: Kernels, num_kv_heads: int, head_dim: int,
                 size: PartialBudget, mode: CacheMode = "dynamic", has_remainder: bool = True,
                 selection: select.Selection | None = None) -> None:
        self._full = full
        self._kernels = kernels
        self._has_remainder = has_remainder and mode != "full"
        self._fit: Remainder | None = None  # learns the remainder from verified rows
        self._remainder: Tensor | None = None  # what it gives now
        self._size = size
        self._selection = selection or select.heavy_hitters(size.held, size.sinks, size.recent)
        self._is_stale = False  # asked to choose anew
        self._mode = mode
        self._rows = FullCache(kernels, len(full.stores), num_kv_heads, head_dim)
        self._num_kv_heads = num_kv_heads
        self._seen = 0  # committed rows of the full cache that were taken in or left out
        self.num_selections = 0
        self._drafted = 0  # rows at the end that are guesses

    @property
    def _held(self) -> FullCache:
        """What drafts are written behind."""
        return self._full if self._mode == "full" else self._rows

    @property
    def length(self) -> int:
        return self._held.length

    def append(self, k: Tensor, v: Tensor) -> LayersKV:
        kv = self._held.append(k, v)
        return kv if self._remainder is None else kv._replace(remainder=self._remainder)

    def commit(self, rows: Sequence[int]) -> None:
        """Keep drafted rows for the drafts behind them, until `forget`."""
        self._held.commit(rows)
        self._drafted += len(rows)

    def place(self, rows: Tensor, positions: Tensor) -> None:
        self._held.place(rows, positions)

    def forget(self) -> None:
        """Drop what was drafted: verification writes these rows, or others, into the full cache."""
        self._held.truncate(self.length - self._drafted)
        self._drafted = 0

    def refresh(self, attention_output: Callable[[], AttentionOutput] | None) -> None:
        """Take in the rows the full cache gained, or choose anew where the budget is full."""
        if self._mode == "full" or (self._full.length == self._seen and not self._is_stale):
            return
        if self._mode == "dynamic" or not self._seen:
            self._take_in(attention_output)
        is_whole = self._rows.length == self._full.length
        self._remainder = None
        if self._has_remainder and attention_output and not is_whole:
            self._remainder = self._learn(attention_output().last(self._size.recent if self._mode == "dynamic" else 1))

    def _learn(self, whole: AttentionOutput) -> Tensor:
        """From the text's last rows, which end this cache (a static one takes none in)."""
        if self._fit is None:
            num_layers, _, num_heads, head_dim = whole.content.shape
            self._fit = Remainder(num_layers, num_heads, head_dim, whole.content.device)
        remainders = self._kernels.remainder(self._rows.stores, self._rows.length, whole)
        return self._fit.learn(whole.content, remainders)

    def expire(self) -> None:
        """Choose anew at the next refresh, wherever the budget stands."""
        self._is_stale = True

    def _take_in(self, attention_output: Callable[[], AttentionOutput] | None) -> None:
        new = self._full.length - self._seen
        is_whole = self._rows.length == self._seen
        has_room = self._rows.length + new <= self._size.budget
        if has_room and (is_whole or not self._is_stale):
            self._copy(torch.arange(self._seen, self._full.length).expand(self._num_kv_heads, -1))
        elif attention_output is not None:
            self._select(attention_output().last(_ASKING).queries)
        else:  # nothing to ask with: keep the sinks and the latest
            latest = select.latest(self._full.length, self._size.held, self._size.sinks)
            self._hold(lambda layer: latest.expand(self._num_kv_heads, -1))
        self._is_stale = False
        self._seen = self._full.length

    def _select(self, queries: Tensor) -> None:
        length, stores = self._full.length, self._full.stores
        self._hold(lambda layer: self._selection(layer, stores[layer], length, queries[layer]))
        self.num_selections += 1

    def _hold(self, choose: Callable[[int], Tensor]) -> None:
        """These positions [Hkv, N] of each layer instead of what is held; the latest where it sees only a window."""
        length, windows = self._full.length, self._full.windows
        chosen = {layer: choose(layer) for layer, window in enumerate(windows) if not 0 < window < length}
        count = next(iter(chosen.values())).shape[-1] if chosen else min(self._size.held, length)
        latest = torch.arange(length - count, length).expand(self._num_kv_heads, -1)
        self._rows.length = 0
        self._copy(torch.stack([chosen.get(layer, latest).to(latest.device) for layer in range(len(windows))]))

    def _copy(self, positions: Tensor) -> None:
        """Append the rows at these positions [Hkv, N], or [L, Hkv, N], of the full cache."""
        positions = positions.expand(len(self._rows.stores), -1, -1)
        self._kernels.copy(self._full.stores, self._rows.stores, positions, self._rows.length)
        self._rows.length += positions.shape[-1]

    @property
    def nbytes(self) -> int:
        rows = 0 if self._mode == "full" else self._rows.nbytes
        remainder = 0 if self._remainder is None else self._remainder.nbytes
        return rows + remainder + (self._fit.nbytes if self._fit else 0)
