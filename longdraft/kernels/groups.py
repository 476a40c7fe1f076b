"""Weights of whole numbers in groups of 32 inputs with float16 scales: what files of other programs hold.

    weight[n, k] = (values[n, k] - offset) * scale[n, g] + least[n, g]     with the group g = k // 32

`offset` is 0 for 4 bits and 128 for 8. The rows that a weight multiplies are quantised as for int4 (int4.py): x[k] =
whole[k] * step[g]. Then for each group, in order, in float32 with fused multiplication and addition

    product[n] += (step[g] * sum of (values[n, k] - offset) whole[k]) * scale[n, g]
    product[n] += (step[g] * sum of whole[k]) * least[n, g]

The sums over k are exact integers. Where each half of a group has its own scale, the first line stands for both halves,
one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.int4 import GROUP, Int4Weight, quantised_rows

_OFFSET = {4: 0, 8: 128}


class GroupedWeight(NamedTuple):
    """A weight [N, K] in G = K / 32 groups. Compiled kernels have three kinds: 4 bits with least values; 8 bits without
    them; 8 bits with them and a scale for each half of a group."""

    values: Tensor  # uint8 [N, K]: 0 to 15, or 128 more than the number
    scale: Tensor  # float16 [N, G], or [N, G, 2] with a scale for each half of a group
    least: Tensor | None  # float16 [N, G]; None: 0
    bits: int  # 4 or 8

    @staticmethod
    def of_int4(weight: Int4Weight) -> GroupedWeight | None:
        """The same numbers with 8 bits; None for inputs in another order, and for groups that are not whole."""
        if weight.order is not None or weight.values.shape[1] % GROUP:
            return None
        values = weight.values + (_OFFSET[8] - weight.zero.repeat_interleave(GROUP, 1))
        return GroupedWeight(values, weight.scale, None, 8)

    @staticmethod
    def stacked(parts: Sequence[GroupedWeight]) -> GroupedWeight:
        """Weights one below another."""
        if len({(part.bits, part.has_halves, part.least is None) for part in parts}) > 1:
            parts = [part.general() for part in parts]
        least = [part.least for part in parts if part.least is not None]
        return GroupedWeight(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]),
                             torch.cat(least) if least else None, parts[0].bits)

    @property
    def has_halves(self) -> bool:
        return self.scale.ndim == 3

    def rows(self, which: Tensor) -> GroupedWeight:
        """Some rows of the weight."""
        least = None if self.least is None else self.least[which]
        return GroupedWeight(self.values[which], self.scale[which], least, self.bits)

    def columns(self, which: Tensor) -> GroupedWeight:
        """The weight with its columns in another order, in which whole groups move."""
        groups = which[::GROUP] // GROUP
        least = None if self.least is None else self.least[:, groups]
        return GroupedWeight(self.values[:, which], self.scale[:, groups], least, self.bits)

    def general(self) -> GroupedWeight:
        """The same numbers with 8 bits, a scale for each half and least values, which every weight can have."""
        scale = self.scale if self.has_halves else self.scale[..., None].expand(*self.scale.shape, 2)
        least = torch.zeros(self.scale.shape[:2], dtype=torch.float16) if self.least is None else self.least
        return GroupedWeight(self.values + (_OFFSET[8] - _OFFSET[self.bits]), scale, least, 8)


def dequantise(weight: GroupedWeight) -> Tensor:
    """The weight [N, K] that the numbers stand for, float32."""
    rows, columns = weight.values.shape
    parts = (weight.values.float() - _OFFSET[weight.bits]).view(*weight.scale.shape, -1)
    whole = (parts * weight.scale.float()[..., None]).view(rows, -1, GROUP)
    return (whole if weight.least is None else whole + weight.least.float()[..., None]).view(rows, columns)


def linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Rows x [R, K] float32 times the weight, float32 [R, N]: the slow twin of the compiled product."""
    whole, steps = quantised_rows(x)
    parts = 2 if weight.has_halves else 1
    width = GROUP // parts
    scale = weight.scale.float().view(len(weight.values), -1, parts)
    values = weight.values.double() - _OFFSET[weight.bits]
    total = torch.zeros(len(x), len(weight.values))
    for group in range(whole.shape[1]):
        ours, step = whole[:, group], steps[:, group, None]
        for part in range(parts):
            start = group * GROUP + part * width
            sums = ours[:, part * width : (part + 1) * width] @ values[:, start : start + width].T  # exact
            total += sums.float() * step * scale[:, group, part]
        if weight.least is not None:
            total += step * ours.sum(1, keepdim=True).float() * weight.least[:, group].float()
    return total
