"""The rule of gated delta nets in the compiled module (csrc/delta.h), which checks its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu

_LANES = 16  # numbers of a vector


def new_state(weights: DeltaWeights, dtype: torch.dtype) -> DeltaState:
    """See `Kernels.new_state`. A state is blocks of columns, 32 or 16 wide, each contiguous in memory."""
    shape = weights.shape
    columns = _LANES if shape.value_dim % (2 * _LANES) else 2 * _LANES
    matrix = torch.zeros(shape.value_heads, shape.value_dim // columns, shape.key_dim, columns)
    return DeltaState(torch.zeros(shape.width - 1, shape.channels, dtype=dtype), matrix)


def native_weights(weights: DeltaWeights) -> _cpu.DeltaLayer:
    """The weights as the compiled module reads them, where they are."""
    return _cpu.DeltaLayer(*weights)


def delta_rule(native: _cpu.Kernels, dtype: torch.dtype, weights: DeltaWeights, texts: Sequence[DeltaRows],
               z: Tensor | None, parents: Tensor) -> Tensor | None:
    """See `Kernels.delta_rule`."""
    out = None if z is None else torch.empty(z.shape, dtype=dtype)
    native.delta(dtype == torch.bfloat16, native_weights(weights), texts, z, out, parents)
    return out
