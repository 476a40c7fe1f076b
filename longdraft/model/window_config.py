"""From the values of a `config.json` to the sliding windows of a model's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longdraft.errors import ModelError
from longdraft.model.families import Family


def parse_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, tuple[bool, ...], int]:
    """`window`, `windowed` and `window_from` of a ModelConfig."""
    is_switched_on = bool(config.get("use_sliding_window", False))
    window, types = config.get("sliding_window"), config.get("layer_types")
    is_listed = family.windows == "listed" and (family.window_period > 0 or is_switched_on or (
        isinstance(types, list) and "sliding_attention" in types))
    is_used = family.windows == "all" or is_listed or (family.windows in ("some", "used") and is_switched_on)
    if not is_used or window is None:
        return 0, (), 0
    if int(window) < 1:
        raise ModelError(f"sliding_window is {window!r} in config.json; allowed: null, or 1 or more positions")
    if family.windows in ("all", "used"):
        return int(window), (), 0
    if types is None and family.window_period:
        period = int(config.get("sliding_window_pattern") or family.window_period)
        return int(window), tuple((layer + 1) % period != 0 for layer in range(num_layers)), 0
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        return int(window), by_layer(types, "layer_types", kinds, "sliding_attention", num_layers), 0
    if family.windows == "listed" or "max_window_layers" not in config:
        raise ModelError("use_sliding_window is true, but config.json has no 'layer_types' to say which layers use it")
    return int(window), (), int(config["max_window_layers"])


def by_layer(values: Any, name: str, allowed: tuple[object, ...], yes: object, num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether its value in a list is `yes`. ModelError for a list that is too short or has others."""
    if not isinstance(values, list) or len(values) < num_layers or any(value not in allowed for value in values):
        raise ModelError(f"{name} in config.json must be a list of {num_layers} values, each one of {allowed}")
    return tuple(value == yes for value in values)
