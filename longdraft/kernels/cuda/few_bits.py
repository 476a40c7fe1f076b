"""Weights of 4, 5, 6 or 8 bits on the device, and the product of a few rows with them: launches `jit_few_bits`.

The numbers are those of longdraft/kernels/formats (int4.py, groups.py, mxfp4.py). The rows stay in the model's dtype
(on the CPU they are quantised to int8), so a product differs from the CPU's in its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from longdraft.kernels.cuda import jit_few_bits
from longdraft.kernels.cuda.launch import UNFUSED, ceil_div, chained, on_device, require
from longdraft.kernels.cuda.linear import CudaLinear, Tiling, splits_of
from longdraft.kernels.formats import int4
from longdraft.kernels.formats.groups import GroupedWeight
from longdraft.kernels.formats.int4 import GROUP, Int4Weight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight

_COLUMNS = 128  # output features of one program: two operands of 64 rows
_BLOCK = 4 * GROUP  # inputs of a record
_PROGRAMS, _SPLIT_BLOCKS = (384, 575), (2, 8)  # see `splits_of`; four run on a multiprocessor at a time
_STAGES = 3
_WARPS = 4
_REGISTERS = 128  # of a thread: 1.18 times as fast for GGUF's Q4_0 as with 132 (notebook/2026-11.md)
_MOST_ROWS = 16  # of one program: with more, its registers do not suffice
_MIDDLE = 8  # the zero point of weights that are symmetric: GGUF's Q4_0, and many of GPTQ and compressed-tensors
_CHUNK = 1 << 25  # values that are packed at a time: each takes up to 16 bytes meanwhile
_UNPACKED_ROWS = 8  # output features of a program that dequantises
_TABLE_BLOCK = 1024  # inputs of a program that reads rows of a table
SCALE, COMMON_LEAST, COMMON_HALVES, ZERO, LEAST, HALVES, SHARED, POWERS = range(8)  # see `jit_few_bits.scale_and_least`
_LIMITED = (4, SCALE), (6, COMMON_HALVES)  # bits and form of GGUF's Q4_0 and Q6_K, see `Form.registers`
_COMMON = (COMMON_LEAST, COMMON_HALVES)


FewBits: TypeAlias = Int4Weight | GroupedWeight | Mxfp4Weight


class Form(NamedTuple):
    """How a weight is held: bits of a value, what a group has besides, and what values are more than their numbers."""

    bits: int
    scales: int
    offset: int

    @classmethod
    def of(cls, weight: FewBits) -> Form:
        if isinstance(weight, Mxfp4Weight):
            return cls(4, POWERS, 0)
        if isinstance(weight, Int4Weight):
            if all(_is_shared(part) for part in (weight.scale, weight.zero)):
                return cls(4, SHARED, 0)
            return cls(4, SCALE, _MIDDLE) if bool((weight.zero == _MIDDLE).all()) else cls(4, ZERO, 0)
        if weight.common is not None:
            scales = COMMON_LEAST if weight.least is not None else COMMON_HALVES
        elif weight.has_halves:
            scales = HALVES
        else:
            scales = SCALE if weight.least is None else LEAST
        return cls(weight.bits, scales, weight.offset)

    @staticmethod
    def has(weight: GroupedWeight) -> bool:
        """Whether there is a form of this kind: halves have least values or common scales."""
        return not weight.has_halves or (weight.least is None) != (weight.common is None)

    def record(self, columns: int) -> int:
        """int32 of a tile's block."""
        return columns * ((32 if self.bits == 8 else 16) + self.bits % 4 * 4
                          + {HALVES: 6, SHARED: 1, POWERS: 1}.get(self.scales, 2 if self.scales < ZERO else 4))

    def options(self) -> dict[str, int]:
        """The compile-time arguments of kernels that read such a weight."""
        return {"BITS": self.bits, "FORM": self.scales, "OFFSET": self.offset}

    def registers(self) -> dict[str, int]:
        """The option of a product's launch that limits its registers, so that four programs run on a multiprocessor:
        of the forms that need a few more. Others would spill. The option is of NVIDIA's compiler."""
        is_limited = (self.bits, self.scales) in _LIMITED and jit_few_bits.HAS_PTX
        return {"maxnreg": _REGISTERS} if is_limited else {}


def tiling_of(tiles: int, blocks: int) -> Tiling:
    """The tiling of a weight of so many tiles, each of so many blocks."""
    return Tiling(_COLUMNS, _BLOCK, _STAGES, splits_of(tiles, blocks, _PROGRAMS, _SPLIT_BLOCKS))


