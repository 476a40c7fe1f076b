"""The report of one generation: `longdraft generate ... --report FILE.html`.

    recorder = TurnRecorder(max_new_tokens=1000)
    for event in generation:
        recorder.add(event)
    Path("report.html").write_text(render_report(generation, engine, recorder))
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.report import figures, page
from longdraft.report.table import Table
from longdraft.report.turns import MeasuredText, Record, StepCounts
from longdraft.request.events import Event
from longdraft.system import machine
from longdraft.text.tokenizer import Tokenizer

_MAX_TURNS = 100  # points of a figure
_MIN_TURN_TOKENS = 64
_SHOWN_STATISTICS = (
    "new_tokens", "finish_reason", "prefill_seconds", "decode_seconds", "tokens_per_second", "mean_accepted_length",
    "distinct_1", "distinct_2", "distinct_3", "distinct_4", "exactness", "sha256_tokens", "peak_memory_bytes")


class TurnRecorder:
    """Records the events of a generation, in turns of equal length."""

    def __init__(self, max_new_tokens: int) -> None:
        self.turns: list[Record] = []
        self.sources: list[str] = []  # of each token
        self._turn_tokens = max(_MIN_TURN_TOKENS, max_new_tokens // _MAX_TURNS)
        self._counts, self._seconds = StepCounts(), 0.0
        self._written = self._turn_start = 0

    def add(self, event: Event) -> None:
        self._counts.add(event)
        self._seconds += event.seconds
        self._written += len(event.tokens)
        self.sources += [source or figures.TARGET for source in event.sources]
        if self._written - self._turn_start >= self._turn_tokens:
            self.end_turn()

    def end_turn(self) -> None:
        if self._written > self._turn_start:
            self.turns.append({"end": self._written, "until": self._written, "seconds": self._seconds,
                               "tokens": self._written - self._turn_start, **self._counts.record()})
        self._counts, self._seconds, self._turn_start = StepCounts(), 0.0, self._written


def render_report(generation: Generation, engine: Engine, recorder: TurnRecorder) -> str:
    """The HTML page."""
    recorder.end_turn()
    stats = generation.stats()
    session = machine.description(engine.model.kernels) | engine.provenance | {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "limits": {"read_bandwidth_gb_per_s": machine.read_bandwidth(1 << 28) / 1e9},
        "prompt_sha256": stats["sha256_prompt"]}
    drafter = str(stats["drafter"])
    text = MeasuredText({"prefill": stats["prompt_tokens"], "reference": drafter, "sampling": stats["sampling"]},
                        {drafter: recorder.turns})
    statistics = [[key, _cell(stats[key])] for key in _SHOWN_STATISTICS]
    sources = [[source, f"{of['drafted']:,}", f"{of['accepted']:,}"] for source, of in stats["by_source"].items()]
    return page.render_page(f"{stats['new_tokens']:,} tokens by {stats['model']}, drafted by {drafter}", [
        page.Section("Statistics", tables=[
            Table("Statistics", ["", "value"], statistics),
            Table("Draft tokens", ["source", "drafted", "accepted"], sources)]),
        *page.text_sections([text], session), page.provenance_section([session]),
        page.coloured_section("The text", "Each piece is underlined in the colour of the drafter that proposed it.",
                              _pieces(engine.tokenizer, generation, recorder))])


def _pieces(tokenizer: Tokenizer, generation: Generation, recorder: TurnRecorder) -> Iterator[tuple[str, str]]:
    stream = tokenizer.stream()
    for token, source in zip(generation.tokens.tolist(), recorder.sources):
        yield stream.push(token), source
    yield stream.flush(), figures.TARGET


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
