"""What GGUF files of Gemma say in their own way.

Gemma 2 and 3: the scale of queries goes by the number of layers. Gemma 4: heads have two sizes, and the wide ones
rotate in part.
"""

from __future__ import annotations

from typing import Any

from longdraft.checkpoint.gguf.container import Gguf
from longdraft.checkpoint.gguf.reader import Reader

_FINAL_CAP = 30.0  # of logits, where the file has none, as in llama.cpp
_STILL = 1e29  # a divisor of frequencies from which on a pair stands still
# Names in Hugging Face of tensors that have other endings than .weight and .bias.
NAMES = {"layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
         "ffn_down_exps.scale": "router.per_expert_scale"}


_QUERY_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the models whose queries are scaled by hidden size / heads


def add(config: dict[str, Any], model: Gguf, read: Reader, name: str) -> None:
    """Add what the architecture `name` has to a config.json. Raises ModelError for wrong sizes."""
    if name == "gemma4":
        _add_wide_layers(config, model, read)
    else:
        _add_query_scale(config, read, name)


def _add_query_scale(config: dict[str, Any], read: Reader, name: str) -> None:
    """The scale of queries, and what rotates layers with a window."""
    by_width = read.layers == _QUERY_BY_WIDTH[name]
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if by_width else config["head_dim"]
    if name == "gemma3":
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": {
            "rope_theta": read.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}}


def _add_wide_layers(config: dict[str, Any], model: Gguf, read: Reader) -> None:
    """Add to a config.json what differs between layers with a window and others.

    The keys without an ending are those of layers without a window. The number of KV heads may be an array.
    """
    is_full = [kind == "full_attention" for kind in config.get("layer_types", ())]
    if not any(is_full) or all(is_full):
        model.fail("gemma4.attention.sliding_window_pattern must give some layers a window, and others none")
    counts = read.flags_or_period("attention.head_count_kv")
    counts = [counts] * len(is_full) if isinstance(counts, int) else counts
    full, windowed = ({count for count, kind in zip(counts, is_full, strict=True) if kind is wanted}
                      for wanted in (True, False))
    if len(full) > 1 or len(windowed) > 1:
        model.fail(f"gemma4.attention.head_count_kv is {counts}; allowed: one number for the layers with a window, and "
                   "one for layers without")
    head_dim = read.whole("attention.key_length")
    if read.whole("attention.value_length", head_dim) != head_dim:
        model.fail("keys and values have different lengths, which is not supported")
    for ending, width in (("", head_dim), ("_swa", config["head_dim"])):
        if (dims := read.whole(f"rope.dimension_count{ending}", width)) != width:
            model.fail(f"gemma4.rope.dimension_count{ending} is {dims}; supported: {width}, the length of keys")
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 1.0)) or 1.0
    if (factor != 1 and read.text("rope.scaling.type", "linear") != "none") or (
            read.number("rope.scaling.attn_factor", 1.0) != 1):
        model.fail(f"gemma4.rope.scaling.factor is {factor:g}; supported: rotations of Gemma 4 without scaling")
    if not read.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = _FINAL_CAP
    first = is_full.index(True)
    shared = read.number("attention.shared_kv_layers", 0)
    if not 0 <= shared < len(is_full):
        model.fail(f"gemma4.attention.shared_kv_layers is {shared}; allowed: 0 to {len(is_full) - 1}")
    inner = read.flags_or_period("feed_forward_length")
    inner = inner if isinstance(inner, list) else [inner] * len(is_full)
    if inner[len(inner) - int(shared) :] not in ([inner[0]] * int(shared), [2 * inner[0]] * int(shared)) or any(
            width != inner[0] for width in inner[: len(inner) - int(shared)]):
        model.fail(f"gemma4.feed_forward_length is {inner}; supported: one number, and it or twice of it for layers "
                   "that share keys and values")
    config |= {
        "intermediate_size": inner[0], "use_double_wide_mlp": inner[-1] != inner[0],
        "num_kv_shared_layers": int(shared), "vocab_size_per_layer_input": config["vocab_size"],
        "hidden_size_per_layer_input": int(read.number("embedding_length_per_layer_input", 0)),
        "num_key_value_heads": windowed.pop(),
        "attention_k_eq_v": f"blk.{first}.attn_v.weight" not in model.tensors,
        "per_layer_config": {str(layer): {"head_dim": head_dim, "num_key_value_heads": counts[first]}
                             for layer, kind in enumerate(is_full) if kind},
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": read.number("rope.freq_base", 10000.0),
                               "partial_rotary_factor": _turning(model, head_dim) / (head_dim // 2)},
            "sliding_attention": {"rope_type": "default", "rope_theta": read.number("rope.freq_base_swa", 10000.0)}},
    }
    if read.has("expert_count") and read.number("expert_count"):
        config |= {"enable_moe_block": True, "top_k_experts": config["num_experts_per_tok"]}


def _turning(model: Gguf, head_dim: int) -> int:
    """The number of pairs that rotate in a wide head: frequencies of other pairs are divided by a huge number."""
    pairs = head_dim // 2
    if "rope_freqs.weight" not in model.tensors:
        return pairs
    factors = model.floats("rope_freqs.weight", pairs)
    count = sum(factor == 1 for factor in factors)
    is_sound = all(factor == 1 for factor in factors[:count]) and all(factor > _STILL for factor in factors[count:])
    if not count or not is_sound:
        model.fail("rope_freqs.weight must have ones, and after them numbers of 1e30, in Gemma 4")
    return count
