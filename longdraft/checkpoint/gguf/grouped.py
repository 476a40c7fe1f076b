"""Quantised blocks of GGUF files as weights in groups, which kernels multiply as the whole numbers that they are.

Exact but for two types: in Q3_K and IQ4_XS products of two scales are rounded to float16, at most 0.05 % of them; in
matrices whose parts have different types all products are. `csrc/blocks.cpp` does the same, straight from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.gguf import blocks as of
from longdraft.checkpoint.gguf.types import BlockType
from longdraft.kernels.formats.groups import GroupedWeight


class _Parts(NamedTuple):
    """Fields of `GroupedWeight` by block: values and scales [B, ...], common [B, 1 or 2]."""

    values: Tensor
    scale: Tensor
    least: Tensor | None = None
    bits: int = 8
    common: Tensor | None = None
    has_halves: bool = False


def grouped(rows: Tensor, kind: BlockType) -> GroupedWeight:
    """Rows of blocks [N, bytes] uint8 as a weight in groups. Q4_0 and MXFP4 have formats of their own."""
    parts = _PARTS[kind.name](rows.reshape(-1, kind.nbytes))
    count = len(rows)
    least = None if parts.least is None else parts.least.reshape(count, -1)
    common = None if parts.common is None else parts.common.reshape(count, -1, parts.common.shape[1])
    scale = parts.scale.reshape((count, -1, 2) if parts.has_halves else (count, -1))
    weight = GroupedWeight(parts.values.reshape(count, -1), scale, least, parts.bits, common)
    return weight.general() if kind.name in _GENERAL else weight


def _half(blocks: Tensor, *places: int) -> Tensor:
    """float16 numbers [B, places] of each block."""
    return torch.cat([blocks[:, at : at + 2].contiguous().view(torch.float16) for at in places], 1)


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] ^ 128, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(of.nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2), 4)


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts(of.nibbles(blocks[:, 6:], 16) | of.fifth_bits(blocks[:, 2:6]), _half(blocks, 0), None, 5)


def _q5_1(blocks: Tensor) -> _Parts:
    values = of.nibbles(blocks[:, 8:], 16) | of.fifth_bits(blocks[:, 4:8])
    return _Parts(values + 128, _half(blocks, 0), _half(blocks, 2))


def _k_parts(blocks: Tensor, values: Tensor, bits: int) -> _Parts:
    scales, minima = (numbers.view(torch.int8) for numbers in of.k_numbers(blocks))  # 6 bits
    return _Parts(values, scales, minima, bits, _half(blocks, 0, 2) * torch.tensor([1.0, -1.0], dtype=torch.float16))


def _q4_k(blocks: Tensor) -> _Parts:
    return _k_parts(blocks, of.nibbles(blocks[:, 16:], 32), 4)


def _q5_k(blocks: Tensor) -> _Parts:
    return _k_parts(blocks, of.q5_k_values(blocks), 5)


def _q6_k(blocks: Tensor) -> _Parts:
    return _Parts(of.q6_k_values(blocks), blocks[:, 192:208].view(torch.int8), None, 6, _half(blocks, 208), True)


def _q3_k(blocks: Tensor) -> _Parts:
    values, scales = of.q3_k_parts(blocks)
    return _Parts((values + 128).to(torch.uint8), scales.half(), has_halves=True)


def _in_table(numbers: tuple[int, ...], packed: Tensor) -> Tensor:
    return torch.tensor([number + 128 for number in numbers], dtype=torch.uint8)[packed.int()]


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _Parts(_in_table(of.IQ4, of.nibbles(blocks[:, 2:], 16)), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> _Parts:
    return _Parts(_in_table(of.IQ4, of.nibbles(blocks[:, 8:], 16)), of.iq4_xs_scales(blocks).half())


_PARTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": _q8_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}
_GENERAL = ("Q5_1", "Q3_K")  # 8 bits with a least value, or with a scale for 16 numbers
