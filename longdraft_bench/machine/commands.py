"""The commands of `longdraft bench` that measure this machine and a model's steps on it.

    longdraft bench kernels --output kernels.json
    longdraft bench roofline --plot roofline.svg
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import check
from longdraft_bench.options import (
    MAX_TOKENS,
    ContextsOption,
    DtypeOption,
    MemoryOption,
    ModelOption,
    OutputOption,
    PlotOption,
    QuantizeOption,
    RepeatsOption,
    ThreadsOption,
    checked_quantize,
    numbers,
    within,
)

_CONTEXTS = "1024,8192,32768,100000"


def machine(threads: ThreadsOption = None, repeats: RepeatsOption = 9, memory: MemoryOption = 2.0,
            output: OutputOption = None) -> None:
    """Measure the limits of this machine: read bandwidth, and arithmetic of matrix products."""
    from longdraft_bench.document import document, measure_limits, prepare_run

    nbytes = prepare_run(threads, repeats, memory)
    with document("machine", output) as filled:
        measure_limits(nbytes, repeats, filled)
        for name in ("processor", "threads"):
            print(f"{name}: {filled['machine'][name]}")


def kernels(
    model: ModelOption = "novelist",
    dtype: DtypeOption = "bfloat16",
    positions: Annotated[int, typer.Option(help="Keys and values that attention reads.")] = 100_000,
    heads: Annotated[int | None, typer.Option(
        help="Query heads; this and the next two: default the model's, and 8 over 2 of 64.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of keys and values.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "1,2,4,8,16,32",
    prefill_rows: Annotated[int, typer.Option(help="Rows of a prompt's chunk, measured too; 0: none.")] = 512,
    shapes: Annotated[str | None, typer.Option(
        help="Weights as NxK,NxK; default: the model's and those of models of 0.5B, 1.5B and 8B.")] = None,
    contexts: ContextsOption = _CONTEXTS,
    quantize: QuantizeOption = "none",
    threads: ThreadsOption = None, repeats: RepeatsOption = 9, memory: MemoryOption = 2.0,
    output: OutputOption = None,
) -> None:
    """Measure each kernel by itself, by rows, as a share of the machine's limits.

    LONGDRAFT_KERNELS selects the kernels. Attention and linear rotate through several stores and weights.
    """
    from longdraft.kernels import single_threaded_torch
    from longdraft_bench.document import choose_kernels, document, measure_limits, prepare_run, status
    from longdraft_bench.machine import kernels as bench
    from longdraft_bench.machine import roofline

    counts, lengths = numbers("--rows", rows, 512), numbers("--contexts", contexts)
    within("--positions", positions, 1, MAX_TOKENS)
    within("--prefill-rows", prefill_rows, 0, 4096)
    nbytes = prepare_run(threads, repeats, memory)
    chosen = choose_kernels(dtype)
    models = roofline.ModelCopies(model, chosen, checked_quantize(quantize))
    models.check(lengths, 1)
    config = models.config
    attention_shapes = [bench.AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim)]
    if (heads, kv_heads, head_dim) == (None, None, None):
        attention_shapes.append(bench.AttentionShape(8, 2, 64))
    else:
        given = zip((heads, kv_heads, head_dim), attention_shapes[0], strict=True)
        attention_shapes = [bench.AttentionShape(*(value or own for value, own in given))]
        _check_attention_shape(*attention_shapes[0])
    weights = _linear_shapes(shapes) if shapes else bench.linear_shapes(model, config) | bench.LINEAR_SHAPES
    plan = bench.KernelPlan(counts, prefill_rows, positions, nbytes, repeats, checked_quantize(quantize))
    with (document("kernels", output, chosen, model=model, quantize=quantize, repeats=repeats, parents="chain",
                   attention=[], linear=[]) as filled, ExitStack() as stack):
        limits = measure_limits(nbytes, repeats, filled)
        stack.enter_context(single_threaded_torch(chosen))
        for shape in attention_shapes:
            with status(f"attention {shape.heads} heads over {shape.kv_heads} of {shape.head_dim}"):
                filled["attention"] += bench.measure_attention(chosen, shape, plan, limits)
        bench.attention_table(filled["attention"]).show()
        for name, weight in weights.items():
            with status(f"linear {name}"):
                filled["linear"] += bench.measure_linear(chosen, name, weight, plan, limits)
        bench.linear_table(filled["linear"]).show()
        filled["row_wise"] = bench.measure_row_wise(chosen, config, plan)
        bench.row_wise_table(filled["row_wise"]).show()
        with status("forwards"):
            filled["forward"] = [roofline.forward_parts(models, length, nbytes, repeats, limits) for length in lengths]
        roofline.forward_table(filled["forward"]).show()


def _linear_shapes(text: str) -> dict[str, tuple[int, int]]:
    """'64x32,8x8' -> {"64x32": (64, 32), "8x8": (8, 8)}"""
    shapes = {}
    for part in text.split(","):
        n, _, k = part.strip().partition("x")
        is_valid = n.isdecimal() and k.isdecimal() and 1 <= int(n) <= 1 << 20 and 1 <= int(k) <= 1 << 20
        check(is_valid, "--shapes", text, "NxK with commas between them, such as 4096x4096,14336x4096")
        shapes[part.strip()] = (int(n), int(k))
    return shapes


def _check_attention_shape(heads: int, kv_heads: int, head_dim: int) -> None:
    within("--heads", heads, 1, 1024)
    check(1 <= kv_heads <= heads and heads % kv_heads == 0, "--kv-heads", kv_heads, f"a divisor of {heads} heads")
    check(2 <= head_dim <= 1024 and head_dim % 2 == 0, "--head-dim", head_dim, "an even number up to 1024")


def roofline(
    model: ModelOption = "novelist",
    dtype: DtypeOption = "bfloat16",
    contexts: ContextsOption = _CONTEXTS,
    rows: Annotated[str, typer.Option(help="Numbers of rows of a forward; 1 is always measured.")] = "1,2,4,8,16",
    plot: PlotOption = None,
    quantize: QuantizeOption = "none",
    threads: ThreadsOption = None, repeats: RepeatsOption = 9, memory: MemoryOption = 2.0,
    output: OutputOption = None,
) -> None:
    """Measure steps of plain decoding beside their floor: bytes of weights and cache over read bandwidth.

    Contexts are reached by random keys and values in the cache, without a prefill.
    """
    from dataclasses import asdict

    from longdraft.kernels import single_threaded_torch
    from longdraft_bench import figures
    from longdraft_bench.document import choose_kernels, document, measure_limits, prepare_run, status
    from longdraft_bench.machine import roofline

    counts, lengths = sorted({1, *numbers("--rows", rows, 512)}), numbers("--contexts", contexts)
    if plot:
        figures.check_plot(plot)
    nbytes = prepare_run(threads, repeats, memory)
    models = roofline.ModelCopies(model, choose_kernels(dtype), checked_quantize(quantize))
    models.check(lengths, roofline.STEPS_PER_REPEAT * repeats + max(counts))
    with (document("roofline", output, models.kernels, model=model, quantize=quantize, repeats=repeats, cache="random",
                   sampling=asdict(roofline.STEP_SAMPLING), contexts=[]) as filled, ExitStack() as stack):
        limits = measure_limits(nbytes, repeats, filled)
        stack.enter_context(single_threaded_torch(models.kernels))
        for context in lengths:
            with status(f"{context:,} tokens of context"):
                filled["contexts"].append(roofline.measure_roofline(models, context, counts, nbytes, repeats, limits))
        for table in roofline.roofline_tables(filled["contexts"]):
            table.show()
        if plot:
            figures.save_figure(figures.roofline(filled), plot)


def memory(
    model: Annotated[str, typer.Argument(help="Bundled name, model folder or hub id.")],
    prompt_file: Annotated[Path, typer.Option(help="The prompt, a text file.")],
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 1000,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 64,
    quantize: QuantizeOption = "none",
    drafter: Annotated[str, typer.Option(help="The drafter.")] = "plain",
    threads: Annotated[int, typer.Option(help="Threads.")] = 2,
    output: OutputOption = None,
) -> None:
    """Measure where the memory of a process is: with the model loaded, after the prompt, after the text."""
    from longdraft.system.files import read_prompt
    from longdraft_bench.document import document
    from longdraft_bench.machine import memory

    plan = memory.MemoryPlan(model, prefill, max_new_tokens, checked_quantize(quantize), drafter, threads)
    text = read_prompt(None, str(prompt_file))
    with document("memory", output, model=model, quantize=quantize, drafter=drafter) as filled:
        filled |= memory.measure(plan, text)
        memory.table(filled).show()


def forwards(
    shape: Annotated[str, typer.Option(help="Name of a hybrid, mixture of experts or Gemma.")] = "qwen3.5-0.8b",
    layers: Annotated[int | None, typer.Option(help="Number of layers; default: all.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows of a forward.")] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(help="Positions in the KV cache.")] = 1024,
    quantize: QuantizeOption = "none",
    only_one_call: Annotated[bool, typer.Option("--only-one-call", help="Leave out the forwards operation by "
                                                                        "operation.")] = False,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="Count CPU time, for a machine that others use.")
                        ] = False,
    threads: ThreadsOption = 1, repeats: RepeatsOption = 10, output: OutputOption = None,
) -> None:
    """Time forwards of a random model of another family, in one compiled call and operation by operation."""
    from longdraft_bench.document import choose_kernels, document, prepare_run
    from longdraft_bench.machine import forwards
    from longdraft_bench.models.shapes import FAMILY_SHAPES

    check(shape in FAMILY_SHAPES, "--shape", shape, ", ".join(FAMILY_SHAPES))
    counts = numbers("--rows", rows, 512)
    prepare_run(threads, repeats)
    plan = forwards.ForwardsPlan(FAMILY_SHAPES[shape], layers, checked_quantize(quantize), counts, context, repeats,
                                 only_one_call, cpu_time)
    chosen = choose_kernels("bfloat16")
    with document("forwards", output, chosen, shape=shape, layers=layers, quantize=quantize, context=context,
                  repeats=repeats) as filled:
        filled["rows"] = forwards.measure(plan, chosen)
        forwards.table(filled["rows"]).show()


def eagle_cost(
    model: ModelOption = "novelist",
    contexts: ContextsOption = "1024,8192",
    draft_vocab: Annotated[int, typer.Option(help="Tokens among which the head guesses, at most.")] = 32_000,
    quantize: Annotated[str, typer.Option(help="Format of the head's layer: none, int8 or int4.")] = "int4",
    target_quantize: Annotated[str, typer.Option(help="Format of the model: none, int8 or int4.")] = "none",
    chain: Annotated[int, typer.Option(help="Drafts of a chain.")] = 5,
    repeats: RepeatsOption = 15, threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Time a draft step of an EAGLE head of random weights beside a plain step of its model."""
    from longdraft.engine.loading import load
    from longdraft_bench.document import document, prepare_run
    from longdraft_bench.machine import eagle_cost

    lengths, of_layer = numbers("--contexts", contexts), checked_quantize(quantize)
    prepare_run(threads, repeats)
    target = load(model, drafter="plain", threads=threads, cache_ram=0,
                  quantize=checked_quantize(target_quantize)).model
    with document("eagle cost", output, target.kernels, model=model, draft_vocabulary=draft_vocab, quantize=of_layer,
                  target_quantize=target_quantize, chain=chain, repeats=repeats) as filled:
        filled["rows"] = eagle_cost.measure(target, lengths, draft_vocab, of_layer, chain, repeats)
        eagle_cost.table(filled["rows"]).show()


