"""From a Hugging Face `config.json`, or the metadata of a GGUF file, to a frozen `ModelConfig`.

This is the only module that reads names and defaults of `config.json` files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longdraft.checkpoint import gpt_oss
from longdraft.checkpoint.gguf import metadata
from longdraft.checkpoint.gguf.container import open_gguf
from longdraft.checkpoint.memory import require_content
from longdraft.checkpoint.packed_format import PackedFormat
from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.model.experts_config import parse_experts
from longdraft.model.families import ACTIVATIONS, FAMILIES, MISSING, Family, text_config
from longdraft.model.gemma4 import parse_gemma4
from longdraft.model.hybrid import parse_hybrid
from longdraft.model.rope_config import context_limit, parse_query_growth, parse_ropes
from longdraft.model.window_config import by_layer, parse_windows

SUPPORTED = tuple(FAMILIES)
_SIZE, _POSITIONS, _FACTOR = (1, 1 << 24), (0, (1 << 31) - 1), (-1e15, 1e15)
# The numbers of a config.json, with the least and the most that a model may have: far beyond every public one, and so
# small that nothing that is built from them takes long. Whole numbers have whole limits. The parsers check the rest.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "num_global_key_value_heads",
                     "global_head_dim", "hidden_size_per_layer_input", "shared_expert_intermediate_size",
                     "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                     "linear_conv_kernel_dim", "num_local_experts", "num_experts", "num_experts_per_tok",
                     "top_k_experts", "decoder_sparse_step"), (0, 1 << 20)),
    **dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers", "no_rope_layer_interval", "sliding_window_pattern",
                     "full_attention_interval"), (0, 1 << 14)),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), (0, 1 << 26)),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings", "sliding_window",
                     "max_window_layers"), _POSITIONS),
    "rms_norm_eps": (0.0, 1.0), "rope_theta": (1e-6, 1e15), "rope_local_base_freq": (1e-6, 1e15),
    **dict.fromkeys(("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "attention_multiplier",
                     "logits_scaling", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar",
                     "swiglu_alpha", "swiglu_limit", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                     "attention_factor", "low_freq_factor", "high_freq_factor", "llama_4_scaling_beta"), _FACTOR),
}
_NESTED = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention", "per_layer_config")
_MAX_JSON = 1 << 25  # bytes; the shard index of the largest public models has a quarter of this


def read_config(folder: Path, tokenizer_end: int | None = None) -> ModelConfig:
    """The configuration of a model folder, or of a GGUF file. Raises ModelError for an invalid file or an unsupported
    model.

    tokenizer_end  the token with which the tokenizer ends a text. It ends texts of the model too, unless
                   generation_config.json says which tokens do
    """
    if folder.is_file():
        model = open_gguf(folder)
        try:
            return replace(parse_config(metadata.config_of(model), tokenizer_end=tokenizer_end),
                           **metadata.stored_fields(model))
        except ModelError as error:
            raise ModelError(str(error).replace("config.json", f"the metadata of {folder}")) from error
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(config, eos, tokenizer_end)


def require_family(folder: Path) -> None:
    """Raise ModelError for a folder of a model that is not supported, whatever else is missing in it."""
    if folder.is_dir():
        _family(text_config(read_json(folder / "config.json")))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError for anything else.

    Pipes and devices are not opened, because reading one may block or never end.
    """
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is not a file")
        if (size := path.stat().st_size) > _MAX_JSON:
            raise ModelError(f"{path} has {size:,} bytes; allowed: at most {_MAX_JSON:,}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        require_content(path)
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}; it must hold an object")
    return data


