"""From a Hugging Face `config.json` to a frozen `ModelConfig`, which has every value that the decoder needs.

This is the only module that reads names and defaults of `config.json` files.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from longdraft.errors import ModelError
from longdraft.model.experts_config import ExpertsConfig, parse_experts
from longdraft.model.families import FAMILIES, MISSING, Family, HeadNorms, text_config
from longdraft.model.four_bit import FourBitFormat
from longdraft.model.gguf import metadata
from longdraft.model.gguf.container import open_gguf
from longdraft.model.hybrid import HybridConfig, parse_hybrid

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]
SUPPORTED = tuple(FAMILIES)
ROPE_TYPES = get_args(RopeType)
_MAX_JSON = 1 << 25  # bytes; the shard index of the largest public models has a quarter of this
_REQUIRED_SETTINGS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
# Fields that are newer than the first journals, and their default.
_LATER: dict[str, object] = {"experts": None, "hybrid": None}
_HASHED_AS = {"post_norm": "norms_follow"}  # fields that were renamed since the first journals


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. `settings` has the numbers of the scaled types under their Hugging Face names."""

    kind: RopeType
    theta: float
    settings: Mapping[str, float | bool | None]
    dims: int  # number of rotated dimensions of a head, from the first one on
    short_factors: tuple[float, ...] = ()  # longrope: one per pair of dimensions
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the families. `families.Family` explains the flags."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    trained_positions: int  # max_position_embeddings
    max_positions: int  # context limit: the largest length for which the rope type is defined
    rope: RopeConfig
    is_tied: bool  # the output head is the embedding table
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: HeadNorms
    post_norm: bool
    is_fused: bool
    window: int  # positions that layers with a sliding window see; 0: no layer has one
    windowed: tuple[bool, ...]  # whether a layer has the window; empty: all from `window_from` on
    window_from: int
    rotated: tuple[bool, ...]  # whether a layer uses RoPE; empty: all except every `skip_rope_every`-th
    skip_rope_every: int  # 0: no layer is skipped
    embedding_factor: float
    residual_factor: float
    query_factor: float
    logits_divisor: float
    eos_token_ids: tuple[int, ...]
    dtype: str  # in which the checkpoint runs by default: "float32" or "bfloat16"
    experts: ExpertsConfig | None = None  # in place of every layer's MLP
    hybrid: HybridConfig | None = None  # layers with a state in place of attention; the others have gates

    def is_delta(self, layer: int) -> bool:
        """Whether a layer has a state in place of attention, and no rows in a KV cache."""
        return self.hybrid is not None and self.hybrid.is_delta[layer]

    @property
    def num_kv_layers(self) -> int:
        """Number of layers with attention."""
        return self.num_layers - (sum(self.hybrid.is_delta) if self.hybrid else 0)

    @property
    def rounds_once(self) -> bool:
        """Whether norms round only after their weight."""
        return self.post_norm or self.hybrid is not None

    def window_of(self, layer: int) -> int:
        """Number of positions that a layer's attention sees; 0: all."""
        is_windowed = self.windowed[layer] if self.windowed else layer >= self.window_from
        return self.window if is_windowed else 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer uses RoPE."""
        if self.rotated:
            return self.rotated[layer]
        return not self.skip_rope_every or (layer + 1) % self.skip_rope_every != 0

    def sha256(self) -> str:
        """The hash by which a journal recognises the configuration. Fields count under the name they had first, and
        fields that are newer than the first journals count only if they are used."""
        own = asdict(self)
        if self.experts and not self.experts.shared:
            del own["experts"]["shared"]
        fields = {_HASHED_AS.get(name, name): value for name, value in own.items()
                  if name not in _LATER or value != _LATER[name]}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a model folder, or of a GGUF file. Raises ModelError for an invalid file or an unsupported
    model."""
    if folder.is_file():
        model = open_gguf(folder)
        try:
            return replace(parse_config(metadata.config_of(model)), **metadata.biases_of(model))
        except ModelError as error:
            raise ModelError(str(error).replace("config.json", f"the metadata of {folder}")) from error
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(config, eos)


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
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}; it must hold an object")
    return data


def parse_config(config: Mapping[str, Any], generation_eos: Any = None) -> ModelConfig:
    """Translate the dictionary of a `config.json`. generation_eos: eos_token_id of generation_config.json."""
    config = text_config(config)
    family = _family(config)
    config = {**family.defaults, **config}
    try:
        return _translate(config, family, generation_eos if generation_eos is not None else config.get("eos_token_id"))
    except KeyError as error:
        raise ModelError(f"config.json has no {error.args[0]!r}; get the file again from the model's source") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"config.json has a value of the wrong type: {error}") from error


def _family(config: Mapping[str, Any]) -> Family:
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        missing = MISSING.get(kind) if isinstance(kind, str) else None
        raise ModelError(f"model_type is {kind!r}; supported: {', '.join(SUPPORTED)}"
                         + (f"; longdraft lacks what it needs: {missing}" if missing else ""))
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act is {config['hidden_act']!r}; supported: silu")
    if quantized := config.get("quantization_config"):
        FourBitFormat.parse(quantized if isinstance(quantized, dict) else {"quant_method": quantized})
    return family


