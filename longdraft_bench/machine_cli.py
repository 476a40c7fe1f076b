"""`longdraft bench machine`, `kernels`, `roofline`, `perplexity`, `context` and `cuda`: this machine and a model on it.

    longdraft bench kernels --output kernels.json
    longdraft bench roofline --plot roofline.svg
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import UsageError, check
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
    settings,
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
    from longdraft_bench import decode
    from longdraft_bench import kernels as bench
    from longdraft_bench.document import choose_kernels, document, measure_limits, prepare_run, status

    counts, lengths = numbers("--rows", rows, 512), numbers("--contexts", contexts)
    within("--positions", positions, 1, MAX_TOKENS)
    within("--prefill-rows", prefill_rows, 0, 4096)
    nbytes = prepare_run(threads, repeats, memory)
    chosen = choose_kernels(dtype)
    models = decode.ModelCopies(model, chosen, checked_quantize(quantize))
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
            filled["forward"] = [decode.forward_parts(models, length, nbytes, repeats, limits) for length in lengths]
        decode.forward_table(filled["forward"]).show()


def _linear_shapes(text: str) -> dict[str, tuple[int, int]]:
    """'64x32,8x8' -> {"64x32": (64, 32), "8x8": (8, 8)}"""
    found = {}
    for part in text.split(","):
        n, _, k = part.strip().partition("x")
        is_valid = n.isdecimal() and k.isdecimal() and 1 <= int(n) <= 1 << 20 and 1 <= int(k) <= 1 << 20
        check(is_valid, "--shapes", text, "NxK with commas between them, such as 4096x4096,14336x4096")
        found[part.strip()] = (int(n), int(k))
    return found


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
    from longdraft.report import figures
    from longdraft_bench import decode
    from longdraft_bench.document import choose_kernels, document, measure_limits, prepare_run, status

    counts, lengths = sorted({1, *numbers("--rows", rows, 512)}), numbers("--contexts", contexts)
    if plot:
        figures.check_plot(plot)
    nbytes = prepare_run(threads, repeats, memory)
    models = decode.ModelCopies(model, choose_kernels(dtype), checked_quantize(quantize))
    models.check(lengths, decode.STEPS_PER_REPEAT * repeats + max(counts))
    with (document("roofline", output, models.kernels, model=model, quantize=quantize, repeats=repeats, cache="random",
                   sampling=asdict(decode.STEP_SAMPLING), contexts=[]) as filled, ExitStack() as stack):
        limits = measure_limits(nbytes, repeats, filled)
        stack.enter_context(single_threaded_torch(models.kernels))
        for context in lengths:
            with status(f"{context:,} tokens of context"):
                filled["contexts"].append(decode.measure_roofline(models, context, counts, nbytes, repeats, limits))
        for table in decode.roofline_tables(filled["contexts"]):
            table.show()
        if plot:
            figures.save_figure(figures.roofline(filled), plot)


def perplexity(
    text: Annotated[Path, typer.Option(help="A text file that the model was not trained on.")],
    model: ModelOption = "novelist",
    dtype: DtypeOption = "bfloat16",
    quantize: Annotated[str, typer.Option(help="Settings to compare, separated by spaces: none, int8, int4.")
                        ] = "none int8",
    context: Annotated[int, typer.Option(help="Tokens of a window; each window is read by itself.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read, at most.")] = 32_768,
    threads: ThreadsOption = None, repeats: RepeatsOption = 9, output: OutputOption = None,
) -> None:
    """Measure the cost and the gain of quantisation: nats per token of a text, memory of the weights, speed.

    The speed is that of plain decoding after a window of random keys and values, in turns.
    """
    from longdraft.kernels import single_threaded_torch
    from longdraft_bench import decode, perplexity
    from longdraft_bench.document import choose_kernels, document, prepare_run, status

    within("--context", context, 2, MAX_TOKENS)
    check(context <= tokens <= 10**9, "--tokens", tokens, f"{context} (a window) to 1000000000")
    chosen_settings = [checked_quantize(setting) for setting in settings("--quantize", quantize)]
    prepare_run(threads, repeats)
    chosen = choose_kernels(dtype)
    ids = perplexity.encode_file(model, text, tokens, context, f"{context} (a window) or more")
    models = [decode.ModelCopies(model, chosen, setting) for setting in chosen_settings]
    models[0].check([context], decode.steps_written(perplexity.STEPS_PER_TURN, repeats))
    with document("perplexity", output, chosen, model=model, context=context, tokens=len(ids),
                  repeats=repeats) as filled:
        with status("perplexity"), single_threaded_torch(chosen):
            filled["settings"] = perplexity.by_quantization(models, ids, context, repeats)
        perplexity.quantization_table(filled["settings"]).show()


def context(
    text: Annotated[list[Path], typer.Option(help="A text file that the model was not trained on; repeatable.")],
    model: ModelOption = "novelist", dtype: DtypeOption = "bfloat16",
    edges: Annotated[str, typer.Option(help="Ends of the stretches that are averaged, tokens; with commas.")] =
        "1024,8192,32768,65536,100000",
    threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Measure how well a model uses a long context: nats per token by place in whole texts."""
    from longdraft.checkpoint import checkpoint, config_file, hub
    from longdraft.checkpoint.tensor_files import TensorFiles
    from longdraft.kernels import single_threaded_torch
    from longdraft_bench import perplexity
    from longdraft_bench.document import choose_kernels, document, prepare_run, status

    places = numbers("--edges", edges)
    check(places == sorted(set(places)), "--edges", edges, "numbers that rise")
    prepare_run(threads, 1)
    chosen = choose_kernels(dtype)
    folder = hub.resolve(model)
    config = config_file.read_config(folder)
    last = places[-1]
    check(last < config.max_positions, "--edges", last, f"less than the model's context ({config.max_positions})")
    texts = [perplexity.encode_file(model, path, last + 1, last + 1, f"at least {last + 1}, one beyond the edges")
             for path in text]
    loaded = checkpoint.load_transformer(TensorFiles(folder), config, chosen)
    with document("context", output, chosen, model=model, texts=len(texts)) as filled:
        with status("context"), single_threaded_torch(chosen):
            filled["stretches"] = perplexity.by_place(loaded, texts, places)
        perplexity.place_table(filled["stretches"]).show()