class CudaFewBits(CudaLinear):
    """A weight [N, K] of few bits in groups of 32 inputs; bias [N] float32."""

    def __init__(self, weight: Tensor | FewBits, bias: Tensor | None, device: torch.device,
                 dtype: torch.dtype) -> None:
        if isinstance(weight, Tensor):
            weight = int4.quantise(weight.to(device))
        elif isinstance(weight, GroupedWeight) and not Form.has(weight):
            weight = weight.general()
        self.out_features, self.in_features = weight.shape if isinstance(weight, Mxfp4Weight) else weight.values.shape
        require(isinstance(weight, Int4Weight) or self.in_features % GROUP == 0, "whole groups", self.in_features)
        self.dtype, self.scale = dtype, None
        self.bias = None if bias is None else bias.to(device, dtype).float().contiguous()
        order = weight.order if isinstance(weight, Int4Weight) else None
        self._order = None if order is None else order.to(device, torch.int32)
        self.form = Form.of(weight)
        self.blocks = ceil_div(self.in_features, _BLOCK)
        self.tiles = ceil_div(self.out_features, _COLUMNS)
        self.weight = self._packed(weight, device)
        self.tiling = tiling_of(self.tiles, self.blocks)

    def _packed(self, weight: FewBits, device: torch.device) -> Tensor:
        """The tiles, int32 [tiles, size]. Padded inputs meet rows of 0, and padded groups have the scale 0."""
        size = self.blocks * self.form.record(_COLUMNS)
        if self.form.scales in _COMMON:
            size += ceil_div(self.blocks, 2) * _COLUMNS
        tiles = torch.empty(self.tiles, size, dtype=torch.int32, device=device)
        step = max(1, _CHUNK // (_COLUMNS * self.blocks * _BLOCK))
        for start in range(0, self.tiles, step):
            chosen = slice(start * _COLUMNS, (start + step) * _COLUMNS)
            tiles[start : start + step] = self._packed_tiles(weight.rows(chosen).to(device))
        return tiles

    def _packed_tiles(self, weight: FewBits) -> Tensor:
        """Some tiles."""
        values = weight.values
        tiles, bits = ceil_div(len(values), _COLUMNS), self.form.bits
        rows = tiles * _COLUMNS - len(values)
        padded = functional.pad(values, (0, self.blocks * _BLOCK - self.in_features, 0, rows))
        values = padded.view(tiles, _COLUMNS, self.blocks, 4, 16, 2).permute(0, 2, 1, 4, 3, 5).int()
        # [tiles, blocks, columns, words, groups, neighbours]
        if bits == 8:
            planes = _joined((values ^ 0x80).reshape(*values.shape[:4], 2, 2, 2), ((0, 16), (8, 24))).movedim(4, 2)
        else:
            planes = _joined(values & 15, tuple((4 * group, 4 * group + 16) for group in range(4)))
        records = [planes.flatten(2)]
        if bits == 5:
            upper = _joined(values >> 4, tuple((group, group + 4) for group in range(4)))
            records.append(upper.to(torch.uint8).flatten(2).view(torch.int32))
        if bits == 6:
            upper = _joined(values >> 4, tuple((2 * group, 2 * group + 8) for group in range(4)))
            records.append(upper.to(torch.int16).flatten(2).view(torch.int32))
        del values, planes
        records.append(self._scales(weight, tiles).flatten(2))
        packed = torch.cat(records, 2).flatten(1)
        if isinstance(weight, GroupedWeight) and weight.common is not None:
            common = self._by_column(weight.common.view(torch.int16).int() & 0xFFFF, tiles, ceil_div(self.blocks, 2))
            words = common[..., 0] | common[..., 1] << 16 if common.shape[-1] == 2 else common[..., 0]
            packed = torch.cat([packed, words.flatten(1)], 1)
        return packed

    def _scales(self, weight: FewBits, tiles: int) -> Tensor:
        """Words of scales [tiles, blocks, words, columns], see `jit_few_bits.scale_and_least`."""
        def spread(part: Tensor) -> Tensor:
            """[N, G, ...] as whole numbers [tiles, blocks, columns, 4, ...] below 65,536."""
            part = part.view(torch.int16) if part.dtype == torch.float16 else part
            padded = self._by_column(part.int(), tiles, 4 * self.blocks)
            return padded.reshape(tiles, self.blocks, 4, *padded.shape[2:]).movedim(2, 3)

        if isinstance(weight, Mxfp4Weight):
            first, second, third, fourth = spread(weight.exponents).unbind(3)
            return (first | second << 8 | third << 16 | fourth << 24)[:, :, None]
        scale = spread(weight.scale)
        if isinstance(weight, Int4Weight):
            if self.form.scales in (ZERO, SHARED):
                words = (scale & 0xFFFF | spread(weight.zero) << 16).movedim(3, 2)
                return words if self.form.scales == ZERO else words[:, :, :1]
            return _in_pairs(scale)
        least = None if weight.least is None else spread(weight.least)
        if self.form.scales == COMMON_LEAST:
            assert least is not None
            return _in_pairs(scale & 0xFF | least << 8)
        if self.form.scales == COMMON_HALVES:
            return _in_pairs(scale[..., 0] & 0xFF | scale[..., 1] << 8)
        if self.form.scales == HALVES:
            assert least is not None
            halves = scale[..., 0] & 0xFFFF | scale[..., 1] << 16
            return torch.cat([halves.movedim(3, 2), _in_pairs(least)], 2)
        return _in_pairs(scale) if least is None else (scale & 0xFFFF | least << 16).movedim(3, 2)

    def _by_column(self, part: Tensor, tiles: int, count: int) -> Tensor:
        """[N, C, ...] padded with zeros to [tiles, count, columns, ...]."""
        rows, columns, *more = part.shape
        padded = part.new_zeros(tiles * _COLUMNS, count, *more)
        padded[:rows, :columns] = part
        return padded.view(tiles, _COLUMNS, count, *more).movedim(1, 2)

    @property
    def fuses_gate(self) -> bool:
        return False

    @property
    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, None, self.bias

    @property
    def is_ordered(self) -> bool:
        """Whether the inputs are multiplied in another order."""
        return self._order is not None

    def options(self) -> dict[str, int]:
        return self.form.options()

    def rows_of(self, tile: int) -> int:
        return min(tile, _MOST_ROWS)

    def _multiply(self, x: Tensor, tile: int, sums: Tensor) -> None:
        rows, tile = len(x), self.rows_of(tile)
        jit_few_bits.few_bits_kernel[(ceil_div(rows, tile), self.tiles, self.splits)](
            self._ordered(x), self.weight, sums, rows, OUT=self.out_features, INNER=self.in_features,
            BLOCKS=self.blocks, ROWS=tile, COLUMNS=_COLUMNS, SPLITS=self.splits, STAGES=self.tiling.stages,
            STRIDE=sums.stride(1), num_warps=_WARPS, **self.form.registers(), **self.options(), **chained(x.device))

    def matmul(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(self.dtype)
        return functional.linear(self._ordered(x), self.dequantised(), bias)

    def _ordered(self, x: Tensor) -> Tensor:
        """The inputs in the order of the weight's columns."""
        return x if self._order is None else x.index_select(1, self._order)

    def dequantised(self) -> Tensor:
        """The numbers [N, K] that the weight stands for, in the model's dtype, with the columns in the weight's
        order."""
        out = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=self.weight.device)
        with on_device(out.device):
            jit_few_bits.dequantise_kernel[(ceil_div(self.out_features, _UNPACKED_ROWS), self.blocks)](
                self.weight, out, OUT=self.out_features, INNER=self.in_features, BLOCKS=self.blocks,
                COLUMNS=_COLUMNS, ROWS=_UNPACKED_ROWS, **self.options(), **UNFUSED)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        out = torch.empty(len(ids), self.in_features, dtype=self.dtype, device=self.weight.device)
        with on_device(out.device):
            jit_few_bits.table_rows_kernel[(len(ids), ceil_div(self.in_features, _TABLE_BLOCK))](
                ids, self.weight, out, INNER=self.in_features, BLOCKS=self.blocks, COLUMNS=_COLUMNS,
                BLOCK=_TABLE_BLOCK, **self.options(), **UNFUSED)
        return out

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.weight, self.bias, self._order) if part is not None)


