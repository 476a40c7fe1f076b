"""`longdraft bench ...`. Heavy imports wait inside the commands, so that --help is quick.

    longdraft bench kernels --output kernels.json
    longdraft bench roofline --plot roofline.svg
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.bench import cuda_cli, experiments_cli
from longdraft.errors import check

if TYPE_CHECKING:
    from longdraft.bench.measure import Limits
    from longdraft.kernels import Kernels

app = typer.Typer(no_args_is_help=True, help="Measure kernels, decoding and other engines on this machine.")

Plot = Annotated[Path | None, typer.Option(help="Draw this .png, .svg or .pdf (needs matplotlib).")]
Output = Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")]
Model = Annotated[str, typer.Option(help="Bundled name, model folder or hub id.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Quantize = Annotated[str, typer.Option(help="Weights as they are (none) or as int8.")]
Threads = Annotated[int | None, typer.Option(help="Threads; default: PyTorch's choice.")]
Repeats = Annotated[int, typer.Option(help="Rounds; a figure is the median over them.")]
Memory = Annotated[float, typer.Option(
    help="GiB that are read in rotation, more than the processor's caches hold; a quarter of the free memory at most.")]
Contexts = Annotated[str, typer.Option(help="Lengths of context, tokens.")]


@app.callback()
def _group() -> None:
    """Measure kernels, decoding and other engines on this machine."""


@app.command("machine")
def machine_command(threads: Threads = None, repeats: Repeats = 9, memory: Memory = 2.0, output: Output = None) -> None:
    """Measure what this machine can do at most: read bandwidth, and arithmetic of matrix products."""
    from longdraft.bench import machine, report

    size = _prepare(threads, repeats, memory)
    with report.document(output) as filled:
        limits = _limits(size, repeats)
        filled |= {"bench": "machine", "machine": machine.describe() | limits.details}
        for name in ("processor", "threads"):
            print(f"{name}: {filled['machine'][name]}")


@app.command("kernels")
def kernels_command(
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
    from longdraft.kernels import alone

    counts, lengths = numbers("--rows", rows, 512), numbers("--contexts", contexts, 10**8)
    check(1 <= positions <= 10**8, "--positions", positions, "1 to 100000000")
    check(0 <= prefill_rows <= 4096, "--prefill-rows", prefill_rows, "0 to 4096")
    size = _prepare(threads, repeats, memory)
    chosen = _choose(dtype)
    models = decode.Models(model, chosen, _quantize(quantize))
    models.check(lengths, 1)
    config = models.config
    own = Shape(config.num_heads, config.num_kv_heads, config.head_dim)
    asked = Shape(heads or own.heads, kv_heads or own.kv_heads, head_dim or own.head_dim)
    _check_shape(asked)
    attended = [asked] if (heads, kv_heads, head_dim) != (None, None, None) else [own, Shape(8, 2, 64)]
    weights = _shapes(shapes) if shapes else kernels.model_shapes(model, config) | kernels.LINEAR_SHAPES
    with report.document(output) as filled, ExitStack() as stack:
        limits = _limits(size, repeats)
        stack.enter_context(alone(chosen))
        filled |= {"bench": "kernels", "machine": machine.describe(chosen) | limits.details, "model": model,
                   "quantize": quantize, "repeats": repeats, "parents": "chain", "attention": [], "linear": []}
        sizes = Sizes(counts, prefill_rows, positions, size, repeats, quantize == "int8")
        for shape in attended:
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


@app.command("roofline")
def roofline_command(
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
    from longdraft.kernels import alone

    counts, lengths = sorted({1, *numbers("--rows", rows, 512)}), numbers("--contexts", contexts, 10**8)
    if plot:
        plots.check(plot)
    size = _prepare(threads, repeats, memory)
    models = decode.Models(model, _choose(dtype), _quantize(quantize))
    models.check(lengths, roofline.STEPS_PER_REPEAT * repeats + max(counts))
    with report.document(output) as filled, ExitStack() as stack:
        limits = _limits(size, repeats)
        stack.enter_context(alone(models.kernels))
        filled |= {"bench": "roofline", "machine": machine.describe(models.kernels) | limits.details, "model": model,
                   "quantize": quantize, "repeats": repeats, "cache": "random", "sampling": decode.sampling(),
                   "contexts": []}
        for context in lengths:
            with report.doing(f"{context:,} tokens of context"):
                filled["contexts"].append(roofline.measure(models, context, counts, size, repeats, limits))
        tables.roofline(filled["contexts"])
        if plot:
            plots.roofline(filled, plot)


@app.command("peers")
def peers_command(
    model: Model = "novelist",
    peers: Annotated[str, typer.Option(help="Engines to measure.")] = "longdraft,transformers,llama.cpp,openvino",
    python: Annotated[Path | None, typer.Option(
        help="Interpreter that has the peers' packages; default: this one.")] = None,
    contexts: Contexts = "1024,8192,32768,100000",
    prefill: Annotated[int, typer.Option(help="Tokens of a prompt to time; 0: none.")] = 30_000,
    steps: Annotated[int, typer.Option(help="Steps of an engine in one round.")] = 4,
    repeats: Repeats = 5,
    limit: Annotated[float, typer.Option(help="Seconds that one answer of an engine may take.")] = 600,
    prompt_file: Annotated[Path | None, typer.Option(
        help="A text: whole texts are written too, by each engine's own generation, plain and drafted.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of it that are the prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 256,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model of the same vocabulary.")] = None,
    threads: Threads = None, output: Output = None,
) -> None:
    """Measure the same weights in other engines, side by side, each in a process of its own.

    Steps of plain decoding by context; with --prompt-file also whole texts, plain, by prompt lookup and with a smaller
    model. Peers that are not installed are named and left out. Greedy, 16-bit weights and caches, the same threads.
    """
    from longdraft.bench import peers as engines
    from longdraft.bench import peers_text, report, tables
    from longdraft.files import read_prompt
    from longdraft.model import library
    from longdraft.model.tokenizer import Tokenizer

    lengths = numbers("--contexts", contexts, 10**8)
    check(2 <= new_tokens <= 10**8, "--new-tokens", new_tokens, "2 to 100000000")
    check(1 <= prompt_tokens <= 10**8, "--prompt-tokens", prompt_tokens, "1 to 100000000")
    check(0 <= prefill <= 10**8, "--prefill", prefill, "0 to 100000000")
    check(1 <= steps <= 1000, "--steps", steps, "1 to 1000")
    check(1 <= limit <= 86400, "--limit", limit, "1 to 86400 seconds")
    _prepare(threads, repeats, 1)
    plan = engines.Plan(model, library.resolve(model), engines.named(peers), engines.interpreter(python), lengths,
                        prefill, steps, repeats, limit, prompt_tokens + new_tokens + 64 if prompt_file else 0)
    plan.check()
    draft = library.resolve(draft_model) if draft_model else None
    prompt: list[int] = []
    if prompt_file:
        prompt = Tokenizer(plan.folder).encode(read_prompt(None, str(prompt_file)))[:prompt_tokens]
        check(len(prompt) == prompt_tokens, "tokens in --prompt-file", len(prompt), f"{prompt_tokens} or more")
    with report.document(output) as filled:
        engines.measure(plan, filled, report.doing)
        tables.peers(filled)
        if prompt:
            peers_text.measure(plan, filled, prompt, new_tokens, draft, report.doing)
            for grid in peers_text.tables(filled):
                grid.show()


@app.command("replay")
def replay_command(
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


@app.command("length")
def length_command(
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


@app.command("batch")
def batch_command(
    prompt_file: Annotated[Path, typer.Option(help="A text whose stretches are the prompts.")],
    model: Model = "novelist",
    contexts: Contexts = "1024,8192,32768",
    texts: Annotated[str, typer.Option(help="Numbers of texts that are written side by side.")] = "1,2,4,8,16",
    drafters: Annotated[str, typer.Option(
        help="Drafters to measure, with options such as magicdec,chain=6; separated by spaces.")] = "plain auto",
    turn: Annotated[int, typer.Option(help="Tokens that each text writes in a turn.")] = 24,
    peers: Annotated[str, typer.Option(help="llama.cpp: its parallel slots beside ours; none.")] = "llama.cpp",
    python: Annotated[Path | None, typer.Option(
        help="Interpreter that has the peer's packages; default: this one.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds that one answer of the peer may take.")] = 600,
    threads: Threads = None, repeats: Repeats = 5, memory: Memory = 2.0, output: Output = None,
) -> None:
    """Measure texts written side by side beside one after another: total tokens per second by their number.

    Sampling as in the paper: min-p 0.1, repetition penalty 1.2 within 1,024 tokens.
    """
    from longdraft.bench import batch, machine, report, tables
    from longdraft.bench import peers as engines
    from longdraft.engine import load
    from longdraft.files import read_prompt

    lengths, counts = numbers("--contexts", contexts, 10**8), numbers("--texts", texts, 512)
    check(1 <= turn <= 10_000, "--turn", turn, "1 to 10000")
    check(peers in ("llama.cpp", "none"), "--peers", peers, "llama.cpp or none")
    check(1 <= limit <= 86400, "--limit", limit, "1 to 86400 seconds")
    check(bool(drafters.split()), "--drafters", drafters, "at least one name")
    size = _prepare(threads, repeats, memory)
    peer = engines.KINDS["llama.cpp"]["llama.cpp, flash"] if peers != "none" else None
    text = read_prompt(None, str(prompt_file))
    engine = load(model, threads=threads, device="cpu")
    plan = batch.Plan(engine.encode(text), lengths, counts, drafters.split(), turn, repeats, peer,
                      engines.interpreter(python), limit)
    plan.check(engine)
    with report.document(output) as filled:
        limits = _limits(size, repeats)
        filled |= {"bench": "batch", "machine": machine.describe(engine.model.kernels) | limits.details, "model": model,
                   "sha256_prompt": batch.sha256(plan.ids)}
        batch.measure(engine, plan, limits, filled, report.doing)
        tables.batch(filled)


@app.command("perplexity")
def perplexity_command(
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
    from longdraft.kernels import alone

    check(2 <= context <= 10**8, "--context", context, "2 to 100000000")
    check(context <= tokens <= 10**9, "--tokens", tokens, f"{context} (a window) to 1000000000")
    settings = [_quantize(setting) for setting in quantize.split()]
    check(bool(settings), "--quantize", quantize, "none, int8 or both")
    _prepare(threads, repeats, 1)
    chosen = _choose(dtype)
    ids = perplexity.read(model, text, tokens, context)
    models = [decode.Models(model, chosen, setting) for setting in settings]
    models[0].check([context], perplexity.steps_of(repeats))
    with report.document(output) as filled:
        filled |= {"bench": "perplexity", "machine": machine.describe(chosen), "model": model, "context": context,
                   "tokens": len(ids), "repeats": repeats}
        with report.doing("perplexity"), alone(chosen):
            filled["settings"] = perplexity.measure(models, ids, context, repeats)
        tables.perplexity(filled["settings"])


@app.command("context")
def context_command(
    text: Annotated[list[Path], typer.Option(help="A text file that the model has not seen; repeatable.")],
    model: Model = "novelist", dtype: Dtype = "bfloat16",
    edges: Annotated[str, typer.Option(help="Where stretches of the text end, tokens; with commas.")] =
        "1024,8192,32768,65536,100000",
    threads: Threads = None, output: Output = None,
) -> None:
    """Measure what a model makes of a long context: nats per token by place in whole texts."""
    from longdraft.bench import context, machine, report, tables
    from longdraft.kernels import alone
    from longdraft.model import checkpoint, library
    from longdraft.model import config as model_config

    places = numbers("--edges", edges, 10**8)
    check(places == sorted(set(places)), "--edges", edges, "numbers that rise")
    _prepare(threads, 1, 1)
    chosen = _choose(dtype)
    folder = library.resolve(model)
    config = model_config.read(folder)
    check(places[-1] < config.max_positions, "--edges", places[-1], f"less than the model's context "
                                                                   f"({config.max_positions})")
    texts = context.read(model, text, places[-1])
    loaded = checkpoint.load(checkpoint.TensorFiles(folder), config, chosen)
    with report.document(output) as filled:
        filled |= {"bench": "context", "machine": machine.describe(chosen), "model": model, "texts": len(texts)}
        with report.doing("context"), alone(chosen):
            filled["stretches"] = context.measure(loaded, texts, places)
        tables.context(filled["stretches"])


app.command("paper")(experiments_cli.paper)
app.command("ablation")(experiments_cli.ablation)
app.command("run")(experiments_cli.run)
app.command("report")(experiments_cli.report)
app.command("cuda")(cuda_cli.cuda)


def numbers(option: str, text: str, most: int) -> list[int]:
    """'1,2,4' -> [1, 2, 4]"""
    parts = [part.strip() for part in text.split(",")]
    right = all(part.isdecimal() and 1 <= int(part) <= most for part in parts)
    check(right, option, text, f"whole numbers from 1 to {most} with commas between them")
    return [int(part) for part in parts]


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


def _prepare(threads: int | None, repeats: int, memory: float) -> int:
    """Check what all commands share, set the threads; returns the bytes to rotate through."""
    check(1 <= repeats <= 1000, "--repeats", repeats, "1 to 1000")
    check(0 < memory <= 1024, "--memory", memory, "above 0, at most 1024 GiB")
    check(threads is None or 1 <= threads <= 1024, "--threads", threads, "1 to 1024")
    from longdraft import kernels
    from longdraft.bench import machine

    if threads:
        kernels.set_threads(threads)
    return machine.affordable(int(memory * (1 << 30)))


def _choose(dtype: str) -> Kernels:
    from longdraft import kernels

    check(dtype in ("float32", "bfloat16"), "--dtype", dtype, "float32 or bfloat16")
    return kernels.choose("cpu", dtype)


def _quantize(quantize: str) -> str:
    check(quantize in ("none", "int8"), "--quantize", quantize, "none or int8")
    return quantize


def _limits(memory: int, repeats: int) -> Limits:
    from longdraft.bench import machine, report

    with report.doing("this machine's limits"):
        limits = machine.limits(memory, repeats)
    report.limits_line(limits.details)
    return limits
