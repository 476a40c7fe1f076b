"""`longdraft generate`: a prompt in, a long text out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from longdraft.cli import options
from longdraft.cli.options import FILES, SAMPLING, option, parse_pairs
from longdraft.core import SamplingParams
from longdraft.errors import JournalError, UsageError


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to go on from.", show_default=False)] = None,
    prompt_file: Annotated[str | None, option("Read the prompt from a UTF-8 file; '-': stdin.", FILES)] = None,
    chat: Annotated[bool, option("Wrap the prompt in the model's chat template.", FILES, "--chat")] = False,
    chat_option: options.ChatOption = None,
    prefill: Annotated[int | None, option("Use only the first N tokens of the prompt.", FILES)] = None,
    output: Annotated[Path | None, option("Write the text to this file instead of stdout.", FILES)] = None,
    tokens_out: Annotated[Path | None, option("Write the new token ids to this .npy file (int32).", FILES)] = None,
    stats: Annotated[Path | None, option("Write statistics to this JSON file.", FILES)] = None,
    report: Annotated[Path | None, option("Write figures and the text, coloured by drafter, to this HTML file.",
                                          FILES)] = None,
    journal: Annotated[Path | None, option("Crash-safe journal in this new folder; `longdraft resume` goes on from it.",
                                           FILES)] = None,
    fsync: options.Fsync = "1",
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
    tensor_parallel: options.TensorParallel = 1,
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
    logit_bias: options.LogitBias = None,
    ignore_eos: Annotated[bool, option("The model's end of text does not end it.", SAMPLING, "--ignore-eos")] = False,
    on_loop: options.OnLoop = SamplingParams.on_loop,
) -> int:
    """Write a text that goes on from PROMPT, streaming it to stdout.

    The text depends on model, prompt, seed and sampling settings only, never on the drafter.
    """
    from longdraft.cli.display import LoadBar
    from longdraft.cli.stream import Job, follow, write
    from longdraft.files import open_outputs, read_prompt
    from longdraft.journal import journal_exists, parse_fsync, resume_hint
    from longdraft.loading import load

    given = {
        "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens, "seed": seed, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "eta_cutoff": eta_cutoff,
        "min_tokens_to_keep": min_tokens_to_keep, "repetition_penalty": repetition_penalty,
        "penalty_window": penalty_window, "stop": stop or None,
        "stop_token_ids": stop_token_id or None, "logit_bias": options.parse_bias(logit_bias or ()),
        "ignore_eos": ignore_eos, "on_loop": on_loop}
    SamplingParams.from_names(given)  # a mistake shows before the model is read
    drafting = parse_pairs("--drafter-option", drafter_option or ())
    chat_options = options.chat_options(chat_option or ())
    if chat_options and not chat:
        raise UsageError("--chat-option is a variable of the chat template; give --chat with it")
    parse_fsync(fsync)
    options.require_one_process(tensor_parallel)
    loading: dict[str, Any] = {
        "model": model, "drafter": drafter, "drafter_options": drafting, "heads": heads, "device": device,
        "dtype": dtype, "quantize": quantize, "threads": threads, "revision": revision, "cache_dir": cache_dir,
        "offline": offline, "tensor_parallel": tensor_parallel}
    if options.is_follower():
        return follow(lambda: load(**loading))
    if journal and journal_exists(journal):
        raise JournalError(f"--journal {journal} holds one already; {resume_hint(journal)}, or give another folder")
    text = read_prompt(prompt, prompt_file)
    if report:
        from longdraft.report import require_packages

        require_packages("--report")
    files = open_outputs({"--output": output, "--tokens-out": tokens_out, "--stats": stats, "--report": report})
    try:
        with LoadBar(quiet=quiet) as bar:
            engine = load(**loading, on_load=bar.show)
        params = engine.params(**given)
        options.tell_defaults(params, quiet=quiet)
        ids = _shortened(engine.chat(text, **chat_options) if chat else engine.encode(text), prefill)
        with engine:
            return write(Job(lambda progress: engine.generate(ids, params, journal=journal, fsync=fsync,
                                                              on_prefill=progress),
                             params.max_new_tokens, files, journal, quiet, engine))
    finally:
        for file in files.values():
            file.abandon()


def _shortened(ids: list[int], prefill: int | None) -> list[int]:
    if prefill is None:
        return ids
    if not 1 <= prefill <= len(ids):
        raise UsageError(f"--prefill is {prefill}; allowed: 1 to {len(ids)} (the prompt's tokens)")
    return ids[:prefill]
