"""The operations of one decoder layer for a few rows, each row-invariant to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda import jit_activations, jit_rows
from longdraft.kernels.cuda.attention import AttentionPlan, AttentionWorkspace, Splits, tree_attention
from longdraft.kernels.cuda.delta import DeltaNets
from longdraft.kernels.cuda.experts import GroupedExperts, route
from longdraft.kernels.cuda.graph_cache import GraphCache
from longdraft.kernels.cuda.kv_store import RowsOfTexts, cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import (
    UNFUSED,
    ceil_div,
    chained,
    indexed,
    on_device,
    padded_size,
    product_rows,
    require,
    shared_bytes,
)
from longdraft.kernels.cuda.linear import (
    CLAMPED,
    GELU,
    SILU,
    SUM_BLOCK,
    Activation,
    CudaLinear,
    PartialSums,
    add_partial_sums,
)
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.interface import KV
from longdraft.kernels.weights import Experts, Linear, Routing


class CudaOperations:
    """See :class:`longdraft.kernels.interface.Kernels` for the shapes and meaning of the operations.

    dtype   float32, float16 or bfloat16
    tile    rows that one program multiplies, whether the forward has as many or not
    splits  how attention cuts positions; None: by the number of KV heads
    graphs  the captured graphs of all decoders of these operations
    """

    def __init__(self, device: str, dtype: torch.dtype, tile: int, splits: Splits | None) -> None:
        self.device = indexed(torch.device(device))
        self.dtype = dtype
        self.tile = tile
        self.splits = splits
        self.graphs = GraphCache(self.device)
        self.experts, self.deltas = GroupedExperts(tile), DeltaNets(self.device, dtype)

    def attention_plan(self, heads: int, kv_heads: int, dim: int) -> AttentionPlan:
        splits = self.splits or Splits.of_heads(kv_heads)
        return AttentionPlan(heads, kv_heads, dim, splits, self.dtype == torch.float32, shared_bytes(self.device),
                             product_rows(self.device))

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
        x = self._checked_input(x, gates.shape[1])
        gates = gates.to(self.dtype)
        require(len(gates) == len(x) and gates.stride(1) == 1, f"gates {tuple(x.shape)}", gates.shape)
        out = torch.empty_like(x)
        with on_device(self.device):
            jit_activations.sigmoid_gate_kernel[(len(x), ceil_div(x.shape[1], SUM_BLOCK))](
                x, gates, out, gates.stride(0), WIDTH=x.shape[1], BLOCK=SUM_BLOCK, **chained(self.device))
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, SILU)

    def geglu(self, gate_up: Tensor) -> Tensor:
        return self._gated(gate_up, GELU)

    def clamped_swiglu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        return self._gated(gate_up, Activation(CLAMPED, alpha, limit))

    def _gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate_up = self._checked_input(gate_up, gate_up.shape[1])
        rows, width, (kind, *numbers) = len(gate_up), gate_up.shape[1] // 2, activation
        require(gate_up.shape[1] == 2 * width, "an even width", gate_up.shape)
        out = torch.empty(rows, width, dtype=self.dtype, device=self.device)
        with on_device(self.device):
            jit_activations.gated_halves_kernel[(rows, ceil_div(width, SUM_BLOCK))](
                gate_up, out, *numbers, WIDTH=width, BLOCK=SUM_BLOCK, ACTIVATION=kind, **UNFUSED)
        return out

    def route(self, logits: Tensor, experts: Experts) -> Routing:
        logits = self._checked_input(logits, logits.shape[1])
        return route(PartialSums(logits[None], None, None), experts, logits)

    def groups_experts(self, experts: Experts) -> bool:
        """Whether `grouped_experts` computes this mixture, without a wait of the host."""
        return self.experts.stacks_of(experts) is not None and experts.complete is None

    def grouped_experts(self, x: Tensor, experts: Experts, routed: Tensor | None) -> Tensor | None:
        """See `longdraft.kernels.experts.GroupsExperts`."""
        stacks = self.experts.stacks_of(experts)
        if stacks is None or not self.groups_experts(experts):  # ranks add up the sums of the experts
            return None
        x = self._checked_input(x, stacks.gate_up.first.in_features)
        return self.experts.run(stacks, x, x if routed is None else self._checked_input(routed, x.shape[1]))

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._squashed(x, 0.0)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        return self._squashed(x, cap)

    def _squashed(self, x: Tensor, cap: float) -> Tensor:
        x = x.contiguous()
        require(x.dtype == torch.float32, "float32", x.dtype)
        out = torch.empty_like(x)
        with on_device(self.device):
            jit_activations.squash_kernel[(ceil_div(x.numel(), SUM_BLOCK),)](
                x, out, x.numel(), cap, BLOCK=SUM_BLOCK, HAS_CAP=cap > 0, **UNFUSED)
        return out

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        x, cos, sin = x.to(self.dtype).contiguous(), cos.float().contiguous(), sin.float().contiguous()
        require(cos.shape == sin.shape == (rows, dim // 2), "cos, sin [R, D / 2]", cos.shape)
        out = torch.empty_like(x)
        with on_device(self.device):
            jit_rows.rope_kernel[(rows, heads)](x, cos, sin, out, HEADS=heads, HALF=dim // 2,
                                                PADDED=padded_size(dim // 2), num_warps=1, **UNFUSED)
        return out

    def delta_rule(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
                   parents: Tensor) -> Tensor | None:
        return self.deltas.run(weights, texts, z, parents)

    def states_after(self, layers: Sequence[DeltaWeights], rows: Sequence[DeltaRows], path: Sequence[int],
                      after: Sequence[DeltaState]) -> bool:
        """See `longdraft.kernels.delta.AppliesPaths`."""
        return self.deltas.states_after(layers, rows, path, after)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,) = cuda_stores([kv.store])
        rows, heads, dim = q.shape
        require(heads % store.heads == 0 and dim == store.dim, "query heads in groups of KV heads", q.shape)
        require(len(kv.k) == len(kv.v) == len(parents) == rows, f"{rows} keys, values and parents", len(parents))
        store.reserve_drafts(rows)
        require(0 <= kv.length <= store.room, f"a length of 0 to {store.room} positions", kv.length)
        work = AttentionWorkspace(self.attention_plan(heads, store.heads, dim), rows, kv.length, self.device)
        work.set_tree(parents.to(self.device, torch.int32, non_blocking=True))
        where = torch.tensor([kv.length, store.room]).to(self.device, non_blocking=True)
        index = torch.arange(rows, device=self.device)
        return self._attended(work, q, kv, where, kv.length, window, index, index + store.room)

    def _attended(self, work: AttentionWorkspace, q: Tensor, kv: KV, where: Tensor, length: int, window: int,
                  rows: Tensor, slots: Tensor | None, texts: RowsOfTexts | None = None) -> AttentionOutput:
        """Attention of q [R, H, D], after the keys and values of the rows are written. See `tree_attention`.

        rows   int64 [R]: 0, 1, ...
        slots  int64 [R] in the stores of the rows' texts, negative where a row is not written; None: none is written
        texts  of the rows; None: of one, whose store `kv` has
        """
        (store,) = cuda_stores([kv.store])
        q = q.to(self.dtype).contiguous()
        if slots is not None:
            scatter_rows(kv.k[None], kv.v[None], [store], rows, slots, texts)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=self.device)
        remainder = None if kv.remainder is None else kv.remainder.contiguous()
        tree_attention(work, q, store, where, length, window, remainder, out, lse, texts.table if texts else None)
        return AttentionOutput(q, out, lse, q)

    def _checked_input(self, x: Tensor, width: int) -> Tensor:
        """x [R, width] in `dtype`, contiguous, and aligned to the 16 bytes that vectorised loads need."""
        require(x.ndim == 2 and x.shape[1] == width, f"[R, {width}]", x.shape)
        x = x.to(self.dtype).contiguous()
        return x if x.data_ptr() % 16 == 0 else x.clone()