def parse_config(config: Mapping[str, Any], generation_eos: Any = None,
                 tokenizer_end: int | None = None) -> ModelConfig:
    """Translate the dictionary of a `config.json`.

    generation_eos  eos_token_id of generation_config.json
    tokenizer_end   as for `read_config`
    """
    config = text_config(config)
    family = _family(config)
    # Of two names of the number of experts this one counts, as in `transformers`.
    experts = {"num_local_experts": config["num_experts"]} if config.get("num_experts") is not None else {}
    given = {name: value for name, value in config.items() if name != "rope_parameters" or value is not None}
    config = {**family.defaults, **given, **experts}
    _check_numbers(config)
    try:
        ends = _several(config.get("eos_token_id")) if generation_eos is None else _several(generation_eos)
        if generation_eos is None and tokenizer_end is not None and tokenizer_end not in ends:
            ends = [*ends, tokenizer_end]
        return _translate(config, family, ends)
    except KeyError as error:
        raise ModelError(f"config.json has no {error.args[0]!r}; get the file again from the model's source") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json has a value of the wrong type: {error}") from error


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a number that is outside its range, or no number. Nothing has been built from it yet."""
    for name, value in config.items():
        limits = _RANGES.get(name)
        if isinstance(value, Mapping) and (name in _NESTED or name.isdigit()):
            _check_numbers(value)
        elif limits and value is not None:
            least, most = limits
            is_whole = isinstance(least, int)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not least <= value <= most or (is_whole and value != int(value)):
                raise ModelError(f"config.json: {name} is {value!r:.80}; allowed: "
                                 f"{'a whole number, ' if is_whole else ''}{least:,} to {most:,}")


def _family(config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        missing = MISSING.get(kind) if isinstance(kind, str) else None
        raise ModelError(f"model_type is {kind!r}; supported: {', '.join(SUPPORTED)}"
                         + (f"; longdraft lacks what it needs: {missing}" if missing else ""))
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    allowed = ACTIVATIONS[family.activation]
    if config.get(key, allowed[0]) not in allowed:
        raise ModelError(f"{key} is {config[key]!r}; supported: {' or '.join(allowed)}")
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ModelError("use_bidirectional_attention is set: this is an embedding model, which writes no text")
    quantized = config.get("quantization_config")
    is_oss = kind == "gpt_oss" and isinstance(quantized, dict) and quantized.get("quant_method") == gpt_oss.METHOD
    if quantized and not is_oss:
        PackedFormat.parse(quantized if isinstance(quantized, dict) else {"quant_method": quantized})
    return family


def _translate(config: Mapping[str, Any], family: Family, eos: Any) -> ModelConfig:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // max(heads, 1))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    num_layers = int(config["num_hidden_layers"])
    vocabulary = int(config["vocab_size"])
    inner = int(config["intermediate_size"])
    trained = int(config.get("max_position_embeddings", 2048))
    sizes = (vocabulary, hidden, inner, num_layers, heads, kv_heads, head_dim, trained)
    if min(sizes) < 1 or heads % kv_heads or head_dim % 2:
        raise ModelError("config.json: sizes must be positive, num_attention_heads must be a multiple of "
                         "num_key_value_heads, and head_dim must be even")
    window, windowed, window_from = parse_windows(config, family, num_layers)
    skipped = config.get("no_rope_layers") if family.skips_rope else None
    rotated = () if skipped is None else by_layer(skipped, "no_rope_layers", (0, 1), 1, num_layers)
    if family.rotates_windows:
        rotated = windowed
    multiplied = config if family.is_multiplied else {}
    attention_bias = bool(config.get("attention_bias", False))
    if family.is_gemma4:
        windowed = (*windowed[:-1], False)  # whatever the file says, as in `transformers`
    gemma4 = parse_gemma4(config, windowed) if family.is_gemma4 else None
    rope, window_rope = parse_ropes(config, family, (gemma4.head_dim if gemma4 else head_dim, head_dim), trained)
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        trained_positions=trained,
        # Of Gemma 3, the trained length is the one after the scaling.
        max_positions=trained if window_rope else context_limit(rope, trained),
        rope=rope,
        is_tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        head_norms=family.head_norms,
        post_norm=family.post_norm,
        is_fused=family.is_fused,
        window=window,
        windowed=windowed,
        window_from=window_from,
        rotated=rotated,
        skip_rope_every=int(config.get("no_rope_layer_interval", 4)) if family.skips_rope else 0,
        embedding_factor=math.sqrt(hidden) if family.scales_embedding else float(
            multiplied.get("embedding_multiplier", 1.0)),
        residual_factor=float(multiplied.get("residual_multiplier", 1.0)),
        query_factor=_query_factor(config, family, head_dim),
        logits_divisor=_divisor(multiplied.get("logits_scaling", 1.0)),
        eos_token_ids=valid_token_ids(eos, vocabulary),
        dtype=_dtype(config),
        experts=parse_experts(config, family.experts),
        hybrid=parse_hybrid(config, family.hybrid, num_layers),
        norm_names=family.norm_names,
        float_norms=family.float_norms or family.norm_offset != 0,
        norm_offset=family.norm_offset,
        has_gelu=family.activation == "gelu_tanh",
        rounds_embedding_factor=family.scales_embedding,
        score_cap=_cap(config, family.caps[0]),
        logits_cap=_cap(config, family.caps[1]),
        window_rope=window_rope,
        has_fused_mlp=family.has_fused_mlp,
        is_interleaved=family.is_interleaved,
        has_sinks=family.has_sinks,
        query_growth=parse_query_growth(config, family, trained),
        gemma4=gemma4,
        rounds_twice=family.rounds_twice,
    )


def _query_factor(config: Mapping[str, Any], family: Family, head_dim: int) -> float:
    """The factor of queries besides 1 / sqrt(D), which the attention kernels apply."""
    if family.is_multiplied:
        return float(config.get("attention_multiplier", 1.0)) * math.sqrt(head_dim)
    if family.is_gemma4:  # scores are not divided
        return math.sqrt(head_dim)
    return math.sqrt(head_dim / float(config[family.query_scalar])) if family.query_scalar else 1.0


def _cap(config: Mapping[str, Any], name: str) -> float:
    """A soft cap of config.json; 0: there is none."""
    cap = float(config.get(name) or 0.0) if name else 0.0
    if not 0 <= cap < math.inf:
        raise ModelError(f"{name} is {cap} in config.json; allowed: null, or a positive number")
    return cap


def _divisor(value: Any) -> float:
    divisor = float(value)
    if not divisor > 0:
        raise ValueError(f"logits_scaling is {divisor}")
    return divisor


def valid_token_ids(value: Any, vocabulary: int) -> tuple[int, ...]:
    """The ids of one id, a list or None. Ids outside the vocabulary are dropped: some files use -1 for "none"."""
    return tuple(i for i in map(int, _several(value)) if 0 <= i < vocabulary)


def _several(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float32" if name == "float32" else "bfloat16"
