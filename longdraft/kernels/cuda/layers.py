"""All layers of a model over the memory of a forward, as launches that a CUDA graph can hold.

    layer, as a Llama has it    norm* | product | norms, rotation, rows to the store | attention (2) | product |
                                sum, norm | product, activation | product | sum, norm of the next layer
                                * of the first layer only

Layers of all families have these kernels. What they have besides (experts, delta rules, gates, convolutions, inputs of
their own) stands between them, as launches of `operations` or of PyTorch. longdraft/kernels/layer.py defines what a
layer computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels.attention_output import AttentionOutput
from longdraft.kernels.cuda import jit_rows
from longdraft.kernels.cuda.attention import tree_attention
from longdraft.kernels.cuda.forward_buffers import DeviceLayers, ForwardBuffers
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.launch import ceil_div, chained, on_device, padded_size
from longdraft.kernels.cuda.linear import GELU, SILU, CudaLinear, PartialSums, add_partial_sums
from longdraft.kernels.experts import experts_forward
from longdraft.kernels.layer import attention_to_later, convolved_after, convolved_before
from longdraft.kernels.weights import Experts, ExtraInput, LayerWeights, Linear

_NORM_WARPS = 8  # of the program that adds a row and norms it
_MAP_COLUMNS, _MAP_BLOCK = 32, 128  # of the remainder's map, in one program and at a time


class CudaLayers(DeviceLayers):
    """See :class:`longdraft.kernels.interface.Decoder` for what the layers compute."""

    def run(self, buffers: ForwardBuffers, stores: Sequence[CudaStore], source: Tensor | None = None) -> None:
        """All layers over the buffers. The launches do not depend on the buffers' contents, as a graph requires.

        stores  of one text
        source  [R, K], the input of the first layer's queries, keys and values; None: its residual after its norm
        """
        if buffers.embedding:
            buffers.embedding.of_tokens(buffers.tokens, buffers.x_in)
        if buffers.text_rows > 1:  # a row by itself is its own path
            buffers.trees.set_tree(buffers.parents)
        x, given, place, deltas = buffers.x_in, buffers.given, 0, 0
        width = self.width_given // len(self.layers)  # of each layer's own input
        if source is None:
            source = self._first_source(buffers) if given is None or width else given
        for index, layer in enumerate(self.layers):
            assert source is not None
            if layer.delta is not None:
                parts = self._delta(buffers, deltas, layer, source)
                deltas += 1
            else:
                parts = self._attend(buffers, stores, place, layer, source)
                place += layer.source is None
            x, source = self._add_and_norm(buffers, x, parts, layer.attention_norm, layer.attention_post_norm,
                                           layer.mlp_norm, buffers.x)
            assert source is not None
            parts = self._mlp(buffers, x, layer, source)
            is_last = index + 1 == len(self.layers)
            following = None if is_last else self.layers[index + 1].attention_norm
            # A tapped layer's input is written where its tap is read: a copy would interrupt the chain of kernels.
            out = buffers.x if is_last or index + 1 not in buffers.taps else buffers.tap(index + 1)
            x, source = self._add_and_norm(buffers, x, parts, layer.mlp_norm, layer.mlp_post_norm,
                                           None if layer.extra else following, out,
                                           1.0 if layer.extra else layer.scalar)
            if layer.extra and given is not None:
                parts = self._with_input(buffers, x, layer.extra, given[:, index * width :][:, :width])
                x, source = self._add_and_norm(buffers, x, parts, layer.extra.norm, layer.extra.norm, following, out,
                                               layer.scalar)
        buffers.join_attention()
        for entered, rows in ((0, buffers.x_in), (len(self.layers), buffers.x)):
            if entered in buffers.taps:
                buffers.tap(entered).copy_(rows)

    def _first_source(self, buffers: ForwardBuffers) -> Tensor:
        """The input of the first layer's first product."""
        x, norm, geometry = buffers.x_in, self.layers[0].attention_norm, self.geometry
        if geometry.post_norm:
            return x
        return self.ops.rms_norm_into(x, norm, geometry.eps, geometry.rounds_once, buffers.normed)

    def _product(self, buffers: ForwardBuffers, x: Tensor, weight: Linear | None) -> PartialSums:
        assert isinstance(weight, CudaLinear)
        return weight.partial_sums(x, self.ops.tile, buffers.sums)

    def _rows_of(self, buffers: ForwardBuffers, parts: PartialSums) -> Tensor:
        """A product [R, N] in the model's dtype."""
        _, rows, width = parts.sums.shape
        return add_partial_sums(parts, torch.empty(rows, width, dtype=self.ops.dtype, device=self.ops.device))

    # The first half of a layer

    def _attend(self, buffers: ForwardBuffers, stores: Sequence[CudaStore], place: int, layer: LayerWeights,
                source: Tensor) -> PartialSums:
        """The output of attention. place: of the layer, among those with keys and values."""
        rows, heads, dim = buffers.rows, self.geometry.num_heads, layer.heads_in(self.geometry).dim
        read = place if layer.source is None else layer.source
        source, kernel = convolved_before(self.ops, source, layer.attention_conv, buffers.sizes)
        made = buffers.attended[place] if layer.source is None else self._unreported(rows, dim)
        gate = source.new_empty(rows, heads * dim) if layer.is_gated else None
        self._finish_qkv(buffers, stores[read], read, layer, self._product(buffers, source, layer.qkv), made, gate)
        self._attention(buffers, stores[read], read, layer, made)
        output = made.output.view(rows, heads * dim)
        parts = self._product(buffers, output if gate is None else self.ops.gate(output, gate), layer.out)
        if kernel is not None:
            return _as_sums(convolved_after(self._rows_of(buffers, parts), kernel, buffers.sizes))
        return parts

    def _unreported(self, rows: int, dim: int) -> AttentionOutput:
        """The memory of attention of a layer that reads the keys of another one."""
        heads, ops = self.geometry.num_heads, self.ops
        q, output, content = torch.empty(3, rows, heads, dim, dtype=ops.dtype, device=ops.device)
        return AttentionOutput(q, output, torch.empty(rows, heads, device=ops.device), content)

    def _finish_qkv(self, buffers: ForwardBuffers, store: CudaStore, place: int, layer: LayerWeights,
                    parts: PartialSums, made: AttentionOutput, gate: Tensor | None) -> None:
        """Norms and rotation of queries and keys; keys and values are also written to the store's draft slots."""
        geometry, k, v = self.geometry, buffers.k[place], buffers.v[place]
        heads, (kv_heads, dim, factor) = geometry.num_heads, layer.heads_in(geometry)
        kv_heads, half = kv_heads if layer.source is None else 0, dim // 2
        gates, table = 0 if gate is None else heads, None if buffers.table is None else buffers.table[place]
        norms = 0 if layer.q_norm is None else 1 if layer.q_norm.shape == (dim,) else 2
        q_norm, k_norm, v_norm = (parts.sums if norm is None else norm
                                  for norm in (layer.q_norm, layer.k_norm, layer.v_norm))
        turn = buffers.cos.shape[1] // geometry.num_ropes
        with on_device(buffers.x.device):
            jit_rows.finish_qkv_kernel[(buffers.rows, heads + 2 * kv_heads + gates)](
                *parts.arguments(), q_norm, k_norm, v_norm, buffers.cos, buffers.sin, buffers.where, made.content,
                made.queries, k, v, made.queries if gate is None else gate, store.k, store.v, store.k_scale,
                store.v_scale, buffers.where if table is None else table, buffers.rows, store.capacity,
                buffers.text_rows, geometry.eps, factor, HEADS=heads, KV_HEADS=kv_heads, GATES=gates, HALF=half,
                PADDED=padded_size(half), ALL_PADDED=padded_size(heads * dim), NORMS=norms,
                HAS_V_NORM=layer.v_norm is not None, ROTATES=layer.rotates, TURNS=buffers.cos.shape[1],
                Q_TURN=turn * layer.ropes[0], K_TURN=turn * layer.ropes[1], KV_ROW=k.stride(0), KV_HEAD=k.stride(1),
                ROUNDS_ONCE=geometry.rounds_once, HAS_TABLE=table is not None, **parts.options(), num_warps=1,
                **chained(buffers.x.device))

    def _attention(self, buffers: ForwardBuffers, store: CudaStore, place: int, layer: LayerWeights,
                   made: AttentionOutput) -> None:
        table = None if buffers.table is None else buffers.table[place]
        remainder = None
        if layer.source is None and buffers.has_remainder:
            remainder = self._mapped(buffers, place, made.content)
        elif not layer.is_causal:  # the rows of a text are a chain; those after a row are its remainder
            k, v = (part[place, :, : store.heads, : store.dim] for part in (buffers.k, buffers.v))
            texts = zip(*(torch.split(part, buffers.text_rows) for part in (made.queries, k, v)), strict=True)
            remainder = torch.cat([attention_to_later(*text) for text in texts])
        # The remainder of drafts contains the sinks: it is part of the full attention.
        tree_attention(buffers.work[self.plan(layer)], made.queries, store, buffers.where, buffers.room, layer.window,
                       remainder, made.output, made.lse, table, layer.sinks)

    def _mapped(self, buffers: ForwardBuffers, place: int, content: Tensor) -> Tensor:
        """The remainder of a layer's rows [R, H, D + 1], by the maps of their texts."""
        rows, heads, dim = content.shape
        remainder = buffers.row_remainder(heads, dim)
        with on_device(content.device):
            jit_rows.map_remainder_kernel[(rows, heads, ceil_div(dim + 1, _MAP_COLUMNS))](
                content, buffers.inputs.maps[place], remainder, buffers.text_rows, HEADS=heads, DIM=dim,
                COLUMNS=_MAP_COLUMNS, BLOCK=_MAP_BLOCK, **chained(content.device))
        return remainder

    def _delta(self, buffers: ForwardBuffers, place: int, layer: LayerWeights, source: Tensor) -> PartialSums:
        """The output of a delta layer. place: of the layer, among those of its kind."""
        assert layer.delta is not None
        mixed, gates = buffers.mixed[place], buffers.gates[place]
        z = source.new_empty(buffers.rows, layer.delta.shape.values)
        add_partial_sums(self._product(buffers, source, layer.qkv), mixed, z)
        add_partial_sums(self._product(buffers, source, layer.gates), gates)
        placed = buffers.states._replace(table=buffers.states.table[place])
        output = self.ops.deltas.run_placed(layer.delta, mixed, gates, z, buffers.paths, placed)
        return self._product(buffers, output, layer.out)

    # The second half

    def _mlp(self, buffers: ForwardBuffers, x: Tensor, layer: LayerWeights, source: Tensor) -> PartialSums:
        """The output of a layer's MLP, of its experts, or of both. source: x after the norm before them"""
        source, kernel = convolved_before(self.ops, source, layer.mlp_conv, buffers.sizes)
        if layer.experts is not None and layer.beside is None:
            parts = _as_sums(experts_forward(self.ops, source, layer.experts))
        else:
            parts = self._product(buffers, self._gated(buffers, source, layer.gate_up), layer.down)
        if kernel is not None:
            parts = _as_sums(convolved_after(self._rows_of(buffers, parts), kernel, buffers.sizes))
        if layer.beside is not None and layer.experts is not None:
            parts = self._with_experts_beside(buffers, x, layer, layer.experts, parts)
        return parts

    def _gated(self, buffers: ForwardBuffers, source: Tensor, gate_up: Linear | None) -> Tensor:
        """The input of the product after gate and up: [R, I]."""
        assert isinstance(gate_up, CudaLinear)
        width = gate_up.out_features // 2
        out = buffers.inner.view(-1)[: buffers.rows * width].view(buffers.rows, width)
        gate_up.multiply_gated(source, self.ops.tile, out, buffers.sums, GELU if self.geometry.has_gelu else SILU)
        return out

    def _with_experts_beside(self, buffers: ForwardBuffers, x: Tensor, layer: LayerWeights, experts: Experts,
                             parts: PartialSums) -> PartialSums:
        norms = layer.beside
        assert norms is not None

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return self.ops.rms_norm(x, weight, self.geometry.eps, rounds_once=self.geometry.rounds_once)

        mixed = experts_forward(self.ops, norm(x, norms.experts), experts, norm(x, norms.router))
        return _as_sums(norm(self._rows_of(buffers, parts), norms.mlp_post) + norm(mixed, norms.experts_post))

    def _with_input(self, buffers: ForwardBuffers, x: Tensor, extra: ExtraInput, given: Tensor) -> PartialSums:
        """What a layer's own input [R, P] adds to its rows, before the norm."""
        assert self.geometry.residual_factor == 1, "`layer_end` has no factor"
        gate = self._rows_of(buffers, self._product(buffers, x, extra.gate))
        return self._product(buffers, self.ops.geglu(torch.cat([gate, given], 1)), extra.out)

    def _add_and_norm(self, buffers: ForwardBuffers, x: Tensor, parts: PartialSums, norm: Tensor, post: Tensor | None,
                      following: Tensor | None, out: Tensor, scalar: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Add the output of a part to x, and norm the sum for the next part; returns both, None where nothing is left.

        norm       of the part: of its outputs with `Geometry.post_norm`
        post       of its outputs, besides; None: there is none
        following  of the next part's inputs; None: it is not known
        out        where the sum is written. scalar: multiplies it
        """
        geometry, factor = self.geometry, self.geometry.residual_factor
        own, following = (norm, None) if geometry.post_norm else (post, following)
        with on_device(x.device):
            jit_rows.add_and_norm_kernel[(buffers.rows,)](
                x, *parts.arguments(), norm if own is None else own, norm if following is None else following, out,
                buffers.normed, buffers.rows, factor, scalar, geometry.eps, WIDTH=self.hidden,
                PADDED=padded_size(self.hidden), HAS_FACTOR=factor != 1, HAS_SCALAR=scalar != 1,
                NORMS_OWN=own is not None, NORMS_NEXT=following is not None, ROUNDS_ONCE=geometry.rounds_once,
                **parts.options(), num_warps=_NORM_WARPS, **chained(x.device))
        return out, out if geometry.post_norm else None if following is None else buffers.normed


def _as_sums(rows: Tensor) -> PartialSums:
    """Rows [R, N] in the model's dtype as a product in one part."""
    return PartialSums(rows[None], None, None)
