"""Layers that run operation by operation, in one CUDA graph for each number of rows of a text.

The operations are those that the host would launch (longdraft/kernels/layer.py). Attention reads the place of the rows
and their tree from the device's memory, so the graph serves every step. What operations allocate belongs to the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_attention
from longdraft.kernels.cuda.attention import AttentionPlan, AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.delta import Paths, PlacedStates, addresses, stacked
from longdraft.kernels.cuda.jit_delta import ENTRY
from longdraft.kernels.cuda.kv_store import CudaStore, cuda_stores, scatter_rows
from longdraft.kernels.cuda.launch import UNFUSED, require, staged_parts
from longdraft.kernels.cuda.operations import CudaOperations
from longdraft.kernels.delta import DeltaRows, DeltaState, DeltaWeights
from longdraft.kernels.interface import KV, AttentionOutput, LayersKV, Taps
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.weights import Geometry, LayerWeights


class _TreeOperations(CudaOperations):
    """Operations whose attention is that of a tree on the device.

    where    int64 [2]: committed positions; the slot of drafted row 0, which is the room of all stores
    parents  int32 [R]
    placed   the states of all delta layers, in order
    """

    def __init__(self, ops: CudaOperations, where: Tensor, parents: Tensor, room: int, placed: PlacedStates) -> None:
        self.__dict__.update(ops.__dict__)
        self._where, self._parents, self._room, self._placed = where, parents, room, placed
        rows = len(parents)
        path, depths = (torch.zeros(*size, dtype=torch.int32, device=ops.device) for size in ((rows, rows), (rows,)))
        self._paths = Paths(path, depths, rows)
        self._num_deltas = 0  # delta layers that have run
        self._rows = torch.arange(len(parents), device=ops.device)
        self._slots = self._rows + room
        self._work: dict[AttentionPlan, AttentionWorkspace] = {}
        self._has_tree: set[AttentionPlan] = set()

    def begin(self) -> None:
        """A forward begins, whose first attention of each shape computes the tree's paths."""
        self._has_tree.clear()
        self._num_deltas = 0

    def delta_rule(self, weights: DeltaWeights, texts: Sequence[DeltaRows], z: Tensor | None,
                   parents: Tensor) -> Tensor | None:
        (rows,), place = texts, self._num_deltas * ENTRY.value
        assert z is not None
        if not self._num_deltas:
            path, depths, stride = self._paths
            jit_attention.tree_paths_kernel[(stride,)](self._parents, path, depths, stride, num_warps=1, **UNFUSED)
        self._num_deltas += 1
        placed = self._placed._replace(table=self._placed.table[place : place + ENTRY.value])
        return self.deltas.run_placed(weights, rows.mixed, rows.gates, z, self._paths, placed)

    def attention(self, q: Tensor, kv: KV, parents: Tensor, window: int = 0) -> AttentionOutput:
        (store,) = cuda_stores([kv.store])
        rows, heads, dim = q.shape
        q, plan = q.to(self.dtype).contiguous(), self.attention_plan(heads, store.heads, dim)
        scatter_rows(kv.k[None], kv.v[None], [store], self._rows, self._slots)
        if plan not in self._work:
            self._work[plan] = AttentionWorkspace(plan, rows, self._room, self.device)
        work = self._work[plan]
        if plan not in self._has_tree:
            self._has_tree.add(plan)
            work.set_tree(self._parents)
        out, lse = torch.empty_like(q), torch.empty(rows, heads, device=self.device)
        remainder = None if kv.remainder is None else kv.remainder.contiguous()
        tree_attention(plan, work, q, store, self._where, self._room, window, remainder, out, lse)
        return AttentionOutput(q, out, lse, q)


