"""The guesses of trained heads (longdraft/model/heads.py, medusa.py), each of which predicts a token further ahead.

    row ─ heads ─ logits of each | edit, rank of the first place | of the second | ...

One CUDA graph computes and ranks all places. The host waits once, and reads some ids of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels.cuda.choice import TokenChooser
from longdraft.kernels.cuda.drafting import DraftRanking
from longdraft.kernels.cuda.graph_cache import GraphCache, new_owner
from longdraft.kernels.cuda.launch import on_device, require
from longdraft.kernels.launched import LaunchedWork


class DraftHeads(Protocol):
    """Heads that predict further tokens from one row."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [heads, V] float32 for the last layer's output [1, hidden]."""


class HeadPlaces:
    """Ranks the guesses of one request from one set of heads.

    vocabulary  number of logits
    width       guesses at each place at most
    """

    def __init__(self, heads: DraftHeads, graphs: GraphCache, chooser: TokenChooser, vocabulary: int, width: int,
                 row: Tensor) -> None:
        """row: one of those that `rank` gets."""
        self._heads, self._graphs, self._chooser = heads, graphs, chooser
        self._ranking = DraftRanking(chooser, vocabulary, width, row.device)
        self._row = torch.empty_like(row)
        self._first = torch.empty(1, vocabulary, device=row.device)
        self._key = new_owner()
        graphs.own(self, self._key)

    def rank(self, row: Tensor, first: Tensor | None, num: int, path: Sequence[int],
             required: int) -> LaunchedWork[list[list[int]]]:
        """The guesses of `num` places, best first.

        row       [1, hidden], the last layer's output of the row in front of the first place
        first     logits [1, V] of the first place, if it is not predicted by a head
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
        return [place.tokens for place in (yield from self._ranking.read(num))]

    def _places(self, num: int, has_first: bool, has_bans: bool) -> None:
        ranking, rows = self._ranking, list[Tensor]()
        if has_first:
            rows.append(self._first.clone())  # ranking overwrites logits
        if num > len(rows):
            rows += torch.split(self._heads.logits(self._row).float(), 1)
        for ahead, logits in enumerate(rows[:num]):
            ranking.rank(logits.clone(), has_bans, ahead)
            ranking.go_on(ahead)
