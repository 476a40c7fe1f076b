"""Weights on the device, and few rows times them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.kernels.cuda import jit_linear, jit_rows
from longdraft.kernels.cuda.launch import ceil_div, on, require
from longdraft.kernels.int8 import quantise

_PROGRAMS = 256  # at least as many read a weight at once, where it is large enough
_LEAST = 512  # numbers of a row that a part of a sum has at least
_WIDE = 16384  # outputs from which a program takes 128 of them: it reads the rows anew for each
SUM_BLOCK = 1024


class Parts(NamedTuple):
    """What few rows times a weight gave, not summed yet: float32 [P, R, N], and how a sum ends."""

    sums: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The parts, scale and bias; the parts again where there is none."""
        return (self.sums, self.sums if self.scale is None else self.scale,
                self.sums if self.bias is None else self.bias)

    def options(self) -> dict[str, int | bool]:
        return {"PARTS": self.sums.shape[0], "HAS_SCALE": self.scale is not None, "HAS_BIAS": self.bias is not None}


class CudaLinear:
    """A weight [N, K] in the model's dtype, or int8 with a scale for each output; bias [N] float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype,
                 is_int8: bool) -> None:
        self.scale: Tensor | None = None
        if is_int8:
            self.weight, self.scale = quantise(weight.to(device))
        else:
            self.weight = weight.to(device, dtype, copy=True).contiguous()
        self.bias = None if bias is None else bias.to(device, dtype).float().contiguous()
        self.out_features, self.in_features = self.weight.shape
        self.dtype = dtype
        self.columns = 128 if self.out_features >= _WIDE else 64
        self.splits = self._splits()

    def _splits(self) -> int:
        """By shape alone: the number of rows must not change the order of a sum."""
        splits, programs = 1, ceil_div(self.out_features, self.columns)
        while splits * programs < _PROGRAMS and self.in_features >= 2 * splits * _LEAST:
            splits *= 2
        return splits

    def parts(self, x: Tensor, tile: int, sums: Tensor | None = None) -> Parts:
        """Rows x [R, K]; `tile` rows of them are multiplied at a time. `sums`: memory to use."""
        rows = len(x)
        require(x.shape == (rows, self.in_features) and x.dtype == self.dtype and x.is_contiguous(),
                f"{self.dtype} [R, {self.in_features}]", (x.shape, x.dtype))
        size = self.splits * rows * self.out_features
        sums = torch.empty(size, device=x.device) if sums is None else sums[:size]
        sums = sums.view(self.splits, rows, self.out_features)
        grid = (ceil_div(self.out_features, self.columns), ceil_div(rows, tile), self.splits)
        is_float = self.dtype == torch.float32
        with on(x.device):
            jit_linear.few_rows[grid](
                x, self.weight, sums, rows, OUT=self.out_features, INNER=self.in_features, ROWS=tile,
                COLUMNS=self.columns, BLOCK=32 if is_float else 8192 // self.columns, SPLITS=self.splits, num_warps=4,
                num_stages=2 if is_float else 3 if self.columns == 64 else 4)
        return Parts(sums, self.scale, self.bias)

    def sum_size(self, rows: int) -> int:
        """Numbers that the parts of so many rows take."""
        return self.splits * rows * self.out_features

    def library(self, x: Tensor, keep_float: bool = False) -> Tensor:
        """Many rows by the library's product: faster, and its results depend on how many there are."""
        if self.scale is None and not keep_float:
            return functional.linear(x, self.weight, None if self.bias is None else self.bias.to(self.dtype))
        sums = functional.linear(x, self.weight.to(self.dtype)).float()
        sums = sums if self.scale is None else sums * self.scale
        sums = sums if self.bias is None else sums + self.bias
        return sums if keep_float else sums.to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + sum(x.nbytes for x in (self.scale, self.bias) if x is not None)


def summed(parts: Parts, out: Tensor) -> Tensor:
    """The linear's result [R, N] in the dtype of `out`."""
    _, rows, width = parts.sums.shape
    with on(out.device):
        jit_rows.sum_parts[(rows, ceil_div(width, SUM_BLOCK))](*parts.arguments(), out, rows, WIDTH=width,
                                                              BLOCK=SUM_BLOCK, **parts.options())
    return out
