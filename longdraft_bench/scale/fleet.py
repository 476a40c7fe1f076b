"""Simulate a fleet that writes long texts on spot machines: the work that journals save, and the cost.

    longdraft bench scale fleet --machines 16 --texts 2000 --spot-hours 2 --price 20

A machine holds a model on several GPUs and writes as many texts together as fit. Spot machines are lost at random
(exponential, --spot-hours on average) and replaced after --replace minutes. A cut text returns to the head of the
queue. With journals on shared storage it continues after its tokens are read again; without journals it starts over.

Measured in this repository: the share of the memory's bandwidth that a step reaches (roofline.json), and the size of a
journal's step record (25 bytes and 4 per token, 4 microseconds; notebook/2026-11.md). Computed: the step times
of scaling.py. Assumed: tokens per forward (--accepted; on the bundled model `auto` reached 6.4 over 100,000
tokens, large models are not measured yet), the cost of a verified row (scaling.py), prefill at half of the peak
arithmetic, losses, prices.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from longdraft.checkpoint import config_file, sizing
from longdraft.errors import UsageError
from longdraft.report.table import Table
from longdraft_bench.models.shapes import SHAPES
from longdraft_bench.scale.scaling import ROWS, Machine, step, texts_that_fit

_STRETCHES = 8  # of a text; a step's time is computed once per stretch
_RECORD_BYTES, _TOKEN_BYTES = 25, 4  # of a journal


@dataclass
class FleetText:
    """The tokens of a text that are written, and those that are kept if its machine is lost."""

    number: int
    written: float = 0.0
    kept: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """The settings of a run. Times are in seconds, the price is in dollars per machine hour."""

    model: str
    gpus: int
    machine: Machine
    machines: int
    texts: int
    tokens: int
    prompt: int
    accepted: float
    spot_s: float
    replace_s: float
    load_s: float
    price: float
    has_journals: bool = True

    @property
    def batch_size(self) -> int:
        """Texts that a machine writes together."""
        return min(texts_that_fit(self.model, self.gpus, self.prompt + self.tokens, self.machine), self.texts)

    def tokens_per_s(self, written: float) -> float:
        """Of one text, while its machine writes the whole batch, at this length."""
        rows = ROWS if self.accepted > 1 else 1
        whole = step(self.model, self.gpus, int(self.prompt + written), self.machine, rows, self.batch_size)
        return self.accepted / whole.seconds

    def prefill_s(self, tokens: float) -> float:
        """To read a prompt or a continued text, while the batch waits."""
        parameters = sizing.model_sizes(config_file.parse_config(SHAPES[self.model])).parameters
        return 2 * parameters * tokens / (self.gpus * self.machine.operations / 2)


def simulate(fleet: Fleet, seed: int) -> dict[str, float]:
    """Machines take texts from a queue until all are written."""
    rng = random.Random(seed)
    speeds = [fleet.tokens_per_s(fleet.tokens * (point + 0.5) / _STRETCHES) for point in range(_STRETCHES)]
    queue = [FleetText(number) for number in reversed(range(fleet.texts))]
    ready = [(0.0, number) for number in range(fleet.machines)]  # when each machine can start a batch
    end = busy = computed = lost = 0.0
    losses = 0
    while queue:
        begin, number = heapq.heappop(ready)
        taken = [queue.pop() for _ in range(min(fleet.batch_size, len(queue)))]
        until = begin + rng.expovariate(1 / fleet.spot_s)
        now = begin + fleet.load_s + sum(fleet.prefill_s(fleet.prompt + text.kept) for text in taken)
        for text in taken:
            text.written = text.kept
        while now < until and (open_texts := [text for text in taken if text.written < fleet.tokens]):
            longest = max(open_texts, key=lambda text: text.written)
            part = min(_STRETCHES - 1, int(longest.written * _STRETCHES / fleet.tokens))
            goal = min(fleet.tokens, (part + 1) * fleet.tokens / _STRETCHES)
            seconds = min((goal - longest.written) / speeds[part], until - now)
            for text in open_texts:
                new = min(seconds * speeds[part], fleet.tokens - text.written)
                text.written += new
                computed += new
            now += seconds
        cut = [text for text in taken if text.written < fleet.tokens - 1e-6]
        for text in cut:
            text.kept = text.written if fleet.has_journals else 0.0
            lost += text.written - text.kept
        queue += cut
        losses += now >= until
        now = min(now, until)
        busy += now - begin
        end = max(end, now)
        heapq.heappush(ready, (now + (fleet.replace_s if now >= until else 0.0), number))
    useful = fleet.texts * fleet.tokens
    return {"hours": end / 3600, "machine_hours": busy / 3600, "losses": losses,
            "tokens_written_twice": lost / useful, "tokens_per_second": useful / end,
            "dollars_per_million_tokens": busy / 3600 * fleet.price / useful * 1e6,
            "journal_bytes_per_token": _RECORD_BYTES / fleet.accepted + _TOKEN_BYTES}


def compare(fleet: Fleet, seed: int) -> dict[str, dict[str, float]]:
    """The figures with journals and without. Without journals a fleet on which no text would ever finish is left out.

    Raises UsageError if the GPUs of a machine do not hold the model and one text.
    """
    if not fleet.batch_size:
        raise UsageError(f"{fleet.gpus} GPUs do not hold {fleet.model} and a text of {fleet.tokens} tokens; give more "
                         "--gpus or less --tokens")
    figures = {"with journals": simulate(fleet, seed)}
    if fleet.tokens / fleet.tokens_per_s(fleet.tokens / 2) <= 8 * fleet.spot_s:
        figures["without"] = simulate(replace(fleet, has_journals=False), seed)
    return figures


def table(fleet: Fleet, figures: Mapping[str, Mapping[str, float]]) -> Table:
    columns = ["", *(key.replace("_", " ") for key in figures["with journals"])]
    rows = [[name, *(f"{value:,.2f}" for value in of_fleet.values())] for name, of_fleet in figures.items()]
    return Table(f"{fleet.batch_size} texts on each machine", columns, rows)
