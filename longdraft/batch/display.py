"""What a person sees of a job: a live line on a terminal's stderr, and one line at the end."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longdraft.batch.run import Totals
from longdraft.console import clock

_REFRESH = 4  # times a second


class Display:
    """Use as a context manager; `show` takes the totals as they change."""

    def __init__(self, *, quiet: bool) -> None:
        console = Console(file=sys.stderr, highlight=False)
        is_live = console.is_terminal and not quiet
        self._totals: Totals | None = None
        self._live = Live(console=console, refresh_per_second=_REFRESH, transient=True,
                          get_renderable=self._render) if is_live else None

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, totals: Totals) -> None:
        self._totals = totals

    def _render(self) -> Text:
        line = "loading" if self._totals is None else status(self._totals)
        return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def status(totals: Totals) -> str:
    """12 of 100 rows, 1 failed · 4 running · 45,000 tokens · 120.3 tokens/s · 31:00 left"""
    errors = totals.errors + totals.failed
    failed = f", {errors:,} failed" if errors else ""
    left = "" if totals.seconds_left is None else f" · {clock(totals.seconds_left)} left"
    return (f"{totals.skipped + totals.done:,} of {totals.rows:,} rows{failed} · {len(totals.running):,} running · "
            f"{totals.new_tokens:,} tokens · {totals.tokens_per_second:.1f} tokens/s{left}")


def outcome(totals: Totals, *, may_retry: bool = True) -> str:
    """The last line: what this run did. may_retry: the output can be gone on with."""
    parts = [f"{totals.done:,} of {totals.rows:,} rows written"]
    parts += [f"{totals.skipped:,} were done before"] if totals.skipped else []
    errors = totals.errors + totals.failed
    parts += [f"{errors:,} are errors" + " (--retry-errors writes them anew)" * may_retry] if errors else []
    parts += [f"{totals.new_tokens:,} tokens in {clock(totals.seconds)}, {totals.tokens_per_second:.1f} tokens/s"]
    return "; ".join(parts)
