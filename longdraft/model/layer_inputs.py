"""Inputs of a token for each layer, besides the rows that leave the layer before (Gemma 4 E2B and E4B).

    p = (norm(projection x / sqrt(hidden)) + sqrt(P) table[token]) / sqrt(2)          [layers, P]

for the embedding x of the token. A layer multiplies its part of p with a gate of its own rows (`ExtraInput`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels import Kernels, Linear

TABLE, PROJECTION, NORM = (f"model.{name}.weight" for name in (
    "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"))


class LayerInputs(NamedTuple):
    """The weights: table [V, L P], projection [L P, hidden], norm [P]."""

    table: Linear
    projection: Linear
    norm: Tensor

    def of(self, kernels: Kernels, x: Tensor, tokens: Sequence[int], eps: float) -> Tensor:
        """The inputs [R, L P] of tokens with the embeddings x [R, hidden]."""
        width = len(self.norm)
        projected = kernels.linear(x, self.projection) * x.shape[1] ** -0.5
        normed = kernels.rms_norm(projected.view(-1, width), self.norm, eps, rounds_once=True).view(len(x), -1)
        factor = float(torch.tensor(width**0.5, dtype=kernels.dtype))  # rounded as that of the embeddings
        return (normed + kernels.embed(self.table, tokens) * factor) * 2**-0.5
