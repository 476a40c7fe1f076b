"""A Hugging Face `config.json` becomes our own frozen description, once, at the door.

After this nobody asks a config for an attribute that may or may not be there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from longdraft.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]
SUPPORTED = ("llama",)
_MAX_JSON = 1 << 25  # bytes; the shard index of the largest public models has a quarter of that
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `settings` holds the numbers of the scaled types under their HF names."""

    kind: RopeType
    theta: float
    settings: Mapping[str, float | bool | None]


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: RopeConfig
    is_tied: bool  # the output head is the embedding table
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint: "float32" or "bfloat16"


def read(folder: Path) -> ModelConfig:
    """The configuration of a model folder. Raises ModelError with what is wrong and what is supported."""
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return from_hf(config, eos)


def read_json(path: Path) -> dict[str, Any]:
    """The object of a file. What is no plain file of a sensible size is not opened: it may block, or never end."""
    try:
        if path.exists() and not path.is_file():
            raise ModelError(f"{path} is not a file")
        if (size := path.stat().st_size) > _MAX_JSON:
            raise ModelError(f"{path} has {size} bytes; allowed: {_MAX_JSON}")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def from_hf(config: Mapping[str, Any], generation_eos: Any = None) -> ModelConfig:
    """Translate the dictionary of a `config.json`; `generation_eos` is generation_config's eos_token_id."""
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise ModelError(f"model_type is {kind!r}; supported: {', '.join(SUPPORTED)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act is {config['hidden_act']!r}; supported: silu")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        parsed = ModelConfig(
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // max(heads, 1)),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            rope=_rope(config),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            eos_token_ids=_ids(generation_eos if generation_eos is not None else config.get("eos_token_id"),
                               int(config["vocab_size"])),
            dtype=_dtype(config),
        )
    except KeyError as error:
        raise ModelError(f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"config.json holds a value of the wrong kind: {error}") from error
    sizes = (parsed.vocab_size, hidden, parsed.intermediate_size, parsed.num_layers, heads,
             parsed.num_kv_heads, parsed.head_dim, parsed.max_positions)
    if min(sizes) < 1 or heads % parsed.num_kv_heads or parsed.head_dim % 2:
        raise ModelError("config.json: sizes must be positive, num_attention_heads a multiple of "
                         "num_key_value_heads, head_dim even")
    return parsed


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not _is_rope_type(kind):
        raise ModelError(f"rope type is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    names = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
    }[kind]
    for name in names:
        if scaling.get(name) is None:
            raise ModelError(f"rope type {kind!r} needs {name!r} in config.json")
    settings = {name: value for name, value in scaling.items() if isinstance(value, int | float | None)}
    settings.setdefault("original_max_position_embeddings",
                        config.get("original_max_position_embeddings", config.get("max_position_embeddings")))
    return RopeConfig(kind, theta, settings)


def _is_rope_type(kind: object) -> TypeGuard[RopeType]:
    return kind in ROPE_TYPES


def _ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """One id, several or none. What is outside the vocabulary (-1 says "none" in some files) can never be written."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(i for i in map(int, ids) if 0 <= i < vocab_size)


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float32" if name == "float32" else "bfloat16"
