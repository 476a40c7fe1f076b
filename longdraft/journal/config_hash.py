"""The hash by which a journal recognises the configuration of its model.

Journals keep it, so it never changes for a model that it was once computed for: fields count under the names that
they had in the first journals, and a field that is newer counts only where it differs from the value that models had
before it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from longdraft.model.config import ModelConfig

FIRST = (  # fields that the first journals had
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "rms_norm_eps", "trained_positions", "max_positions", "rope", "is_tied", "qkv_bias", "out_bias", "mlp_bias",
    "head_norms", "post_norm", "is_fused", "window", "windowed", "window_from", "rotated", "skip_rope_every",
    "embedding_factor", "residual_factor", "query_factor", "logits_divisor", "eos_token_ids", "dtype")
LATER: dict[str, object] = {  # newer fields, and the value that counts as none
    "experts": None, "hybrid": None, "norm_names": (), "float_norms": False, "norm_offset": 0.0, "has_gelu": False,
    "rounds_embedding_factor": False, "score_cap": 0.0, "logits_cap": 0.0, "window_rope": None,
    "has_fused_mlp": False, "is_interleaved": False, "query_growth": None,
    "has_sinks": False, "gemma4": None, "rounds_twice": False}
_HYBRID = {"float_norms": True, "norm_offset": 1.0}  # what hybrids had before these fields existed
_LATER_OF_PARTS: dict[str, dict[str, object]] = {
    "experts": {"shared": 0, "router": "gate", "has_bias": False, "clamp": None, "is_beside": False},
    "hybrid": {"is_converted": False}}
_FIRST_NAMES = {"post_norm": "norms_follow"}  # of fields that were renamed


def config_sha256(config: ModelConfig) -> str:
    """The hash of a configuration."""
    values: dict[str, Any] = asdict(config)
    for part, later in _LATER_OF_PARTS.items():
        if values[part]:
            values[part] = {name: value for name, value in values[part].items()
                            if name not in later or value != later[name]}
    unused = LATER | (_HYBRID if config.hybrid else {})
    hashed = {_FIRST_NAMES.get(name, name): values[name] for name in FIRST}
    hashed |= {name: values[name] for name in LATER if values[name] != unused[name]}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
