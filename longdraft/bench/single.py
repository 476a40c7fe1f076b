"""The report of a single text: `longdraft generate ... --report FILE.html`."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from longdraft.bench import figures, machine, page
from longdraft.bench.grid import Table
from longdraft.bench.results import Record, Results
from longdraft.bench.turns import Counts
from longdraft.engine import Engine
from longdraft.generation import Generation
from longdraft.model.tokenizer import Tokenizer
from longdraft.speculation.drafter import Accepted

_TURNS = 100  # points of a figure, at most
_LEAST = 64  # tokens of a turn
_SHOWN = ("new_tokens", "finish_reason", "prefill_seconds", "decode_seconds", "tokens_per_second",
          "mean_accepted_length", "distinct_1", "distinct_2", "distinct_3", "distinct_4", "exactness", "sha256_tokens",
          "peak_memory_bytes")


class Watcher:
    """Keeps what the steps of a generation did: set its `push` as `on_step`."""

    def __init__(self, max_new_tokens: int) -> None:
        self._size = max(_LEAST, max_new_tokens // _TURNS)
        self._counts, self._seconds = Counts(), 0.0
        self._written = self._begun = 0
        self.turns: list[Record] = []
        self.sources: list[str] = []  # of each token

    def push(self, accepted: Accepted, seconds: float) -> None:
        self._counts.push(accepted)
        self._seconds += seconds
        self._written += len(accepted.tokens)
        self.sources += [*accepted.sources, figures.TARGET]
        if self._written - self._begun >= self._size:
            self.flush()

    def flush(self) -> None:
        """End the turn."""
        if self._written > self._begun:
            self.turns.append({"end": self._written, "until": self._written, "tokens": self._written - self._begun,
                               "seconds": self._seconds, **self._counts.record()})
        self._counts, self._seconds, self._begun = Counts(), 0.0, self._written


def report(generation: Generation, engine: Engine, watcher: Watcher) -> str:
    """The page."""
    watcher.flush()
    stats = generation.stats()
    session = machine.describe(engine.model.kernels) | engine.provenance | {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "limits": {"read_bandwidth_gb_per_s": machine.read_bandwidth(1 << 28) / 1e9}, "prompt_sha256":
        stats["sha256_prompt"], "kind": "session"}
    results = Results([session])
    name = str(stats["drafter"])
    about: dict[str, Any] = {"kind": "text", "text": "one", "prefill": stats["prompt_tokens"], "reference": name,
                             "sampling": stats["sampling"], "systems": {name: {"own_text": False}}}
    results.add(about)
    results.texts["one"].turns[name] = watcher.turns
    shown = [[key, _cell(stats[key])] for key in _SHOWN]
    rows = [[source, f"{of['drafted']:,}", f"{of['accepted']:,}"] for source, of in stats["by_source"].items()]
    grids = [Table("Statistics", ["", "value"], shown), Table("Guesses", ["source", "drafted", "accepted"], rows)]
    pieces = _pieces(engine.tokenizer, generation, watcher)
    return page.render(f"{stats['new_tokens']:,} tokens by {stats['model']}, drafted by {name}", [
        page.Section("What it took", grids=grids), *page.of_texts(results), page.where([session]),
        page.Section("The text", "Each piece is underlined in the colour of the drafter that guessed it.",
                     extra=page.coloured(pieces))])


def _pieces(tokenizer: Tokenizer, generation: Generation, watcher: Watcher) -> Iterator[tuple[str, str]]:
    stream = tokenizer.stream()
    for token, source in zip(generation.tokens.tolist(), watcher.sources):
        yield stream.push(token), source
    yield stream.flush(), figures.TARGET


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
