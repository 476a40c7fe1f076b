"""The display of a run on a terminal: a text on stdout, and a live line on stderr.

A pipe gets the text and nothing else. If text and live line share one terminal, the live line stays below the text.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from longdraft.request.events import Event
from longdraft.system.console import clock, replace_unencodable

if TYPE_CHECKING:
    from longdraft.batch.run import Totals
    from longdraft.engine.engine import Engine

_REFRESH_RATE = 8  # per second
_LARGE_MODEL = 1 << 30  # bytes of weights from which loading gets a progress bar
_LARGE_TO_QUANTISE = 1 << 28


class LoadBar:
    """A progress bar on a terminal's stderr while a large model is loaded. Use it as a context manager.

    quantises  the first reading of the weights quantises them; a second one always does
    """

    def __init__(self, *, quiet: bool, quantises: bool = False) -> None:
        console = Console(file=sys.stderr)
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, transient=True)
        self._is_shown = console.is_terminal and not quiet
        self._quantises, self._done = quantises, 0
        self._task = self._progress.add_task("quantising" if quantises else "loading")

    def __enter__(self) -> LoadBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_shown = False  # a drafter that is chosen later may read the weights again
        if self._progress.live.is_started:
            self._progress.stop()

    def show(self, done: int, total: int) -> None:
        if done < self._done:  # a second reading
            self._quantises = True
        self._done = done
        if self._is_shown and total >= (_LARGE_TO_QUANTISE if self._quantises else _LARGE_MODEL):
            self._progress.start()
            self._progress.update(self._task, completed=done, total=total,
                                  description="quantising" if self._quantises else "loading")


def load_with_bar(loading: dict[str, Any], *, quiet: bool) -> Engine:
    """`longdraft.load` with these arguments, and a progress bar."""
    from longdraft.engine.loading import load

    with LoadBar(quiet=quiet, quantises=loading["quantize"] in ("int8", "int4")) as bar:
        return load(**loading, on_load=bar.show)


class _LiveLine:
    """Context manager that keeps what `_render` returns at the bottom of the terminal, unless it is quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._is_live = self._console.is_terminal and not quiet
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._is_live:
            self._live = Live(console=self._console, refresh_per_second=_REFRESH_RATE, transient=True,
                              get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def _render(self) -> RenderableType:
        raise NotImplementedError


def _dim(line: str) -> Text:
    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


class TextDisplay(_LiveLine):
    """Shows the events of one text. Use it as a context manager. text: whether the text goes to stdout."""

    def __init__(self, max_new_tokens: int, *, quiet: bool, text: bool) -> None:
        super().__init__(quiet=quiet)
        self._goal = max_new_tokens
        self._resumed = 0  # tokens of earlier runs, which do not count for the speed
        self._distinct: float | None = None
        self._shows_text = text
        self._shares_terminal = self._is_live and text and sys.stdout.isatty()
        self._line = ""  # the text's unfinished last line, if text and live line share a terminal
        self._prefill = (0, 0)
        self._start = 0.0
        self._tokens = self._steps = 0
        self._has_output = False

    def __enter__(self) -> Self:
        replace_unencodable()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        line, self._line = self._line, ""
        if self._shares_terminal and line:
            self._console.print(Text(line))
        super().__exit__(*exc)
        if not self._is_live and self._has_output and sys.stdout.isatty():
            sys.stdout.write("\n")

    def prefilled(self, done: int, total: int) -> None:
        self._prefill = (done, total)

    def show(self, event: Event, distinct: float | None = None, *, is_resumed: bool = False) -> None:
        """distinct: the share of distinct 4-grams in the latest tokens; is_resumed: an earlier run wrote the event."""
        self._tokens += len(event.tokens)
        self._distinct = distinct
        if is_resumed:
            self._resumed = len(event.tokens)
        else:
            self._start = self._start or time.monotonic()
            self._steps += 1
            if self._steps == 1 and self._live:
                self._live.refresh()  # else the line would be about the prompt, below the first words of the text
        if not self._shows_text or not event.text:
            return
        self._has_output = True
        if self._shares_terminal:
            self._print_above(event.text)
        else:
            sys.stdout.write(event.text)
            sys.stdout.flush()

    def _print_above(self, text: str) -> None:
        """Print finished lines above the live area; keep the unfinished one in it, wrapped at the terminal's width."""
        *done, self._line = (self._line + text).split("\n")
        width = max(20, self._console.width - 1)
        while len(self._line) > width:
            cut = self._line.rfind(" ", 0, width) + 1 or width
            done.append(self._line[:cut])
            self._line = self._line[cut:]
        if done:
            self._console.print(Text("\n".join(done)))

    def _render(self) -> Group:
        status = _dim(self._status())
        return Group(Text(self._line), status) if self._shares_terminal else Group(status)

    def _status(self) -> str:
        if not self._steps:
            done, total = self._prefill
            return f"reading the prompt: {done:,} of {total:,} tokens" if total else "reading the prompt"
        if self._steps == 1:  # no time to measure a speed by
            return f"{self._tokens:,} of {self._goal:,} tokens"
        seconds = max(time.monotonic() - self._start, 1e-9)
        written = self._tokens - self._resumed
        speed = max(written, 1) / seconds
        left = clock((self._goal - self._tokens) / speed)
        distinct = "" if self._distinct is None else f" · {self._distinct:.0%} distinct"
        return (f"{self._tokens:,} of {self._goal:,} tokens · {speed:.1f} tokens/s · "
                f"{written / max(1, self._steps):.2f} per step{distinct} · {left} left")


class BatchDisplay(_LiveLine):
    """The live line of a batch job. Use it as a context manager, and call `show` with each change of the totals."""

    _totals: Totals | None = None

    def show(self, totals: Totals) -> None:
        self._totals = totals

    def _render(self) -> Text:
        return _dim("loading" if self._totals is None else self._totals.live_line())
