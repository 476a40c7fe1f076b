"""Weights on the device, and the product of a few rows with a weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.kernels.cuda import jit_activations, jit_linear, jit_rows
from longdraft.kernels.cuda.launch import ceil_div, chained, on_device, require, shared_bytes
from longdraft.kernels.formats.int8 import Quantised, quantise
from longdraft.kernels.switches import is_on

_WIDE_WEIGHT = 16384  # output features from which a program computes 128 columns
# Programs that are enough, and that 132 multiprocessors hold at a time: three each, eight of int8.
_PROGRAMS, _INT8_PROGRAMS = (190, 396), (528, 1056)
_FEW_PROGRAMS = 264  # two each, with larger blocks
_SPLIT_WIDTHS = 192, 1024  # inputs of one split, see `splits_of`
_MOST_SHARED = 113 << 10  # bytes of shared memory of one program, so that two fit
_PREFETCHED = 256  # inputs of each output that are read ahead, see `jit_linear`
FUSES_GATE = is_on("FUSES_GATE")  # False: the product of gate and up, and the activation after it, are two launches
SUM_BLOCK = 1024  # columns of one program that adds partial sums


def most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a program of a product may have."""
    return min(_MOST_SHARED, shared_bytes(device))


class Activation(NamedTuple):
    """Of a gate. kind: see `jit_activations`; alpha and limit are those of `Kernels.clamped_swiglu`."""

    kind: int
    alpha: float = 0.0
    limit: float = 0.0


SILU, GELU, CLAMPED = Activation(0), Activation(1), 2


