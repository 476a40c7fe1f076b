"""`longdraft bench replay`, `length`, `perplexity` and `context`: what drafters and models make of texts.

    longdraft bench length --prompt-file novel.txt --drafters "plain auto"
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.bench.options import (
    Dtype,
    Model,
    Output,
    Plot,
    Repeats,
    Threads,
    checked_quantize,
    choose,
    numbers,
    prepare,
)
from longdraft.errors import check


def replay(
    files: Annotated[list[Path], typer.Argument(
        help="Journals' folders, or token ids in .npy files as --tokens-out writes them.")],
    drafter: Annotated[list[str] | None, typer.Option(
        help="ngram or suffix with options, such as suffix,depth=4; repeatable. Default: several of each.")] = None,
    prefill: Annotated[int, typer.Option(help="Tokens of each .npy file that are the prompt.")] = 1024,
    penalty_window: Annotated[int, typer.Option(help="Of the penalty that .npy files were written with; 0: none.")] = 0,
    model: Annotated[str, typer.Option(help="Whose tokenizer reads a text given as corpus.")] = "novelist",
    output: Output = None,
) -> None:
    """Replay written texts through the drafters that need no model: what they would have guessed, and its cost."""
    from longdraft.bench import machine, replay, report

    with report.document(output) as filled:
        filled |= {"bench": "replay", "machine": machine.describe(), "prefill": prefill,
                   "penalty_window": penalty_window,
                   "files": replay.run(files, drafter or replay.DEFAULT, prefill, penalty_window, model)}


def length(
    prompt_file: Annotated[Path, typer.Option(help="The prompt, a text file.")],
    drafters: Annotated[str, typer.Option(
        help="Drafters to compare, with options such as magicdec,chain=6; separated by spaces.")] = "plain auto",
    model: Model = "novelist",
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt that are used.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 100_000,
    bucket: Annotated[int, typer.Option(help="New tokens that are reported together.")] = 10_000,
    turn: Annotated[int, typer.Option(help="New tokens that a drafter writes before the next one's turn.")] = 1_000,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    threads: Threads = None,
    output: Output = None,
    plot: Plot = None,
) -> None:
    """Write one long text with several drafters in turns: speed by length, and that it is one text.

    Sampling as in the paper: min-p 0.1, repetition penalty 1.2 within 1,024 tokens; seed 7.
    """
    from longdraft.bench import length, machine, report, tables
    from longdraft.bench import plot as plots
    from longdraft.core import SamplingParams
    from longdraft.engine import load
    from longdraft.files import read_prompt

    check(prefill >= 1, "prefill", prefill, "1 or more")
    check(turn >= 1, "turn", turn, "1 or more")
    check(bucket >= turn, "bucket", bucket, f"a turn's tokens ({turn}) or more")
    if plot:
        plots.check(plot)
    text = read_prompt(None, str(prompt_file))
    settings = drafters.split()
    check(bool(settings), "drafters", drafters, "at least one name")
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, min_p=0.1, seed=7,
                            repetition_penalty=1.2, ignore_eos=True)
    engine = load(model, threads=threads)
    prompt = engine.encode(text)[:prefill]
    about = {"bench": "length", "machine": machine.describe(engine.model.kernels) | engine.provenance,
             "prefill": len(prompt)}

    def save(figures: length.Figures) -> None:
        with report.document(output, is_told=False) as filled:
            filled |= about | {"drafters": figures}

    save({})  # fails at once where it cannot be written
    figures = length.run(engine, settings, prompt, params, bucket, turn, save)
    tables.length(figures)
    with report.document(output) as filled:
        filled |= about | {"drafters": figures}
    if plot:
        plots.length(about | {"drafters": figures}, plot)


def perplexity(
    text: Annotated[Path, typer.Option(help="A text file that the model has not seen.")],
    model: Model = "novelist",
    dtype: Dtype = "bfloat16",
    quantize: Annotated[str, typer.Option(help="What to compare, separated by spaces: none, int8.")] = "none int8",
    context: Annotated[int, typer.Option(help="Tokens of a window; each window is read by itself.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read, at most.")] = 32_768,
    threads: Threads = None, repeats: Repeats = 9, output: Output = None,
) -> None:
    """Measure what quantising costs and brings: nats per token of a text, memory of the weights, speed.

    The speed is that of plain decoding behind a window of random keys and values, in turns.
    """
    from longdraft.bench import decode, machine, perplexity, report, tables
    from longdraft.kernels import single_threaded_torch

    check(2 <= context <= 10**8, "--context", context, "2 to 100000000")
    check(context <= tokens <= 10**9, "--tokens", tokens, f"{context} (a window) to 1000000000")
    settings = [checked_quantize(setting) for setting in quantize.split()]
    check(bool(settings), "--quantize", quantize, "none, int8 or both")
    prepare(threads, repeats, 1)
    chosen = choose(dtype)
    ids = perplexity.read(model, text, tokens, context)
    models = [decode.Models(model, chosen, setting) for setting in settings]
    models[0].check([context], perplexity.steps_of(repeats))
    with report.document(output) as filled:
        filled |= {"bench": "perplexity", "machine": machine.describe(chosen), "model": model, "context": context,
                   "tokens": len(ids), "repeats": repeats}
        with report.doing("perplexity"), single_threaded_torch(chosen):
            filled["settings"] = perplexity.measure(models, ids, context, repeats)
        tables.perplexity(filled["settings"])


def context(
    text: Annotated[list[Path], typer.Option(help="A text file that the model has not seen; repeatable.")],
    model: Model = "novelist", dtype: Dtype = "bfloat16",
    edges: Annotated[str, typer.Option(help="Where stretches of the text end, tokens; with commas.")] =
        "1024,8192,32768,65536,100000",
    threads: Threads = None, output: Output = None,
) -> None:
    """Measure what a model makes of a long context: nats per token by place in whole texts."""
    from longdraft.bench import context, machine, report, tables
    from longdraft.kernels import single_threaded_torch
    from longdraft.model import checkpoint, hub
    from longdraft.model import config as model_config

    places = numbers("--edges", edges, 10**8)
    check(places == sorted(set(places)), "--edges", edges, "numbers that rise")
    prepare(threads, 1, 1)
    chosen = choose(dtype)
    folder = hub.resolve(model)
    config = model_config.read_config(folder)
    check(places[-1] < config.max_positions, "--edges", places[-1], f"less than the model's context "
                                                                   f"({config.max_positions})")
    texts = context.read(model, text, places[-1])
    loaded = checkpoint.load_transformer(checkpoint.TensorFiles(folder), config, chosen)
    with report.document(output) as filled:
        filled |= {"bench": "context", "machine": machine.describe(chosen), "model": model, "texts": len(texts)}
        with report.doing("context"), single_threaded_torch(chosen):
            filled["stretches"] = context.measure(loaded, texts, places)
        tables.context(filled["stretches"])
