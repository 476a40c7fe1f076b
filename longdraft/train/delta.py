"""The gated delta rule over whole sequences with gradients, for the training of hybrids (longdraft/kernels/delta.py).

Token by token, a sequence is thousands of small operations. Here the rows of a chunk are computed together (the WY form
of Yang et al. 2024, arXiv 2406.06484, with decays as in arXiv 2412.06464). With c the sum of g from the chunk's start,
a row's change of the state is u with

    (I + A) u = beta (v - exp(c) k S),     A[i, j] = beta[i] exp(c[i] - c[j]) (k[i] k[j]) for j < i

S is the state before the chunk. Only S goes from chunk to chunk, in a loop of three products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.train.settings import ATTENTION_EVERY, LmSettings

CHUNK = 32  # rows; a triangular system of this size is solved for each chunk and head
_L2_EPS = 1e-6  # of the lengths of q and k, as in the kernels


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """Outputs [B, H, T, Dv] float32 of rows that continue a state of zeros.

    q, k  [B, H, T, Dk] float32, of length 1, q divided by sqrt(Dk)
    v     [B, H, T, Dv] float32
    g, beta  [B, H, T] float32; g is at most 0

    Equal to the rule token by token up to rounding.
    """
    batch, heads, length, _ = v.shape
    chunk = min(chunk, length)
    # Rows of zeros after the end write nothing: their beta is 0.
    q, k, v, g, beta = (
        functional.pad(x, (0,) * (2 * x.ndim - 6) + (0, -length % chunk)).reshape(batch, heads, -1, chunk, *x.shape[3:])
        for x in (q, k, v, g, beta))
    to_start = g.cumsum(-1)  # c [B, H, N, chunk]
    decay = (to_start[..., :, None] - to_start[..., None, :]).tril().exp()  # above the diagonal, exp would overflow
    grown = to_start.exp()[..., None]
    system = (k * beta[..., None]) @ k.mT * decay
    wanted = torch.cat([v, k * grown], -1) * beta[..., None]
    # u = first - second @ S
    first, second = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], -1)
    to_end = (to_start[..., -1:] - to_start).exp()[..., None]
    states, changes = _states(first, second, (k * to_end).mT, grown[..., -1, :])
    output = (q * grown) @ states + (q @ k.mT * decay).tril() @ changes
    return output.reshape(batch, heads, -1, output.shape[-1])[:, :, :length]


def _states(first: Tensor, second: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk [B, H, N, Dk, Dv], and the changes u [B, H, N, chunk, Dv].

    keys   [B, H, N, Dk, chunk], each with the decay from its row to the chunk's end
    decay  [B, H, N, 1] of a whole chunk
    """
    state = first.new_zeros(*keys.shape[:2], keys.shape[3], first.shape[-1])
    states, changes = [], []
    # `unbind` has one backward for all chunks; an index would fill a tensor of zeros for each.
    for add, take, key, factor in zip(*(x.unbind(2) for x in (first, second, keys, decay)), strict=True):
        states.append(state)
        changes.append(add - take @ state)
        state = state * factor[..., None] + key @ changes[-1]
    return torch.stack(states, 2), torch.stack(changes, 2)


def new_hybrid(settings: LmSettings, sizes: dict[str, Any]) -> Any:
    """A model of Qwen3.5's kind with random weights and these further `sizes`.

    The decays begin as in the reference training of gated delta nets: rates of 0.001 to 0.1 for each token, times up to
    16. `transformers` would begin near 1.3 times up to 16, with which most heads forget the row before.
    """
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads, size = settings.num_heads, settings.hidden_size // settings.num_heads
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
        **sizes, head_dim=size, linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=size,
        linear_value_head_dim=size, full_attention_interval=ATTENTION_EVERY,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta, "partial_rotary_factor": 0.25}))
    for layer in _delta_layers(model):
        rate = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        layer.dt_bias.data.copy_(rate.expm1().log())  # the inverse of softplus
    return model


def _delta_layers(model: nn.Module) -> Iterator[Any]:
    """The delta layers of a `transformers` model of Qwen3.5's kind."""
    for module in model.modules():
        layer = getattr(module, "linear_attn", None)
        if layer is not None and hasattr(layer, "in_proj_qkv"):
            yield layer


def use_chunks(model: Any) -> Any:
    """Let the delta layers of a `transformers` model of Qwen3.5's kind compute as here. Returns the model."""
    for layer in _delta_layers(model):
        layer.forward = partial(_delta_layer, layer)
    return model


def _delta_layer(layer: Any, hidden_states: Tensor, **given: Any) -> Tensor:
    """The rows [B, T, hidden] of a delta layer, of whole texts without padding."""
    mixed = functional.conv1d(layer.in_proj_qkv(hidden_states).mT, layer.conv1d.weight, groups=layer.conv_dim,
                              padding=layer.conv_kernel_size - 1)[..., : hidden_states.shape[1]]
    mixed = functional.silu(mixed)
    z = layer.in_proj_z(hidden_states)
    b, a = layer.in_proj_b(hidden_states), layer.in_proj_a(hidden_states)
    with torch.autocast(mixed.device.type, enabled=False):  # the rule is float32 in every dtype
        q, k, v = (part.float().reshape(len(part), -1, size, part.shape[2]).mT for part, size in zip(
            torch.split(mixed, [layer.key_dim, layer.key_dim, layer.value_dim], 1),
            (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim), strict=True))
        each = layer.num_v_heads // layer.num_k_heads
        q, k = (_unit(x).repeat_interleave(each, 1) if each > 1 else _unit(x) for x in (q, k))
        rate = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias)
        rows = chunked_delta_rule(q / math.sqrt(layer.head_k_dim), k, v, rate.mT, b.float().sigmoid().mT)
    rows = layer.norm(rows.transpose(1, 2).to(z.dtype), z.unflatten(-1, (-1, layer.head_v_dim)))
    return layer.out_proj(rows.flatten(2))  # type: ignore[no-any-return]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
