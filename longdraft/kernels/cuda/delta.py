"""Gated delta nets on the device: launches the kernels of `jit_delta`, for one text after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_attention, jit_delta
from longdraft.kernels.cuda.launch import UNFUSED, RecentlyUsed, ceil_div, chained, on_device, padded_size, require
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights

_COLUMNS = 32  # of a state, in one program
_MAX_PATHS = 16  # of trees whose paths are kept: all layers of a forward use the same


class Paths(NamedTuple):
    """See `jit_delta`. stride: of `path`, 0 for a chain."""

    path: Tensor
    depths: Tensor
    stride: int

    @classmethod
    def of(cls, parents: Tensor, device: torch.device) -> Paths:
        """Of rows with these parents [R], int32 on the CPU."""
        count = len(parents)
        if torch.equal(parents, torch.arange(-1, count - 1, dtype=torch.int32)):
            chain = torch.arange(count, dtype=torch.int32, device=device)
            return cls(chain, chain, 0)
        path = torch.zeros(count, count, dtype=torch.int32, device=device)
        depths = torch.zeros(count, dtype=torch.int32, device=device)
        with on_device(device):
            jit_attention.tree_paths_kernel[(count,)](parents.to(device), path, depths, count, num_warps=1, **UNFUSED)
        return cls(path, depths, count)


class DeltaNets:
    """The rule of delta layers on a device. See `longdraft.kernels.interface.Kernels.delta_rule`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._paths: RecentlyUsed[tuple[int, ...], Paths] = RecentlyUsed(_MAX_PATHS)

    def new_state(self, weights: DeltaWeights) -> DeltaState:
        heads, dims = weights.shape.value_heads, (weights.shape.key_dim, weights.shape.value_dim)
        return DeltaState(
            torch.zeros(weights.shape.width - 1, weights.shape.channels, dtype=self._dtype, device=self._device),
            torch.zeros(heads, *dims, device=self._device))

    def run(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
            parents: Tensor) -> Tensor | None:
        counts = [len(rows.mixed) for rows in texts]
        require(min(counts, default=0) > 0 and len(parents) == sum(counts), "one or more rows of each text", counts)
        parts: Sequence[Tensor | None] = [None] * len(texts) if z is None else torch.split(z, counts)
        found = [self._run_text(weights, rows, part, own)
                 for rows, part, own in zip(texts, parts, torch.split(parents, counts), strict=True)]
        return None if z is None else torch.cat([part for part in found if part is not None])

    def _run_text(self, weights: DeltaWeights, rows: DeltaRows, z: Tensor | None, parents: Tensor) -> Tensor | None:
        shape, count = weights.shape, len(parents)
        key_heads, heads, key_dim, dim, width = shape
        require(rows.mixed.shape == (count, shape.channels) and rows.mixed.dtype == self._dtype,
                f"mixed [{count}, {shape.channels}] of {self._dtype}", (rows.mixed.shape, rows.mixed.dtype))
        require(rows.before.matrix.data_ptr() != rows.after.matrix.data_ptr(), "two states", "one")
        path, depths, stride = self._paths.get(tuple(parents.tolist()), lambda: Paths.of(parents, self._device))
        mixed, gates = rows.mixed.contiguous(), rows.gates.contiguous()
        values = torch.empty(count, shape.channels, device=self._device)
        out = torch.empty(count, shape.values, dtype=self._dtype, device=self._device)
        sizes = {"KEY_HEADS": key_heads, "VALUE_HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": dim}
        with on_device(self._device):
            jit_delta.convolve_kernel[(count, 2 * key_heads + heads)](
                mixed, rows.before.history, path, depths, weights.conv, values, rows.after.history, count, stride,
                PADDED=padded_size(max(key_dim, dim)), WIDTH=width, num_warps=1, **sizes, **chained(self._device))
            jit_delta.delta_rule_kernel[(count, heads, ceil_div(dim, _COLUMNS))](
                values, gates, weights.decay, weights.bias, path, depths, rows.before.matrix, rows.after.matrix, out,
                count, stride, ROWS=padded_size(key_dim), COLUMNS=_COLUMNS, num_warps=4, **sizes,
                **chained(self._device))
            if z is None:
                return None
            require(z.shape == out.shape and z.dtype == self._dtype and z.stride(1) == 1, f"z {tuple(out.shape)}",
                    (z.shape, z.dtype, z.stride()))
            result = torch.empty_like(out)
            jit_delta.gated_norm_kernel[(count, heads)](
                out, weights.norm, z, result, z.stride(0), weights.eps, HEADS=heads, DIM=dim, PADDED=padded_size(dim),
                num_warps=1, **chained(self._device))
        return result
