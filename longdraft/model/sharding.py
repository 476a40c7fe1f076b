"""A rank's share of a model for tensor parallelism: whole heads and a slice of the MLP, in all layers."""

from __future__ import annotations

from dataclasses import replace

from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.parallel import Shard


def shard_config(config: ModelConfig, shard: Shard, quantize: str = "none") -> ModelConfig:
    """The configuration of a rank's share. Raises ModelError for a model that cannot be divided like this."""
    size = shard.size
    if size == 1:
        return config
    for name, count in (("num_key_value_heads", config.num_kv_heads), ("num_attention_heads", config.num_heads),
                        ("intermediate_size", config.intermediate_size)):
        if count % size:
            divisors = [n for n in range(2, count + 1) if count % n == 0 and config.num_kv_heads % n == 0
                       and config.intermediate_size % n == 0]
            raise ModelError(f"tensor_parallel is {size}, but the model's {name} is {count}, which is not a multiple "
                             f"of it; allowed: {', '.join(map(str, [1, *divisors]))}")
    if config.hybrid:
        raise ModelError(f"tensor_parallel is {size}, but the states of delta layers are not divided among ranks; "
                         "allowed: 1")
    if config.gemma4:
        raise ModelError(f"tensor_parallel is {size}, but heads of two sizes are not divided among ranks; allowed: "
                         "1")
    if config.experts:
        raise ModelError(f"tensor_parallel is {size}, but experts are not divided among ranks; allowed: 1")
    if config.head_norms == "all":
        raise ModelError(f"tensor_parallel is {size}, but the model normalises queries and keys over all heads at once "
                         "(OLMo 2), which needs all heads on one rank; allowed: 1")
    if config.vocab_size <= size * (size - 1):
        raise ModelError(f"tensor_parallel is {size}, which is too many ranks for a vocabulary of {config.vocab_size}; "
                         "use fewer")
    if quantize != "none":
        raise ModelError(f"tensor_parallel is {size}, but weights quantised to {quantize} cannot be divided, because a "
                         "row's scale depends on all its columns; leave --quantize out")
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=config.num_kv_heads // size,
                   intermediate_size=config.intermediate_size // size)
