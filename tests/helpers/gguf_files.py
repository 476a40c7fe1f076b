"""Write GGUF files: any metadata and tensors, and models of `transformers` as llama.cpp's converter names them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q3_K": 11, "Q4_K": 12,
            "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "I32": 26, "I64": 27, "BF16": 30, "MXFP4": 39}
_FORMS = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "u8": (0, "B")}

Stored = tuple[int, Sequence[int], bytes]  # type, shape as PyTorch has it, data


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(content: Any) -> bytes:
    """A value with its type: texts, truth values, u32, f32, lists of one of these, and arrays of NumPy (int32)."""
    if isinstance(content, np.ndarray):
        return struct.pack("<IIQ", 9, _FORMS["i32"][0], len(content)) + content.astype("<i4").tobytes()
    if isinstance(content, list):
        parts = [value(part) for part in content]
        kind = parts[0][:4] if parts else struct.pack("<I", 4)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(parts)) + b"".join(part[4:] for part in parts)
    if isinstance(content, str):
        return struct.pack("<I", 8) + text(content)
    name = "bool" if isinstance(content, bool) else "u32" if isinstance(content, int) else "f32"
    kind, form = _FORMS[name]
    return struct.pack("<I" + form, kind, content)


def header(values: Mapping[str, Any], tensors: Mapping[str, Stored], *, magic: bytes = b"GGUF", version: int = 3,
           counts: tuple[int, int] | None = None, alignment: int = 32) -> bytes:
    """Everything before the data, padded. counts: (tensors, pairs) that it claims; default: the true ones."""
    parts = [magic, struct.pack("<I2Q", version, *(counts or (len(tensors), len(values))))]
    parts += [text(key) + value(content) for key, content in values.items()]
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        parts.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset))
        offset += -(-len(data) // alignment) * alignment
    joined = b"".join(parts)
    return joined + b"\0" * (-len(joined) % alignment)


def write_gguf(path: Path, values: Mapping[str, Any], tensors: Mapping[str, Stored], **more: Any) -> None:
    data = b"".join(stored + b"\0" * (-len(stored) % 32) for _, _, stored in tensors.values())
    path.write_bytes(header(values, tensors, **more) + data)


def noise(count: int, seed: str = "") -> bytes:
    return hashlib.shake_256(seed.encode()).digest(count)


_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def stored(tensor: Tensor, kind: str) -> Stored:
    """A tensor in one of the types that are simple to make."""
    shape, x = tuple(tensor.shape), tensor.float()
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return TYPE_IDS[kind], shape, x.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    groups = x.reshape(-1, 32).numpy()
    if kind == "Q8_0":
        scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
        steps = np.where(scale > 0, scale, 1).astype(np.float32)
        whole = np.clip(np.round(groups / steps), -127, 127).astype(np.int8)
        return TYPE_IDS[kind], shape, np.concatenate([scale.view(np.uint8), whole.view(np.uint8)], 1).tobytes()
    if kind == "MXFP4":
        exponent = np.ceil(np.log2(np.abs(groups).max(1, keepdims=True) / 6)).astype(int).clip(-100, 100)
        scaled = groups / 2.0**exponent
        whole = np.abs(np.abs(scaled)[..., None] - _FP4).argmin(-1).astype(np.uint8)
        whole |= (scaled < 0).astype(np.uint8) << 3
        nibbles = whole[:, :16] | whole[:, 16:] << 4
        return TYPE_IDS[kind], shape, np.concatenate([(exponent + 127).astype(np.uint8), nibbles], 1).tobytes()
    least = groups.min(1, keepdims=True) if kind == "Q4_1" else -np.abs(groups).max(1, keepdims=True)
    scale = ((groups.max(1, keepdims=True) - least) / 15 if kind == "Q4_1" else -least / 8).astype(np.float16)
    steps = np.where(scale > 0, scale, 1).astype(np.float32)
    whole = np.clip(np.round((groups - least) / steps), 0, 15).astype(np.uint8)
    nibbles = whole[:, :16] | whole[:, 16:] << 4
    ends = [scale.view(np.uint8)] + ([least.astype(np.float16).view(np.uint8)] if kind == "Q4_1" else [])
    return TYPE_IDS[kind], shape, np.concatenate([*ends, nibbles], 1).tobytes()


_INSIDE = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
}
_HYBRID = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
HYBRID_ARCHS = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
            "model.embed_tokens_per_layer": "per_layer_token_embd",
            "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm"}
PERMUTED = ("llama", "granite", "smollm3", "mistral3")


def permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k as llama.cpp's converter stores them."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def theirs(name: str, arch: str) -> str:
    """llama.cpp's name of a tensor of Hugging Face."""
    stem, suffix = name.rsplit(".", 1)
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    if arch in HYBRID_ARCHS.values():
        return f"blk.{layer}.{(_INSIDE | _HYBRID)[part]}.{suffix}"
    if arch in ("olmo2", "gemma2", "gemma3", "gemma4"):
        post = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
                "pre_feedforward_layernorm": "ffn_norm", "router.proj": "ffn_gate_inp",
                "post_feedforward_layernorm_1": "post_ffw_norm_1", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
                "post_feedforward_layernorm_2": "post_ffw_norm_2", "per_layer_input_gate": "inp_gate",
                "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm"}
        return f"blk.{layer}.{(_INSIDE | post)[part]}.{suffix}"
    if arch == "gpt-oss":
        post = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
        return f"blk.{layer}." + ("attn_sinks.weight" if suffix == "sinks" else f"{(_INSIDE | post)[part]}.{suffix}")
    if arch == "glm4":
        post = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
        return f"blk.{layer}.{(_INSIDE | post)[part]}.{suffix}"
    return f"blk.{layer}.{_INSIDE[part]}.{suffix}"


