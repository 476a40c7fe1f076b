"""From a generation to stdout or files: what `generate` and `resume` share."""

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
from longdraft.console import Interrupt, Interrupted, Terminated, clock, stdout_lost
from longdraft.core import Event
from longdraft.engine import Engine
from longdraft.errors import LongdraftError
from longdraft.files import OutputFile
from longdraft.generation import Generation
from longdraft.journal import resume_hint

if TYPE_CHECKING:
    from longdraft.report.generation import TurnRecorder

_LATER_S = 2.0


@dataclass
class Job:
    """What is to be written, and where to.

    start           begins it; is given the function that is told of the prefill
    max_new_tokens  of the whole text
    files           option -> its file
    journal         the folder of the text's journal, if it has one
    engine          whose text it is, for a report
    """

    start: Callable[[Callable[[int, int], None]], Generation]
    max_new_tokens: int
    files: dict[str, OutputFile]
    journal: Path | None
    quiet: bool
    engine: Engine | None = None


def write(job: Job) -> int:
    """Run a generation to its end or to the first signal; returns the exit status."""
    status = 0
    with Interrupt() as interrupt:
        with TextDisplay(job.max_new_tokens, quiet=job.quiet, text="--output" not in job.files) as display:

            def progress(done: int, total: int) -> None:
                interrupt.check()
                display.prefilled(done, total)

            generation = job.start(progress)
            recorder = _new_recorder(job)
            try:
                _stream(generation, display, interrupt, job.files.get("--output"), recorder)
            except OSError as error:
                status = stdout_lost(error)
            except KeyboardInterrupt:  # Typer makes it status 130, and says nothing
                print("longdraft:", "; ".join(["interrupted", *_hints(generation, job)]), file=sys.stderr)
                raise
            except (LongdraftError, MemoryError, Terminated) as error:
                for hint in _hints(generation, job):
                    error.add_note(hint)
                raise
            finally:
                generation.close()
        _finish(generation, job)
        if recorder and job.engine:
            from longdraft.report.generation import render_report

            job.files["--report"].write(render_report(generation, job.engine, recorder).encode())
            job.files["--report"].finish()
        show_summary(generation, quiet=job.quiet, places=_places(generation, job))
        _tell_end(generation, job, interrupt)
    return 128 + interrupt.number if interrupt.number else status


def follow(load: Callable[[], Engine]) -> int:
    """A rank behind the first: works along with it in silence, which says what there is to say.

    A signal to all is the first one's to answer; it ends the work for everybody.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        load().follow()
    except LongdraftError:
        time.sleep(_LATER_S)  # torchrun ends all where one fails: let the first say why
        return 1
    return 0


def _new_recorder(job: Job) -> TurnRecorder | None:
    """Records the events if a report is requested."""
    if "--report" not in job.files:
        return None
    from longdraft.report.generation import TurnRecorder

    return TurnRecorder(job.max_new_tokens)


def _hints(generation: Generation, job: Job) -> list[str]:
    """How to go on, where that can be done."""
    return [resume_hint(job.journal)] if job.journal and not generation.is_finished else []


def show_summary(generation: Generation, *, quiet: bool, places: Iterable[str] = ()) -> None:
    """Print one line about the run on stderr, if that is a terminal. places: where the text is kept."""
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
    print("longdraft:", " · ".join([*parts, *places]), file=sys.stderr)


def _main_drafter(stats: dict[str, Any]) -> str:
    """The drafter that wrote most of the run's tokens, and its share of them."""
    counts = stats.get("tokens_by_choice") or {
        "no draft": stats["steps"], **{source: count["accepted"] for source, count in stats["by_source"].items()}}
    name = max(counts, key=counts.__getitem__)
    return f"most tokens by {name} ({counts[name] / max(1, sum(counts.values())):.0%})"


def _places(generation: Generation, job: Job) -> list[str]:
    """Where the text is kept; an output file that is still partial is not named."""
    places = [f"journal {job.journal}"] if job.journal else []
    if "--output" in job.files and (generation.is_finished or not job.journal):
        places.append(f"output {job.files['--output'].path}")
    return places


def _tell_end(generation: Generation, job: Job, interrupt: Interrupt) -> None:
    """A line on stderr about a text that is not whole."""
    count = f"{len(generation.tokens):,} tokens"
    if generation.is_finished:
        return
    how = "interrupted" if interrupt.number else "stopped"
    if job.journal or interrupt.number:
        what = _hints(generation, job) or ["what was written is whole"]
        print(f"longdraft: {how} after {count}; {what[0]}", file=sys.stderr)


def _stream(generation: Generation, display: TextDisplay, interrupt: Interrupt, output: OutputFile | None,
            recorder: TurnRecorder | None) -> None:
    is_resumed = generation.num_resumed > 0  # the first event holds what an earlier run wrote
    try:
        for event in generation:
            if recorder:
                recorder.add(event)
            if output:
                output.write(event.text.encode())
            display.show(event, generation.distinct, is_resumed=is_resumed)
            is_resumed = False
            if not event.finish_reason:
                interrupt.check()
    except Interrupted:
        generation.close()
        rest = Event((), generation.held_text)
        if output:
            output.write(rest.text.encode())
        display.show(rest, generation.distinct)


def _finish(generation: Generation, job: Job) -> None:
    """Give the files their names. A text that a journal can go on with stays a `.partial` one until it is whole."""
    is_whole = generation.is_finished or not job.journal
    if is_whole and "--output" in job.files:
        job.files["--output"].finish()
    if is_whole and "--tokens-out" in job.files:
        job.files["--tokens-out"].write(npy(generation.tokens))
        job.files["--tokens-out"].finish()
    if "--stats" in job.files:
        job.files["--stats"].write((json.dumps(generation.stats(), indent=2) + "\n").encode())
        job.files["--stats"].finish()


def npy(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> bytes:
    """The bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, tokens)
    return buffer.getvalue()
