"""All layers of a decoder in one call of the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels import cpu_delta
from longdraft.kernels.cpu_store import (
    CpuLinear,
    address,
    are_layers,
    native_stores,
    remainder_address,
    require,
    require_length,
    require_tensor,
)
from longdraft.kernels.delta import DeltaState
from longdraft.kernels.interface import AttentionOutput, KVStore, LayersKV
from longdraft.kernels.weights import Experts, Geometry, LayerWeights, Linear, Mlp

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels import _cpu


class CpuDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`. One call runs all layers. Weights are checked once, here."""

    def __init__(self, kernels: _cpu.Kernels, dtype: torch.dtype, layers: Sequence[LayerWeights],
                 geometry: Geometry) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._layers = tuple(layers)  # keeps the tensors alive that the compiled decoder points to
        self._sinks: list[Tensor] = []  # likewise
        self._geometry = geometry
        heads, kv_heads, dim = geometry[:3]
        self._hidden = len(layers[0].attention_norm)
        self._norm_dtype = layers[0].attention_norm.dtype
        self._deltas = [layer.delta for layer in layers if layer.delta is not None]
        self._num_attentions = len(layers) - len(self._deltas)
        require(heads % kv_heads == 0 and dim % 2 == 0, "query heads in groups of KV heads, an even dim", geometry)
        require(self._norm_dtype == dtype or (self._norm_dtype == torch.float32 and geometry.rounds_once),
                f"norms of {dtype}, or norms of float32 that round once", self._norm_dtype)
        self.native = _cpu.Decoder(*geometry, self._norm_dtype == torch.float32 != dtype)
        for layer in self._layers:
            self._add(layer)

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
            heads, kv_heads, dim = self._geometry[:3]
            width = ((2 if layer.is_gated else 1) * heads + 2 * kv_heads) * dim
            qkv, out = self._checked((layer.qkv, layer.out), [(width, self._hidden), (self._hidden, heads * dim)])
            norms_heads = layer.q_norm is not None and layer.q_norm.shape == (dim,)
            self.native.add(norms[0], qkv, out, norms[1], layer.window, address(layer.q_norm), address(layer.k_norm),
                            norms_heads, layer.rotates, layer.ropes, address(layer.attention_post_norm),
                            address(layer.mlp_post_norm), layer.is_gated, self._sinks_address(layer))
        if layer.experts is not None:
            self._set_mixture(layer.experts)
        else:
            assert layer.gate_up is not None and layer.down is not None
            self.native.set_mlp(*self._checked_mlp(Mlp(layer.gate_up, layer.down)))

    def _checked(self, linears: Sequence[Linear | None], wanted: Sequence[tuple[int, int]]) -> list[_cpu.Linear]:
        """The compiled weights. ValueError where one has another shape or dtype."""
        weights = [w.native for w in linears if isinstance(w, CpuLinear)]
        shapes = [(w.n, w.k) for w in weights]
        require(shapes == list(wanted), f"weights {list(wanted)}", shapes)
        require(all(w.is_bf16 == (self._dtype == torch.bfloat16) for w in weights), f"weights of {self._dtype}",
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
        self.native.set_mixture(router, [self._checked_mlp(mlp, inner) for mlp in experts.mlps], experts.chosen,
                                experts.normalises, experts.rounds, alpha, limit, shared)

    def _sinks_address(self, layer: LayerWeights) -> int:
        if layer.sinks is None:
            return 0
        sinks = layer.sinks.float().contiguous()
        require_tensor("sinks", sinks, (self._geometry.num_heads,), torch.float32)
        self._sinks.append(sinks)
        return sinks.data_ptr()

    def _check_norms(self, layer: LayerWeights) -> None:
        """ValueError where norms, rotations or a window do not fit."""
        heads, kv_heads, dim = self._geometry[:3]
        for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"):
            if (norm := getattr(layer, name)) is not None:
                require_tensor(name, norm, (self._hidden,), self._norm_dtype)
        require((layer.q_norm is None) == (layer.k_norm is None), "both a q_norm and a k_norm, or neither", "one")
        if layer.q_norm is not None and layer.k_norm is not None:
            q_units, k_units = (1, 1) if layer.q_norm.shape == (dim,) else (heads, kv_heads)
            require_tensor("q_norm", layer.q_norm, (q_units * dim,), self._norm_dtype)
            require_tensor("k_norm", layer.k_norm, (k_units * dim,), self._norm_dtype)
        require(all(0 <= rope < self._geometry.num_ropes for rope in layer.ropes), "known rotations", layer.ropes)
        require(layer.window >= 0, "a window of 0 or more positions", layer.window)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        heads, kv_heads, dim = self._geometry[:3]
        num_layers, rows, dtype = self._num_attentions, x.shape[0], self._dtype
        require(x.shape == (rows, self._hidden), f"rows [R, {self._hidden}]", x.shape)
        self._require_rotations(cos, sin, rows)
        require_tensor("parents", parents, (rows,), torch.int32)
        shape = (num_layers, rows, kv_heads, dim)
        k, v = (_whole_address(parts, shape, dtype) for parts in ([kv.k for kv in texts], [kv.v for kv in texts]))
        stores = [native_stores(self._dtype, kv.stores, num_layers, kv_heads, dim) for kv in texts]
        for kv, native in zip(texts, stores, strict=True):
            require_length(kv.length, native)
        result = x.to(dtype, copy=True).contiguous()
        q, content, output = (torch.empty(num_layers, rows, heads, dim, dtype=dtype) for _ in range(3))
        lse = torch.empty(num_layers, rows, heads)
        self._kernels.forward(
            self.native, stores, [kv.length for kv in texts], [kv.k.shape[1] for kv in texts],
            [remainder_address(kv.common_remainder, (num_layers, heads, dim + 1, dim + 1)) for kv in texts],
            [self._tap_addresses(kv) for kv in texts], [self._delta_addresses(kv) for kv in texts], result.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), parents.data_ptr(), q.data_ptr(), content.data_ptr(), k, v,
            output.data_ptr(), lse.data_ptr())
        return result, AttentionOutput(q, output, lse, content)

    def _require_rotations(self, cos: Tensor, sin: Tensor, rows: int) -> None:
        width = self._geometry.num_ropes * self._geometry.head_dim // 2
        require_tensor("cos", cos, (rows, width), torch.float32)
        require_tensor("sin", sin, (rows, width), torch.float32)

    def _tap_addresses(self, kv: LayersKV) -> list[int]:
        """For each layer, and for the result: where to copy the rows that enter it, or 0; empty without taps."""
        if not kv.taps:
            return []
        layers, rows = kv.taps
        require(len(set(layers)) == len(layers) and all(0 <= layer <= len(self._layers) for layer in layers),
                 f"different tapped layers, 0 to {len(self._layers)}", layers)
        require_tensor("tapped rows", rows, (len(layers), kv.k.shape[1], self._hidden), self._dtype)
        where = [0] * (len(self._layers) + 1)
        for place, layer in enumerate(layers):
            where[layer] = rows.data_ptr() + place * rows.stride(0) * rows.itemsize
        return where

    def _delta_addresses(self, kv: LayersKV) -> list[list[int]]:
        """Of the text's rows in each delta layer."""
        require(len(kv.deltas) == len(self._deltas), f"rows of {len(self._deltas)} delta layers", len(kv.deltas))
        for delta, rows in zip(self._deltas, kv.deltas, strict=True):
            require(len(rows.mixed) == kv.k.shape[1], f"{kv.k.shape[1]} rows in a delta layer", len(rows.mixed))
            cpu_delta.check_rows(delta.shape, rows, self._dtype)
        return [cpu_delta.row_addresses(rows) for rows in kv.deltas]

    def chain_arguments(self, states: Sequence[tuple[DeltaState, ...]]) -> list[list[int]]:
        """Addresses of the three states of each delta layer that a chain of drafts reads and writes."""
        require(len(states) == len(self._deltas), f"states of {len(self._deltas)} delta layers", len(states))
        for delta, three in zip(self._deltas, states, strict=True):
            for state in three:
                cpu_delta.check_state(delta.shape, state, self._dtype)
            require(three[1].matrix.data_ptr() not in (three[0].matrix.data_ptr(), three[2].matrix.data_ptr()),
                    "a first row that writes to another state than it reads", "one")
        return [[part.data_ptr() for state in three for part in state] for three in states]

    def draft_arguments(self, stores: Sequence[KVStore], length: int, remainder: Tensor | None, cos: Tensor,
                        sin: Tensor) -> tuple[list[_cpu.Store], int]:
        """The compiled stores and the remainder's address for a chain of drafts, checked as `forward` checks them."""
        heads, kv_heads, dim = self._geometry[:3]
        native = native_stores(self._dtype, stores, self._num_attentions, kv_heads, dim)
        require_length(length, native)
        self._require_rotations(cos, sin, len(cos))
        return native, remainder_address(remainder, (len(native), heads, dim + 1, dim + 1))


def _whole_address(parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The address of the tensor [L, R, Hkv, D] of which `parts` are consecutive slices [L, T, Hkv, D]."""
    num_layers, rows, heads, dim = shape
    width, start = heads * dim, parts[0].data_ptr()
    row, size = 0, width * dtype.itemsize
    for part in parts:
        count = part.shape[1]
        fits = (part.dtype == dtype and count > 0 and part.shape == (num_layers, count, heads, dim)
                and part.data_ptr() == start + row * size and are_layers(part, rows * width))
        if not fits:
            require(False, f"keys and values {shape} of {dtype}, a slice for each text", (part.shape, part.dtype))
        row += count
    require(row == rows, f"keys and values of {rows} rows", row)
    return start
