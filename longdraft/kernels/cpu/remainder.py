"""The fit of a partial cache's remainder in one call of the compiled module (csrc/partial_cache.h, csrc/fit.h).

The exact remainders of new rows, the sums over them and the solution for all layers and heads. The PyTorch code in
longdraft/cache/remainder.py computes the same up to rounding, in some fifty operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionRows
from longdraft.kernels.cpu.store import CpuStore, evenly_strided, native_stores
from longdraft.kernels.interface import FitRules, KVStore

with suppress(ImportError):
    from longdraft.kernels.cpu import _cpu


class CompiledRemainder:
    """See `RemainderFit`."""

    def __init__(self, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> None:
        first = stores[0]
        assert isinstance(first, CpuStore)
        self._kernels, self._dtype = first.kernels, first.dtype
        n = first.shape[1] + 1
        self._maps = torch.zeros(len(stores), num_heads, n, n)
        self._fit = _cpu.RemainderFit(len(stores) * num_heads, n, *rules)

    @property
    def nbytes(self) -> int:
        return self._maps.nbytes + self._fit.nbytes

    def update(self, stores: Sequence[KVStore], length: int, whole: AttentionRows) -> Tensor:
        q, output, lse, content = evenly_strided(whole.gathered())
        self._kernels.learn_remainder(native_stores(self._dtype, stores, len(stores)), length, q, output, lse, content,
                                      self._fit, self._maps)
        return self._maps
