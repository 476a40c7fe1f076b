"""The drafter `block`: one pass of a block head guesses a block of tokens, from which the likeliest tree is verified.

longdraft/parts/block.py has the head. Its only state is the keys and values of the text's rows, which the target's own
states give without a forward. So a text that is resumed, or that begins like an earlier one, needs nothing saved: the
states of its latest rows come from the target's forwards (longdraft/cache/taps.py), and rows that are missing are left
out.

A head sees a window of the text, as `eagle`'s does, so that all distances stay in the range that it was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.cache.taps import FIRST, LATEST, TapLog, TappedRows
from longdraft.cache.window import RowWindow
from longdraft.drafters.draft_vocabulary import (
    AUTO_VOCABULARY,
    DraftVocabulary,
    VocabularySize,
    check_draft_vocabulary,
    vocabulary_size,
)
from longdraft.drafters.eagle import READ_CHUNK, USUAL_SINKS, USUAL_WINDOW
from longdraft.drafters.layer_drafter import SlotDrafter
from longdraft.drafters.marginal_tree import MAX_NODES, SHORTLIST, Slot
from longdraft.drafters.options import DrafterOptions
from longdraft.errors import check
from longdraft.kernels import KVStore
from longdraft.kernels.launched import HostWork, LaunchedWork
from longdraft.parts.block import BlockHead, DraftBlock, SlotRows
from longdraft.parts.draft_copy import AUTO_WEIGHTS, check_head_weights
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Verified
from longdraft.speculation.routine import Routine

BLOCK = "block"  # the source of the guesses in the statistics
_LEAST_ROWS = 4  # of a block whose rows see later ones


@dataclass(frozen=True)
class BlockOptions(DrafterOptions):
    """Options of `block`.

    nodes   guesses that are verified at most: the likeliest of those that the block makes
    rows    rows of a block at most; 0: as many as the head was trained with
    suffix  add what followed the longest suffix of the text earlier, after the root
    window  latest rows of the text that layers without a window of their own see; 0: 2048
    sinks   first rows of the text that these layers see as well
    draft_weights     auto | same | int8 | int4: weights of the head's layers, set when the head is loaded. auto: int4
                      for layers of 4 MiB or more on a CPU, else those of the file
    draft_vocabulary  auto | all | number of tokens that a head can guess which has no output head of its own; as for
                      `tokenswift`
    """

    nodes: int = 8
    rows: int = 0
    suffix: bool = True
    window: int = 0
    sinks: int = USUAL_SINKS
    draft_weights: str = AUTO_WEIGHTS
    draft_vocabulary: VocabularySize = AUTO_VOCABULARY

    def __post_init__(self) -> None:
        check(1 <= self.nodes <= MAX_NODES, "nodes", self.nodes, f"1 to {MAX_NODES}")
        check(self.rows == 0 or self.rows >= 2, "rows", self.rows, "0, or 2 or more")
        check(0 <= self.window <= LATEST, "window", self.window, f"0 to {LATEST}")
        check(0 <= self.sinks <= FIRST, "sinks", self.sinks, f"0 to {FIRST}")
        check_head_weights(self.draft_weights)
        check_draft_vocabulary(self.draft_vocabulary)

    @property
    def head_weights(self) -> str:
        return self.draft_weights


class ContextRows:
    """The keys and values of the text in all layers of a head, for one text.

    cache    of the target, which holds the tapped states of the text
    window   latest rows of the text that layers see which were trained without a window
    sinks    first rows of the text that these see as well
    drafted  gets the states of drafted tokens, in their order; None: there are none
    longest  drafted tokens at most
    """

    def __init__(self, head: BlockHead, cache: FullCache, window: int, sinks: int, drafted: TapLog | None = None,
                 longest: int = 0) -> None:
        layer = head.config.layer
        assert cache.taps is not None and cache.taps.layers == head.taps, "the target's cache holds the head's states"
        self._head, self._taps, self._sinks, self._drafted = head, cache.taps, sinks, drafted
        # Layers with one window share a RowWindow; those that were trained with a window see no sinks.
        sizes = [(min(own, LATEST), 0) if own else (window, sinks) for own in head.config.windows]
        self._groups = {size: [index for index, other in enumerate(sizes) if other == size]
                        for size in dict.fromkeys(sizes)}
        room = head.config.block_size + longest
        self.windows = {size: RowWindow(head.kernels, len(layers), layer.num_kv_heads, layer.head_dim, size[0], room,
                                        size[1]) for size, layers in self._groups.items()}
        self._longest = max(size[0] for size in sizes)
        self._first = next(iter(self.windows.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, and of the states that are not yet read."""
        return sum(rows.nbytes for rows in self.windows.values()) + self._taps.nbytes

    def follow(self, is_wanted: bool) -> None:
        """Whether the target's forwards copy the states."""
        self._taps.follow(is_wanted)

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self._first.end

    def read(self, context: Context, num_drafted: int = 0) -> bool:
        """Read the rows whose states are new: of many, the first and the latest ones that the head can see. Returns
        whether all rows of the text up to its last token were read without a gap at the end.

        num_drafted  drafted tokens after the text. The last token of the text and all of them but the last have states
        """
        if not num_drafted:
            self._drop_drafts()
        first_seen = len(context) - 1 - self._longest
        for run in self._taps.take():
            for part in run.seen(self._sinks, first_seen, READ_CHUNK):
                self._read(part)
        if self.end != len(context) - 1:
            return False
        for run in self._drafted.take() if self._drafted else ():
            start = self.end + self._first.num_drafts
            for rows, k, v in self._context(TappedRows(start, run.states)):
                rows.add_drafts(k, v)
        assert self._first.num_drafts == num_drafted, "a row for the state of each drafted token's predecessor"
        return True

    def _drop_drafts(self) -> None:
        for rows in self.windows.values():
            rows.num_drafts = 0

    def _context(self, run: TappedRows) -> Iterator[tuple[RowWindow, Tensor, Tensor]]:
        """The keys and values of rows for each group of layers."""
        k, v = self._head.context(run.states, range(run.start, run.end))
        for size, layers in self._groups.items():
            yield self.windows[size], k[layers], v[layers]

    def _read(self, run: TappedRows) -> None:
        for rows, k, v in self._context(run):
            if run.start != rows.end:
                rows.restart(run.start)
            rows.add_text(k, v)
            rows.turn_sinks(self._head.rotations)

    @property
    def stores(self) -> list[tuple[KVStore, int]]:
        """The store of each layer, and how many of its rows the text and its drafts have."""
        by_layer: dict[int, tuple[KVStore, int]] = {}
        for size, layers in self._groups.items():
            rows = self.windows[size]
            by_layer |= {layer: (store, rows.length) for layer, store in zip(layers, rows.stores, strict=True)}
        return [by_layer[index] for index in range(len(by_layer))]


