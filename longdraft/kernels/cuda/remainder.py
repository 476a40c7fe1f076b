"""The remainder of a partial cache on the device (longdraft/cache/remainder.py).

A step's upkeep is one CUDA graph of five launches, for each bucket of rows: the rows' attention to the partial cache,
of all layers, their exact remainders, and the error of the last one. Every 32 rows four more launches solve the normal
equations. The host uploads one block of numbers before: where the rows are, and how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput, AttentionRows
from longdraft.kernels.cuda import jit_remainder
from longdraft.kernels.cuda.attention import AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.graph_cache import BUCKETS, bucket_of
from longdraft.kernels.cuda.kv_store import CudaStore, address_table, cuda_stores
from longdraft.kernels.cuda.launch import (
    RecentlyUsed,
    ceil_div,
    chained,
    on_device,
    padded_size,
    staged_parts,
)
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.interface import FitRules, KVStore
from longdraft.kernels.reference import NEGLIGIBLE_SHARE
from longdraft.kernels.switches import is_on

FITS_REMAINDERS = is_on("FITS_REMAINDERS")  # False: PyTorch's operations fit the remainder
_MAX_HELD = 16  # numbers of rows, times the partial caches that are in use
_MAX_DIM = 128  # whose matrices stay in registers
_GATHERED = 1024  # numbers of a row that a program copies
_TILE, _COLUMNS, _BLOCK = 32, 32, 16  # of the sums; of the maps; inputs that a product reads at a time


class PartialAttention:
    """The attention of up to `rows` rows to one partial cache, that holds them at its end; all layers at a time.

    It holds no reference to the cache, which is freed when its request ends.
    """

    def __init__(self, ops: CudaOperations, stores: Sequence[CudaStore], heads: int, rows: int) -> None:
        layers, dim, device = len(stores), stores[0].dim, ops.device
        for store in stores:
            store.reserve_drafts(BUCKETS[-1])  # padding rows have slots, too
        self.bucket, plan = rows, ops.attention_plan(heads, stores[0].heads, dim)
        self._form = stores[0].empty_like()
        self._room, self._table = min(store.room for store in stores), address_table(stores)
        self._work = AttentionWorkspace(plan, layers * rows, self._room, device, layers)
        self._work.set_tree(torch.arange(-1, rows - 1, dtype=torch.int32, device=device).repeat(layers))
        self._parts = staged_parts(4 * layers, rows, 2 * jit_remainder.NUM_NUMBERS)
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=device)
        where, self.rows, numbers = (self._staged[part] for part in self._parts)
        self._where, self.numbers = where.view(torch.int64), numbers.view(torch.int64)
        self._queries = torch.zeros(layers, rows, heads, dim, dtype=ops.dtype, device=device)
        self.output = torch.empty_like(self._queries)
        self.lse = torch.empty(layers, rows, heads, device=device)
        self._source: AttentionOutput | None = None

    def load(self, whole: AttentionRows, length: int, num_held: int = 0) -> None:
        """Upload where the rows are: the last of `length` rows of the cache. num_held: see `jit_remainder`.

        Padding rows follow them; their results are not read.
        """
        self._source = output = _readable(whole.output, self._queries.dtype)  # is not freed before it is read
        count = len(whole.rows)
        layer_rows = output.lse.stride(0) // output.lse.shape[2]
        staged = np.zeros(len(self._staged), dtype=np.int32)
        where, rows, numbers = (staged[part] for part in self._parts)
        where.view(np.int64)[:] = length - count
        rows[:count] = [row % output.lse.shape[1] for row in whole.rows]
        numbers.view(np.int64)[:] = *(part.data_ptr() for part in output), layer_rows, count, num_held
        self._staged.copy_(torch.from_numpy(staged), non_blocking=True)

    def launch(self) -> None:
        """The launches do not depend on the contents of the buffers, as a graph requires."""
        layers, rows, heads, dim = self._queries.shape
        width = heads * dim
        with on_device(self._queries.device):
            jit_remainder.gather_queries_kernel[(rows, ceil_div(width, _GATHERED), layers)](
                self.numbers, self.rows, self._queries, rows, WIDTH=width, BLOCK=_GATHERED,
                **chained(self._queries.device))
        tree_attention(self._work, self._queries.flatten(0, 1), self._form, self._where, self._room, 0,
                       None, self.output.flatten(0, 1), self.lse.flatten(0, 1), self._table)


def _readable(output: AttentionOutput, dtype: torch.dtype) -> AttentionOutput:
    """The same numbers as `jit_remainder` reads them: layers equally far apart, the rest contiguous."""
    _, _, heads, dim = output.queries.shape
    rows = output.lse.stride(0) // heads
    strides = (rows * heads * dim, heads * dim, dim, 1)
    parts = output.queries, output.output, output.content
    is_read = all(part.dtype == dtype and part.stride() == strides for part in parts)
    if is_read and output.lse.stride() == (rows * heads, heads, 1):
        return output
    queries, found, content = (part.to(dtype).contiguous() for part in parts)
    return AttentionOutput(queries, found, output.lse.contiguous(), content)


class PartialAttentions:
    """What partial caches give rows, with the buffers of those in use. The most recently used ones are kept."""

    def __init__(self, ops: CudaOperations) -> None:
        self._ops = ops
        self._held: RecentlyUsed[object, PartialAttention] = RecentlyUsed(_MAX_HELD)

    def run(self, stores: Sequence[CudaStore], whole: AttentionOutput, length: int) -> tuple[Tensor, Tensor]:
        """The attention of the rows, the last of `length`: output [L, T, H, D], lse [L, T, H]. Valid until next."""
        rows, heads = whole.queries.shape[1:3]
        bucket = bucket_of(rows)
        key = (bucket, heads, tuple(store.serial for store in stores))
        held = self._held.get(key, lambda: PartialAttention(self._ops, stores, heads, bucket), stores[0])
        held.load(AttentionRows.all(whole), length)
        if bucket in BUCKETS:
            self._ops.graphs.run(held, held.launch)
        else:
            held.launch()
        return held.output[:, :rows], held.lse[:, :rows]


def invert_gram(gram: Tensor, inverse: Tensor, ridge: float, ridge_rows: float, least_spread: float) -> None:
    """Write the inverses [heads, D, D] of the centred x^T x with their ridges, see `Remainder._solve`.

    gram  x^T x of x = (query, 1), float32 [heads, D + 1, D + 1]; D <= 128
    """
    count, dim, _ = inverse.shape
    padded = padded_size(dim)
    jit_remainder.invert_gram_kernel[(count,)](gram, inverse, ridge, ridge_rows, least_spread, DIM=dim, PADDED=padded,
                                               num_warps=8 if padded > 64 else 4, **chained(gram.device))


class CudaRemainder:
    """The twin of `Remainder` in longdraft/cache/remainder.py, for stores of one shape."""

    def __init__(self, ops: CudaOperations, stores: Sequence[CudaStore], num_heads: int, rules: FitRules) -> None:
        self._ops, self._rules, self._num_heads = ops, rules, num_heads
        self._dim, layers, device = stores[0].dim, len(stores), ops.device
        count, n, self._room = layers * num_heads, self._dim + 1, 2 * rules.fit_every
        self.maps = torch.zeros(layers, num_heads, n, n, device=device)
        self._gram, self._cross = (torch.zeros(count, n, n, device=device) for _ in range(2))
        self._inverse = torch.empty(count, self._dim, self._dim, device=device)
        self._x, self._y = (torch.zeros(count, self._room, n, device=device) for _ in range(2))
        self._base = torch.zeros(count, n, device=device)
        self._attentions: dict[int, PartialAttention] = {}
        self._serials: tuple[int, ...] = ()
        self._num_held, self._is_solved = 0, False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.maps, self._gram, self._cross, self._inverse, self._x, self._y))

    def update(self, stores: Sequence[KVStore], length: int, whole: AttentionRows) -> Tensor:
        """See RemainderFit.

        The result has the same memory every time, which graphs read. It is another view every time, which says to those
        who copy it that it has changed.
        """
        num, step = len(whole.rows), self._rules.fit_every
        must_solve = not self._is_solved or self._num_held + num >= step
        for start in range(0, num, step):
            rows = whole.rows[start : start + step]
            end = start + len(rows)
            attention = self._attention(cuda_stores(stores), len(rows))
            attention.load(AttentionRows(whole.output, rows), length - num + end, self._num_held)
            self._ops.graphs.run(attention, partial(self._learn, attention))
            self._num_held += len(rows)
            if must_solve or end < num:  # the held rows have room for one more part
                self._solve(attention)
        return self.maps.view(self.maps.shape)

    def _attention(self, stores: Sequence[CudaStore], rows: int) -> PartialAttention:
        """The buffers for these rows, which belong to the stores' memory."""
        serials = tuple(store.serial for store in stores)
        if serials != self._serials:
            self._attentions.clear()
            self._serials = serials
        bucket = bucket_of(rows)
        if bucket not in self._attentions:
            self._attentions[bucket] = PartialAttention(self._ops, stores, self._num_heads, bucket)
        return self._attentions[bucket]

    def _learn(self, attention: PartialAttention) -> None:
        """The work of the graph: hold the rows. It may run twice, which changes nothing."""
        layers, device = len(self.maps), self.maps.device
        attention.launch()
        with on_device(device):
            jit_remainder.hold_rows_kernel[(self._num_heads, layers)](
                attention.numbers, attention.rows, attention.output, attention.lse, self._x, self._y, NEGLIGIBLE_SHARE,
                HEADS=self._num_heads, DIM=self._dim, PADDED=padded_size(self._dim), ROWS=attention.bucket,
                ROOM=self._room, **chained(device))
        self._correct(attention)

    def _correct(self, attention: PartialAttention) -> None:
        n, device = self._dim + 1, self.maps.device
        with on_device(device):
            jit_remainder.correct_base_kernel[(len(self._gram), ceil_div(n, _COLUMNS))](
                attention.numbers, self._x, self._y, self._base, self.maps, self._rules.last_error, DIM=self._dim,
                PADDED=padded_size(self._dim), COLUMNS=_COLUMNS, ROOM=self._room, **chained(device))

    def _solve(self, attention: PartialAttention) -> None:
        """Add the held rows to the sums, and solve the normal equations."""
        rules, dim, device, count = self._rules, self._dim, self.maps.device, len(self._gram)
        n, padded = dim + 1, padded_size(dim)
        tiles = ceil_div(n, _TILE)
        with on_device(device):
            jit_remainder.add_held_rows_kernel[(count, tiles * tiles, 2)](
                self._x, self._y, self._gram, self._cross, self._num_held, rules.decay_rows, N=n, ROOM=self._room,
                TILE=_TILE, BLOCK=_BLOCK, **chained(device))
            invert_gram(self._gram, self._inverse, rules.ridge, rules.ridge_rows, rules.least_spread)
            jit_remainder.solve_maps_kernel[(count, ceil_div(n, _COLUMNS))](
                self._gram, self._cross, self._inverse, self.maps, self._base, rules.log_zero, DIM=dim, PADDED=padded,
                COLUMNS=_COLUMNS, BLOCK=_BLOCK, **chained(device))
        self._correct(attention)
        self._num_held, self._is_solved = 0, True


def new_fit(ops: CudaOperations, stores: Sequence[KVStore], num_heads: int, rules: FitRules) -> CudaRemainder | None:
    """The fit for a partial cache in these stores, of one shape; None where it is off or heads are too large for it."""
    checked = cuda_stores(stores)
    fits = FITS_REMAINDERS and checked[0].dim <= _MAX_DIM
    return CudaRemainder(ops, checked, num_heads, rules) if fits else None
