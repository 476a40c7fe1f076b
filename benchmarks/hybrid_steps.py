"""Time forwards of random hybrids, mixtures of experts and Gemmas: in one compiled call, and operation by operation.

    python benchmarks/hybrid_steps.py --threads 2 --quantize none
    python benchmarks/hybrid_steps.py --threads 2 --quantize int4 --shape qwen3-30b-a3b --layers 24

Prints the median milliseconds for 1 to 16 rows of different tokens, and their ratio to two floors: the bytes that one
row reads, and those that so many independent rows read, at the bandwidth that the machine has in the same turn: that of
a shared machine changes from second to second. Each ratio is the median of turns. The bytes are those of the weights,
the cache and twice the states. Quantised matrices of one shape are copies of one random matrix: times do not depend on
the numbers, and memory never holds an unquantised model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longdraft import kernels
from longdraft.checkpoint.checkpoint import Loader
from longdraft.checkpoint.config_file import parse_config
from longdraft.checkpoint.tensor_names import StackedLinear, expected_shapes
from longdraft.kernels import Linear
from longdraft.kernels.cpu import _cpu
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.model.config import ModelConfig
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.system import machine
from longdraft_bench.cuda.random_models import RandomTensors

ROWS = (1, 2, 4, 8, 16)
_POLLING_S = 0.02  # for which PyTorch's threads may poll for their next work
_GEMMA4 = dict(model_type="gemma4_text", vocab_size=262144, head_dim=256, global_head_dim=512, sliding_window=1024,
               final_logit_softcapping=30.0, tie_word_embeddings=True, hidden_size_per_layer_input=0)
SHAPES: dict[str, dict[str, Any]] = {
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
    "gemma-4-31b": _GEMMA4 | dict(
        hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True),
    "gemma-4-26b-a4b": _GEMMA4 | dict(
        hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True, num_experts=128, top_k_experts=8,
        moe_intermediate_size=704),
    "gemma-4-e2b": _GEMMA4 | dict(
        hidden_size=1536, intermediate_size=6144, num_hidden_layers=35, num_attention_heads=8, num_key_value_heads=1,
        sliding_window=512, sliding_window_pattern=5, hidden_size_per_layer_input=256, num_kv_shared_layers=20,
        use_double_wide_mlp=True),
}


class RandomMatrices:
    """Random matrices in the format `quantize`, one after another."""

    def __init__(self, ops: CpuKernels, quantize: str) -> None:
        self._ops, self._quantize = ops, quantize
        self._patterns: dict[tuple[int, int, bool, str], CpuLinear] = {}

    def __call__(self, rows: int, columns: int, has_bias: bool = False, quantize: str | None = None) -> Linear:
        quantize = self._quantize if quantize is None else quantize
        if quantize == "none":
            return self._packed(rows, columns, has_bias, quantize)
        key = (rows, columns, has_bias, quantize)
        if key not in self._patterns:
            self._patterns[key] = self._packed(rows, columns, has_bias, quantize)
        new = self._ops.new_linear(quantize, rows, columns, has_bias)
        for part, pattern in zip(new.memory(), self._patterns[key].memory(), strict=True):
            part[:] = pattern
        return new

    def _packed(self, rows: int, columns: int, has_bias: bool, quantize: str) -> CpuLinear:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02)
        return self._ops.pack(weight, torch.zeros(rows) if has_bias else None, quantize=quantize)


class RandomLoader(Loader):
    """Builds a model of any family with random matrices."""

    def __init__(self, config: ModelConfig, ops: CpuKernels, quantize: str) -> None:
        super().__init__(RandomTensors(expected_shapes(config), ops), config, ops, quantize, None)
        self._matrices = RandomMatrices(ops, quantize)

    def _linear(self, layer: str, stacked: StackedLinear, order: Tensor | None = None) -> Linear:
        return self._matrices(sum(sum(rows) for _, rows in stacked.parts), stacked.columns, stacked.has_bias)

    def _table(self, name: str, shape: tuple[int, int] | None = None) -> Linear:
        rows, columns = shape or (self._config.vocab_size, self._config.hidden_size)
        return self._matrices(rows, columns, quantize="int8" if self._quantize == "int4" else self._quantize)


def operation_by_operation(model: Transformer) -> Transformer:
    other = copy.copy(model)
    other._decoder = LayerwiseDecoder(model.kernels, model.weights.layers, model.geometry)
    return other


def bytes_of(model: Transformer, rows: int, context: int) -> int:
    """Bytes that a forward reads, if its rows choose experts independently of each other."""
    layers, read = model.weights.layers, model.weights_bytes + context * model.cache_bytes_per_token
    for layer in layers:
        if layer.delta:
            read += 2 * 4 * layer.delta.shape.values * layer.delta.shape.key_dim
        if layer.experts:
            count, chosen = len(layer.experts.mlps), layer.experts.chosen
            one = sum(linear.nbytes for linear in layer.experts.mlps[0])
            read += int(one * (count * (1 - (1 - chosen / count) ** rows) - chosen))
    return read


def timed(models: Sequence[Transformer], rows: int, context: int, repeats: int, clock: Callable[[], float],
          bandwidth: Callable[[], float]) -> tuple[list[list[float]], list[float]]:
    """Milliseconds of forwards of `rows` rows after random keys, each of other tokens, and the bandwidth beside each.

    The models take turns.
    """
    cache = models[0].random_cache(context, 64)
    found: list[list[float]] = [[] for _ in models]
    rates = []
    for _ in range(repeats):
        rates.append(bandwidth())
        time.sleep(_POLLING_S)
        tokens = torch.randint(models[0].config.vocab_size, (rows,)).tolist()
        for model, times in zip(models, found, strict=True):
            start = clock()
            _ = model.forward(chain_rows(tokens, context), cache, rows).logits
            times.append((clock() - start) * 1e3)
            cache.commit([])
    return found, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantize", choices=["none", "int8", "int4"], default="none")
    parser.add_argument("--context", type=int, default=1024, help="positions in the KV cache; default: 1024")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--only-one-call", action="store_true", help="leave out the forwards operation by operation")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, for a machine that others use")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    _cpu.set_threads(given.threads)
    ops = kernels.choose("cpu", "bfloat16")
    if not isinstance(ops, CpuKernels):
        parser.error("the compiled kernels are missing")
    shape = SHAPES[given.shape]
    config = parse_config(shape | {"num_hidden_layers": given.layers or shape["num_hidden_layers"]})
    torch.manual_seed(0)
    fused = RandomLoader(config, ops, given.quantize).transformer()
    bandwidth = machine.bandwidth_probe(1 << 28)
    read = {rows: bytes_of(fused, rows, given.context) for rows in ROWS}
    print(f"one row reads {read[1] / 1e9:.2f} GB")
    clock = time.process_time if given.cpu_time else time.perf_counter
    for rows in given.rows:
        models = (fused, operation_by_operation(fused))[: 1 if given.only_one_call else 2]
        found, rates = timed(models, rows, given.context, given.repeats, clock, bandwidth)
        for name, times in zip(("one call", "operations"), found, strict=False):
            ms_by_rate = statistics.median(ms * rate / 1e3 for ms, rate in zip(times, rates, strict=True))
            print(f"{rows} rows, {name}: {statistics.median(times):.1f} ms at {statistics.median(rates) / 1e9:.1f} "
                  f"GB/s, {ms_by_rate / read[1]:.2f} of the floor of one row, {ms_by_rate / read[rows]:.2f} of theirs",
                  flush=True)
        if given.only_one_call:
            continue
        ratio = statistics.median(slow / fast for fast, slow in zip(*found, strict=True))
        print(f"{rows} rows: operation by operation takes {ratio:.2f} times as long, the median of turns", flush=True)


if __name__ == "__main__":
    main()
