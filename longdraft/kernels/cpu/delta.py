"""The rule of gated delta nets in the compiled module (csrc/delta.h). Checks every argument, as cpu.py does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.cpu.store import address, require, require_tensor
from longdraft.kernels.delta import DeltaRows, DeltaShape, DeltaState, DeltaWeights

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu

_LANES, _MAX_WIDTH = 16, 16


def _matrix_shape(shape: DeltaShape) -> tuple[int, ...]:
    """Of the states: blocks of columns, 32 or 16 wide, each contiguous in memory."""
    columns = _LANES if shape.value_dim % (2 * _LANES) else 2 * _LANES
    return shape.value_heads, shape.value_dim // columns, shape.key_dim, columns


def new_state(weights: DeltaWeights, dtype: torch.dtype) -> DeltaState:
    """See `Kernels.new_state`."""
    shape = weights.shape
    return DeltaState(torch.zeros(shape.width - 1, shape.channels, dtype=dtype), torch.zeros(_matrix_shape(shape)))


def delta_rule(native: _cpu.Kernels, dtype: torch.dtype, weights: DeltaWeights, texts: Sequence[DeltaRows],
               z: Tensor | None, parents: Tensor) -> Tensor | None:
    """See `Kernels.delta_rule`."""
    shape, counts = weights.shape, [len(rows.mixed) for rows in texts]
    check_weights(weights)
    for rows in texts:
        check_rows(shape, rows, dtype)
    require_tensor("parents", parents, (sum(counts),), torch.int32)
    require(min(counts, default=0) > 0, "one or more rows of each text", counts)
    out, stride = None, 0
    if z is not None:
        fits = z.shape == (sum(counts), shape.values) and z.dtype == dtype and z.stride(1) == 1
        require(fits, f"z [{sum(counts)}, {shape.values}] of {dtype}", (z.shape, z.dtype, z.stride()))
        out, stride = torch.empty(sum(counts), shape.values, dtype=dtype), z.stride(0)
    native.delta(
        dtype == torch.bfloat16, list(shape), weight_addresses(weights), weights.eps, counts,
        [row_addresses(rows) for rows in texts], address(z), stride, address(out), parents.data_ptr())
    return out


def weight_addresses(weights: DeltaWeights) -> list[int]:
    """Of conv, decay, bias and norm."""
    return [x.data_ptr() for x in weights[1:5]]


def row_addresses(rows: DeltaRows) -> list[int]:
    """Of both states, mixed and gates."""
    return [x.data_ptr() for x in (*rows.before, *rows.after, rows.mixed, rows.gates)]


def check_weights(weights: DeltaWeights) -> None:
    """ValueError where the compiled rule cannot use them."""
    shape = weights.shape
    fits = (min(shape) > 0 and shape.key_dim % _LANES == 0 and shape.value_dim % _LANES == 0
            and shape.value_heads % shape.key_heads == 0 and 2 <= shape.width <= _MAX_WIDTH)
    require(fits, "head dims that are multiples of 16, whole groups of heads, a width of 2 to 16", shape)
    for name, size in (("conv", (shape.width, shape.channels)), ("decay", (shape.value_heads,)),
                       ("bias", (shape.value_heads,)), ("norm", (shape.value_dim,))):
        require_tensor(name, getattr(weights, name), size, torch.float32)


def check_state(shape: DeltaShape, state: DeltaState, dtype: torch.dtype) -> None:
    """ValueError for a state of another layer or of other kernels."""
    require_tensor("a history", state.history, (shape.width - 1, shape.channels), dtype)
    require_tensor("a state", state.matrix, _matrix_shape(shape), torch.float32)


def check_rows(shape: DeltaShape, rows: DeltaRows, dtype: torch.dtype) -> None:
    """ValueError for rows of another layer."""
    for state in (rows.before, rows.after):
        check_state(shape, state, dtype)
    require(rows.before.matrix.data_ptr() != rows.after.matrix.data_ptr(), "two states", "one")
    require_tensor("mixed", rows.mixed, (len(rows.mixed), shape.channels), dtype)
    require_tensor("gates", rows.gates, (len(rows.mixed), 2 * shape.value_heads), torch.float32)
