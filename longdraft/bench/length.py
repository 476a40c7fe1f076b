"""One long text written by several drafters side by side: speed by length, against plain decoding in the same run.

    longdraft bench length --prompt-file novel.txt --prefill 4096 --max-new-tokens 100000 --drafters "plain auto"

The drafters take turns of some thousand tokens, so that the machine's moods meet all of them alike; what one is
to the first is the median over the turns of a bucket.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longdraft import drafters
from longdraft.core import Prompt, SamplingParams
from longdraft.engine import Engine
from longdraft.errors import ModelError, UsageError
from longdraft.generation import Generation

Figures = dict[str, Any]


def run(engine: Engine, settings: Sequence[str], prompt: Prompt, params: SamplingParams, bucket: int, turn: int,
        done: Callable[[Figures], None]) -> Figures:
    """All figures: for each setting ("plain", "magicdec,chain=6") its buckets and final statistics.

    Each writes `turn` tokens in turn. `done` gets the figures so far after every round of turns. ModelError if two
    drafters wrote different texts.
    """
    texts = {setting: start(engine, setting, prompt, params) for setting in settings}
    turns: dict[str, list[Figures]] = {setting: [] for setting in settings}
    figures: Figures = {}
    for end in range(turn, params.max_new_tokens + turn, turn):
        for setting, text in texts.items():
            turns[setting].append(write(text, min(end, params.max_new_tokens)))
        _require_one_text(texts)
        figures = {setting: {"buckets": buckets(turns[setting], turns[settings[0]], bucket), "stats": text.stats()}
                   for setting, text in texts.items()}
        done(figures)
        if all(text.finish_reason for text in texts.values()):
            break
    return figures


def buckets(turns: Sequence[Figures], first: Sequence[Figures], size: int) -> list[Figures]:
    """The turns of one drafter in buckets of `size` new tokens, and how fast they were beside those of the first."""
    found: dict[int, list[int]] = {}
    for place, figure in enumerate(turns):
        found.setdefault((figure["until"] - figure["tokens"] // 2) // size, []).append(place)
    return [_bucket([turns[place] for place in places], [first[place] for place in places])
            for places in found.values()]


def _bucket(turns: Sequence[Figures], first: Sequence[Figures]) -> Figures:
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


def start(engine: Engine, setting: str, prompt: Prompt, params: SamplingParams) -> Generation:
    """A generation with the drafter and the options that a setting names."""
    name, *options = setting.split(",")
    engine.options = drafters.parse_options(name, dict(option.partition("=")[::2] for option in options))
    engine.drafter = name
    if drafters.draft_model_of(engine.options):
        raise UsageError(f"{setting!r} names a smaller model, which this benchmark does not load; leave it out")
    return engine.generate(prompt, params)


def write(text: Generation, end: int) -> Figures:
    """Go on up to `end` new tokens (a step may write a few more); what that took, the prompt not counted."""
    before = text.stats()
    began = time.perf_counter()
    while len(text.tokens) < end and next(text, None) is not None:
        pass
    seconds = time.perf_counter() - began
    after = text.stats()
    if not before["new_tokens"]:
        seconds -= after["prefill_seconds"]
    def gained(count: Callable[[Mapping[str, Any]], Mapping[str, int]]) -> dict[str, int]:
        return {name: number - count(before).get(name, 0) for name, number in count(after).items()}

    return {
        "until": after["new_tokens"], "tokens": after["new_tokens"] - before["new_tokens"], "seconds": seconds,
        "steps": after["steps"] - before["steps"],
        "tokens_by_choice": gained(lambda stats: stats.get("tokens_by_choice", {})),
        "accepted_by_source": gained(lambda stats: {name: of["accepted"] for name, of in stats["by_source"].items()}),
    }


def _require_one_text(texts: Mapping[str, Generation]) -> None:
    (first, one), *others = texts.items()
    for name, other in others:
        common = min(len(one.tokens), len(other.tokens))
        if (one.tokens[:common] != other.tokens[:common]).any():
            raise ModelError(f"{first} and {name} wrote different texts; that is a bug of longdraft, please report it")
