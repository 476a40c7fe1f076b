"""The part of each weight that a rank holds (Megatron-LM, Shoeybi et al. 2019).

    qkv, gate and up     rows: whole heads, a share of the inner width           no message
    out, down            columns of those heads and of that width                a sum over ranks
    embedding, head      rows: a share of the vocabulary                         a sum; a concatenation
    norms                whole, on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Pick = Callable[[Tensor], Tensor]


class Shard(NamedTuple):
    """A rank, counted from 0, and the number of ranks."""

    rank: int = 0
    size: int = 1

    def rows(self, segments: Sequence[int]) -> Pick | None:
        """A function that returns this rank's rows of each segment; None: all rows. segments: their numbers of rows."""
        if self.size == 1:
            return None

        def pick(whole: Tensor) -> Tensor:
            shares = [segment.chunk(self.size)[self.rank] for segment in torch.split(whole, list(segments))]
            return shares[0] if len(shares) == 1 else torch.cat(shares)

        return pick

    def columns(self) -> Pick | None:
        """A function that returns this rank's share of the columns; None: the whole tensor."""
        return None if self.size == 1 else lambda whole: whole.chunk(self.size, 1)[self.rank]

    def vocabulary(self, size: int) -> slice:
        """The token ids whose rows this rank holds. All hold equally many, but the last ones may hold fewer."""
        each = -(-size // self.size)
        return slice(min(size, self.rank * each), min(size, (self.rank + 1) * each))


WHOLE = Shard()
