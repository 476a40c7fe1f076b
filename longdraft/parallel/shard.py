"""Which part of each weight a rank has (Megatron-LM, Shoeybi et al. 2019).

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
    """A rank's place among the ranks."""

    rank: int = 0
    size: int = 1

    def rows(self, segments: Sequence[int]) -> Pick | None:
        """Picks this rank's share of each segment of rows of a tensor; None: the whole tensor."""
        if self.size == 1:
            return None

        def pick(whole: Tensor) -> Tensor:
            shares = [segment.chunk(self.size)[self.rank] for segment in torch.split(whole, list(segments))]
            return shares[0] if len(shares) == 1 else torch.cat(shares)

        return pick

    def columns(self) -> Pick | None:
        """Picks this rank's share of the columns of a tensor; None: the whole tensor."""
        return None if self.size == 1 else lambda whole: whole.chunk(self.size, 1)[self.rank]

    def vocabulary(self, size: int) -> slice:
        """The token ids whose rows this rank has. All ranks have equally many; the last ones may have fewer."""
        each = -(-size // self.size)
        return slice(min(size, self.rank * each), min(size, (self.rank + 1) * each))


WHOLE = Shard()
