"""Kernels whose weights are distributed over ranks: each rank computes its part with its local kernels.

One sum over the ranks after attention and one after the MLP complete the rows, with the same bits on every rank. So
all ranks make the same decisions without further messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels import Decoder, Geometry, Kernels, LayerWeights, Linear
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.parallel.group import ProcessGroup
from longdraft.parallel.shard import WHOLE, Shard


class RowParallel:
    """A weight whose columns are split over the ranks; this rank holds `part`. The ranks' results are added."""

    def __init__(self, part: Linear) -> None:
        self.part, self.out_features = part, part.out_features

    @property
    def nbytes(self) -> int:
        return self.part.nbytes


class ColumnParallel:
    """A weight whose rows are split over the ranks; `part` starts at row `first`. The results are concatenated."""

    def __init__(self, part: Linear, first: int, out_features: int) -> None:
        self.part, self.first, self.out_features = part, first, out_features

    @property
    def nbytes(self) -> int:
        return self.part.nbytes


class ParallelKernels:
    """See :class:`longdraft.kernels.interface.Kernels`. Weights are whole, `RowParallel` or `ColumnParallel`."""

    def __init__(self, kernels: Kernels, group: ProcessGroup) -> None:
        self.local, self.group = kernels, group
        self.part = Shard(group.rank, group.size)
        self.name, self.is_row_invariant = kernels.name, kernels.is_row_invariant
        self.device, self.dtype = kernels.device, kernels.dtype
        # All operations except `linear`, `embed` and the decoder work on this rank's part alone.
        self.pack, self.rms_norm, self.rope = kernels.pack, kernels.rms_norm, kernels.rope
        self.swiglu, self.gate, self.geglu = kernels.swiglu, kernels.gate, kernels.geglu
        self.clamped_swiglu, self.soft_cap = kernels.clamped_swiglu, kernels.soft_cap
        self.route, self.sigmoid = kernels.route, kernels.sigmoid
        self.is_device, self.scatter_rows = kernels.is_device, kernels.scatter_rows
        self.cache_bytes, self.free_bytes = kernels.cache_bytes, kernels.free_bytes
        self.new_store, self.keep, self.copy = kernels.new_store, kernels.keep, kernels.copy
        self.remainder, self.new_fit, self.attention = kernels.remainder, kernels.new_fit, kernels.attention
        self.new_state, self.delta_rule = kernels.new_state, kernels.delta_rule

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        if isinstance(weight, RowParallel):
            total = self.group.sum(self.local.linear(x, weight.part, keep_float=True))
            return total if keep_float else total.to(self.dtype)
        if not isinstance(weight, ColumnParallel):
            return self.local.linear(x, weight, keep_float=keep_float)
        part = self.local.linear(x, weight.part, keep_float=True)
        widest = self.part._replace(rank=0).vocabulary(weight.out_features).stop
        part = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        whole = self.group.concatenate(part)[:, : weight.out_features].contiguous()
        return whole if keep_float else whole.to(self.dtype)

    def embed(self, table: Linear, tokens: Sequence[int] | Tensor) -> Tensor:
        if not isinstance(table, ColumnParallel):
            return self.local.embed(table, tokens)
        offsets = torch.as_tensor(tokens) - table.first
        is_ours = (offsets >= 0) & (offsets < table.part.out_features)
        rows = self.local.embed(table.part, torch.where(is_ours, offsets, 0).tolist()).float()
        rows[~is_ours.to(rows.device)] = 0
        return self.group.sum(rows).to(self.dtype)  # exact: all ranks but one add zeros

    def new_decoder(self, layers: Sequence[LayerWeights], geometry: Geometry) -> Decoder:
        if self.is_device:  # device kernels run their self-check when they create a decoder
            first = layers[0]
            out = first.out.part if isinstance(first.out, RowParallel) else first.out
            down = first.down.part if isinstance(first.down, RowParallel) else first.down
            self.local.new_decoder([first._replace(out=out, down=down)], geometry)
            self.is_row_invariant = self.local.is_row_invariant
        return LayerwiseDecoder(self, layers, geometry)  # each layer needs two sums over the ranks


def shard_of(kernels: Kernels) -> Shard:
    """The shard of the weights that these kernels work with."""
    return kernels.part if isinstance(kernels, ParallelKernels) else WHOLE


def local_kernels(kernels: Kernels) -> Kernels:
    """The kernels of this rank alone, for a model that every rank has whole."""
    return kernels.local if isinstance(kernels, ParallelKernels) else kernels


