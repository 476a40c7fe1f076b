"""Quantised blocks of GGUF files as weights in groups, which kernels multiply as the whole numbers that they are.

Exact for the types of 32 numbers. The types of 256 numbers have scales that are products of two numbers: such a product
is rounded to float16, at most 0.05 % of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.groups import GroupedWeight
from longdraft.model.gguf import blocks as of
from longdraft.model.gguf.types import BlockType


class _Parts(NamedTuple):
    """The numbers of blocks: whole numbers [B, ...], scales [B, ...] and least values, both float32."""

    values: Tensor  # uint8, 0 to 15, or with 8 bits 128 more than the number
    scale: Tensor
    least: Tensor | None = None
    bits: int = 8
    halves: int = 1  # 2: a scale for 16 numbers


def grouped(rows: Tensor, kind: BlockType) -> GroupedWeight:
    """Rows of blocks [N, bytes] uint8 as a weight in groups. Q4_0 and MXFP4 have formats of their own."""
    parts = _PARTS[kind.name](rows.reshape(-1, kind.nbytes))
    scale = parts.scale.half()
    count = len(rows)
    shape = (count, -1, 2) if parts.halves == 2 else (count, -1)
    least = None if parts.least is None else parts.least.half().view(count, -1)
    weight = GroupedWeight(parts.values.view(count, -1), scale.view(shape), least, parts.bits)
    return weight.general() if kind.name in _GENERAL else weight


def _q8_0(blocks: Tensor) -> _Parts:
    return _Parts(blocks[:, 2:] ^ 128, of.half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Parts:
    return _Parts(of.nibbles(blocks[:, 4:], 16), of.half(blocks, 0), of.half(blocks, 2), 4)


def _q5_0(blocks: Tensor) -> _Parts:
    return _Parts((of.nibbles(blocks[:, 6:], 16) | of.fifth_bits(blocks[:, 2:6])) + 112, of.half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Parts:
    values = of.nibbles(blocks[:, 8:], 16) | of.fifth_bits(blocks[:, 4:8])
    return _Parts(values + 128, of.half(blocks, 0), of.half(blocks, 2))


def _q4_k(blocks: Tensor) -> _Parts:
    scales, minima = of.k_scales(blocks)
    return _Parts(of.nibbles(blocks[:, 16:], 32), scales, -minima, 4)


def _q5_k(blocks: Tensor) -> _Parts:
    scales, minima = of.k_scales(blocks)
    return _Parts(of.q5_k_values(blocks) + 128, scales, -minima)


def _q6_k(blocks: Tensor) -> _Parts:
    scales = of.half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return _Parts(of.q6_k_values(blocks) + 96, scales, halves=2)


def _q3_k(blocks: Tensor) -> _Parts:
    values, scales = of.q3_k_parts(blocks)
    return _Parts((values + 128).to(torch.uint8), scales, halves=2)


def _in_table(numbers: tuple[int, ...], packed: Tensor) -> Tensor:
    return torch.tensor([number + 128 for number in numbers], dtype=torch.uint8)[packed.int()]


def _iq4_nl(blocks: Tensor) -> _Parts:
    return _Parts(_in_table(of.IQ4, of.nibbles(blocks[:, 2:], 16)), of.half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> _Parts:
    return _Parts(_in_table(of.IQ4, of.nibbles(blocks[:, 8:], 16)), of.iq4_xs_scales(blocks))


_PARTS: dict[str, Callable[[Tensor], _Parts]] = {
    "Q8_0": _q8_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}
_GENERAL = ("Q5_1", "Q3_K", "Q5_K", "Q6_K")  # 8 bits with a least value, or with a scale for 16 numbers
