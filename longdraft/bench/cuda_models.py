"""Models of known shapes with random weights on a device, and caches of random rows: time does not depend on values."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longdraft.cache.full import FullCache
from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.model import config as model_config
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import ModelWeights, Transformer

_SPREAD = 0.02  # standard deviation of weights, as models are initialised
_AT_ONCE = 4096  # rows of a cache that are made at a time


def config_of(shape: dict[str, Any]) -> ModelConfig:
    return model_config.parse_config(shape)


def random_model(shape: dict[str, Any], kernels: Kernels, seed: int = 0) -> Transformer:
    """A Llama of this shape."""
    config = config_of(shape)
    generator = torch.Generator(kernels.device).manual_seed(seed)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

    def weight(rows: int, columns: int) -> Linear:
        values = torch.empty(rows, columns, dtype=kernels.dtype, device=kernels.device)
        return kernels.pack(values.normal_(0, _SPREAD, generator=generator))

    def norm() -> Tensor:
        return torch.ones(hidden, dtype=kernels.dtype, device=kernels.device)

    def layer() -> LayerWeights:
        return LayerWeights(norm(), weight((config.num_heads + 2 * config.num_kv_heads) * dim, hidden),
                            weight(hidden, config.num_heads * dim), norm(), weight(2 * inner, hidden),
                            weight(hidden, inner))

    embedding = weight(config.vocab_size, hidden)
    head = embedding if config.is_tied else weight(config.vocab_size, hidden)
    layers = tuple(layer() for _ in range(config.num_layers))
    return Transformer(config, ModelWeights(embedding, layers, norm(), head), kernels)


def random_cache(model: Transformer, context: int, room: int = 1024) -> FullCache:
    """A cache of `context` random rows, with room for more."""
    config, kernels = model.config, model.kernels
    cache = model.new_cache()
    cache.reserve(context + room)
    generator = torch.Generator(kernels.device).manual_seed(1)
    for store in cache.stores:
        for start in range(0, context, _AT_ONCE):
            shape = (min(_AT_ONCE, context - start), config.num_kv_heads, config.head_dim)
            rows = [torch.empty(shape, dtype=kernels.dtype, device=kernels.device).normal_(generator=generator)
                    for _ in range(2)]
            store.write(start, *rows)
    cache.length = context
    return cache


def device_ms(device: torch.device, work: Callable[[], object], repeats: int, warm: int = 2) -> float:
    """Median milliseconds on the device of one call, by its own clock; on the CPU by the wall's."""
    for _ in range(warm):
        work()
    samples: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            samples.append((time.perf_counter() - began) * 1e3)
    return statistics.median(samples)


def queued_ms(device: torch.device, work: Callable[[], object], calls: int) -> float:
    """Milliseconds of one of `calls` calls that lie waiting for the device, without the host if it is faster."""
    work()
    return device_ms(device, lambda: [work() for _ in range(calls)], 3, 1) / calls


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
