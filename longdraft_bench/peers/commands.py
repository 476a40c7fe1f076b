"""`longdraft bench peers` and `peers-perplexity`: other engines beside longdraft.

    longdraft bench peers --python peers/bin/python --output peers.json
    longdraft bench peers --prompt-file novel.txt --output peers.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import check
from longdraft_bench.options import (
    MAX_TOKENS,
    ContextsOption,
    LimitOption,
    ModelOption,
    OutputOption,
    PythonOption,
    RepeatsOption,
    ThreadsOption,
    checked_quantize,
    numbers,
    within,
)


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
    from longdraft_bench.document import document, prepare_run, status
    from longdraft_bench.peers import process, texts
    from longdraft_bench.peers import steps as peer_steps

    lengths = numbers("--contexts", contexts)
    within("--new-tokens", new_tokens, 2, MAX_TOKENS)
    within("--prompt-tokens", prompt_tokens, 1, MAX_TOKENS)
    within("--prefill", prefill, 0, MAX_TOKENS)
    within("--steps", steps, 1, 1000)
    within("--limit", limit, 1, 86400, "seconds")
    check(quantize in ("none", FILE) or not prompt_file, "--quantize", quantize, "none or file with --prompt-file")
    chosen = [name.strip() for name in modes.split(",")] if modes else []
    for name in chosen:
        check(name in texts.MODE_NAMES, "--modes", name, ", ".join(texts.MODE_NAMES))
    programs = process.named(peers, checked_quantize(quantize))
    prepare_run(threads, repeats)
    folder = hub.resolve(model)
    check(folder.is_file() == (quantize == FILE), "--quantize", quantize,
          "file for a GGUF file" if folder.is_file() else "none, int8 or int4 for a model that is no GGUF file")
    plan = peer_steps.PeersPlan(model, folder, programs, process.interpreter(python), lengths, prefill, steps, repeats,
                             limit, prompt_tokens + new_tokens + 64 if prompt_file else 0, chosen, quantize)
    plan.check()
    draft = hub.resolve(draft_model) if draft_model else None
    prompt: list[int] = []
    if prompt_file:
        prompt = Tokenizer(plan.folder).encode(read_prompt(None, str(prompt_file)))[:prompt_tokens]
        check(len(prompt) == prompt_tokens, "tokens in --prompt-file", len(prompt), f"{prompt_tokens} or more")
    with document("peers", output, quantize=quantize) as filled:
        peer_steps.measure_peers(plan, filled, status)
        for table in peer_steps.tables(filled):
            table.show()
        if prompt:
            texts.write_texts(plan, filled, prompt, new_tokens, draft, status)
            for table in texts.tables(filled):
                table.show()


def peers_perplexity(
    files: Annotated[list[Path], typer.Argument(help="GGUF files with one tokenizer; `bench model gguf` writes them.")],
    text: Annotated[Path, typer.Option(help="A text file.")],
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read.")] = 1024,
    python: PythonOption = None,
    no_repacking: Annotated[bool, typer.Option(
        "--no-repacking", help="llama.cpp without its repacked weights, for files with which they crash.")] = False,
    limit: LimitOption = 600, threads: ThreadsOption = 2, output: OutputOption = None,
) -> None:
    """Compare the perplexity of a text by longdraft and by llama.cpp, with the numbers of the same GGUF files."""
    from longdraft_bench.document import document, prepare_run
    from longdraft_bench.peers import perplexity, process
    from longdraft_bench.texts.perplexity import encode_file

    within("--tokens", tokens, 2, MAX_TOKENS)
    prepare_run(threads, 1)
    ids = encode_file(str(files[0]), text, tokens, tokens, f"{tokens} or more")
    interpreter = process.interpreter(python)
    with document("peers perplexity", output, tokens=tokens) as filled:
        filled["files"] = [perplexity.measure(path, ids, interpreter, limit, repacks=not no_repacking)
                           for path in files]
        perplexity.table(filled["files"]).show()