class CapturedLayers:
    """The memory of one bucket of rows over one text's stores. It holds no reference to the stores themselves."""

    def __init__(self, ops: CudaOperations, layers: Sequence[LayerWeights], geometry: Geometry,
                 stores: Sequence[CudaStore], rows: int, like: tuple[Tensor, Tensor, Tensor],
                 taps: tuple[int, ...]) -> None:
        """like: rows x, rotations and provisional keys, of any number of rows."""
        x, cos, k = like
        room = stores[0].room
        require(all(store.room == room for store in stores), "stores of one length", [store.room for store in stores])
        self._room, self._taps = room, taps
        self._x, self._cos, self._sin = (torch.zeros(rows, part.shape[1], dtype=part.dtype, device=ops.device)
                                         for part in (x, cos, cos))
        self._k, self._v = (torch.zeros(len(k), rows, *k.shape[2:], dtype=k.dtype, device=ops.device)
                            for _ in range(2))
        self._tapped = torch.zeros(len(taps), rows, len(layers[0].attention_norm), dtype=x.dtype, device=ops.device)
        self._deltas = [layer.delta for layer in layers if layer.delta is not None]
        self._parts = staged_parts(4, rows, 2, 2 * ENTRY.value * len(self._deltas))
        self._staged = torch.zeros(self._parts[-1].stop, dtype=torch.int32, device=ops.device)
        where, parents, count, table = (self._staged[part] for part in self._parts)
        where, count, table = (part.view(torch.int64) for part in (where, count, table))
        self._ops = _TreeOperations(ops, where, parents, room, PlacedStates(table, count, count))
        shape = self._deltas[0].shape if self._deltas else None
        self._mixed, self._gates = (
            torch.zeros(len(self._deltas), rows, width, dtype=dtype, device=ops.device) for width, dtype in
            ((shape.channels if shape else 0, ops.dtype), (2 * shape.value_heads if shape else 0, torch.float32)))
        self._decoder = LayerwiseDecoder(self._ops, layers, geometry)
        self._result: tuple[Tensor, AttentionOutput] | None = None

    def load(self, x: Tensor, cos: Tensor, sin: Tensor, kv: LayersKV, parents: Tensor) -> None:
        """Copy the inputs. Padding rows follow the committed positions; their results are not read."""
        staged = np.full(len(self._staged), -1, dtype=np.int32)
        where, all_parents, count, table = (staged[part] for part in self._parts)
        where.view(np.int64)[:] = kv.length, self._room
        all_parents[: len(parents)], count.view(np.int64)[:] = parents.numpy(), len(parents)
        if self._deltas:
            states = [rows.before for rows in kv.deltas], [rows.after for rows in kv.deltas]
            table.view(np.int64)[:] = np.ravel(addresses(self._deltas, *states))
        self._staged.copy_(torch.from_numpy(staged), non_blocking=True)
        for held, given in ((self._x, x), (self._cos, cos), (self._sin, sin)):
            held[: len(given)].copy_(given)

    def run(self, stores: Sequence[CudaStore]) -> None:
        """All layers. The launches do not depend on the buffers' contents, as a graph requires."""
        self._ops.begin()
        taps = Taps(self._taps, self._tapped) if self._taps else None
        unread = DeltaState(self._staged, self._staged)  # the operations know the states
        deltas = [DeltaRows(unread, unread, *parts) for parts in zip(self._mixed, self._gates, strict=True)]
        kv = LayersKV(stores, self._room, self._k, self._v, taps=taps, deltas=deltas)
        parents = torch.full((len(self._x),), -1, dtype=torch.int32)  # the operations know the tree
        self._result = self._decoder.forward(self._x, self._cos, self._sin, [kv], parents)

    def result_of(self, kv: LayersKV) -> tuple[Tensor, AttentionOutput]:
        """Copies of what the rows of `kv` got, whose k, v and taps are filled."""
        assert self._result is not None
        (hidden, attended), rows = self._result, kv.k.shape[1]
        kv.k.copy_(self._k[:, :rows])
        kv.v.copy_(self._v[:, :rows])
        if kv.taps:
            kv.taps.rows.copy_(self._tapped[:, :rows])
        if kv.deltas:
            inputs = [each.mixed for each in kv.deltas], [each.gates for each in kv.deltas]
            for parts, made in zip(inputs, (self._mixed, self._gates), strict=True):
                given = stacked(parts)
                assert given is not None, "rows of layers of one shape"
                given.copy_(made[:, :rows])
        return hidden[:rows].clone(), AttentionOutput(*(part[:, :rows].clone() for part in attended))
