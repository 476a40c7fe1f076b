"""The remainder of a partial cache in one call of the compiled module (csrc/partial_cache.h, csrc/fit.h).

The exact remainders of new rows, the sums over them and the solution for all layers and heads. The PyTorch code in
longdraft/cache/remainder.py computes the same up to rounding, in some fifty operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionRows
from longdraft.kernels.cpu.store import CpuStore, evenly_strided, native_stores
from longdraft.kernels.interface import KVStore

with suppress(ImportError):
    from longdraft.kernels.cpu import _cpu


class FitRules(NamedTuple):
    """The constants of longdraft/cache/remainder.py, where each is described."""

    fit_every: int
    decay_rows: float
    ridge: float
    ridge_rows: float
    least_spread: float
    last_error: float
    log_zero: float


class RemainderFit(Protocol):
    """The fit of one partial cache."""

    def update(self, stores: Sequence[KVStore], length: int, whole: AttentionRows) -> Tensor:
        """Add verified rows. Returns the function [L, H, D + 1, D + 1] for the next drafts; the next call changes it.

        The arguments are those of `Kernels.remainder`.
        """

    @property
    def nbytes(self) -> int: ...


@runtime_checkable
class FitsRemainders(Protocol):
    """Kernels that have a fit of their own."""

    def new_fit(self, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> RemainderFit | None:
        """The fit for a partial cache in these stores; None where there is none for their shape."""


def supports(stores: Sequence[KVStore]) -> bool:
    """Whether `CompiledRemainder` can read these stores."""
    return all(isinstance(store, CpuStore) for store in stores)


class CompiledRemainder:
    """The twin of `Remainder` in longdraft/cache/remainder.py, for stores of one shape."""

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
