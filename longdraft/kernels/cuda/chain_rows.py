"""The rows of texts that draft their chains in one graph: their tokens, settings and guesses.

    a model         ModelChains  (`model_chain`)
    trained layers  LayerChains  (`layer_chain`)    compute the logits of these rows
    heads           HeadPlaces   (`head_places`)

What differs between texts is in device memory, in the entries of `jit_choice`. So a graph of several texts belongs to a
number of them; a text that begins or ends captures nothing. A text by itself is the smallest case: its graph reads its
own stores. Chains may have unlike lengths: a text that has reached the end of its own stays there while others go on.
What changes from token to token (place, length, rotation) is in device memory too. The host uploads the state before,
and reads all guesses and leads in one copy afterwards.

The guesses are those that the filters leave. (The host fills up with tokens that they remove, where they leave fewer
guesses than it wants.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.chain_plan import Ranked, ScoredPlace
from longdraft.kernels.cuda import jit_choice, jit_drafting
from longdraft.kernels.cuda.device_text import MAX_CHAIN, DeviceText
from longdraft.kernels.cuda.forward_buffers import EMBED_BLOCK
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.launch import (
    RecentlyUsed,
    ceil_div,
    chained,
    on_device,
    padded_size,
    require,
    staged_parts,
)
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.support import BLOCK
from longdraft.kernels.cuda.text_rows import (
    ENTRY,
    MAX_FRESH,
    TextNeeds,
    TextRows,
    TextSupport,
    append_tokens,
    empty_entry,
    entry_of,
    longest_window,
)

MAX_TEXTS = 64  # of a graph
MAX_WIDTH = 16  # guesses that are ranked for a token
PLACE = 2 + 2 * MAX_WIDTH  # numbers of a place: of guesses, the lead, the guesses, their scores
_UNROLLED = 4  # tokens of the larger graph of a chain
_MAX_BUFFERS = 4  # numbers of texts: the logits of 64 take up to 65 MB


class TextDraft(NamedTuple):
    """What a text's chain is drafted by, besides what computes its logits.

    text       of the request; with other texts: whose rules `text_rows.can_share`
    fresh      the request's tokens from position `start` on, which `text` did not hold when the draft was made
    path       drafted tokens after the text, which the chain continues
    places     tokens of the chain
    width      guesses at each place at most
    required   tokens that must be written after `path` before the text may end
    within     largest gap between a guess's score and the best one's
    rotations  cos, sin [N, D / 2] float32 in the host's memory, of the last N places; none for heads
    """

    text: DeviceText
    start: int
    fresh: NDArray[np.int32]
    path: Sequence[int]
    places: int
    width: int
    required: int
    within: float
    rotations: tuple[Tensor, ...]

    @property
    def end(self) -> int:
        """Tokens of the request. A launch that failed after it had uploaded some of them is tried again."""
        return self.start + len(self.fresh)

    @property
    def new_tokens(self) -> list[int]:
        """Tokens that are uploaded with the settings: of the text, and of the path after it; none if these are many."""
        new = [*self.fresh.tolist(), *self.path]
        return new if len(new) <= MAX_FRESH else []

    def prepared(self) -> TextDraft:
        """This chain, for whose tokens the text has room. Many new tokens are copied by themselves."""
        require(self.places <= MAX_CHAIN, f"chains of at most {MAX_CHAIN} tokens", self.places)
        if len(self.fresh) + len(self.path) <= MAX_FRESH:
            self.text.make_room(len(self.fresh) + len(self.path) + MAX_CHAIN)
            return self
        self.text.extend(self.fresh, self.start)
        self.text.place(self.path)
        return self._replace(start=self.end, fresh=self.fresh[:0])


class RowsShape(NamedTuple):
    """What the memory of some chains depends on: numbers of texts, of logits, of tokens of a window, and of guesses."""

    texts: int
    vocabulary: int
    window: int
    width: int

    @classmethod
    def of(cls, drafts: Sequence[TextDraft], vocabulary: int) -> RowsShape:
        width = max(2, *(draft.width for draft in drafts))  # two show the lead
        require(width <= MAX_WIDTH, f"at most {MAX_WIDTH} guesses", width)
        return cls(padded_size(len(drafts), 1), vocabulary, longest_window([draft.text for draft in drafts]), width)


class ChainRows:
    """The memory of chains of one shape.

    half  D / 2 of the rotations
    """

    def __init__(self, shape: RowsShape, half: int, device: torch.device) -> None:
        texts, vocabulary, window, width = shape
        blocks, int32 = ceil_div(vocabulary, BLOCK), torch.int32

        def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self.texts = texts
        self._parts = staged_parts(2 * ENTRY * texts, MAX_FRESH * texts, (MAX_CHAIN + 1) * texts * 2 * half)
        self._staged = zeros(self._parts[-1].stop, dtype=int32)
        entries, self._fresh, rotations = (self._staged[part] for part in self._parts)
        self._rotations = rotations.view(torch.float32).view(MAX_CHAIN + 1, texts, 2, half)  # cos and sin
        self.order = torch.arange(texts, dtype=int32, device=device)
        self._rows = TextRows(zeros(texts, dtype=int32), zeros(texts, 1, dtype=int32), zeros(texts, dtype=int32),
                              self.order, entries.view(torch.int64), zeros(texts, window, dtype=int32),
                              zeros(texts, window))
        self._support = TextSupport(self._rows, vocabulary)
        self._padding = zeros(1, dtype=int32)  # the text of padding rows
        self._next_place = zeros(ENTRY, dtype=torch.int64)  # is added to the entries
        self._next_place[3], self._next_place[4] = -1, 1
        self._entries, self._numbers = self._rows.entries, self._rows.entries.view(torch.float64)
        self._bests, self._best_ids = zeros(texts, blocks), zeros(texts, blocks, dtype=int32)
        self._scores = zeros(texts, blocks, width, dtype=torch.float64)
        self._ids = zeros(texts, blocks, width, dtype=int32)
        # Of all places, and of one after the longest chain.
        self.outcome = zeros(MAX_CHAIN + 1, texts, PLACE, dtype=torch.int64)

    def inputs(self, drafts: Sequence[TextDraft]) -> Tensor:
        """What `load` gets, as far as the longest chain goes. A padding text has no places."""
        staged = np.zeros(len(self._staged), dtype=np.int32)
        settings, new, turns = (staged[part] for part in self._parts)
        entries, fresh = settings.view(np.int64).reshape(-1, ENTRY), new.reshape(-1, MAX_FRESH)
        rotations = turns.view(np.float32).reshape(self._rotations.shape)
        entries[:] = empty_entry()
        entries[:, 0], entries[:, 1] = self._padding.data_ptr(), 1
        for text, draft in enumerate(drafts):
            tokens, length = draft.new_tokens, draft.end + len(draft.path)
            fresh[text, : len(tokens)] = tokens
            entries[text] = entry_of(draft.text, draft.required, length, len(tokens))
            entries[text, 4:7] = 0, draft.places, draft.width
            entries[text].view(np.float64)[18] = draft.within
            for turn, part in enumerate(draft.rotations):
                rotations[draft.places - len(part) : draft.places, text, turn] = part.numpy()
        used = self._parts[2].start + max(draft.places for draft in drafts) * rotations[0].size
        return torch.from_numpy(staged[:used])

    def load(self, staged: Tensor, needs: TextNeeds) -> None:
        """Set the state from which the chains begin: a copy, and a launch or two."""
        self._staged[: len(staged)].copy_(staged, non_blocking=True)
        append_tokens(self._entries, self._fresh)
        if needs.searches:
            self._support.read_filters()

    def embed(self, table: CudaLinear, factor: float, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Write the embeddings x [T, hidden] of the texts' last tokens, and the rotations of their places in the
        chains."""
        hidden, (rows, half), scale = table.in_features, cos.shape, table.scale
        jit_drafting.begin_place_kernel[(ceil_div(hidden, EMBED_BLOCK), rows)](
            self._entries, table.weight, cos if scale is None else scale, self._rotations, x, cos, sin, factor,
            HIDDEN=hidden, HALF=half, PADDED=padded_size(half), BLOCK=EMBED_BLOCK, HAS_SCALE=scale is not None,
            HAS_FACTOR=factor != 1, **table.options(), **chained(x.device))

    def rank(self, logits: Tensor, needs: TextNeeds, ahead: int = 0) -> None:
        """Rank the guesses of logits [T, V], which are overwritten; the result goes to `outcome`.

        ahead  unknown tokens between the texts and the guesses
        """
        (rows, vocabulary), (_, blocks, width), device = logits.shape, self._scores.shape, logits.device
        of = self._rows
        of.edit(logits, needs)
        jit_choice.block_maxima_kernel[(rows, blocks)](logits, self._bests, self._best_ids, vocabulary, blocks,
                                                       BLOCK=BLOCK, **chained(device))
        limits, flags = self._support.find(logits, self._bests, needs)
        jit_choice.best_in_blocks_kernel[(rows, blocks)](
            logits, self._bests, of.depths, of.entries, self._numbers, of.texts, *limits, self._scores, self._ids,
            vocabulary, blocks, ahead, BLOCK=BLOCK, BLOCKS=padded_size(blocks), WIDTH=width, HAS_NOISE=needs.has_noise,
            **flags, **chained(device))
        jit_drafting.rank_kernel[(rows,)](
            self._bests, self._scores, self._ids, self._entries, self._numbers, self.outcome, blocks,
            BLOCKS=padded_size(blocks), CANDIDATES=padded_size(blocks * width), WIDTH=width, **chained(device))

    def go_on(self) -> None:
        """Go on to the next places, after tokens that are not known."""
        self._entries.view(self.texts, ENTRY).add_(self._next_place)

    def end(self, where: Tensor) -> None:
        """Append the best guesses to the texts, and go on to the next places. where: int64 [2 T]."""
        jit_drafting.end_place_kernel[(self.texts,)](self._entries, where, self.outcome, num_warps=1,
                                                     **chained(where.device))


