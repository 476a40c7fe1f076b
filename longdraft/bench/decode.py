"""Steps of plain decoding at a length of context, and the floor under them.

A context is reached by random keys and values in the cache's stores, not by a prefill: the time of a step
does not depend on what they hold.

    floor = (bytes of the weights + bytes of the cache) / read bandwidth
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle
from typing import Any, NamedTuple

import torch

from longdraft.bench.kernels import fill
from longdraft.bench.measure import Limits, Timing, Work, copies, interleaved
from longdraft.cache.full import FullCache
from longdraft.core import Context, SamplingParams
from longdraft.drafters.plain import PlainDrafter
from longdraft.errors import UsageError
from longdraft.kernels import KV, Kernels
from longdraft.model import checkpoint, hub
from longdraft.model import config as model_config
from longdraft.model.config import ModelConfig
from longdraft.model.routine import run_alone
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.step import Step, Tally, Timings

SAMPLING = SamplingParams(seed=7, min_p=0.1, repetition_penalty=1.2)  # T = 1, the penalty within 1,024 tokens


class Text(NamedTuple):
    """A model and a cache of a text."""

    model: Transformer
    cache: FullCache


class Models:
    """A model, loaded again where copies of its weights are wanted."""

    def __init__(self, name: str, kernels: Kernels, quantize: str = "none") -> None:
        folder = hub.resolve(name)
        self.name = name
        self.kernels = kernels
        self.quantize = quantize
        self.config: ModelConfig = model_config.read_config(folder)
        self._files = checkpoint.TensorFiles(folder)
        self.model = checkpoint.load_transformer(self._files, self.config, kernels, quantize)
        self._loaded = [self.model]
        self.weights_bytes = sum(weight.nbytes for weight in self.model.linears)

    def cache_bytes(self, context: int) -> int:
        return context * self.model.cache_bytes_per_token

    def texts(self, context: int, memory: int) -> list[Text]:
        """Texts of `context` random positions, each with weights of its own, that fill `memory`; at least one."""
        count = copies(self.weights_bytes + self.cache_bytes(context), memory)
        while len(self._loaded) < count:
            self._loaded.append(checkpoint.load_transformer(self._files, self.config, self.kernels, self.quantize))
        return [Text(model, random_cache(model, context)) for model in self._loaded[:count]]

    def check(self, contexts: Sequence[int], steps: int) -> None:
        longest = max(contexts) + steps
        if longest > self.config.max_positions:
            raise UsageError(f"--contexts is {max(contexts)}, and {steps} steps follow; allowed: "
                             f"{self.config.max_positions} in all (the model's context limit)")


def random_cache(model: Transformer, context: int) -> FullCache:
    cache, config = model.new_cache(), model.config
    for store in cache.stores:
        fill(store, context, (config.num_kv_heads, config.head_dim), model.kernels.dtype)
    cache.length = context
    return cache


def forwards(texts: Sequence[Text], rows: Sequence[int], repeats: int) -> list[Timing]:
    """Forwards with logits of so many rows, each behind the next of the texts."""
    turn = cycle(texts)

    def work(count: int) -> Work:
        def run() -> None:
            model, cache = next(turn)
            model.logits(model.forward(chain_rows([5] * count, cache.length), cache).hidden)
            cache.commit([])

        return run

    return interleaved([work(count) for count in rows], repeats)


def steps(text: Text, count: int) -> dict[str, float]:
    """Medians of `count` steps of plain decoding, whole and by part, in ms. The same text grows: no rotation."""
    model, cache = text
    context = Context([5] * (cache.length + 1))
    timings = Timings()
    step = Step(model, cache, PlainDrafter(), Sampler(SAMPLING), context, timings, Tally())
    for _ in range(2):
        run_alone(step.run(1))
    parts: dict[str, list[float]] = {name: [] for name in ("forward", "sample", "commit", "other", "step")}
    for _ in range(count):
        timings.draft = timings.verify = timings.sample = timings.commit = 0.0
        start = time.perf_counter()
        run_alone(step.run(1))
        whole = time.perf_counter() - start
        inside = {"forward": timings.verify, "sample": timings.sample, "commit": timings.commit}
        for name, seconds in (inside | {"step": whole, "other": whole - sum(inside.values())}).items():
            parts[name].append(seconds)
    return {f"{name}_ms": Timing.of(samples).median_s * 1e3 for name, samples in parts.items()}


def parts(texts: Sequence[Text], context: int, repeats: int) -> dict[str, float]:
    """A forward of one row, its attention alone and its linears alone, in ms; what neither is, is the rest."""
    config, kernels = texts[0].model.config, texts[0].model.kernels
    turn, parents = cycle(texts), torch.tensor([-1], dtype=torch.int32)
    q = torch.randn(1, config.num_heads, config.head_dim).to(kernels.dtype)
    kv = torch.randn(1, config.num_kv_heads, config.head_dim).to(kernels.dtype)
    inputs = {width: torch.randn(1, width).to(kernels.dtype) for width in _widths(config)}
    widths = [*_widths(config) * config.num_layers, config.hidden_size]

    def forward() -> None:
        model, cache = next(turn)
        model.logits(model.forward(chain_rows([5], context), cache).hidden)
        cache.commit([])

    def attention() -> None:
        for store in next(turn).cache.stores:
            kernels.attention(q, KV(store, context, kv, kv), parents)

    def linear() -> None:
        for weight, width in zip(next(turn).model.linears, widths, strict=True):
            kernels.linear(inputs[width], weight)

    whole, attending, multiplying = (timing.median_s * 1e3 for timing in
                                     interleaved([forward, attention, linear], repeats))
    return {"forward_ms": whole, "attention_ms": attending, "linear_ms": multiplying,
            "rest_ms": whole - attending - multiplying}


def _widths(config: ModelConfig) -> list[int]:
    """What qkv, out, gate_up and down take."""
    return [config.hidden_size, config.num_heads * config.head_dim, config.hidden_size, config.intermediate_size]


def floor_ms(models: Models, context: int, limits: Limits) -> float:
    return (models.weights_bytes + models.cache_bytes(context)) / limits.read_bandwidth * 1e3


def breakdown(models: Models, contexts: Sequence[int], memory: int, repeats: int,
              limits: Limits) -> list[dict[str, Any]]:
    """`parts` by context, with the floor."""
    records = []
    for context in contexts:
        texts = models.texts(context, memory)
        found, floor = parts(texts, context, repeats), floor_ms(models, context, limits)
        size = models.weights_bytes + models.cache_bytes(context)
        records.append({"context": context, **found, "bytes_read": size, "bytes_in_rotation": size * len(texts),
                        "floor_ms": floor, "share_of_floor": floor / found["forward_ms"]})
    return records


def sampling() -> dict[str, Any]:
    return asdict(SAMPLING)
