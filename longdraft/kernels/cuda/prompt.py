"""A chunk of a prompt: the library's matrix products and flash attention, which many rows make worth while.

Its results depend on how many rows there are; every run reads a prompt in the same chunks. Only the last rows'
attention is told of (drafters ask for no others): they go through the kernels of few rows, which give the log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.store import CudaStore
from longdraft.kernels.interface import KV, AttentionOutput, LayersKV, Linear
from longdraft.kernels.layer import layer_forward

if TYPE_CHECKING:
    from longdraft.kernels.cuda.decoder import CudaDecoder
    from longdraft.kernels.cuda.kernels import CudaKernels

TOLD = 128  # last rows of a chunk


class Operations:
    """A layer's operations for a chunk that follows a store's positions."""

    def __init__(self, kernels: CudaKernels) -> None:
        self._kernels = kernels
        self.rms_norm, self.swiglu, self.rope = kernels.rms_norm, kernels.swiglu, kernels.rope

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        assert isinstance(weight, CudaLinear)
        return weight.library(x)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        store, length, rows = kv.store, kv.length, len(q)
        assert isinstance(store, CudaStore)
        store.write(length, kv.k, kv.v)
        told = min(TOLD, rows)
        first = rows - told
        tail = KV(store, length + first, kv.k[first:], kv.v[first:])
        chain = torch.arange(-1, told - 1, dtype=torch.int32)
        last = self._kernels.attention(q[first:].contiguous(), tail, chain, window)
        if not first:
            return last
        output = torch.cat([_flash(q[:first], store, length, window), last.output])
        lse = torch.cat([torch.full_like(last.lse[:1], torch.nan).expand(first, -1), last.lse])
        return AttentionOutput(q, output, lse, q)


def _flash(q: Tensor, store: CudaStore, length: int, window: int) -> Tensor:
    """Rows q [T, H, D] of a chain behind `length` positions, whose own keys and values the store holds already."""
    rows, heads, _ = q.shape
    end = length + rows
    first = max(0, length + 1 - window) if window else 0
    group = heads // store.heads
    k, v = (part.repeat_interleave(group, 0)[None] for part in _held(store, first, end))
    queries = q.transpose(0, 1)[None]
    if not window:
        mixed = functional.scaled_dot_product_attention(queries, k, v, causal_lower_right(rows, end))
    else:
        own = torch.arange(length, end, device=q.device)[:, None]
        position = torch.arange(first, end, device=q.device)[None]
        seen = (position <= own) & (position > own - window)
        mixed = functional.scaled_dot_product_attention(queries, k, v, seen)
    return mixed[0].transpose(0, 1).contiguous()


def _held(store: CudaStore, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, N, D] of positions first .. end, in the model's dtype."""
    k, v = (part[:, first:end].to(store.dtype) for part in (store.k, store.v))
    if store.is_scaled:
        k, v = ((part.float() * scale[:, first:end, None]).to(store.dtype)
                for part, scale in ((k, store.k_scale), (v, store.v_scale)))
    return k, v


def forward(decoder: CudaDecoder, x: Tensor, cos: Tensor, sin: Tensor, kv: LayersKV,
            parents: Tensor) -> tuple[Tensor, AttentionOutput]:
    """`CudaDecoder.forward` of a chunk."""
    ops = Operations(decoder.kernels)
    told = min(TOLD, len(x))
    attention_output = []
    for index, layer in enumerate(decoder.layers):
        x, mixed = layer_forward(ops, x, layer, decoder.geometry, cos, sin, [kv.layer(index)], parents)
        attention_output.append(mixed)
    shape = (len(decoder.layers), len(x))
    whole = []
    for part in zip(*attention_output, strict=True):
        kept = torch.full((*shape, *part[0].shape[1:]), torch.nan, dtype=part[0].dtype, device=x.device)
        for index, rows in enumerate(part):
            kept[index, -told:] = rows[-told:]
        whole.append(kept)
    return x, AttentionOutput(*whole)