class ChainPart(Protocol):
    """A text's part of a launch: a named tuple."""

    @property
    def draft(self) -> TextDraft: ...

    @property
    def graphs(self) -> GraphCache: ...

    def _replace(self: Part, *, draft: TextDraft) -> Part: ...


class _ChainBuffers(Protocol):
    """The memory of some chains. `load` gets what `inputs` returns and the texts' needs, and sets the state from which
    the chains begin."""

    @property
    def rows(self) -> ChainRows: ...

    @property
    def inputs(self) -> Callable[..., Sequence[Any]]: ...

    @property
    def load(self) -> Callable[..., None]: ...


Part = TypeVar("Part", bound=ChainPart)
Buffers = TypeVar("Buffers", bound=_ChainBuffers)


class Chains(ABC, Generic[Part, Buffers]):
    """What drafts chains of texts. One that is given chains of several texts gets these again and again; a text's own
    gets chains of that text.
    """

    def __init__(self) -> None:
        self._buffers: RecentlyUsed[object, Buffers] = RecentlyUsed(_MAX_BUFFERS)

    def launch(self, parts: Sequence[Part]) -> list[Tensor]:
        """Launch the chains. Returns the outcome of each: [N, 34] int64, of its places (`ranked_places`)."""
        outcomes, most = [], self._most_texts(parts)
        for first in range(0, len(parts), most):
            some = parts[first : first + most]
            outcome = self._launch(some)
            if len(parts) > most:
                outcome = outcome.clone()  # the next ones may have the same memory
            outcomes += [outcome[: part.draft.places, text] for text, part in enumerate(some)]
        return outcomes

    def _launch(self, given: Sequence[Part]) -> Tensor:
        """Launch chains that fit into one graph. Returns the outcome [places, T, 34]."""
        parts = [part._replace(draft=part.draft.prepared()) for part in given]
        first, drafts = parts[0], [part.draft for part in parts]
        buffers, graphs = self._buffers_for(parts), first.graphs
        needs = TextNeeds.of([(draft.text, draft.required) for draft in drafts])
        pieces = [((size, needs), partial(self._run, buffers, first, size, needs)) for size in self._sizes(parts)]
        with on_device(buffers.rows.order.device):
            graphs.run_in_turn(buffers, pieces, partial(buffers.load, *buffers.inputs(parts), needs))
            self._end(buffers, parts)
        for draft in drafts:
            draft.text.length = draft.end
        return self._outcome(buffers)

    def _most_texts(self, parts: Sequence[Part]) -> int:
        """How many of these chains a graph has at most."""
        return MAX_TEXTS

    def _end(self, buffers: Buffers, parts: Sequence[Part]) -> None:
        """Is called when the graphs are launched."""

    def _outcome(self, buffers: Buffers) -> Tensor:
        """[places, T, C] int64 of the chains."""
        return buffers.rows.outcome

    @abstractmethod
    def _buffers_for(self, parts: Sequence[Part]) -> Buffers:
        """The memory of these chains, which is kept."""

    @abstractmethod
    def _sizes(self, parts: Sequence[Part]) -> Sequence[Any]:
        """What the graphs are made for that draft these chains one after another."""

    @abstractmethod
    def _run(self, buffers: Buffers, first: Part, size: Any, needs: TextNeeds) -> None:
        """The launches of a graph, which do not depend on the buffers' contents. first: the part of any text."""


def in_graphs(count: int) -> list[int]:
    """The tokens of each graph that is replayed for `count` tokens."""
    return [_UNROLLED] * (count // _UNROLLED) + [1] * (count % _UNROLLED)


def ranked_places(outcome: Tensor) -> list[Ranked]:
    """The guesses of some places, from their rows [N, 34] on the host."""
    leads = outcome[:, 1].contiguous().view(torch.float64).tolist()
    return [Ranked(row[2 : 2 + row[0]], lead) for row, lead in zip(outcome.tolist(), leads, strict=True)]


def scored_places(outcome: Tensor) -> list[ScoredPlace]:
    """The guesses of some places and their scores, which fall, from their rows [N, 34 or more] on the host."""
    scores = outcome[:, 2 + MAX_WIDTH : PLACE].contiguous().view(torch.float64).numpy()
    return [(row[2 : 2 + row[0]], own[: row[0]]) for row, own in zip(outcome.tolist(), scores, strict=True)]
