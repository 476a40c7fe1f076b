"""A chunk of a prompt through all layers, with PyTorch's matrix products and flash attention.

For many rows these are much faster than our kernels, but their bits depend on the number of rows. Results are still
reproducible, because every run cuts a prompt into the same chunks.

Drafters read the attention of a chunk's last rows only. Those rows go through our attention kernels, which return the
log-sum-exp; for the rows before them, the reported queries, outputs and log-sum-exps are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import KV, AttentionOutput, Geometry, LayersKV, LayerWeights, Linear
from longdraft.kernels.layer import layer_forward

_REPORTED_ROWS = 128  # last rows of a chunk whose attention is reported


class PrefillOperations:
    """The operations of one layer for a chunk that follows the committed positions of a store."""

    def __init__(self, ops: CudaOperations) -> None:
        self._ops = ops
        self.rms_norm, self.swiglu, self.rope = ops.rms_norm, ops.swiglu, ops.rope

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CudaLinear) and not keep_float  # which is for the head and for experts
        return weight.matmul(x)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        """As in `longdraft.kernels.interface.Kernels`, for a chain of rows; commits the rows' keys and values."""
        store, length, rows = kv.store, kv.length, len(q)
        assert isinstance(store, CudaStore)
        store.write(length, kv.k, kv.v)
        reported = min(_REPORTED_ROWS, rows)
        first = rows - reported
        tail = KV(store, length + first, kv.k[first:], kv.v[first:])
        chain = torch.arange(-1, reported - 1, dtype=torch.int32)
        last = self._ops.attention(q[first:].contiguous(), tail, chain, window)
        if not first:
            return last
        output = torch.cat([_flash_attention(q[:first], store, length, window), last.output])
        lse = torch.cat([torch.full_like(last.lse[:1], torch.nan).expand(first, -1), last.lse])
        return AttentionOutput(q, output, lse, q)


def _flash_attention(q: Tensor, store: CudaStore, length: int, window: int) -> Tensor:
    """Rows q [T, H, D] at positions length, length + 1, ..., whose keys and values are in the store: [T, H, D]."""
    rows, heads, _ = q.shape
    end = length + rows
    first = max(0, length + 1 - window) if window else 0
    group = heads // store.heads
    k, v = (part.repeat_interleave(group, 0)[None] for part in _read_range(store, first, end))
    queries = q.transpose(0, 1)[None]
    if not window:
        output = functional.scaled_dot_product_attention(queries, k, v, causal_lower_right(rows, end))
    else:
        own = torch.arange(length, end, device=q.device)[:, None]
        position = torch.arange(first, end, device=q.device)[None]
        seen = (position <= own) & (position > own - window)
        output = functional.scaled_dot_product_attention(queries, k, v, seen)
    return output[0].transpose(0, 1).contiguous()


def _read_range(store: CudaStore, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Keys and values [Hkv, end - first, D] of positions first .. end - 1, in the model's dtype."""
    k, v = (part[:, first:end].to(store.dtype) for part in (store.k, store.v))
    if store.is_scaled:
        k, v = ((part.float() * scale[:, first:end, None]).to(store.dtype)
                for part, scale in ((k, store.k_scale), (v, store.v_scale)))
    return k, v


def prefill(ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry, x: Tensor, cos: Tensor,
            sin: Tensor, kv: LayersKV, parents: Tensor) -> tuple[Tensor, AttentionOutput]:
    """A chunk x [T, hidden] through all layers. See `longdraft.kernels.interface.Decoder.forward`."""
    prefill_ops = PrefillOperations(ops)
    reported = min(_REPORTED_ROWS, len(x))
    outputs = []
    for index, layer in enumerate(layers):
        kv.tap(index, x)
        x, output = layer_forward(prefill_ops, x, layer, geometry, cos, sin, [kv.layer(index)], parents)
        outputs.append(output)
    kv.tap(len(layers), x)
    shape = (len(layers), len(x))
    parts = []
    for part in zip(*outputs, strict=True):
        stacked = torch.full((*shape, *part[0].shape[1:]), torch.nan, dtype=part[0].dtype, device=x.device)
        for index, rows in enumerate(part):
            stacked[index, -reported:] = rows[-reported:]
        parts.append(stacked)
    return x, AttentionOutput(*parts)
