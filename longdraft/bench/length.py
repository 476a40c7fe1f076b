"""One long text written by several drafters side by side: speed by length, against plain decoding in the same run.

    longdraft bench length --prompt-file novel.txt --prefill 4096 --max-new-tokens 100000 --drafters "plain auto"

The drafters take turns of some thousand tokens, so that the machine's moods meet all of them alike; what one is
to the first is the median over the turns of a bucket.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from longdraft.bench.experiment import System
from longdraft.bench.results import Record, Results
from longdraft.bench.turns import write_all
from longdraft.core import SamplingParams
from longdraft.engine import Engine

Figures = dict[str, Any]
_KEY = "length"


def run(engine: Engine, settings: Sequence[str], prompt: Sequence[int], params: SamplingParams, bucket: int, turn: int,
        done: Callable[[Figures], None]) -> Figures:
    """All figures: for each setting ("plain", "magicdec,chain=6") its buckets and final statistics.

    Each writes `turn` tokens in turn. `done` gets the figures so far after every round of turns. UsageError at once
    where prompt and tokens are more than the model's context, and if two drafters wrote different texts.
    """
    systems = {setting: System.named(setting) for setting in settings}
    engine.checked(list(prompt), params)
    results = Results()
    results.add({"kind": "text", "text": _KEY, "reference": settings[0],
                 "systems": {name: {"own_text": False} for name in systems}})
    text = results.texts[_KEY]

    def figures() -> Figures:
        first = text.turns[settings[0]]
        return {name: {"buckets": buckets(turns, first, bucket), "stats": text.stats.get(name)}
                for name, turns in text.turns.items()}

    def emit(record: Record) -> None:
        results.add(record)
        if record["system"] == settings[-1]:
            done(figures())

    ends = [*range(turn, params.max_new_tokens, turn), params.max_new_tokens]
    write_all(engine, systems, prompt, params, ends, text, emit)
    return figures()


def buckets(turns: Sequence[Record], first: Sequence[Record], size: int) -> list[Figures]:
    """The turns of one drafter in buckets of `size` new tokens, and how fast they were beside those of the first."""
    found: dict[int, list[int]] = {}
    for place, figure in enumerate(turns):
        found.setdefault((figure["until"] - figure["tokens"] // 2) // size, []).append(place)
    return [_bucket([turns[place] for place in places], [first[place] for place in places])
            for places in found.values()]


def _bucket(turns: Sequence[Record], first: Sequence[Record]) -> Figures:
    tokens, seconds, steps = (sum(turn[key] for turn in turns) for key in ("tokens", "seconds", "steps"))
    ratios = [mine["tokens"] / mine["seconds"] * other["seconds"] / other["tokens"]
              for mine, other in zip(turns, first, strict=True) if mine["tokens"] and other["tokens"]]
    return {
        "until": turns[-1]["until"], "tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "to_first": statistics.median(ratios) if ratios else None,
        "mean_accepted_length": tokens / steps if steps else 0.0,
        **{key: dict(sum((Counter(turn[key]) for turn in turns), Counter()))
           for key in ("tokens_by_choice", "accepted_by_source")},
    }
