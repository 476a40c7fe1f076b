"""Attention of a tree's rows over a KV store: launches the kernels of `jit_attention`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_attention
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.launch import UNFUSED, ceil_div, chained, on_device, padded_size, require

_SPLITS_PER_MERGE_STEP = 64  # with 32, a row of 4,096 positions needs a second step, of 33 splits
_FEW_LANES = 16  # in one program. Of float32, and of heads above 256, more do not fit in registers
_SHORTEST = 128  # positions of a split: a multiple of every block
# Positions of a split for each KV head, of a short one and of a long one, and of a long one at least: 512 programs read
# 8,192 positions of 8 heads, and 800 further ones 100,000. Timed on an H100 (notebook/2026-11.md).
_SHORT_BY_HEAD, _LONG_BY_HEAD, _SHORTEST_LONG = 16, 128, 512
_SHORT_UP_TO = 8192  # positions that short splits cover
_THREE_STAGES = 100 << 10  # bytes of shared memory of a program with heads of 256; GeForce cards have 99 KiB


class Splits(NamedTuple):
    """How positions are cut into splits: `num_short` splits of `short` positions, then splits of `long` positions.

    The cut is part of the arithmetic: another cut changes the last bits of a text.
    """

    short: int
    num_short: int
    long: int

    @classmethod
    def of_heads(cls, kv_heads: int) -> Splits:
        """The cut for a number of KV heads: few heads get short splits, so that enough programs read at a time."""
        short = max(_SHORTEST, ceil_div(_SHORT_BY_HEAD * kv_heads, _SHORTEST) * _SHORTEST)
        return cls(short, max(1, _SHORT_UP_TO // short), max(_SHORTEST_LONG, _LONG_BY_HEAD * kv_heads))

    def of(self, position: int) -> int:
        """The split that contains `position`."""
        inside = self.short * self.num_short
        return position // self.short if position < inside else self.num_short + (position - inside) // self.long


class AttentionPlan(NamedTuple):
    """The shape of a model's attention, and the tiles in which it is computed.

    A *lane* is one query head of one row; a program computes `lanes` of them.
    """

    heads: int
    kv_heads: int
    dim: int
    splits: Splits
    is_float: bool  # float32
    shared: int  # bytes of shared memory that a program can have
    product_rows: int  # of the device's tensor cores: see `launch.product_rows`

    @property
    def lanes(self) -> int:
        return _FEW_LANES if self.is_float or self.dim > 256 else self.product_rows

    @property
    def block(self) -> int:
        """Positions that one step of a program reads."""
        return 16 if self.is_float else 32 if self.dim > 128 else 64

    @property
    def stages(self) -> int:
        """Blocks that a program holds, whose loads run ahead. Their number changes no result."""
        has_room = self.dim <= 128 or self.shared >= _THREE_STAGES
        return 3 if has_room and not self.is_float and self.dim <= 256 else 2

    @property
    def warps(self) -> int:
        return 8 if self.dim > 128 or self.is_float else 4

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def num_splits(self, length: int) -> int:
        """Number of splits of `length` positions."""
        return self.splits.of(max(0, length - 1)) + 1

    def end_splits(self, rows: int) -> int:
        """Upper bound of the splits that the last prefix block and a tree of `rows` rows can touch."""
        blocks = ceil_div(self.block - 1 + rows, self.block)
        return 1 if blocks == 1 else (blocks - 1) * self.block // self.splits.short + 2


class AttentionWorkspace:
    """Buffers for the attention of up to `rows` rows over up to `length` positions. All layers share them.

    For each row, head and split: the maximum of its scores and the sum of its weights [R, H, S], and the weighted sum
    of its values [R, H, S, D]; all float32. `path` [R, rows of a text] and `depths` [R] describe the tree, both int32.
    """

    def __init__(self, plan: AttentionPlan, rows: int, length: int, device: torch.device, texts: int = 1,
                 other: AttentionWorkspace | None = None) -> None:
        """texts: that share the rows, as many each. A tree is one of its text's rows; other: of the same trees."""
        self.plan, self.rows, self.text_rows, self.texts = plan, rows, rows // texts, texts
        self.num_splits = plan.num_splits(length + self.text_rows)
        shape = (rows, plan.heads, self.num_splits)
        self.max_scores, self.weight_sums = (torch.empty(shape, device=device) for _ in range(2))
        self.value_sums = torch.empty(*shape, plan.dim, device=device)
        self.path: Tensor = other.path if other else torch.zeros(rows, self.text_rows, dtype=torch.int32, device=device)
        self.depths: Tensor = other.depths if other else torch.zeros(rows, dtype=torch.int32, device=device)

    def set_tree(self, parents: Tensor) -> None:
        """Compute `path` and `depths` from parents [R], int32 on the device."""
        require(len(parents) == self.rows, f"{self.rows} parents", len(parents))
        with on_device(parents.device):
            jit_attention.tree_paths_kernel[(self.rows,)](parents, self.path, self.depths, self.text_rows,
                                                          num_warps=1, **UNFUSED)


