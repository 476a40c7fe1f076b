"""`longdraft bench peers` and `batch`: beside other engines, and texts beside one another.

    longdraft bench peers --prompt-file novel.txt --output peers.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.bench.options import Contexts, Memory, Model, Output, Repeats, Threads, machine_limits, numbers, prepare
from longdraft.errors import check


def peers(
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
    from longdraft.model import hub
    from longdraft.model.tokenizer import Tokenizer

    lengths = numbers("--contexts", contexts, 10**8)
    check(2 <= new_tokens <= 10**8, "--new-tokens", new_tokens, "2 to 100000000")
    check(1 <= prompt_tokens <= 10**8, "--prompt-tokens", prompt_tokens, "1 to 100000000")
    check(0 <= prefill <= 10**8, "--prefill", prefill, "0 to 100000000")
    check(1 <= steps <= 1000, "--steps", steps, "1 to 1000")
    check(1 <= limit <= 86400, "--limit", limit, "1 to 86400 seconds")
    prepare(threads, repeats, 1)
    plan = engines.Plan(model, hub.resolve(model), engines.named(peers), engines.interpreter(python), lengths,
                        prefill, steps, repeats, limit, prompt_tokens + new_tokens + 64 if prompt_file else 0)
    plan.check()
    draft = hub.resolve(draft_model) if draft_model else None
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


def batch(
    prompt_file: Annotated[Path, typer.Option(help="A text whose stretches are the prompts.")],
    model: Model = "novelist",
    contexts: Contexts = "1024,8192,32768",
    texts: Annotated[str, typer.Option(help="Numbers of texts that are written side by side.")] = "1,2,4,8,16",
    drafters: Annotated[str, typer.Option(
        help="Drafters to measure, with options such as magicdec,chain=6; separated by spaces.")] = "plain auto",
    turn: Annotated[int, typer.Option(help="Tokens that each text writes in a turn.")] = 24,
    peers: Annotated[str, typer.Option(
        help="llama.cpp: its slots beside ours, with flash attention and without; none.")] = "llama.cpp",
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
    size = prepare(threads, repeats, memory)
    ways = engines.KINDS["llama.cpp"] if peers != "none" else {}
    text = read_prompt(None, str(prompt_file))
    engine = load(model, threads=threads, device="cpu")
    plan = batch.Plan(engine.encode(text), lengths, counts, drafters.split(), turn, repeats, ways,
                      engines.interpreter(python), limit)
    plan.check(engine)
    with report.document(output) as filled:
        limits = machine_limits(size, repeats)
        filled |= {"bench": "batch", "machine": machine.describe(engine.model.kernels) | limits.details, "model": model,
                   "sha256_prompt": batch.sha256(plan.ids)}
        batch.measure(engine, plan, limits, filled, report.doing)
        tables.batch(filled)
