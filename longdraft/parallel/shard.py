"""Which part of a weight is whose: rows of what a rank computes by itself, columns of what ranks add up.

    qkv, gate and up     rows: whole heads, a share of the inner width           no message
    out, down            columns: of those heads, of that width                  a sum over ranks
    embedding, head      rows: a share of the vocabulary                         a sum; parts put together
    norms                everybody has them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Pick = Callable[[Tensor], Tensor]


class Shard(NamedTuple):
    """A rank's place among the ranks."""

    rank: int = 0
    size: int = 1

    def rows(self, segments: Sequence[int]) -> Pick | None:
        """This rank's share of each of the segments of rows that a tensor consists of; None: all of it."""
        if self.size == 1:
            return None

        def pick(whole: Tensor) -> Tensor:
            shares = [segment.chunk(self.size)[self.rank] for segment in torch.split(whole, list(segments))]
            return shares[0] if len(shares) == 1 else torch.cat(shares)

        return pick

    def columns(self) -> Pick | None:
        return None if self.size == 1 else lambda whole: whole.chunk(self.size, 1)[self.rank]

    def vocabulary(self, size: int) -> slice:
        """Token ids that this rank has the rows of: as many for each, but the last, which may have fewer."""
        each = -(-size // self.size)
        return slice(min(size, self.rank * each), min(size, (self.rank + 1) * each))


WHOLE = Shard()
