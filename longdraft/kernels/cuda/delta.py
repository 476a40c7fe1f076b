"""Gated delta nets on the device: launches the kernels of `jit_delta`, for one text after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_attention, jit_delta
from longdraft.kernels.cuda.launch import (
    UNFUSED,
    RecentlyUsed,
    ceil_div,
    chained,
    on_device,
    padded_size,
    require,
    staged_parts,
)
from longdraft.kernels.delta import DeltaRows, DeltaShape, DeltaState, DeltaWeights

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
        return cls.of_tree(parents, device)

    @classmethod
    def of_tree(cls, parents: Tensor, device: torch.device) -> Paths:
        """As `of`, in the form of trees: that of a step."""
        count = len(parents)
        path = torch.zeros(count, count, dtype=torch.int32, device=device)
        depths = torch.zeros(count, dtype=torch.int32, device=device)
        with on_device(device):
            jit_attention.tree_paths_kernel[(count,)](parents.to(device, non_blocking=True), path, depths, count,
                                                      num_warps=1, **UNFUSED)
        return cls(path, depths, count)


class PlacedStates(NamedTuple):
    """States and numbers of rows in device memory.

    table         int64 [L, texts, ENTRY], see `jit_delta`; `addresses` computes it for a text
    rows          int64 [texts], of the convolution
    rows_of_rule  int64 [texts], of the rule
    """

    table: Tensor
    rows: Tensor
    rows_of_rule: Tensor


def addresses(layers: Sequence[DeltaWeights], before: Sequence[DeltaState], after: Sequence[DeltaState],
              spare: Sequence[DeltaState] | None = None) -> list[list[int]]:
    """The table of `jit_delta` for layers whose rows continue `before` and fill `after`; the next rows of a chain fill
    `spare`."""
    table = []
    for weights, old, new, other in zip(layers, before, after, spare or after, strict=True):
        require(old.matrix.data_ptr() not in (new.matrix.data_ptr(), other.matrix.data_ptr()), "two states", "one")
        held = (*old, *new, weights.conv, weights.decay, weights.bias, *other)
        table.append([part.data_ptr() for part in held])
    return table


def stacked(parts: Sequence[Tensor]) -> Tensor | None:
    """The tensor [L, ...] whose parts these are, in order; None if they are not of one tensor."""
    first, step = parts[0], parts[-1].data_ptr() - parts[0].data_ptr()
    stride = step // (max(1, len(parts) - 1) * first.element_size())
    places = range(first.data_ptr(), parts[-1].data_ptr() + 1, max(1, stride * first.element_size()))
    memory = first.untyped_storage().data_ptr()
    is_one = first.is_contiguous() and (stride >= first.numel() or len(parts) == 1) and all(
        part.shape == first.shape and part.untyped_storage().data_ptr() == memory for part in parts)
    if not is_one or [part.data_ptr() for part in parts] != list(places):
        return None
    return first.as_strided((len(parts), *first.shape), (stride, *first.stride()))


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
        blocks = ceil_div(dim, _COLUMNS)
        with on_device(self._device):
            jit_delta.convolve_kernel[(count, 2 * key_heads + heads)](
                mixed, rows.before.history, path, depths, weights.conv, values, rows.after.history, path, path, count,
                1, stride, 0, 0, PADDED=padded_size(max(key_dim, dim)), WIDTH=width, HAS_TABLE=False, num_warps=1,
                **sizes, **chained(self._device))
            jit_delta.delta_rule_kernel[(count, heads, blocks)](
                values, gates, weights.decay, weights.bias, path, depths, rows.before.matrix, rows.after.matrix, out,
                path, path, count, 1, stride, 0, 0, ROWS=padded_size(key_dim), COLUMNS=_COLUMNS, BLOCKS=blocks,
                HAS_TABLE=False, HAS_OUTPUT=z is not None, num_warps=4, **sizes, **chained(self._device))
        return None if z is None else self._normed(weights, out, z)

    def _normed(self, weights: DeltaWeights, out: Tensor, z: Tensor) -> Tensor:
        """The norm of each head of out [R, Hv Dv], times silu(z)."""
        heads, dim = weights.shape.value_heads, weights.shape.value_dim
        require(z.shape == out.shape and z.dtype == self._dtype and z.stride(1) == 1, f"z {tuple(out.shape)}",
                (z.shape, z.dtype, z.stride()))
        result = torch.empty_like(out)
        with on_device(self._device):
            jit_delta.gated_norm_kernel[(len(out), heads)](
                out, weights.norm, z, result, z.stride(0), weights.eps, HEADS=heads, DIM=dim, PADDED=padded_size(dim),
                num_warps=1, **chained(self._device))
        return result

    def run_placed(self, weights: DeltaWeights, mixed: Tensor, gates: Tensor, z: Tensor, paths: Paths,
                   placed: PlacedStates) -> Tensor:
        """As `run` for texts of as many rows each, whose states and numbers of rows are in device memory.

        mixed, gates  as in `DeltaRows`, contiguous, of all texts

        Returns rows [R, Hv Dv].
        """
        out = torch.empty(len(mixed), weights.shape.values, dtype=self._dtype, device=self._device)
        self._launch(weights.shape, mixed[None], gates[None], len(mixed) // len(placed.rows), paths, paths.depths,
                     placed, out)
        return self._normed(weights, out, z)

    def states_after(self, layers: Sequence[DeltaWeights], rows: Sequence[DeltaRows], path: Sequence[int],
                      after: Sequence[DeltaState]) -> bool:
        """See `longdraft.kernels.delta.AppliesPaths`: one copy to the device and two launches for all layers."""
        shape, mixed = layers[0].shape, stacked([part.mixed for part in rows])
        gates = stacked([part.gates for part in rows])
        if mixed is None or gates is None or any(each.shape != shape for each in layers):
            return False
        count, num = len(path), len(layers)
        parts = staged_parts(2 * jit_delta.ENTRY.value * num, 2, 2, count, count, 1)
        staged = np.zeros(parts[-1].stop, dtype=np.int32)
        entries, of_convolution, of_rule, nodes, depths, last = (staged[part] for part in parts)
        entries.view(np.int64)[:] = np.ravel(addresses(layers, [row.before for row in rows], after))
        of_convolution.view(np.int64)[:], of_rule.view(np.int64)[:] = count, 1
        nodes[:], depths[:], last[:] = path, range(count), count - 1
        held = torch.from_numpy(staged).to(self._device, non_blocking=True)
        table, rows_of_path, one, at, depth, depth_of_last = (held[part] for part in parts)
        placed = PlacedStates(table.view(torch.int64), rows_of_path.view(torch.int64), one.view(torch.int64))
        self._launch(shape, mixed, gates, count, Paths(at, depth, 0), depth_of_last, placed, None)
        return True

    def _launch(self, shape: DeltaShape, mixed: Tensor, gates: Tensor, count: int, paths: Paths, depths: Tensor,
                placed: PlacedStates, out: Tensor | None) -> None:
        """Convolution and rule of mixed [L, T, C] and gates [L, T, 2 Hv] for `count` rows of each text.

        depths  of the rows that the rule runs
        """
        key_heads, heads, key_dim, dim, width = shape
        sizes = {"KEY_HEADS": key_heads, "VALUE_HEADS": heads, "KEY_DIM": key_dim, "VALUE_DIM": dim}
        (layers, rows, _), texts = mixed.shape, len(placed.rows)
        values, blocks = torch.empty(layers, rows, shape.channels, device=self._device), ceil_div(dim, _COLUMNS)
        options = dict(HAS_TABLE=True, **sizes)
        with on_device(self._device):
            jit_delta.convolve_kernel[(texts * count, 2 * key_heads + heads, layers)](
                mixed, mixed, paths.path, paths.depths, values, values, mixed, placed.table, placed.rows, count,
                texts, paths.stride, mixed.stride(0), values.stride(0), WIDTH=width,
                PADDED=padded_size(max(key_dim, dim)), num_warps=1, **options, **chained(self._device))
            jit_delta.delta_rule_kernel[(len(depths), heads, layers * blocks)](
                values, gates, values, values, paths.path, depths, values, values, values if out is None else out,
                placed.table, placed.rows_of_rule, count, texts, paths.stride, values.stride(0), gates.stride(0),
                ROWS=padded_size(key_dim), COLUMNS=_COLUMNS, BLOCKS=blocks, HAS_OUTPUT=out is not None, num_warps=4,
                **options, **chained(self._device))
