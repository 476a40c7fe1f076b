"""A head of some tokens of a vocabulary, made of the rows of a whole head (longdraft/drafters/draft_vocabulary.py)."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.interface import Kernels
from longdraft.kernels.weights import Linear

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu


class PartOfVocabulary:
    """Some tokens of a vocabulary, and a head that gives logits of these alone.

    ids   [N] int64, ascending
    head  the rows of a model's head for these tokens: [N, hidden], packed
    """

    def __init__(self, kernels: CpuKernels, head: CpuLinear, ids: Tensor) -> None:
        """The rows `ids` of a whole head. They are copied."""
        tokens = ids.tolist()
        self.ids = ids
        self._size = head.out_features
        self.head = CpuLinear(kernels.native.take_rows(head.native, tokens))
        self.native = _cpu.PartOfVocabulary(tokens, self._size)

    @property
    def nbytes(self) -> int:
        return self.head.nbytes + self.ids.nbytes + self._size * 4  # the index of each token

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [R, N] of these tokens in a row of the whole vocabulary [R, V]: -inf elsewhere."""
        row = logits.new_full((len(logits), self._size), -torch.inf)
        row[:, self.ids] = logits
        return row


def can_part(kernels: Kernels, head: Linear) -> bool:
    """Whether `part_of_vocabulary` can take rows of this head."""
    return isinstance(kernels, CpuKernels) and isinstance(head, CpuLinear) and not head.native.is_grouped


def part_of_vocabulary(kernels: Kernels, head: Linear, ids: Tensor) -> PartOfVocabulary:
    """The tokens `ids` [N] int64, ascending, of a head's vocabulary."""
    assert isinstance(kernels, CpuKernels) and isinstance(head, CpuLinear)
    return PartOfVocabulary(kernels, head, ids)
