"""One decoder layer, said in the operations of a set of kernels: the definition of what fused kernels compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels.interface import KV, AttentionOutput, Geometry, LayerWeights, Linear


class Operations(Protocol):
    """What a layer is made of; see :class:`longdraft.kernels.interface.Kernels`."""

    def linear(self, x: Tensor, weight: Linear) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput: ...


def layer_forward(ops: Operations, x: Tensor, layer: LayerWeights, geometry: Geometry, cos: Tensor, sin: Tensor,
                  texts: Sequence[KV], parents: Tensor) -> tuple[Tensor, AttentionOutput]:
    """Rows x [R, hidden] of texts through one layer; fills their k and v. `rest` is a map [H, D + 1, D + 1] here,
    as in LayersKV."""
    heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        """Of the last axes, as many as the weight has numbers for."""
        if weight is None:
            return x
        return ops.rms_norm(x.reshape(-1, len(weight)), weight, geometry.eps,
                            rounds_once=geometry.rounds_once).view(x.shape)

    def read(x: Tensor, weight: Tensor) -> Tensor:
        return x if geometry.post_norm else norm(x, weight)

    def join(x: Tensor, given: Tensor, weight: Tensor) -> Tensor:
        given = norm(given, weight) if geometry.post_norm else given
        return x + (given if geometry.residual_factor == 1 else given * geometry.residual_factor)

    qkv = ops.linear(read(x, layer.attention_norm), layer.qkv).view(len(x), heads + 2 * kv_heads, dim)
    content = norm(qkv[:, :heads], layer.q_norm)
    if not layer.rotates:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    q = ops.rope(content, cos * geometry.query_factor, sin * geometry.query_factor)
    k, v = ops.rope(norm(qkv[:, heads : heads + kv_heads], layer.k_norm), cos, sin), qkv[:, heads + kv_heads :]
    seen, start = [], 0
    for kv in texts:
        own = slice(start, start + len(kv.k))
        kv.k.copy_(k[own])
        kv.v.copy_(v[own])
        if kv.remainder is not None:
            remainder = torch.einsum("thd,hde->the", content[own].float(), kv.remainder[:, :-1]) + kv.remainder[:, -1]
            kv = kv._replace(remainder=remainder)
        seen.append(ops.attention(q[own], kv, parents[own], layer.window))
        start = own.stop
    attention_output = AttentionOutput(*(torch.cat(part) for part in zip(*seen, strict=True)))._replace(content=content)
    x = join(x, ops.linear(attention_output.output.flatten(1), layer.out), layer.attention_norm)
    gate_up = ops.linear(read(x, layer.mlp_norm), layer.gate_up)
    return join(x, ops.linear(ops.swiglu(gate_up), layer.down), layer.mlp_norm), attention_output
