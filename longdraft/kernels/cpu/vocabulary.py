"""A part of a vocabulary, and the rows of a head for it (longdraft/drafters/draft_vocabulary.py)."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.cpu import native
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.interface import Kernels
from longdraft.kernels.weights import Linear

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu


class PartOfVocabulary:
    """Some tokens of a vocabulary, of which a drafter has logits.

    ids   [N] int64, ascending
    size  number of tokens of the vocabulary
    """

    def __init__(self, ids: Tensor, size: int) -> None:
        self.ids, self.size = ids, size
        self.native = None if native.IMPORT_ERROR else _cpu.PartOfVocabulary(ids.tolist(), size)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.size * 4  # the index of each token

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [R, N] of these tokens in rows of the whole vocabulary [R, V]: -inf elsewhere."""
        rows = logits.new_full((len(logits), self.size), -torch.inf)
        rows[:, self.ids] = logits
        return rows


def can_take_rows(kernels: Kernels, head: Linear) -> bool:
    """Whether `rows_of_head` can take rows of this head."""
    return isinstance(kernels, CpuKernels) and isinstance(head, CpuLinear)


def rows_of_head(kernels: Kernels, head: Linear, part: PartOfVocabulary) -> Linear:
    """A copy of a whole head's rows for these tokens: [N, hidden], packed."""
    assert isinstance(kernels, CpuKernels) and isinstance(head, CpuLinear)
    return CpuLinear(kernels.native.take_rows(head.native, part.ids.tolist()))
