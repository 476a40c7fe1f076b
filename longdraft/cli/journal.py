"""`longdraft resume` and `longdraft inspect`: continue a journal's text, and show the journal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.cli import options
from longdraft.cli.options import FILES, RUNNING, OptionValues, engine_options, option, with_option_groups
from longdraft.engine.settings import JOURNALING, SETTINGS
from longdraft.system.files import named_folder

if TYPE_CHECKING:
    from longdraft.journal.format import JournalContent, StepRecord

Folder = Annotated[Path, typer.Argument(
    metavar="JOURNAL", help="The folder given as --journal.", show_default=False, parser=named_folder)]
_ELSEWHERE = dict(help="Where the model is now.", default=None, shown="as in the journal")
_MAX_TABLE_ROWS = 12


@with_option_groups
def resume(
    journal: Folder,
    output: options.Output = None,
    tokens_out: options.TokensOut = None,
    stats: options.Stats = None,
    quiet: options.Quiet = False,
    *,
    journaling: Annotated[OptionValues, engine_options(JOURNALING, FILES)],
    loading: Annotated[OptionValues, engine_options(
        [SETTINGS[name] for name in ("model", "tokenizer", "chat_template", "cache_dir", "offline", "drafter",
                                     "drafter_options", "heads", "threads", "quantized_cache")],
        model=_ELSEWHERE, drafter=dict(help="As for generate.", default=None, shown="the journal's"))],
    allow_different_kernels: Annotated[bool, option(
        "Continue with other kernels or versions than the journal's. The statistics say so.", RUNNING,
        "--allow-different-kernels")] = False,
) -> int:
    """Resume an interrupted text. The whole text, from its first word, equals that of an uninterrupted run.

    Settings, seed and prompt are the journal's. The model's location and the drafter may be others.
    """
    from longdraft.cli.display import LoadBar
    from longdraft.cli.stream import TextRun, follow, write_generation
    from longdraft.engine.loading import load_for
    from longdraft.journal.format import read_journal
    from longdraft.journal.snapshot_folder import SnapshotOptions
    from longdraft.journal.writer import parse_fsync
    from longdraft.system.files import open_outputs

    parse_fsync(journaling["fsync"])
    SnapshotOptions.parse(journaling["snapshot"], journaling["snapshot_max"])
    loading |= {"drafter_options": loading["drafter_options"] or None, "cache_ram": 0}
    content = read_journal(journal)
    options.require_one_process(int(content.header.arithmetic.get("tensor_parallel", "1")))
    if options.is_follower():
        return follow(lambda: load_for(content.header, **loading))
    files = open_outputs({"--output": output, "--tokens-out": tokens_out, "--stats": stats})
    try:
        with LoadBar(quiet=quiet, quantises=content.header.quantize in ("int8", "int4")) as bar:
            engine = load_for(content.header, **loading, on_load=bar.show)
        if content.finish and not quiet:
            print(f"longdraft: the text is complete ({len(content.tokens):,} tokens, finish reason {content.finish})",
                  file=sys.stderr)
        with engine:
            return write_generation(TextRun(
                lambda progress: engine.resume(journal, on_prefill=progress, **journaling,
                                               allow_different_kernels=allow_different_kernels),
                content.header.params.max_new_tokens, files, journal, quiet))
    finally:
        for file in files.values():
            file.abandon()


@with_option_groups
def inspect(
    journal: Folder,
    as_json: Annotated[bool, option("Print JSON instead of tables.", FILES, "--json")] = False,
    text: Annotated[Path | None, option("Write the text so far to this file; '-' is stdout.", FILES)] = None,
    tokens_out: options.TokensOut = None,
    *,
    loading: Annotated[OptionValues, engine_options(
        [SETTINGS[name] for name in ("model", "chat_template", "cache_dir", "offline")], model=_ELSEWHERE)],
) -> None:
    """Show a journal: settings, progress, and speed and acceptance over the length. It may be in use."""
    from longdraft.errors import UsageError
    from longdraft.journal.format import read_journal
    from longdraft.system.files import open_outputs

    is_stdout = text is not None and str(text) == "-"
    if as_json and is_stdout:
        raise UsageError("--json and --text - both write to stdout; give --text a file")
    content = read_journal(journal)
    files = open_outputs({"--text": None if is_stdout else text, "--tokens-out": tokens_out})
    try:
        if text is not None:
            shown = _text(content, **loading)
            if is_stdout:
                sys.stdout.write(shown)
            else:
                files["--text"].write(shown.encode())
                files["--text"].finish()
        if tokens_out is not None:
            from longdraft.cli.stream import npy

            files["--tokens-out"].write(npy(content.tokens))
            files["--tokens-out"].finish()
    finally:
        for file in files.values():
            file.abandon()
    report = describe(journal, content)
    if as_json:
        print(json.dumps(report, indent=2))
    elif not is_stdout:
        _print(report)


def _text(content: JournalContent, model: str | None, chat_template: Path | None, cache_dir: Path | None,
          offline: bool) -> str:
    """The text of the tokens, by the journal's tokenizer."""
    from longdraft.checkpoint import hub
    from longdraft.errors import JournalError
    from longdraft.text.stream import TextStream
    from longdraft.text.thought_rules import new_thought
    from longdraft.text.tokenizer import Tokenizer

    name = model or content.header.model
    tokenizer = Tokenizer(hub.resolve(name, hub.Hub(cache_dir=cache_dir, offline=offline)), chat_template)
    if tokenizer.sha256 != content.header.tokenizer:
        raise JournalError(f"the tokenizer of {name} differs from the journal's; give the journal's model as --model")
    writing = TextStream(tokenizer, content.params, content.header.eos_token_ids,
                         new_thought(tokenizer, content.params, content.header.prompt))
    shown = writing.push(content.tokens.tolist())
    if len(shown.tokens) < len(content.tokens):  # a stop text in a thought that was not found
        raise JournalError("tokens follow the end of the text; give the --chat-template with which it was begun")
    return shown.text if writing.finish_reason else shown.text + writing.flush()


