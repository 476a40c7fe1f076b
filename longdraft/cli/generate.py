"""`longdraft generate`: a prompt in, a long text out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.core import Event, SamplingParams
from longdraft.errors import UsageError

if TYPE_CHECKING:
    from longdraft.cli.display import Display
    from longdraft.console import Interrupt
    from longdraft.engine import Generation
    from longdraft.files import OutputFile

_SAMPLING, _RUNNING, _FILES = "Sampling and stopping", "Model, drafter and machine", "Input and output"


def _option(text: str, panel: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from.", show_default=False)] = None,
    prompt_file: Annotated[str | None, _option("Read the prompt from a UTF-8 file; '-': stdin.", _FILES)] = None,
    chat: Annotated[bool, _option("Wrap the prompt in the model's chat template.", _FILES, "--chat")] = False,
    prefill: Annotated[int | None, _option("Use only the first N tokens of the prompt.", _FILES)] = None,
    output: Annotated[Path | None, _option("Write the text to this file instead of stdout.", _FILES)] = None,
    tokens_out: Annotated[Path | None, _option("Write the new token ids to this .npy file (int32).", _FILES)] = None,
    stats: Annotated[Path | None, _option("Write statistics to this JSON file.", _FILES)] = None,
    quiet: Annotated[bool, _option("No live line on stderr.", _FILES, "--quiet")] = False,
    model: Annotated[str, _option("Bundled name, folder, owner/model or owner/model@revision.", _RUNNING)] = "novelist",
    revision: Annotated[str | None, _option("Branch, tag or commit of a hub id; default: main.", _RUNNING)] = None,
    cache_dir: Annotated[Path | None, _option("Where files from the hub are kept; default: HF_HOME's.",
                                              _RUNNING)] = None,
    offline: Annotated[bool, _option("Use what was fetched from the hub before.", _RUNNING, "--offline")] = False,
    drafter: Annotated[str, _option("auto, plain, ngram, suffix, tokenswift, medusa, magicdec, draft-model, triforce.",
                                    _RUNNING)] = "auto",
    drafter_option: Annotated[list[str] | None, _option("KEY=VALUE for the drafter; repeatable.", _RUNNING)] = None,
    heads: Annotated[str | None, _option("Folder or hub id of heads; default: the model's.", _RUNNING)] = None,
    device: Annotated[str, _option("auto, cpu or cuda.", _RUNNING)] = "auto",
    dtype: Annotated[str, _option("auto (the file's; float16: bfloat16), float32 or bfloat16.", _RUNNING)] = "auto",
    quantize: Annotated[str, _option("none, or int8: half the memory, another (slightly worse) model.",
                                     _RUNNING)] = "none",
    threads: Annotated[int | None, _option("CPU threads; default: PyTorch's choice.", _RUNNING)] = None,
    max_new_tokens: Annotated[int, _option("Tokens to write at most.", _SAMPLING)] = SamplingParams.max_new_tokens,
    min_new_tokens: Annotated[int, _option("Tokens before the text may end by itself.", _SAMPLING)] = 0,
    seed: Annotated[int | None, _option("0 to 2**64-1; default: drawn, and reported in --stats.", _SAMPLING)] = None,
    temperature: Annotated[float, _option("0 takes the likeliest token.", _SAMPLING)] = 1.0,
    top_k: Annotated[int, _option("Keep the K likeliest tokens; 0: all.", _SAMPLING)] = 0,
    top_p: Annotated[float, _option("Keep the likeliest tokens up to this probability.", _SAMPLING)] = 1.0,
    min_p: Annotated[float, _option("Keep tokens at least this fraction as likely as the likeliest.", _SAMPLING)] = 0.0,
    eta_cutoff: Annotated[float, _option("Entropy-dependent cutoff; 0: off.", _SAMPLING)] = 0.0,
    min_tokens_to_keep: Annotated[int, _option("min-p and eta keep at least this many.", _SAMPLING)] = 1,
    repetition_penalty: Annotated[float, _option("Penalty on tokens of the window; 1: off.", _SAMPLING)] = 1.0,
    penalty_window: Annotated[int, _option("Last tokens penalised.", _SAMPLING)] = SamplingParams.penalty_window,
    stop: Annotated[list[str] | None, _option("Text that ends the generation; repeatable.", _SAMPLING)] = None,
    stop_token_id: Annotated[list[int] | None, _option("Token id that ends it; repeatable.", _SAMPLING)] = None,
    ignore_eos: Annotated[bool, _option("The model's end of text does not end it.", _SAMPLING, "--ignore-eos")] = False,
) -> int:
    """Write a text that goes on from PROMPT, streaming it to stdout.

    The text depends on model, prompt, seed and sampling settings only, never on the drafter.
    """
    from longdraft.files import open_outputs, read_prompt

    params = SamplingParams(
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, seed=seed, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, eta_cutoff=eta_cutoff, min_tokens_to_keep=min_tokens_to_keep,
        repetition_penalty=repetition_penalty, penalty_window=penalty_window, stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()), ignore_eos=ignore_eos)
    options = parse_pairs(drafter_option or ())
    text = read_prompt(prompt, prompt_file)
    files = open_outputs({"--output": output, "--tokens-out": tokens_out, "--stats": stats})
    try:
        from longdraft.cli.display import LoadBar
        from longdraft.engine import load

        with LoadBar(quiet=quiet) as bar:
            engine = load(model, drafter=drafter, drafter_options=options, heads=heads, device=device, dtype=dtype,
                          quantize=quantize, threads=threads, revision=revision, cache_dir=cache_dir, offline=offline,
                          on_load=bar.show)
        ids = _shortened(engine.chat(text) if chat else engine.encode(text), prefill)
        return _write(lambda progress: engine.generate(ids, params, on_prefill=progress), params, files, quiet)
    finally:
        for file in files.values():
            file.abandon()


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """KEY=VALUE texts to a mapping; UsageError for other shapes and for a key given twice."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise UsageError(f"--drafter-option is {pair!r}; allowed: KEY=VALUE, such as budget=256")
        if key in parsed:
            raise UsageError(f"--drafter-option {key} is given twice; give it once")
        parsed[key] = value
    return parsed


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
