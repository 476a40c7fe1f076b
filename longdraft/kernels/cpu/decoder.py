"""All layers of a decoder in one call of the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cpu import delta as cpu_delta
from longdraft.kernels.cpu.store import (
    CpuLinear,
    CpuStore,
    address,
    are_layers,
    refuse,
    remainder_address,
    require,
    require_length,
    require_tensor,
)
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import REPORTED_ROWS, KVStore, LayersKV, RemainderMaps
from longdraft.kernels.weights import Experts, Geometry, LayerWeights, Linear, Mlp

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu


class CpuDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`. One call runs all layers. Weights are checked once, here."""

    def __init__(self, kernels: _cpu.Kernels, dtype: torch.dtype, layers: Sequence[LayerWeights],
                 geometry: Geometry) -> None:
        self.kernels, self.dtype = kernels, dtype
        self._layers = tuple(layers)  # keeps the tensors alive that the compiled decoder points to
        self._sinks: list[Tensor] = []  # likewise
        self._geometry = geometry
        heads = geometry.num_heads
        self._hidden = len(layers[0].attention_norm)
        self._norm_dtype = layers[0].attention_norm.dtype
        self._deltas = [layer.delta for layer in layers if layer.delta is not None]
        self._shapes = [layer.heads_in(geometry)[:2] for layer in layers  # of the stores
                        if layer.delta is None and layer.source is None]
        self._kinds = [(dtype == torch.bfloat16, *shape) for shape in self._shapes]  # of the stores as well
        self._largest = max(kv_heads for kv_heads, _ in self._shapes), max(dim for _, dim in self._shapes)
        for kv_heads, dim in self._shapes:
            require(heads % kv_heads == 0 and dim % 2 == 0, "query heads in groups of KV heads, an even dim", geometry)
        require(self._norm_dtype == dtype or (self._norm_dtype == torch.float32 and geometry.rounds_once),
                f"norms of {dtype}, or norms of float32 that round once", self._norm_dtype)
        self.native = _cpu.Decoder(heads, *self._largest, geometry.eps, geometry.post_norm, geometry.rounds_once,
                                   geometry.residual_factor, geometry.has_gelu, geometry.num_ropes,
                                   self._norm_dtype == torch.float32 != dtype)
        self._known_taps: tuple[int, ...] = ()  # tapped layers that were checked
        self._num_stores = 0  # of the layers that were added
        for layer in self._layers:
            self._add(layer)
        widths = {layer.extra.gate.out_features if layer.extra else 0 for layer in layers}
        require(len(widths) == 1, "an input for each layer or for none", widths)
        self._input_width = widths.pop() * len(layers)  # of all layers

    def _add(self, layer: LayerWeights) -> None:
        self._check_norms(layer)
        norms = layer.attention_norm.data_ptr(), layer.mlp_norm.data_ptr()
        if layer.delta is not None:
            cpu_delta.check_weights(layer.delta)
            shape = layer.delta.shape
            shapes = [(shape.channels + shape.values, self._hidden), (self._hidden, shape.values),
                      (2 * shape.value_heads, self._hidden)]
            qkvz, out, gates = self._checked((layer.qkv, layer.out, layer.gates), shapes)
            self.native.add_delta(norms[0], qkvz, out, norms[1], gates, layer.delta.shape,
                                  cpu_delta.weight_addresses(layer.delta), layer.delta.eps)
        else:
            heads, (kv_heads, dim, query_factor) = self._geometry.num_heads, layer.heads_in(self._geometry)
            own = 0 if layer.source is not None else 2 * kv_heads
            width = ((2 if layer.is_gated else 1) * heads + own) * dim
            qkv, out = self._checked((layer.qkv, layer.out), [(width, self._hidden), (self._hidden, heads * dim)])
            norms_heads = layer.q_norm is not None and layer.q_norm.shape == (dim,)
            source = self._checked_source(layer, (kv_heads, dim))
            self.native.add(norms[0], qkv, out, norms[1], layer.window, address(layer.q_norm), address(layer.k_norm),
                            norms_heads, layer.rotates, layer.ropes, address(layer.attention_post_norm),
                            address(layer.mlp_post_norm), layer.is_gated, self._sinks_address(layer))
            self.native.set_heads((kv_heads, dim), query_factor, address(layer.v_norm), source, layer.scalar)
        if layer.experts is not None:
            self._set_mixture(layer.experts)
        if layer.beside is not None:
            self.native.set_beside(*(address(norm) for norm in layer.beside))
        if layer.experts is None or layer.beside is not None:
            assert layer.gate_up is not None and layer.down is not None
            self.native.set_mlp(*self._checked_mlp(Mlp(layer.gate_up, layer.down)))
        if layer.extra is not None:
            width = layer.extra.gate.out_features
            gate, out = self._checked(layer.extra[:2], [(width, self._hidden), (self._hidden, width)])
            self.native.set_extra(gate, out, address(layer.extra.norm))

    def _checked_source(self, layer: LayerWeights, shape: tuple[int, int]) -> int:
        """The layer whose keys and values this one reads; -1: its own."""
        if layer.source is None:
            self._num_stores += 1
            return -1
        require(0 <= layer.source < self._num_stores and self._shapes[layer.source] == shape,
                f"keys and values {shape} of an earlier layer", layer.source)
        require(layer.sinks is None and not layer.is_gated, "a layer with keys and values of its own", "another one")
        return layer.source

    def _checked(self, linears: Sequence[Linear | None], wanted: Sequence[tuple[int, int]]) -> list[_cpu.Linear]:
        """The compiled weights. ValueError where one has another shape or dtype."""
        weights = [w.native for w in linears if isinstance(w, CpuLinear)]
        shapes = [(w.n, w.k) for w in weights]
        require(shapes == list(wanted), f"weights {list(wanted)}", shapes)
        require(all(w.is_bf16 == (self.dtype == torch.bfloat16) for w in weights), f"weights of {self.dtype}",
                "another dtype")
        return weights

    def _checked_mlp(self, mlp: Mlp, inner: int | None = None) -> tuple[_cpu.Linear, _cpu.Linear]:
        """gate_up and down. inner: their width; None: any"""
        inner = mlp.gate_up.out_features // 2 if inner is None else inner
        gate_up, down = self._checked(mlp, [(2 * inner, self._hidden), (self._hidden, inner)])
        return gate_up, down

    def _set_mixture(self, experts: Experts) -> None:
        count, inner = len(experts.mlps), experts.mlps[0].gate_up.out_features // 2
        require(0 < experts.chosen <= count, f"1 to {count} experts for a row", experts.chosen)
        require((experts.shared is None) == (experts.shared_gate is None), "a shared expert and its gate", "one")
        router, = self._checked((experts.router,), [(count, self._hidden)])
        shared: list[_cpu.Linear] = []
        if experts.shared is not None:
            shared = [*self._checked_mlp(experts.shared), *self._checked((experts.shared_gate,), [(1, self._hidden)])]
        alpha, limit = experts.clamp or (0.0, 0.0)
        if experts.scales is not None:
            require_tensor("scales of experts", experts.scales, (count,), torch.float32)
        self.native.set_mixture(router, [self._checked_mlp(mlp, inner) for mlp in experts.mlps], experts.chosen,
                                experts.normalises, experts.rounds, address(experts.scales), experts.has_gelu, alpha,
                                limit, shared)

    def _sinks_address(self, layer: LayerWeights) -> int:
        if layer.sinks is None:
            return 0
        sinks = layer.sinks.float().contiguous()
        require_tensor("sinks", sinks, (self._geometry.num_heads,), torch.float32)
        self._sinks.append(sinks)
        return sinks.data_ptr()

    def _check_norms(self, layer: LayerWeights) -> None:
        """ValueError where norms, rotations or a window do not fit."""
        heads, (kv_heads, dim, _) = self._geometry.num_heads, layer.heads_in(self._geometry)
        norms = (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm,
                 *(layer.beside or ()), *(layer.extra[2:] if layer.extra else ()))
        for norm in norms:
            if norm is not None:
                require_tensor("a norm", norm, (self._hidden,), self._norm_dtype)
        has_keys = layer.source is None
        require((layer.q_norm is None) == (layer.k_norm is None) or not has_keys,
                "both a q_norm and a k_norm, or neither", "one")
        are_heads = layer.q_norm is not None and layer.q_norm.shape == (dim,)
        for name, norm, units in (("q_norm", layer.q_norm, heads), ("k_norm", layer.k_norm, kv_heads)):
            if norm is not None:
                require_tensor(name, norm, ((1 if are_heads else units) * dim,), self._norm_dtype)
        if layer.v_norm is not None:
            require_tensor("v_norm", layer.v_norm, (dim,), self._norm_dtype)
        require(all(0 <= rope < self._geometry.num_ropes for rope in layer.ropes), "known rotations", layer.ropes)
        require(layer.window >= 0, "a window of 0 or more positions", layer.window)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        heads, (kv_heads, dim) = self._geometry.num_heads, self._largest
        num_layers, rows, dtype = len(self._shapes), x.shape[0], self.dtype
        width = self._hidden + self._input_width
        if x.shape != (rows, width):
            refuse(f"rows [R, {width}]", x.shape)
        self._require_rotations(cos, sin, rows)
        require_tensor("parents", parents, (rows,), torch.int32)
        shape = (num_layers, rows, kv_heads, dim)
        k, v = (_whole_address(parts, shape, dtype) for parts in ([kv.k for kv in texts], [kv.v for kv in texts]))
        stores = [self._native_stores(kv.stores, kv.length) for kv in texts]
        result, given = x, x  # where layers have no other inputs
        if self._input_width:
            result, given = x[:, : self._hidden], x[:, self._hidden :].to(dtype)
            require(given.stride(1) == 1, "rows of adjacent numbers", x.stride())
        result = result.to(dtype, copy=True, memory_format=torch.contiguous_format)
        reported = min(rows, REPORTED_ROWS) if len(texts) == 1 and texts[0].is_prompt else rows
        q, content, output = (torch.empty(num_layers, reported, heads, dim, dtype=dtype) for _ in range(3))
        lse = torch.empty(num_layers, reported, heads)
        self.kernels.forward(
            self.native, stores, [kv.length for kv in texts], [kv.k.shape[1] for kv in texts],
            [self._remainder_addresses(kv.remainder) for kv in texts],
            [self._tap_addresses(kv) for kv in texts], [self._delta_addresses(kv) for kv in texts], result.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), parents.data_ptr(), reported, q.data_ptr(), content.data_ptr(), k, v,
            output.data_ptr(), lse.data_ptr(), given.data_ptr(), given.stride(0))
        return result, AttentionOutput(q, output, lse, content)

    def _native_stores(self, stores: Sequence[KVStore], length: int) -> list[_cpu.Store]:
        known = [store for store in stores if isinstance(store, CpuStore)]
        if [store.kind for store in known] != self._kinds:
            refuse(f"stores of {self._shapes} heads and dimensions in {self.dtype}",
                   [store.kind for store in known])
        native = [store.native for store in known]
        require_length(length, native)
        return native

    def _remainder_addresses(self, maps: RemainderMaps) -> list[int]:
        """Of each layer's map; empty for None."""
        if maps is None:
            return []
        heads, count, dim = self._geometry.num_heads, len(self._shapes), self._largest[1]
        if isinstance(maps, Tensor):
            first = remainder_address(maps, (count, heads, dim + 1, dim + 1))
            return [first + index * maps.stride(0) * maps.itemsize for index in range(count)]
        require(len(maps) == count, f"remainders of {count} layers", maps)
        return [remainder_address(each, (heads, dim + 1, dim + 1))
                for each, (_, dim) in zip(maps, self._shapes, strict=True)]

    def checked_norm(self, norm: Tensor) -> Tensor:
        """The norm of the layers' inputs. ValueError if it does not fit."""
        require_tensor("the norm of inputs", norm, (self._input_width // len(self._layers),), self._norm_dtype)
        return norm

    def _require_rotations(self, cos: Tensor, sin: Tensor, rows: int) -> None:
        width = self._geometry.num_ropes * self._largest[1] // 2
        require_tensor("cos", cos, (rows, width), torch.float32)
        require_tensor("sin", sin, (rows, width), torch.float32)

    def _tap_addresses(self, kv: LayersKV) -> list[int]:
        """For each layer, and for the result: where to copy the rows that enter it, or 0; empty without taps."""
        if not kv.taps:
            return []
        layers, rows = kv.taps
        if layers != self._known_taps:
            require(len(set(layers)) == len(layers) and all(0 <= layer <= len(self._layers) for layer in layers),
                    f"different tapped layers, 0 to {len(self._layers)}", layers)
            self._known_taps = layers
        count = kv.k.shape[1]
        require_tensor("tapped rows", rows, (len(layers), count, self._hidden), self.dtype)
        where, start = [0] * (len(self._layers) + 1), rows.data_ptr()
        for layer in layers:
            where[layer] = start
            start += count * self._hidden * self.dtype.itemsize
        return where

    def _delta_addresses(self, kv: LayersKV) -> list[list[int]]:
        """Of the text's rows in each delta layer."""
        if not kv.deltas and not self._deltas:
            return []
        require(len(kv.deltas) == len(self._deltas), f"rows of {len(self._deltas)} delta layers", len(kv.deltas))
        for delta, rows in zip(self._deltas, kv.deltas, strict=True):
            require(len(rows.mixed) == kv.k.shape[1], f"{kv.k.shape[1]} rows in a delta layer", len(rows.mixed))
            cpu_delta.check_rows(delta.shape, rows, self.dtype)
        return [cpu_delta.row_addresses(rows) for rows in kv.deltas]

    def chain_arguments(self, states: Sequence[tuple[DeltaState, ...]]) -> list[list[int]]:
        """Addresses of the three states of each delta layer that a chain of drafts reads and writes."""
        require(len(states) == len(self._deltas), f"states of {len(self._deltas)} delta layers", len(states))
        for delta, three in zip(self._deltas, states, strict=True):
            for state in three:
                cpu_delta.check_state(delta.shape, state, self.dtype)
            require(three[1].matrix.data_ptr() not in (three[0].matrix.data_ptr(), three[2].matrix.data_ptr()),
                    "a first row that writes to another state than it reads", "one")
        return [[part.data_ptr() for state in three for part in state] for three in states]

    def draft_arguments(self, stores: Sequence[KVStore], length: int, remainder: RemainderMaps, cos: Tensor,
                        sin: Tensor) -> tuple[list[_cpu.Store], list[int]]:
        """The compiled stores and the remainder's addresses for a chain of drafts, checked as `forward` checks them."""
        self._require_rotations(cos, sin, len(cos))
        return self._native_stores(stores, length), self._remainder_addresses(remainder)


def _whole_address(parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The address of the tensor [L, R, Hkv, D] of which `parts` are consecutive slices [L, T, Hkv, D]."""
    num_layers, rows, heads, dim = shape
    start = parts[0].data_ptr()
    if len(parts) == 1:
        require_tensor("keys and values", parts[0], shape, dtype)
        return start
    width = heads * dim
    row, size = 0, width * dtype.itemsize
    for part in parts:
        count = part.shape[1]
        fits = (part.dtype == dtype and count > 0 and part.shape == (num_layers, count, heads, dim)
                and part.data_ptr() == start + row * size and are_layers(part, rows * width))
        if not fits:
            refuse(f"keys and values {shape} of {dtype}, a slice for each text", (part.shape, part.dtype))
        row += count
    require(row == rows, f"keys and values of {rows} rows", row)
    return start
