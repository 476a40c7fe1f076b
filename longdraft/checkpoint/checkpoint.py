"""A Hugging Face checkpoint as a transformer: its tensors, packed for the kernels.

A tensor that is missing, unexpected or misshapen is an error. `load_transformer` is the entry point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from longdraft.checkpoint import tensor_names
from longdraft.checkpoint.packed_file import PackedFile
from longdraft.checkpoint.sizing import fine_mlps
from longdraft.checkpoint.tensor_names import StackedLinear, expected_shapes, linears_of, norms_of
from longdraft.checkpoint.tensor_source import HEADS_PREFIX, TensorSource
from longdraft.errors import ModelError
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.delta import DeltaWeights
from longdraft.kernels.formats import groups
from longdraft.kernels.formats.int4 import GROUP
from longdraft.kernels.interface import PacksMxfp4, PacksParts
from longdraft.kernels.layer_inputs import LayerInputs
from longdraft.kernels.weights import FILE, BesideNorms, Experts, ExtraInput, LayerHeads, Mlp, QuantisedWeight
from longdraft.model import hybrid, rope
from longdraft.model.config import ModelConfig
from longdraft.model.experts_config import ExpertsConfig
from longdraft.model.layer_spec import AttentionSpec
from longdraft.model.sharding import shard_config
from longdraft.model.transformer import ModelWeights, Transformer
from longdraft.parallel import ColumnParallel, ParallelKernels, RowParallel, shard_of
from longdraft.system.machine import return_free_memory

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_ROWS = 1 << 12  # of head and table at a time, which take memory
QUANTIZE = ("none", "int8", "int4", FILE)
QUANTIZE_CHOICES = "none, int8, int4 or file"


def head_order(config: ModelConfig) -> Tensor | None:
    """An order of a head's dimensions in which those of each rotated pair are half a head apart, as the kernels expect.

    If RoPE rotates only the first `dims` dimensions of a head (a with b), the other ones are split in halves:

        [ a | b | c | d ]  ->  [ a | c | b | d ]

    If it turns adjacent dimensions, those with even numbers come first among them:

        [ a0 b0 a1 b1 .. | c | d ]  ->  [ a | c | b | d ]

    Queries and keys have the same order, so their products do not change. None: the file's order is right.
    """
    head_dim = config.head_dim
    dims = config.rope.dims
    if (dims == head_dim and not config.is_interleaved) or config.has_two_head_sizes:
        return None
    a, b, c, d = torch.split(torch.arange(head_dim), [dims // 2, dims // 2, *[(head_dim - dims) // 2] * 2])
    if config.is_interleaved:
        a, b = torch.arange(0, dims, 2), torch.arange(1, dims, 2)
    return torch.cat([a, c, b, d])


def _qkv_order(head: Tensor | None, spec: AttentionSpec) -> Tensor | None:
    """The order of qkv's rows: heads in `head_order`, and the gates, which follow each query head in the file, after
    the values. None: the file's order is right."""
    if head is None and not spec.is_gated:
        return None
    dim = spec.head_dim
    inside = torch.arange(dim)
    head = inside if head is None else head
    step = 2 * dim if spec.is_gated else dim  # from one query head to the next
    queries = torch.arange(spec.num_heads)[:, None] * step
    keys = spec.num_heads * step + torch.arange(spec.num_kv_heads)[:, None] * dim
    parts = [queries + head, keys + head, keys + spec.num_kv_heads * dim + inside]
    if spec.is_gated:
        parts.append(queries + dim + inside)
    return torch.cat([part.flatten() for part in parts])


def load_transformer(files: TensorSource, config: ModelConfig, kernels: Kernels, quantize: str = "none",
                     packed: PackedFile | None = None) -> Transformer:
    """The transformer of a folder. Raises ModelError that lists missing, unexpected and misshapen tensors.

    kernels   kernels of a rank load this rank's share of each weight only
    quantize  none | int8 | int4 | file: each matrix is quantised while it is packed. int4 leaves the embedding table
              and the head in int8; file keeps the numbers of quantised matrices and changes no others
    packed    a file of the quantised matrices, which are read from it, or written to it for the next time
    """
    config = with_own_head(files, config)
    require_tensors(files, config)
    return Loader(files, config, kernels, quantize, packed).transformer()


