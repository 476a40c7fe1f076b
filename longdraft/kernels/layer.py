"""The layers of a decoder in terms of single operations. They define what the fused kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels.experts import experts_forward
from longdraft.kernels.interface import KV, AttentionOutput, Geometry, LayersKV, LayerWeights, Linear


class LayerOperations(Protocol):
    """The operations of a layer. See :class:`longdraft.kernels.interface.Kernels`."""

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput: ...


def layer_forward(ops: LayerOperations, x: Tensor, layer: LayerWeights, geometry: Geometry, cos: Tensor, sin: Tensor,
                  texts: Sequence[KV], parents: Tensor, source: Tensor | None = None) -> tuple[Tensor, AttentionOutput]:
    """Run rows x [R, hidden] of one or more texts through one layer. Fills the k and v of `texts`.

    source  [R, K], the input of queries, keys and values; None: x after the layer's first norm

    The remainder of a text is the map [H, D + 1, D + 1] of `LayersKV` here. Other arguments and the result are those of
    `longdraft.kernels.interface.Decoder.forward`, for a single layer.
    """
    heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise vectors of the weight's length, which may span the last two axes."""
        if weight is None:
            return x
        return ops.rms_norm(x.reshape(-1, len(weight)), weight, geometry.eps,
                            rounds_once=geometry.rounds_once).view(x.shape)

    def pre_norm(x: Tensor, weight: Tensor) -> Tensor:
        return x if geometry.post_norm else norm(x, weight)

    def add_residual(x: Tensor, output: Tensor, weight: Tensor) -> Tensor:
        output = norm(output, weight) if geometry.post_norm else output
        return x + (output if geometry.residual_factor == 1 else output * geometry.residual_factor)

    source = pre_norm(x, layer.attention_norm) if source is None else source
    qkv = ops.linear(source, layer.qkv).view(len(x), heads + 2 * kv_heads, dim)
    content = norm(qkv[:, :heads], layer.q_norm)
    if not layer.rotates:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    q = ops.rope(content, cos * geometry.query_factor, sin * geometry.query_factor)
    k, v = ops.rope(norm(qkv[:, heads : heads + kv_heads], layer.k_norm), cos, sin), qkv[:, heads + kv_heads :]
    outputs, start = [], 0
    for kv in texts:
        own = slice(start, start + len(kv.k))
        kv.k.copy_(k[own])
        kv.v.copy_(v[own])
        if kv.remainder is not None:
            remainder = torch.einsum("thd,hde->the", content[own].float(), kv.remainder[:, :-1]) + kv.remainder[:, -1]
            kv = kv._replace(remainder=remainder.contiguous())
        outputs.append(ops.attention(q[own], kv, parents[own], layer.window))
        start = own.stop
    attended = AttentionOutput(*(torch.cat(part) for part in zip(*outputs, strict=True)))._replace(content=content)
    x = add_residual(x, ops.linear(attended.output.flatten(1), layer.out), layer.attention_norm)
    return add_residual(x, _mlp(ops, pre_norm(x, layer.mlp_norm), layer), layer.mlp_norm), attended


def _mlp(ops: LayerOperations, x: Tensor, layer: LayerWeights) -> Tensor:
    """The output of a layer's MLP, or of its experts."""
    if layer.experts is not None:
        return experts_forward(ops, x, layer.experts)
    assert layer.gate_up is not None and layer.down is not None
    return ops.linear(ops.swiglu(ops.linear(x, layer.gate_up)), layer.down)


class LayerwiseDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`. Runs layer after layer, each by single operations."""

    def __init__(self, ops: LayerOperations, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        self._ops, self._layers, self._geometry = ops, layers, geometry

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        outputs = []
        for index, layer in enumerate(self._layers):
            self._tap(index, x, texts)
            x, output = layer_forward(self._ops, x, layer, self._geometry, cos, sin, [kv.layer(index) for kv in texts],
                                      parents)
            outputs.append(output)
        self._tap(len(self._layers), x, texts)
        return x, AttentionOutput(*(torch.stack(part) for part in zip(*outputs, strict=True)))

    @staticmethod
    def _tap(layer: int, x: Tensor, texts: Sequence[LayersKV]) -> None:
        for kv, rows in zip(texts, torch.split(x, [kv.k.shape[1] for kv in texts]), strict=True):
            kv.tap(layer, rows)
