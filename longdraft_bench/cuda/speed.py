"""Speed on the device, beside what its memory could do: rates, kernels, steps, prefills, and another engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.plain import PlainDrafter
from longdraft.errors import UsageError
from longdraft.kernels.cuda import linear
from longdraft.kernels.cuda.attention import AttentionWorkspace, tree_attention
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.kv_store import CudaStore
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.interface import DEVICE_CHUNK
from longdraft.model.transformer import Transformer, chain_rows, tree_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import chain
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings
from longdraft_bench.cuda.models import Bench, device_ms, switched, synchronise
from longdraft_bench.cuda.plan import CudaPlan

SAMPLING = SamplingParams(max_new_tokens=200_000, seed=7, min_p=0.1, repetition_penalty=1.2, ignore_eos=True)
_TRANSFORMERS = Path(__file__).resolve().parent.parent / "workers" / "cuda_transformers.py"
_ROOM = 1024  # positions that are reserved after a context
_CACHE_FACTOR = 4  # the copies of a weight are together so many times as large as the second-level cache
WARM_STEPS = 3


def copy_rate(plan: CudaPlan, bench: Bench) -> dict[str, Any]:
    """Bytes/s of a copy of random bytes on the device, counting reads and writes; the fastest of the repeats."""
    source = torch.randint(0, 256, (plan.copied,), dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    ms = min(device_ms(source.device, lambda: target.copy_(source), 1) for _ in range(plan.repeats))
    bench.rate = 2 * plan.copied / ms * 1e3
    return {"bytes": 2 * plan.copied, "ms": ms, "bytes_per_s": bench.rate}


def product_rate(plan: CudaPlan, bench: Bench) -> dict[str, float]:
    """Operations/s of a square product of PyTorch's in the model's dtype."""
    size = 8192 if plan.device == "cuda" else 64
    a, b = (torch.randn(size, size, device=plan.device).to(bench.kernels().dtype) for _ in range(2))
    ms = device_ms(a.device, lambda: a @ b, plan.repeats)
    return {"size": size, "ms": ms, "operations_per_s": 2 * size**3 / ms * 1e3}


def rate_of(plan: CudaPlan, bench: Bench) -> float:
    return bench.rate or float(copy_rate(plan, bench)["bytes_per_s"])


def each_kernel(plan: CudaPlan, bench: Bench, shape: str) -> list[dict[str, Any]]:
    """Products and attention by themselves: microseconds, bytes read, share of the copy rate.

    The copies of a weight do not fit into the second-level cache together, as in a model of many layers.
    """
    sizes, chosen, found = plan.shapes[shape], bench.kernels(), []
    assert isinstance(chosen, CudaKernels)
    rate = rate_of(plan, bench)
    hidden, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    counts = plan.rows if plan.device == "cuda" else plan.rows[:1]
    products = {"qkv": ((heads + 2 * kv_heads) * dim, hidden), "out": (hidden, heads * dim),
                "gate_up": (2 * inner, hidden), "down": (hidden, inner), "head": (sizes["vocab_size"], hidden)}
    for name, (out, into) in products.items():
        for quantize in ("none", "int8", "int4"):
            try:
                weights = weight_copies(plan, chosen, out, into, quantize)
            except UsageError as error:  # these kernels lack the format
                found.append({"kernel": f"{name} {quantize}", "failed": str(error)})
                continue
            for rows in counts:
                x = torch.randn(rows, into, device=plan.device).to(chosen.dtype)
                work = [lambda weight=weight, x=x: weight.partial_sums(x, chosen.tile) for weight in weights]
                us = graph_us(chosen.device, work, plan.repeats)
                found.append(_share(f"{name} {quantize}", rows, us, weights[0].nbytes, rate))
                bench.keep(found)
            if name == "gate_up" and weights[0].fuses_gate:
                found += _gated(plan, chosen, weights, rate)
            del weights
    for context in plan.contexts:
        for rows in counts:
            store, attend = attention_of(chosen, (heads, kv_heads, dim), context, rows)
            us = graph_us(chosen.device, [attend], plan.repeats)
            size = kv_heads * context * chosen.cache_bytes(dim)
            found.append(_share(f"attention after {context}", rows, us, size, rate))
            del store, attend
    return found


def _gated(plan: CudaPlan, chosen: CudaKernels, weights: list[CudaLinear], rate: float) -> list[dict[str, Any]]:
    """The product of gate and up with the activation after it, in one launch and in two."""
    found: list[dict[str, Any]] = []
    for is_fused in (False, True):
        x = torch.randn(1, weights[0].in_features, device=plan.device).to(chosen.dtype)
        out = torch.empty(1, weights[0].out_features // 2, dtype=chosen.dtype, device=plan.device)
        sums = torch.empty(weights[0].num_sums(1), device=plan.device)
        work = [lambda weight=weight, x=x, out=out, sums=sums: weight.multiply_gated(x, chosen.tile, out, sums)
                for weight in weights]
        with switched(linear, "FUSES_GATE", is_fused):
            us = graph_us(chosen.device, work, plan.repeats)
        name = f"gate_up and activation, {1 if is_fused else 2} launches"
        found.append(_share(name, 1, us, weights[0].nbytes, rate))
    return found


def _share(name: str, rows: int, us: float, size: int, rate: float) -> dict[str, Any]:
    return {"kernel": name, "rows": rows, "us": us, "bytes": size, "share_of_copy": size / (us * 1e-6) / rate}


def weight_copies(plan: CudaPlan, chosen: CudaKernels, out: int, into: int, quantize: str) -> list[CudaLinear]:
    cached = torch.cuda.get_device_properties(0).L2_cache_size if plan.device == "cuda" else 1
    size = out * into * chosen.dtype.itemsize // {"none": 1, "int8": 2, "int4": 4}[quantize]
    values = torch.randn(out, into, device=plan.device).to(chosen.dtype) / into**0.5
    first = chosen.pack(values, quantize=quantize)
    others = (min(max(1, _CACHE_FACTOR * cached // size), 64) if plan.device == "cuda" else 1) - 1
    return [first, *(chosen.pack(values, quantize=quantize) for _ in range(others))]


def attention_of(chosen: CudaKernels, shape: tuple[int, int, int], context: int,
               rows: int) -> tuple[CudaStore, Callable[[], None]]:
    """A store of random keys, and the attention of a chain of rows after it."""
    heads, kv_heads, dim = shape
    store = CudaStore(chosen.device, chosen.dtype, chosen.format, kv_heads, dim)
    store.reserve(context)
    store.reserve_drafts(rows)
    k = torch.randn(1024, kv_heads, dim, device=chosen.device).to(chosen.dtype)
    for start in range(0, context, 1024):
        part = k[: min(1024, context - start)]
        store.write(start, part, part)
    work = AttentionWorkspace(chosen.attention_plan(heads, kv_heads, dim), rows, context, chosen.device)
    work.set_tree(torch.arange(-1, rows - 1, dtype=torch.int32, device=chosen.device))
    where = torch.tensor([context, store.room], device=chosen.device)
    q = torch.randn(rows, heads, dim, device=chosen.device).to(chosen.dtype)
    out, lse = torch.empty_like(q), torch.empty(rows, heads, device=chosen.device)
    return store, lambda: tree_attention(work, q, store, where, context, 0, None, out, lse)


def graph_us(device: torch.device, work: Sequence[Callable[[], object]], repeats: int) -> float:
    """Microseconds of one piece of work, all of them in one CUDA graph; without a device one after the other."""
    def each() -> None:
        for piece in work:
            piece()

    each()
    if device.type != "cuda":
        return device_ms(device, each, repeats, 0) * 1e3 / len(work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        each()
    return device_ms(device, graph.replay, max(repeats, 20)) * 1e3 / len(work)


def verifies(model: Transformer, context: int, rows: int) -> Callable[[], object]:
    """A verification of `rows` rows after `context` random ones: forward, logits and sampling. Commits nothing."""
    cache, text = random_cache(model, context, _ROOM), Context([5] * (context + 1))
    sampler = Sampler(SAMPLING, kernels=model.kernels)
    tree = chain(5, [5] * (rows - 1), "guess")

    def work() -> object:
        result = model.forward(tree_rows(tree, context), cache, rows)
        assert sampler.on_device
        assert result.source
        chosen = sampler.on_device.launch(result.source, result.hidden, tree, text)
        cache.commit([])
        return chosen

    return work


def steps(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """A plain step by wall clock, its layers by the device's clock, and verifications, beside the memory's floor."""
    model, rate = bench.model(shape), rate_of(plan, bench)
    device = model.kernels.device
    size = model.weights_bytes + context * model.cache_bytes_per_token + _state_bytes(model)
    floor = size / rate * 1e3
    wall, graphs = plain_ms(model, context, plain_steps(plan))
    found = {"context": context, "bytes": size, "floor_ms": floor, "plain_ms": wall, "tokens_per_s": 1e3 / wall,
             "share_of_floor": floor / wall, "graphs_ms": graphs,
             "beside_graphs": 1 - sum(graphs) / wall if graphs else None}
    bench.keep(found)
    by_rows = {}
    for rows in plan.rows:
        work = verifies(model, context, rows)
        by_rows[rows] = device_ms(device, work, plan.repeats)
        del work
    assert isinstance(model.kernels, CudaKernels)
    return found | {"verify_ms": by_rows, "uncaptured": model.kernels.graphs.failures,
                    "to_one_row": {rows: ms / by_rows[plan.rows[0]] for rows, ms in by_rows.items()}}


def _state_bytes(model: Transformer) -> int:
    """Bytes of the delta layers' states that a row reads and writes."""
    shapes = [layer.delta.shape for layer in model.weights.layers if layer.delta is not None]
    return sum(2 * 4 * shape.value_heads * shape.key_dim * shape.value_dim for shape in shapes)


