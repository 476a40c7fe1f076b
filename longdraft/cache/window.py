"""Keys and values of the latest rows of a text, for drafting layers that have a cache of their own.

    slots   [ first rows of the text ][ latest rows, in any order ][ rows of drafts ] ... [ first rows, as written ]

The order does not matter, because keys are stored with their rotation. A row that leaves the window makes room for the
row of the last slot, so the rows of text always fill the first slots.

The first rows (attention sinks, StreamingLLM, arXiv 2309.17453) stay. When rows after them have left the window, their
keys are rotated to the positions directly before it, so that no distance exceeds the window by more than their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longdraft.kernels import Kernels
from longdraft.kernels.chain_plan import MOST_UNREAD, Move

Rotations = Callable[[list[int]], tuple[Tensor, Tensor]]  # positions -> cos and sin [R, D / 2]


class RowWindow:
    """The rows of one text.

    window  latest rows of text that are held at most
    drafts  rows of drafts after them at most
    sinks   first rows of the text that are held as well
    """

    def __init__(self, kernels: Kernels, num_layers: int, num_kv_heads: int, head_dim: int, window: int, drafts: int,
                 sinks: int = 0) -> None:
        self.stores = [kernels.new_store(num_kv_heads, head_dim) for _ in range(num_layers)]
        self._kept = sinks + window + max(drafts + 1, MOST_UNREAD)  # slot of the first sink, as it was written
        for store in self.stores:
            store.reserve(self._kept + sinks)
        self._kernels, self._kv_heads = kernels, num_kv_heads
        self._window, self._sinks = window, sinks
        self.num_sinks = 0
        self.first = self.end = 0  # positions of the first row after the sinks, and after the last row
        self._slots: dict[int, int] = {}  # position -> slot, after the sinks
        self._positions: dict[int, int] = {}  # the inverse
        self.num_drafts = 0

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    @property
    def num_text(self) -> int:
        """Rows of text, the sinks included."""
        return self.num_sinks + self.end - self.first

    @property
    def length(self) -> int:
        return self.num_text + self.num_drafts

    def restart(self, position: int) -> None:
        """Drop all rows except the sinks; the next row of text is at `position`."""
        self.first = self.end = position
        self._slots, self._positions = {}, {}
        self.num_drafts = 0

    def add_drafts(self, k: Tensor, v: Tensor) -> None:
        """Rows k, v [L, T, Hkv, D] after the last."""
        for store, keys, values in zip(self.stores, k, v, strict=True):
            store.write(self.length, keys, values)
        self.num_drafts += k.shape[1]

    def keep(self, count: int) -> None:
        """The first `count` drafts became text; drop the other drafts."""
        drafts = self._read(list(range(self.num_text, self.num_text + count))) if count else []
        self.num_drafts = 0
        if drafts:
            self.add_text(*(torch.stack(part).transpose(1, 2) for part in zip(*drafts, strict=True)))

    def add_text(self, k: Tensor, v: Tensor) -> None:
        """Append rows k, v [L, T, Hkv, D] of text. Only without drafts."""
        if self.end < self._sinks and self.end == self.num_sinks:  # the text has just begun
            count = min(self._sinks - self.end, k.shape[1])
            for slot in (self.num_sinks, self._kept + self.num_sinks):
                self._write(slot, k[:, :count], v[:, :count])
            self.num_sinks += count
            self.restart(self.num_sinks)
            k, v = k[:, count:], v[:, count:]
        surplus = max(0, k.shape[1] - self._window)
        if surplus:
            self.restart(self.end + surplus)
        count = k.shape[1] - surplus
        if not count:
            return
        self.make_room(count)
        self._write(self.num_text, k[:, surplus:], v[:, surplus:])
        self.add_read(count)

    def make_room(self, count: int) -> None:
        """Drop the oldest rows until `count` more fit into the window. Only without drafts."""
        self.move(self.room_for(count))

    def room_for(self, count: int) -> list[Move]:
        """As `make_room`, but the moves that must follow are returned."""
        surplus = min(self.end - self.first, self.end - self.first + count - self._window)
        if surplus <= 0:
            return []
        left = self.num_text - surplus
        dropped = {self._slots.pop(position) for position in range(self.first, self.first + surplus)}
        holes = [slot for slot in dropped if slot < left]
        moved = [slot for slot in range(left, self.num_text) if slot not in dropped]
        for hole, slot in zip(holes, moved, strict=True):
            self._put(self._positions[slot], hole)
        self.first += surplus
        return [Move(slot, hole) for hole, slot in zip(holes, moved, strict=True)]

    def move(self, moves: Sequence[Move]) -> None:
        """Copy rows to other slots."""
        copied = self._read([move.source for move in moves]) if moves else []
        for store, (k, v) in zip(self.stores, copied, strict=False):
            for index, move in enumerate(moves):
                store.write_heads(move.target, k[:, index : index + 1], v[:, index : index + 1])

    def add_read(self, count: int) -> None:
        """A chain has written `count` rows of text after the last one, for which there was room."""
        for slot in range(self.num_text, self.num_text + count):
            self._put(self.end, slot)
            self.end += 1

    @property
    def has_sinks(self) -> bool:
        """Whether the next row of text is not a sink."""
        return self.end >= self._sinks

    @property
    def sinks_shift(self) -> int:
        """Positions by which the sinks are rotated."""
        return self.first - self.num_sinks if self.num_sinks else 0

    @property
    def sink_moves(self) -> list[Move]:
        """What rotates the keys of the sinks by `sinks_shift`."""
        return [Move(self._kept + slot, slot, True) for slot in range(self.num_sinks)] if self.sinks_shift else []

    def turn_sinks(self, rotations: Rotations) -> None:
        """Rotate the keys of the sinks to the positions directly before the first row after them."""
        if not self.sinks_shift:
            return
        cos, sin = (part.expand(self.num_sinks, -1) for part in rotations([self.sinks_shift]))
        kept = self._read(list(range(self._kept, self._kept + self.num_sinks)))
        for store, (k, v) in zip(self.stores, kept, strict=True):
            turned = self._kernels.rope(k.transpose(0, 1).contiguous(), cos, sin)
            store.write(0, turned, v.transpose(0, 1))

    def _put(self, position: int, slot: int) -> None:
        self._slots[position], self._positions[slot] = slot, position

    def _read(self, slots: list[int]) -> list[tuple[Tensor, Tensor]]:
        """k, v [Hkv, N, D] of each layer."""
        chosen = torch.tensor(slots).expand(self._kv_heads, -1)
        return [store.read(chosen) for store in self.stores]

    def _write(self, slot: int, k: Tensor, v: Tensor) -> None:
        for store, keys, values in zip(self.stores, k, v, strict=True):
            store.write(slot, keys, values)
