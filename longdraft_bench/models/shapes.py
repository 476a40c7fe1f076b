"""The sizes of known models, as entries of their config.json. Memory and time per token depend on nothing else.

All but the hybrids and mixtures are described as Llamas. The parameters that other families add (biases, query and key
norms) are less than 0.1 %.
"""

from __future__ import annotations

from typing import Any


def _shape(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, limit: int, *,
           head_dim: int | None = None, is_tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim or hidden // heads, "max_position_embeddings": limit,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": is_tied, "dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "bos_token_id": 0, "eos_token_id": 1,
    }


SHAPES = {
    "qwen2.5-0.5b": _shape(151936, 896, 4864, 24, 14, 2, 32768, is_tied=True),
    "llama-3.2-1b": _shape(128256, 2048, 8192, 16, 32, 8, 131072, is_tied=True),
    "qwen2.5-1.5b": _shape(151936, 1536, 8960, 28, 12, 2, 131072, is_tied=True),
    "smollm2-1.7b": _shape(49152, 2048, 8192, 24, 32, 32, 8192, is_tied=True),
    "llama-3.2-3b": _shape(128256, 3072, 8192, 28, 24, 8, 131072, is_tied=True),
    "yarn-llama-2-7b-128k": _shape(32000, 4096, 11008, 32, 32, 32, 131072),
    "mistral-7b-v0.3": _shape(32768, 4096, 14336, 32, 32, 8, 32768),
    "qwen2.5-7b": _shape(152064, 3584, 18944, 28, 28, 4, 131072),
    "llama-3.1-8b": _shape(128256, 4096, 14336, 32, 32, 8, 131072),
    "qwen3-8b": _shape(151936, 4096, 12288, 36, 32, 8, 40960, head_dim=128),
    "qwen2.5-14b": _shape(152064, 5120, 13824, 48, 40, 8, 131072),
    "qwen2.5-32b": _shape(152064, 5120, 27648, 64, 40, 8, 131072),  # DeepSeek-R1-Distill-Qwen-32B and QwQ-32B too
    "llama-3.1-70b": _shape(128256, 8192, 28672, 80, 64, 8, 131072),
}

HYBRID_SHAPES = {
    "qwen3.5-2b": _shape(248320, 2048, 6144, 24, 8, 2, 262144, head_dim=256, is_tied=True) | {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4},
}

# Mixtures of experts, of which a token uses few; the second is a hybrid too
MIXTURE_SHAPES = {
    "qwen3-30b-a3b": _shape(151936, 2048, 6144, 48, 32, 4, 40960, head_dim=128) | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "qwen3-next-80b-a3b": _shape(151936, 2048, 5120, 48, 16, 2, 262144, head_dim=256) | {
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "partial_rotary_factor": 0.25,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 12, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4},
}


_GEMMA4 = dict(model_type="gemma4_text", vocab_size=262144, head_dim=256, global_head_dim=512, sliding_window=1024,
               final_logit_softcapping=30.0, tie_word_embeddings=True, hidden_size_per_layer_input=0)
# Hybrids, mixtures of experts and Gemmas whose forwards `bench forwards` times
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": dict(
        model_type="qwen3_5_text", vocab_size=151936, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True),
    "qwen3-30b-a3b": MIXTURE_SHAPES["qwen3-30b-a3b"],
    "qwen3.6-35b-a3b": dict(
        model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        tie_word_embeddings=False),
    "gemma-4-31b": _GEMMA4 | dict(
        hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True),
    "gemma-4-26b-a4b": _GEMMA4 | dict(
        hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704),
    "gemma-4-e2b": _GEMMA4 | dict(
        hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1,
        sliding_window=512, sliding_window_pattern=5, hidden_size_per_layer_input=256, num_kv_shared_layers=20,
        use_double_wide_mlp=True),
}


def cut(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """A shape with its first layers only."""
    kinds = {"layer_types": shape["layer_types"][:layers]} if "layer_types" in shape else {}
    return shape | {"num_hidden_layers": layers} | kinds
