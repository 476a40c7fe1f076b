"""Each kernel by itself: time by rows, as a share of the machine's measured limits; `longdraft bench kernels`.

Calls of attention and linear rotate through several stores and weights, so that none is still in the processor's
caches. Times include the call from Python, as the model makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.drafters.auto.calibration import fill_randomly
from longdraft.kernels import KV, Kernels, Linear
from longdraft.model.config import ModelConfig
from longdraft.report.table import Table
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import chain
from longdraft.sampling.sampler import Sampler
from longdraft.system.machine import dtype_name
from longdraft_bench.machine.limits import Limits
from longdraft_bench.timing import Call, Timing, interleaved


class AttentionShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class KernelPlan(NamedTuple):
    """How much is measured.

    rows          numbers of rows
    prefill_rows  rows of a prompt's chunk, measured too; 0: none
    positions     keys and values that attention reads
    memory        bytes to read in rotation
    quantize      none | int8 | int4, for the weights of linear
    """

    rows: Sequence[int]
    prefill_rows: int
    positions: int
    memory: int
    repeats: int
    quantize: str = "none"

    def timings(self, call_with: Callable[[int], Call]) -> list[tuple[int, Timing]]:
        """Time the call for each number of rows. The slow prefill chunk gets at most three repeats."""
        taken = interleaved([call_with(rows) for rows in self.rows], self.repeats)
        if self.prefill_rows:
            taken += interleaved([call_with(self.prefill_rows)], min(3, self.repeats))
        return list(zip([*self.rows, self.prefill_rows], taken))


LINEAR_SHAPES = {  # name -> rows and columns of the weight [N, K]
    "0.5B qkv": (1152, 896), "0.5B out": (896, 896), "0.5B gate_up": (9728, 896), "0.5B down": (896, 4864),
    "0.5B head": (151936, 896),
    "1.5B qkv": (2048, 1536), "1.5B out": (1536, 1536), "1.5B gate_up": (17920, 1536), "1.5B down": (1536, 8960),
    "1.5B head": (151936, 1536),
    "8B qkv": (6144, 4096), "8B out": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
}


def linear_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes [N, K] of a model's weights."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {f"{name} qkv": (q + 2 * kv, hidden), f"{name} out": (hidden, q), f"{name} gate_up": (2 * inner, hidden),
            f"{name} down": (hidden, inner), f"{name} head": (config.vocab_size, hidden)}


def num_copies(nbytes: int, memory: int) -> int:
    """How many objects of `nbytes` fill `memory` bytes; at least one."""
    return max(1, math.ceil(memory / nbytes))


def measure_attention(kernels: Kernels, shape: AttentionShape, plan: KernelPlan, limits: Limits
                      ) -> list[dict[str, Any]]:
    """One layer's attention: a chain of rows after `plan.positions` random keys and values."""
    heads, kv_heads, dim = shape
    nbytes = 2 * plan.positions * kv_heads * dim * kernels.dtype.itemsize
    stores = [kernels.new_store(kv_heads, dim) for _ in range(num_copies(nbytes, plan.memory))]
    written = plan.positions + max(*plan.rows, plan.prefill_rows)  # the system gives memory that is written to
    for store in stores:
        store.reserve(written)
        fill_randomly(store, written, kernels)
    turn = cycle(stores)

    def call_with(rows: int) -> Call:
        q, (k, v) = _random(kernels, rows, heads, dim), (_random(kernels, rows, kv_heads, dim) for _ in range(2))
        parents = torch.arange(-1, rows - 1, dtype=torch.int32)
        return lambda: kernels.attention(q, KV(next(turn), plan.positions, k, v), parents)

    return [{**shape._asdict(), "positions": plan.positions, "rows": rows, "bytes_in_rotation": nbytes * len(stores),
             **_rates(timing, limits, dtype_name(kernels), nbytes, 4 * rows * heads * dim * plan.positions)}
            for rows, timing in plan.timings(call_with)]


def measure_linear(kernels: Kernels, name: str, shape: tuple[int, int], plan: KernelPlan, limits: Limits
                   ) -> list[dict[str, Any]]:
    """x [rows, K] times a weight [N, K]. `to_one_row` is the time relative to the first number of rows."""
    n, k = shape
    weight = torch.randn(n, k).to(kernels.dtype)
    nbytes = int(weight.numel() * {"none": weight.itemsize, "int8": 1, "int4": 19 / 32}[plan.quantize])
    weights: list[Linear] = [kernels.pack(weight, quantize=plan.quantize)
                             for _ in range(num_copies(nbytes, plan.memory))]
    turn = cycle(weights)

    def call_with(rows: int) -> Call:
        x = _random(kernels, rows, k)
        return lambda: kernels.linear(x, next(turn))

    timings = plan.timings(call_with)
    return [{"weight": name, "n": n, "k": k, "rows": rows, "bytes_in_rotation": nbytes * len(weights),
             "to_one_row": timing.median_s / timings[0][1].median_s,
             **_rates(timing, limits, dtype_name(kernels), nbytes, 2 * rows * n * k)} for rows, timing in timings]


