"""From a GGUF file's metadata to the dictionary of a `config.json`, and to sampling defaults.

The numbers of the metadata have float32 precision. They are given back as the shortest decimal, so that 1e-5 is the
1e-5 of the original configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longdraft.checkpoint.gguf import gemma
from longdraft.checkpoint.gguf.container import Gguf
from longdraft.checkpoint.gguf.reader import Reader, shortest
from longdraft.checkpoint.gguf.types import Array
from longdraft.model.families import FAMILIES
from longdraft.model.hybrid import CONVERTED

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty", "penalty_last_n": "penalty_window"}
_UNSUPPORTED_SAMPLING = {"mirostat": 0, "xtc_probability": 0}  # with the values that turn them off
_LLAMA3_TRAINED = 8192  # positions that the published models were trained on before their rope was extended
# Texts that end an answer whatever the metadata says, as llama.cpp has them.
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>",
              "<|return|>", "<|call|>", "</s>", "<|tool_response>")


@dataclass(frozen=True)
class Architecture:
    """A value of `general.architecture`.

    model_type   the family that it is (longdraft/model/families.py)
    is_permuted  rows of q and k are stored for rotations of adjacent dimensions
    settings     metadata keys, without the architecture, to keys of config.json
    is_tiled     value head i of delta layers belongs to key head i modulo their number; in Hugging Face's files the
                 value heads of one key head follow one another
    """

    model_type: str
    is_permuted: bool = False
    settings: Mapping[str, str] | None = None
    is_tiled: bool = False


_GRANITE = {"logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
            "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier"}
_GEMMA = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
ARCHITECTURES = {
    "llama": Architecture("llama", is_permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "phi3": Architecture("phi3"),
    "granite": Architecture("granite", is_permuted=True, settings=_GRANITE),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", is_permuted=True),
    "qwen3moe": Architecture("qwen3_moe"),
    "qwen3next": Architecture("qwen3_next"),
    "qwen35": Architecture("qwen3_5_text", is_tiled=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", is_tiled=True),
    "glm4": Architecture("glm4"),
    "gpt-oss": Architecture("gpt_oss"),
    "mistral3": Architecture("ministral3", is_permuted=True),
    "gemma2": Architecture("gemma2", settings=_GEMMA),
    "gemma3": Architecture("gemma3_text", settings=_GEMMA),
    "gemma4": Architecture("gemma4_text", settings=_GEMMA),
}
BLOCK_HEAD = "dflash"  # a drafter, not a model (longdraft/parts/block_files.py)
_WITH_EXPERTS = ("llama", "gemma4", "qwen3moe", "gpt-oss", "qwen3next", "qwen35moe")
_OLMO3 = Architecture("olmo3")  # files of the architecture `olmo2` that have windows
_MIXTRAL = Architecture("mixtral", is_permuted=True)  # files of the architecture `llama` that have experts
_OTHERS = {"gptoss": "gpt-oss in an early layout of Ollama; get a file with general.architecture 'gpt-oss'",
           "clip": "a vision model (mmproj), which belongs to another file"}


def architecture(model: Gguf) -> tuple[str, Architecture]:
    """The name and the properties of the architecture. Raises ModelError if it is not supported."""
    name = model.values.get("general.architecture")
    kind = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if name == BLOCK_HEAD:
        return BLOCK_HEAD, Architecture("qwen3")
    if kind is None or not isinstance(name, str):
        known = _OTHERS.get(name, "") if isinstance(name, str) else ""
        model.fail(f"general.architecture is {name!r}; supported: {', '.join(ARCHITECTURES)}"
                   + (f"; this is {known}" if known else ""))
    if name == "olmo2" and model.values.get(f"{name}.attention.sliding_window"):
        return name, _OLMO3
    if not model.values.get(f"{name}.expert_count"):
        return name, kind
    if name not in _WITH_EXPERTS or model.values.get(f"{name}.expert_shared_count"):
        model.fail(f"the model has mixture-of-experts layers, which {kind.model_type!r} in longdraft does not have")
    return name, _MIXTRAL if name == "llama" else kind


def config_of(model: Gguf) -> dict[str, Any]:
    """The config.json that the metadata and the tensors amount to. Raises ModelError for what is missing or wrong."""
    name, kind = architecture(model)
    tensors = model.tensors
    if model.values.get("general.type") == "adapter":
        model.fail("it is a LoRA adapter, not a model; merge it into its model (llama-export-lora), and give that file")
    if "token_embd.weight" not in tensors:
        model.fail("it has no tensor token_embd.weight; a file with a vocabulary alone is not a model")
    read = Reader(model, name)
    heads = read.whole("attention.head_count")
    hidden = read.whole("embedding_length")
    ending = "_swa" if name == "gemma4" else ""  # of keys that say what layers with a window have
    head_dim = read.whole(f"attention.key_length{ending}", hidden // heads or 1)
    if read.whole(f"attention.value_length{ending}", head_dim) != head_dim:
        model.fail("keys and values have different lengths, which is not supported")
    experts = FAMILIES[kind.model_type].experts
    if name == "gemma4" and not (read.has("expert_count") and read.number("expert_count")):
        experts = None
    if model.values.get(f"{name}.attention.causal") is False:
        model.fail(f"{name}.attention.causal is false: this is an embedding model, which writes no text")
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": 1 if name == "gemma4" else read.whole("feed_forward_length", 1 if experts else None),
        "num_hidden_layers": read.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if name == "gemma4" else read.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.whole("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "float32" if _is_float32(model) else "bfloat16",
        "eos_token_id": end_ids(model) if "tokenizer.ggml.tokens" in model.values else [],
        "sliding_window": None,
        "mlp_bias": False,
    }
    if FAMILIES[kind.model_type].hybrid:
        config |= _delta_layers(model, read)
    if experts:
        if read.has("expert_group_count") and read.number("expert_group_count") > 1:
            model.fail(f"{name}.expert_group_count is {read.number('expert_group_count'):g}; supported: 1")
        config |= {"num_local_experts": read.whole("expert_count"), "norm_topk_prob": True,
                   "num_experts_per_tok": read.whole("expert_used_count"),
                   "moe_intermediate_size": read.whole("expert_feed_forward_length", config["intermediate_size"])}
        if read.has("expert_shared_feed_forward_length"):
            config["shared_expert_intermediate_size"] = read.whole("expert_shared_feed_forward_length")
    if kind.model_type == "gpt_oss":
        config["intermediate_size"] = config["moe_intermediate_size"]
    for ours, theirs in (kind.settings or {}).items():
        if read.has(ours) and read.number(ours):  # 0 is as good as none
            config[theirs] = read.number(ours)
    if name == "granite":
        config.setdefault("attention_multiplier", head_dim**-0.5)
        if model.values.get(f"{name}.rope.scaling.finetuned") is False:  # so does llama.cpp read it, for Granite only
            model.fail(f"{name}.rope.scaling.finetuned is false: a Granite without rotations, which is not supported")
    if kind.model_type == "phi3" or (kind.model_type == "llama" and read.has("attention.sliding_window")):
        _add_window(config, read)
    if name != "gemma4":
        _add_rope(config, model, read, name)
    if name == "mistral3" and read.has("attention.temperature_scale"):
        config["rope_parameters"]["llama_4_scaling_beta"] = read.number("attention.temperature_scale")
        config["rope_parameters"].setdefault("original_max_position_embeddings", read.whole(
            "rope.scaling.original_context_length", config["max_position_embeddings"]))
    if "truncate" in FAMILIES[kind.model_type].defaults.get("rope_parameters", {}):  # which files do not say
        config["rope_parameters"]["truncate"] = False
    if FAMILIES[kind.model_type].window_period:
        _add_windows(config, read, kind.model_type)
    if kind is _OLMO3:  # layers with a window have the rope without its scaling
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": {
            "rope_theta": config["rope_parameters"]["rope_theta"], "rope_type": "default"}}
    if name.startswith("gemma"):
        gemma.add(config, model, read, name)
    return config


def _delta_layers(model: Gguf, read: Reader) -> dict[str, Any]:
    """The keys of config.json that describe the delta layers of a hybrid."""
    heads = read.whole("ssm.time_step_rank")
    values = read.whole("ssm.inner_size")
    if values % heads:
        model.fail(f"ssm.inner_size is {values}; allowed: a multiple of ssm.time_step_rank, {heads}")
    return {
        CONVERTED: True,
        "full_attention_interval": read.whole("full_attention_interval", 4),
        "linear_num_key_heads": read.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": read.whole("ssm.state_size"),
        "linear_value_head_dim": values // heads,
        "linear_conv_kernel_dim": read.whole("ssm.conv_kernel"),
    }


def stored_fields(model: Gguf) -> dict[str, Any]:
    """The fields of a ModelConfig that depend on the file: which matrices have a bias, and that nothing is added to
    norms, whose weights llama.cpp stores with their offset."""
    has = {name: f"blk.0.{name}.bias" in model.tensors for name in ("attn_q", "attn_qkv", "attn_output", "ffn_down")}
    return {"qkv_bias": has["attn_q"] or has["attn_qkv"], "out_bias": has["attn_output"], "mlp_bias": has["ffn_down"],
            "norm_offset": 0.0}


def _is_float32(model: Gguf) -> bool:
    return all(entry.type.name == "F32" for entry in model.tensors.values())


def _add_window(config: dict[str, Any], read: Reader) -> None:
    """The sliding window of Phi-3 and Mistral."""
    if read.has("attention.sliding_window"):
        window = int(read.number("attention.sliding_window"))
        config["sliding_window"] = window if 0 < window < config["max_position_embeddings"] else None
        if config["model_type"] == "llama":
            config["model_type"] = "mistral"


def _add_windows(config: dict[str, Any], read: Reader, model_type: str) -> None:
    """Which layers have a window, where a family lists them."""
    if not FAMILIES[model_type].is_gemma4:
        dims = config["head_dim"]
        same = {"attention.key_length": dims, "attention.value_length": dims, "rope.dimension_count": dims}
        if not FAMILIES[model_type].has_window_rope:
            same["rope.freq_base"] = config["rope_parameters"]["rope_theta"]
        for key, value in same.items():
            read.require_equal(f"{key}_swa", value)
        if FAMILIES[model_type].has_window_rope:  # llama.cpp scales these layers alike
            read.require_equal("rope.scaling.attn_factor", 1.0)
    default = FAMILIES[model_type].defaults["sliding_window"]
    if model_type == "gemma3_text" and not (read.has("attention.sliding_window")
                                            and read.number("attention.sliding_window")):
        config |= {"sliding_window": default, "layer_types": ["full_attention"] * read.layers}
        return
    config["sliding_window"] = read.whole("attention.sliding_window", default)
    if read.has("attention.sliding_window_pattern"):
        pattern = read.flags_or_period("attention.sliding_window_pattern")
        if isinstance(pattern, int):
            config["sliding_window_pattern"] = pattern
        else:
            kinds = ("full_attention", "sliding_attention")
            config["layer_types"] = [kinds[bool(flag)] for flag in pattern]


def _add_rope(config: dict[str, Any], model: Gguf, read: Reader, name: str) -> None:
    dims = read.whole("rope.dimension_count", config["head_dim"])
    rope: dict[str, Any] = {"rope_theta": read.number("rope.freq_base", 10000.0), "rope_type": "default"}
    config["rope_parameters"] = rope
    if dims != config["head_dim"]:
        config["partial_rotary_factor"] = (dims + 0.5) / config["head_dim"]  # rounded down again to `dims`
    elif "partial_rotary_factor" in FAMILIES[config["model_type"]].defaults:
        config["partial_rotary_factor"] = 1.0
    if name == "glm4" and read.has("rope.dimension_sections"):
        model.fail(f"{name}.rope.dimension_sections: a GLM that reads images, whose rotations are not supported")
    trained = config["max_position_embeddings"]
    original = read.whole("rope.scaling.original_context_length", trained)
    kind = read.text("rope.scaling.type", "linear")
    attention = read.number("rope.scaling.attn_factor", 1.0)  # on cos and sin
    earlier = read.number("rope.scale_linear", 1.0)  # the name of the factor in the first files
    factor = read.number("rope.scaling.factor", earlier) or 1.0
    if "rope_freqs.weight" in model.tensors:
        factors = model.floats("rope_freqs.weight", dims // 2)
        rope |= (_llama3(factors, rope["rope_theta"], dims, original, trained) if attention == 1
                 else _divided(factors, attention, original))
    elif "rope_factors_long.weight" in model.tensors:
        config["original_max_position_embeddings"] = original
        rope |= {"rope_type": "longrope", **{
            f"{length}_factor": model.floats(f"rope_factors_{length}.weight", dims // 2)
            for length in ("long", "short")}}
        if read.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = attention
    elif kind in ("none", "linear") and attention != 1:
        rope |= _divided([factor if kind == "linear" else 1.0] * (dims // 2), attention, original)
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= _yarn(model, read, name, factor, original)
    elif kind not in ("none", "linear"):
        model.fail(f"rope.scaling.type is {kind!r}; supported: none, linear, yarn, longrope")


def _yarn(model: Gguf, read: Reader, name: str, factor: float, original: int) -> dict[str, Any]:
    """YaRN's settings. llama.cpp reads those of its ramp for `mistral3` only, but its converter writes them for all."""
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for part in ("beta_fast", "beta_slow"):
        if read.has(f"rope.scaling.yarn_{part}"):
            scaling[part] = read.number(f"rope.scaling.yarn_{part}")
    log_factor = read.number("rope.scaling.yarn_log_multiplier", 0.0) if name == "mistral3" else 0.0
    if log_factor:
        scaling |= {"mscale": 1.0, "mscale_all_dim": log_factor}
    if (extent := read.number("rope.scaling.yarn_ext_factor", 1.0)) != 1 and extent >= 0:  # below: not set
        model.fail(f"rope.scaling.yarn_ext_factor is {extent}; supported: 1")
    if factor <= 0:
        model.fail(f"rope.scaling.factor is {factor}; allowed: above 0")
    rule = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    # The converter writes the whole factor of the original model here; llama.cpp saves 1 where it has none.
    own = read.number("rope.scaling.yarn_attn_factor", 1.0)
    whole = own if own != 1 else rule / (log_factor * (rule - 1) + 1)
    by = read.number("rope.scaling.attn_factor", 1.0)
    if by != 1 or own != 1:
        scaling["attention_factor"] = by * whole
    return scaling


