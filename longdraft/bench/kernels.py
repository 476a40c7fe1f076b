"""Each kernel by itself: time by rows, and what that is of the machine's measured limits.

Attention and linear read stores and weights in rotation, so that none is still in the processor's caches
from the call before. Times include the call from Python, as the model makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.bench.machine import dtype_name
from longdraft.bench.measure import Limits, Timing, Work, copies, figures, interleaved
from longdraft.core import Context, SamplingParams
from longdraft.kernels import KV, Kernels, KVStore, Linear
from longdraft.model.config import ModelConfig
from longdraft.sampling.sampler import Sampler
from longdraft.tree import chain

_CHUNK = 4096  # positions written at once


class Shape(NamedTuple):
    """Of attention."""

    heads: int
    kv_heads: int
    head_dim: int


class Sizes(NamedTuple):
    """How much is measured."""

    rows: Sequence[int]
    chunk: int  # rows of a prompt's chunk, measured beside them; 0: none
    positions: int
    memory: int  # bytes in rotation
    repeats: int
    is_int8: bool = False  # of linear's weights

    def timings(self, work: Callable[[int], Work]) -> list[tuple[int, Timing]]:
        """The work with each number of rows. A chunk takes long and gets three repeats at most."""
        found = interleaved([work(rows) for rows in self.rows], self.repeats)
        if self.chunk:
            found += interleaved([work(self.chunk)], min(3, self.repeats))
        return list(zip([*self.rows, self.chunk], found))


LINEAR_SHAPES = {  # name -> rows and columns of the weight [N, K]
    "1.5B qkv": (2048, 1536), "1.5B out": (1536, 1536), "1.5B gate_up": (17920, 1536), "1.5B down": (1536, 8960),
    "8B qkv": (6144, 4096), "8B out": (4096, 4096), "8B gate_up": (28672, 4096), "8B down": (4096, 14336),
}


def model_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The weights of a model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {f"{name} qkv": (q + 2 * kv, hidden), f"{name} out": (hidden, q), f"{name} gate_up": (2 * inner, hidden),
            f"{name} down": (hidden, inner), f"{name} head": (config.vocab_size, hidden)}


def fill(store: KVStore, length: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Random keys and values [length, *shape] (the same ones every 4,096 positions, in memory of their own)."""
    k, v = (torch.randn(min(length, _CHUNK), *shape).to(dtype) for _ in range(2))
    store.reserve(length)
    for start in range(0, length, _CHUNK):
        count = min(_CHUNK, length - start)
        store.write(start, k[:count], v[:count])


def attention(kernels: Kernels, shape: Shape, sizes: Sizes, limits: Limits) -> list[dict[str, Any]]:
    """One layer's attention of a chain of rows behind `positions` random keys and values."""
    heads, kv_heads, dim = shape
    nbytes = 2 * sizes.positions * kv_heads * dim * kernels.dtype.itemsize
    stores = [kernels.new_store(kv_heads, dim) for _ in range(copies(nbytes, sizes.memory))]
    for store in stores:
        fill(store, sizes.positions, (kv_heads, dim), kernels.dtype)
    turn = cycle(stores)

    def work(rows: int) -> Work:
        q, (k, v) = _random(kernels, rows, heads, dim), (_random(kernels, rows, kv_heads, dim) for _ in range(2))
        parents = torch.arange(-1, rows - 1, dtype=torch.int32)
        return lambda: kernels.attention(q, KV(next(turn), sizes.positions, k, v), parents)

    return [
        {**shape._asdict(), "positions": sizes.positions, "rows": rows, "bytes_in_rotation": nbytes * len(stores),
         **figures(timing, limits, dtype_name(kernels), bytes_read=nbytes,
                   flops=4 * rows * heads * dim * sizes.positions)}
        for rows, timing in sizes.timings(work)
    ]


def linear(kernels: Kernels, name: str, shape: tuple[int, int], sizes: Sizes, limits: Limits) -> list[dict[str, Any]]:
    """x [rows, K] times a weight [N, K]; `to_one_row` is the time relative to that of the first number of rows."""
    n, k = shape
    weight = torch.randn(n, k).to(kernels.dtype)
    nbytes = weight.numel() * (1 if sizes.is_int8 else weight.itemsize)
    weights: list[Linear] = [kernels.pack(weight, is_int8=sizes.is_int8) for _ in range(copies(nbytes, sizes.memory))]
    turn = cycle(weights)

    def work(rows: int) -> Work:
        x = _random(kernels, rows, k)
        return lambda: kernels.linear(x, next(turn))

    timings = sizes.timings(work)
    return [
        {"weight": name, "n": n, "k": k, "rows": rows, "bytes_in_rotation": nbytes * len(weights),
         "to_one_row": timing.median_s / timings[0][1].median_s,
         **figures(timing, limits, dtype_name(kernels), bytes_read=nbytes, flops=2 * rows * n * k)}
        for rows, timing in timings
    ]


def row_wise(kernels: Kernels, config: ModelConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """What works on each row by itself, in the model's sizes: norms, rotation, activation, and the choice."""
    works = {(name, rows): work for rows in sizes.rows for name, work in _row_works(kernels, config, rows)}
    timings = interleaved(list(works.values()), sizes.repeats)
    return [{"kernel": name, "rows": rows, **timing.in_ms(), "us_per_row": timing.median_s / rows * 1e6}
            for (name, rows), timing in sorted(zip(works, timings, strict=True))]


CHOICES = {
    "choose, greedy": SamplingParams(temperature=0),
    "choose, T=1": SamplingParams(seed=7),
    "choose, T=1 min-p 0.1": SamplingParams(seed=7, min_p=0.1),
    "choose, T=1 min-p 0.1 penalty 1.2 in 1024": SamplingParams(seed=7, min_p=0.1, repetition_penalty=1.2),
}


def _row_works(kernels: Kernels, config: ModelConfig, rows: int) -> Iterator[tuple[str, Work]]:
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
    for name, params in CHOICES.items():
        yield name, partial(Sampler(params).choose, logits, tree, context)


def _random(kernels: Kernels, *shape: int) -> Tensor:
    return torch.randn(*shape).to(kernels.dtype)
