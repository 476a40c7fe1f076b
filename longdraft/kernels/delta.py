"""Gated delta nets: layers with a state of fixed size in place of attention (Yang et al. 2024, arXiv 2412.06464).

A row's q, k and v pass a convolution over the last rows of its path, and SiLU. Each value head has a state S [Dk, Dv]:

    S = exp(g) S;   S = S + k (beta (v - k S));   output = q S

with g = decay * softplus(a + bias) and beta = sigmoid(b) of the row, and q and k of length 1 (q divided by sqrt(Dk)).
The output is normalised for each head and multiplied by silu(z).

A forward keeps no state for each row. It keeps the inputs of the rows, and the state after the last one. To commit
other rows, the rule is applied to their inputs again, which gives the same bits. So trees and chains cost the same.

Axes: R rows, T rows of one text, Hk key heads, Hv value heads, Dk and Dv their dimensions, C = 2 Hk Dk + Hv Dv channels
of the convolution, K its width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

_L2_EPS = 1e-6  # of the lengths of q and k


class DeltaShape(NamedTuple):
    """Key heads, value heads (a multiple of them), their dimensions, and the width of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        """C: q, k and v of a row."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of v, of z and of the output of a row."""
        return self.value_heads * self.value_dim


class DeltaWeights(NamedTuple):
    """The weights of a delta layer, besides its matrices.

    conv   [K, C] float32: the factor of the row itself is the last one
    decay  [Hv] float32: the factor of softplus in g; negative
    bias   [Hv] float32, added to a
    norm   [Dv] float32, of each output head
    eps    of that norm
    """

    shape: DeltaShape
    conv: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float


class DeltaState(NamedTuple):
    """The state of a delta layer after the rows of a text, of any number.

    history  [K - 1, C] in the model's dtype: the inputs of the convolution of the last rows, oldest first
    matrix   float32: S of each value head, in the layout of the kernels
    """

    history: Tensor
    matrix: Tensor

    @property
    def nbytes(self) -> int:
        return self.history.nbytes + self.matrix.nbytes

    def copy_from(self, other: DeltaState) -> None:
        self.history.copy_(other.history)
        self.matrix.copy_(other.matrix)


class DeltaRows(NamedTuple):
    """One text's rows in one delta layer.

    before  the state that the rows continue; it is not changed
    after   filled with the state after the last row and its path
    mixed   [T, C]: q, k and v before the convolution
    gates   [T, 2 Hv] float32: b and a
    """

    before: DeltaState
    after: DeltaState
    mixed: Tensor
    gates: Tensor


@runtime_checkable
class AppliesPaths(Protocol):
    """Kernels that apply the rule to a path of all layers at once."""

    def states_after(self, layers: Sequence[DeltaWeights], rows: Sequence[DeltaRows], path: Sequence[int],
                      after: Sequence[DeltaState]) -> bool:
        """Fill `after` with the states after these rows of each layer, the first of which continues `before`.

        False, and nothing is done, for layers that are not computed together.
        """


def delta_rule(weights: DeltaWeights, rows: DeltaRows, z: Tensor | None, parents: Sequence[int]) -> Tensor | None:
    """The rule in plain PyTorch, row after row, with a state [Hv, Dk, Dv] for each row of the text.

    z        [T, Hv Dv]; None: only the state is wanted
    parents  [T] as for `Kernels.attention`

    Returns the layer's rows [T, Hv Dv] in the dtype of z, or None.
    """
    shape, dtype = weights.shape, rows.mixed.dtype
    states: list[Tensor] = []
    histories: list[Tensor] = []
    outputs = []
    for row, parent in enumerate(parents):
        history, state = (histories[parent], states[parent]) if parent >= 0 else rows.before
        window = torch.cat([history, rows.mixed[row : row + 1]])  # [K, C]
        q, k, v = _convolved(weights, window)
        beta = rows.gates[row, : shape.value_heads].sigmoid()
        rate = weights.decay * functional.softplus(rows.gates[row, shape.value_heads :] + weights.bias)
        state = state * rate.exp()[:, None, None]
        change = (v - (state * k[:, :, None]).sum(1)) * beta[:, None]
        state = state + k[:, :, None] * change[:, None]
        histories.append(window[1:])
        states.append(state)
        if z is not None:
            outputs.append(_gated_norm(weights, (state * q[:, :, None]).sum(1).to(dtype), z[row].clone()))
    rows.after.copy_from(DeltaState(histories[-1], states[-1]))
    return None if z is None else torch.stack(outputs)


def _convolved(weights: DeltaWeights, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [Hv, Dk] and v [Hv, Dv] float32 of the last row of a window [K, C]."""
    heads, value_heads, key_dim, value_dim, _ = weights.shape
    total = weights.conv[0] * window[0].float()
    for factor, channel in zip(weights.conv[1:], window[1:].float(), strict=True):
        total = total + factor * channel
    active = functional.silu(total.to(window.dtype).float()).to(window.dtype).float()
    q, k, v = torch.split(active, [heads * key_dim, heads * key_dim, value_heads * value_dim])

    def unit(x: Tensor) -> Tensor:
        x = x.view(heads, key_dim)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
        return x.repeat_interleave(value_heads // heads, 0)

    return unit(q) / math.sqrt(key_dim), unit(k), v.view(value_heads, value_dim)


def _gated_norm(weights: DeltaWeights, output: Tensor, z: Tensor) -> Tensor:
    """The RMS norm of each head of a row [Hv, Dv], times silu(z) [Hv Dv]: a row [Hv Dv]."""
    x = output.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + weights.eps)
    x = (weights.norm * x.to(output.dtype).float()).to(output.dtype).float()
    return (x.flatten() * functional.silu(z.float())).to(output.dtype)