def _rates(timing: Timing, limits: Limits, dtype: str, bytes_read: int, flops: int) -> dict[str, float]:
    """A timing, and its rates as shares of the measured limits."""
    bytes_per_s, flops_per_s = bytes_read / timing.median_s, flops / timing.median_s
    return {**timing.in_ms(), "bytes_read": bytes_read, "gb_per_s": bytes_per_s / 1e9,
            "of_bandwidth": bytes_per_s / limits.read_bandwidth, "gflop_per_s": flops_per_s / 1e9,
            "of_peak": flops_per_s / limits.peak[dtype]}


def measure_row_wise(kernels: Kernels, config: ModelConfig, plan: KernelPlan) -> list[dict[str, Any]]:
    """Operations on single rows, in the model's sizes: normalisation, rotation, activation and sampling."""
    calls = {(name, rows): call for rows in plan.rows for name, call in _row_wise_calls(kernels, config, rows)}
    timings = interleaved(list(calls.values()), plan.repeats)
    return [{"kernel": name, "rows": rows, **timing.in_ms(), "us_per_row": timing.median_s / rows * 1e6}
            for (name, rows), timing in sorted(zip(calls, timings, strict=True))]


SAMPLINGS = {
    "choose, greedy": SamplingParams(temperature=0),
    "choose, T=1": SamplingParams(seed=7),
    "choose, T=1 min-p 0.1": SamplingParams(seed=7, min_p=0.1),
    "choose, T=1 min-p 0.1 penalty 1.2 in 1024": SamplingParams(seed=7, min_p=0.1, repetition_penalty=1.2),
}


def _row_wise_calls(kernels: Kernels, config: ModelConfig, rows: int) -> Iterator[tuple[str, Call]]:
    x, norm = _random(kernels, rows, config.hidden_size), torch.ones(config.hidden_size).to(kernels.dtype)
    gate_up = _random(kernels, rows, 2 * config.intermediate_size)
    q = _random(kernels, rows, config.num_heads, config.head_dim)
    cos, sin = (torch.randn(rows, config.head_dim // 2) for _ in range(2))
    yield "rms_norm", lambda: kernels.rms_norm(x, norm, config.rms_norm_eps)
    yield "rope", lambda: kernels.rope(q, cos, sin)
    yield "swiglu", lambda: kernels.swiglu(gate_up)
    logits = 4 * torch.randn(rows, config.vocab_size)
    text = torch.randint(config.vocab_size, (2048,)).tolist()
    context, tree = Context(text), chain(text[-1], text[: rows - 1], "bench")
    for name, params in SAMPLINGS.items():
        yield name, partial(Sampler(params).choose, logits, tree, context)


def _random(kernels: Kernels, *shape: int) -> Tensor:
    return torch.randn(*shape).to(kernels.dtype)


_RATE_COLUMNS = (
    ("ms", "ms", ".3f"), ("low", "ms_low", ".3f"), ("high", "ms_high", ".3f"), ("GB/s", "gb_per_s", ".1f"),
    ("of bandwidth", "of_bandwidth", ".0%"), ("GFLOP/s", "gflop_per_s", ",.0f"), ("of peak", "of_peak", ".1%"))


def attention_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("Attention, one layer", (
        ("heads", "heads", ""), ("KV heads", "kv_heads", ""), ("dim", "head_dim", ""), ("positions", "positions", ","),
        ("rows", "rows", ""), *_RATE_COLUMNS), records)


def linear_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("Linear", (
        ("weight", "weight", ""), ("N", "n", ""), ("K", "k", ""), ("rows", "rows", ""), *_RATE_COLUMNS,
        ("to one row", "to_one_row", ".2f")), records)


def row_wise_table(records: Sequence[dict[str, Any]]) -> Table:
    return Table.of_records("Row by row", (
        ("kernel", "kernel", ""), ("rows", "rows", ""), ("ms", "ms", ".4f"), ("us per row", "us_per_row", ".2f")),
        records)
