"""A small KV cache over the full one, for drafting: sinks, heavy hitters, recent rows.

TokenSwift 3.2, StreamingLLM, H2O.

    text    [ 0 1 .. | ...................................................... | ....... n - 1 ]    the full cache
                |            |      |            |                                  |
    rows    [ sinks  | heavy hitters             | recent, growing to the budget          | drafted ]
                |            |                       |                                        |
              first      the attention of the     rows of new tokens                       dropped by
              positions  last accepted tokens     are appended here                        `drop_drafts`

            + 1 key for each layer and query head, the *remainder*: it represents all keys that were left out

Rows are selected for each layer and KV head by the attention of the last accepted tokens' queries. Each step appends
only its new rows; when the budget is full, rows are selected again. A text shorter than the budget is held whole. Keys
are stored with their rotation, so their order in this cache is free.

A layer with a sliding window holds the latest rows and no others, once the text is longer than the window. They have no
gaps, because the attention kernel counts rows to find where the window begins.

The remainder is what the omitted keys gave a verified row: for each layer and query head, an output and a log-sum-exp,
"full minus partial". Drafts merge it into their attention as one more key. It is a function of their query, fitted to
the verified rows (longdraft/cache/remainder.py). So drafts count the attention mass of a long text that a small cache
leaves out.

Drafts of a short text may use the full cache itself (`PartialBudget.whole`), which makes them as good as the model.

Modes (the paper's ablation, table 5): "dynamic" is the above; "static" selects once after the prompt and then never
changes; "full" drafts on a view of the full cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longdraft.cache import row_selection
from longdraft.cache.full import FullCache
from longdraft.cache.remainder import new_fit
from longdraft.cache.taps import TapLog
from longdraft.errors import check
from longdraft.kernels import AttentionRows, Kernels, LayersKV
from longdraft.kernels.chain_plan import DraftStores
from longdraft.kernels.interface import RemainderFit

CacheMode = Literal["dynamic", "static", "full"]
_DEVICE_ROOM = 128  # drafted rows for which a device's cache has room at once
_NUM_QUERIES = 8  # last verified rows whose queries select the heavy hitters


@dataclass(frozen=True)
class PartialBudget:
    """How the rows of a partial cache are divided.

    budget  rows for each layer and KV head at most
    sinks   first positions of the text, always held
    recent  last positions always held at a selection; the rows written since then follow them
    room    rows left free at a selection for new tokens; the other rows hold heavy hitters
    whole   drafts of a text of up to so many tokens use the full cache, where it has neither states nor taps
    """

    budget: int = 256
    sinks: int = 16
    recent: int = 64
    room: int = 64
    whole: int = 0

    def __post_init__(self) -> None:
        check(self.sinks >= 0, "sinks", self.sinks, "0 or more")
        check(self.recent >= 1, "recent", self.recent, "1 or more")
        check(self.room >= 1, "room", self.room, "1 or more")
        check(self.budget >= self.sinks + self.recent + self.room, "budget", self.budget,
              f"at least sinks + recent + room ({self.sinks + self.recent + self.room})")

    @property
    def selected(self) -> int:
        """Rows that are selected: the budget without the room for new tokens."""
        return self.budget - self.room


class PartialCache:
    """Some rows of `full`, held for drafting; itself a `KVCache`.

    size           how many rows are held
    mode           dynamic | static | full: see above
    has_remainder  drafts merge the remainder into their attention
    selection      selects the rows; by default heavy hitters
    taps           gets the tapped states of drafts that are committed; None: no layer is tapped

    Call `update` after the prompt and after each step.
    """

    def __init__(self, full: FullCache, kernels: Kernels, size: PartialBudget, mode: CacheMode = "dynamic",
                 has_remainder: bool = True, selection: row_selection.Selection | None = None,
                 taps: TapLog | None = None) -> None:
        self._full = full
        self._kernels = kernels
        self._has_remainder = has_remainder and mode != "full"
        self._fits: list[RemainderFit] = []  # fit the remainder to verified rows: of the layers of each shape
        self._remainder: Tensor | tuple[Tensor, ...] | None = None  # the current fit, as the kernels take it
        self._size = size
        self._selection = selection or row_selection.heavy_hitters(size.selected, size.sinks, size.recent)
        self._must_select = False  # at the next update
        self._mode = mode
        self.taps = taps
        self._rows = FullCache(kernels, full.shapes, taps=taps, score_cap=full.score_cap)
        self._states = full.states.for_drafts() if full.states else None
        check(mode != "full" or self._states is None, "cache", mode, "dynamic or static for models with delta layers")
        if kernels.is_device and mode != "full":  # stores that grow would need new graphs
            self._rows.reserve(size.budget + _DEVICE_ROOM)
        self._is_view = mode == "full"  # drafts are appended to the full cache
        has_log = self._states is not None or full.taps is not None or taps is not None
        self._whole = 0 if has_log else size.whole
        self._num_seen = 0  # rows of the full cache that were appended here or left out
        self.num_selections = 0
        self._num_drafted = 0  # rows of drafts at the end

    @property
    def _base(self) -> FullCache:
        """The cache that drafted rows are appended to."""
        return self._full if self._is_view else self._rows

    @property
    def length(self) -> int:
        return self._base.length

    def append(self, k: Tensor, v: Tensor) -> LayersKV:
        kv = self._base.append(k, v)
        if self._states:
            kv = kv._replace(deltas=self._states.append(k.shape[1]))
        return kv if self._remainder is None else kv._replace(remainder=self._remainder)

    def commit(self, rows: Sequence[int]) -> None:
        """Keep drafted rows for the drafts after them, until `drop_drafts`."""
        self._base.commit(rows)
        if self._states:
            self._states.commit(rows)
        self._num_drafted += len(rows)

    @property
    def draft_stores(self) -> DraftStores:
        """The rows and the remainder, for a chain that the compiled module drafts."""
        states = self._states.chain_states if self._states else ()
        return DraftStores(self._base.stores, self.length, self._remainder, states)

    def add_drafts(self, count: int) -> None:
        """Keep `count` rows that the compiled module has written after the earlier rows, until `drop_drafts`."""
        self._base.length += count
        if self._states:
            self._states.advance(count)
        self._num_drafted += count

    def drop_drafts(self) -> None:
        """Drop the drafted rows: verification computes the rows of the tokens that it accepts."""
        self._base.truncate(self.length - self._num_drafted)
        if self._states:
            self._states.reset()
        self._num_drafted = 0

    def select_again(self) -> None:
        """Select rows at the next update, even if the budget is not full."""
        self._must_select = True

    def update(self, attention: AttentionRows | None) -> None:
        """Append the rows that the full cache gained, or select rows again where the budget is full.

        attention  of each layer, for the last accepted tokens; None: there is none (a prompt of one token)
        """
        self._is_view = self._mode == "full" or self._full.length < self._whole  # a text has one token more than rows
        if self._is_view or (self._full.length == self._num_seen and not self._must_select):
            return
        if self._mode == "dynamic" or not self._num_seen:
            self._append_or_select(attention)
        is_whole = self._rows.length == self._full.length
        self._remainder = None
        if self._has_remainder and attention and not is_whole:
            num_rows = self._size.recent if self._mode == "dynamic" else 1
            self._remainder = self._fit_remainder(attention.last(num_rows))

    def _fit_remainder(self, whole: AttentionRows) -> Tensor | tuple[Tensor, ...]:
        """Fit to the text's last rows, which are the last rows of this cache too (a static cache appends none)."""
        stores, groups = self._rows.stores, self._rows.groups
        if len(groups) == 1:
            parts = [(stores, whole)]
        else:
            parts = [([stores[layer] for layer in group], whole.layers(group, stores[group[0]].shape[1]))
                     for group in groups]
        if not self._fits:
            self._fits = [new_fit(self._kernels, own, part.output.lse.shape[2]) for own, part in parts]
        maps = [fit.update(own, self._rows.length, part) for fit, (own, part) in zip(self._fits, parts, strict=True)]
        if len(groups) == 1:
            return self._with_sinks(maps[0])
        by_layer = {layer: each for group, some in zip(groups, maps, strict=True)
                    for layer, each in zip(group, some, strict=True)}
        return tuple(by_layer[layer] for layer in range(len(stores)))

    def _with_sinks(self, maps: Tensor) -> Tensor:
        """Give the layers that hold their whole window their sinks as the remainder: nothing else was left out."""
        for layer, sinks in enumerate(self._full.sinks):
            if 0 < self._full.windows[layer] <= self._rows.length:
                maps[layer] = 0.0
                maps[layer, :, -1, -1] = sinks
        return maps

    def _append_or_select(self, attention: AttentionRows | None) -> None:
        num_new = self._full.length - self._num_seen
        is_whole = self._rows.length == self._num_seen
        has_room = self._rows.length + num_new <= self._size.budget
        if has_room and (is_whole or not self._must_select):
            self._copy(range(self._num_seen, self._full.length))
        elif attention is not None:
            self._select(attention.last(_NUM_QUERIES), self._full.length)
        else:  # without queries: sinks and the latest rows
            latest = row_selection.latest(self._full.length, self._size.selected, self._size.sinks)
            self._replace_rows(lambda layer: latest.expand(self._full.shapes[layer][0], -1))
        self._must_select = False
        self._num_seen = self._full.length

    def _select(self, attention: AttentionRows, length: int) -> None:
        """Select among the first `length` rows, by the queries of `attention`."""
        stores, queries = self._full.stores, attention.gathered().queries
        self._replace_rows(lambda layer: self._selection(layer, stores[layer], length,
                                                         queries[layer, ..., : stores[layer].shape[1]]))
        self.num_selections += 1

    def _replace_rows(self, choose: Callable[[int], Tensor]) -> None:
        """Hold the positions choose(layer) [Hkv, N]; in a layer whose window is shorter than the text, the latest N."""
        length, windows = self._full.length, self._full.windows
        chosen = {layer: choose(layer) for layer, window in enumerate(windows) if not 0 < window < length}
        count = next(iter(chosen.values())).shape[-1] if chosen else min(self._size.selected, length)
        device = next((some.device for some in chosen.values()), None)  # where they were computed: no copy waits
        latest = torch.arange(length - count, length, device=device)
        self._rows.length = 0
        self._copy([chosen.get(layer, latest).expand(heads, -1) for layer, (heads, _) in enumerate(self._rows.shapes)])

    def _copy(self, positions: range | Sequence[Tensor]) -> None:
        """Append the rows at these positions of the full cache: of all layers and heads, or for each layer [Hkv, N]."""
        sources, targets = self._full.stores, self._rows.stores
        for group in self._rows.groups:
            own = positions if isinstance(positions, range) else torch.stack([positions[layer] for layer in group])
            self._kernels.copy([sources[layer] for layer in group], [targets[layer] for layer in group], own,
                               self._rows.length)
        self._rows.length += len(positions) if isinstance(positions, range) else positions[0].shape[-1]

    @property
    def nbytes(self) -> int:
        rows = 0 if self._mode == "full" else self._rows.nbytes
        maps = self._remainder if isinstance(self._remainder, tuple) else [self._remainder]
        remainder = sum(each.nbytes for each in maps if each is not None)
        states = self._states.nbytes if self._states else 0
        return rows + remainder + states + sum(fit.nbytes for fit in self._fits)
