"""`longdraft bench length`, `batch`, `replay` and `peers`: drafters and engines on whole texts.

    longdraft bench length --prompt-file novel.txt --drafters "plain auto"
    longdraft bench peers --prompt-file novel.txt --output peers.json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import check
from longdraft_bench.options import (
    MAX_TOKENS,
    ContextsOption,
    LimitOption,
    MemoryOption,
    ModelOption,
    OutputOption,
    PlotOption,
    PythonOption,
    QuantizeOption,
    RepeatsOption,
    ThreadsOption,
    checked_quantize,
    numbers,
    settings,
    within,
)

if TYPE_CHECKING:
    from longdraft.report.turns import Record

_PREFILL = 4096  # tokens of the prompt, unless --prefill says otherwise


def length(
    prompt_file: Annotated[Path, typer.Option(help="The prompt, a text file.")],
    drafters: Annotated[str, typer.Option(
        help="Drafters to compare, with options such as magicdec,chain=6; separated by spaces. One that stands twice "
             "shows the noise.")] = "plain auto",
    model: ModelOption = "novelist",
    prefill: Annotated[int | None, typer.Option(help="Use only the first N tokens of the prompt.",
                                                show_default="4096, or all if it has fewer")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 100_000,
    bucket: Annotated[int, typer.Option(help="New tokens that are reported together.")] = 10_000,
    turn: Annotated[int, typer.Option(help="New tokens that a drafter writes before the next one's turn.")] = 1_000,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    quantize: QuantizeOption = "none",
    threads: ThreadsOption = None,
    output: OutputOption = None,
    plot: PlotOption = None,
) -> None:
    """Write one long text with several drafters in turns: speed by length. Checks that all texts are equal.

    Sampling as in the paper: min-p 0.1, repetition penalty 1.2 within 1,024 tokens; seed 7.
    """
    from longdraft.engine.loading import load
    from longdraft.report import figures
    from longdraft.request.sampling_params import SamplingParams
    from longdraft.system import machine
    from longdraft.system.files import read_prompt
    from longdraft_bench import length
    from longdraft_bench.document import document

    check(prefill is None or prefill >= 1, "--prefill", prefill, "1 or more")
    check(turn >= 1, "--turn", turn, "1 or more")
    check(bucket >= turn, "--bucket", bucket, f"a turn's tokens ({turn}) or more")
    if plot:
        figures.check_plot(plot)
    text = read_prompt(None, str(prompt_file))
    chosen = settings("drafters", drafters)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, min_p=0.1, seed=7,
                            repetition_penalty=1.2, ignore_eos=True)
    engine = load(model, threads=threads, quantize=checked_quantize(quantize))
    prompt = engine.encode(text)
    check(prefill is None or prefill <= len(prompt), "--prefill", prefill,
          f"1 to {len(prompt)}, the tokens of the prompt", "a longer --prompt-file has more")
    prompt = prompt[: prefill or _PREFILL]
    about: dict[str, Any] = {"machine": machine.description(engine.model.kernels) | engine.provenance,
                             "prefill": len(prompt)}

    def save(found: Record) -> None:
        with document("length", output, is_printed=False, **about, drafters=found):
            pass

    save({})  # an output that cannot be written fails before any measurement
    found = length.measure_length(engine, chosen, prompt, params, bucket, turn, save)
    length.table(found).show()
    with document("length", output, **about, drafters=found) as filled:
        pass
    if plot:
        figures.save_figure(figures.length(filled), plot)


def batch(
    prompt_file: Annotated[Path, typer.Option(help="A text whose stretches are the prompts.")],
    model: ModelOption = "novelist",
    contexts: ContextsOption = "1024,8192,32768",
    texts: Annotated[str, typer.Option(help="Numbers of texts that are written side by side.")] = "1,2,4,8,16",
    drafters: Annotated[str, typer.Option(
        help="Drafters to measure, with options such as magicdec,chain=6; separated by spaces.")] = "plain auto",
    turn: Annotated[int, typer.Option(help="Tokens that each text writes in a turn.")] = 24,
    peers: Annotated[str, typer.Option(
        help="llama.cpp: its slots beside ours, with flash attention and without; none.")] = "llama.cpp",
    python: PythonOption = None, limit: LimitOption = 600,
    threads: ThreadsOption = None, repeats: RepeatsOption = 5, memory: MemoryOption = 2.0,
    output: OutputOption = None,
) -> None:
    """Measure texts written side by side and one after another: total tokens per second by number of texts.

    Sampling as in the paper: min-p 0.1, repetition penalty 1.2 within 1,024 tokens.
    """
    from longdraft.engine.loading import load
    from longdraft.system import machine
    from longdraft.system.files import read_prompt
    from longdraft_bench import batch
    from longdraft_bench import peers as engines
    from longdraft_bench.document import document, measure_limits, prepare_run, status

    lengths, counts = numbers("--contexts", contexts), numbers("--texts", texts, 512)
    within("--turn", turn, 1, 10_000)
    check(peers in ("llama.cpp", "none"), "--peers", peers, "llama.cpp or none")
    within("--limit", limit, 1, 86400, "seconds")
    chosen = settings("--drafters", drafters)
    nbytes = prepare_run(threads, repeats, memory)
    text = read_prompt(None, str(prompt_file))
    engine = load(model, threads=threads, device="cpu", cache_ram=0)
    plan = batch.BatchPlan(engine.encode(text), lengths, counts, chosen, turn, repeats,
                           engines.PEERS["llama.cpp"] if peers != "none" else {}, engines.interpreter(python), limit)
    plan.check(engine)
    with document("batch", output, model=model, sha256_prompt=batch.sha256(plan.ids)) as filled:
        filled["machine"] = machine.description(engine.model.kernels)
        limits = measure_limits(nbytes, repeats, filled)
        batch.measure_batches(engine, plan, limits, filled, status)
        for table in batch.tables(filled):
            table.show()


def replay(
    files: Annotated[list[Path], typer.Argument(
        help="Folders of journals, or token ids in .npy files as --tokens-out writes them.")],
    drafter: Annotated[list[str] | None, typer.Option(
        help="ngram or suffix with options, such as suffix,depth=4; repeatable. Default: several of each.")] = None,
    prefill: Annotated[int, typer.Option(help="Tokens of each .npy file that are the prompt.")] = 1024,
    penalty_window: Annotated[int, typer.Option(
        help="Tokens of the repetition penalty's window that .npy files were written with; 0: none.")] = 0,
    model: Annotated[str, typer.Option(help="Model whose tokenizer reads a text given as corpus.")] = "novelist",
    output: OutputOption = None,
) -> None:
    """Replay written texts through the drafters that need no model: their accepted tokens, and their cost."""
    from longdraft_bench import replay
    from longdraft_bench.document import document

    with document("replay", output, prefill=prefill, penalty_window=penalty_window) as filled:
        filled["files"] = replay.replay_files(files, drafter or replay.DEFAULT_SETTINGS, prefill, penalty_window, model)


def peers(
    model: ModelOption = "novelist",
    peers: Annotated[str, typer.Option(help="Engines to measure.")] = "longdraft,transformers,llama.cpp,openvino",
    python: PythonOption = None,
    contexts: ContextsOption = "1024,8192,32768,100000",
    prefill: Annotated[int, typer.Option(help="Tokens of a prompt to time; 0: none.")] = 30_000,
    steps: Annotated[int, typer.Option(help="Steps of an engine in one round.")] = 4,
    repeats: RepeatsOption = 5, limit: LimitOption = 600,
    prompt_file: Annotated[Path | None, typer.Option(
        help="A text file; if given, each engine also writes whole texts, plain and drafted.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the file that are the prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 256,
    draft_model: Annotated[str | None, typer.Option(help="A smaller model with the same vocabulary.")] = None,
    modes: Annotated[str | None, typer.Option(
        help="How whole texts are drafted, such as plain,auto; default: all ways of the engines.")] = None,
    quantize: Annotated[str, typer.Option(
        help="int8 or int4: longdraft's weights, beside llama.cpp's Q8_0 or Q4_0; file: both have those of a GGUF "
             "file; none: 16 bits.")] = "none",
    threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Measure the same weights in other engines, side by side, each in its own process.

    Steps of plain decoding by context; with --prompt-file also whole texts, plain, by prompt lookup and with a smaller
    model. Engines that are not installed are named and left out. Greedy, 16-bit caches, equal threads.
    """
    from longdraft.checkpoint import hub
    from longdraft.kernels.weights import FILE
    from longdraft.system.files import read_prompt
    from longdraft.text.tokenizer import Tokenizer
    from longdraft_bench import peers as engines
    from longdraft_bench import peers_text
    from longdraft_bench.document import document, prepare_run, status

    lengths = numbers("--contexts", contexts)
    within("--new-tokens", new_tokens, 2, MAX_TOKENS)
    within("--prompt-tokens", prompt_tokens, 1, MAX_TOKENS)
    within("--prefill", prefill, 0, MAX_TOKENS)
    within("--steps", steps, 1, 1000)
    within("--limit", limit, 1, 86400, "seconds")
    check(quantize in ("none", FILE) or not prompt_file, "--quantize", quantize, "none or file with --prompt-file")
    chosen = [name.strip() for name in modes.split(",")] if modes else []
    for name in chosen:
        check(name in peers_text.MODE_NAMES, "--modes", name, ", ".join(peers_text.MODE_NAMES))
    programs = engines.named(peers, checked_quantize(quantize))
    prepare_run(threads, repeats)
    folder = hub.resolve(model)
    check(folder.is_file() == (quantize == FILE), "--quantize", quantize,
          "file for a GGUF file" if folder.is_file() else "none, int8 or int4 for a model that is no GGUF file")
    plan = engines.PeersPlan(model, folder, programs, engines.interpreter(python), lengths, prefill, steps, repeats,
                             limit, prompt_tokens + new_tokens + 64 if prompt_file else 0, chosen, quantize)
    plan.check()
    draft = hub.resolve(draft_model) if draft_model else None
    prompt: list[int] = []
    if prompt_file:
        prompt = Tokenizer(plan.folder).encode(read_prompt(None, str(prompt_file)))[:prompt_tokens]
        check(len(prompt) == prompt_tokens, "tokens in --prompt-file", len(prompt), f"{prompt_tokens} or more")
    with document("peers", output, quantize=quantize) as filled:
        engines.measure_peers(plan, filled, status)
        for table in engines.tables(filled):
            table.show()
        if prompt:
            peers_text.write_texts(plan, filled, prompt, new_tokens, draft, status)
            for table in peers_text.tables(filled):
                table.show()
