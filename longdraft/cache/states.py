"""The states of the delta layers of one text, beside its KV cache (longdraft/kernels/delta.py).

    current   the states behind the committed rows
    spare     a forward writes the states behind its last row here; a commit that ends with that row swaps the two

A commit of other rows applies the rule to the inputs of these rows again, from `current`, which no forward changes. So
there is one state for each layer and not one for each row, and the rejected rows of a draft cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longdraft.kernels import Kernels
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights


class StateCache:
    """The states of one text, in the order of the layers."""

    def __init__(self, kernels: Kernels, layers: Sequence[DeltaWeights], source: StateCache | None = None) -> None:
        """source: the states of the text, behind which these are states of drafts until `reset`; None: a text's own."""
        self._kernels, self._layers, self._source = kernels, layers, source
        self._own: list[DeltaState] = [] if source else self._new()
        self._spare: list[DeltaState] = []
        self._is_behind_source = source is not None
        self._tail: list[DeltaRows] = []

    def _new(self) -> list[DeltaState]:
        return [self._kernels.new_state(weights) for weights in self._layers]

    @property
    def current(self) -> list[DeltaState]:
        """The states behind the committed rows. Valid until the next commit; not to be changed."""
        return self._source.current if self._source and self._is_behind_source else self._own

    def for_drafts(self) -> StateCache:
        """States of drafts behind this text."""
        return StateCache(self._kernels, self._layers, self)

    def append(self, count: int) -> Sequence[DeltaRows]:
        """`count` provisional rows in each layer, for a forward to fill."""
        if not self._spare:
            self._spare = self._new()
        device, dtype = self._kernels.device, self._kernels.dtype
        self._tail = [
            DeltaRows(before, after, torch.empty(count, weights.shape.channels, dtype=dtype, device=device),
                      torch.empty(count, 2 * weights.shape.value_heads, device=device))
            for before, after, weights in zip(self.current, self._spare, self._layers, strict=True)]
        return self._tail

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these provisional rows, a path from the first one on; drop the others."""
        if rows:
            assert self._tail, "commit without a forward"
            if rows[-1] + 1 < len(self._tail[0].mixed):
                self._apply_again(list(rows))
            self._own, self._spare = self._spare, self._own
            self._is_behind_source = False
        self._tail = []

    def _apply_again(self, path: list[int]) -> None:
        """Fill the spare states with those behind `path`."""
        chain = torch.arange(-1, len(path) - 1, dtype=torch.int32)
        for weights, rows in zip(self._layers, self._tail, strict=True):
            chosen = rows._replace(mixed=rows.mixed[path], gates=rows.gates[path])
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
        self._is_behind_source = self._is_behind_source and not count

    def reset(self) -> None:
        """Forget all rows: of drafts, go back to the text; of a text, to its beginning."""
        self._tail = []
        if self._source:
            self._is_behind_source = True
        else:
            for state in self._own:
                state.history.zero_()
                state.matrix.zero_()

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in (*self._own, *self._spare))
