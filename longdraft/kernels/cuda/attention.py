"""A tree's rows over a store: the launches of `jit_attention`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_attention
from longdraft.kernels.cuda.launch import EXACT, ceil_div, on, padded, require
from longdraft.kernels.cuda.store import CudaStore

_MERGED_AT_ONCE = 32


class Splits(NamedTuple):
    """How positions are cut: `num_short` splits of `short` positions, then `long` ones each. Part of a text's
    arithmetic: with others its last bits are others."""

    short: int = 512
    num_short: int = 16
    long: int = 2048

    def of(self, position: int) -> int:
        inside = self.short * self.num_short
        return position // self.short if position < inside else self.num_short + (position - inside) // self.long


class Plan(NamedTuple):
    """The shape of a model's attention, and the tiles it is computed in.

    lanes  query heads of rows that a program computes at once
    """

    heads: int
    kv_heads: int
    dim: int
    lanes: int
    splits: Splits
    is_float: bool

    @property
    def block(self) -> int:
        """Positions that are read at once."""
        return 32 if self.dim > 128 or self.is_float else 64

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def num_splits(self, length: int) -> int:
        """Of so many positions."""
        return self.splits.of(max(0, length - 1)) + 1

    def end_splits(self, rows: int) -> int:
        """Splits that the ends of a tree of so many rows can lie in."""
        blocks = ceil_div(self.block - 1 + rows, self.block)
        return 1 if blocks == 1 else (blocks - 1) * self.block // self.splits.short + 2


class Workspace:
    """Memory for the attention of up to `rows` rows over up to `length` positions; layers use it in turns."""

    def __init__(self, plan: Plan, rows: int, length: int, device: torch.device) -> None:
        self.rows, self.num_splits = rows, plan.num_splits(length + rows)
        state = (rows, plan.heads, self.num_splits)
        self.peaks, self.masses = (torch.empty(state, device=device) for _ in range(2))
        self.mixed = torch.empty(*state, plan.dim, device=device)
        self.path = torch.zeros(rows, rows, dtype=torch.int32, device=device)
        self.depths = torch.zeros(rows, dtype=torch.int32, device=device)

    def follow(self, parents: Tensor) -> None:
        """Paths and depths of a tree, from parents [R] int32 on the device."""
        require(len(parents) == self.rows, f"{self.rows} parents", len(parents))
        with on(parents.device):
            jit_attention.paths[(self.rows,)](parents, self.path, self.depths, self.rows, num_warps=1)


def attend(plan: Plan, work: Workspace, q: Tensor, store: CudaStore, where: Tensor, length: int, window: int,
           remainder: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """q [R, H, D] over the store: out [R, H, D], lse [R, H]. Drafted rows are in their slots already.

    where   int64 [2] on the device: committed positions, and the slot of drafted row 0
    length  at least as many positions as where[0]: how many splits are launched
    """
    rows, heads, dim = q.shape
    require((heads, dim) == (plan.heads, plan.dim) and rows == work.rows, f"[{work.rows}, {plan.heads}, {plan.dim}]",
            q.shape)
    short, num_short, long = plan.splits
    sizes = {"DIM": dim, "PADDED": padded(dim), "SHORT": short, "NUM_SHORT": num_short, "LONG": long}
    factor = math.log2(math.e) / math.sqrt(dim)
    tiles = ceil_div(rows * plan.group, plan.lanes)
    end_tiles = rows * ceil_div(plan.group, plan.lanes)
    with on(q.device):
        for is_end, grid in ((0, (plan.num_splits(length), plan.kv_heads, tiles)),
                             (1, (plan.end_splits(rows), plan.kv_heads, end_tiles))):
            jit_attention.attend[grid](
                q, store.k, store.v, store.k_scale, store.v_scale, where, work.path, work.depths, work.peaks,
                work.masses, work.mixed, is_end, rows, store.capacity, work.num_splits, work.rows, window, factor,
                KV_HEADS=plan.kv_heads, GROUP=plan.group, LANES=plan.lanes, BLOCK=plan.block,
                IS_SCALED=store.is_scaled, **sizes, num_warps=4, num_stages=2 if plan.is_float else 3, **EXACT)
        jit_attention.merge[(rows, heads)](
            work.peaks, work.masses, work.mixed, where, work.depths, work.peaks if remainder is None else remainder, out, lse,
            work.num_splits, HEADS=heads, AT_ONCE=_MERGED_AT_ONCE, HAS_REST=remainder is not None, **sizes, **EXACT)
