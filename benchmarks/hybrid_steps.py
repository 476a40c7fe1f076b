"""Time forwards of random hybrids and mixtures of experts: in one compiled call, and operation by operation.

    python benchmarks/hybrid_steps.py --threads 2 --quantize none
    python benchmarks/hybrid_steps.py --threads 2 --quantize int4 --shape qwen3-30b-a3b --layers 24

Prints the median milliseconds for 1 to 16 rows of different tokens, and their ratio to two floors: the bytes that one
row reads, and those that so many independent rows read, at the bandwidth that the machine was measured to have. The
bytes are those of the weights, the cache and twice the states. Quantised matrices of one shape are copies of one random
matrix: times do not depend on the numbers, and memory never holds an unquantised model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch

from longdraft import kernels, machine
from longdraft.kernels import Geometry, Linear, _cpu
from longdraft.kernels.cpu import CpuKernels
from longdraft.kernels.cpu_store import CpuLinear
from longdraft.kernels.delta import DeltaWeights
from longdraft.kernels.interface import LayerWeights
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.kernels.weights import Experts, Mlp
from longdraft.model.config import ModelConfig, parse_config
from longdraft.model.transformer import ModelWeights, Transformer, chain_rows

ROWS = (1, 2, 4, 8, 16)
SHAPES = {
    "qwen3.5-0.8b": dict(
        model_type="qwen3_5_text", vocab_size=151936, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24,
        num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=16, linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False),
    "qwen3.6-35b-a3b": dict(
        model_type="qwen3_5_moe_text", vocab_size=248320, hidden_size=2048, num_hidden_layers=40,
        num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, num_experts=256,
        num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        tie_word_embeddings=False),
}


class RandomMatrices:
    """Random matrices in the format `quantize`, one after another."""

    def __init__(self, ops: CpuKernels, quantize: str) -> None:
        self._ops, self._quantize = ops, quantize
        self._patterns: dict[tuple[int, int, str], CpuLinear] = {}

    def __call__(self, rows: int, columns: int, quantize: str | None = None) -> Linear:
        quantize = self._quantize if quantize is None else quantize
        if quantize == "none":
            return self._packed(rows, columns, quantize)
        key = (rows, columns, quantize)
        if key not in self._patterns:
            self._patterns[key] = self._packed(rows, columns, quantize)
        new = self._ops.new_linear(quantize, rows, columns, False)
        for part, pattern in zip(new.memory(), self._patterns[key].memory(), strict=True):
            part[:] = pattern
        return new

    def _packed(self, rows: int, columns: int, quantize: str) -> CpuLinear:
        return self._ops.pack(torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02), quantize=quantize)


def random_model(ops: CpuKernels, config: ModelConfig, quantize: str) -> Transformer:
    """Random matrices, and norms of 1."""
    hidden, linear = config.hidden_size, RandomMatrices(ops, quantize)

    def mlp(inner: int) -> Mlp:
        return Mlp(linear(2 * inner, hidden), linear(hidden, inner))

    def mixture() -> Experts | None:
        if (form := config.experts) is None:
            return None
        shared = (mlp(form.shared), linear(1, hidden, "none")) if form.shared else (None, None)
        router, mlps = linear(form.count, hidden, "none"), tuple(mlp(form.size) for _ in range(form.count))
        return Experts(router, mlps, form.chosen, form.normalises, form.rounds, form.clamp, *shared)

    def layer(index: int) -> LayerWeights:
        float_norms = torch.float32 if config.float_norms else ops.dtype
        norm, head_norm = (torch.ones(size, dtype=float_norms) for size in (hidden, config.head_dim))
        experts = mixture()
        dense = (None, None) if experts else mlp(config.intermediate_size)
        if not config.is_delta(index):
            heads, is_gated = config.num_heads, config.hybrid is not None
            rows = ((2 if is_gated else 1) * heads + 2 * config.num_kv_heads) * config.head_dim
            return LayerWeights(norm, linear(rows, hidden), linear(hidden, heads * config.head_dim), norm, *dense,
                                q_norm=head_norm, k_norm=head_norm, is_gated=is_gated, experts=experts)
        assert config.hybrid is not None
        shape = config.hybrid.shape
        heads = shape.value_heads
        delta = DeltaWeights(shape, torch.randn(shape.width, shape.channels) * 0.1, -torch.rand(heads),
                             torch.randn(heads), torch.ones(shape.value_dim), 1e-6)
        return LayerWeights(norm, linear(shape.channels + shape.values, hidden), linear(hidden, shape.values), norm,
                            *dense, delta=delta, gates=linear(2 * heads, hidden, "none"), experts=experts)

    torch.manual_seed(0)
    tables = "int8" if quantize == "int4" else quantize
    table = linear(config.vocab_size, hidden, tables)
    head = table if config.is_tied else linear(config.vocab_size, hidden, tables)
    layers = tuple(layer(index) for index in range(config.num_layers))
    return Transformer(config, ModelWeights(table, layers, torch.ones_like(layers[0].mlp_norm), head, quantize), ops)


def operation_by_operation(model: Transformer) -> Transformer:
    config, other = model.config, copy.copy(model)
    other._decoder = LayerwiseDecoder(model.kernels, model.weights.layers, Geometry(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, rounds_once=config.rounds_once))
    return other


def bytes_of(model: Transformer, rows: int, behind: int) -> int:
    """Bytes that a forward reads, if its rows choose experts independently of each other."""
    layers, read = model.weights.layers, model.weights_bytes + behind * model.cache_bytes_per_token
    for layer in layers:
        if layer.delta:
            read += 2 * 4 * layer.delta.shape.values * layer.delta.shape.key_dim
        if layer.experts:
            count, chosen = len(layer.experts.mlps), layer.experts.chosen
            one = sum(linear.nbytes for linear in layer.experts.mlps[0])
            read += int(one * (count * (1 - (1 - chosen / count) ** rows) - chosen))
    return read


def timed(model: Transformer, rows: int, behind: int, repeats: int) -> list[float]:
    """Milliseconds of forwards of `rows` rows behind random keys, each of other tokens."""
    cache, found = model.random_cache(behind, 64), []
    for _ in range(repeats):
        tokens = torch.randint(model.config.vocab_size, (rows,)).tolist()
        start = time.perf_counter()
        _ = model.forward(chain_rows(tokens, behind), cache, rows).logits
        found.append((time.perf_counter() - start) * 1e3)
        cache.commit([])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--behind", type=int, default=1024, help="positions in the KV cache; default: 1024")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    _cpu.set_threads(given.threads)
    ops = kernels.choose("cpu", "bfloat16")
    if not isinstance(ops, CpuKernels):
        parser.error("the compiled kernels are missing")
    shape = SHAPES[given.shape]
    fused = random_model(ops, parse_config(shape | {"num_hidden_layers": given.layers or shape["num_hidden_layers"]}),
                         given.quantize)
    rate = machine.read_bandwidth(1 << 30)
    floors = {rows: bytes_of(fused, rows, given.behind) / rate * 1e3 for rows in ROWS}
    print(f"{rate / 1e9:.1f} GB/s; one row reads {rate * floors[1] / 1e12:.2f} GB, floor {floors[1]:.1f} ms")
    for rows in ROWS:
        for name, model in (("one call", fused), ("operations", operation_by_operation(fused))):
            median = statistics.median(timed(model, rows, given.behind, given.repeats))
            print(f"{rows} rows, {name}: {median:.1f} ms, {median / floors[1]:.2f} of the floor of one row, "
                  f"{median / floors[rows]:.2f} of theirs", flush=True)


if __name__ == "__main__":
    main()