def plain_steps(plan: CudaPlan) -> int:
    """Steps of plain decoding that are timed."""
    return 4 * plan.repeats if plan.device == "cuda" else 1


def plain_ms(model: Transformer, context: int, count: int) -> tuple[float, list[float]]:
    """Milliseconds of a step of plain decoding while a text is written, and of its graphs: layers, choice."""
    step = plain_step(model, context)
    for _ in range(min(count, WARM_STEPS)):
        run_alone(step.run(1))
    synchronise(model.kernels.device)
    began = time.perf_counter()
    for _ in range(count):
        run_alone(step.run(1))
    synchronise(model.kernels.device)
    wall = (time.perf_counter() - began) / count * 1e3
    assert isinstance(model.kernels, CudaKernels)
    graphs = list(model.kernels.graphs.recent)
    return wall, [device_ms(model.kernels.device, graph.replay, count) for graph in graphs]


def plain_step(model: Transformer, context: int, params: SamplingParams = SAMPLING) -> Step:
    """Plain decoding after random rows."""
    return Step(model, random_cache(model, context, _ROOM), PlainDrafter(), Sampler(params, kernels=model.kernels),
                Context([5] * (context + 1)), Timings(), Tally())


def prefill(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """Seconds to read a prompt of `context` random tokens."""
    model = bench.model(shape)
    cache = model.new_cache()
    cache.reserve(context + _ROOM)
    pick = torch.Generator().manual_seed(2)
    tokens: Tensor = torch.randint(model.config.vocab_size, (context,), generator=pick)
    model.forward(chain_rows(tokens[:DEVICE_CHUNK].tolist(), 0), cache, is_prompt=True)
    cache.commit([])
    synchronise(model.kernels.device)
    began = time.perf_counter()
    for start in range(0, context, DEVICE_CHUNK):
        chunk = tokens[start : start + DEVICE_CHUNK].tolist()
        model.forward(chain_rows(chunk, start), cache, is_prompt=True)
        cache.commit(range(len(chunk)))
    synchronise(model.kernels.device)
    seconds = time.perf_counter() - began
    return {"context": context, "chunk": DEVICE_CHUNK, "seconds": seconds, "tokens_per_s": context / seconds}


def transformers(plan: CudaPlan, bench: Bench, shape: str, context: int) -> dict[str, Any]:
    """A step of transformers with a static cache and torch.compile, in its own process."""
    command = [sys.executable, str(_TRANSFORMERS), json.dumps(plan.shapes[shape]), str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          timeout=max(10.0, bench.seconds_left() - 5))
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the process printed no error"])[-1][:400])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
