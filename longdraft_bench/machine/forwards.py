"""Forwards of random hybrids, mixtures of experts and Gemmas, in one compiled call and operation by operation;
`longdraft bench forwards`.

    longdraft bench forwards --threads 2 --quantize none
    longdraft bench forwards --threads 2 --quantize int4 --shape qwen3-30b-a3b --layers 24

Reported are median milliseconds for 1 to 16 rows of different tokens, and their ratio to two floors: the bytes that one
row reads, and those that so many independent rows read, at the bandwidth that the machine has in the same turn: that of
a shared machine changes from second to second. Each ratio is the median of turns. The bytes are those of the weights,
the cache and twice the states.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from longdraft.checkpoint.config_file import parse_config
from longdraft.drafters.auto.calibration import random_cache
from longdraft.errors import UsageError
from longdraft.kernels import Kernels
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.layer import LayerwiseDecoder
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.system import machine
from longdraft_bench.models.random_weights import patterned_model
from longdraft_bench.models.shapes import cut
from longdraft_bench.timing import in_rounds, median_ratio

_POLLING_S = 0.02  # for which PyTorch's threads may poll for their next work
_READ_BYTES = 1 << 28  # of a measurement of the bandwidth
_READ_ROUNDS = 4


class ForwardsPlan(NamedTuple):
    """The measurements to make.

    shape          entries of a config.json
    layers         number of layers; None: all
    rows           numbers of rows
    context        positions in the KV cache
    only_one_call  leave out the forwards operation by operation
    cpu_time       count CPU time
    """

    shape: dict[str, Any]
    layers: int | None
    quantize: str
    rows: Sequence[int]
    context: int
    repeats: int
    only_one_call: bool
    cpu_time: bool


def measure(plan: ForwardsPlan, chosen: Kernels) -> list[Record]:
    """A record for each number of rows and way of computing. Raises UsageError without the compiled kernels."""
    if not isinstance(chosen, CpuKernels):
        raise UsageError("the compiled kernels are missing; longdraft doctor says why")
    config = parse_config(plan.shape if plan.layers is None else cut(plan.shape, plan.layers))
    torch.manual_seed(0)
    one_call = patterned_model(config, chosen, plan.quantize)
    models = {"one call": one_call}
    if not plan.only_one_call:
        models["operations"] = operation_by_operation(one_call)
    return [record for rows in plan.rows for record in _measure_rows(plan, models, rows)]


def _measure_rows(plan: ForwardsPlan, models: dict[str, Transformer], rows: int) -> list[Record]:
    """Forwards of `rows` rows after random keys, each of other tokens, beside the bandwidth in the same turn."""
    target = models["one call"]
    cache = random_cache(target, plan.context, 64)
    clock = time.process_time if plan.cpu_time else time.perf_counter

    def bandwidth() -> float:
        rates = machine.read_rates(machine.affordable(_READ_BYTES), _READ_ROUNDS)
        time.sleep(_POLLING_S)
        return max(rates.values())

    def forward_ms(model: Transformer) -> float:
        tokens = torch.randint(target.config.vocab_size, (rows,)).tolist()
        began = clock()
        _ = model.forward(chain_rows(tokens, plan.context), cache, rows).logits
        ms = (clock() - began) * 1e3
        cache.commit([])
        return ms

    cases: dict[str, Callable[[], float]] = {"bandwidth": bandwidth, **{
        name: partial(forward_ms, model) for name, model in models.items()}}
    samples = in_rounds(cases, plan.repeats)
    rates = samples.pop("bandwidth")
    floors = [bytes_of(target, count, plan.context) for count in (1, rows)]
    records = []
    for name, times in samples.items():
        read = statistics.median(ms * rate / 1e3 for ms, rate in zip(times, rates, strict=True))
        records.append({"rows": rows, "computed": name, "ms": statistics.median(times),
                        "read_bandwidth_gb_per_s": statistics.median(rates) / 1e9,
                        "of_one_row": read / floors[0], "of_all_rows": read / floors[1],
                        "to_one_call": median_ratio(times, samples["one call"])})
    return records


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


def table(records: Sequence[Record]) -> Table:
    return Table.of_records("Forwards", (
        ("rows", "rows", ""), ("computed", "computed", ""), ("ms", "ms", ".1f"),
        ("GB/s", "read_bandwidth_gb_per_s", ".1f"), ("of the floor of one row", "of_one_row", ".2f"),
        ("of theirs", "of_all_rows", ".2f"), ("to one call", "to_one_call", ".2f")), records)
