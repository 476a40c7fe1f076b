"""Steps of plain decoding by context, beside the floor that memory bandwidth sets; `longdraft bench roofline`.

    floor = (bytes of the weights + bytes of the cache) / read bandwidth

A context is reached by random keys and values in the cache, without a prefill. The time of a step does not depend on
their values.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import torch

from longdraft.cache.full import FullCache
from longdraft.checkpoint import checkpoint, config_file, hub
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.plain import PlainDrafter
from longdraft.errors import UsageError
from longdraft.kernels import KV, Kernels
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.report.table import Table
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings
from longdraft_bench.machine.kernels import num_copies
from longdraft_bench.machine.limits import Limits
from longdraft_bench.timing import Call, Timing, interleaved

STEP_SAMPLING = SamplingParams(seed=7, min_p=0.1, repetition_penalty=1.2)  # T = 1, penalty within 1,024 tokens
STEPS_PER_REPEAT = 4  # of `roofline`
_WARM_UP_STEPS = 2
_ROOM = 64  # rows of the largest forward, or steps, after a text


class CachedText(NamedTuple):
    """A model and the cache of a text."""

    model: Transformer
    cache: FullCache


class ModelCopies:
    """A model, loaded several times if its weights must not stay in the processor's caches."""

    def __init__(self, name: str, kernels: Kernels, quantize: str = "none") -> None:
        folder = hub.resolve(name)
        self.kernels = kernels
        self.quantize = quantize
        self.config: ModelConfig = config_file.read_config(folder)
        self._files = TensorFiles(folder)
        self.model = checkpoint.load_transformer(self._files, self.config, kernels, quantize)
        self._loaded = [self.model]
        self.weights_bytes = self.model.weights_bytes

    def bytes_of_step(self, context: int) -> int:
        """Weights and cache, each read once."""
        return self.weights_bytes + context * self.model.cache_bytes_per_token

    def floor_ms(self, context: int, limits: Limits) -> float:
        return self.bytes_of_step(context) / limits.read_bandwidth * 1e3

    def texts(self, context: int, memory: int) -> list[CachedText]:
        """Texts of `context` random positions, each with its own copy of the weights, that fill `memory` bytes."""
        count = num_copies(self.bytes_of_step(context), memory)
        while len(self._loaded) < count:
            self._loaded.append(checkpoint.load_transformer(self._files, self.config, self.kernels, self.quantize))
        return [CachedText(model, random_cache(model, context, _ROOM)) for model in self._loaded[:count]]

    def check(self, contexts: Sequence[int], steps: int) -> None:
        """Raise UsageError if the contexts and the steps after them exceed the model's context limit."""
        if max(contexts) + steps > self.config.max_positions:
            raise UsageError(f"--contexts is {max(contexts)}, and {steps} steps follow; allowed: "
                             f"{self.config.max_positions} in all (the model's context limit)")


def measure_roofline(models: ModelCopies, context: int, rows: Sequence[int], memory: int, repeats: int,
                     limits: Limits) -> dict[str, Any]:
    """The record of one context.

    step_ms            a step of plain decoding (T = 1, min-p, penalty). Successive steps extend one text, so the
                       processor's caches may hold a part of it
    forward_cold_ms    a forward of one row with logits. Texts and weights rotate, so everything is read from memory
    rows               the same forward with several rows
    """
    texts = models.texts(context, memory)
    timings = time_forwards(texts, rows, repeats)
    step = time_steps(texts[0], STEPS_PER_REPEAT * repeats)
    floor, size = models.floor_ms(context, limits), models.bytes_of_step(context)
    cold = timings[0].median_s * 1e3
    return {
        "context": context, "cache": "random", "weights_bytes": models.weights_bytes,
        "cache_bytes": size - models.weights_bytes, "bytes_in_rotation": size * len(texts), "floor_ms": floor,
        **step, "tokens_per_second": 1e3 / step["step_ms"], "share_of_floor": floor / step["step_ms"],
        "forward_cold_ms": cold, "share_of_floor_cold": floor / cold,
        "rows": [{"rows": count, **timing.in_ms(), "to_one_row": timing.median_s / timings[0].median_s}
                 for count, timing in zip(rows, timings, strict=True)],
    }


