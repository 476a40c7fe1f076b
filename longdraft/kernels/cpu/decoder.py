"""All layers of a decoder in one call of the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cpu.delta import native_weights
from longdraft.kernels.cpu.store import CpuLinear, native_stores, refuse, require, require_tensor
from longdraft.kernels.interface import REPORTED_ROWS, LayersKV
from longdraft.kernels.weights import Convolution, Experts, Geometry, LayerWeights, Linear, Mlp

with suppress(ImportError):  # the reference is used instead; native.py has the reason
    from longdraft.kernels.cpu import _cpu


def _columns(weight: Linear) -> int:
    return weight.native.k if isinstance(weight, CpuLinear) else 0


class CpuDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`. One call runs all layers. Weights are checked once, here."""

    def __init__(self, kernels: _cpu.Kernels, dtype: torch.dtype, layers: Sequence[LayerWeights],
                 geometry: Geometry) -> None:
        self.kernels = kernels
        self.dtype = dtype
        self._held: list[object] = [*layers]  # keeps the memory alive that the compiled decoder points to
        self._geometry = geometry
        self._hidden = len(layers[0].attention_norm)
        self._norm_dtype = layers[0].attention_norm.dtype
        self._shapes = [layer.heads_in(geometry)[:2] for layer in layers  # of the stores
                        if layer.delta is None and layer.source is None]
        self._largest = max(kv_heads for kv_heads, _ in self._shapes), max(dim for _, dim in self._shapes)
        for kv_heads, dim in self._shapes:
            require(geometry.num_heads % kv_heads == 0 and dim % 2 == 0,
                    "query heads in groups of KV heads, an even dim", geometry)
        require(self._norm_dtype == dtype or (self._norm_dtype == torch.float32 and geometry.rounds_once),
                f"norms of {dtype}, or norms of float32 that round once", self._norm_dtype)
        kv_heads, dim = self._largest
        self.native = _cpu.Decoder(
            heads=geometry.num_heads, kv_heads=kv_heads, dim=dim, eps=geometry.eps, post_norm=geometry.post_norm,
            rounds_once=geometry.rounds_once, residual_factor=geometry.residual_factor, has_gelu=geometry.has_gelu,
            num_ropes=geometry.num_ropes, float_norms=self._norm_dtype == torch.float32 != dtype)
        self._num_stores = 0  # of the layers that were added
        for layer in layers:
            self._check_norms(layer)
            self.native.add(self._delta_layer(layer) if layer.delta is not None
                            else self._attention_layer(layer, layer is layers[0]))
        widths = {layer.extra.gate.out_features if layer.extra else 0 for layer in layers}
        require(len(widths) == 1, "an input for each layer or for none", widths)
        self._input_width = widths.pop() * len(layers)  # of all layers
        self._source_width = _columns(layers[0].qkv)  # of the first layer's queries, keys and values

    def _delta_layer(self, layer: LayerWeights) -> _cpu.Layer:
        assert layer.delta is not None
        shape = layer.delta.shape
        shapes = [(shape.channels + shape.values, self._hidden), (self._hidden, shape.values),
                  (2 * shape.value_heads, self._hidden)]
        qkvz, out, gates = self._checked((layer.qkv, layer.out, layer.gates), shapes)
        mlp, mixture = self._mlp_or_experts(layer)
        return _cpu.Layer(attention_norm=layer.attention_norm, qkv=qkvz, out=out, mlp_norm=layer.mlp_norm, gates=gates,
                          delta=native_weights(layer.delta), mlp=mlp, mixture=mixture)

    def _attention_layer(self, layer: LayerWeights, is_first: bool) -> _cpu.Layer:
        heads = self._geometry.num_heads
        kv_heads, dim, query_factor = layer.heads_in(self._geometry)
        own = 0 if layer.source is not None else 2 * kv_heads
        width = ((2 if layer.is_gated else 1) * heads + own) * dim
        source = _columns(layer.qkv) if is_first else self._hidden  # that of the first layer may be given
        qkv, out = self._checked((layer.qkv, layer.out), [(width, source), (self._hidden, heads * dim)])
        mlp, mixture = self._mlp_or_experts(layer)
        sinks, extra = None, None
        if layer.sinks is not None:
            sinks = layer.sinks.float().contiguous()
            require_tensor("sinks", sinks, (heads,), torch.float32)
            self._held.append(sinks)
        if layer.extra is not None:
            inner = layer.extra.gate.out_features
            gate, back = self._checked(layer.extra[:2], [(inner, self._hidden), (self._hidden, inner)])
            extra = gate, back
        return _cpu.Layer(
            attention_norm=layer.attention_norm, qkv=qkv, out=out, mlp_norm=layer.mlp_norm, kv_heads=kv_heads, dim=dim,
            query_factor=query_factor, window=layer.window, q_norm=layer.q_norm, k_norm=layer.k_norm,
            v_norm=layer.v_norm, norms_heads=layer.q_norm is not None and layer.q_norm.shape == (dim,),
            rotates=layer.rotates, ropes=layer.ropes, sinks=sinks, is_gated=layer.is_gated,
            source=self._checked_source(layer, (kv_heads, dim)), attention_post_norm=layer.attention_post_norm,
            mlp_post_norm=layer.mlp_post_norm, scalar=layer.scalar, mlp=mlp, mixture=mixture,
            beside=layer.beside or (), extra=extra, extra_norm=layer.extra.norm if layer.extra else None,
            is_causal=layer.is_causal, attention_conv=self._convolution(layer.attention_conv),
            mlp_conv=self._convolution(layer.mlp_conv))

    def _convolution(self, conv: Convolution | None) -> tuple[Tensor, _cpu.Linear] | None:
        if conv is None:
            return None
        require(not self._geometry.post_norm, "norms before the sublayers of convolutions", "norms after them")
        base, (projection,) = conv.base.contiguous(), self._checked((conv.projection,),
                                                                    [(conv.projection.out_features, self._hidden)])
        self._held.append(base)
        return base, projection

    def _mlp_or_experts(self, layer: LayerWeights
                        ) -> tuple[tuple[_cpu.Linear, _cpu.Linear] | None, _cpu.Mixture | None]:
        """The layer's MLP, its mixture, or both."""
        mlp = None
        if layer.experts is None or layer.beside is not None:
            assert layer.gate_up is not None and layer.down is not None
            mlp = self._checked_mlp(Mlp(layer.gate_up, layer.down))
        return mlp, None if layer.experts is None else self._mixture(layer.experts)

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

    def _mixture(self, experts: Experts) -> _cpu.Mixture:
        count = len(experts.mlps)
        inner = experts.mlps[0].gate_up.out_features // 2
        require(0 < experts.chosen <= count, f"1 to {count} experts for a row", experts.chosen)
        router, = self._checked((experts.router,), [(count, self._hidden)])
        shared_gate = None
        if experts.shared_gate is not None:
            shared_gate, = self._checked((experts.shared_gate,), [(1, self._hidden)])
        alpha, limit = experts.clamp or (0.0, 0.0)
        return _cpu.Mixture(
            router=router, mlps=[self._checked_mlp(mlp, inner) for mlp in experts.mlps], chosen=experts.chosen,
            normalises=experts.normalises, rounds=experts.rounds, scales=experts.scales, has_gelu=experts.has_gelu,
            alpha=alpha, limit=limit, shared=None if experts.shared is None else self._checked_mlp(experts.shared),
            shared_gate=shared_gate)

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
        rows, num_layers, heads, dim = len(x), len(self._shapes), self._geometry.num_heads, self._largest[1]
        beside = x.shape[1] - self._hidden
        if beside != self._input_width and (self._input_width or beside != self._source_width):
            refuse(f"rows [R, {self._hidden + self._input_width}]", x.shape)
        others = x[:, self._hidden :].to(self.dtype) if beside else None
        given, source = (others, None) if self._input_width else (None, None if others is None else others.contiguous())
        result = x[:, : self._hidden].to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        reported = min(rows, REPORTED_ROWS) if len(texts) == 1 and texts[0].is_prompt else rows
        q, content, output = (torch.empty(num_layers, reported, heads, dim, dtype=self.dtype) for _ in range(3))
        lse = torch.empty(num_layers, reported, heads)
        native_texts = [self._text(kv) for kv in texts]
        self.kernels.forward(self.native, native_texts, result, given, source, cos, sin, parents, q, content, output,
                             lse)
        return result, AttentionOutput(q, output, lse, content)

    def _text(self, kv: LayersKV) -> _cpu.Text:
        tapped, rows = kv.taps or ((), None)
        return _cpu.Text(native_stores(self.dtype, kv.stores, len(self._shapes)), kv.length, kv.k, kv.v, kv.remainder,
                         tapped, rows, kv.deltas)
