"""All layers of a model for few rows: fixed memory for each bucket of rows and cache, one graph each.

A forward of 5 rows runs as one of 8, the next bucket: results do not depend on how many rows there are, so the
padding costs a little time and nothing else, and the graphs are few.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longdraft.kernels.cuda import jit_rows, prompt
from longdraft.kernels.cuda.attention import Workspace, attend
from longdraft.kernels.cuda.launch import EXACT, ceil_div, on, padded, require
from longdraft.kernels.cuda.linear import SUM_BLOCK, CudaLinear, Parts
from longdraft.kernels.cuda.store import CudaStore
from longdraft.kernels.interface import AttentionOutput, Geometry, LayersKV, LayerWeights

if TYPE_CHECKING:
    from longdraft.kernels.cuda.kernels import CudaKernels

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)  # rows of a forward; more run as many as they are, without a graph
_STAGES_KEPT = 64  # of living texts: a text that ends takes its own with it
Key = tuple[int, bool, tuple[int, ...]]  # bucket of rows, whether there is a remainder, serials of the stores


class Stage:
    """Memory of one bucket over one cache: what goes in, what comes out, and what is used between.

    It does not hold the cache itself, which goes when its text does.
    """

    def __init__(self, decoder: CudaDecoder, rows: int, stores: Sequence[CudaStore], has_remainder: bool) -> None:
        heads, kv_heads, dim = decoder.geometry[:3]
        layers, device, dtype = decoder.layers, decoder.kernels.device, decoder.kernels.dtype

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num = len(layers)
        self.rows = rows
        self.x_in, self.x, self.normed = (empty(rows, decoder.hidden) for _ in range(3))
        self.cos, self.sin = (empty(rows, dim // 2, dtype=torch.float32) for _ in range(2))
        self.parents = empty(rows, dtype=torch.int32)
        self.where = empty(2, dtype=torch.int64)
        self.k, self.v = (empty(num, rows, kv_heads, dim) for _ in range(2))
        self.q, self.content, self.output = (empty(num, rows, heads, dim) for _ in range(3))
        self.lse = empty(num, rows, heads, dtype=torch.float32)
        self.inner = empty(rows, max(layer.gate_up.out_features for layer in layers) // 2)
        weights = [w for layer in layers for w in decoder.weights_of(layer)]
        self.sums = empty(max(w.sum_size(rows) for w in weights), dtype=torch.float32)
        self.room = min(store.room for store in stores)
        self.work = Workspace(decoder.plan, rows, self.room, device)
        self.remainder = empty(num, heads, dim + 1, dim + 1, dtype=torch.float32) if has_remainder else None
        self.row_remainder = empty(rows, heads, dim + 1, dtype=torch.float32) if has_remainder else None
        self.rest_from: Tensor | None = None

    def load(self, x: Tensor, cos: Tensor, sin: Tensor, kv: LayersKV, parents: Tensor) -> None:
        """The inputs of a forward; rows beyond it follow the prefix and nobody reads them."""
        rows = len(x)
        self.x_in[:rows].copy_(x)
        self.cos[:rows].copy_(cos)
        self.sin[:rows].copy_(sin)
        ends = torch.cat([parents.to(torch.int32), torch.full((self.rows - rows,), -1, dtype=torch.int32)])
        self.parents.copy_(ends, non_blocking=True)
        self.where.copy_(torch.tensor([kv.length, self.room]), non_blocking=True)
        if self.remainder is not None and kv.remainder is not None and self.rest_from is not kv.remainder:
            self.remainder.copy_(kv.remainder)
            self.rest_from = kv.remainder


class CudaDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`."""

    def __init__(self, kernels: CudaKernels, layers: Sequence[LayerWeights], geometry: Geometry) -> None:
        heads, kv_heads, dim = geometry[:3]
        require(heads % kv_heads == 0 and dim % 2 == 0, "query heads in groups of KV heads, an even dim", geometry)
        self.kernels, self.layers, self.geometry = kernels, tuple(layers), geometry
        self.hidden = len(layers[0].attention_norm)
        self.plan = kernels.plan(heads, kv_heads, dim)
        self._stages: dict[Key, Stage] = {}

    def weights_of(self, layer: LayerWeights) -> list[CudaLinear]:
        weights = [w for w in (layer.qkv, layer.out, layer.gate_up, layer.down) if isinstance(w, CudaLinear)]
        require(len(weights) == 4, "weights that these kernels packed", [type(w).__name__ for w in layer[:6]])
        return weights

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        """Texts one after the other: each with the graph of its own rows and cache."""
        found, start = [], 0
        for kv in texts:
            own = slice(start, start + kv.k.shape[1])
            found.append(self._text(x[own], cos[own], sin[own], kv, parents[own]))
            start = own.stop
        if len(found) == 1:
            return found[0]
        seen = (torch.cat(part, 1) for part in zip(*(attention_output for _, attention_output in found), strict=True))
        return torch.cat([hidden for hidden, _ in found]), AttentionOutput(*seen)

    def _text(self, x: Tensor, cos: Tensor, sin: Tensor, kv: LayersKV, parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        rows, stores = len(x), self.kernels.own(kv.stores)
        require(kv.length <= min(store.room for store in stores), "positions that are held", kv.length)
        if kv.is_prompt and kv.remainder is None:
            return prompt.forward(self, x, cos, sin, kv, parents)
        for store in stores:
            store.reserve_drafts(max(rows, BUCKETS[-1]))
        stage = self._stage(rows, stores, kv.remainder is not None)
        stage.load(x, cos, sin, kv, parents)
        if stage.rows in BUCKETS:
            self.kernels.graphs.run(stage, lambda: self._run(stage, stores))
        else:
            self._run(stage, stores)
        kv.k.copy_(stage.k[:, :rows])
        kv.v.copy_(stage.v[:, :rows])
        parts = (part[:, :rows].clone() for part in (stage.q, stage.output, stage.lse, stage.content))
        return stage.x[:rows].clone(), AttentionOutput(*parts)

    def _stage(self, rows: int, stores: Sequence[CudaStore], has_remainder: bool) -> Stage:
        """The memory for so many rows over these stores; what was used last is kept."""
        bucket = next((size for size in BUCKETS if size >= rows), rows)
        key = (bucket, has_remainder, tuple(store.serial for store in stores))
        stage = self._stages.pop(key, None)
        if stage is None:
            stage = Stage(self, bucket, stores, has_remainder)
            if bucket in BUCKETS:
                weakref.finalize(stores[0], _forget, weakref.ref(self), key).atexit = False
        if bucket in BUCKETS:
            self._stages[key] = stage
        while len(self._stages) > _STAGES_KEPT:
            self.forget(next(iter(self._stages)))
        return stage

    def forget(self, key: Key) -> None:
        """Let go of a stage and its graph."""
        if stage := self._stages.pop(key, None):
            self.kernels.graphs.drop(stage)

    def _run(self, stage: Stage, stores: Sequence[CudaStore]) -> None:
        """All layers over a stage's memory; nothing here depends on what that holds."""
        geometry, follows = self.geometry, self.geometry.post_norm
        stage.work.follow(stage.parents)
        x, source = stage.x_in, stage.x_in
        if not follows:
            source = self.kernels.rms_norm_into(x, self.layers[0].attention_norm, geometry.eps, geometry.rounds_once,
                                                stage.normed)
        for index, layer in enumerate(self.layers):
            qkv, out, gate_up, down = self.weights_of(layer)
            self._rotate(stage, stores[index], index, layer, self._parts(stage, source, qkv))
            self._attend(stage, stores[index], index, layer.window)
            mixed = self._parts(stage, stage.output[index].view(stage.rows, -1), out)
            self._add(stage, x, mixed, layer.attention_norm, layer.mlp_norm)
            x, source = stage.x, stage.x if follows else stage.normed
            given = self._parts(stage, self._swiglu(stage, self._parts(stage, source, gate_up)), down)
            is_last = index + 1 == len(self.layers)
            self._add(stage, x, given, layer.mlp_norm, None if is_last else self.layers[index + 1].attention_norm)

    def _parts(self, stage: Stage, x: Tensor, weight: CudaLinear) -> Parts:
        return weight.parts(x, self.kernels.tile, stage.sums)

    def _rotate(self, stage: Stage, store: CudaStore, index: int, layer: LayerWeights, parts: Parts) -> None:
        heads, kv_heads, dim, eps = self.geometry[:4]
        half = dim // 2
        norms = 0 if layer.q_norm is None else 1 if layer.q_norm.shape == (dim,) else 2
        q_norm, k_norm = (parts.sums if norm is None else norm for norm in (layer.q_norm, layer.k_norm))
        with on(stage.x.device):
            jit_rows.rotate[(stage.rows, heads + 2 * kv_heads)](
                *parts.arguments(), q_norm, k_norm, stage.cos, stage.sin, stage.where, stage.content[index],
                stage.q[index], stage.k[index], stage.v[index], store.k, store.v, store.k_scale, store.v_scale,
                stage.rows, store.capacity, eps, self.geometry.query_factor, HEADS=heads, KV_HEADS=kv_heads,
                HALF=half, PADDED=padded(half), ALL_PADDED=padded(heads * dim), NORMS=norms, ROTATES=layer.rotates,
                ROUNDS_ONCE=self.geometry.rounds_once, IS_SCALED=store.is_scaled, **parts.options(), num_warps=1)

    def _attend(self, stage: Stage, store: CudaStore, index: int, window: int) -> None:
        heads, _, dim = self.geometry[:3]
        remainder = stage.row_remainder
        if remainder is not None and stage.remainder is not None:
            with on(stage.x.device):
                jit_rows.map_remainder[(stage.rows, heads)](stage.content[index], stage.remainder[index], remainder, HEADS=heads,
                                                       DIM=dim, PADDED=padded(dim + 1), num_warps=1)
        attend(self.plan, stage.work, stage.q[index], store, stage.where, stage.room, window, remainder,
               stage.output[index], stage.lse[index])

    def _swiglu(self, stage: Stage, parts: Parts) -> Tensor:
        width = parts.sums.shape[2] // 2
        out = stage.inner.view(-1)[: stage.rows * width].view(stage.rows, width)
        with on(out.device):
            jit_rows.swiglu[(stage.rows, ceil_div(width, SUM_BLOCK))](
                *parts.arguments(), out, stage.rows, WIDTH=width, BLOCK=SUM_BLOCK, **parts.options())
        return out

    def _add(self, stage: Stage, x: Tensor, parts: Parts, own: Tensor, after: Tensor | None) -> None:
        """x plus what a linear gave, into stage.x; normalised for what comes after into stage.normed."""
        follows, factor = self.geometry.post_norm, self.geometry.residual_factor
        norms_next = after is not None and not follows
        with on(x.device):
            jit_rows.add_and_norm[(stage.rows,)](
                x, *parts.arguments(), own, after if norms_next else own, stage.x, stage.normed, stage.rows, factor,
                self.geometry.eps, WIDTH=self.hidden, PADDED=padded(self.hidden), HAS_FACTOR=factor != 1,
                NORMS_OWN=follows, NORMS_NEXT=norms_next, ROUNDS_ONCE=self.geometry.rounds_once, **parts.options(),
                num_warps=8, **EXACT)


def _forget(decoder: weakref.ref[CudaDecoder], key: Key) -> None:
    """The stage's cache is no more: its serials will not come again."""
    if found := decoder():
        found.forget(key)
