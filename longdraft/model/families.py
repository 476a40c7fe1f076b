"""How each family differs from Llama, and what those that are not supported would need.

A family is a few flags (docs/models.md, "Families"); the transformer is one. `defaults` are what `transformers` takes
where a `config.json` is silent, as far as that is not what it takes for Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

HeadNorms = Literal["none", "each", "all"]


@dataclass(frozen=True)
class Family:
    """
    qkv_bias       whether q, k, v have a bias; None: as `attention_bias` says
    out_bias       whether the attention's output has
    mlp_bias       whether the MLP has; None: as `mlp_bias` says
    head_norms     RMSNorm of queries and keys before their rotation: of each head, or of all as one vector
    post_norm   norms stand behind attention and MLP, not before them; they round once, after their weight
    is_fused       q, k, v are one tensor in the file, gate and up another
    windows        sliding windows: in all layers where sliding_window is a number, or in those that layer_types (or
                   max_window_layers) names where use_sliding_window is true
    skips_rope     some layers may be without rotation (no_rope_layers)
    is_multiplied  embedding_, residual_, attention_multiplier and logits_scaling are read
    rotates_part   partial_rotary_factor may be below 1
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    head_norms: HeadNorms = "none"
    post_norm: bool = False
    is_fused: bool = False
    windows: Literal["none", "all", "some"] = "none"
    skips_rope: bool = False
    is_multiplied: bool = False
    rotates_part: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "max_position_embeddings": 32768}
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
    "olmo2": Family(mlp_bias=False, head_norms="all", post_norm=True, defaults={"rms_norm_eps": 1e-5}),
    "smollm3": Family(windows="some", skips_rope=True, defaults={
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2e6, "tie_word_embeddings": True}),
}

_EXPERTS = "mixture-of-experts layers"
MISSING: dict[str, str] = {
    "gemma": "gated GELU, norms whose weight is 1 + w, scaled embeddings",
    "gemma2": "logit soft-capping, gated GELU, norms on both sides of attention and MLP",
    "gemma3": "gated GELU, norms on both sides of attention and MLP, a second rope for windowed layers",
    "gemma3_text": "gated GELU, norms on both sides of attention and MLP, a second rope for windowed layers",
    "cohere": "LayerNorm, attention and MLP side by side",
    "cohere2": "LayerNorm, attention and MLP side by side",
    "deepseek_v2": f"latent attention, {_EXPERTS}",
    "deepseek_v3": f"latent attention, {_EXPERTS}",
    "exaone4": "norms behind attention and MLP with a norm of each head",
    "falcon": "LayerNorm, an MLP without gate",
    "glm4": "norms on both sides of attention and MLP, rotation of neighbouring dimensions",
    "gpt2": "learned positions, LayerNorm, an MLP without gate",
    "gpt_neox": "LayerNorm, an MLP without gate",
    "gpt_oss": f"attention sinks, {_EXPERTS}",
    "granitemoe": _EXPERTS,
    "granitemoehybrid": f"state-space layers, {_EXPERTS}",
    "llama4": f"chunked attention, {_EXPERTS}",
    "llama4_text": f"chunked attention, {_EXPERTS}",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "mixtral": _EXPERTS,
    "mistral3": "images",
    "mllama": "cross-attention to images",
    "olmo": "LayerNorm without weights",
    "olmo3": "a second rope for windowed layers",
    "phi": "LayerNorm, attention and MLP side by side",
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen2_vl": "images, rotation by three positions",
    "qwen2_5_vl": "images, rotation by three positions",
    "qwen3_moe": _EXPERTS,
    "qwen3_next": f"linear attention, {_EXPERTS}",
    "stablelm": "LayerNorm",
    "starcoder2": "LayerNorm, an MLP without gate",
}
