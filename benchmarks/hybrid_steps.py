"""Time forwards of a random hybrid with the shape of Qwen3.5-0.8B: in one compiled call, and operation by operation.

    python benchmarks/hybrid_steps.py --threads 2 --quantize none

Prints the median milliseconds for 1 to 8 rows, and their ratio to the floor: the weights, the cache and twice the
states, read at the bandwidth that the machine was measured to have.
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
from longdraft.kernels.delta import DeltaWeights
from longdraft.kernels.interface import LayerWeights
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.model.config import ModelConfig, parse_config
from longdraft.model.transformer import ModelWeights, Transformer, chain_rows

HIDDEN, INNER, HEADS, VOCABULARY, LAYERS = 1024, 3584, 16, 151936, 24
SHAPE = dict(
    model_type="qwen3_5_text", vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER,
    num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=2, head_dim=256, linear_num_key_heads=HEADS,
    linear_num_value_heads=HEADS, linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True)


def random_model(ops: CpuKernels, config: ModelConfig, quantize: str) -> Transformer:
    """Random matrices, and norms of 1."""
    def linear(rows: int, columns: int, quantize: str = quantize) -> Linear:
        return ops.pack(torch.randn(rows, columns).mul_(0.02).bfloat16(), quantize=quantize)

    def layer(index: int) -> LayerWeights:
        norm, head_norm = torch.ones(HIDDEN), torch.ones(config.head_dim)
        mlp = linear(2 * INNER, HIDDEN), linear(HIDDEN, INNER)
        if not config.is_delta(index):
            rows = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
            return LayerWeights(norm, linear(rows, HIDDEN), linear(HIDDEN, config.num_heads * config.head_dim), norm,
                                *mlp, q_norm=head_norm, k_norm=head_norm, is_gated=True)
        assert config.hybrid is not None
        shape = config.hybrid.shape
        delta = DeltaWeights(shape, torch.randn(shape.width, shape.channels) * 0.1, -torch.rand(HEADS),
                             torch.randn(HEADS), torch.ones(shape.value_dim), 1e-6)
        return LayerWeights(norm, linear(shape.channels + shape.values, HIDDEN), linear(HIDDEN, shape.values), norm,
                            *mlp, delta=delta, gates=linear(2 * HEADS, HIDDEN, "none"))

    torch.manual_seed(0)
    table, layers = linear(VOCABULARY, HIDDEN), tuple(layer(index) for index in range(LAYERS))
    return Transformer(config, ModelWeights(table, layers, torch.ones(HIDDEN), table, quantize), ops)


def operation_by_operation(model: Transformer) -> Transformer:
    config, other = model.config, copy.copy(model)
    other._decoder = LayerwiseDecoder(model.kernels, model.weights.layers, Geometry(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, rounds_once=config.rounds_once))
    return other


def timed(model: Transformer, rows: int, behind: int, repeats: int) -> list[float]:
    """Milliseconds of forwards of `rows` rows behind random keys."""
    cache, found = model.random_cache(behind, 64), []
    for _ in range(repeats):
        start = time.perf_counter()
        _ = model.forward(chain_rows([5] * rows, behind), cache, rows).logits
        found.append((time.perf_counter() - start) * 1e3)
        cache.commit([])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    fused = random_model(ops, parse_config(SHAPE), given.quantize)
    states = 2 * 4 * sum(layer.delta.shape.values * layer.delta.shape.key_dim
                         for layer in fused.weights.layers if layer.delta)
    read = fused.weights_bytes + given.behind * fused.cache_bytes_per_token + states
    floor = read / machine.read_bandwidth(1 << 30)
    print(f"floor {floor * 1e3:.1f} ms")
    for rows in (1, 2, 4, 8):
        for name, model in (("one call", fused), ("operations", operation_by_operation(fused))):
            median = statistics.median(timed(model, rows, given.behind, given.repeats))
            print(f"{rows} rows, {name}: {median:.1f} ms ({median / floor / 1e3:.2f})")


if __name__ == "__main__":
    main()