def tree_attention(work: AttentionWorkspace, q: Tensor, store: CudaStore, where: Tensor, length: int, window: int,
                   remainder: Tensor | None, out: Tensor, lse: Tensor, table: Tensor | None = None,
                   sinks: Tensor | None = None) -> None:
    """Attention of q [R, H, D]: writes out [R, H, D] in q's dtype and lse [R, H] float32.

    The keys and values of the drafted rows must already be in their slots of the store.

    where      int64 [2] on the device: the number of committed positions, and the slot of drafted row 0; of several
               texts, two for each
    length     an upper bound of where[0] on the host: sets how many splits are launched
    window     positions that a row sees, itself included; 0: all
    remainder  [R, H, D + 1] float32: see `longdraft.kernels.interface.KV`
    table      int64 [texts, 5]: the stores of several texts, which have the form of `store`
    sinks      [H] float32: log-sum-exps of a remainder whose outputs are 0, in place of `remainder`
    """
    plan, (rows, heads, dim) = work.plan, q.shape
    require((heads, dim) == (plan.heads, plan.dim) and rows == work.rows, f"[{work.rows}, {plan.heads}, {plan.dim}]",
            q.shape)
    short, num_short, long = plan.splits
    sizes = {"DIM": dim, "PADDED": padded_size(dim), "SHORT": short, "NUM_SHORT": num_short, "LONG": long}
    factor = math.log2(math.e) / math.sqrt(dim)
    own = work.text_rows
    ends = plan.end_splits(own) * plan.kv_heads * own * ceil_div(plan.group, plan.lanes)
    whole = plan.splits.of(length) * plan.kv_heads * ceil_div(own * plan.group, plan.lanes)
    require(work.texts == (1 if table is None else len(table)), f"stores of {work.texts} texts", table)
    with on_device(q.device):
        jit_attention.attend_split_kernel[(ends + whole, work.texts)](
            q, store.k, store.v, store.k_scale, store.v_scale, where, work.path, work.depths, work.max_scores,
            work.weight_sums, work.value_sums, where if table is None else table, plan.end_splits(own), own,
            store.capacity, work.num_splits, window, factor,
            store.score_cap * math.log2(math.e), KV_HEADS=plan.kv_heads, GROUP=plan.group, LANES=plan.lanes,
            BLOCK=plan.block, HAS_WINDOW=window > 0, HAS_CAP=store.score_cap > 0,
            HAS_TABLE=table is not None, STAGES=plan.stages, **sizes, num_warps=plan.warps, **chained(q.device))
        # By a launch of their own: the last program of a KV head would merge its lanes one after another.
        jit_attention.merge_splits_kernel[(rows, heads)](
            work.max_scores, work.weight_sums, work.value_sums, where, work.depths,
            next((part for part in (remainder, sinks) if part is not None), work.max_scores), out, lse,
            work.num_splits, own, HEADS=heads, SPLITS_PER_STEP=_SPLITS_PER_MERGE_STEP,
            HAS_REMAINDER=remainder is not None, HAS_SINKS=remainder is None and sinks is not None, **sizes,
            num_warps=4, **chained(q.device))
