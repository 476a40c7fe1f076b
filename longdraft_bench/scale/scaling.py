"""The time of a step of a model on several GPUs, from bytes, operations and links; `longdraft bench scale step`.

    longdraft bench scale step                                    # H100s with NVLink; the tables of docs/scale.md
    longdraft bench scale step --memory 48 --bandwidth 0.864 --tflops 181 --link 25 --latency 30

The limits of the GPUs (--bandwidth, --tflops, --link) are their makers' figures; the latency is assumed. The share of
the bandwidth that a step reaches is the one measured for the CPU kernels with nothing cached (roofline.json, its
longest context). It is not measured on GPUs yet.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

from longdraft.checkpoint import config_file, sizing
from longdraft.model import config
from longdraft.report.table import Table
from longdraft_bench.document import RESULTS, in_checkout
from longdraft_bench.models.shapes import SHAPES

_MODELS = ("qwen2.5-32b", "llama-3.1-70b")
_CONTEXTS = (4096, 100_000)
_TWO_STEP_SUM = 1 << 18  # numbers from which a sum takes two messages (longdraft/parallel/group.py)
ROWS = 10  # of a draft tree


@dataclass(frozen=True)
class Machine:
    """GPUs and their links.

    memory      bytes
    bandwidth   bytes/s of the memory
    operations  bfloat16 operations/s
    link        bytes/s in each direction
    latency     seconds of a message
    """

    memory: float
    bandwidth: float
    operations: float
    link: float
    latency: float


@dataclass(frozen=True)
class Step:
    """Seconds of one forward by memory, arithmetic and links. Memory and arithmetic overlap."""

    memory: float
    arithmetic: float
    links: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.arithmetic) + self.links


H100 = Machine(80e9, 3.35e12, 989e12, 450e9, 15e-6)  # its maker's figures with NVLink 4; the latency is assumed


@functools.cache
def measured_share() -> float:
    """The share of the memory's bandwidth that a plain step reached at the longest context."""
    contexts = json.loads(in_checkout(RESULTS / "roofline.json").read_text(encoding="utf-8"))["contexts"]
    return float(max(contexts, key=lambda record: record["context"])["share_of_floor_cold"])


def step(name: str, gpus: int, context: int, machine: Machine, rows: int = 1, texts: int = 1) -> Step:
    """A forward of `rows` rows for each of `texts` texts, each with its own context."""
    shape = config_file.parse_config(SHAPES[name])
    size = sizing.model_sizes(shape)
    read = size.read_bytes + texts * context * size.cache_bytes_per_token
    rows *= texts
    attention_output = 4 * rows * context * shape.num_layers * shape.num_heads * shape.head_dim
    operations = 2 * rows * size.parameters + attention_output
    return Step(read / gpus / (machine.bandwidth * measured_share()), operations / gpus / (machine.operations / 2),
                links(shape, gpus, rows, machine))


def links(shape: config.ModelConfig, gpus: int, rows: int, machine: Machine) -> float:
    """Seconds for two float32 sums per layer and one for the embedding, the logits, and one message of rank 0."""
    if gpus == 1:
        return 0.0
    numbers = rows * shape.hidden_size
    if numbers < _TWO_STEP_SUM:
        a_sum = machine.latency + (gpus - 1) * numbers * 4 / machine.link
    else:
        a_sum = 2 * machine.latency + 2 * (gpus - 1) / gpus * numbers * 4 / machine.link
    logits = machine.latency + (gpus - 1) / gpus * rows * shape.vocab_size * 4 / machine.link
    return (2 * shape.num_layers + 1) * a_sum + logits + machine.latency


def texts_that_fit(name: str, gpus: int, context: int, machine: Machine) -> int:
    """How many texts of this length fit beside the weights. A tenth of the memory is left for everything else."""
    size = sizing.model_sizes(config_file.parse_config(SHAPES[name]))
    room = 0.9 * gpus * machine.memory - size.weights_bytes
    return max(0, int(room // (context * size.cache_bytes_per_token)))


def table(machine: Machine) -> Table:
    columns = ["model", "GPUs", "context", "texts that fit", "memory, ms", "arithmetic", "links", "tokens/s, plain",
               "to one GPU", f"{ROWS} rows cost", "all texts, tokens/s"]
    rows = [_row(name, gpus, context, machine) for name in _MODELS for gpus in (1, 2, 4, 8) for context in _CONTEXTS]
    return Table("A step of a model on several GPUs, computed", columns, rows)


def _row(name: str, gpus: int, context: int, machine: Machine) -> list[str]:
    plain = step(name, gpus, context, machine)
    alone = step(name, 1, context, machine)
    fit = texts_that_fit(name, gpus, context, machine)
    return [name, str(gpus), f"{context:,}", str(fit) if fit else "-", f"{plain.memory * 1e3:.1f}",
             f"{plain.arithmetic * 1e3:.2f}", f"{plain.links * 1e3:.1f}", f"{1 / plain.seconds:.0f}",
             f"{alone.seconds / plain.seconds:.2f}",
             f"{step(name, gpus, context, machine, ROWS).seconds / plain.seconds:.2f}",
             f"{fit / step(name, gpus, context, machine, texts=fit).seconds:,.0f}" if fit else "-"]