def _divided(factors: list[float], attention: float, trained: int) -> dict[str, Any]:
    """Rotations whose frequencies are divided by `factors`, and cos and sin multiplied by `attention`."""
    return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": attention,
            "factor": 1.0, "original_max_position_embeddings": trained}


def _llama3(factors: list[float], theta: float, dims: int, original: int, trained: int) -> dict[str, Any]:
    """The settings whose divisors of the frequencies are `factors`: Llama 3's rule, or the numbers as they are."""
    factor, low, high = max(factors), 1.0, 4.0
    for length in {_LLAMA3_TRAINED, original}:
        turns = [length * theta ** (-2 * i / dims) / (2 * math.pi) for i in range(len(factors))]
        blends = [min(1.0, max(0.0, (turn - low) / (high - low))) for turn in turns]
        rule = [1 / ((1 - blend) / factor + blend) for blend in blends]
        if np.allclose(rule, factors, rtol=1e-4, atol=0):
            return {"rope_type": "llama3", "factor": shortest(factor), "low_freq_factor": low,
                    "high_freq_factor": high, "original_max_position_embeddings": length}
    return _divided(factors, 1.0, trained)


def end_ids(model: Gguf) -> list[int]:
    """Ids of the tokens that end a text. Raises ModelError for one outside of the vocabulary."""
    tokens = model.array("tokenizer.ggml.tokens")
    ids = [value for name in ("eos", "eot", "eom") if (value := special_id(model, name, len(tokens))) is not None]
    texts = set(_END_TEXTS)
    if {"<|return|>", "<|call|>"} <= set(tokens):  # the answer of gpt-oss goes on after <|end|>
        texts.discard("<|end|>")
    return [*dict.fromkeys([*ids, *(i for i, token in enumerate(tokens) if token in texts)])]


def special_id(model: Gguf, name: str, size: int) -> int | None:
    """The id of `tokenizer.ggml.<name>_token_id`, if the file has one. `size`: tokens of the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = model.values.get(key)
    if value is not None and (not isinstance(value, int) or not 0 <= value < size):
        model.fail(f"{key} is {value!r}; allowed: 0 to {size - 1}")
    return value


def sampling_of(model: Gguf) -> tuple[dict[str, Any], list[str]]:
    """Sampling defaults by the names of generation_config.json, and what longdraft does not have, in words."""
    sampling: dict[str, Any] = {}
    for name, ours in _SAMPLING.items():
        value = model.values.get(f"general.sampling.{name}")
        if value is not None and not isinstance(value, Array):
            sampling[ours] = shortest(value)
    ignored = [f"{name} {value!r} (not supported)" for name, off in _UNSUPPORTED_SAMPLING.items()
               if (value := model.values.get(f"general.sampling.{name}", off)) != off]
    return sampling, ignored
