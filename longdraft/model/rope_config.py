"""From the values of a `config.json` to a `RopeConfig`: the rotary position embedding of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

from longdraft.errors import ModelError
from longdraft.model.families import Family

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
ROPE_TYPES = get_args(RopeType)
_REQUIRED_SETTINGS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_WINDOW_KINDS = ("full_attention", "sliding_attention")  # keys of rotations that layers have of their own


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `settings` has the numbers of the scaled types under their Hugging Face names."""

    kind: RopeType
    theta: float
    settings: Mapping[str, float | bool | None]
    dims: int  # number of rotated dimensions of a head, from the first one on
    short_factors: tuple[float, ...] = ()  # longrope: one per pair of dimensions
    long_factors: tuple[float, ...] = ()


def parse_ropes(config: Mapping[str, Any], family: Family, head_dims: tuple[int, int],
                trained: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotation of a model, and that of its layers with a window if it differs.

    Reads both spellings: `rope_parameters` (transformers 5, for each kind of layer where they differ), and `rope_theta`
    with `rope_scaling` (earlier; layers with a window have `rope_local_base_freq`, if there is one, and no scaling).

    head_dims  of layers without a window, and with one
    """
    scaling = _given(config)
    if not family.has_window_rope:
        return _rope(config, scaling, family, head_dims[0], trained), None
    local = {"rope_theta": config.get("rope_local_base_freq") or config.get("rope_theta")}
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and any(isinstance(nested.get(kind), Mapping) for kind in _WINDOW_KINDS):
        whole, windowed = (nested.get(kind) for kind in _WINDOW_KINDS)
        parts = [{**(whole or {}), **(config.get("rope_scaling") or {})}, windowed or local]
    else:
        parts = [scaling, local]
    first, second = (_rope(config, dict(part or {}), family, head_dim, trained)
                     for part, head_dim in zip(parts, head_dims, strict=True))
    if second.kind not in ("default", "linear"):
        raise ModelError(f"rope type of layers with a window is {second.kind!r}; supported: default, linear")
    return first, second


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotations, in either spelling. Where a file has both, the earlier one counts, as in
    `transformers`."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"rope_scaling is {str(given)[:80]!r} in config.json; allowed: null or an object")
    return dict(given)


def parse_query_growth(config: Mapping[str, Any], family: Family, trained: int) -> tuple[float, int] | None:
    """`ModelConfig.query_growth`."""
    rope = _given(config)
    beta = float(rope.get("llama_4_scaling_beta") or 0.0)
    if not family.has_query_growth or not beta:
        return None
    length = int(rope.get("original_max_position_embeddings") or trained)
    if not 0 < beta < 100 or length < 1:
        raise ModelError(f"llama_4_scaling_beta is {beta} and original_max_position_embeddings {length} in "
                         "config.json; allowed: 0 to 100, and 1 or more positions")
    return beta, length


def _rope(config: Mapping[str, Any], scaling: dict[str, Any], family: Family, head_dim: int,
          trained: int) -> RopeConfig:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):  # names of longrope in the first files
        kind = "longrope"
    if not _is_rope_type(kind) or (kind == "proportional" and not family.is_gemma4):
        raise ModelError(f"rope type is {kind!r}; supported: {', '.join(ROPE_TYPES)} (Gemma 4 only)")
    for name in _REQUIRED_SETTINGS[kind]:
        if scaling.get(name) is None:
            raise ModelError(f"rope type {kind!r} needs {name!r}, which config.json does not have")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    part = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if kind == "proportional":
        settings = {"partial_rotary_factor": _part(part), "factor": scaling.get("factor")}
        return RopeConfig(kind, theta, settings, head_dim)
    dims = _rotated_dims(part, family, head_dim)
    settings = {name: value for name, value in scaling.items() if isinstance(value, int | float | None)}
    if (outside := config.get("original_max_position_embeddings")) is not None:  # as in `transformers`
        settings["original_max_position_embeddings"] = int(outside)
    if kind != "longrope":
        return RopeConfig(kind, theta, settings, dims)
    if settings.get("factor") is None:
        settings["factor"] = trained / float(settings.get("original_max_position_embeddings") or trained)
    short, long = (_factors(scaling[name], name, dims // 2) for name in _REQUIRED_SETTINGS[kind])
    return RopeConfig(kind, theta, settings, dims, short, long)


def _part(value: Any) -> float:
    part = 1.0 if value is None else float(value)
    if not 0 < part <= 1:
        raise ModelError(f"partial_rotary_factor is {value!r} in config.json; allowed: above 0, up to 1")
    return part


def _rotated_dims(part: Any, family: Family, head_dim: int) -> int:
    dims = head_dim if part is None else int(head_dim * float(part))
    if (dims != head_dim and not family.rotates_part) or dims % 2 or not 2 <= dims <= head_dim:
        raise ModelError(f"partial_rotary_factor is {part!r}; supported: 1, and for phi3, glm4 and hybrids every value "
                         "that rotates an even number of dimensions")
    return dims


def _factors(values: Any, name: str, count: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"{name} of rope type 'longrope' must be a list of {count} numbers in config.json")
    return tuple(float(value) for value in values)


def context_limit(rope: RopeConfig, trained: int) -> int:
    """Largest length for which the rope type is defined.

    `factor` counts from original_max_position_embeddings, or from max_position_embeddings if the former is missing, as
    in models that were extended by an edit of their config.json.
    """
    factor = float(rope.settings.get("factor") or 1)
    if rope.kind in ("linear", "dynamic"):
        return max(trained, int(trained * factor))
    if rope.kind == "yarn":
        return max(trained, int(float(rope.settings.get("original_max_position_embeddings") or 0) * factor))
    return trained


def _is_rope_type(kind: object) -> TypeGuard[RopeType]:
    return kind in ROPE_TYPES
