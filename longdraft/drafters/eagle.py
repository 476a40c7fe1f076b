"""The drafter `eagle`: trained layers that read the target's own states. They draft a chain (EAGLE-3, -2 and -1) or a
tree of guesses that are made in one pass (P-EAGLE).

longdraft/parts/eagle.py has the head. The states of every row of the text come from the target's cache
(longdraft/cache/taps.py). The rows that the head computes for its own drafts, or for masks, are dropped after each
step: when tokens became text, their true states replace them.

Public heads were trained on 2,000 to 4,000 tokens, and their guesses become useless at 16,000. So the head sees a
window of the text, and all distances stay in the range that it was trained with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.cache.taps import FIRST, LATEST, TapLog, TappedRows
from longdraft.cache.window import RowWindow
from longdraft.drafters.layer_drafter import ChainDrafter, SlotDrafter, rotations_after
from longdraft.drafters.marginal_tree import MAX_NODES, SHORTLIST, Slot
from longdraft.drafters.options import ChainOptions
from longdraft.errors import check
from longdraft.kernels.chain_plan import (
    MOST_UNREAD,
    ChainPlan,
    DraftStores,
    Move,
    Ranked,
    TrainedLayers,
    UnreadRows,
)
from longdraft.parts.draft_copy import AUTO_WEIGHTS, check_head_weights
from longdraft.parts.eagle import Eagle
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import common_prefix
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.drafter import Verified
from longdraft.speculation.routine import Routine, atomic

EAGLE = "eagle"  # the source of the guesses in the statistics
READ_CHUNK = 256  # rows of text read in one forward
USUAL_WINDOW = 2048  # of a head that was trained without one
USUAL_SINKS = 4


@dataclass(frozen=True)
class EagleOptions(ChainOptions):
    """Options of `eagle`. With a head of P-EAGLE `chain` is the number of places that one pass guesses; the likeliest
    guesses are verified, up to `chain` * `width`, and `margin` has no meaning.

    window  latest rows of the text that the head sees; 0: those that it was trained with, or 2048
    sinks   first rows of the text that it sees as well; -1: 4, or none for a head that was trained with a window
    draft_weights  auto | same | int8 | int4: weights of the head's layers, set when the head is loaded; its output head
                   has 8 bits then. auto: int4 for layers of 4 MiB or more on a CPU, else those of the file
    """

    chain: int = 5
    window: int = 0
    sinks: int = -1
    draft_weights: str = AUTO_WEIGHTS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_weights(self.draft_weights)
        check(0 <= self.window <= LATEST, "window", self.window, f"0 to {LATEST}")
        check(-1 <= self.sinks <= FIRST, "sinks", self.sinks, f"-1 to {FIRST}")

    @property
    def head_weights(self) -> str:
        return self.draft_weights


class EagleDraftModel:
    """Reads the text and drafts with a head. Implements `DraftModel` (longdraft/drafters/chain.py).

    cache    of the target, which holds the tapped states of the text
    window   latest rows of the text that the head sees
    sinks    first rows of the text that it sees as well
    longest  tokens drafted in a step at most
    drafted  gets the states of drafted tokens that another model has computed, in their order; None: there are none
    """

    def __init__(self, head: Eagle, cache: FullCache, window: int, sinks: int, longest: int,
                 drafted: TapLog | None = None) -> None:
        layer = head.config.layer
        assert cache.taps is not None and cache.taps.layers == head.taps, "the target's cache holds the head's states"
        self._head, self._taps, self._window, self._sinks, self._drafted = head, cache.taps, window, sinks, drafted
        self.rows = RowWindow(head.kernels, layer.num_layers, layer.num_kv_heads, layer.head_dim, window, longest,
                              sinks)
        self._unread: TappedRows | None = None  # the next chain may read them; the window has their room
        self._moves: list[Move] = []  # of rows, before they are read
        self._drafts: list[int] = []  # tokens of the drafts in `rows`
        self._num_known = 0  # of the drafts, the first ones, whose rows come from states
        self._outputs: list[Tensor] = []  # [1, hidden] of the text's last row and of each draft

    @property
    def vocabulary(self) -> int:
        return self._head.vocabulary

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, and of the states that are not yet read."""
        return self.rows.nbytes + self._taps.nbytes

    @atomic
    def next_logits(self, context: Context, path: Sequence[int]) -> Tensor | None:
        """Logits [1, V] after `path`: the root, which is the text's last token, then drafted tokens."""
        self._read_text(context)
        if not self._outputs:
            return None
        self._read_drafted(path)
        wanted = path[1:]
        common = common_prefix(wanted, self._drafts)
        self._forget_drafts(common)
        for token in wanted[common:]:
            self._forward(self._head.fed_back(self._outputs[-1]), [token], self.rows.end + self.rows.num_drafts)
            self._drafts.append(token)
        return self._head.logits(self._outputs[-1])

    def plan(self, context: Context, path: Sequence[int], length: int) -> ChainPlan | None:
        """See `DraftModel`. Only after the text itself, and after drafted tokens with states."""
        if not self._head.shares_kernels:
            return None
        rows, unread = self.rows, self._unread_rows(context)
        if unread is None:
            self._read_text(context)
        if not self._outputs:
            return None
        self._read_drafted(path)
        ahead = len(path) - 1
        if self._num_known < ahead:
            return None
        self._forget_drafts(ahead)
        layers = TrainedLayers(self._head, self._head.kernels, self._outputs[ahead], unread=unread)
        end = len(context) - 1
        return ChainPlan(layers, path, length, DraftStores(rows.stores, rows.length + end - rows.end),
                         rotations_after(self._head.rotations, end + ahead, length))

    def has_drafted(self, context: Context, path: Sequence[int], drafted: Sequence[Ranked]) -> None:
        """The rows of the drafts are forgotten: the next step computes them from the target's states."""
        self.rows.add_read(len(context) - 1 - self.rows.end)
        self._unread = None

    def _unread_rows(self, context: Context) -> UnreadRows | None:
        """The new rows of the text, if the chain may read them: they are few and follow those that are read."""
        rows, taken = self.rows, self._taps.take()
        if taken and self._unread:
            self._read_unread(context)
        if taken:
            count = taken[0].states.shape[1]
            is_next = len(taken) == 1 and taken[0].start == rows.end and taken[0].end == len(context) - 1
            if not (is_next and rows.has_sinks and count <= min(MOST_UNREAD, self._window)):
                self._read_runs(context, taken)
                return None
            self._forget_drafts(0)
            self._unread, self._moves = taken[0], rows.room_for(count)
            if not self._head.kernels.is_device:
                rows.move(self._moves)
                rows.turn_sinks(self._head.rotations)
                self._moves = []
            self._outputs = [taken[0].states.new_empty(1, self._head.width)]
        if self._unread is None or self.rows.end + self._unread.states.shape[1] != len(context) - 1:
            return None
        rotations = self._head.rotations
        unread = UnreadRows(self._tokens_after(context, self._unread), self._unread.states,
                            rotations(range(rows.end, len(context) - 1), on_host=True))
        if not self._head.kernels.is_device:
            return unread
        return unread._replace(moves=[*rows.sink_moves, *self._moves],
                               turn=rotations([rows.sinks_shift], on_host=True))

    def slot_rows(self, context: Context, path: Sequence[int], count: int) -> Tensor | None:
        """The layers' output [count, hidden] for the last token of `path` and count - 1 masks after it, for a head that
        guesses in one pass: new rows go through the layers together with the masks. None: as for `next_logits`.

        path  the last token of the text, then drafted tokens with states
        """
        ahead = len(path) - 1
        self._forget_drafts(min(ahead, self._num_known))
        self._read_runs(context, self._taps.take(), 0 if ahead else count - 1)
        if not self._outputs:
            return None
        self._read_drafted(path, count - 1)
        if len(self._outputs) < ahead + count:  # nothing was new
            self._forward(*self._head.masks(ahead + count - len(self._outputs)), self.rows.end + self.rows.num_drafts)
        return torch.cat(self._outputs[ahead:])

    def _forget_drafts(self, kept: int) -> None:
        """Keep the first `kept` drafts and drop the others."""
        self.rows.num_drafts = kept
        del self._drafts[kept:], self._outputs[kept + 1 :]
        self._num_known = min(self._num_known, kept)

    def _read_drafted(self, path: Sequence[int], num_masks: int = 0) -> None:
        """Compute the rows of drafted tokens from the states that have come, followed by masks."""
        for run in self._drafted.take() if self._drafted else ():
            known, count = self._num_known, run.states.shape[1]
            self._forget_drafts(known)
            tokens = list(path[1 + known : 1 + known + count])
            y, of_masks = self._with_masks(self._head.fuse(run.states), num_masks)
            self._forward(y, tokens + of_masks, self.rows.end + known)
            self._drafts += tokens
            self._num_known += count

    def _with_masks(self, y: Tensor, num_masks: int) -> tuple[Tensor, list[int]]:
        """The rows y followed by those of masks, and the tokens of these."""
        if not num_masks:
            return y, []
        masks, tokens = self._head.masks(num_masks)
        return torch.cat([y, masks]), tokens

    def _read_text(self, context: Context) -> None:
        """Read the rows whose states are new: of many, the first and the latest ones that the head can see."""
        if self._unread:
            self._read_unread(context)
        self._read_runs(context, self._taps.take())

    def _read_runs(self, context: Context, runs: Sequence[TappedRows], num_masks: int = 0) -> None:
        """num_masks: of rows after the text's last row, in the forward that reads it"""
        if runs:
            self._forget_drafts(0)
        first_seen, chunk = len(context) - 1 - self._window, min(READ_CHUNK, self._window)
        for run in runs:
            for part in run.seen(self._sinks, first_seen, chunk):
                self._read(context, part, num_masks)
        if self.rows.end != len(context) - 1:  # the state of the text's last row is not known
            self._outputs = []

    def _read_unread(self, context: Context) -> None:
        """Read the rows that no chain has read."""
        assert self._unread is not None
        run, self._unread = self._unread, None
        self.rows.move(self._moves)
        self._read(context, run)

    def _read(self, context: Context, run: TappedRows, num_masks: int = 0) -> None:
        count = run.end - run.start
        if run.start != self.rows.end:
            self.rows.restart(run.start)
        self.rows.make_room(count)
        self.rows.turn_sinks(self._head.rotations)
        self._outputs = []
        is_last = run.end == len(context) - 1
        y, of_masks = self._with_masks(self._head.fuse(run.states), num_masks if is_last else 0)
        self._forward(y, self._tokens_after(context, run) + of_masks, run.start, count)

    @staticmethod
    def _tokens_after(context: Context, run: TappedRows) -> list[int]:
        tokens: list[int] = context.slice(run.start + 1, run.end + 1).tolist()
        return tokens

    def _forward(self, y: Tensor, tokens: Sequence[int], start: int, num_text: int = 0) -> None:
        """Run rows of which the first `num_text` are the text's and the others drafts or masks. The outputs of these,
        and of the last one of the text, are kept."""
        rows, positions = self.rows, range(start, start + len(tokens))
        parents = torch.arange(-1, len(tokens) - 1, dtype=torch.int32)
        hidden, k, v = self._head.forward(y, tokens, positions, rows.stores, rows.length, parents)
        if num_text:
            rows.add_text(k[:, :num_text], v[:, :num_text])
        if num_text < len(tokens):
            rows.add_drafts(k[:, num_text:], v[:, num_text:])
        self._outputs += hidden[max(0, num_text - 1) :, None].unbind()

    @staticmethod
    def of(options: EagleOptions, head: Eagle, cache: FullCache, drafted: TapLog | None = None,
           longest: int = 0) -> EagleDraftModel:
        """The model with the window that the options ask for, or that the head was trained with.

        longest  tokens drafted in a step at most; 0: the chain of the options
        """
        trained = head.config.window
        window = options.window or min(trained or USUAL_WINDOW, LATEST)
        sinks = options.sinks if options.sinks >= 0 else 0 if trained else USUAL_SINKS
        return EagleDraftModel(head, cache, window, sinks, longest or options.chain, drafted)

    def follow(self, is_wanted: bool) -> None:
        """Whether the target's forwards copy the states."""
        self._taps.follow(is_wanted)