def time_forwards(texts: Sequence[CachedText], rows: Sequence[int], repeats: int) -> list[Timing]:
    """Time forwards with logits for each number of rows. Successive forwards rotate through the texts."""
    turn = cycle(texts)

    def forward(count: int) -> Call:
        def call() -> None:
            model, cache = next(turn)
            model.logits(model.forward(chain_rows([5] * count, cache.length), cache).hidden)
            cache.commit([])

        return call

    return interleaved([forward(count) for count in rows], repeats)


def time_steps(text: CachedText, count: int) -> dict[str, float]:
    """Medians of `count` steps of plain decoding and of their parts, in ms. The text grows by each step."""
    model, cache = text
    context = Context([5] * (cache.length + 1))
    timings = Timings()
    step = Step(model, cache, PlainDrafter(), Sampler(STEP_SAMPLING), context, timings, Tally())
    for _ in range(_WARM_UP_STEPS):
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


def steps_written(count: int, times: int) -> int:
    """Tokens by which a text grows if `count` steps are timed `times` times."""
    return (count + _WARM_UP_STEPS) * times


def forward_parts(models: ModelCopies, context: int, memory: int, repeats: int, limits: Limits) -> dict[str, Any]:
    """A forward of one row beside its attention alone and its linear layers alone, in ms, and the floor."""
    texts = models.texts(context, memory)
    config, kernels = models.config, models.kernels
    turn, parents = cycle(texts), torch.tensor([-1], dtype=torch.int32)
    layer_widths = [config.hidden_size, config.num_heads * config.head_dim, config.hidden_size,
                    config.intermediate_size]  # inputs of the linear layers qkv, out, gate_up and down
    widths = [*layer_widths * config.num_layers, config.hidden_size]
    q = torch.randn(1, config.num_heads, config.head_dim).to(kernels.dtype)
    kv = torch.randn(1, config.num_kv_heads, config.head_dim).to(kernels.dtype)
    inputs = {width: torch.randn(1, width).to(kernels.dtype) for width in widths}

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

    whole, attention_ms, linear_ms = (timing.median_s * 1e3 for timing in
                                      interleaved([forward, attention, linear], repeats))
    floor, size = models.floor_ms(context, limits), models.bytes_of_step(context)
    return {"context": context, "forward_ms": whole, "attention_ms": attention_ms, "linear_ms": linear_ms,
            "rest_ms": whole - attention_ms - linear_ms, "bytes_read": size, "bytes_in_rotation": size * len(texts),
            "floor_ms": floor, "share_of_floor": floor / whole}


def forward_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("A forward of one row with logits, nothing cached", (
        ("context", "context", ","), ("ms", "forward_ms", ".2f"), ("attention", "attention_ms", ".2f"),
        ("linear", "linear_ms", ".2f"), ("rest", "rest_ms", ".2f"), ("floor", "floor_ms", ".2f"),
        ("of floor", "share_of_floor", ".0%")), records)


def roofline_tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    steps = Table.of_records("A step of plain decoding, ms", (
        ("context", "context", ","), ("step", "step_ms", ".2f"), ("forward", "forward_ms", ".2f"),
        ("sample", "sample_ms", ".2f"), ("commit", "commit_ms", ".2f"), ("other", "other_ms", ".2f"),
        ("floor", "floor_ms", ".2f"), ("of floor", "share_of_floor", ".0%"),
        ("forward, nothing cached", "forward_cold_ms", ".2f"), ("of floor", "share_of_floor_cold", ".0%"),
        ("tokens/s", "tokens_per_second", ".1f")), records)
    counts = [str(row["rows"]) for row in records[0]["rows"]]
    by_rows = [{"context": record["context"], **{str(row["rows"]): row["ms"] for row in record["rows"]}}
               for record in records]
    return [steps, Table.of_records("Forwards by rows, nothing cached, ms", (
        ("context", "context", ","), *((count, count, ".2f") for count in counts)), by_rows)]
