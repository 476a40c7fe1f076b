"""Weights of 4-bit integers on the device, and the product of a few rows with them: launches `jit_int4`.

The numbers are those of longdraft/kernels/formats/int4.py. The rows stay in the model's dtype (on the CPU they are
quantised to int8), so a product differs from the CPU's in its last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.kernels.cuda import jit_int4
from longdraft.kernels.cuda.launch import UNFUSED, ceil_div, chained, on_device
from longdraft.kernels.cuda.linear import CudaLinear, Tiling, splits_of
from longdraft.kernels.formats import int4
from longdraft.kernels.formats.int4 import GROUP, Int4Weight

_COLUMNS = 128  # output features of one program: two operands of 64 rows
_BLOCK = 4 * GROUP  # inputs that 16 words of an output feature hold
_PROGRAMS, _SPLIT_BLOCKS = (384, 899), (2, 8)  # see `splits_of`; timed on an H200 (docs/cuda.md)
_STAGES = 3
_MOST_ROWS = 16  # of one program: with more, its registers do not suffice
_ZERO = 1 << 16  # what a zero point is multiplied by in the word that holds it and the scale


class CudaInt4Linear(CudaLinear):
    """A weight [N, K] of 4-bit integers in groups of 32 inputs; bias [N] float32."""

    def __init__(self, weight: Tensor | Int4Weight, bias: Tensor | None, device: torch.device,
                 dtype: torch.dtype) -> None:
        if isinstance(weight, Tensor):
            weight = int4.quantise(weight.to(device))
        self.out_features, self.in_features = weight.values.shape
        self.dtype, self.scale = dtype, None
        self.bias = None if bias is None else bias.to(device, dtype).float().contiguous()
        self.blocks = ceil_div(self.in_features, _BLOCK)
        self._tiles = ceil_div(self.out_features, _COLUMNS)
        self._words, self._scales = (part.to(device) for part in self._packed(weight))
        splits = splits_of(self._tiles, self.blocks, _PROGRAMS, _SPLIT_BLOCKS)
        self.tiling = Tiling(_COLUMNS, _BLOCK, _STAGES, splits)

    def _packed(self, weight: Int4Weight) -> tuple[Tensor, Tensor]:
        """Words, and scales with zero points, in the order in which `few_rows_int4_kernel` reads them."""
        rows, width = self._tiles * _COLUMNS - self.out_features, self.blocks * _BLOCK - self.in_features
        groups = self.blocks * 4 - weight.scale.shape[1]
        values = functional.pad(weight.values, (0, width, 0, rows)).int()
        scale, zero = (functional.pad(part, (0, groups, 0, rows)) for part in (weight.scale, weight.zero))
        # Padded inputs meet rows of 0; padded groups have the scale 0.
        pairs = values.view(self._tiles, _COLUMNS, self.blocks, 4, 16, 2).permute(0, 2, 1, 4, 3, 5)
        shifts = torch.tensor([[4 * group, 4 * group + 16] for group in range(4)], dtype=torch.int32,
                              device=values.device)
        words = (pairs << shifts).sum((4, 5)).to(torch.int32)  # [tiles, blocks, columns, 16]
        scales, zeros = (part.view(self._tiles, _COLUMNS, self.blocks, 4).permute(0, 2, 3, 1).contiguous()
                         for part in (scale, zero))
        bits = scales.half().view(torch.int16).int() & 0xFFFF
        return words.contiguous(), bits + zeros.int() * _ZERO

    @property
    def fuses_gate(self) -> bool:
        return False

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Words, scales with zero points, and the bias."""
        return self._words, self._scales, self.bias

    def rows_of(self, tile: int) -> int:
        return min(tile, _MOST_ROWS)

    def _multiply(self, x: Tensor, tile: int, sums: Tensor) -> None:
        rows, tile = len(x), self.rows_of(tile)
        jit_int4.few_rows_int4_kernel[(ceil_div(rows, tile), self._tiles, self.splits)](
            x, self._words, self._scales, sums, rows, OUT=self.out_features, INNER=self.in_features,
            BLOCKS=self.blocks, ROWS=tile, COLUMNS=_COLUMNS, SPLITS=self.splits, STAGES=self.tiling.stages,
            num_warps=4, **chained(x.device))

    def matmul(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.dequantised(), None if self.bias is None else self.bias.to(self.dtype))

    def dequantised(self) -> Tensor:
        """The numbers [N, K] that the weight stands for, in the model's dtype."""
        out = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self._words.device)
        with on_device(out.device):
            jit_int4.dequantise_kernel[(self._tiles, self.blocks)](
                self._words, self._scales, out, OUT=self.out_features, INNER=self.in_features, BLOCKS=self.blocks,
                COLUMNS=_COLUMNS, **UNFUSED)
        return out

    @property
    def nbytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self._words.nbytes + self._scales.nbytes + bias
