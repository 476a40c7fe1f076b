"""One long text written by several drafters in turns: speed by length; `longdraft bench length`.

    longdraft bench length --prompt-file novel.txt --prefill 4096 --max-new-tokens 100000 --drafters "plain auto"
    longdraft bench length --model stretched --read-by novelist-gqa --prompt-file novel.txt --prefill 32768 \\
        --max-new-tokens 256 --bucket 256 --turn 64

A drafter's speed relative to the first drafter is the median over the turns of a bucket.

`--read-by` is for stretched models (longdraft_bench/models). A model of 500 million parameters reads 32,768 tokens in
ten minutes on two cores, the small model that it was made from in some seconds. Both compute the same function, so the
small model's keys and values are those of the layers and heads of the large one that hold them. All other layers and
heads add nothing; they get random keys and values, which cost what any cost. The large model reads the last 512 tokens.
Of a hybrid, whose states are not filled, the large model reads the whole prompt.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.model.transformer import Transformer
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.sampling_params import SamplingParams
from longdraft_bench.models.stretched import Correspondence, fill, read_by
from longdraft_bench.turns import write_text

_LAST = 512  # tokens of the prompt that a stretched model reads itself


def measure_length(engine: Engine, settings: Sequence[str], prompt: Sequence[int], params: SamplingParams,
                   bucket: int, turn: int, on_round: Callable[[Record], None], small: Transformer | None = None
                   ) -> Record:
    """For each setting ("plain", "magicdec,chain=6") its buckets and final statistics. A setting may occur twice.

    bucket    new tokens that are reported together
    turn      new tokens of a turn
    on_round  is called with the results so far after each round of turns
    small     the model that a stretched model was made from, which reads the prompt for it

    Raises UsageError if prompt and new tokens exceed the model's context, or if two drafters write different texts.
    """
    def figures(turns: Mapping[str, Sequence[Record]], stats: Mapping[str, Record]) -> Record:
        first = turns[settings[0]]
        return {name: {"buckets": buckets(own, first, bucket), "stats": stats.get(name)} for name, own in turns.items()}

    text = write_text(engine, settings, prompt, params, turn, lambda text: on_round(figures(text.turns, text.stats)),
                      _filler(engine.model, small, prompt) if small else None)
    return figures(text.turns, text.stats)


def _filler(model: Transformer, small: Transformer, prompt: Sequence[int]) -> Callable[[Generation], None] | None:
    """A function that fills the cache of a new text with what the small model read. None for hybrids."""
    if model.config.hybrid:
        return None
    held = Correspondence(small.config, model.config)
    cache = read_by(small, prompt[: max(0, len(prompt) - _LAST)])
    return lambda generation: fill(generation.step.cache, cache, model, held)


def buckets(turns: Sequence[Record], first: Sequence[Record], size: int) -> list[Record]:
    """The turns of a drafter in buckets of `size` new tokens, compared with the same turns of the first drafter."""
    by_bucket: dict[int, list[int]] = {}
    for number, turn in enumerate(turns):
        by_bucket.setdefault((turn["until"] - turn["tokens"] // 2) // size, []).append(number)
    return [bucket_of([turns[number] for number in numbers], [first[number] for number in numbers])
            for numbers in by_bucket.values()]


def bucket_of(turns: Sequence[Record], first: Sequence[Record]) -> Record:
    """Turns of a drafter as one record, compared with the same turns of the first drafter."""
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
    rounds = zip(*(of_drafter["buckets"] for of_drafter in figures.values()), strict=False)
    records = [bucket | {"drafter": name} for each in rounds for name, bucket in zip(figures, each, strict=True)]
    return Table.of_records("Speed by length", (
        ("until", "until", ","), ("drafter", "drafter", ""), ("seconds", "seconds", ".1f"),
        ("tokens/s", "tokens_per_second", ",.1f"), ("mean accepted length", "mean_accepted_length", ".2f"),
        ("to the first", "to_first", ".2f")), records)