def describe(folder: Path, content: JournalContent) -> dict[str, Any]:
    """The report of `inspect`, with the keys of the statistics."""
    from dataclasses import asdict

    from longdraft.engine import run_statistics
    from longdraft.journal.writer import is_being_written

    header = asdict(content.header)
    prompt = header.pop("prompt")
    runs = [asdict(run) for run in content.runs]
    is_pure = all(run.arithmetic == content.header.arithmetic for run in content.runs)
    state = "finished" if content.finish else "being written" if is_being_written(folder) else "unfinished"
    return {
        "journal": str(folder),
        "state": state,
        "finish_reason": content.finish,
        "prompt_tokens": len(prompt),
        "new_tokens": len(content.tokens),
        "max_new_tokens": content.header.params.max_new_tokens,
        **_figures(content.steps),
        **run_statistics.of_tokens(content.tokens),
        "exactness": content.header.exactness if is_pure else "distribution",
        "torn_bytes": 0 if state == "being written" else content.damaged_bytes,
        "thinking_close_at": content.closing.token if content.closing else content.header.params.thinking_close_at,
        "header": header,
        "runs": runs,
        "over_length": _over_length(content.steps),
    }


def _figures(steps: list[StepRecord]) -> dict[str, Any]:
    tokens, seconds = sum(step.num_tokens for step in steps), sum(step.seconds for step in steps)
    drafted = sum(step.drafted for step in steps)
    # A record may have more tokens than drafts and one: tokens are held where a banned phrase may begin.
    accepted = sum(max(0, min(step.num_tokens - 1, step.drafted)) for step in steps)
    return {
        "steps": len(steps),
        "decode_seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "mean_accepted_length": tokens / len(steps) if steps else 0.0,
    }


def _over_length(steps: list[StepRecord]) -> list[dict[str, Any]]:
    """The figures of equal parts of the text, each a round number of tokens long."""
    total = sum(step.num_tokens for step in steps)
    size = next(unit * scale for scale in (10**power for power in range(20)) for unit in (1, 2, 5)
                if unit * scale * _MAX_TABLE_ROWS >= total)
    parts: list[list[StepRecord]] = [[] for _ in range(-(-total // size))]
    at = 0
    for step in steps:
        parts[at // size].append(step)
        at += step.num_tokens
    return [{"from": size * i, "to": min(total, size * (i + 1)), **_figures(part)}
            for i, part in enumerate(parts) if part]


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    header, console = report["header"], Console(highlight=False, soft_wrap=True)
    settings = ", ".join(f"{name} {value}" for name, value in header["sampling"].items() if value not in ([], None))
    state = report["state"] + (f" ({report['finish_reason']})" if report["finish_reason"] else "")
    lines = {
        "journal": report["journal"],
        "state": state + (f", {report['torn_bytes']} bytes torn" if report["torn_bytes"] else ""),
        "tokens": f"{report['new_tokens']:,} of {report['max_new_tokens']:,}; prompt {report['prompt_tokens']:,}",
        "speed": f"{report['tokens_per_second']:.1f} tokens/s, {report['mean_accepted_length']:.2f} tokens per step, "
                 f"{report['decode_seconds']:.1f} s of decoding",
        "distinct 4-grams": f"{report['distinct_4']:.0%}",
        "sha256 of the tokens": report["sha256_tokens"],
        "model": f"{header['model']} (weights {header['weights'][:12]}, quantize {header['quantize']})",
        "drafter": header["drafter"],
        "arithmetic": ", ".join(f"{name} {value}" for name, value in header["arithmetic"].items()),
        "exactness": report["exactness"],
        "sampling": settings,
        "runs": "; ".join(f"{run['began']} from token {run['token']:,}" for run in report["runs"]),
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        console.print(f"{name:{width}}  {value}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("tokens", "tokens/s", "tokens per step", "accepted drafts"):
        table.add_column(name, justify="right")
    for part in report["over_length"]:
        table.add_row(f"{part['from']:,}-{part['to']:,}", f"{part['tokens_per_second']:.1f}",
                      f"{part['mean_accepted_length']:.2f}", f"{part['acceptance_rate']:.0%}")
    console.print(table)
