"""`longdraft bench machine`, `kernels` and `roofline`: what this machine can do, and what of it is reached.

    longdraft bench kernels --output kernels.json
    longdraft bench roofline --plot roofline.svg
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from longdraft.bench.options import (
    Contexts,
    Dtype,
    Memory,
    Model,
    Output,
    Plot,
    Quantize,
    Repeats,
    Threads,
    checked_quantize,
    choose,
    machine_limits,
    numbers,
    prepare,
)
from longdraft.errors import check


def machine(threads: Threads = None, repeats: Repeats = 9, memory: Memory = 2.0, output: Output = None) -> None:
    """Measure what this machine can do at most: read bandwidth, and arithmetic of matrix products."""
    from longdraft.bench import machine, report

    size = prepare(threads, repeats, memory)
    with report.document(output) as filled:
        limits = machine_limits(size, repeats)
        filled |= {"bench": "machine", "machine": machine.describe() | limits.details}
        for name in ("processor", "threads"):
            print(f"{name}: {filled['machine'][name]}")


def kernels(
    model: Model = "novelist",
    dtype: Dtype = "bfloat16",
    positions: Annotated[int, typer.Option(help="Keys and values that attention reads.")] = 100_000,
    heads: Annotated[int | None, typer.Option(
        help="Query heads; this and the next two: default the model's, and 8 over 2 of 64.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,2,4,8,16,32",
    prefill_rows: Annotated[int, typer.Option(help="Rows of a prompt's chunk, measured too; 0: none.")] = 512,
    shapes: Annotated[str | None, typer.Option(
        help="Weights as NxK,NxK; default: the model's and those of a 1.5B and an 8B model.")] = None,
    contexts: Contexts = "1024,8192,32768,100000",
    quantize: Quantize = "none",
    threads: Threads = None, repeats: Repeats = 9, memory: Memory = 2.0, output: Output = None,
) -> None:
    """Measure each kernel by itself, by rows, as a part of the machine's limits.

    LONGDRAFT_KERNELS chooses the kernels. Attention and linear read stores and weights in rotation.
    """
    from longdraft.bench import decode, kernels, machine, report, tables
    from longdraft.bench.kernels import Shape, Sizes
    from longdraft.kernels import single_threaded_torch

    counts, lengths = numbers("--rows", rows, 512), numbers("--contexts", contexts, 10**8)
    check(1 <= positions <= 10**8, "--positions", positions, "1 to 100000000")
    check(0 <= prefill_rows <= 4096, "--prefill-rows", prefill_rows, "0 to 4096")
    size = prepare(threads, repeats, memory)
    chosen = choose(dtype)
    models = decode.Models(model, chosen, checked_quantize(quantize))
    models.check(lengths, 1)
    config = models.config
    own = Shape(config.num_heads, config.num_kv_heads, config.head_dim)
    asked = Shape(heads or own.heads, kv_heads or own.kv_heads, head_dim or own.head_dim)
    _check_shape(asked)
    attention_output = [asked] if (heads, kv_heads, head_dim) != (None, None, None) else [own, Shape(8, 2, 64)]
    weights = _shapes(shapes) if shapes else kernels.model_shapes(model, config) | kernels.LINEAR_SHAPES
    with report.document(output) as filled, ExitStack() as stack:
        limits = machine_limits(size, repeats)
        stack.enter_context(single_threaded_torch(chosen))
        filled |= {"bench": "kernels", "machine": machine.describe(chosen) | limits.details, "model": model,
                   "quantize": quantize, "repeats": repeats, "parents": "chain", "attention": [], "linear": []}
        sizes = Sizes(counts, prefill_rows, positions, size, repeats, quantize == "int8")
        for shape in attention_output:
            with report.doing(f"attention {shape.heads} heads over {shape.kv_heads} of {shape.head_dim}"):
                filled["attention"] += kernels.attention(chosen, shape, sizes, limits)
        tables.attention(filled["attention"])
        for name, weight in weights.items():
            with report.doing(f"linear {name}"):
                filled["linear"] += kernels.linear(chosen, name, weight, sizes, limits)
        tables.linear(filled["linear"])
        filled["row_wise"] = kernels.row_wise(chosen, config, sizes)
        tables.row_wise(filled["row_wise"])
        with report.doing("forwards"):
            filled["forward"] = decode.breakdown(models, lengths, size, repeats, limits)
        tables.forward(filled["forward"])


def roofline(
    model: Model = "novelist",
    dtype: Dtype = "bfloat16",
    contexts: Contexts = "1024,8192,32768,100000",
    rows: Annotated[str, typer.Option(help="Numbers of rows of a forward; one is measured anyway.")] = "1,2,4,8,16",
    plot: Plot = None,
    quantize: Quantize = "none",
    threads: Threads = None, repeats: Repeats = 9, memory: Memory = 2.0, output: Output = None,
) -> None:
    """Measure steps of plain decoding against their floor: the bytes of weights and cache over read bandwidth.

    Contexts are reached by random keys and values in the cache, without a prefill.
    """
    from longdraft.bench import decode, machine, report, roofline, tables
    from longdraft.bench import plot as plots
    from longdraft.kernels import single_threaded_torch

    counts, lengths = sorted({1, *numbers("--rows", rows, 512)}), numbers("--contexts", contexts, 10**8)
    if plot:
        plots.check(plot)
    size = prepare(threads, repeats, memory)
    models = decode.Models(model, choose(dtype), checked_quantize(quantize))
    models.check(lengths, roofline.STEPS_PER_REPEAT * repeats + max(counts))
    with report.document(output) as filled, ExitStack() as stack:
        limits = machine_limits(size, repeats)
        stack.enter_context(single_threaded_torch(models.kernels))
        filled |= {"bench": "roofline", "machine": machine.describe(models.kernels) | limits.details, "model": model,
                   "quantize": quantize, "repeats": repeats, "cache": "random", "sampling": decode.sampling(),
                   "contexts": []}
        for context in lengths:
            with report.doing(f"{context:,} tokens of context"):
                filled["contexts"].append(roofline.measure(models, context, counts, size, repeats, limits))
        tables.roofline(filled["contexts"])
        if plot:
            plots.roofline(filled, plot)


def _shapes(text: str) -> dict[str, tuple[int, int]]:
    """'64x32,8x8' -> {"64x32": (64, 32), "8x8": (8, 8)}"""
    found = {}
    for part in text.split(","):
        n, _, k = part.strip().partition("x")
        right = n.isdecimal() and k.isdecimal() and 1 <= int(n) <= 1 << 20 and 1 <= int(k) <= 1 << 20
        check(right, "--shapes", text, "NxK with commas between them, such as 4096x4096,14336x4096")
        found[part.strip()] = (int(n), int(k))
    return found


def _check_shape(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    check(1 <= heads <= 1024, "--heads", heads, "1 to 1024")
    check(1 <= kv_heads <= heads and heads % kv_heads == 0, "--kv-heads", kv_heads, f"a divisor of {heads} heads")
    check(2 <= dim <= 1024 and dim % 2 == 0, "--head-dim", dim, "an even number up to 1024")
