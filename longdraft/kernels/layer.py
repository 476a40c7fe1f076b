"""One decoder layer, said in the operations of a set of kernels: the definition of what fused kernels compute."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longdraft.kernels.interface import KV, Attended, Geometry, LayerWeights, Linear


class Operations(Protocol):
    """What a layer is made of; see :class:`longdraft.kernels.interface.Kernels`."""

    def linear(self, x: Tensor, weight: Linear) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor: ...

    def swiglu(self, gate_up: Tensor) -> Tensor: ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> Attended: ...


def layer_forward(ops: Operations, x: Tensor, layer: LayerWeights, geometry: Geometry, cos: Tensor, sin: Tensor,
                  kv: KV, parents: Tensor, rest: Tensor | None = None) -> tuple[Tensor, Attended]:
    """Rows x [T, hidden] through one layer; fills kv.k and kv.v. `rest` [H, D + 1, D + 1] as in LayersKV."""
    heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim

    def norm(x: Tensor, weight: Tensor | None) -> Tensor:
        """Of the last axes, as many as the weight has numbers for."""
        if weight is None:
            return x
        return ops.rms_norm(x.reshape(-1, len(weight)), weight, geometry.eps,
                            rounds_once=geometry.rounds_once).view(x.shape)

    def read(x: Tensor, weight: Tensor) -> Tensor:
        return x if geometry.norms_follow else norm(x, weight)

    def join(x: Tensor, given: Tensor, weight: Tensor) -> Tensor:
        given = norm(given, weight) if geometry.norms_follow else given
        return x + (given if geometry.residual_factor == 1 else given * geometry.residual_factor)

    qkv = ops.linear(read(x, layer.attention_norm), layer.qkv).view(len(x), heads + 2 * kv_heads, dim)
    content = norm(qkv[:, :heads], layer.q_norm)
    if not layer.rotates:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    q = ops.rope(content, cos * geometry.query_factor, sin * geometry.query_factor)
    kv.k.copy_(ops.rope(norm(qkv[:, heads : heads + kv_heads], layer.k_norm), cos, sin))
    kv.v.copy_(qkv[:, heads + kv_heads :])
    if rest is not None:
        kv = kv._replace(rest=torch.einsum("thd,hde->the", content.float(), rest[:, :-1]) + rest[:, -1])
    attended = ops.attention(q, kv, parents, layer.window)._replace(content=content)
    x = join(x, ops.linear(attended.output.flatten(1), layer.out), layer.attention_norm)
    gate_up = ops.linear(read(x, layer.mlp_norm), layer.gate_up)
    return join(x, ops.linear(ops.swiglu(gate_up), layer.down), layer.mlp_norm), attended
