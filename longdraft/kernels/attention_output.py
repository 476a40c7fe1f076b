"""What attention computed for some rows, and the choice of some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class AttentionOutput(NamedTuple):
    """The attention of some rows in one layer, or in several layers with a first axis L.

    Where layers differ in D, the axis has the largest number, and a layer uses its beginning (`layers`).

    queries, output  [T, H, D] in the model's dtype
    lse              [T, H] float32: log-sum-exp of the scores
    content          [T, H, D]: the queries after their norm and before their rotation. `Kernels.attention` does not
                     rotate, and returns its queries here too
    """

    queries: Tensor
    output: Tensor
    lse: Tensor
    content: Tensor

    def layers(self, which: Sequence[int], dim: int) -> AttentionOutput:
        """Some of several layers, all of dimension `dim`."""
        q, output, content = (part[list(which), ..., :dim] for part in (self.queries, self.output, self.content))
        return AttentionOutput(q, output, self.lse[list(which)], content)

    def cut(self, rows: list[int] | slice) -> AttentionOutput:
        """Some rows, of several layers; views if they are a slice."""
        return AttentionOutput(self.queries[:, rows], self.output[:, rows], self.lse[:, rows], self.content[:, rows])


class AttentionRows(NamedTuple):
    """Some rows of `output`, the attention of several layers. They are gathered where they are read.

    rows  their indices; negative ones count from the end
    """

    output: AttentionOutput
    rows: Sequence[int]

    @classmethod
    def all(cls, output: AttentionOutput) -> AttentionRows:
        """All rows of an output."""
        return cls(output, range(output.lse.shape[1]))

    def last(self, count: int) -> AttentionRows:
        return AttentionRows(self.output, self.rows[-count:])

    def layers(self, which: Sequence[int], dim: int) -> AttentionRows:
        """See `AttentionOutput.layers`."""
        return AttentionRows(self.output.layers(which, dim), self.rows)

    def gathered(self) -> AttentionOutput:
        """The rows; views if they follow one another, as those of a chain do."""
        run = range(self.rows[0], self.rows[0] + len(self.rows))
        follow = list(self.rows) == list(run)
        return self.output.cut(slice(run.start, run.stop or None) if follow else list(self.rows))
