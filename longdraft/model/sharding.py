"""What a rank has of a model: whole heads, a share of the inner width, all layers."""

from __future__ import annotations

from dataclasses import replace

from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.parallel import Shard


def shard_config(config: ModelConfig, part: Shard, quantize: str = "none") -> ModelConfig:
    """The configuration of a rank's part. ModelError names what cannot be divided."""
    size = part.size
    if size == 1:
        return config
    for name, count in (("num_key_value_heads", config.num_kv_heads), ("num_attention_heads", config.num_heads),
                        ("intermediate_size", config.intermediate_size)):
        if count % size:
            fitting = [n for n in range(2, count + 1) if count % n == 0 and config.num_kv_heads % n == 0
                       and config.intermediate_size % n == 0]
            raise ModelError(f"tensor_parallel is {size}, but the model's {name} is {count}, which {size} ranks cannot "
                             f"share evenly; allowed: {', '.join(map(str, [1, *fitting]))}")
    if config.head_norms == "all":
        raise ModelError("tensor_parallel: the model normalises queries and keys over all heads at once (OLMo 2), "
                         "which ranks with some of the heads cannot; leave it out")
    if config.vocab_size <= size * (size - 1):
        raise ModelError(f"tensor_parallel is {size}, too many ranks for a vocabulary of {config.vocab_size}")
    if quantize != "none":
        raise ModelError(f"tensor_parallel: weights quantised to {quantize} cannot be divided, because a row's scale "
                         "goes by all its columns; leave --quantize out")
    return replace(config, num_heads=config.num_heads // size, num_kv_heads=config.num_kv_heads // size,
                   intermediate_size=config.intermediate_size // size)
