"""A rank's share of a model for tensor parallelism, in all layers: whole heads (of delta layers key heads with their
value heads), and a slice of the width of the MLP or of every expert."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.parallel import Shard


def shard_config(config: ModelConfig, shard: Shard, quantize: str) -> ModelConfig:
    """The configuration of a rank's share. Raises ModelError for a model that cannot be divided like this."""
    size = shard.size
    if size == 1:
        return config
    counts = _divided(config)
    for name, count in counts.items():
        if count % size:
            common = math.gcd(*counts.values())
            allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise ModelError(f"tensor_parallel is {size}, but the model's {name} is {count}, which is not a multiple "
                             f"of it; allowed: {allowed}")
    if config.has_two_head_sizes:
        raise ModelError(f"tensor_parallel is {size}, but heads of two sizes are not divided among ranks; allowed: "
                         "1")
    if config.head_norms == "all":
        raise ModelError(f"tensor_parallel is {size}, but the model normalises queries and keys over all heads at once "
                         "(OLMo 2), which needs all heads on one rank; allowed: 1")
    if config.vocab_size <= size * (size - 1):
        raise ModelError(f"tensor_parallel is {size}, which is too many ranks for a vocabulary of {config.vocab_size}; "
                         "use fewer")
    if quantize != "none":
        raise ModelError(f"tensor_parallel is {size}, but weights quantised to {quantize} cannot be divided, because a "
                         "row's scale depends on all its columns; leave --quantize out")
    own: dict[str, Any] = {"hybrid": config.hybrid.share(size)} if config.hybrid else {}
    if config.experts:
        own["experts"] = replace(config.experts, size=config.experts.size // size, shared=config.experts.shared // size)
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=config.num_kv_heads // size,
                   intermediate_size=config.intermediate_size // size, **own)


def _divided(config: ModelConfig) -> dict[str, int]:
    """The parts that are divided among ranks, by the names of config.json. A model with experts has no other MLP."""
    counts = {"num_key_value_heads": config.num_kv_heads, "num_attention_heads": config.num_heads}
    if config.hybrid:
        counts["linear_num_key_heads"] = config.hybrid.key_heads
    if config.experts is None:
        return counts | {"intermediate_size": config.intermediate_size}
    shared = {"shared_expert_intermediate_size": config.experts.shared} if config.experts.shared else {}
    return counts | {"moe_intermediate_size": config.experts.size} | shared
