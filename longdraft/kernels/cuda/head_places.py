"""The guesses of trained heads (longdraft/parts/heads.py, medusa.py), each of which predicts a token further ahead.

    row ─ heads ─ logits of each | edit, rank of the first place | of the second | ...

One CUDA graph computes and ranks all places of all texts. The host waits once, and reads some ids of each place.
`GivenLogits` ranks the guesses of logits that are already there, of one place or of several, of one text or of several.
`PairPlaces` does so where the logits of a place depend on the best guess of the place before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.chain_plan import Heads, PairScores, PlaceRows, ScoredPlace
from longdraft.kernels.cuda.chain_rows import (
    MAX_WIDTH,
    PLACE,
    Buffers,
    ChainPart,
    ChainRows,
    Chains,
    RowsShape,
    TextDraft,
    scored_places,
)
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.text_rows import TextNeeds


def place_logits(heads: Heads, rows: Tensor, first: Tensor | None, num: int) -> list[Tensor]:
    """Logits [T, V] float32 of `num` places, which may be overwritten. See `TextHeads`."""
    found = [] if first is None else [first]
    if num > len(found):
        found += torch.split(heads.logits(rows).float(), len(rows))
    return [logits.clone() for logits in found[:num]]


_MOST_BYTES = 1 << 27  # of the logits that one graph ranks
_PAIRED = PLACE + 1 + MAX_WIDTH**2 // 2  # numbers of a place, with trust and the table of pairs in float32


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
    """The memory of guesses. part: of any text."""

    def __init__(self, shape: RowsShape, part: TextHeads) -> None:
        device = part.row.device
        self.rows = ChainRows(shape, 0, device)
        self.given = torch.zeros(shape.texts, part.row.shape[1], dtype=part.row.dtype, device=device)
        self.first = None if part.first is None else torch.zeros(shape.texts, shape.vocabulary, device=device)

    def inputs(self, parts: Sequence[TextHeads]) -> tuple[Tensor, Sequence[TextHeads]]:
        """What `load` gets."""
        return self.rows.inputs([part.draft for part in parts]), parts

    def load(self, staged: Tensor, parts: Sequence[TextHeads], needs: TextNeeds) -> None:
        """Set what the heads read: a copy, a launch or two, and one more copy or two."""
        self.rows.load(staged, needs)
        torch.cat([part.row for part in parts], out=self.given[: len(parts)])
        if self.first is not None:
            torch.cat([part.first for part in parts if part.first is not None], out=self.first[: len(parts)])


class HeadPlaces(Chains[TextHeads, _Buffers]):
    """Guesses from one set of heads. All texts have logits of the first place, or none has."""

    def _buffers_for(self, parts: Sequence[TextHeads]) -> _Buffers:
        first = parts[0]
        shape = RowsShape.of([part.draft for part in parts], first.vocabulary)
        return self._buffers.get(shape, lambda: _Buffers(shape, first))

    def _sizes(self, parts: Sequence[TextHeads]) -> list[int]:
        return [max(part.draft.places for part in parts)]

    def _run(self, buffers: _Buffers, first: TextHeads, size: int, needs: TextNeeds) -> None:
        for ahead, logits in enumerate(place_logits(first.heads, buffers.given, buffers.first, size)):
            buffers.rows.rank(logits, needs, ahead)
            buffers.rows.go_on()


class TextLogits(NamedTuple):
    """Logits [P, V] float32 of P places, one after another, whose guesses are ranked."""

    draft: TextDraft
    graphs: GraphCache
    logits: Tensor


class _LogitsBuffers:
    """The memory of logits [P, T, V] that are ranked."""

    def __init__(self, shape: RowsShape, places: int, device: torch.device) -> None:
        self.rows = ChainRows(shape, 0, device)
        self.logits = torch.zeros(places, shape.texts, shape.vocabulary, device=device)

    def inputs(self, parts: Sequence[TextLogits]) -> tuple[Tensor, Sequence[TextLogits]]:
        """What `load` gets."""
        return self.rows.inputs([part.draft for part in parts]), parts

    def load(self, staged: Tensor, parts: Sequence[TextLogits], needs: TextNeeds) -> None:
        """A copy and a launch or two, and a copy for each text."""
        self.rows.load(staged, needs)
        for text, part in enumerate(parts):
            self.logits[: len(part.logits), text].copy_(part.logits)


class _HasLogits(ChainPart, Protocol):
    """A text's part of a launch, with logits [P, N] float32 of its places."""

    @property
    def logits(self) -> Tensor: ...


GivenPart = TypeVar("GivenPart", bound=_HasLogits)


