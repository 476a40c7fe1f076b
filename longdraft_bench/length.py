"""One long text written by several drafters in turns: speed by length; `longdraft bench length`.

    longdraft bench length --prompt-file novel.txt --prefill 4096 --max-new-tokens 100000 --drafters "plain auto"

A drafter's speed relative to the first drafter is the median over the turns of a bucket.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longdraft.engine.engine import Engine
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft_bench.results import Results
from longdraft_bench.systems import Engines, systems_named
from longdraft_bench.turns import write_in_turns

_TEXT = "length"


def measure_length(engine: Engine, settings: Sequence[str], prompt: Sequence[int], params: SamplingParams,
                   bucket: int, turn: int, on_round: Callable[[Record], None]) -> Record:
    """For each setting ("plain", "magicdec,chain=6") its buckets and final statistics. A setting may stand twice.

    bucket    new tokens that are reported together
    turn      new tokens of a turn
    on_round  is called with the results so far after each round of turns

    Raises UsageError if prompt and new tokens exceed the model's context, or if two drafters write different texts.
    """
    systems = systems_named(settings)
    engine.check_request(list(prompt), params)
    results = Results()
    results.add({"kind": "text", "text": _TEXT, "reference": settings[0],
                 "systems": {name: {"own_text": False} for name in systems}})
    text = results.texts[_TEXT]

    def figures() -> Record:
        first = text.turns[settings[0]]
        return {name: {"buckets": buckets(turns, first, bucket), "stats": text.stats.get(name)}
                for name, turns in text.turns.items()}

    def emit(record: Record) -> None:
        results.add(record)
        if record["system"] == list(systems)[-1]:
            on_round(figures())

    ends = [*range(turn, params.max_new_tokens, turn), params.max_new_tokens]
    write_in_turns(Engines(engine), systems, prompt, params, ends, text, emit)
    return figures()


def buckets(turns: Sequence[Record], first: Sequence[Record], size: int) -> list[Record]:
    """The turns of a drafter in buckets of `size` new tokens, compared with the same turns of the first drafter."""
    places: dict[int, list[int]] = {}
    for place, turn in enumerate(turns):
        places.setdefault((turn["until"] - turn["tokens"] // 2) // size, []).append(place)
    return [_bucket([turns[place] for place in of], [first[place] for place in of]) for of in places.values()]


def _bucket(turns: Sequence[Record], first: Sequence[Record]) -> Record:
    tokens, seconds, steps = (sum(turn[key] for turn in turns) for key in ("tokens", "seconds", "steps"))
    ratios = [mine["tokens"] * other["seconds"] / (mine["seconds"] * other["tokens"])  # exactly 1 for the first drafter
              for mine, other in zip(turns, first, strict=True) if mine["tokens"] and other["tokens"]]
    return {
        "until": turns[-1]["until"], "tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "to_first": statistics.median(ratios) if ratios else None,
        "mean_accepted_length": tokens / steps if steps else 0.0,
        **{key: dict(sum((Counter(turn[key]) for turn in turns), Counter()))
           for key in ("tokens_by_choice", "accepted_by_source")},
    }


def table(figures: Mapping[str, Any]) -> Table:
    rounds = zip(*(found["buckets"] for found in figures.values()), strict=False)
    records = [bucket | {"drafter": name} for each in rounds for name, bucket in zip(figures, each, strict=True)]
    return Table.of_records("Speed by length", (
        ("until", "until", ","), ("drafter", "drafter", ""), ("seconds", "seconds", ".1f"),
        ("tokens/s", "tokens_per_second", ",.1f"), ("mean accepted length", "mean_accepted_length", ".2f"),
        ("to the first", "to_first", ".2f")), records)
