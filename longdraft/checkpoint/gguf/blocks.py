"""The numbers that quantised blocks of GGUF files stand for, float32.

Each function takes blocks [B, bytes] uint8 and returns their values [B, numbers]. The steps of float32 arithmetic are
those of llama.cpp's own conversion, so the results are the same bits. `d` and `m` are float16 scales and minima; a
byte holds two whole numbers of 4 bits, the one of the earlier position in its low half.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longdraft.checkpoint.gguf.types import BlockType
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of FP4 (E2M1)
_CHUNK = 1 << 18  # numbers that are converted at a time: few enough for the processor's caches


def dequantise(rows: Tensor, kind: BlockType, out: Tensor) -> None:
    """Write the values of quantised rows [N, bytes] uint8 to out [N, K], of any floating dtype."""
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        part = rows[start : start + step]
        values = _VALUES[kind.name](part.reshape(-1, kind.nbytes))
        out[start : start + step] = values.view(len(part), -1)


def q4_0_parts(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The whole numbers [N, K] uint8, 0 to 15, and the scales [N, K / 32] float16 of rows of Q4_0 blocks."""
    blocks = rows.reshape(-1, 18)
    scales = blocks[:, :2].contiguous().view(torch.float16)
    return nibbles(blocks[:, 2:], 16).view(len(rows), -1), scales.view(len(rows), -1)


def half(blocks: Tensor, at: int) -> Tensor:
    """A float16 number of each block, as float32 [B, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor, run: int) -> Tensor:
    """Whole numbers of 4 bits [B, 2 * bytes]: of each `run` bytes first the low halves, then the high ones."""
    parts = packed.reshape(len(packed), -1, 1, run)
    return torch.cat([parts & 15, parts >> 4], 2).flatten(1)


def _bits(packed: Tensor, shifts: range, mask: int) -> Tensor:
    """[B, G, bytes] to [B, G, len(shifts), bytes]: each byte shifted right, and masked."""
    return packed[:, :, None] >> torch.tensor(shifts, dtype=torch.uint8)[:, None] & mask


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:], 16).float() - 8) * half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:], 16).float() * half(blocks, 0) + half(blocks, 2)


def fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of 4 bytes [B, 4] for i in 0..31, as 0 or 16."""
    return _bits(packed[:, None], range(8), 1)[:, 0].transpose(1, 2).reshape(len(packed), 32) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    values = nibbles(blocks[:, 6:], 16) | fifth_bits(blocks[:, 2:6])
    return (values.float() - 16) * half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    values = nibbles(blocks[:, 8:], 16) | fifth_bits(blocks[:, 4:8])
    return values.float() * half(blocks, 0) + half(blocks, 2)


def k_numbers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [B, 8] uint8, of 6 bits, of the groups of Q4_K and Q5_K blocks: the 12 bytes after d, dmin."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], 1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], 1)
    return scales, minima


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [B, 8, 1] of the groups of Q4_K and Q5_K blocks."""
    scales, minima = k_numbers(blocks)
    return (half(blocks, 0) * scales.float())[..., None], (half(blocks, 2) * minima.float())[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    return (nibbles(blocks[:, 16:], 32).view(-1, 8, 32).float() * scales - minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    return (q5_k_values(blocks).float() * scales - minima).flatten(1)


def q5_k_values(blocks: Tensor) -> Tensor:
    """Whole numbers [B, 8, 32] uint8 of Q5_K blocks."""
    fifth = _bits(blocks[:, None, 16:48], range(8), 1)[:, 0] << 4
    return nibbles(blocks[:, 48:], 32).view(-1, 8, 32) | fifth


def _q6_k(blocks: Tensor) -> Tensor:
    values = q6_k_values(blocks).float() - 32
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (values.view(-1, 16, 16) * scales[..., None]).flatten(1)


def q6_k_values(blocks: Tensor) -> Tensor:
    """Whole numbers [B, 256] uint8 of Q6_K blocks, 32 more than those that are scaled."""
    upper = _bits(blocks[:, 128:192].reshape(-1, 2, 32), range(0, 8, 2), 3).flatten(1)
    return nibbles(blocks[:, :128], 64) | upper << 4


def _q3_k(blocks: Tensor) -> Tensor:
    values, scales = q3_k_parts(blocks)
    return (values.view(-1, 16, 16).float() * scales[..., None]).flatten(1)


def q3_k_parts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers [B, 256] int16, -4 to 3, and scales [B, 16] float32 of Q3_K blocks."""
    lower = nibbles(blocks[:, 96:104], 8)
    upper = _bits(blocks[:, None, 104:108], range(0, 8, 2), 3).flatten(1)
    scales = half(blocks, 108) * ((lower | upper << 4).float() - 32)
    low = _bits(blocks[:, 32:96].reshape(-1, 2, 32), range(0, 8, 2), 3).flatten(1)
    third = _bits(blocks[:, None, :32], range(8), 1).flatten(1)
    return low.short() - (1 - third.short()) * 4, scales


def _table(numbers: tuple[int, ...], packed: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)[packed.int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _table(IQ4, nibbles(blocks[:, 2:], 16)) * half(blocks, 0)


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    """Scales [B, 8] float32 of IQ4_XS blocks."""
    upper = _bits(blocks[:, 2:4, None], range(0, 8, 2), 3).reshape(-1, 8)
    lower = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], 2).flatten(1)
    return half(blocks, 0) * ((lower | upper << 4).float() - 32)


def _iq4_xs(blocks: Tensor) -> Tensor:
    scales = iq4_xs_scales(blocks)
    values = _table(IQ4, nibbles(blocks[:, 8:], 16))
    return (values.view(-1, 8, 32) * scales[..., None]).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), exponent - 1 << 23)
    scale = torch.where(exponent == 255, torch.nan, bits.view(torch.float32))  # 255 is not a number
    return _table(_FP4, nibbles(blocks[:, 1:], 16)) * scale


def mxfp4_parts(blocks: Tensor) -> Mxfp4Weight:
    """A weight from its blocks [N, K / 32, 17]. Byte i of a block has the inputs i and i + 16."""
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    codes = torch.cat([part[..., ::2] | part[..., 1::2] << 4 for part in (low, high)], -1)
    return Mxfp4Weight(codes.flatten(1), blocks[..., 0])


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}