class _GivenPlaces(Chains[GivenPart, Buffers]):
    """Guesses of places whose logits are there. ahead: unknown tokens between the texts and their first places"""

    def __init__(self, ahead: int) -> None:
        super().__init__()
        self._ahead = ahead

    def _most_texts(self, parts: Sequence[GivenPart]) -> int:
        """As many, a power of two, as one graph has memory for."""
        largest = max(part.logits.numel() for part in parts) * 4
        return max(1, min(super()._most_texts(parts), 1 << (_MOST_BYTES // largest).bit_length() >> 1))

    def _sizes(self, parts: Sequence[GivenPart]) -> list[int]:
        return [max(len(part.logits) for part in parts)]


class GivenLogits(_GivenPlaces[TextLogits, _LogitsBuffers]):
    """Guesses from logits of several places of each text."""

    def _buffers_for(self, parts: Sequence[TextLogits]) -> _LogitsBuffers:
        logits, (places,) = parts[0].logits, self._sizes(parts)
        shape = RowsShape.of([part.draft for part in parts], logits.shape[1])
        return self._buffers.get((shape, places), lambda: _LogitsBuffers(shape, places, logits.device))

    def _run(self, buffers: _LogitsBuffers, first: TextLogits, size: int, needs: TextNeeds) -> None:
        for place, logits in enumerate(buffers.logits, self._ahead):
            buffers.rows.rank(logits, needs, place)
            buffers.rows.go_on()


class TextPairs(NamedTuple):
    """Places whose logits depend on the token before, which is `before` for the first one."""

    draft: TextDraft
    graphs: GraphCache
    places: PlaceRows
    before: int
    pairs: PairScores

    @property
    def logits(self) -> Tensor:
        return self.places.logits


class _PairBuffers:
    """The memory of `count` places. part: of any text."""

    def __init__(self, shape: RowsShape, count: int, part: TextPairs) -> None:
        device = part.logits.device

        def held(like: Tensor) -> Tensor:
            return torch.zeros(count, shape.texts, like.shape[1], dtype=like.dtype, device=device)

        self.rows = ChainRows(shape, 0, device)
        self.places = PlaceRows(held(part.places.logits), held(part.places.normed),
                                None if part.places.gates is None else held(part.places.gates))
        self.before = torch.zeros(shape.texts, dtype=torch.int64, device=device)
        self.found = torch.zeros(count, shape.texts, _PAIRED, dtype=torch.int64, device=device)

    def inputs(self, parts: Sequence[TextPairs]) -> tuple[Tensor, Tensor, Sequence[TextPairs]]:
        """What `load` gets."""
        return self.rows.inputs([part.draft for part in parts]), torch.tensor([part.before for part in parts]), parts

    def load(self, staged: Tensor, before: Tensor, parts: Sequence[TextPairs], needs: TextNeeds) -> None:
        """Two copies and a launch or two, and some copies for each text."""
        self.rows.load(staged, needs)
        self.before[: len(parts)].copy_(before, non_blocking=True)
        for text, part in enumerate(parts):
            for held, given in zip(self.places, part.places, strict=True):
                if held is not None and given is not None:
                    held[: len(given), text].copy_(given)


class PairPlaces(_GivenPlaces[TextPairs, _PairBuffers]):
    """Guesses of places whose logits depend on the token before."""

    def _buffers_for(self, parts: Sequence[TextPairs]) -> _PairBuffers:
        first, (count,) = parts[0], self._sizes(parts)
        part = first.pairs.part
        shape = RowsShape.of([each.draft for each in parts], part.size if part else first.logits.shape[1])
        return self._buffers.get((shape, count), lambda: _PairBuffers(shape, count, first))

    def _run(self, buffers: _PairBuffers, first: TextPairs, size: int, needs: TextNeeds) -> None:
        pairs, rows = first.pairs, buffers.rows
        before = buffers.before[:, None]
        for place in range(size):
            own = buffers.places.at(place)
            logits = pairs.after(own, before[:, 0])
            rows.rank(logits if pairs.part is None else pairs.part.whole(logits), needs, self._ahead + place)
            rows.go_on()
            found = buffers.found[place]
            found[:, :PLACE] = rows.outcome[place]
            tokens = found[:, 2 : 2 + MAX_WIDTH].clamp(min=0)  # those that are no guesses are not read
            numbers = found[:, PLACE:].view(torch.float32)
            numbers[:, 0] = pairs.trust(own, before[:, 0])
            numbers[:, 2 : 2 + MAX_WIDTH * before.shape[1]] = pairs.table(own, before, tokens).flatten(1)
            before = tokens

    def _outcome(self, buffers: _PairBuffers) -> Tensor:
        return buffers.found


def scored_pairs(outcome: Tensor) -> list[tuple[ScoredPlace, NDArray[np.float64], float]]:
    """The guesses of places from their rows on the host, up to the first place without one: each with what its logits
    gain by each guess of the place before, [K before, K], and how sure the drafter is."""
    numbers = outcome[:, PLACE:].contiguous().view(torch.float32).double().numpy()
    found, before = list[tuple[ScoredPlace, NDArray[np.float64], float]](), 1
    for scored, own in zip(scored_places(outcome), numbers, strict=True):
        count = len(scored[0])
        found.append((scored, own[2:].reshape(MAX_WIDTH, MAX_WIDTH)[:before, :count], float(own[0])))
        if not count:
            break
        before = count
    return found
