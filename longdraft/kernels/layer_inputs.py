"""Inputs of a token for each layer, besides the rows that leave the layer before (Gemma 4 E2B and E4B).

    p = (norm(projection x / sqrt(hidden)) + sqrt(P) table[token]) / sqrt(2)          [layers, P]

for the embedding x of the token. A layer multiplies its part of p with a gate of its own rows (`ExtraInput`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.interface import Kernels, LayerOperations
from longdraft.kernels.weights import Linear


class LayerInputs(NamedTuple):
    """The weights: table [V, L P], projection [L P, hidden], norm [P]."""

    table: Linear
    projection: Linear
    norm: Tensor

    def factors(self, hidden: int, dtype: torch.dtype) -> tuple[float, float, float]:
        """The factors of the projection, of the table (rounded, as that of embeddings is), and of their sum."""
        return hidden**-0.5, _rounded(len(self.norm) ** 0.5, dtype), 2**-0.5

    def of(self, kernels: Kernels, x: Tensor, tokens: Sequence[int], eps: float) -> Tensor:
        """The inputs [R, L P] of tokens with the embeddings x [R, hidden]."""
        of_table = kernels.embed(self.table, tokens) * self.factors(x.shape[1], kernels.dtype)[1]
        return self.combined(kernels, x, of_table, eps)

    def combined(self, ops: LayerOperations, x: Tensor, of_table: Tensor, eps: float) -> Tensor:
        """`of`, from the rows of the table times their factor."""
        of_projection, _, of_sum = self.factors(x.shape[1], x.dtype)
        projected = ops.linear(x, self.projection) * of_projection
        normed = ops.rms_norm(projected.view(-1, len(self.norm)), self.norm, eps, rounds_once=True).view(len(x), -1)
        return (normed + of_table) * of_sum


def _rounded(value: float, dtype: torch.dtype) -> float:
    """A number as the dtype has it. No tensor is read: a graph may be recorded."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
