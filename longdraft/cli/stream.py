"""Write a generation to stdout or files, for `generate` and `resume`."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from longdraft.cli.display import TextDisplay
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.errors import LongdraftError
from longdraft.journal.writer import resume_hint
from longdraft.request.events import Event
from longdraft.system.console import Interrupt, Interrupted, Terminated, clock, stdout_lost
from longdraft.system.files import OutputFile

if TYPE_CHECKING:
    from longdraft.report.generation import TurnRecorder

_FOLLOWER_EXIT_S = 2.0


@dataclass
class TextRun:
    """A generation to run, and its outputs.

    start           starts it, given a callback for the progress of the prefill (tokens done, tokens in all)
    max_new_tokens  of the whole text
    files           option -> its file
    journal         folder of the text's journal, if it has one
    engine          for a report
    """

    start: Callable[[Callable[[int, int], None]], Generation]
    max_new_tokens: int
    files: dict[str, OutputFile]
    journal: Path | None
    quiet: bool
    engine: Engine | None = None


def write_generation(run: TextRun) -> int:
    """Run a generation to its end or to the first signal; returns the exit status."""
    status = 0
    with Interrupt() as interrupt:
        with TextDisplay(run.max_new_tokens, quiet=run.quiet, text="--output" not in run.files) as display:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                display.prefilled(done, total)

            generation = run.start(progress)
            recorder = _new_recorder(run)
            try:
                _stream(generation, display, interrupt, run.files.get("--output"), recorder)
            except OSError as error:
                status = stdout_lost(error)
            except KeyboardInterrupt:  # Typer turns it into status 130 without a message
                print("longdraft:", "; ".join(["interrupted", *_hints(generation, run)]), file=sys.stderr)
                raise
            except (LongdraftError, MemoryError, Terminated) as error:
                for hint in _hints(generation, run):
                    error.add_note(hint)
                raise
            finally:
                generation.close()
        _finish(generation, run)
        if recorder and run.engine:
            from longdraft.report.generation import render_report

            run.files["--report"].write(render_report(generation, run.engine, recorder).encode())
            run.files["--report"].finish()
        show_summary(generation, quiet=run.quiet, locations=_locations(generation, run))
        _print_ending(generation, run, interrupt)
    return 128 + interrupt.number if interrupt.number else status


def follow(load: Callable[[], Engine]) -> int:
    """Run a rank other than the first: take part in its forwards, and print nothing.

    The first rank handles signals that all ranks receive, and ends the work for all.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        load().follow()
    except LongdraftError:
        time.sleep(_FOLLOWER_EXIT_S)  # torchrun ends all ranks if one fails: the first rank prints the reason
        return 1
    return 0


def _new_recorder(run: TextRun) -> TurnRecorder | None:
    """Records the events if a report is requested."""
    if "--report" not in run.files:
        return None
    from longdraft.report.generation import TurnRecorder

    return TurnRecorder(run.max_new_tokens)


def _hints(generation: Generation, run: TextRun) -> list[str]:
    """How to resume, if there is a journal."""
    return [resume_hint(run.journal)] if run.journal and not generation.is_finished else []


def show_summary(generation: Generation, *, quiet: bool, locations: Iterable[str] = ()) -> None:
    """Print one line about the run on stderr, if that is a terminal. locations: where the text is kept."""
    if quiet or not sys.stderr.isatty():
        return
    stats = generation.stats()
    written = stats["new_tokens"] - stats["resumed_tokens"]
    resumed = f" ({stats['resumed_tokens']:,} of them by earlier runs)" if stats["resumed_tokens"] else ""
    parts = [f"{stats['new_tokens']:,} tokens{resumed}"]
    if written:
        seconds, speed, plain = stats["decode_seconds"], stats["tokens_per_second"], stats["plain_tokens_per_second"]
        parts += [f"{seconds:.1f} s" if seconds < 60 else clock(seconds), f"{speed:.1f} tokens/s"]
        if stats["drafter"] != "plain":
            parts += [f"{speed / plain:.2f}x plain decoding ({stats['plain_is']})"] if plain else []
            parts += [f"mean accepted length {stats['mean_accepted_length']:.2f}", _main_drafter(stats)]
    print("longdraft:", " · ".join([*parts, *locations]), file=sys.stderr)


def _main_drafter(stats: dict[str, Any]) -> str:
    """The drafter that wrote most of the run's tokens, and its share of them."""
    counts = stats.get("tokens_by_choice") or {
        "no draft": stats["steps"], **{source: count["accepted"] for source, count in stats["by_source"].items()}}
    name = max(counts, key=counts.__getitem__)
    return f"most tokens by {name} ({counts[name] / max(1, sum(counts.values())):.0%})"


def _locations(generation: Generation, run: TextRun) -> list[str]:
    """Where the text is kept; an output file that is still partial is not named."""
    locations = [f"journal {run.journal}"] if run.journal else []
    if "--output" in run.files and (generation.is_finished or not run.journal):
        locations.append(f"output {run.files['--output'].path}")
    return locations


def _print_ending(generation: Generation, run: TextRun, interrupt: Interrupt) -> None:
    """Print a line on stderr about a text that is unfinished, or that the model ended at once."""
    if generation.is_finished:
        if generation.finish_reason == "eos" and len(generation.tokens) <= 1 and not run.quiet:
            print("longdraft: the model ended the text at once; another prompt, another --seed or --ignore-eos gives a "
                  "longer one", file=sys.stderr)
        return
    how = "interrupted" if interrupt.number else "stopped"
    if run.journal or interrupt.number:
        what = _hints(generation, run) or ["the text up to here is kept"]
        print(f"longdraft: {how} after {len(generation.tokens):,} tokens; {what[0]}", file=sys.stderr)


def _stream(generation: Generation, display: TextDisplay, interrupt: Interrupt, output: OutputFile | None,
            recorder: TurnRecorder | None) -> None:
    is_resumed = generation.num_resumed > 0  # the first event holds what an earlier run wrote
    try:
        for event in generation:
            if recorder:
                recorder.add(event)
            if output:
                output.write(event.text.encode())
            display.show(event, generation.stream.distinct, is_resumed=is_resumed)
            is_resumed = False
            if not event.finish_reason:
                interrupt.check()
    except Interrupted:
        generation.close()
        held = Event((), generation.stream.flush())
        if output:
            output.write(held.text.encode())
        display.show(held, generation.stream.distinct)


def _finish(generation: Generation, run: TextRun) -> None:
    """Rename the files to their final names. A text that can be resumed stays `.partial` until it is complete."""
    is_whole = generation.is_finished or not run.journal
    if is_whole and "--output" in run.files:
        run.files["--output"].finish()
    if is_whole and "--tokens-out" in run.files:
        run.files["--tokens-out"].write(npy(generation.tokens))
        run.files["--tokens-out"].finish()
    if "--stats" in run.files:
        run.files["--stats"].write((json.dumps(generation.stats(), indent=2) + "\n").encode())
        run.files["--stats"].finish()


def npy(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bytes:
    """The bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, tokens)
    return buffer.getvalue()