def load_draft_copy(files: TensorSource, target: Transformer, quantize: str,
                    packed: PackedFile | None) -> Transformer:
    """A copy of `target` with quantised matrices, read from its files again, for drafts that the target verifies.

    quantize  int8 | int4, for the layers; the head is int8 with both, and so are the last MLPs of an int4 copy for the
              compiled CPU kernels (`fine_mlps`). Or file: the numbers of quantised files
    packed    as for `load_transformer`. Without it, an int8 copy has layers with a scale for each 32 inputs on a CPU:
              their products are those of whole numbers, which take half the time where weights stay in caches

    The copy shares the target's embedding table. Rows of its KV cache have the target's layout. Raises ModelError if
    the target's weights are divided among ranks.
    """
    return Loader(files, target.whole, target.kernels, quantize, packed, drafts=True).transformer(target.weights)


class Loader:
    """Reads and packs the matrices of a checkpoint that `require_tensors` has accepted."""

    def __init__(self, files: TensorSource, config: ModelConfig, kernels: Kernels, quantize: str,
                 packed: PackedFile | None, drafts: bool = False) -> None:
        """drafts: the model is a draft copy, whose products need not be those of a target."""
        self._packed = packed
        self._in_groups = drafts and quantize == "int8" and not packed and isinstance(kernels, CpuKernels)
        has_fine = drafts and quantize == "int4" and isinstance(kernels, CpuKernels)
        self._fine_mlps = fine_mlps(config) if has_fine else range(0)
        self._files = files
        self._whole = config
        self._kernels = kernels
        self._quantize = quantize
        self._shard = shard_of(kernels)
        self._config = shard_config(config, self._shard, quantize)
        self._head_order = head_order(self._config)
        pick = self._shard.rows((config.num_heads,))
        self._own_heads = pick(torch.arange(config.num_heads)) if pick else None
        self._format = "none" if quantize == FILE else quantize  # of matrices whose numbers are not kept
        self._dtype = kernels.dtype if self._format == "none" else None  # quantised from the file's own precision

    def transformer(self, shared: ModelWeights | None = None) -> Transformer:
        """The model. shared: a model whose tables of embeddings it uses; None: they are read."""
        config = self._config
        embedding = shared.embedding if shared else None
        # Largest first, while little else is in memory: packing a weight needs its memory twice.
        table = self._table(_TABLE) if embedding is None else embedding
        if config.is_tied:
            head = table if embedding is None else self._table(_TABLE)
        else:
            head = self._table(_HEAD)
        layers = tuple(self.layer(index) for index in range(config.num_layers))
        weights = ModelWeights(table, layers, self._vector("model.norm.weight"), head, self._quantize,
                               self._layer_inputs(shared))
        if self._packed:
            self._packed.save()
        return_free_memory()  # of matrices before they were packed
        return Transformer(config, weights, self._kernels, self._whole)

    def _layer_inputs(self, shared: ModelWeights | None) -> LayerInputs | None:
        if self._config.input_table is None:
            return None
        tokens, width = self._config.input_table
        old = shared.layer_inputs if shared else None
        projection = StackedLinear(((tensor_names.INPUT_PROJECTION, (width,)),), self._config.hidden_size, False)
        return LayerInputs(old.table if old else self._table(tensor_names.INPUT_TABLE, (tokens, width)),
                           self._linear("", projection), self._vector(tensor_names.INPUT_NORM))

    def layer(self, index: int, prefix: str = "model.") -> LayerWeights:
        """The weights of a layer, whose tensors' names begin with `prefix` and the layer's number."""
        spec = self._config.layers[index]
        hidden = self._config.hidden_size
        layer, is_fine = f"{prefix}layers.{index}.", index in self._fine_mlps
        whole = self._whole.layers[index]
        linears = linears_of(whole, hidden)
        order = spec.delta.projection_order() if spec.delta else None
        if spec.attention:
            order = _qkv_order(self._head_order, spec.attention)
        orders = dict.fromkeys(("q_norm", "k_norm"), self._head_order)
        norms = {name: self._vector(f"{layer}{file_name}.weight", orders.get(name))
                 for name, (file_name, _) in norms_of(spec, hidden).items()}
        return LayerWeights(
            attention_norm=norms["attention_norm"],
            qkv=self._linear(layer, linears["qkv"], order),
            out=self._linear(layer, linears["out"]),
            mlp_norm=norms["mlp_norm"],
            gate_up=self._linear(layer, linears["gate_up"], is_fine=is_fine) if spec.mlp else None,
            down=self._linear(layer, linears["down"], is_fine=is_fine) if spec.mlp else None,
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            experts=self._experts(layer, linears, spec.experts) if spec.experts else None,
            delta=self._delta(layer, spec.delta, whole.delta) if spec.delta and whole.delta else None,
            gates=self._gates(layer, spec.delta, whole.delta) if spec.delta and whole.delta else None,
            attention_post_norm=norms.get("attention_post_norm"),
            mlp_post_norm=norms.get("mlp_post_norm"),
            scalar=self._scalar(layer) if spec.has_scalar else 1.0,
            extra=ExtraInput(self._linear(layer, linears["extra_gate"]), self._linear(layer, linears["extra_out"]),
                             norms[tensor_names.EXTRA_NORM]) if spec.input_width else None,
            beside=self._beside(layer, norms) if spec.experts and spec.experts.is_beside else None,
            **self._attention(layer, spec.attention) if spec.attention else {},
        )

    def _attention(self, layer: str, spec: AttentionSpec) -> dict[str, Any]:
        """The fields of LayerWeights that only layers with attention have."""
        is_wide = self._config.has_two_head_sizes and not spec.window
        return {
            "window": spec.window,
            "rotates": spec.rotates,
            "ropes": spec.ropes,
            "is_gated": spec.is_gated,
            "source": spec.source,
            "heads": LayerHeads(spec.num_kv_heads, spec.head_dim, spec.query_factor) if is_wide else None,
            "sinks": self._vector(f"{layer}{tensor_names.SINKS}", self._own_heads) if spec.has_sinks else None,
            "v_norm": torch.ones(spec.head_dim, device=self._kernels.device) if spec.normalises_values else None,
        }

    def _scalar(self, layer: str) -> float:
        return float(self._files.read(layer + tensor_names.SCALAR).to("cpu", self._kernels.dtype))

    def _beside(self, layer: str, norms: Mapping[str, Tensor]) -> BesideNorms:
        router = self._files.read(layer + tensor_names.ROUTER_SCALE).float() * self._config.hidden_size**-0.5
        mlp, before, after = (norms[name] for name in tensor_names.BESIDE)
        return BesideNorms(mlp, before, router.to(self._kernels.device), after)

    def _delta(self, layer: str, config: hybrid.HybridConfig, whole: hybrid.HybridConfig) -> DeltaWeights:
        """The small weights of this process's share of a delta layer, whose heads `whole` counts all."""
        picks = {name: self._shard.rows(segments) if (segments := whole.segments(name)) else None
                 for name in config.small_shapes(self._whole.hidden_size) if "in_proj" not in name}
        small = {name: self._files.read(layer + name, pick).to(self._kernels.device, copy=True)
                 for name, pick in picks.items()}
        return hybrid.delta_weights(config, small, self._kernels.dtype, self._config.rms_norm_eps)

    def _gates(self, layer: str, config: hybrid.HybridConfig, whole: hybrid.HybridConfig) -> Linear:
        """Never quantised: they decide what a state keeps, and are small."""
        rows = self._files.stack([f"{layer}{name}.weight" for name in config.gate_names], self._kernels.dtype,
                                 [self._shard.rows((whole.gate_rows,))] * len(config.gate_names))
        order = config.gate_order()
        return self._kernels.pack(rows if order is None else rows[order])

    def _experts(self, layer: str, linears: Mapping[str, StackedLinear], config: ExpertsConfig) -> Experts:
        """The experts of a layer. Their routers are never quantised: a small error in one chooses other experts."""
        def router(name: str) -> Linear:
            (part, _), = linears[name].parts
            bias = self._files.read(f"{layer}{part}.bias") if linears[name].has_bias else None
            return self._kernels.pack(self._files.stack((f"{layer}{part}.weight",), self._kernels.dtype), bias)

        def mlp(gate_up: str, down: str) -> Mlp:
            inner = self._linear(layer, linears[down])
            return Mlp(self._linear(layer, linears[gate_up]), inner.part if isinstance(inner, RowParallel) else inner)

        mlps = tuple(mlp(f"gate_up {i}", f"down {i}") for i in range(config.count))
        shared = mlp("shared gate_up", "shared down") if config.shared else None
        scales = self._files.read(layer + tensor_names.EXPERT_SCALES) if config.is_beside else None
        return Experts(router("router"), mlps, config.chosen, config.normalises, config.rounds,
                       config.clamp, shared, router("shared_gate") if shared else None, self._config.has_gelu,
                       None if scales is None else scales.to(self._kernels.device, torch.float32, copy=True),
                       self._kernels.group.sum if isinstance(self._kernels, ParallelKernels) else None)

    def _linear(self, layer: str, stacked: StackedLinear, order: Tensor | None = None,
                is_fine: bool = False) -> Linear:
        """is_fine: in int8, in copies of any format."""
        def read(suffix: str, dtype: torch.dtype | None) -> Tensor:
            names = [f"{layer}{name}.{suffix}" for name, _ in stacked.parts]
            rows = self._files.stack(names, dtype, () if is_row_parallel and suffix == "bias" else stacked.picks(shard))
            return rows if order is None else rows[order]

        def exact() -> QuantisedWeight | None:
            weight = self._files.exact([f"{layer}{name}.weight" for name, _ in stacked.parts], self._quantize,
                                       self._kernels.device)
            return weight if weight is None or order is None else weight.rows(order)

        shard = self._shard
        is_row_parallel = stacked.is_row_parallel and shard.size > 1
        has_bias = stacked.has_bias and not (is_row_parallel and shard.rank)  # the first rank adds it
        quantize = "int8" if is_fine else self._format

        def pack() -> Linear:
            bias = read("bias", self._kernels.dtype) if has_bias else None
            names = [f"{layer}{name}.weight" for name, _ in stacked.parts]
            if not is_fine and (kept := self._packed_blocks(names, self._quantize, order, bias)):
                return kept
            if not is_fine and order is None and isinstance(self._kernels, PacksParts):
                parts = self._files.exact_parts(names, self._quantize, self._kernels.device)
                if parts:
                    return self._kernels.pack_parts(parts, bias)
            if self._format == "none" and order is None and isinstance(self._kernels, PacksMxfp4):
                packed = self._files.mxfp4(names)
                if packed is not None:
                    return self._kernels.pack_mxfp4(packed, bias)
            weight = (None if is_fine else exact()) or read("weight", self._dtype)
            if self._in_groups and isinstance(weight, Tensor) and weight.shape[1] % GROUP == 0:
                weight = groups.quantise(weight)
            return self._kernels.pack(weight, bias, quantize=quantize)

        if self._packed:
            rows = sum(sum(segments) for _, segments in stacked.parts)
            name = f"{layer}{stacked.parts[0][0]}"
            stored = "int8" if is_fine else self._quantize
            return self._packed.linear(name, stored, (rows, stacked.columns), has_bias, pack)
        return RowParallel(pack()) if is_row_parallel else pack()

    def _packed_blocks(self, names: Sequence[str], quantize: str, order: Tensor | None = None,
                       bias: Tensor | None = None) -> CpuLinear | None:
        """Quantised matrices of a GGUF file, packed from where they are; None for others, and for other kernels."""
        kernels = self._kernels
        if not isinstance(kernels, CpuKernels) or self._shard.size > 1:
            return None
        return self._files.pack_blocks(names, quantize, lambda blocks: kernels.pack_blocks(
            blocks if order is None else blocks.rows(order), bias))

    def _table(self, name: str, shape: tuple[int, int] | None = None) -> Linear:
        shard = self._shard
        whole = self._whole
        quantize = "int8" if self._quantize == "int4" else self._format
        if shard.size == 1:
            def pack() -> Linear:
                if self._quantize == FILE and (packed := self._packed_blocks((name,), FILE)):
                    return packed
                kept = self._files.exact((name,), FILE, self._kernels.device) if self._quantize == FILE else None
                return self._kernels.pack(kept or self._files.stack((name,), self._dtype), quantize=quantize)

            shape = shape or (whole.vocab_size, whole.hidden_size)
            return self._packed.linear(name, quantize, shape, False, pack) if self._packed else pack()
        own = shard.vocabulary(whole.vocab_size)
        rows = self._files.stack((name,), self._dtype, [lambda rows: rows[own]])
        return ColumnParallel(self._kernels.pack(rows, quantize=quantize), own.start, whole.vocab_size)

    def _vector(self, name: str, order: Tensor | None = None) -> Tensor:
        """Sinks, or a norm's weight plus the offset of the family, float32 where the model's dtype would round them."""
        weight = self._files.read(name)
        weight = weight if order is None else weight[order]
        dtype = torch.float32 if self._config.float_norms else self._kernels.dtype
        weight = weight.to(self._kernels.device, dtype, copy=True)
        return weight + self._config.norm_offset if self._config.norm_offset else weight


