"""`longdraft generate`: a prompt in, a long text out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.cli import options
from longdraft.cli.options import FILES, SAMPLING, option, parse_pairs
from longdraft.core import Event, SamplingParams
from longdraft.errors import UsageError

if TYPE_CHECKING:
    from longdraft.cli.display import Display
    from longdraft.console import Interrupt
    from longdraft.engine import Generation
    from longdraft.files import OutputFile


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from.", show_default=False)] = None,
    prompt_file: Annotated[str | None, option("Read the prompt from a UTF-8 file; '-': stdin.", FILES)] = None,
    chat: Annotated[bool, option("Wrap the prompt in the model's chat template.", FILES, "--chat")] = False,
    chat_option: options.ChatOption = None,
    prefill: Annotated[int | None, option("Use only the first N tokens of the prompt.", FILES)] = None,
    output: Annotated[Path | None, option("Write the text to this file instead of stdout.", FILES)] = None,
    tokens_out: Annotated[Path | None, option("Write the new token ids to this .npy file (int32).", FILES)] = None,
    stats: Annotated[Path | None, option("Write statistics to this JSON file.", FILES)] = None,
    quiet: Annotated[bool, option("No live line and no remarks on stderr.", FILES, "--quiet")] = False,
    model: options.Model = "novelist",
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
    offline: options.Offline = False,
    drafter: options.Drafter = "auto",
    drafter_option: options.DrafterOption = None,
    heads: options.Heads = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = "none",
    threads: options.Threads = None,
    max_new_tokens: Annotated[int, option("Tokens to write at most.", SAMPLING)] = SamplingParams.max_new_tokens,
    min_new_tokens: Annotated[int, option("Tokens before the text may end by itself.", SAMPLING)] = 0,
    seed: options.Seed = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    eta_cutoff: options.EtaCutoff = None,
    min_tokens_to_keep: options.MinTokensToKeep = 1,
    repetition_penalty: options.RepetitionPenalty = None,
    penalty_window: options.PenaltyWindow = SamplingParams.penalty_window,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    ignore_eos: Annotated[bool, option("The model's end of text does not end it.", SAMPLING, "--ignore-eos")] = False,
) -> int:
    """Write a text that goes on from PROMPT, streaming it to stdout.

    The text depends on model, prompt, seed and sampling settings only, never on the drafter.
    """
    from longdraft.files import open_outputs, read_prompt

    given = {
        "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "seed": seed, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "eta_cutoff": eta_cutoff,
        "min_tokens_to_keep": min_tokens_to_keep, "repetition_penalty": repetition_penalty,
        "penalty_window": penalty_window, "stop": stop or None,
        "stop_token_ids": stop_token_id or None, "ignore_eos": ignore_eos}
    SamplingParams.from_names(given)  # a mistake shows before the model is read
    drafting = parse_pairs("--drafter-option", drafter_option or ())
    chat_options = options.chat_options(chat_option or ())
    if chat_options and not chat:
        raise UsageError("--chat-option is a variable of the chat template; give --chat with it")
    text = read_prompt(prompt, prompt_file)
    files = open_outputs({"--output": output, "--tokens-out": tokens_out, "--stats": stats})
    try:
        from longdraft.cli.display import LoadBar
        from longdraft.engine import load

        with LoadBar(quiet=quiet) as bar:
            engine = load(model, drafter=drafter, drafter_options=drafting, heads=heads, device=device, dtype=dtype,
                          quantize=quantize, threads=threads, revision=revision, cache_dir=cache_dir, offline=offline,
                          on_load=bar.show)
        params = engine.params(**given)
        options.tell_defaults(params, quiet=quiet)
        ids = _shortened(engine.chat(text, **chat_options) if chat else engine.encode(text), prefill)
        return _write(lambda progress: engine.generate(ids, params, on_prefill=progress), params, files, quiet)
    finally:
        for file in files.values():
            file.abandon()


def _shortened(ids: list[int], prefill: int | None) -> list[int]:
    if prefill is None:
        return ids
    if not 1 <= prefill <= len(ids):
        raise UsageError(f"--prefill is {prefill}; allowed: 1 to {len(ids)} (the prompt's tokens)")
    return ids[:prefill]


def _write(start: Any, params: SamplingParams, files: dict[str, OutputFile], quiet: bool) -> int:
    """Run a generation to its end or to the first signal; returns the exit status."""
    from longdraft.cli.display import Display
    from longdraft.console import Interrupt

    status = 0
    with Interrupt() as interrupt:
        with Display(params.max_new_tokens, quiet=quiet, text="--output" not in files) as display:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                display.prefilled(done, total)

            generation: Generation = start(progress)
            try:
                _stream(generation, display, interrupt, files.get("--output"))
            except BrokenPipeError:
                status = _silence()  # the reader has gone
            except OSError as error:
                print(f"longdraft: cannot write to stdout: {error.strerror or error}", file=sys.stderr)
                status = _silence()
            generation.close()
        _finish(generation, files)
        if interrupt.number:
            print(f"longdraft: interrupted after {len(generation.tokens)} tokens; what was written is whole",
                  file=sys.stderr)
            status = 128 + interrupt.number
    return status


def _silence() -> int:
    """Nothing more can be shown, so Python must not try at exit either."""
    sys.stdout = open("/dev/null", "w")  # noqa: SIM115
    return 1


def _stream(generation: Generation, display: Display, interrupt: Interrupt, output: OutputFile | None) -> None:
    from longdraft.console import Interrupted

    try:
        for event in generation:
            if output:
                output.write(event.text.encode())
            display.show(event)
            interrupt.check()
    except Interrupted:
        generation.close()
        rest = Event((), generation.held_text)
        if output:
            output.write(rest.text.encode())
        display.show(rest)


def _finish(generation: Generation, files: dict[str, OutputFile]) -> None:
    import io

    import numpy as np

    if "--output" in files:
        files["--output"].finish()
    if "--tokens-out" in files:
        buffer = io.BytesIO()
        np.save(buffer, generation.tokens)
        files["--tokens-out"].write(buffer.getvalue())
        files["--tokens-out"].finish()
    if "--stats" in files:
        files["--stats"].write((json.dumps(generation.stats(), indent=2) + "\n").encode())
        files["--stats"].finish()
