"""The operations of one decoder layer for a few rows, each row-invariant to the bit."""

from __future__ import annotations

import torch
from torch import Tensor

from longdraft.errors import UsageError
from longdraft.kernels.cuda import jit_rows
from longdraft.kernels.cuda.attention import AttentionPlan, AttentionWorkspace, Splits, tree_attention
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import UNFUSED, ceil_div, chained, on_device, padded_size, require
from longdraft.kernels.cuda.linear import SUM_BLOCK, CudaLinear, add_partial_sums
from longdraft.kernels.experts import Routing
from longdraft.kernels.interface import KV, AttentionOutput
from longdraft.kernels.weights import Experts, Linear


def no_kernels(what: str) -> UsageError:
    """The error for what only the other kernels compute."""
    return UsageError(f"{what} has no CUDA kernels yet; use --device cpu")


class CudaOperations:
    """See :class:`longdraft.kernels.interface.Kernels` for the shapes and meaning of the operations.

    dtype   float32, float16 or bfloat16
    tile    rows that one program multiplies, whether the forward has as many or not
    splits  how attention cuts positions; None: by the number of KV heads
    graphs  the captured graphs of all decoders of these operations
    """

    def __init__(self, device: str, dtype: torch.dtype, tile: int, splits: Splits | None) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.tile = tile
        self.splits = splits
        self.graphs = GraphCache(self.device)

    def attention_plan(self, heads: int, kv_heads: int, dim: int) -> AttentionPlan:
        splits = self.splits or Splits.of_heads(kv_heads)
        return AttentionPlan(heads, kv_heads, dim, splits, self.dtype == torch.float32)

    def linear(self, x: Tensor, weight: Linear, *, keep_float: bool = False) -> Tensor:
        assert isinstance(weight, CudaLinear)
        x = self._checked_input(x, weight.in_features)
        out = torch.empty(len(x), weight.out_features, dtype=torch.float32 if keep_float else self.dtype,
                          device=self.device)
        return add_partial_sums(weight.partial_sums(x, self.tile), out)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
        x = self._checked_input(x, len(weight))
        return self.rms_norm_into(x, weight, eps, rounds_once, torch.empty_like(x))

    def rms_norm_into(self, x: Tensor, weight: Tensor, eps: float, rounds_once: bool, out: Tensor) -> Tensor:
        """As `rms_norm`, with the result written to `out`; returns `out`."""
        rows, width = x.shape
        with on_device(self.device):
            jit_rows.rms_norm_kernel[(rows,)](x, weight, out, eps, WIDTH=width, PADDED=padded_size(width),
                                              ROUNDS_ONCE=rounds_once, num_warps=8 if width > 512 else 1,
                                              **chained(self.device))
        return out

    def gate(self, x: Tensor, gates: Tensor) -> Tensor:
        raise UsageError("gated attention has no CUDA kernels yet; use --device cpu")

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate_up = self._checked_input(gate_up, gate_up.shape[1])
        rows, width = len(gate_up), gate_up.shape[1] // 2
        require(gate_up.shape[1] == 2 * width, "an even width", gate_up.shape)
        out = torch.empty(rows, width, dtype=self.dtype, device=self.device)
        with on_device(self.device):
            jit_rows.swiglu_kernel[(rows, ceil_div(width, SUM_BLOCK))](gate_up, out, WIDTH=width, BLOCK=SUM_BLOCK,
                                                                       **UNFUSED)
        return out

    def geglu(self, gate_up: Tensor) -> Tensor:
        raise no_kernels("GELU")

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        raise no_kernels("a clamped activation")

    def route(self, logits: Tensor, experts: Experts) -> Routing:
        raise no_kernels("a mixture of experts")

    def sigmoid(self, x: Tensor) -> Tensor:
        raise no_kernels("a mixture of experts")

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        raise no_kernels("a soft cap")

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        x, cos, sin = x.to(self.dtype).contiguous(), cos.float().contiguous(), sin.float().contiguous()
        require(cos.shape == sin.shape == (rows, dim // 2), "cos, sin [R, D / 2]", cos.shape)
        out = torch.empty_like(x)
        with on_device(self.device):
            jit_rows.rope_kernel[(rows, heads)](x, cos, sin, out, HEADS=heads, HALF=dim // 2,
                                                PADDED=padded_size(dim // 2), num_warps=1, **UNFUSED)
        return out

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,) = cuda_stores([kv.store])
        rows, heads, dim = q.shape
        q = q.to(self.dtype).contiguous()
        require(heads % store.heads == 0 and dim == store.dim, "query heads in groups of KV heads", q.shape)
        require(len(kv.k) == len(kv.v) == len(parents) == rows, f"{rows} keys, values and parents", len(parents))
        store.reserve_drafts(rows)
        require(0 <= kv.length <= store.room, f"a length of 0 to {store.room} positions", kv.length)
        index = torch.arange(rows, device=self.device)
        scatter_rows(kv.k[None], kv.v[None], [store], index, index + store.room)
        plan = self.attention_plan(heads, store.heads, dim)
        work = AttentionWorkspace(plan, rows, kv.length, self.device)
        work.set_tree(parents.to(self.device, torch.int32))
        where = torch.tensor([kv.length, store.room], device=self.device)
        out, lse = torch.empty_like(q), torch.empty(rows, heads, device=self.device)
        remainder = None if kv.remainder is None else kv.remainder.contiguous()
        tree_attention(plan, work, q, store, where, kv.length, window, remainder, out, lse)
        return AttentionOutput(q, out, lse, q)

    def _checked_input(self, x: Tensor, width: int) -> Tensor:
        """x [R, width] in `dtype`, contiguous, and aligned to the 16 bytes that vectorised loads need."""
        require(x.ndim == 2 and x.shape[1] == width, f"[R, {width}]", x.shape)
        x = x.to(self.dtype).contiguous()
        return x if x.data_ptr() % 16 == 0 else x.clone()
