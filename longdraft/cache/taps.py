"""The tapped states of a text (`Taps`), from the forwards that compute them to the drafter that reads them.

The full cache appends and commits them with its keys and values. So they are those of the text's rows, whichever
drafter guessed the tokens, and a drafter that has not drafted for a while finds what it has missed. While no drafter
will read the states, forwards need not copy them (`TapLog.is_on`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import Kernels, Taps

LATEST = 4096  # rows of the text that are held until they are taken, at least
FIRST = 64  # first rows of the text that are held as well
_SPARE = 64  # single rows that are allocated together: an allocation takes as long as all else that a row needs


class TappedRows(NamedTuple):
    """States [layers, T, hidden] of consecutive rows, the first of which is at position `start` of the text."""

    start: int
    states: Tensor

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.states.shape[1]

    def cut(self, start: int, stop: int) -> TappedRows:
        """The rows at positions start .. stop - 1."""
        return TappedRows(start, self.states[:, start - self.start : stop - self.start])

    def seen(self, sinks: int, first: int, chunk: int) -> Iterator[TappedRows]:
        """The rows before position `sinks` and those from `first` on, at most `chunk` at a time."""
        for start, stop in ((self.start, min(self.end, sinks)), (max(self.start, first, sinks), self.end)):
            for position in range(start, stop, chunk):
                yield self.cut(position, min(position + chunk, stop))


class TapLog:
    """The tapped states of the rows that were committed and not yet taken: the first ones of the text and the latest.

    layers  that are tapped, as for `Taps`
    width   of a row
    is_on   whether forwards copy the states of their rows (`follow`)
    """

    def __init__(self, kernels: Kernels, layers: Sequence[int], width: int) -> None:
        self.layers = tuple(layers)
        self._kernels = kernels
        self._width = width
        self.is_on = True
        self._first: list[TappedRows] = []
        self._runs: list[TappedRows] = []
        self._spare: list[Tensor] = []  # each [layers, 1, width]

    def follow(self, is_wanted: bool) -> None:
        """Whether forwards copy states from now on. Those of a device always do: they are captured so."""
        self.is_on = is_wanted or self._kernels.is_device

    def append(self, count: int) -> Taps:
        """Provisional rows, for a forward to fill."""
        if count > 1 or self._kernels.is_device:
            rows = self._allocate(count)
        else:
            if not self._spare:
                self._spare = list(self._allocate(1, _SPARE).unbind())
            rows = self._spare.pop()
        return Taps(self.layers, rows)

    def _allocate(self, count: int, *times: int) -> Tensor:
        shape = (*times, len(self.layers), count, self._width)
        return torch.empty(shape, dtype=self._kernels.dtype, device=self._kernels.device)

    def fill(self, count: int) -> None:
        """Commit `count` rows of zeros at the text's beginning."""
        for start in range(0, count, LATEST):
            size = min(LATEST, count - start)
            taps = self.append(size)
            taps.rows.zero_()
            self.commit(taps, range(size), start)

    def commit(self, taps: Taps, rows: Sequence[int], start: int) -> None:
        """Keep these provisional rows, in this order; drop all other provisional rows.

        start  position of the first one in the text
        """
        if not len(rows):
            return
        states = taps.rows
        if list(rows) != list(range(len(rows))):  # the list would be uploaded, and a device waited for
            states = states[:, list(rows)]
        elif len(rows) != states.shape[1]:
            states = states[:, : len(rows)].clone()  # of a large tree, so that its other rows are freed
        self._runs.append(TappedRows(start, states))
        end = start + len(rows)
        if end - self._runs[0].start > LATEST:
            self._forget_before(end - LATEST)

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on."""
        self._first = [run.cut(run.start, length) for run in self._first if run.start < length]
        self._runs = [run.cut(run.start, length) for run in self._runs if run.start < length]

    def take(self) -> list[TappedRows]:
        """All rows that are held, in order, in as few runs as possible; the log forgets them."""
        joined: list[list[TappedRows]] = []
        for run in [*self._first, *self._runs]:
            if joined and run.start == joined[-1][-1].end:
                joined[-1].append(run)
            else:
                joined.append([run])
        self._first, self._runs = [], []
        return [runs[0] if len(runs) == 1 else TappedRows(runs[0].start, torch.cat([run.states for run in runs], 1))
                for runs in joined]

    def _forget_before(self, position: int) -> None:
        """Drop the runs before this position. Of the run at the text's beginning, the first rows stay."""
        while len(self._runs) > 1 and self._runs[1].start <= position:
            start, states = self._runs.pop(0)
            if start == 0:
                self._first = [TappedRows(0, states[:, :FIRST].clone())]

    @property
    def nbytes(self) -> int:
        return sum(run.states.nbytes for run in [*self._first, *self._runs])
