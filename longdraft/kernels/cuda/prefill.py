"""A chunk of a prompt through all layers, with PyTorch's matrix products and flash attention.

For many rows these are much faster than our kernels, but their bits depend on the number of rows. Results are still
reproducible, because every run cuts a prompt into the same chunks.

The attention of a chunk has several parts, merged by their log-sum-exps: the chunk itself, a causal square, and the
positions before it in pieces, which all rows see. In these the rows of all query heads of a KV head are rows of one
attention without a mask, so that keys and values are read where they are. Pieces of equal length have one plan of the
library, which takes a tenth of a second to make.

Drafters read the attention of a chunk's last rows only. Chunks that have no others, and those rows of attentions that
the library computes without log-sum-exps, go through our attention kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import DEVICE_PIECE, KV, REPORTED_ROWS, LayersKV
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.weights import Geometry, LayerWeights, Linear

_EXPLICIT_ROWS = 128  # whose scores are in memory at a time

Attend = Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]


class PrefillOperations:
    """The operations of one layer for a chunk that follows the committed positions of a store."""

    def __init__(self, ops: CudaOperations) -> None:
        self._ops = ops
        self.rms_norm, self.swiglu, self.geglu, self.rope = ops.rms_norm, ops.swiglu, ops.geglu, ops.rope
        self.clamped_swiglu, self.gate, self.route, self.sigmoid = ops.clamped_swiglu, ops.gate, ops.route, ops.sigmoid
        self.delta_rule = ops.delta_rule

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CudaLinear)
        product = weight.matmul(x)
        return product.float() if keep_float else product

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        """As in `longdraft.kernels.interface.Kernels`, for a chain of rows; commits the rows' keys and values."""
        store, length, rows = kv.store, kv.length, len(q)
        assert isinstance(store, CudaStore)
        store.write(length, kv.k, kv.v)
        first = max(0, rows - REPORTED_ROWS)
        remainder = kv.remainder  # of sinks
        found = _attention(q, store, length, window, remainder) if first else None
        if found is not None:
            output, lse = found
            return AttentionOutput(q, output, lse[first:], q)
        tail = KV(store, length + first, kv.k[first:], kv.v[first:], None if remainder is None else remainder[first:])
        chain = torch.arange(-1, rows - first - 1, dtype=torch.int32)
        last = self._ops.attention(q[first:].contiguous(), tail, chain, window)
        if not first:
            return last
        output = torch.cat([_masked_attention(q[:first], store, length, window), last.output])
        return AttentionOutput(q, output, last.lse, q)


