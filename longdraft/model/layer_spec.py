"""What one layer of a decoder is. A model is a pattern of these, which `ModelConfig.layers` derives from its family."""

from __future__ import annotations

from dataclasses import dataclass

from longdraft.model.experts_config import ExpertsConfig
from longdraft.model.families import HeadNorms
from longdraft.model.hybrid import HybridConfig


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a layer.

    num_heads          query heads, each of `head_dim` numbers
    num_kv_heads       heads of keys and values
    query_factor       multiplies the queries, besides the 1 / sqrt(head_dim) that attention applies
    window             positions that a row sees, itself included; 0: all
    rotates            RoPE turns queries and keys
    ropes              which rotation of a forward turns the queries, and which the keys
    source             layer whose keys and values this one reads; None: it has its own
    head_norms         RMSNorm of queries and keys before RoPE: "each" head, or "all" heads as one vector
    normalises_values  values are normalised too, without a weight
    values_are_keys    the file has no projection of values: they are the keys before norm and rotation
    is_gated           the output is multiplied by sigmoid(gate), whose rows follow those of each query head in the file
    has_sinks          each head has a score that joins the softmax without a value
    is_fused           the file has one tensor for queries, keys and values
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_factor: float
    window: int
    rotates: bool
    ropes: tuple[int, int]
    source: int | None
    head_norms: HeadNorms
    normalises_values: bool
    values_are_keys: bool
    is_gated: bool
    has_sinks: bool
    is_fused: bool
    qkv_bias: bool
    out_bias: bool


@dataclass(frozen=True)
class MlpSpec:
    """The MLP of a layer. is_fused: the file has one tensor for gate and up."""

    width: int
    has_bias: bool
    is_fused: bool


@dataclass(frozen=True)
class LayerSpec:
    """A layer: what mixes rows of different positions, then an MLP, experts, or both.

    attention    None: the layer has a state in place of attention, and no rows in a KV cache
    delta        that state (longdraft/kernels/delta.py); None: the layer has attention
    mlp          None: there are experts instead
    experts      None: there are none; with an MLP, they stand beside it
    norms        names in the file of the norms that `LayerWeights` calls attention_norm, attention_post_norm, mlp_norm
                 and mlp_post_norm; "": there is none
    has_scalar   a number multiplies the rows that leave the layer
    input_width  of an input that the layer has besides its rows (longdraft/kernels/layer_inputs.py); 0: none
    """

    attention: AttentionSpec | None
    delta: HybridConfig | None
    mlp: MlpSpec | None
    experts: ExpertsConfig | None
    norms: tuple[str, str, str, str]
    has_scalar: bool
    input_width: int
