"""The tensors of a checkpoint: their Hugging Face names and shapes, and which of them form one of our matrices."""

from __future__ import annotations

from typing import NamedTuple

from longdraft.model import gemma4, hybrid
from longdraft.model.config import ModelConfig
from longdraft.model.experts_config import ExpertsConfig
from longdraft.parallel import Pick, Shard

SINKS = "self_attn.sinks"


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


def linears_of(config: ModelConfig, index: int) -> dict[str, StackedLinear]:
    """The matrices of a layer, by their names in LayerWeights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.gemma4 and config.gemma4.is_double and config.source_of(index) is not None:
        inner *= 2
    gate_up: tuple[tuple[str, tuple[int, ...]], ...] = (("mlp.gate_proj", (inner,)), ("mlp.up_proj", (inner,)))
    if config.is_fused or config.has_fused_mlp:
        gate_up = (("mlp.gate_up_proj", (inner, inner)),)
    mixing = (_delta_linears(config.hybrid, hidden) if config.hybrid and config.is_delta(index)
              else _attention(config, index))
    if config.experts:
        mixing |= _expert_linears(config.experts, hidden)
        if not config.experts.is_beside:
            return mixing
    if config.gemma4 and (width := config.gemma4.input_width):
        mixing |= {"extra_gate": StackedLinear(((gemma4.EXTRA[0], (width,)),), hidden, False),
                   "extra_out": StackedLinear(((gemma4.EXTRA[1], (hidden,)),), width, False)}
    return mixing | {
        "gate_up": StackedLinear(gate_up, hidden, config.mlp_bias),
        "down": StackedLinear((("mlp.down_proj", (hidden,)),), inner, config.mlp_bias, is_row_parallel=True),
    }


def _attention(config: ModelConfig, index: int) -> dict[str, StackedLinear]:
    kv_heads, dim = config.heads_of(index)
    q, kv = config.num_heads * dim, kv_heads * dim
    gated_q = 2 * q if config.hybrid else q
    # Where values are keys, their rows are stacked twice: one product gives both, for a few rows more to read.
    is_same = config.gemma4 is not None and config.gemma4.values_are_keys and not config.window_of(index)
    qkv: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("self_attn.q_proj", (gated_q,)), ("self_attn.k_proj", (kv,)),
        ("self_attn.k_proj" if is_same else "self_attn.v_proj", (kv,)))
    if config.source_of(index) is not None:
        qkv = qkv[:1]
    if config.is_fused:
        qkv = (("self_attn.qkv_proj", (q, kv, kv)),)
    return {
        "qkv": StackedLinear(qkv, config.hidden_size, config.qkv_bias),
        "out": StackedLinear((("self_attn.o_proj", (config.hidden_size,)),), q, config.out_bias, is_row_parallel=True),
    }


def _delta_linears(config: hybrid.HybridConfig, hidden: int) -> dict[str, StackedLinear]:
    return {
        "qkv": StackedLinear(config.projections, hidden, False),
        "out": StackedLinear(((config.out_name, (hidden,)),), config.shape.values, False, is_row_parallel=True),
    }


def _expert_linears(experts: ExpertsConfig, hidden: int) -> dict[str, StackedLinear]:
    """The router and, for each expert, its two matrices."""
    gate, up, down = experts.names
    bias = experts.has_bias
    found = {"router": StackedLinear(((experts.path(experts.router), (experts.count,)),), hidden, bias)}
    for index in range(experts.count):
        one = experts.path(f"experts.{index}")
        found[f"gate_up {index}"] = StackedLinear(
            ((f"{one}.{gate}", (experts.size,)), (f"{one}.{up}", (experts.size,))), hidden, bias)
        found[f"down {index}"] = StackedLinear(((f"{one}.{down}", (hidden,)),), experts.size, bias,
                                               is_row_parallel=True)
    if experts.shared:
        one = experts.path("shared_expert")
        found["shared_gate"] = StackedLinear(((f"{one}_gate", (1,)),), hidden, False)
        found["shared gate_up"] = StackedLinear(
            ((f"{one}.{gate}", (experts.shared,)), (f"{one}.{up}", (experts.shared,))), hidden, False)
        found["shared down"] = StackedLinear(((f"{one}.{down}", (hidden,)),), experts.shared, False,
                                             is_row_parallel=True)
    return found


def norms_of(config: ModelConfig, index: int) -> dict[str, tuple[str, int]]:
    """The norms of a layer, by their names in LayerWeights: name in the file, and width."""
    names = config.norm_names or ("input_layernorm", "", "post_attention_layernorm", "")
    if config.post_norm:
        names = ("post_attention_layernorm", "", "post_feedforward_layernorm", "")
    fields = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    norms = {field: (name, config.hidden_size) for field, name in zip(fields, names, strict=True) if name}
    if config.head_norms != "none" and not config.is_delta(index):
        heads = (config.num_heads, config.num_kv_heads) if config.head_norms == "all" else (1, 1)
        names = ("q_norm", "k_norm")[: 1 if config.source_of(index) is not None else 2]
        for name, count in zip(names, heads, strict=False):
            norms[name] = (f"self_attn.{name}", count * config.heads_of(index)[1])
    if config.gemma4 and config.gemma4.input_width:
        norms[gemma4.EXTRA[2]] = (gemma4.EXTRA[2], config.hidden_size)
    if config.experts and config.experts.is_beside:
        norms |= {name: (name, config.hidden_size) for name in gemma4.BESIDE}
    return norms


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a checkpoint of this configuration, by its Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if config.gemma4 and (width := config.gemma4.input_width):
        shapes |= {gemma4.INPUT_TABLE: (config.gemma4.input_tokens, config.num_layers * width),
                   gemma4.INPUT_PROJECTION: (config.num_layers * width, config.hidden_size),
                   gemma4.INPUT_NORM: (width,)}
    if not config.is_tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        if config.hybrid and config.is_delta(index):
            small = config.hybrid.small_shapes(config.hidden_size)
            shapes |= {layer + name: shape for name, shape in small.items()}
        for name, width in norms_of(config, index).values():
            shapes[f"{layer}{name}.weight"] = (width,)
        if config.gemma4:
            shapes[layer + gemma4.SCALAR] = (1,)
        if config.experts and config.experts.is_beside:
            shapes[layer + gemma4.ROUTER_SCALE] = (config.hidden_size,)
            shapes[layer + gemma4.EXPERT_SCALES] = (config.experts.count,)
        if config.has_sinks:
            shapes[f"{layer}{SINKS}"] = (config.num_heads,)
        for stacked in linears_of(config, index).values():
            for name, segments in stacked.parts:
                shapes[f"{layer}{name}.weight"] = (sum(segments), stacked.columns)
                if stacked.has_bias:
                    shapes[f"{layer}{name}.bias"] = (sum(segments),)
    return shapes