class PartialSums(NamedTuple):
    """The product of a few rows with a weight, before its splits are added.

    The result is the sum of `sums` over P, in order, times `scale`, plus `bias`, rounded to the model's dtype.
    """

    sums: Tensor  # [P, R, N] float32
    scale: Tensor | None  # [N] float32, of int8 weights
    bias: Tensor | None  # [N] float32

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first arguments of the kernels that add the splits. A missing tensor is replaced by `sums`, unread."""
        return (self.sums, self.sums if self.scale is None else self.scale,
                self.sums if self.bias is None else self.bias)

    def options(self, parts: str = "PARTS", has: str = "HAS") -> dict[str, int | bool]:
        """The compile-time arguments of those kernels. parts, has: how their names begin"""
        return {parts: self.sums.shape[0], f"{has}_SCALE": self.scale is not None, f"{has}_BIAS": self.bias is not None}


class Tiling(NamedTuple):
    """How a product is cut into programs. It depends on the weight alone: the order of a sum must not follow the rows.

    columns  output features of a program
    block    inputs that it multiplies at a time
    stages   blocks that are loaded ahead
    splits   parts of the inputs, each a program of its own
    """

    columns: int
    block: int
    stages: int
    splits: int

    @classmethod
    def of(cls, out_features: int, in_features: int, dtype: torch.dtype, is_int8: bool = False) -> Tiling:
        """The tiling of a weight whose rows have `dtype`: the fastest of those timed on an H200 (docs/cuda.md).

        All programs should be on the device at the same time: a second wave leaves most of it idle.
        """
        if dtype == torch.float32:
            return cls(64, 32, 2, splits_of(ceil_div(out_features, 64), in_features, _PROGRAMS, _SPLIT_WIDTHS))
        if out_features >= _WIDE_WEIGHT and not is_int8:
            return cls(128, 128, 3, 1) if ceil_div(out_features, 128) <= _FEW_PROGRAMS else cls(128, 64, 4, 1)
        tiles = ceil_div(out_features, 64)
        splits = splits_of(tiles, in_features, _INT8_PROGRAMS if is_int8 else _PROGRAMS, _SPLIT_WIDTHS)
        if is_int8 or (tiles * splits <= _FEW_PROGRAMS and in_features >= splits * _SPLIT_WIDTHS[1]):
            return cls(64, 128, 4, splits)
        return cls(64, 64, 6, splits)


def splits_of(tiles: int, inputs: int, programs: tuple[int, int], widths: tuple[int, int]) -> int:
    """The parts into which the inputs of a product are cut, a power of two, by the shape of the weight alone.

    tiles     programs without a cut
    programs  that are enough, and that run at a time
    widths    inputs of a part: at least so many while programs are not enough, and so many to cut further
    """
    splits, (enough, most), (least, long) = 1, programs, widths
    while 2 * splits * tiles <= most and inputs >= 2 * splits * (least if splits * tiles < enough else long):
        splits *= 2
    return splits


class CudaLinear:
    """A weight [N, K] in the model's dtype, or int8 with a float32 scale [N]; bias [N] float32."""

    def __init__(self, weight: Tensor | Quantised, bias: Tensor | None, device: torch.device, dtype: torch.dtype,
                 is_int8: bool) -> None:
        self.scale: Tensor | None = None
        if isinstance(weight, Quantised):
            self.weight, self.scale = (part.to(device).contiguous() for part in weight)
        elif is_int8:
            self.weight, self.scale = quantise(weight.to(device))
        else:
            self.weight = weight.to(device, dtype, copy=True).contiguous()
        self.bias = None if bias is None else bias.to(device, dtype).float().contiguous()
        self.out_features, self.in_features = self.weight.shape
        self.dtype = dtype
        self.tiling = Tiling.of(self.out_features, self.in_features, dtype, is_int8)

    @property
    def splits(self) -> int:
        return self.tiling.splits

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the kernels read: the weight, its scale and its bias."""
        return self.weight, self.scale, self.bias

    def options(self) -> dict[str, int]:
        """Compile-time arguments of kernels that read rows of the weight: it is not of few bits."""
        return {"BITS": 0, "FORM": 0, "OFFSET": 0}

    def rows(self, ids: Tensor) -> Tensor:
        """Rows [R, K] of an embedding table, of these ids [R] int64."""
        rows = self.weight[ids]
        return rows if self.scale is None else (rows.float() * self.scale[ids, None]).to(self.dtype)

    def rows_of(self, tile: int) -> int:
        """Rows that one program multiplies, of `tile` at most."""
        return tile

    def partial_sums(self, x: Tensor, tile: int, buffer: Tensor | None = None) -> PartialSums:
        """Multiply rows x [R, K], `tile` rows per program. The sums are written to `buffer` where one is given.

        Raises ValueError unless x is contiguous, [R, K], and of the weight's dtype.
        """
        rows = len(x)
        require(x.shape == (rows, self.in_features) and x.dtype == self.dtype and x.is_contiguous(),
                f"{self.dtype} [R, {self.in_features}]", (x.shape, x.dtype))
        size = self.num_sums(rows)
        sums = torch.empty(size, device=x.device) if buffer is None else buffer[:size]
        sums = sums.view(self.splits, rows, self.out_features)
        with on_device(x.device):
            self._multiply(x, tile, sums)
        return PartialSums(sums, self.scale, self.bias)

    def _multiply(self, x: Tensor, tile: int, sums: Tensor) -> None:
        """Launch the product: sums [P, R, N]."""
        rows, (columns, block, stages, splits) = len(x), self.tiling
        stages = min(stages, most_shared(x.device) // (block * (columns * self.weight.itemsize + tile * x.itemsize)))
        jit_linear.few_rows_kernel[(ceil_div(rows, tile), ceil_div(self.out_features, columns), splits)](
            x, self.weight, sums, rows, OUT=self.out_features, INNER=self.in_features, ROWS=tile, COLUMNS=columns,
            BLOCK=block, SPLITS=splits, PREFETCHED=_PREFETCHED, num_warps=4, num_stages=stages, **chained(x.device))

    @property
    def fuses_gate(self) -> bool:
        """Whether `multiply_gated` is one launch: a program has all inputs of as many columns of the gate as of up."""
        columns, block, _, splits = self.tiling
        is_even = self.out_features % columns == 0 and self.in_features % block == 0
        return FUSES_GATE and splits == 1 and is_even and self.scale is None and self.dtype != torch.float32

    def multiply_gated(self, x: Tensor, tile: int, out: Tensor, buffer: Tensor | None = None,
                       activation: Activation = SILU) -> None:
        """Write activation(gate) * up of x [R, K] to `out` [R, N / 2], gate and up being the halves of the product.

        buffer  as for `partial_sums`
        """
        rows, width, (columns, block, stages, _) = len(x), out.shape[1], self.tiling
        kind, *numbers = activation
        if not self.fuses_gate:
            parts = self.partial_sums(x, tile, buffer)
            with on_device(x.device):
                jit_activations.gated_parts_kernel[(rows, ceil_div(width, SUM_BLOCK))](
                    *parts.arguments(), out, rows, *numbers, WIDTH=width, BLOCK=SUM_BLOCK, ACTIVATION=kind,
                    **parts.options(), **chained(x.device))
            return
        stages = min(stages, most_shared(x.device) // (block * (columns + tile) * x.itemsize))
        with on_device(x.device):
            jit_linear.gated_rows_kernel[(ceil_div(rows, tile), ceil_div(width, columns // 2))](
                x, self.weight, self.weight if self.bias is None else self.bias, out, rows, *numbers,
                WIDTH=width, INNER=self.in_features, ROWS=tile, COLUMNS=columns // 2, BLOCK=block,
                HAS_BIAS=self.bias is not None, PREFETCHED=_PREFETCHED, ACTIVATION=kind, num_warps=4,
                num_stages=stages, **chained(x.device))

    def num_sums(self, rows: int) -> int:
        """Number of float32 elements of the partial sums of `rows` rows."""
        return self.splits * rows * self.out_features

    def matmul(self, x: Tensor) -> Tensor:
        """PyTorch's product for many rows x [R, K]: [R, N]. Faster, but its bits depend on the number of rows."""
        if self.scale is None:
            return functional.linear(x, self.weight, None if self.bias is None else self.bias.to(self.dtype))
        product = functional.linear(x, self.weight.to(self.dtype))
        if self.bias is None:
            return torch.mul(product, self.scale, out=product)  # in float32, without memory for it
        return (product * self.scale + self.bias).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + sum(x.nbytes for x in (self.scale, self.bias) if x is not None)


def add_partial_sums(parts: PartialSums, out: Tensor, rest: Tensor | None = None) -> Tensor:
    """Write the product [R, N] to `out`, rounded to its dtype; returns `out`. rest: for the columns that `out` lacks"""
    _, rows, width = parts.sums.shape
    require(width == out.shape[1] + (0 if rest is None else rest.shape[1]), f"[R, {width}]", out.shape)
    with on_device(out.device):
        jit_rows.sum_parts_kernel[(rows, ceil_div(width, SUM_BLOCK))](
            *parts.arguments(), out, out if rest is None else rest, rows, WIDTH=width, CUT=out.shape[1],
            BLOCK=SUM_BLOCK, **parts.options(), **chained(out.device))
    return out
