"""`longdraft generate`: a prompt in, a long text out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from longdraft.cli import options
from longdraft.cli.options import FILES, OptionValues, engine_options, option, sampling_options, with_option_groups
from longdraft.engine.settings import JOURNALING, LOADING, TENSOR_PARALLEL
from longdraft.errors import JournalError, UsageError
from longdraft.request.sampling_params import SamplingParams


@with_option_groups
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.", show_default=False)] = None,
    prompt_file: Annotated[str | None, option("Read the prompt from a UTF-8 file; '-' is stdin.", FILES)] = None,
    chat: Annotated[bool, option("Wrap the prompt in the model's chat template.", FILES, "--chat")] = False,
    chat_option: options.ChatOption = None,
    prefill: Annotated[int | None, option("Use only the first N tokens of the prompt.", FILES)] = None,
    output: options.Output = None,
    tokens_out: options.TokensOut = None,
    stats: options.Stats = None,
    report: Annotated[Path | None, option("Write figures and the text, coloured by drafter, to this HTML file.",
                                          FILES)] = None,
    journal: Annotated[Path | None, options.folder_option(
        "Keep a crash-safe journal in this new folder. `longdraft resume` continues from it.", FILES)] = None,
    quiet: options.Quiet = False,
    *,
    journaling: Annotated[OptionValues, engine_options(JOURNALING, FILES)],
    loading: Annotated[OptionValues, engine_options((*LOADING, TENSOR_PARALLEL))],
    sampling: Annotated[OptionValues, sampling_options()],
) -> int:
    """Continue PROMPT and stream the text to stdout.

    The text depends on the model, prompt, seed and sampling settings only, never on the drafter.
    """
    from longdraft.cli.display import load_with_bar
    from longdraft.cli.stream import TextRun, follow, write_generation
    from longdraft.engine.loading import load
    from longdraft.journal.format import journal_exists
    from longdraft.journal.snapshot_folder import SnapshotOptions
    from longdraft.journal.writer import parse_fsync, resume_hint
    from longdraft.system.files import open_outputs, read_prompt

    SamplingParams.from_names(sampling)  # fail before the model is loaded
    chat_options = options.chat_options(chat_option or ())
    if chat_options and not chat:
        raise UsageError("--chat-option is a variable of the chat template; give --chat with it")
    parse_fsync(journaling["fsync"])
    SnapshotOptions.parse(journaling["snapshot"], journaling["snapshot_max"])
    if not journal and any(journaling[each.name] != each.default for each in JOURNALING):
        raise UsageError("--fsync, --snapshot and --snapshot-max are settings of a journal; give --journal with them")
    options.require_one_process(loading["tensor_parallel"])
    loading["cache_ram"] = 0  # one text has no earlier one to begin like
    if options.is_follower():
        return follow(lambda: load(**loading))
    if journal and journal_exists(journal):
        raise JournalError(f"--journal {journal} already holds a journal; {resume_hint(journal)}, or give another "
                           "folder")
    text = read_prompt(prompt, prompt_file)
    if report:
        from longdraft.report import require_packages

        require_packages("--report")
    files = open_outputs({"--output": output, "--tokens-out": tokens_out, "--stats": stats, "--report": report})
    try:
        engine = load_with_bar(loading, quiet=quiet)
        params = engine.params(**sampling)
        options.print_model_defaults(params, quiet=quiet)
        if not chat and not quiet and engine.is_tuned_for_chat:
            print("longdraft: the model is tuned for chat, and the prompt is sent as it is; --chat wraps it in the "
                  "model's chat template", file=sys.stderr)
        if chat:
            effort = engine.effort(params, chat_options)
            params, chat_options = effort.applied(params), effort.variables
        ids = _shortened(engine.chat(text, **chat_options) if chat else engine.encode(text), prefill)
        with engine:
            return write_generation(TextRun(
                lambda progress: engine.generate(ids, params, journal=journal, on_prefill=progress, **journaling),
                params.max_new_tokens, files, journal, quiet, engine))
    finally:
        for opened in files.values():
            opened.abandon()


def _shortened(ids: list[int], prefill: int | None) -> list[int]:
    if prefill is None:
        return ids
    if not 1 <= prefill <= len(ids):
        raise UsageError(f"--prefill is {prefill}; allowed: 1 to {len(ids)} (the prompt's tokens)")
    return ids[:prefill]
