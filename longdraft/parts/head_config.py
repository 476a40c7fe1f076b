"""What the config.json of an EAGLE head and of a block head have in common: layers, whole numbers, flags, a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longdraft.checkpoint.config_file import parse_config
from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig

OWN_KEY = "longdraft"  # entry of config.json that longdraft's own trainings add
_NOT_OF_A_LAYER = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "quantization_config")


def with_entries_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entries of a configuration, and over them those of its object `name`, if it has one."""
    own = config.get(name)
    return {**config, **(own if isinstance(own, dict) else {})}


def layer_entries(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries about the layers, which speculators writes into an object of their own."""
    entries = config.get("transformer_layer_config") if "speculators_model_type" in config else config
    if not isinstance(entries, Mapping):
        raise ModelError(f"{folder}: config.json has no transformer_layer_config; get the file again")
    return entries


def layer_config(entries: Mapping[str, Any], names: Mapping[str, str]) -> ModelConfig:
    """Sizes and RoPE of the layers, which are Llama's with or without norms of heads. names: of the tensors, by ours"""
    has_norms = "layers.0.self_attn.q_norm.weight" in names
    plain = {name: value for name, value in entries.items() if name not in _NOT_OF_A_LAYER}
    return parse_config(plain | {"model_type": "qwen3" if has_norms else "llama"})


def positive_number(folder: Path, config: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of 1 or more. Raises ModelError for anything else."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ModelError(f"{folder}: {name} is {value!r} in config.json; allowed: 1 or more")
    return value


def mask_token(folder: Path, config: Mapping[str, Any], vocabulary: int,
               names: Sequence[str] = ("mask_token_id",)) -> int:
    """The id under the first of these names that the configuration has. Raises ModelError for one that is no token."""
    name = next((name for name in names if config.get(name) is not None), names[0])
    token = config.get(name)
    if type(token) is not int or not 0 <= token < vocabulary:
        raise ModelError(f"{folder}: {name} is {token!r} in config.json; allowed: 0 to {vocabulary - 1}, the id of the "
                         "token for places to guess")
    return token


def flag(config: Mapping[str, Any], name: str, default: bool | None) -> bool | None:
    """true, false, or null. Raises ModelError for anything else."""
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{name} is {value!r} in config.json; allowed: true or false")
    return value
