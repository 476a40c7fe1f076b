"""How each model family differs from Llama, and what unsupported families would need.

A family is a set of flags (docs/models.md, "Families") for the one transformer. To add a family that needs no new
arithmetic, add an entry to `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longdraft.model.hybrid import HybridFormat

HeadNorms = Literal["none", "each", "all"]
ACTIVATIONS = {"silu": ("silu",), "gelu_tanh": ("gelu_pytorch_tanh",)}  # their names in config.json


@dataclass(frozen=True)
class ExpertsFormat:
    """How a family stores and weighs its experts.

    prefix        of the names of their tensors in a layer
    names         of gate, up and down of an expert
    size          key of an expert's width in config.json
    normalises    weights of a row's experts are divided by their sum; None: as `norm_topk_prob` says
    rounds        these weights are rounded to the model's dtype
    router        name of the router
    has_bias      router and experts have biases
    is_clamped    their activation is that of gpt-oss (`Kernels.clamped_swiglu`)
    shared        key of the width of an expert that every row has besides; "": there is none
    switch        key of config.json without which there are no experts; "": there are always
    chosen        key of the number of experts for each row
    is_beside     the experts stand beside the MLP, not in its place (longdraft/model/gemma4.py)
    """

    prefix: str
    names: tuple[str, str, str]
    size: str
    normalises: bool | None
    rounds: bool
    shared: str = ""
    router: str = "gate"
    has_bias: bool = False
    is_clamped: bool = False
    switch: str = ""
    chosen: str = "num_experts_per_tok"
    is_beside: bool = False


@dataclass(frozen=True)
class Family:
    """The differences of a family from Llama.

    qkv_bias       q, k and v have a bias; None: as `attention_bias` in config.json says
    out_bias       the attention's output projection has a bias; None: as `attention_bias` says
    mlp_bias       the MLP has biases; None: as `mlp_bias` in config.json says
    head_norms     RMSNorm of queries and keys before RoPE: "each" head, or "all" heads as one vector
    post_norm      norms follow attention and MLP instead of preceding them; they round once, after their weight
    rounds_twice   these norms round before their weight too, as others do
    is_fused       the file has one tensor for q, k and v, and one for gate and up
    has_fused_mlp  the file has one tensor for gate and up alone
    is_interleaved RoPE turns adjacent dimensions (2 i, 2 i + 1) of a head
    has_query_growth  queries grow with their position, as rope_parameters says (llama_4_scaling_beta)
    norm_names     norms before and after attention and MLP, by their names in a layer; empty: before (or after) alone
    norm_offset    is added to the weights of norms, which stay float32; norms round once, after their weight
    float_norms    weights of norms are float32 without an offset too
    is_gemma4      layers have what longdraft/model/gemma4.py describes
    has_sinks      each head has a score that joins the softmax without a value
    activation     of the MLP: "silu", or "gelu_tanh", GELU by its tanh formula
    scales_embedding  embeddings are multiplied by the root of their width
    query_scalar   key of the number whose root divides the scores; "": it is the head's width
    caps           keys of the soft caps of attention scores and of logits; "": none
    windows        sliding windows: in "all" layers if sliding_window is a number; in all if use_sliding_window is true
                   too ("used"); in those that layer_types lists ("listed"); or ("some") in those that layer_types, or
                   max_window_layers, lists if use_sliding_window is true
    window_period  without layer_types, each layer with such a number is without a window
    has_window_rope  layers with a window have rotations of their own
    skips_rope     layers may be without RoPE (no_rope_layers)
    rotates_windows  if any layer has a window, those without one are without RoPE
    is_multiplied  config.json has embedding_, residual_ and attention_multiplier, and logits_scaling
    rotates_part   partial_rotary_factor may be below 1
    experts        mixtures of experts instead of MLPs; None: none
    hybrid         most layers are gated delta nets (longdraft/model/hybrid.py), whose projections have this format
    defaults       values that `transformers` assumes where config.json has none, if they differ from Llama's
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norms: HeadNorms = "none"
    post_norm: bool = False
    rounds_twice: bool = False
    is_fused: bool = False
    has_fused_mlp: bool = False
    is_interleaved: bool = False
    has_query_growth: bool = False
    norm_names: tuple[str, str, str, str] | tuple[()] = ()
    norm_offset: float = 0.0
    float_norms: bool = False
    is_gemma4: bool = False
    has_sinks: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scales_embedding: bool = False
    query_scalar: str = ""
    caps: tuple[str, str] = ("", "")
    windows: Literal["none", "all", "used", "some", "listed"] = "none"
    window_period: int = 0
    has_window_rope: bool = False
    skips_rope: bool = False
    rotates_windows: bool = False
    is_multiplied: bool = False
    rotates_part: bool = False
    experts: ExpertsFormat | None = None
    hybrid: HybridFormat | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
_HYBRID = {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768,
           "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
           "linear_num_key_heads": 16, "linear_num_value_heads": 32}
_HYBRID_EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                   "intermediate_size": 5632}
_SHARED = ExpertsFormat("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", None, True,
                        "shared_expert_intermediate_size")