class BlockModel:
    """Drafts with a block head. Implements `SlotModel` (longdraft/drafters/layer_drafter.py).

    cache    of the target, which holds the tapped states of the text
    drafted  gets the states of drafted tokens that another model has computed, in their order; None: there are none
    longest  of such tokens at most
    """

    def __init__(self, options: BlockOptions, head: BlockHead, cache: FullCache, sampler: Sampler,
                 drafted: TapLog | None = None, longest: int = 0) -> None:
        self._head, self._sampler = head, sampler
        self._num_rows = min(options.rows or head.config.block_size, head.config.block_size)
        self.rows = ContextRows(head, cache, options.window or USUAL_WINDOW, options.sinks, drafted,
                                longest)
        size = vocabulary_size(options.draft_vocabulary, head.target) if head.target else None
        self._vocabulary = DraftVocabulary(head.target, size) if head.target and size else None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + (self._vocabulary.nbytes if self._vocabulary else 0)

    def learn(self, verified: Verified) -> None:
        if self._vocabulary:
            self._vocabulary.learn(verified)

    def slots(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[list[Slot]]:
        if not self.rows.read(context, len(path) - 1):
            return []
        head, ahead = self._head, len(path) - 1
        count = min(self._num_rows, self._rows_for(max_depth))
        limited = self._vocabulary.model(context) if self._vocabulary else None
        block = DraftBlock(path[-1], len(context) - 1 + ahead, count, self.rows.stores, limited)
        rows = yield from self._guessed(block)
        places = rows.places.at(slice(max_depth))
        if (pairs := head.pairs(rows.part)) is None:
            shortlists = yield from self._sampler.shortlists(places.logits, context, SHORTLIST, rows.part, ahead)
            return [Slot(*shortlist) for shortlist in shortlists]
        scale = self._sampler.params.temperature or 1.0
        paired = yield from self._sampler.paired_shortlists(places, pairs, context, path[-1], SHORTLIST, ahead)
        return [Slot(*shortlist, (table - table[0]) / scale, trust) for shortlist, table, trust in paired]

    def _guessed(self, block: DraftBlock) -> LaunchedWork[SlotRows]:
        """The guesses of a block, which goes through the layers together with the blocks of other texts."""
        work = HostWork(self._head, block, lambda: self._head.launch([block])[0])
        yield work
        rows: SlotRows = work.read()
        return rows

    def _rows_for(self, max_depth: int) -> int:
        """Rows of a block that guesses so many tokens; a power of two where rows see later ones, whose guesses are a
        little worse in a short block."""
        wanted = max_depth + (not self._head.first_guesses)
        return wanted if all(self._head.config.causal) else max(_LEAST_ROWS, 1 << (wanted - 1).bit_length())


class BlockDrafter(SlotDrafter):
    """Drafts with a block head.

    model  with which another drafter of the request drafts too; None: the drafter makes its own
    """

    def __init__(self, options: BlockOptions, head: BlockHead, cache: FullCache, sampler: Sampler,
                 params: SamplingParams, model: BlockModel | None = None) -> None:
        model = model or BlockModel(options, head, cache, sampler)
        super().__init__(model, BLOCK, options.nodes, options.suffix, params)
        self.rows, self.follow = model.rows, model.rows.follow
