"""The tensors of a checkpoint: their Hugging Face names and shapes, and which of them form one of our matrices."""

from __future__ import annotations

from typing import NamedTuple

from longdraft.model.config import ModelConfig
from longdraft.model.experts_config import ExpertsConfig
from longdraft.model.hybrid import HybridConfig
from longdraft.model.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from longdraft.parallel import Pick, Shard

SINKS = "self_attn.sinks"
SCALAR = "layer_scalar"
# Of the input that a layer has of its own (`ExtraInput`): gate, output, and norm.
EXTRA_GATE, EXTRA_OUT, EXTRA_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
# Of the inputs of all layers (`LayerInputs`).
INPUT_TABLE = "model.embed_tokens_per_layer.weight"
INPUT_PROJECTION = "model.per_layer_model_projection"
INPUT_NORM = "model.per_layer_projection_norm.weight"
# Of a layer with experts beside its MLP (`BesideNorms`): norms after the MLP, before the experts, and after them; and
# the numbers that multiply the router's inputs, and each expert's outputs.
BESIDE = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
ROUTER_SCALE, EXPERT_SCALES = "router.scale", "router.per_expert_scale"
_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")  # in LayerWeights


class StackedLinear(NamedTuple):
    """One of our matrices: tensors of the file, concatenated along their rows.

    parts            name of each tensor, and the lengths of the segments that its rows consist of
    is_row_parallel  ranks split the columns, and add up their results; otherwise they split the rows
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    columns: int
    has_bias: bool
    is_row_parallel: bool = False

    def picks(self, shard: Shard) -> list[Pick | None]:
        return [shard.columns() if self.is_row_parallel else shard.rows(segments) for _, segments in self.parts]


def linears_of(spec: LayerSpec, hidden: int) -> dict[str, StackedLinear]:
    """The matrices of a layer, by their names in LayerWeights. hidden: width of the rows"""
    linears: dict[str, StackedLinear] = {}
    if spec.attention:
        linears |= _attention(spec.attention, hidden)
    if spec.delta:
        linears |= _delta(spec.delta, hidden)
    if spec.experts:
        linears |= _experts(spec.experts, hidden)
    if spec.input_width:
        linears["extra_gate"] = StackedLinear(((EXTRA_GATE, (spec.input_width,)),), hidden, False)
        linears["extra_out"] = StackedLinear(((EXTRA_OUT, (hidden,)),), spec.input_width, False)
    if spec.mlp:
        linears |= _mlp(spec.mlp, hidden)
    return linears


def _attention(spec: AttentionSpec, hidden: int) -> dict[str, StackedLinear]:
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    # Where values are keys, their rows are stacked twice: one product gives both, for a few rows more to read.
    values = "self_attn.k_proj" if spec.values_are_keys else "self_attn.v_proj"
    qkv: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("self_attn.q_proj", (queries * (2 if spec.is_gated else 1),)), ("self_attn.k_proj", (keys,)),
        (values, (keys,)))
    if spec.source is not None:
        qkv = qkv[:1]
    if spec.is_fused:
        qkv = (("self_attn.qkv_proj", (queries, keys, keys)),)
    return {
        "qkv": StackedLinear(qkv, hidden, spec.qkv_bias),
        "out": StackedLinear((("self_attn.o_proj", (hidden,)),), queries, spec.out_bias, is_row_parallel=True),
    }


def _delta(config: HybridConfig, hidden: int) -> dict[str, StackedLinear]:
    return {
        "qkv": StackedLinear(config.projections, hidden, False),
        "out": StackedLinear(((config.out_name, (hidden,)),), config.shape.values, False, is_row_parallel=True),
    }


def _mlp(spec: MlpSpec, hidden: int) -> dict[str, StackedLinear]:
    gate_up: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("mlp.gate_proj", (spec.width,)), ("mlp.up_proj", (spec.width,)))
    if spec.is_fused:
        gate_up = (("mlp.gate_up_proj", (spec.width, spec.width)),)
    return {
        "gate_up": StackedLinear(gate_up, hidden, spec.has_bias),
        "down": StackedLinear((("mlp.down_proj", (hidden,)),), spec.width, spec.has_bias, is_row_parallel=True),
    }


def _experts(experts: ExpertsConfig, hidden: int) -> dict[str, StackedLinear]:
    """The router and, for each expert, its two matrices."""
    gate, up, down = experts.names

    def gate_up(stem: str, width: int, has_bias: bool) -> StackedLinear:
        return StackedLinear(((f"{stem}.{gate}", (width,)), (f"{stem}.{up}", (width,))), hidden, has_bias)

    def down_of(stem: str, width: int, has_bias: bool) -> StackedLinear:
        return StackedLinear(((f"{stem}.{down}", (hidden,)),), width, has_bias, is_row_parallel=True)

    router = ((experts.path(experts.router), (experts.count,)),)
    linears = {"router": StackedLinear(router, hidden, experts.has_bias)}
    for index in range(experts.count):
        stem = experts.path(f"experts.{index}")
        linears[f"gate_up {index}"] = gate_up(stem, experts.size, experts.has_bias)
        linears[f"down {index}"] = down_of(stem, experts.size, experts.has_bias)
    if experts.shared:
        stem = experts.path("shared_expert")
        linears["shared_gate"] = StackedLinear(((f"{stem}_gate", (1,)),), hidden, False)
        linears["shared gate_up"] = gate_up(stem, experts.shared, False)
        linears["shared down"] = down_of(stem, experts.shared, False)
    return linears


def norms_of(spec: LayerSpec, hidden: int) -> dict[str, tuple[str, int]]:
    """The norms of a layer, by their names in LayerWeights (others by those in the file): name in the file, width."""
    norms = {ours: (name, hidden) for ours, name in zip(_NORMS, spec.norms, strict=True) if name}
    if (attention := spec.attention) and attention.head_norms != "none":
        is_joint = attention.head_norms == "all"
        norms["q_norm"] = "self_attn.q_norm", attention.head_dim * (attention.num_heads if is_joint else 1)
        if attention.source is None:
            norms["k_norm"] = "self_attn.k_norm", attention.head_dim * (attention.num_kv_heads if is_joint else 1)
    if spec.input_width:
        norms[EXTRA_NORM] = EXTRA_NORM, hidden
    if spec.experts and spec.experts.is_beside:
        norms |= {name: (name, hidden) for name in BESIDE}
    return norms


def layer_shapes(spec: LayerSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a layer, by its name in the layer."""
    shapes: dict[str, tuple[int, ...]] = spec.delta.small_shapes(hidden) if spec.delta else {}
    shapes |= {f"{name}.weight": (width,) for name, width in norms_of(spec, hidden).values()}
    if spec.has_scalar:
        shapes[SCALAR] = (1,)
    if spec.experts and spec.experts.is_beside:
        shapes[ROUTER_SCALE] = (hidden,)
        shapes[EXPERT_SCALES] = (spec.experts.count,)
    if spec.attention and spec.attention.has_sinks:
        shapes[SINKS] = (spec.attention.num_heads,)
    for stacked in linears_of(spec, hidden).values():
        for name, segments in stacked.parts:
            shapes[f"{name}.weight"] = (sum(segments), stacked.columns)
            if stacked.has_bias:
                shapes[f"{name}.bias"] = (sum(segments),)
    return shapes


def outer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor outside of the layers, by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if config.input_table:
        tokens, width = config.input_table
        shapes[INPUT_TABLE] = (tokens, width)
        shapes[f"{INPUT_PROJECTION}.weight"] = (width, config.hidden_size)
        shapes[INPUT_NORM] = (width // config.num_layers,)
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a checkpoint of this configuration, by its Hugging Face name."""
    shapes = outer_shapes(config)
    for index, spec in enumerate(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape
                   for name, shape in layer_shapes(spec, config.hidden_size).items()}
    return shapes