def cuda(
    output: Annotated[Path, typer.Option(help="Folder of the JSON documents, one for each slice. A document that is "
                                              "there is continued.")],
    slices: Annotated[str, typer.Option(
        help="Slices to measure, in order: first, length, kernels, families, whole.")] = "first",
    previous: Annotated[Path | None, typer.Option(help="Folder of an earlier visit, which is continued in --output.")
                        ] = None,
    limit: Annotated[float | None, typer.Option(
        help="Seconds for each slice. Default: 330, 330, 360, 480 and 540 for the five slices.")] = None,
    prompt_file: Annotated[Path, typer.Option(help="A text that the stretched models continue.")] =
        Path("examples/chapter.txt"),
    force: Annotated[bool, typer.Option("--force", help="Measure speed although rows of trees differ.")] = False,
    interpret: Annotated[bool, typer.Option(
        "--interpret", help="Test the command: the smallest sizes on the CPU, in Triton's interpreter.")] = False,
) -> None:
    """Use a visit to a CUDA device in full: exactness, texts after long prompts, speed, a text of 100,000 tokens.

    Each part is written as soon as it is measured, and may crash or hang without harm to the others. Run the command
    again to measure what is missing; after a change of the kernels, all of it.
    """
    import torch

    from longdraft_bench.cuda import visit
    from longdraft_bench.cuda.plan import LIMITS_S, SLICES

    chosen = settings("--slices", slices)
    for name in chosen:
        check(name in SLICES, "--slices", name, ", ".join(SLICES))
    within("--limit", 10 if limit is None else limit, 10, 86400, "seconds")
    if not interpret and not torch.cuda.is_available():
        raise UsageError("PyTorch finds no CUDA device; run this on a machine that has one, or test the command "
                         "itself with --interpret")
    if not interpret and not prompt_file.is_file():
        raise UsageError(f"--prompt-file {prompt_file} does not exist; name a text file")
    given = visit.Visit(output, previous, "interpret" if interpret else "device", str(prompt_file), force)
    given.run(chosen, {name: LIMITS_S[name] if limit is None else limit for name in chosen})
