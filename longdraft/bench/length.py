"""One long text written by several drafters side by side: speed by length, against plain decoding in the same run.

    longdraft bench length --prompt-file novel.txt --prefill 4096 --max-new-tokens 100000 --drafters plain,auto

Each drafter writes the next `bucket` tokens in turn, so that the machine's moods meet all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longdraft import drafters
from longdraft.core import SamplingParams
from longdraft.engine import Engine, Generation, Prompt
from longdraft.errors import ModelError, UsageError

Figures = dict[str, Any]


def run(engine: Engine, settings: Sequence[str], prompt: Prompt, params: SamplingParams, bucket: int,
        done: Callable[[Figures], None]) -> Figures:
    """All figures: for each setting ("plain", "magicdec,chain=6") its buckets and final statistics.

    `done` gets the figures so far after every bucket. ModelError if two drafters wrote different texts.
    """
    texts = {setting: start(engine, setting, prompt, params) for setting in settings}
    figures: Figures = {setting: {"buckets": [], "stats": None} for setting in settings}
    for end in range(bucket, params.max_new_tokens + bucket, bucket):
        for setting, text in texts.items():
            figures[setting]["buckets"].append(write(text, min(end, params.max_new_tokens)))
            figures[setting]["stats"] = text.stats()
        _require_one_text(texts)
        done(figures)
        if all(text.finish_reason for text in texts.values()):
            break
    return figures


def start(engine: Engine, setting: str, prompt: Prompt, params: SamplingParams) -> Generation:
    """A generation with the drafter and the options that a setting names."""
    name, *options = setting.split(",")
    drafters.check_name(name)
    engine.drafter = name
    engine.options = drafters.parse_options(name, dict(option.partition("=")[::2] for option in options))
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
    tokens, steps = after["new_tokens"] - before["new_tokens"], after["steps"] - before["steps"]
    return {
        "until": after["new_tokens"], "tokens": tokens, "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "mean_accepted_length": tokens / steps if steps else 0.0,
        "tokens_by_choice": _gained(before, after, "tokens_by_choice"),
    }


def _gained(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> dict[str, int]:
    return {name: count - before.get(key, {}).get(name, 0) for name, count in after.get(key, {}).items()}


def _require_one_text(texts: Mapping[str, Generation]) -> None:
    (first, one), *others = texts.items()
    for name, other in others:
        common = min(len(one.tokens), len(other.tokens))
        if (one.tokens[:common] != other.tokens[:common]).any():
            raise ModelError(f"{first} and {name} wrote different texts; that is a bug of longdraft, please report it")
