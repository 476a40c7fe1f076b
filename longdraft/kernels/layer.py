"""The layers of a decoder in terms of single operations. They define what the fused kernels compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.delta import DeltaRows
from longdraft.kernels.experts import experts_forward
from longdraft.kernels.interface import KV, HybridOperations, LayerOperations, LayersKV
from longdraft.kernels.weights import Convolution, Geometry, LayerWeights


@runtime_checkable
class RunsLayers(Protocol):
    """Operations that run some layers of their own with fused kernels."""

    def layers_forward(self, x: Tensor, source: Tensor | None, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """The output [R, hidden] of the layers. source: as for `layer_forward`, of the first one."""


class _Residuals:
    """The norms and the additions around the parts of a layer."""

    def __init__(self, ops: LayerOperations, geometry: Geometry) -> None:
        self._ops = ops
        self._geometry = geometry

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise vectors of the weight's length, which may span the last two axes."""
        if weight is None:
            return x
        return self._ops.rms_norm(x.reshape(-1, len(weight)), weight, self._geometry.eps,
                                  rounds_once=self._geometry.rounds_once).view(x.shape)

    def before(self, x: Tensor, weight: Tensor) -> Tensor:
        """The input of a part."""
        return x if self._geometry.post_norm else self.norm(x, weight)

    def add(self, x: Tensor, output: Tensor, weight: Tensor, post: Tensor | None) -> Tensor:
        """Rows x with the output of a part. weight: of its norm; post: of a norm after it, if it has both."""
        output = self.norm(output, weight if self._geometry.post_norm else post)
        factor = self._geometry.residual_factor
        return x + (output if factor == 1 else output * factor)

    def add_mlp(self, x: Tensor, layer: LayerWeights, sizes: list[int]) -> Tensor:
        """sizes: rows of each text, for convolutions"""
        source, kernel = convolved_before(self._ops, self.before(x, layer.mlp_norm), layer.mlp_conv, sizes)
        output = convolved_after(self._mlp(source, layer), kernel, sizes)
        if layer.beside is not None and layer.experts is not None:
            norms = layer.beside
            mixed = experts_forward(self._ops, self.norm(x, norms.experts), layer.experts, self.norm(x, norms.router))
            output = self.norm(output, norms.mlp_post) + self.norm(mixed, norms.experts_post)
        return self.add(x, output, layer.mlp_norm, layer.mlp_post_norm)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """The output of a layer's MLP, or of its experts."""
        if layer.experts is not None and layer.beside is None:
            return experts_forward(self._ops, x, layer.experts)
        assert layer.gate_up is not None and layer.down is not None
        gated = self._ops.geglu if self._geometry.has_gelu else self._ops.swiglu
        return self._ops.linear(gated(self._ops.linear(x, layer.gate_up)), layer.down)