def block_cost(
    model: ModelOption = "novelist",
    contexts: ContextsOption = "1024,8192",
    layers: Annotated[int, typer.Option(help="Layers of the head.")] = 5,
    rows: Annotated[int, typer.Option(help="Rows of a block.")] = 8,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that an output head of its own guesses among; 0: the model's "
                                                  "output head.")] = 32_000,
    rank: Annotated[int, typer.Option(help="Rank of DSpark's Markov head; 0: none.")] = 0,
    quantize: Annotated[str, typer.Option(help="Format of the head's layers: none, int8 or int4.")] = "int4",
    target_quantize: Annotated[str, typer.Option(help="Format of the model: none, int8 or int4.")] = "none",
    repeats: RepeatsOption = 15, threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Time a draft of a block head of random weights beside a plain step of its model."""
    from longdraft.engine.loading import load
    from longdraft_bench.document import document, prepare_run
    from longdraft_bench.machine import block_cost
    from longdraft_bench.models.random_weights import BlockShape

    lengths = numbers("--contexts", contexts)
    check(1 <= layers <= 64, "--layers", layers, "1 to 64")
    check(2 <= rows <= 64, "--rows", rows, "2 to 64")
    check(draft_vocab >= 0, "--draft-vocab", draft_vocab, "0 or more")
    check(0 <= rank <= 4096, "--rank", rank, "0 to 4096")
    shape = BlockShape(layers, rows, draft_vocab, checked_quantize(quantize), rank)
    prepare_run(threads, repeats)
    target = load(model, drafter="plain", threads=threads, cache_ram=0,
                  quantize=checked_quantize(target_quantize)).model
    with document("block cost", output, target.kernels, model=model, repeats=repeats, target_quantize=target_quantize,
                  **shape._asdict()) as filled:
        filled["rows"] = block_cost.measure(target, lengths, shape, repeats)
        block_cost.table(filled["rows"]).show()
