"""int8 quantisation of weights: symmetric, one scale per output channel, rounded to nearest. All kernels use it.

    values, scale = quantise(weight)        # weight[n] is approximately values[n] * scale[n]

The largest magnitude of a row becomes 127, so the error of a weight is at most half a scale. bfloat16 and float32
represent integers up to 127 exactly: kernels multiply the integers and scale the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MAX_VALUE = 127  # -128 is not used, so that the range is symmetric
_CHUNK_ELEMENTS = 1 << 22  # elements that are converted to float32 at a time, to limit memory


class Quantised(NamedTuple):
    """A quantised weight."""

    values: Tensor  # int8 [N, K]
    scale: Tensor  # float32 [N]

    @staticmethod
    def stacked(parts: Sequence[Quantised]) -> Quantised:
        """Weights one below another."""
        return Quantised(torch.cat([part.values for part in parts]), torch.cat([part.scale for part in parts]))

    def rows(self, which: Tensor) -> Quantised:
        """Some rows of the weight."""
        return Quantised(self.values[which], self.scale[which])


def quantise(weight: Tensor) -> Quantised:
    """Quantise a weight [N, K] of any floating dtype. Rows of zeros stay zero.

    A row with NaN or infinity gets the scale NaN, so that damaged weights lead to NaN and not to plausible text.
    """
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = weight[start : start + step].float()
        largest = rows.abs().amax(1)
        scales = torch.where(largest.isfinite(), largest / _MAX_VALUE, torch.nan)
        divisors = torch.where(scales > 0, scales, torch.inf)[:, None]  # a division by infinity gives 0, or NaN
        scale[start : start + step] = scales
        values[start : start + step] = (rows / divisors).nan_to_num_(0.0).round_().clamp_(-_MAX_VALUE, _MAX_VALUE)
    return Quantised(values, scale)
