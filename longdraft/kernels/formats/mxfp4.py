"""Weights in MXFP4: numbers of 4 bits, and a power of two for each group of 32 inputs (OCP Microscaling 1.0, 2023).

    weight[n, 32 g + i] = FP4[code[n, 32 g + i]] * 2^(exponent[n, g] - 127)

bfloat16 and float32 hold these products exactly. Kernels that keep the codes in memory give the bits of kernels that
multiply the numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
_NO_NUMBER = 255  # the exponent of a group that holds none
_LEAST, _MOST = 2, 252  # exponents with which every number is a normal bfloat16


class Mxfp4Weight(NamedTuple):
    """A weight [N, K] in groups of 32 inputs.

    codes      uint8 [N, K / 2]: of input 2 i in the low four bits, and of input 2 i + 1 in the high ones
    exponents  uint8 [N, K / 32]
    """

    codes: Tensor
    exponents: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), 2 * self.codes.shape[1]

    @property
    def values(self) -> Tensor:
        """The codes one by one, uint8 [N, K]."""
        return torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)

    def to(self, device: torch.device) -> Mxfp4Weight:
        """The weight on a device."""
        return Mxfp4Weight(self.codes.to(device), self.exponents.to(device))

    def rows(self, which: Tensor | slice) -> Mxfp4Weight:
        """Some rows of the weight."""
        return Mxfp4Weight(self.codes[which], self.exponents[which])

    @property
    def is_normal(self) -> bool:
        """Whether all numbers are normal, so that kernels may multiply by adding exponents."""
        low, high = self.exponents.aminmax()
        return int(low) >= _LEAST and int(high) <= _MOST


def dequantise(weight: Mxfp4Weight) -> Tensor:
    """The numbers [N, K], float32. NaN in groups whose exponent is none."""
    exponents = weight.exponents
    values = torch.tensor([*_FP4, *(-value for value in _FP4)], device=exponents.device)
    numbers = values[weight.values.long()].view(*exponents.shape, GROUP)
    powers = torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.to(torch.int32) - 127)
    return (numbers * powers.masked_fill(exponents == _NO_NUMBER, torch.nan)[..., None]).flatten(1)