def _attention(q: Tensor, store: CudaStore, length: int, window: int,
               remainder: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Rows q [T, H, D] at positions length, length + 1, ..., whose keys and values are in the store: output [T, H, D]
    and log-sum-exp [T, H]. None for dtypes and heads, or a window, that the library's fast kernels lack.

    remainder  [T, H, D + 1]: see `KV`
    """
    attend = None if window or store.score_cap else _library_attention(q.device, q.dtype, q.shape[2])
    if attend is not None:
        output, lse = _flash_attention(attend, q, store, length)
    elif store.score_cap or remainder is not None:
        output, lse = _explicit_attention(q, store, length, window)
    else:
        return None
    if remainder is not None:
        share = torch.sigmoid(lse - remainder[..., -1])[..., None]  # of the keys
        output = torch.lerp(remainder[..., :-1], output.float(), share).to(q.dtype)
        lse = torch.logaddexp(lse, remainder[..., -1])
    return output, lse


def _flash_attention(attend: Attend, q: Tensor, store: CudaStore, length: int) -> tuple[Tensor, Tensor]:
    """As `_attention`, by the library: the output and its log-sum-exp [T, H]."""
    rows, heads, dim = q.shape
    end, group = length + rows, heads // store.heads
    queries = q.view(rows, store.heads, group, dim).permute(1, 2, 0, 3)  # [Hkv, group, T, D]
    k, v = (part.repeat_interleave(group, 0)[None] for part in store.read_range(length, end))
    output, lse = attend(queries.reshape(1, heads, rows, dim), k, v, True)
    lse = lse.reshape(heads, rows)
    if length:
        output, together = output.float(), queries.reshape(1, store.heads, group * rows, dim)
    for start in range(0, length, DEVICE_PIECE):
        k, v = (part[None] for part in store.read_range(start, min(start + DEVICE_PIECE, length)))
        earlier, earlier_lse = attend(together, k, v, False)
        earlier_lse = earlier_lse.reshape(heads, rows)
        share = torch.sigmoid(earlier_lse - lse)[..., None]  # of the piece
        output = torch.lerp(output, earlier.reshape(output.shape).float(), share)
        lse = torch.logaddexp(lse, earlier_lse)
    return output[0].transpose(0, 1).to(q.dtype).contiguous(), lse.T


def _explicit_attention(q: Tensor, store: CudaStore, length: int, window: int) -> tuple[Tensor, Tensor]:
    """As `_flash_attention`, with a window and a soft cap: scores in memory, for some rows and a KV head at a time."""
    rows, heads, dim = q.shape
    output, lse = torch.empty_like(q), torch.empty(rows, heads, device=q.device)
    group = heads // store.heads
    for start in range(0, rows, _EXPLICIT_ROWS):
        some = q[start : start + _EXPLICIT_ROWS]
        end = length + start + len(some)
        first = max(0, length + start + 1 - window) if window else 0
        own = torch.arange(length + start, end, device=q.device)[:, None]
        position = torch.arange(first, end, device=q.device)[None]
        hidden = (position > own) | (position <= own - window) if window else position > own
        for head, (k, v) in enumerate(zip(*(part.float() for part in store.read_range(first, end)), strict=True)):
            places = slice(head * group, (head + 1) * group)
            scores = torch.einsum("tgd,sd->tgs", some[:, places].float(), k) / math.sqrt(dim)
            if store.score_cap:
                scores = torch.tanh(scores / store.score_cap) * store.score_cap
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            output[start : start + len(some), places] = (scores.softmax(-1) @ v).to(q.dtype)
            lse[start : start + len(some), places] = scores.logsumexp(-1)
    return output, lse


@functools.cache
def _library_attention(device: torch.device, dtype: torch.dtype, dim: int) -> Attend | None:
    """PyTorch's fastest attention that returns an output [1, H, T, D] and its log-sum-exp; None: there is none.

    Its arguments are q [1, H, T, D], k and v [1, H, S, D], and whether row t sees only the first t + 1 keys.
    """
    def cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
        return output, lse

    def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
        return output, lse

    def on_cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
        return output, lse

    if device.type != "cuda":
        return on_cpu
    if dtype == torch.float32 or dim % 8:
        return None
    probe = torch.ones(1, 2, 16, dim, dtype=dtype, device=device)
    for attend in (cudnn, flash):
        try:
            attend(probe, probe, probe, True)
        except RuntimeError:  # this device, or this build of PyTorch, lacks it
            continue
        return attend
    return None


def _masked_attention(q: Tensor, store: CudaStore, length: int, window: int) -> Tensor:
    """As `_flash_attention`, in one part and without log-sum-exps: with a window, and for dtypes and heads that the
    fast kernels lack."""
    rows, heads, _ = q.shape
    end = length + rows
    first = max(0, length + 1 - window) if window else 0
    k, v = (part.repeat_interleave(heads // store.heads, 0)[None] for part in store.read_range(first, end))
    queries = q.transpose(0, 1)[None]
    if not window:
        output = functional.scaled_dot_product_attention(queries, k, v, causal_lower_right(rows, end))
    else:
        own = torch.arange(length, end, device=q.device)[:, None]
        position = torch.arange(first, end, device=q.device)[None]
        seen = (position <= own) & (position > own - window)
        output = functional.scaled_dot_product_attention(queries, k, v, seen)
    return output[0].transpose(0, 1).contiguous()


def prefill(ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry, x: Tensor, cos: Tensor,
            sin: Tensor, kv: LayersKV, parents: Tensor) -> tuple[Tensor, AttentionOutput]:
    """A chunk x [T, hidden] through all layers. See `longdraft.kernels.interface.Decoder.forward`.

    The attention that it returns has only the last rows of the chunk, at most REPORTED_ROWS.
    """
    decoder = LayerwiseDecoder(PrefillOperations(ops), layers, geometry, min(REPORTED_ROWS, len(x)))
    return decoder.forward(x, cos, sin, [kv], parents)
