"""Quantised blocks of GGUF files: the whole numbers and scales that they hold, and the numbers that these stand for.

A matrix whose numbers are kept becomes a weight in groups (`grouped`), which kernels multiply as whole numbers; of
others the float32 numbers are computed (`dequantise`), by the steps of llama.cpp's own conversion, so the results are
the same bits. `csrc/blocks.cpp` does what `grouped` does, straight from a file.

Each function of a type takes blocks [B, bytes] uint8. `d` and `m` are float16 scales and minima; a byte holds two whole
numbers of 4 bits, the one of the earlier position in its low half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.gguf.types import BlockType
from longdraft.kernels.formats import groups, mxfp4
from longdraft.kernels.formats.groups import GroupedWeight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_CHUNK = 1 << 18  # numbers that are converted at a time: few enough for the processor's caches


class _Parts(NamedTuple):
    """Fields of `GroupedWeight` by block: values, scales and least values [B, ...], common [B, 1 or 2]. Scales that are
    products of two numbers are float32 here."""

    values: Tensor
    scale: Tensor
    least: Tensor | None = None
    bits: int = 8
    common: Tensor | None = None
    has_halves: bool = False


def dequantise(rows: Tensor, kind: BlockType, out: Tensor) -> None:
    """Write the numbers of quantised rows [N, bytes] uint8 to out [N, K], of any floating dtype."""
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        part = rows[start : start + step]
        if kind.name == "MXFP4":
            numbers = mxfp4.dequantise(mxfp4_parts(part.reshape(len(part), -1, kind.nbytes)))
            out[start : start + step] = numbers + 0.0  # llama.cpp has no negative zeros
        else:
            out[start : start + step] = groups.dequantise(_weight(part, kind))


def grouped(rows: Tensor, kind: BlockType) -> GroupedWeight:
    """Rows of blocks [N, bytes] uint8 as a weight in groups. Q4_0 and MXFP4 have formats of their own.

    Exact but for two types: in Q3_K and IQ4_XS scales are products that are rounded to float16, at most 0.05 % of them;
    in matrices whose parts have different types all products are.
    """
    weight = _weight(rows, kind)
    if weight.scale.dtype == torch.float32:
        weight = weight._replace(scale=weight.scale.half())
    return weight.general() if kind.name in _GENERAL else weight


def _weight(rows: Tensor, kind: BlockType) -> GroupedWeight:
    parts = _PARTS[kind.name](rows.reshape(-1, kind.nbytes))
    count = len(rows)
    least = None if parts.least is None else parts.least.reshape(count, -1)
    common = None if parts.common is None else parts.common.reshape(count, -1, parts.common.shape[1])
    scale = parts.scale.reshape((count, -1, 2) if parts.has_halves else (count, -1))
    return GroupedWeight(parts.values.reshape(count, -1), scale, least, parts.bits, common)


def q4_0_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The whole numbers [N, K] uint8, 0 to 15, and the scales [N, K / 32] float16 of rows of Q4_0 blocks."""
    blocks = rows.reshape(-1, 18)
    return _nibbles(blocks[:, 2:], 16).view(len(rows), -1), _half(blocks, 0).view(len(rows), -1)


def mxfp4_parts(blocks: Tensor) -> Mxfp4Weight:
    """A weight from its blocks [N, K / 32, 17]. Byte i of a block has the inputs i and i + 16."""
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    codes = torch.cat([part[..., ::2] | part[..., 1::2] << 4 for part in (low, high)], -1)
    return Mxfp4Weight(codes.flatten(1), blocks[..., 0])


def _half(blocks: Tensor, *offsets: int) -> Tensor:
    """float16 numbers [B, offsets] of each block."""
    return torch.cat([blocks[:, at : at + 2].contiguous().view(torch.float16) for at in offsets], 1)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Whole numbers of 4 bits [B, 2 * bytes]: of each `run` bytes first the low halves, then the high ones."""
    parts = packed.reshape(len(packed), -1, 1, run)
    return torch.cat([parts & 15, parts >> 4], 2).flatten(1)


def _bits(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """[B, G, bytes] to [B, G, len(shifts), bytes]: each byte shifted right, and masked."""
    return packed[:, :, None] >> torch.tensor(shifts, dtype=torch.uint8, device=packed.device)[:, None] & mask


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of 4 bytes [B, 4] for i in 0..31, as 0 or 16."""
    return _bits(packed[:, None], range(8), 1)[:, 0].transpose(1, 2).reshape(len(packed), 32) << 4


def _in_table(packed: Tensor) -> Tensor:
    """The numbers of IQ4 that 4 bits stand for, 128 more."""
    return torch.tensor([number + 128 for number in _IQ4], dtype=torch.uint8, device=packed.device)[packed.int()]


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] + 128, _half(blocks, 0))  # as ^ 128, and faster


def _q4_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 2:], 16) + (128 - 8), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2), 4)


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(_nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None, 5)


def _q5_1(blocks: Tensor) -> _Parts:
    values = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return _Parts(values + 128, _half(blocks, 0), _half(blocks, 2))


def _k_parts(blocks: Tensor, values: Tensor, bits: int) -> _Parts:
    """Q4_K and Q5_K: scales and minima of 6 bits for 8 groups, in the 12 bytes after d and the common minimum."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], 1).view(torch.int8)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], 1).view(torch.int8)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float16, device=blocks.device)
    return _Parts(values, scales, minima, bits, _half(blocks, 0, 2) * signs)


def _q4_k(blocks: Tensor) -> _Parts:
    return _k_parts(blocks, _nibbles(blocks[:, 16:], 32), 4)


def _q5_k(blocks: Tensor) -> _Parts:
    fifth = _bits(blocks[:, None, 16:48], range(8), 1)[:, 0] << 4
    return _k_parts(blocks, _nibbles(blocks[:, 48:], 32).view(-1, 8, 32) | fifth, 5)


def _q6_k(blocks: Tensor) -> _Parts:
    upper = _bits(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).flatten(1)
    values = _nibbles(blocks[:, :128], 64) | upper << 4
    return _Parts(values, blocks[:, 192:208].view(torch.int8), None, 6, _half(blocks, 208), True)


def _q3_k(blocks: Tensor) -> _Parts:
    lower = _nibbles(blocks[:, 96:104], 8)
    upper = _bits(blocks[:, None, 104:108], range(0, 8, 2), 3).flatten(1)
    scales = _half(blocks, 108).float() * ((lower | upper << 4).float() - 32)
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).flatten(1)
    third = _bits(blocks[:, None, :32], range(8), 1).flatten(1)
    return _Parts(low + third * 4 + (128 - 4), scales, has_halves=True)


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _Parts(_in_table(_nibbles(blocks[:, 2:], 16)), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> _Parts:
    upper = _bits(blocks[:, 2:4, None], range(0, 8, 2), 3).reshape(-1, 8)
    lower = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).flatten(1)
    scales = _half(blocks, 0).float() * ((lower | upper << 4).float() - 32)
    return _Parts(_in_table(_nibbles(blocks[:, 8:], 16)), scales)


_PARTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}
_GENERAL = ("Q5_1", "Q3_K")  # 8 bits with a least value, or with a scale for 16 numbers