def layer_forward(ops: LayerOperations, x: Tensor, layer: LayerWeights, geometry: Geometry, cos: Tensor, sin: Tensor,
                  texts: Sequence[KV], parents: Tensor, source: Tensor | None = None) -> tuple[Tensor, AttentionOutput]:
    """Run rows x [R, hidden] of one or more texts through one layer with attention. Fills the k and v of `texts`.

    source  [R, K], the input of queries, keys and values; None: x after the layer's first norm

    The remainder of a text is the map [H, D + 1, D + 1] of `LayersKV` here. Other arguments and the result are those of
    `longdraft.kernels.interface.Decoder.forward`, for a single layer.
    """
    heads, (kv_heads, dim, query_factor) = geometry.num_heads, layer.heads_in(geometry)
    around = _Residuals(ops, geometry)
    source = around.before(x, layer.attention_norm) if source is None else source
    sizes = [len(kv.k) for kv in texts]
    source, kernel = convolved_before(ops, source, layer.attention_conv, sizes)
    qkv = ops.linear(source, layer.qkv).view(len(x), -1, dim)  # and the gate's heads, if there are any
    content = around.norm(qkv[:, :heads], layer.q_norm)
    if not layer.rotates:
        cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    of_queries, of_keys = ([part.view(len(x), geometry.num_ropes, -1)[:, index, : dim // 2].contiguous()
                            for part in (cos, sin)] for index in layer.ropes)
    q = ops.rope(content, *(part * query_factor for part in of_queries))
    end = heads + 2 * kv_heads
    if layer.source is None:
        k = ops.rope(around.norm(qkv[:, heads : heads + kv_heads], layer.k_norm), *of_keys)
        v = around.norm(qkv[:, end - kv_heads : end], layer.v_norm)
    outputs = []
    start = 0
    for kv in texts:
        own = slice(start, start + len(kv.k))
        if layer.source is None:
            kv.k.copy_(k[own])
            kv.v.copy_(v[own])
        if kv.remainder is not None:
            kv = kv._replace(remainder=_row_remainders(content[own], kv.remainder))
        elif not layer.is_causal:  # the rows are a chain; those after a row are its remainder
            kv = kv._replace(remainder=attention_to_later(q[own], kv.k, kv.v))
        elif layer.sinks is not None:  # a remainder of drafts contains them: it is part of the full attention
            kv = kv._replace(remainder=_of_sinks(layer.sinks, len(kv.k), dim))
        outputs.append(ops.attention(q[own], kv, parents[own], layer.window))
        start = own.stop
    attended = outputs[0] if len(outputs) == 1 else AttentionOutput(*map(torch.cat, zip(*outputs, strict=True)))
    attended = attended._replace(content=content)
    output = attended.output.flatten(1)
    if layer.is_gated:
        output = ops.gate(output, qkv.flatten(1)[:, end * dim :])
    output = convolved_after(ops.linear(output, layer.out), kernel, sizes)
    x = around.add(x, output, layer.attention_norm, layer.attention_post_norm)
    return around.add_mlp(x, layer, sizes), attended


def attention_to_later(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row's attention to the rows after it, as `KV.remainder`: [T, H, D + 1] float32.

    q [T, H, D]; k, v [T, Hkv, D]
    """
    count, heads, dim = q.shape
    keys, values = (part.float().repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.float(), keys) / math.sqrt(dim)
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool, device=q.device).tril(), -torch.inf)
    total = scores.logsumexp(-1)  # [H, T]; -inf: there are none
    weights = (scores - total.clamp_min(-1e30)[..., None]).exp()
    output = torch.einsum("hij,jhd->ihd", weights, values)
    return torch.cat([output, total.T[..., None]], -1).contiguous()


def convolved_before(ops: LayerOperations, x: Tensor, conv: Convolution | None,
                     sizes: list[int]) -> tuple[Tensor, Tensor | None]:
    """Rows [T, hidden] after the convolution before a sublayer, and the kernel [T, taps, hidden] of the one after it.
    sizes: rows of each text"""
    if conv is None:
        return x, None
    _, taps, width = conv.base.shape
    moving = ops.linear(x, conv.projection, keep_float=True).view(len(x), 2, taps, -1)
    kernel = conv.base + moving.repeat_interleave(width // moving.shape[3], 3)
    return convolved_after(x, kernel[:, 0], sizes), kernel[:, 1]


def convolved_after(x: Tensor, kernel: Tensor | None, sizes: list[int]) -> Tensor:
    """Rows [T, hidden] after a convolution with their kernels [T, taps, hidden]; None: there is none."""
    if kernel is None:
        return x
    return torch.cat([_convolved(*part) for part in zip(*(torch.split(each, sizes) for each in (x, kernel)),
                                                         strict=True)])


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """sum over t of kernel[i, t] * x[i - t] for rows x [T, hidden] of a text; zeros are before the first row."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for tap in range(min(kernel.shape[1], len(x))):
        total[tap:] += kernel[tap:, tap] * x[: len(x) - tap].float()
    return total.to(x.dtype)


def layer_end(ops: LayerOperations, x: Tensor, layer: LayerWeights, geometry: Geometry, given: Tensor) -> Tensor:
    """The rows x that leave a layer, after its MLP. given: the layer's own input [R, P], if it has one."""
    if layer.extra is not None:
        gated = ops.geglu(torch.cat([ops.linear(x, layer.extra.gate), given], 1))
        x = x + _Residuals(ops, geometry).norm(ops.linear(gated, layer.extra.out), layer.extra.norm)
    return x if layer.scalar == 1 else x * layer.scalar


def _row_remainders(content: Tensor, maps: Tensor) -> Tensor:
    """The remainder [T, H, D + 1] of rows with these queries before rotation [T, H, D]."""
    return (torch.einsum("thd,hde->the", content.float(), maps[:, :-1]) + maps[:, -1]).contiguous()


def _of_sinks(sinks: Tensor, rows: int, dim: int) -> Tensor:
    """Sinks [H] as a remainder [T, H, D + 1]: outputs of 0 with their scores as log-sum-exps."""
    remainder = torch.zeros(rows, len(sinks), dim + 1, device=sinks.device)
    remainder[..., -1] = sinks
    return remainder


def delta_forward(ops: HybridOperations, x: Tensor, layer: LayerWeights, geometry: Geometry, texts: Sequence[DeltaRows],
                  parents: Tensor) -> Tensor:
    """Run rows x [R, hidden] of one or more texts through one delta layer. Fills `texts`."""
    assert layer.delta is not None and layer.gates is not None
    around = _Residuals(ops, geometry)
    channels = layer.delta.shape.channels
    source = around.before(x, layer.attention_norm)
    qkvz, gates = ops.linear(source, layer.qkv), ops.linear(source, layer.gates, keep_float=True)
    counts = [len(rows.mixed) for rows in texts]
    for rows, mixed, own in zip(texts, torch.split(qkvz[:, :channels], counts), torch.split(gates, counts),
                                strict=True):
        rows.mixed.copy_(mixed)
        rows.gates.copy_(own)
    output = ops.delta_rule(layer.delta, texts, qkvz[:, channels:], parents)
    assert output is not None
    output = ops.linear(output, layer.out)
    return around.add_mlp(around.add(x, output, layer.attention_norm, layer.attention_post_norm), layer, counts)


class LayerwiseDecoder:
    """See :class:`longdraft.kernels.interface.Decoder`. Runs layer after layer, each by single operations.

    reported  last rows whose attention is returned; None: that of all
    """

    def __init__(self, ops: HybridOperations, layers: Sequence[LayerWeights], geometry: Geometry,
                 reported: int | None = None) -> None:
        self._ops = ops
        self._layers = layers
        self._geometry = geometry
        self._reported = reported

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, texts: Sequence[LayersKV],
                parents: Tensor) -> tuple[Tensor, AttentionOutput]:
        outputs: list[AttentionOutput] = []
        num_deltas = 0
        hidden = len(self._layers[0].attention_norm)
        given, x = x[:, hidden:], x[:, :hidden]  # inputs of the layers themselves, which few models have
        source = given if self._layers[0].extra is None and given.shape[1] else None
        width = 0 if source is not None else given.shape[1] // len(self._layers)
        for index, layer in enumerate(self._layers):
            self._tap(index, x, texts)
            if layer.delta is not None:
                x = delta_forward(self._ops, x, layer, self._geometry, [kv.deltas[num_deltas] for kv in texts], parents)
                num_deltas += 1
                continue
            own = [kv.layer(len(outputs)) if layer.source is None else kv.layer(layer.source)._replace(remainder=None)
                   for kv in texts]
            x, output = layer_forward(self._ops, x, layer, self._geometry, cos, sin, own, parents,
                                      None if index else source)
            x = layer_end(self._ops, x, layer, self._geometry, given[:, index * width : (index + 1) * width])
            if layer.source is None:
                if self._reported is not None:  # copies, because views would hold the other rows of all layers
                    output = AttentionOutput(*(part[-self._reported :].clone() for part in output))
                outputs.append(output)
        self._tap(len(self._layers), x, texts)
        return x, AttentionOutput(*(_stacked(part) for part in zip(*outputs, strict=True)))

    @staticmethod
    def _tap(layer: int, x: Tensor, texts: Sequence[LayersKV]) -> None:
        for kv, rows in zip(texts, torch.split(x, [kv.k.shape[1] for kv in texts]), strict=True):
            kv.tap(layer, rows)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of all layers as one, with zeros at the end of those whose last axis is shorter."""
    width = max(part.shape[-1] for part in parts)
    return torch.stack([part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1])) for part in parts])
