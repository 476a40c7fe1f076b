"""The guesses of trained heads (longdraft/parts/heads.py, medusa.py), each of which predicts a token further ahead.

    row ─ heads ─ logits of each | edit, rank of the first place | of the second | ...

One CUDA graph computes and ranks all places. The host waits once, and reads some ids of each. For several texts it is
one graph too, with a row for each text, which has the guesses that it has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.chain_plan import Heads
from longdraft.kernels.cuda.chain_rows import ChainRows, RowsShape, SharedDrafts, TextDraft
from longdraft.kernels.cuda.choice import TokenChooser
from longdraft.kernels.cuda.drafting import DraftRanking
from longdraft.kernels.cuda.graph_cache import GraphCache, new_owner
from longdraft.kernels.cuda.launch import on_device, require
from longdraft.kernels.cuda.text_rows import TextNeeds


def place_logits(heads: Heads, rows: Tensor, first: Tensor | None, num: int) -> list[Tensor]:
    """Logits [T, V] float32 of `num` places, which may be overwritten. See `TextHeads`."""
    found = [] if first is None else [first]
    if num > len(found):
        found += torch.split(heads.logits(rows).float(), len(rows))
    return [logits.clone() for logits in found[:num]]


class HeadPlaces:
    """Ranks the guesses of one request from one set of heads.

    vocabulary  number of logits
    width       guesses at each place at most
    """

    def __init__(self, heads: Heads, graphs: GraphCache, chooser: TokenChooser, vocabulary: int, width: int,
                 row: Tensor) -> None:
        """row: one of those that `rank` gets."""
        self._heads, self._graphs, self._chooser = heads, graphs, chooser
        self._ranking = DraftRanking(chooser, vocabulary, width, row.device)
        self._row = torch.empty_like(row)
        self._first = torch.empty(1, vocabulary, device=row.device)
        self._key = new_owner()
        graphs.own(self, self._key)

    def launch(self, row: Tensor, first: Tensor | None, num: int, path: Sequence[int], required: int) -> Tensor:
        """Launch what ranks the guesses of `num` places. Returns the outcome [num, 18] (`ranked_places`).

        row, first  see `TextHeads`
        path      drafted tokens between the text and the first place
        required  tokens that must be written after `path` before the text may end
        """
        require(num >= 1, "a place", num)
        chooser, has_bans, has_first = self._chooser, required > 0, first is not None
        chooser.place(path)
        text = chooser.text

        def begin() -> None:
            self._ranking.begin(float("inf"), chooser.length + len(path), required)
            self._row.copy_(row)
            if first is not None:
                self._first.copy_(first)

        key = ("heads", self._key, num, has_first, has_bans, chooser.place_serial)
        with on_device(text.device):
            self._graphs.run_in_turn([(key, partial(self._places, num, has_first, has_bans))], begin)
        return self._ranking.outcome[:num]

    def _places(self, num: int, has_first: bool, has_bans: bool) -> None:
        first = self._first if has_first else None
        for ahead, logits in enumerate(place_logits(self._heads, self._row, first, num)):
            self._ranking.rank(logits, has_bans, ahead)
            self._ranking.go_on(ahead)


class TextHeads(NamedTuple):
    """A text's part of a launch.

    row    [1, hidden], the last layer's output of the row in front of the first place
    first  logits [1, V] of the first place, if it is not predicted by a head
    """

    draft: TextDraft
    heads: Heads
    graphs: GraphCache
    vocabulary: int
    row: Tensor
    first: Tensor | None


class _Buffers:
    """The memory of the guesses of some texts. part: of any text."""

    def __init__(self, shape: RowsShape, part: TextHeads) -> None:
        device = part.row.device
        self.rows = ChainRows(shape, 0, device)
        self.given = torch.zeros(shape.texts, part.row.shape[1], dtype=part.row.dtype, device=device)
        self.first = None if part.first is None else torch.zeros(shape.texts, shape.vocabulary, device=device)

    def inputs(self, parts: Sequence[TextHeads]) -> tuple[Tensor, Sequence[TextHeads]]:
        """What `load` gets."""
        return self.rows.inputs([part.draft for part in parts]), parts

    def load(self, staged: Tensor, parts: Sequence[TextHeads]) -> None:
        """Set what the heads read: a copy, a launch, and one more copy or two."""
        self.rows.load(staged)
        torch.cat([part.row for part in parts], out=self.given[: len(parts)])
        if self.first is not None:
            torch.cat([part.first for part in parts if part.first is not None], out=self.first[: len(parts)])


class SharedHeads(SharedDrafts[TextHeads, _Buffers]):
    """Guesses of several texts from one set of heads. All texts have logits of the first place, or none has."""

    name = "heads of texts"

    def _buffers_for(self, parts: Sequence[TextHeads]) -> _Buffers:
        first = parts[0]
        shape = RowsShape.of([part.draft for part in parts], first.vocabulary)
        return self._buffers.get(shape, lambda: _Buffers(shape, first))

    def _sizes(self, places: int) -> list[int]:
        return [places]

    def _run(self, buffers: _Buffers, first: TextHeads, size: int, needs: TextNeeds) -> None:
        for ahead, logits in enumerate(place_logits(first.heads, buffers.given, buffers.first, size)):
            buffers.rows.rank(logits, needs, ahead)
            buffers.rows.go_on(ahead)