def with_own_head(files: TensorSource, config: ModelConfig) -> ModelConfig:
    """The configuration, whose head is the embedding table only if the files have no other one.

    Some files have a head although their configuration ties it. Where it differs it is used, as by `transformers`.
    """
    names = _HEAD, _TABLE
    if not config.is_tied or not files.names().issuperset(names):
        return config
    is_sound = files.shape(_HEAD) == files.shape(_TABLE) and not any(map(files.wrong_type, names))
    for row in range(0, files.shape(_HEAD)[0] if is_sound else 0, _COMPARED_ROWS):
        head, table = (files.read(name, itemgetter(slice(row, row + _COMPARED_ROWS))).float() for name in names)
        is_sound = is_sound and torch.equal(head, table)
    return config if is_sound else replace(config, is_tied=False)


def require_tensors(files: TensorSource, config: ModelConfig) -> None:
    """Raise ModelError unless the files have the tensors of this configuration, and its rope is sound."""
    count = config.num_layers * (config.experts.count if config.experts else 1)
    if count > len(files.names()):  # checked before the names of all expected tensors are built
        experts = f" of {config.experts.count} experts" if config.experts else ""
        raise ModelError(f"config.json says {config.num_layers} layers{experts}, but {files.folder} has only "
                         f"{len(files.names())} tensors")
    expected = expected_shapes(config)
    # Of layers that read the keys and values of others: some files have projections that are not used.
    reading = [index for index, layer in enumerate(config.layers)
               if layer.attention and layer.attention.source is not None]
    unread = tuple(f"model.layers.{index}.self_attn.{name}." for index in reading
                   for name in ("k_proj", "v_proj", "k_norm", "v_norm"))
    present = {name for name in files.names()
               if not name.startswith(HEADS_PREFIX) and not name.endswith("rotary_emb.inv_freq")
               and not (unread and name.startswith(unread))
               and not (config.hybrid and name.startswith(hybrid.DRAFT_LAYERS))}
    if config.is_tied:
        present.discard(_HEAD)  # some files have it although it is tied
    files.check(expected, present, "its metadata" if files.folder.is_file() else "its config.json")
    rope.require_sound(config)
