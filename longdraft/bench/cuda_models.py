"""Models of known shapes with random weights, and timing by a device's own clock.

The time of a step does not depend on the values of the weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longdraft.kernels import Kernels, LayerWeights, Linear
from longdraft.model import config as model_config
from longdraft.model.transformer import ModelWeights, Transformer

_WEIGHT_DEVIATION = 0.02  # standard deviation of the weights, as in initialised models


def random_model(shape: dict[str, Any], kernels: Kernels, seed: int = 0) -> Transformer:
    """A Llama with the sizes of a config.json."""
    config = model_config.parse_config(shape)
    generator = torch.Generator(kernels.device).manual_seed(seed)
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim

    def weight(rows: int, columns: int) -> Linear:
        values = torch.empty(rows, columns, dtype=kernels.dtype, device=kernels.device)
        return kernels.pack(values.normal_(0, _WEIGHT_DEVIATION, generator=generator))

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


def device_ms(device: torch.device, work: Callable[[], object], repeats: int, warm: int = 2) -> float:
    """Median milliseconds of a call, by the clock of the CUDA device, or by wall clock on the CPU."""
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
    """Milliseconds of one of `calls` calls that are queued together, so that a faster host adds no time."""
    work()
    return device_ms(device, lambda: [work() for _ in range(calls)], 3, 1) / calls


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