def _translate(config: Mapping[str, Any], family: Family, eos: Any) -> ModelConfig:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden // max(heads, 1))
    kv_heads, num_layers = int(config.get("num_key_value_heads") or heads), int(config["num_hidden_layers"])
    vocabulary, inner = int(config["vocab_size"]), int(config["intermediate_size"])
    trained = int(config.get("max_position_embeddings", 2048))
    sizes = (vocabulary, hidden, inner, num_layers, heads, kv_heads, head_dim, trained)
    if min(sizes) < 1 or heads % kv_heads or head_dim % 2:
        raise ModelError("config.json: sizes must be positive, num_attention_heads must be a multiple of "
                         "num_key_value_heads, and head_dim must be even")
    rope = _rope(config, family, head_dim, trained)
    window, windowed, window_from = _windows(config, family, num_layers)
    skipped = config.get("no_rope_layers") if family.skips_rope else None
    multiplied = config if family.is_multiplied else {}
    attention_bias = bool(config.get("attention_bias", False))
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
        max_positions=_context_limit(rope, trained),
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
        rotated=() if skipped is None else _by_layer(skipped, "no_rope_layers", (0, 1), 1, num_layers),
        skip_rope_every=int(config.get("no_rope_layer_interval", 4)) if family.skips_rope else 0,
        embedding_factor=float(multiplied.get("embedding_multiplier", 1.0)),
        residual_factor=float(multiplied.get("residual_multiplier", 1.0)),
        # Replaces 1 / sqrt(D), which the attention kernels apply.
        query_factor=float(config.get("attention_multiplier", 1.0)) * math.sqrt(head_dim) if multiplied else 1.0,
        logits_divisor=_divisor(multiplied.get("logits_scaling", 1.0)),
        eos_token_ids=valid_token_ids(eos, vocabulary),
        dtype=_dtype(config),
        experts=parse_experts(config, family.experts),
        hybrid=parse_hybrid(config, family.hybrid, num_layers),
    )


def _divisor(value: Any) -> float:
    divisor = float(value)
    if not divisor > 0:
        raise ValueError(f"logits_scaling is {divisor}")
    return divisor


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, tuple[bool, ...], int]:
    """`window`, `windowed` and `window_from` of a ModelConfig."""
    is_used = family.windows == "all" or (family.windows == "some" and bool(config.get("use_sliding_window", False)))
    window = config.get("sliding_window")
    if not is_used or window is None:
        return 0, (), 0
    if int(window) < 1:
        raise ModelError(f"sliding_window is {window!r} in config.json; allowed: null, or 1 or more positions")
    if family.windows == "all":
        return int(window), (), 0
    types = config.get("layer_types")
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        return int(window), _by_layer(types, "layer_types", kinds, "sliding_attention", num_layers), 0
    if "max_window_layers" not in config:
        raise ModelError("use_sliding_window is true, but config.json has no 'layer_types' to say which layers use it")
    return int(window), (), int(config["max_window_layers"])


def _by_layer(values: Any, name: str, allowed: tuple[object, ...], yes: object, num_layers: int) -> tuple[bool, ...]:
    if not isinstance(values, list) or len(values) < num_layers or any(value not in allowed for value in values):
        raise ModelError(f"{name} in config.json must be a list of {num_layers} values, each one of {allowed}")
    return tuple(value == yes for value in values)


def _rope(config: Mapping[str, Any], family: Family, head_dim: int, trained: int) -> RopeConfig:
    """Read both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (earlier)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if config["model_type"] == "phi3" and kind in ("su", "yarn"):  # names of longrope in the first files
        kind = "longrope"
    if not _is_rope_type(kind):
        raise ModelError(f"rope type is {kind!r}; supported: {', '.join(ROPE_TYPES)}")
    for name in _REQUIRED_SETTINGS[kind]:
        if scaling.get(name) is None:
            raise ModelError(f"rope type {kind!r} needs {name!r}, which config.json does not have")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    dims = _rotated_dims(scaling.get("partial_rotary_factor", config.get("partial_rotary_factor")), family, head_dim)
    settings = {name: value for name, value in scaling.items() if isinstance(value, int | float | None)}
    if (outside := config.get("original_max_position_embeddings")) is not None:  # as in `transformers`
        settings["original_max_position_embeddings"] = int(outside)
    if kind != "longrope":
        return RopeConfig(kind, theta, settings, dims)
    if settings.get("factor") is None:
        settings["factor"] = trained / float(settings.get("original_max_position_embeddings") or trained)
    short, long = (_factors(scaling[name], name, dims // 2) for name in _REQUIRED_SETTINGS[kind])
    return RopeConfig(kind, theta, settings, dims, short, long)


def _rotated_dims(part: Any, family: Family, head_dim: int) -> int:
    dims = head_dim if part is None else int(head_dim * float(part))
    if (dims != head_dim and not family.rotates_part) or dims % 2 or not 2 <= dims <= head_dim:
        raise ModelError(f"partial_rotary_factor is {part!r}; supported: 1, and for phi3 and hybrids every value "
                         "that rotates an even number of dimensions")
    return dims


def _factors(values: Any, name: str, count: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        raise ModelError(f"{name} of rope type 'longrope' must be a list of {count} numbers in config.json")
    return tuple(float(value) for value in values)


def _context_limit(rope: RopeConfig, trained: int) -> int:
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


def valid_token_ids(value: Any, vocabulary: int) -> tuple[int, ...]:
    """The ids of one id, a list or None. Ids outside the vocabulary are dropped: some files use -1 for "none"."""
    several = () if value is None else value if isinstance(value, list) else (value,)
    return tuple(i for i in map(int, several) if 0 <= i < vocabulary)


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float32" if name == "float32" else "bfloat16"