class CudaStacked(CudaLinear):
    """Weights of unlike forms, one below another [N, K]: a launch for each. bias [N] float32."""

    def __init__(self, weights: Sequence[CudaFewBits], bias: Tensor | None) -> None:
        first = weights[0]
        require(len({weight.in_features for weight in weights}) == 1, "weights of as many inputs", first.in_features)
        self._weights, self.dtype, self.scale = tuple(weights), first.dtype, None
        self.bias = None if bias is None else bias.to(first.weight.device, first.dtype).float().contiguous()
        self.out_features, self.in_features = sum(weight.out_features for weight in weights), first.in_features
        self.tiling = tiling_of(sum(weight.tiles for weight in weights), first.blocks)
        for weight in weights:
            weight.tiling = self.tiling

    @property
    def fuses_gate(self) -> bool:
        return False

    def rows_of(self, tile: int) -> int:
        return self._weights[0].rows_of(tile)

    def _multiply(self, x: Tensor, tile: int, sums: Tensor) -> None:
        start = 0
        for weight in self._weights:
            weight._multiply(x, tile, sums[..., start : start + weight.out_features])
            start += weight.out_features

    def matmul(self, x: Tensor) -> Tensor:
        product = torch.cat([weight.matmul(x) for weight in self._weights], 1)
        return product if self.bias is None else product + self.bias.to(self.dtype)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self._weights) + (0 if self.bias is None else self.bias.nbytes)


def _joined(values: Tensor, shifts: tuple[tuple[int, int], ...]) -> Tensor:
    """Values [..., groups, 2] shifted left, and joined to one word each: int32 [...]."""
    words = torch.zeros_like(values[..., 0, 0])
    for group, pair in enumerate(shifts):
        for place, shift in enumerate(pair):
            words |= values[..., group, place] << shift
    return words


def _is_shared(part: Tensor) -> bool:
    """Whether the four groups of each block [N, G] have one number: files with groups of 128 inputs."""
    if part.shape[1] % 4:
        return False
    blocks = part.view(len(part), -1, 4)
    return bool((blocks == blocks[..., :1]).all())


def _in_pairs(numbers: Tensor) -> Tensor:
    """Numbers of 16 bits [tiles, blocks, columns, 4], two to a word: [tiles, blocks, 2, columns]."""
    return (numbers[..., ::2] & 0xFFFF | numbers[..., 1::2] << 16).movedim(3, 2)