_DELTA = Family(mlp_bias=False, head_norms="each", rotates_part=True, norm_offset=1.0)
_OLMO = Family(mlp_bias=False, head_norms="all", post_norm=True, defaults={"rms_norm_eps": 1e-5})
_GEMMA = Family(
    mlp_bias=False, norm_offset=1.0, activation="gelu_tanh", scales_embedding=True, windows="listed",
    query_scalar="query_pre_attn_scalar", caps=("attn_logit_softcapping", "final_logit_softcapping"),
    norm_names=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm"))
_GEMMA_VALUES = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304,
                 "intermediate_size": 9216, "num_hidden_layers": 26, "query_pre_attn_scalar": 256,
                 "sliding_window": 4096, "tie_word_embeddings": True, "eos_token_id": 1}
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, out_bias=False, mlp_bias=False, windows="all", defaults={
        "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072}),
    "qwen2": Family(qkv_bias=True, out_bias=False, mlp_bias=False, windows="some", defaults=_QWEN),
    "qwen3": Family(mlp_bias=False, head_norms="each", windows="some", defaults=_QWEN | {"head_dim": 128}),
    "phi3": Family(qkv_bias=False, out_bias=False, mlp_bias=False, is_fused=True, windows="all", rotates_part=True,
                   defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
                             "original_max_position_embeddings": 4096}),
    "granite": Family(is_multiplied=True),
    "olmo2": _OLMO,
    "olmo3": replace(_OLMO, windows="listed", window_period=4, has_window_rope=True, defaults={
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0}),
    "exaone4": Family(qkv_bias=False, out_bias=False, mlp_bias=False, head_norms="each", post_norm=True,
                      rounds_twice=True, windows="listed", window_period=4, rotates_windows=True, defaults={
                          "rms_norm_eps": 1e-5, "sliding_window": 4096, "num_key_value_heads": 32}),
    "seed_oss": Family(out_bias=False, defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8,
                                                 "max_position_embeddings": 524288}),
    "smollm3": Family(windows="listed", skips_rope=True, defaults={
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}),
    "mixtral": Family(qkv_bias=False, out_bias=False, mlp_bias=False, windows="all", defaults={
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_local_experts": 8,
        "num_experts_per_tok": 2, "rope_theta": 1e6},
        experts=ExpertsFormat("block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", True, False)),
    "qwen3_moe": Family(mlp_bias=False, head_norms="each", windows="used", defaults=_QWEN | {
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        experts=ExpertsFormat("mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", None, True)),
    "qwen3_next": replace(_DELTA, hybrid="fused", experts=_SHARED, defaults=_HYBRID | _HYBRID_EXPERTS | {
        "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10}),
    "qwen3_5_text": replace(_DELTA, hybrid="split", defaults=_HYBRID),
    "qwen3_5_moe_text": replace(_DELTA, hybrid="split", experts=replace(_SHARED, normalises=True),
                                defaults=_HYBRID | _HYBRID_EXPERTS | {"num_experts": 256, "num_experts_per_tok": 8}),
    "gpt_oss": Family(
        windows="listed", window_period=2, float_norms=True, has_sinks=True, defaults={
            "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0, "max_position_embeddings": 131072, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096, "rope_theta": 150000.0}},
        experts=ExpertsFormat("mlp", ("gate_proj", "up_proj", "down_proj"), "intermediate_size", True, True,
                              router="router", has_bias=True, is_clamped=True)),
    "glm4": Family(
        out_bias=False, mlp_bias=False, has_fused_mlp=True, is_interleaved=True, rotates_part=True,
        norm_names=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True,
                  "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072}),
    "ministral3": Family(
        qkv_bias=False, out_bias=False, mlp_bias=False, windows="all", has_query_growth=True, defaults={
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
                                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                                "llama_4_scaling_beta": 0.1}}),
    "gemma2": replace(_GEMMA, window_period=2, defaults=_GEMMA_VALUES | {
        "vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0}),
    "gemma3_text": replace(_GEMMA, head_norms="each", window_period=6, has_window_rope=True, caps=(
        "", "final_logit_softcapping"), defaults=_GEMMA_VALUES | {
        "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
    "gemma4_text": replace(
        _GEMMA, head_norms="each", window_period=6, has_window_rope=True, is_gemma4=True, norm_offset=0.0,
        float_norms=True, query_scalar="", caps=("", "final_logit_softcapping"), defaults=_GEMMA_VALUES | {
            "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512, "max_position_embeddings": 131072,
            "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        experts=ExpertsFormat("", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", True, False,
                              router="router.proj", switch="enable_moe_block", chosen="top_k_experts", is_beside=True)),
}
FAMILIES["gemma4_unified_text"] = replace(FAMILIES["gemma4_text"], experts=None, defaults={
    **FAMILIES["gemma4_text"].defaults, "hidden_size_per_layer_input": 0, "sliding_window": 1024,
    "max_position_embeddings": 262144})

# Models with image input around one of the families, of which the text part is read.
_WRAPPED = ("gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe")

# Unsupported families -> what longdraft lacks; part of the error message.
MISSING: dict[str, str] = {
    "cohere": "LayerNorm, parallel attention and MLP",
    "cohere2": "LayerNorm, parallel attention and MLP",
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "falcon": "LayerNorm, an MLP without a gate",
    "gpt2": "learned positions, LayerNorm, an MLP without a gate",
    "gpt_neox": "LayerNorm, an MLP without a gate",
    "granitemoehybrid": "state-space layers",
    "llama4": "chunked attention",
    "llama4_text": "chunked attention",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "mllama": "image input by cross-attention",
    "olmo": "LayerNorm without weights",
    "phi": "LayerNorm, parallel attention and MLP",
    "phimoe": "LayerNorm",
    "qwen2_vl": "image input, RoPE with three positions",
    "qwen2_5_vl": "image input, RoPE with three positions",
    "stablelm": "LayerNorm",
    "starcoder2": "LayerNorm, an MLP without a gate",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model where a model with image input wraps one of a supported family."""
    inner = config.get("text_config")
    if config.get("model_type") not in _WRAPPED or not isinstance(inner, dict):
        return config
    if (kind := f"{config['model_type']}_text") in FAMILIES:
        inner = {"model_type": kind} | inner
    outer = ("tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "quantization_config")
    return inner | {name: config[name] for name in outer if config.get(name) is not None}
