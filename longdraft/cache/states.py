"""The states of the delta layers of one text, beside its KV cache (longdraft/kernels/delta.py).

    current   the states after the committed rows
    spare     a forward writes the states after its last row here; a commit that ends with that row swaps the two

A commit of other rows applies the rule to the inputs of these rows again, from `current`, which no forward changes. So
there is one state for each layer and not one for each row, and the rejected rows of a draft cost nothing.

Another text with the same beginning can continue from a state, but only at the position where it was kept. A text that
gives its rows to others keeps copies 16 rows before position 512, 1,024, 2,048 and every multiple of 4,096, 16 rows
before the end of its prompt, and at its end. A copy takes as many bytes as the KV rows of 1,000 to 4,000 tokens.

A text that may be cut back (`hold`) keeps an older state, and the inputs of the rows after it that are not settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import Kernels
from longdraft.kernels.delta import AppliesPaths, DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.interface import STORE_BLOCK

KEPT_BEFORE = 16  # rows between a kept state and the end of a block, which a text that continues there computes again
_SETTLED_ROWS = 64  # rows whose inputs are held although they are settled
_FIRST_ENDS = (512, 1024, 2048)  # blocks are STORE_BLOCK rows, but many texts share a short beginning


def kept_positions(first: int, last: int, prompt_rows: int, chunk: int | None) -> Iterator[int]:
    """The positions in (first, last] at which a text keeps its states.

    prompt_rows  rows of the prompt
    chunk        texts continue after whole chunks of so many rows of the prompt alone, as on a device: the states after
                 the first one, the last one and each block are kept; None: they continue anywhere
    """
    if chunk:
        blocks = range(STORE_BLOCK, min(last, prompt_rows) + 1, STORE_BLOCK)
        ends = {chunk, prompt_rows // chunk * chunk, *blocks}
        yield from sorted(end for end in ends if max(first, 0) < end <= min(last, prompt_rows))
        return
    blocks = range(max(1, (first + KEPT_BEFORE) // STORE_BLOCK) * STORE_BLOCK, last + KEPT_BEFORE + 1, STORE_BLOCK)
    for end in sorted({*_FIRST_ENDS, *blocks, prompt_rows}):
        if max(first, 0) < end - KEPT_BEFORE <= last:
            yield end - KEPT_BEFORE


Inputs = list[tuple[Tensor, Tensor]]  # of some rows, for each layer: mixed [T, C] and gates [T, 2 Hv]


class _Held(NamedTuple):
    """States after `length` rows of the text, and the inputs of the rows that were committed since then."""

    length: int
    states: list[DeltaState]
    commits: list[Inputs]


def _rows(commits: Sequence[Inputs]) -> int:
    return sum(len(layers[0][0]) for layers in commits)


class StateCache:
    """The states of one text, in the order of the layers."""

    def __init__(self, kernels: Kernels, layers: Sequence[DeltaWeights], source: StateCache | None = None) -> None:
        """source: the states of the text, after which these are states of drafts until `reset`; None: a text's own."""
        self._kernels, self._layers, self._source = kernels, layers, source
        self._path_kernels = kernels if isinstance(kernels, AppliesPaths) else None
        self._own: list[DeltaState] = [] if source else self._new()
        self._spare: list[DeltaState] = []
        self._follows_source = source is not None
        self._tail: list[DeltaRows] = []
        self.length = 0  # committed rows; not counted for drafts
        self._prompt_rows: int | None = None
        self._chunk: int | None = None
        self.kept: dict[int, list[DeltaState]] = {}  # by position; never changed
        self._hold_from: int | None = None
        self._held: _Held | None = None

    def _new(self) -> list[DeltaState]:
        return [self._kernels.new_state(weights) for weights in self._layers]

    def _copies(self, states: Sequence[DeltaState]) -> list[DeltaState]:
        copies = self._new()
        for copy, state in zip(copies, states, strict=True):
            copy.copy_from(state)
        return copies

    @property
    def current(self) -> list[DeltaState]:
        """The states after the committed rows. Valid until the next commit; not to be changed."""
        return self._source.current if self._source and self._follows_source else self._own

    def for_drafts(self) -> StateCache:
        """States of drafts after this text."""
        return StateCache(self._kernels, self._layers, self)

    def append(self, count: int) -> Sequence[DeltaRows]:
        """`count` provisional rows in each layer, for a forward to fill."""
        if not self._spare:
            self._spare = self._new()
        shapes = [weights.shape for weights in self._layers]
        mixed = _rows_of_layers([shape.channels for shape in shapes], count, self._kernels.dtype, self._kernels.device)
        gates = _rows_of_layers([2 * shape.value_heads for shape in shapes], count, torch.float32, self._kernels.device)
        self._tail = [DeltaRows(*parts) for parts in zip(self.current, self._spare, mixed, gates, strict=True)]
        return self._tail

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these provisional rows, a path from the first one on; drop all other provisional rows."""
        if rows:
            assert self._tail, "commit without a forward"
            if self._prompt_rows is not None:
                for position in kept_positions(self.length, self.length + len(rows), self._prompt_rows, self._chunk):
                    self.kept[position] = self._states_after(list(rows[: position - self.length]))
            self.length += len(rows)
            if self._held:
                self._held.commits.append([(each.mixed[list(rows)], each.gates[list(rows)]) for each in self._tail])
            if rows[-1] + 1 < len(self._tail[0].mixed):
                self._apply_again(list(rows), self._spare)
            self._own, self._spare = self._spare, self._own
            self._follows_source = False
            if self.length == self._hold_from:
                self._hold()
        self._tail = []

    def _states_after(self, rows: list[int]) -> list[DeltaState]:
        """New states after these of the provisional rows."""
        if len(rows) == len(self._tail[0].mixed):
            return self._copies(self._spare)
        states = self._new()
        self._apply_again(rows, states)
        return states

    def keep(self, prompt_rows: int, chunk: int | None = None) -> None:
        """Keep states for other texts from now on (`kept`). prompt_rows: the rows that this text begins with.

        chunk  see `kept_positions`
        """
        self._prompt_rows, self._chunk = prompt_rows, chunk

    def hold(self, length: int) -> None:
        """From this number of committed rows on, the text may be cut back: `truncate`."""
        self._hold_from = length
        if self.length == length:
            self._hold()

    def _hold(self) -> None:
        self._held = _Held(self.length, self._copies(self.current), [])

    def settle(self, length: int) -> None:
        """The text will not be cut below `length` rows, so older inputs are dropped now and then."""
        if self._held and length - self._held.length >= _SETTLED_ROWS:
            count, commits = 0, self._held.commits
            while self._held.length + _rows(commits[: count + 1]) <= length and count < len(commits):
                count += 1
            states = self._new()
            self._apply_to(self._held.states, commits[:count], states)
            self._held = _Held(self._held.length + _rows(commits[:count]), states, commits[count:])

    def truncate(self, length: int) -> None:
        """Drop the rows from position `length` on, which is at least what was settled."""
        if length == self.length:
            return
        assert self._held and length >= self._held.length, "states cannot go back so far"
        commits, left = [], length - self._held.length
        for layers in self._held.commits:
            if left > 0:
                commits.append([(mixed[:left], gates[:left]) for mixed, gates in layers])
                left -= _rows(commits[-1:])
        self._held = self._held._replace(commits=commits)
        self._apply_to(self._held.states, commits, self._own)
        self.kept = {position: states for position, states in self.kept.items() if position <= length}
        self.length = length

    def _apply_to(self, before: Sequence[DeltaState], commits: Sequence[Inputs], after: Sequence[DeltaState]) -> None:
        """Fill `after` with the states after these rows."""
        chain = torch.arange(-1, _rows(commits) - 1, dtype=torch.int32)
        for layer, weights in enumerate(self._layers):
            if not commits:
                after[layer].copy_from(before[layer])
                continue
            mixed, gates = (torch.cat([layers[layer][part] for layers in commits]) for part in (0, 1))
            self._kernels.delta_rule(weights, [DeltaRows(before[layer], after[layer], mixed, gates)], None, chain)

    def keep_now(self) -> None:
        """Keep the states after the committed rows."""
        if self.length not in self.kept:
            self.kept[self.length] = self._copies(self.current)

    def adopt(self, kept: Mapping[int, list[DeltaState]]) -> None:
        """Continue from the last of these states, of a text with the same tokens up to there. They are shared."""
        self.length = max(kept)
        self.kept |= kept
        for own, state in zip(self._own, kept[self.length], strict=True):
            own.copy_from(state)

    def _apply_again(self, path: list[int], states: Sequence[DeltaState]) -> None:
        """Fill `states` with those after `path`."""
        if self._path_kernels and self._path_kernels.states_after(self._layers, self._tail, path, states):
            return
        chain = torch.arange(-1, len(path) - 1, dtype=torch.int32)
        for weights, rows, after in zip(self._layers, self._tail, states, strict=True):
            chosen = rows._replace(after=after, mixed=rows.mixed[path], gates=rows.gates[path])
            self._kernels.delta_rule(weights, [chosen], None, chain)

    @property
    def chain_states(self) -> list[tuple[DeltaState, DeltaState, DeltaState]]:
        """For a chain that the compiled module drafts: the states that it continues, and two that its rows write to in
        turn. Call `advance` afterwards."""
        if not self._spare:
            self._spare = self._new()
        if not self._own:
            self._own = self._new()
        return list(zip(self.current, self._spare, self._own, strict=True))

    def advance(self, count: int) -> None:
        """Keep `count` rows of such a chain, all that it has."""
        if count % 2:
            self._own, self._spare = self._spare, self._own
        self._follows_source = self._follows_source and not count

    def reset(self) -> None:
        """Forget all rows: of drafts, go back to the text; of a text, to its beginning."""
        self._tail = []
        self.length = 0
        self._held = None
        self.kept = {}
        if self._source:
            self._follows_source = True
        else:
            for state in self._own:
                state.history.zero_()
                state.matrix.zero_()

    @property
    def nbytes(self) -> int:
        others = [*self.kept.values(), self._held.states if self._held else []]
        return sum(map(states_bytes, (self._own, self._spare, *others)))


def _rows_of_layers(widths: Sequence[int], count: int, dtype: torch.dtype, device: torch.device) -> Sequence[Tensor]:
    """A tensor [count, width] for each layer. Where all have one width they are parts of one tensor, which a device
    copies at once."""
    if len(set(widths)) == 1:
        return torch.empty(len(widths), count, widths[0], dtype=dtype, device=device).unbind()
    return [torch.empty(count, width, dtype=dtype, device=device) for width in widths]


def states_bytes(states: Sequence[DeltaState]) -> int:
    return sum(state.nbytes for state in states)