def architecture_of(config: Any) -> str:
    archs = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
             "gemma4_text": "gemma4", "olmo3": "olmo2", "ministral3": "mistral3", "gpt_oss": "gpt-oss"} | HYBRID_ARCHS
    return archs.get(config.model_type, config.model_type)


def metadata(config: Any, arch: str) -> dict[str, Any]:
    """What llama.cpp's converter writes about a configuration of `transformers`."""
    heads = config.num_attention_heads
    values = {
        "general.architecture": arch, f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.embedding_length": config.hidden_size, f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.context_length": config.max_position_embeddings, f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if arch == "gemma4":
        values |= gemma4_metadata(config)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    values[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if arch == "glm4":
        values[f"{arch}.rope.dimension_count"] = int(config.head_dim * rope["partial_rotary_factor"])
    if rope["rope_type"] == "yarn":
        values |= {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": rope["factor"],
                   f"{arch}.rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    if arch == "mistral3":
        values |= {f"{arch}.attention.temperature_scale": rope["llama_4_scaling_beta"],
                   f"{arch}.rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"]}
    if arch.startswith("gemma") or config.model_type in ("gpt_oss", "olmo3"):
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
        values[f"{arch}.attention.sliding_window_pattern"] = windowed
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        values |= {f"{arch}.{key}": getattr(config, key) for key in caps if getattr(config, key, None)}
        if rope["rope_type"] == "linear":
            values |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": rope["factor"]}
    if arch == "gpt-oss":
        values[f"{arch}.expert_feed_forward_length"] = config.intermediate_size
    if hasattr(config, "num_local_experts"):
        values |= {f"{arch}.expert_count": config.num_local_experts,
                   f"{arch}.expert_used_count": config.num_experts_per_tok}
        if hasattr(config, "moe_intermediate_size"):
            values[f"{arch}.expert_feed_forward_length"] = config.moe_intermediate_size
    if arch in HYBRID_ARCHS.values():
        values |= hybrid_metadata(config, arch)
    head_dim = getattr(config, "head_dim", None)
    if head_dim and head_dim != config.hidden_size // heads and arch != "gemma4":
        values[f"{arch}.attention.key_length"] = values[f"{arch}.attention.value_length"] = head_dim
    for ours, name in {"logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
                       "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier"}.items():
        if arch == "granite":
            values[f"{arch}.{ours}"] = float(getattr(config, name))
    if getattr(config, "sliding_window", None) and arch in ("llama", "phi3", "gemma2", "gemma3", "gemma4",
                                                           "gpt-oss", "olmo2"):
        values[f"{arch}.attention.sliding_window"] = config.sliding_window
    return values


def gemma4_metadata(config: Any) -> dict[str, Any]:
    """Lengths of keys with the ending _swa for layers with a window, and an array of KV heads."""
    full = config.layer_types.index("full_attention")
    wide, narrow = config.per_layer_config[full].head_dim, config.head_dim
    values = {f"gemma4.attention.{part}_length{ending}": dim for part in ("key", "value")
              for ending, dim in (("", wide), ("_swa", narrow))}
    values |= {"gemma4.rope.dimension_count": wide, "gemma4.rope.dimension_count_swa": narrow,
               "gemma4.rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
               "gemma4.attention.shared_kv_layers": config.num_kv_shared_layers,
               "gemma4.embedding_length_per_layer_input": config.hidden_size_per_layer_input,
               "gemma4.attention.head_count_kv": [
                   config.per_layer_config[layer].num_key_value_heads for layer in range(config.num_hidden_layers)]}
    if config.use_double_wide_mlp:
        shared, inner = config.num_kv_shared_layers, config.intermediate_size
        values["gemma4.feed_forward_length"] = ([inner] * (config.num_hidden_layers - shared) + [2 * inner] * shared)
    if config.enable_moe_block:
        values |= {"gemma4.expert_count": config.num_experts, "gemma4.expert_used_count": config.top_k_experts,
                   "gemma4.expert_feed_forward_length": config.moe_intermediate_size}
    return values


def gemma4_tensors(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of Gemma 4 as the converter stores it."""
    inside = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
              "layer_scalar": "layer_output_scale.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
              "experts.down_proj": "ffn_down_exps.weight"}
    _, _, layer, part = name.split(".", 3) if ".layers." in name else ("", "", "", name)
    return {f"blk.{layer}.{inside[part]}" if part in inside else theirs(name, "gemma4"): tensor}


def hybrid_metadata(config: Any, arch: str) -> dict[str, Any]:
    found = {
        f"{arch}.ssm.conv_kernel": config.linear_conv_kernel_dim, f"{arch}.ssm.state_size": config.linear_key_head_dim,
        f"{arch}.ssm.group_count": config.linear_num_key_heads,
        f"{arch}.ssm.time_step_rank": config.linear_num_value_heads,
        f"{arch}.ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        f"{arch}.full_attention_interval": 4, f"{arch}.rope.dimension_count": config.head_dim // 4,
    }
    if arch != "qwen3next":  # pairs that rotate by place in time, rows and columns of an image, which are one in a text
        found[f"{arch}.rope.dimension_sections"] = np.array([3, 3, 2, 0])
    if arch != "qwen35":
        found |= {f"{arch}.expert_count": config.num_experts,
                  f"{arch}.expert_used_count": config.num_experts_per_tok,
                  f"{arch}.expert_feed_forward_length": config.moe_intermediate_size,
                  f"{arch}.expert_shared_feed_forward_length": config.shared_expert_intermediate_size}
    return found


def tiled(rows: Tensor, config: Any, dim: int) -> Tensor:
    """Rows of value heads, those of each key head in turn, as the converter stores them for Qwen3.5."""
    keys = config.linear_num_key_heads
    return rows.reshape(keys, -1, dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def hybrid_tensors(name: str, tensor: Tensor, config: Any, arch: str) -> dict[str, Tensor]:
    """A tensor of a hybrid as the converter stores it: 1 + w, a decay for A_log, q k v and z apart, heads tiled."""
    part = name.rpartition("linear_attn.")[2] if "linear_attn." in name else ""
    keys, dim = 2 * config.linear_num_key_heads * config.linear_key_head_dim, config.linear_value_head_dim
    if not part:
        return {theirs(name, arch): tensor.float() + 1 if name.endswith("norm.weight") else tensor}
    if part == "in_proj_qkvz.weight":
        per_key = config.linear_num_value_heads // config.linear_num_key_heads * dim
        groups = tensor.view(config.linear_num_key_heads, -1, tensor.shape[1])
        q, k, v, z = (x.reshape(-1, tensor.shape[1]) for x in groups.split(
            [config.linear_key_head_dim, config.linear_key_head_dim, per_key, per_key], 1))
        stem = name.replace("in_proj_qkvz", "in_proj_{}")
        return {theirs(stem.format("qkv"), arch): torch.cat([q, k, v]), theirs(stem.format("z"), arch): z}
    tensor = tensor.squeeze(1) if part == "conv1d.weight" else -tensor.float().exp() if part == "A_log" else tensor
    if arch != "qwen3next":
        if part in ("in_proj_qkv.weight", "conv1d.weight"):
            tensor = torch.cat([tensor[:keys], tiled(tensor[keys:], config, dim)])
        elif part == "out_proj.weight":
            tensor = tiled(tensor.T, config, dim).T
        elif part != "norm.weight":
            tensor = tiled(tensor, config, dim if part == "in_proj_z.weight" else 1)
    layer = name.split(".")[2]
    bare = {"A_log": f"blk.{layer}.ssm_a", "dt_bias": f"blk.{layer}.ssm_dt.bias"}
    return {bare.get(part) or theirs(name, arch): tensor}


def tokenizer_values(folder: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """The metadata of a byte-level tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, special = content["model"]["vocab"], {t["content"]: t["id"] for t in content["added_tokens"]}
    tokens = [token for token, _ in sorted((vocabulary | special).items(), key=lambda pair: pair[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens]),
            "tokenizer.ggml.merges": merges}


def convert(folder: Path, model: torch.nn.Module, path: Path, kind: str = "F32",
            values: Mapping[str, Any] | None = None, tensors: Mapping[str, Stored] | None = None,
            without: Sequence[str] = (), kinds: Mapping[str, str] | None = None) -> None:
    """Write a model of `transformers` and the tokenizer of its folder.

    kind     the type of the matrices; norms are F32
    values   metadata in the place of the model's own; None: the key is left out
    kinds    the type of those whose names have this part in the file: of dense models, and of experts but gpt-oss's
    without  parts of the names of tensors that are left out
    """
    def kind_of(name: str) -> str:
        return next((own for part, own in (kinds or {}).items() if part in name), kind)

    config = model.config
    arch = architecture_of(config)
    if arch == "gemma4":
        config.allow_global_per_layer_attribute_access = True
    converted: dict[str, Stored] = dict(tensors or {})
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "gpt-oss" and ".mlp.experts." in name:
            layer, rows = name.split(".")[2], tensor if name.endswith("_bias") else tensor.transpose(1, 2)
            suffix = "bias" if name.endswith("_bias") else "weight"
            parts = {"down": rows} if "down" in name else {"gate": rows[:, ::2], "up": rows[:, 1::2]}
            as_kind = kind if suffix == "weight" else "F32"
            converted |= {f"blk.{layer}.ffn_{part}_exps.{suffix}": stored(one, as_kind) for part, one in parts.items()}
            continue
        if ".mlp.experts." in name:
            layer, size = name.split(".")[2], tensor.shape[1] // 2
            parts = {"down": tensor} if "down" in name else {"gate": tensor[:, :size], "up": tensor[:, size:]}
            names = {f"blk.{layer}.ffn_{part}_exps.weight": one for part, one in parts.items()}
            converted |= {own: stored(one, kind_of(own)) for own, one in names.items()}
            continue
        if arch == "gemma4":
            for ours, part in gemma4_tensors(name, tensor).items():
                converted[ours] = stored(part, "F32" if part.ndim == 1 else kind)
            continue
        if arch in HYBRID_ARCHS.values():
            for ours, part in hybrid_tensors(name, tensor, config, arch).items():
                converted[ours] = stored(part, "F32" if part.ndim == 1 or "ssm_conv1d" in ours else kind)
            continue
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(
            name.rpartition("_proj")[0][-1:] if "self_attn" in name else "")
        rows = permuted(tensor, heads) if heads and arch in PERMUTED else tensor
        if arch.startswith("gemma") and tensor.ndim == 1:
            rows = rows.float() + 1
        name = theirs(name, arch)
        converted[name] = stored(rows, kind_of(name) if tensor.ndim > 1 else "F32")
    converted = {name: tensor for name, tensor in converted.items() if not any(part in name for part in without)}
    written = {**metadata(config, arch), **tokenizer_values(folder), **(values or {})}
    write_gguf(path, {key: content for key, content in written.items() if content is not None}, converted)
