"""Weights as int8: symmetric, one scale for each output channel, rounded to nearest. All kernels use this definition.

    values, scale = quantise(weight)        # weight[n] is about values[n] * scale[n]

The largest magnitude of a row becomes 127, so no weight is off by more than half a scale. A whole number up to 127
is exact in bfloat16 and float32: kernels multiply the values as such and scale the sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MOST = 127  # -128 is left out: symmetric
_AT_ONCE = 1 << 22  # weights that are held as float32 at a time


class Quantised(NamedTuple):
    values: Tensor  # int8 [N, K]
    scale: Tensor  # float32 [N]


def quantise(weight: Tensor) -> Quantised:
    """A weight [N, K] of any floating dtype. Rows of zeros stay so; a row with NaN or infinity gets the scale NaN,
    so that damaged weights end as NaN and not as plausible text."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step].float()
        largest = rows.abs().amax(1)
        scales = torch.where(largest.isfinite(), largest / _MOST, torch.nan)
        divisors = torch.where(scales > 0, scales, torch.inf)[:, None]  # by infinity: 0, or NaN
        scale[start : start + step] = scales
        values[start : start + step] = (rows / divisors).nan_to_num_(0.0).round_().clamp_(-_MOST, _MOST)
    return Quantised(values, scale)
