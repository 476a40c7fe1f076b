"""Weights of whole numbers in groups of 32 inputs with scales: what files of other programs hold.

    weight[n, k] = (values[n, k] - offset) * scale[n, g] + least[n, g]     with the group g = k // 32

Scales and least values are float16, or products of a whole number and a float16 number that 8 groups share (exact in
float32). The rows that a weight multiplies are quantised as for int4 (int4.py): x[k] = whole[k] * step[g]. Then for
each group, in order, in float32 with fused multiplication and addition

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

from longdraft.kernels.formats.int4 import GROUP, Int4Weight, quantised_rows

COMMON_GROUPS = 8  # groups that share a scale
_LARGEST = 127  # magnitude of whole numbers of 8 bits
_OFFSET = {4: 0, 5: 16, 6: 32, 8: 128}  # by bits; 5 bits with least values: 0


class GroupedWeight(NamedTuple):
    """A weight [N, K] in G = K / 32 groups.

    values  uint8 [N, K], of so many bits: `offset` more than the number
    scale   float16 [N, G], or [N, G, 2] with a scale for each half of a group
    least   float16 [N, G]; None: 0
    bits    4, 5, 6 or 8
    common  float16 [N, G / 8, 1 or 2]: what `scale`, and `least` if there is one, are multiplied by. Both are int8
            then. None: by nothing

    Compiled kernels have seven kinds: 4 bits with least values, 5 bits, 8 bits, 8 bits with least values and halves;
    with common scales 4 and 5 bits with least values, and 6 bits with halves.
    """

    values: Tensor
    scale: Tensor
    least: Tensor | None
    bits: int
    common: Tensor | None = None

    @staticmethod
    def of_int4(weight: Int4Weight) -> GroupedWeight | None:
        """The same numbers with 8 bits; None for inputs in another order, and for groups that are not whole."""
        if weight.order is not None or weight.values.shape[1] % GROUP:
            return None
        values = weight.values + (_OFFSET[8] - weight.zero.repeat_interleave(GROUP, 1))
        return GroupedWeight(values, weight.scale, None, 8)

    @staticmethod
    def stacked(parts: Sequence[GroupedWeight]) -> GroupedWeight:
        """Weights one below another: of their kind, else with 8 bits, else of the general kind."""
        kinds = {part.kind for part in parts}
        if len(kinds) > 1:
            is_simple = all(kind[1:] == (False, True, True) for kind in kinds)
            parts = [part.in_bytes() if is_simple else part.general() for part in parts]
        least = [part.least for part in parts if part.least is not None]
        common = [part.common for part in parts if part.common is not None]
        return GroupedWeight(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]),
                             torch.cat(least) if least else None, parts[0].bits, torch.cat(common) if common else None)

    @property
    def kind(self) -> tuple[int, bool, bool, bool]:
        """Equal for weights that can be stacked as they are."""
        return self.bits, self.has_halves, self.least is None, self.common is None

    @property
    def has_halves(self) -> bool:
        return self.scale.ndim == 3

    @property
    def offset(self) -> int:
        return 0 if self.bits == 5 and self.least is not None else _OFFSET[self.bits]

    @property
    def scales(self) -> Tensor:
        """float32 [N, G] or [N, G, 2]."""
        scale = self.scale.float()
        if self.common is None:
            return scale
        factor = self.common[..., :1].float().repeat_interleave(COMMON_GROUPS, 1)
        return scale * (factor if self.has_halves else factor[..., 0])

    @property
    def leasts(self) -> Tensor | None:
        """float32 [N, G]; None: 0."""
        if self.least is None or self.common is None:
            return None if self.least is None else self.least.float()
        return self.least.float() * self.common[..., 1].float().repeat_interleave(COMMON_GROUPS, 1)

    def to(self, device: torch.device) -> GroupedWeight:
        """The weight on a device."""
        least, common = (None if part is None else part.to(device) for part in (self.least, self.common))
        return GroupedWeight(self.values.to(device), self.scale.to(device), least, self.bits, common)

    def rows(self, which: Tensor | slice) -> GroupedWeight:
        """Some rows of the weight."""
        least, common = (None if part is None else part[which] for part in (self.least, self.common))
        return GroupedWeight(self.values[which], self.scale[which], least, self.bits, common)

    def columns(self, which: Tensor) -> GroupedWeight:
        """The weight with its columns in another order, in which whole groups move. Common scales become the groups'
        own, rounded to float16."""
        if self.common is not None:
            return self.general().columns(which)
        groups = which[::GROUP] // GROUP
        least = None if self.least is None else self.least[:, groups]
        return GroupedWeight(self.values[:, which], self.scale[:, groups], least, self.bits)

    def in_bytes(self) -> GroupedWeight:
        """The same numbers with 8 bits."""
        return GroupedWeight(self.values + (_OFFSET[8] - self.offset), self.scale, self.least, 8, self.common)

    def general(self) -> GroupedWeight:
        """The same numbers with 8 bits, a scale for each half and least values, which every weight can have. Scales
        that are products are rounded to float16."""
        scale = self.scales.half()
        scale = scale if self.has_halves else scale[..., None].expand(*scale.shape, 2)
        leasts = self.leasts
        least = scale.new_zeros(scale.shape[:2]) if leasts is None else leasts.half()
        return GroupedWeight(self.values + (_OFFSET[8] - self.offset), scale, least, 8)


class BlockRows(NamedTuple):
    """Rows of quantised blocks [N, K], where a GGUF file has them. `GroupedWeight` has what they stand for.

    addresses  int64 [N], of the rows' first bytes
    types      uint8 [N], numbers of the rows' types as in ggml.h
    owners     the memory that the addresses point to
    """

    addresses: Tensor
    types: Tensor
    columns: int
    owners: tuple[Tensor, ...]

    @staticmethod
    def stacked(parts: Sequence[BlockRows]) -> BlockRows:
        """Rows one below another, of as many columns."""
        return BlockRows(torch.cat([part.addresses for part in parts]), torch.cat([part.types for part in parts]),
                         parts[0].columns, tuple(owner for part in parts for owner in part.owners))

    def rows(self, which: Tensor) -> BlockRows:
        """Some of the rows."""
        return BlockRows(self.addresses[which], self.types[which], self.columns, self.owners)


def quantise(weight: Tensor) -> GroupedWeight:
    """A weight [N, K] of any floating dtype in 8 bits, symmetric and rounded to nearest; K is a multiple of 32.

    A group with NaN or infinity gets the scale NaN.
    """
    parts = weight.float().view(len(weight), -1, GROUP)
    largest = parts.abs().amax(2)
    scale = torch.where(largest.isfinite(), largest / _LARGEST, torch.nan).half()
    divisors = torch.where(scale > 0, scale.float(), torch.inf)[..., None]  # a division by infinity gives 0, or NaN
    values = (parts / divisors).nan_to_num_(0.0).round_().clamp_(-_LARGEST, _LARGEST) + _OFFSET[8]
    return GroupedWeight(values.to(torch.uint8).view(weight.shape), scale, None, 8)


def dequantise(weight: GroupedWeight) -> Tensor:
    """The weight [N, K] that the numbers stand for, float32."""
    rows, columns = weight.values.shape
    parts = (weight.values.float() - weight.offset).view(*weight.scale.shape, -1)
    whole = (parts * weight.scales[..., None]).view(rows, -1, GROUP)
    return (whole if weight.leasts is None else whole + weight.leasts[..., None]).view(rows, columns)


def linear(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Rows x [R, K] float32 times the weight, float32 [R, N]: the slow twin of the compiled product."""
    whole, steps = quantised_rows(x)
    parts = 2 if weight.has_halves else 1
    width = GROUP // parts
    scale, least = weight.scales.view(len(weight.values), -1, parts), weight.leasts
    values = weight.values.double() - weight.offset
    total = torch.zeros(len(x), len(weight.values))
    for group in range(whole.shape[1]):
        ours, step = whole[:, group], steps[:, group, None]
        for part in range(parts):
            start = group * GROUP + part * width
            sums = ours[:, part * width : (part + 1) * width] @ values[:, start : start + width].T  # exact
            total += sums.float() * step * scale[:, group, part]
        if least is not None:
            total += step * ours.sum(1, keepdim=True).float() * least[:, group]
    return total
