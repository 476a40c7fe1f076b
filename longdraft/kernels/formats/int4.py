"""Weights as 4-bit integers: groups of 32 inputs with a scale and a zero point. All kernels use this definition.

    values, scale, zero = quantise(weight)
    weight[n, k] is about (values[n, k] - zero[n, g]) * scale[n, g]     with the group g = k // 32

The rows that a weight multiplies are quantised too: to int8, each group of 32 by itself, x[k] = whole[k] * step[g]
with step = largest magnitude / 127. Then

    product[n] = sum over g of  scale[n, g] * step[g] * (sum of values[n, k] whole[k]  -  zero[n, g] sum of whole[k])

The sums over k are exact integers, so they do not depend on the order of their terms or on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32
LEAST_MAGNITUDE = 2.0**-120  # of a group of inputs that is not 0
_HIGHEST = 15
_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a group's range: clipping outliers can lower the squared error
_CHUNK = 1 << 22  # weights that are held as float32 at a time


class Int4Weight(NamedTuple):
    """A weight [N, K] in groups g = k // 32. With an order, column k multiplies the input order[k]."""

    values: Tensor  # uint8 [N, K], 0 to 15
    scale: Tensor  # float16 [N, ceil(K / 32)]
    zero: Tensor  # uint8 [N, ceil(K / 32)], 0 to 16
    order: Tensor | None = None  # int32 [K], each input once; None: column k multiplies the input k

    @staticmethod
    def stacked(parts: Sequence[Int4Weight]) -> Int4Weight | None:
        """Weights one below another; None if their inputs are in different orders."""
        orders = [part.order for part in parts if part.order is not None]
        if orders and not (len(orders) == len(parts) and all(order.equal(orders[0]) for order in orders)):
            return None
        return Int4Weight(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]),
                          torch.cat([part.zero for part in parts]), orders[0] if orders else None)

    def to(self, device: torch.device) -> Int4Weight:
        """The weight on a device."""
        order = None if self.order is None else self.order.to(device)
        return Int4Weight(self.values.to(device), self.scale.to(device), self.zero.to(device), order)

    def rows(self, which: Tensor | slice) -> Int4Weight:
        """Some rows of the weight."""
        return Int4Weight(self.values[which], self.scale[which], self.zero[which], self.order)


def quantise(weight: Tensor) -> Int4Weight:
    """Quantise a weight [N, K] of any floating dtype. Of the clipping ratios each group takes the one with the least
    squared error. A group that is not finite gets the scale NaN, so that damaged weights end as NaN."""
    step = max(1, _CHUNK // weight.shape[1])
    packed = Int4Weight.stacked([_quantise(weight[start : start + step]) for start in range(0, len(weight), step)])
    assert packed is not None
    return packed


def _quantise(weight: Tensor) -> Int4Weight:
    groups = _groups(weight.float())  # [N, G, 32]
    most, least = groups.amax(2).clamp(min=0), groups.amin(2).clamp(max=0)
    best: tuple[Tensor, ...] | None = None
    for ratio in _RATIOS:
        clipped = _clipped(groups, least, most - least, ratio)
        if best is None:
            best = clipped
        else:
            is_better = clipped[3] < best[3]
            best = tuple(torch.where(is_better[..., None] if new.ndim == 3 else is_better, new, old)
                         for new, old in zip(clipped, best, strict=True))
    assert best is not None
    values, scale, zero, _ = best
    is_damaged = ~groups.isfinite().all(2)
    scale = scale.masked_fill(is_damaged, torch.nan)
    values, zero = values.masked_fill(is_damaged[..., None], 0), zero.masked_fill(is_damaged, 0)
    return Int4Weight(values.to(torch.uint8).flatten(1)[:, : weight.shape[1]].contiguous(), scale, zero.to(torch.uint8))


def _clipped(groups: Tensor, least: Tensor, width: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, scales, zero points and squared errors, with each group's range scaled by `ratio`."""
    factor = torch.tensor(ratio, dtype=torch.float32)
    scale = (width * factor / _HIGHEST).half()
    step = scale.float()
    is_used = step > 0
    divisor = torch.where(is_used, step, torch.inf)
    zero = (-(least * factor) / divisor).round().clamp(0, _HIGHEST)
    offset = (groups / divisor[..., None]).nan_to_num(0.0).clamp(-_HIGHEST - 1, _HIGHEST + 1).round()
    values = (offset + zero[..., None]).clamp(0, _HIGHEST)
    error = ((values - zero[..., None]) * step[..., None] - groups) ** 2
    while (half := error.shape[2] // 2):  # halves are added, as the compiled kernels do
        error = error[..., :half] + error[..., half:]
    return values, scale, zero, error[..., 0]


def dequantise(weight: Int4Weight) -> Tensor:
    """The weight [N, K] that the numbers stand for, float32."""
    offset = _groups(weight.values.float()) - weight.zero.float()[..., None]
    columns = (offset * weight.scale.float()[..., None]).flatten(1)[:, : weight.values.shape[1]]
    return columns if weight.order is None else columns[:, weight.order.long().argsort()]


def linear(x: Tensor, weight: Int4Weight) -> Tensor:
    """Rows x [R, K] float32 times the weight, float32 [R, N]: the slow twin of the compiled product.

    A row that is not finite in some group gives NaN.
    """
    whole, steps = quantised_rows(x if weight.order is None else x[:, weight.order.long()])
    values, zero = _groups(weight.values.double()), weight.zero.double()
    total = torch.zeros(len(x), len(weight.values), device=x.device)
    for group in range(whole.shape[1]):
        ours = whole[:, group]  # integers, and their sums: exact in float64
        sums = ours @ values[:, group].T - ours.sum(1, keepdim=True) * zero[:, group]
        total += sums.float() * steps[:, group, None] * weight.scale[:, group].float()
    return total


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, K] float32 as whole numbers [R, G, 32] float64 and steps [R, G], NaN for groups that are not finite.

    Groups below LEAST_MAGNITUDE are zeros: 127 / magnitude would not be finite.
    """
    rows = _groups(x)
    largest = rows.abs().amax(2)
    largest = torch.where(largest < LEAST_MAGNITUDE, 0.0, largest)
    inverse = torch.where(largest > 0, torch.tensor(127.0, device=x.device) / largest, 0.0)  # `127.0 / x` rounds twice
    is_finite = rows.isfinite().all(2)
    whole = torch.where(is_finite[..., None], (rows * inverse[..., None]).round(), 0.0).double()
    return whole, torch.where(is_finite, largest / 127.0, torch.nan)


def _groups(x: Tensor) -> Tensor:
    """[N, K] padded with zeros to [N, G, 32]."""
    return functional.pad(x, (0, -x.shape[1] % GROUP)).reshape(len(x), -1, GROUP)