class EagleDrafter(ChainDrafter):
    """Drafts a chain with a head.

    model  with which another drafter of the request drafts too; None: the drafter makes its own
    """

    def __init__(self, options: EagleOptions, head: Eagle, cache: FullCache, sampler: Sampler, params: SamplingParams,
                 model: EagleDraftModel | None = None) -> None:
        model = model or EagleDraftModel.of(options, head, cache)
        super().__init__(model, EAGLE, options, sampler, params)
        self.follow = model.follow


class ParallelEagleModel:
    """Drafts with a head that guesses all places in one pass (P-EAGLE). Implements `SlotModel`."""

    def __init__(self, rows: EagleDraftModel, head: Eagle, sampler: Sampler, longest: int) -> None:
        self._rows, self._head, self._sampler, self._longest = rows, head, sampler, longest

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def learn(self, verified: Verified) -> None:
        """Nothing: the target's cache has the states."""

    def slots(self, context: Context, path: Sequence[int], max_depth: int) -> Routine[list[Slot]]:
        rows = self._rows.slot_rows(context, path, min(self._longest, max_depth))
        if rows is None:
            return []
        logits, part = self._head.guesses(rows)
        shortlists = yield from self._sampler.shortlists(logits, context, SHORTLIST, part, len(path) - 1)
        return [Slot(*shortlist) for shortlist in shortlists]


class ParallelEagleDrafter(SlotDrafter):
    """Drafts a tree with a head that guesses all places in one pass.

    rows  as the model of `EagleDrafter`
    """

    def __init__(self, options: EagleOptions, head: Eagle, cache: FullCache, sampler: Sampler, params: SamplingParams,
                 rows: EagleDraftModel | None = None) -> None:
        rows = rows or EagleDraftModel.of(options, head, cache)
        model = ParallelEagleModel(rows, head, sampler, options.chain)
        super().__init__(model, EAGLE, min(options.chain * options.width, MAX_NODES), options.suffix, params)
        self.follow = rows.follow
