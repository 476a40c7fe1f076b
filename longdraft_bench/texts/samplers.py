"""What samplers do to a long text, and what they cost; `longdraft bench samplers`, `sampler-cost` and `structure`.

    longdraft bench samplers --prompt-file novel.txt --tokens 5000 --output samplers.json
    longdraft bench sampler-cost --prompt-file novel.txt --positions 100000
    longdraft bench structure --prompt-file novel.txt

`samplers` writes a text with each setting, after the first 1,024 tokens of the prompt, with plain decoding and with a
drafter in turns. It reports distinct n-grams, the longest passage that occurs twice, loops, and the drafter's speed
relative to plain decoding. `sampler-cost` times steps after random keys and values and a text of that many tokens, with
DRY and without, in turns. `structure` writes a long JSON text with plain decoding and with drafters.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine import run_statistics
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.errors import check
from longdraft.model.transformer import tree_rows
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import from_paths
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings
from longdraft_bench.timing import in_rounds, seconds_of
from longdraft_bench.turns import write_text, write_turn

BASE: dict[str, Any] = {"temperature": 1.0, "min_p": 0.1}
_CHAT = {"dry_multiplier": 0.8, "dry_allowed_length": 2}
_LONG = {"dry_multiplier": 0.8, "dry_allowed_length": 4}
_XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {}, "penalty 1.2 within 1,024": {"repetition_penalty": 1.2}, "DRY, allowed 2": _CHAT,
    "DRY, allowed 4": _LONG, "XTC 0.5": _XTC, "DRY, allowed 4, and XTC": _LONG | _XTC}
PROMPT = 1024  # tokens of the prompt
_TURN = 500  # new tokens of a turn
_ROUNDS, _WARM_UP_ROUNDS = 30, 3  # of `sampler-cost`


def longest_repeat(tokens: NDArray[np.int32]) -> int:
    """Tokens of the longest passage that occurs twice, overlaps included."""
    low, high = 0, len(tokens) - 1
    while low < high:  # if a passage of n tokens occurs twice, so does one of n - 1
        length = (low + high + 1) // 2
        windows = {tokens[i : i + length].tobytes() for i in range(len(tokens) - length + 1)}
        low, high = (length, high) if len(windows) < len(tokens) - length + 1 else (low, length - 1)
    return low


def measure_setting(engine: Engine, prompt: Sequence[int], tokens: int, drafter: str, name: str) -> Record:
    """The record of one of SETTINGS."""
    params = SamplingParams(max_new_tokens=tokens, seed=7, ignore_eos=True, **BASE, **SETTINGS[name])
    text = write_text(engine, ["plain", drafter], prompt, params, _TURN)
    plain_s, drafted_s = (sum(turn["seconds"] for turn in text.turns[system]) for system in ("plain", drafter))
    written = text.tokens("plain")
    stats = text.stats[drafter]
    return {"distinct": [run_statistics.distinct(written, n) for n in (1, 2, 3, 4)],
            "longest_repeat": longest_repeat(written), "loop": stats["loop"], "speed": plain_s / drafted_s,
            "mean_accepted_length": stats["mean_accepted_length"], "settings": BASE | SETTINGS[name],
            "sha256_tokens": stats["sha256_tokens"], "plain_tokens_per_second": tokens / plain_s}


def settings_table(records: Mapping[str, Record], drafter: str) -> Table:
    rows = [[name, *(f"{each:.2f}" for each in record["distinct"]), str(record["longest_repeat"]),
             f"at {record['loop']['token']:,}" if record["loop"] else "-", f"{record['speed']:.2f}",
             f"{record['mean_accepted_length']:.2f}"] for name, record in records.items()]
    columns = ["setting", "distinct-1", "-2", "-3", "-4", "longest repeat", "loop", f"{drafter} / plain", "accepted"]
    return Table("Samplers", columns, rows)


class _SamplingCost(NamedTuple):
    step_s: float  # of one row
    tree_s: float  # choosing for all nodes of a tree


_DRY: dict[str, dict[str, Any]] = {"without": {}, "allowed 2": _CHAT, "allowed 4": _LONG}


def measure_cost(engine: Engine, prompt: Sequence[int], positions: int) -> list[Record]:
    """Median times of a step after `positions` tokens, and of choosing for a tree of 40 nodes, with DRY and without."""
    check(len(prompt) >= positions, "tokens in --prompt-file", len(prompt), f"{positions} or more")
    cache = random_cache(engine.model, positions - 1, 1024)
    tails = [list(prompt[start : start + 13]) for start in (1000, 20_000, 50_000)]
    context = Context(prompt[:positions])
    tree = from_paths(context.last, tails, "test")

    def one_step(sampler: Sampler) -> _SamplingCost:
        timings = Timings()
        step = Step(engine.model, cache, PlainDrafter(), sampler, context, timings, Tally())
        length, row = cache.length, len(context)
        run_alone(step.run(1))
        cache.truncate(length)
        context.truncate(row)
        logits = engine.model.forward(tree_rows(tree, row - 1), cache, len(tree)).logits
        cache.commit(())

        def choose() -> None:
            sampler.pruned(tree, context)
            sampler.choose(logits, tree, context)

        tree_s = seconds_of(choose)
        return _SamplingCost(timings.draft + timings.verify + timings.sample + timings.commit, tree_s)

    cases: dict[str, Callable[[], _SamplingCost]] = {
        name: partial(one_step, Sampler(SamplingParams(seed=1, **BASE, **settings)))
        for name, settings in _DRY.items()}
    return [{"dry": name, "nodes": len(tree), "step_ms": 1e3 * statistics.median(cost.step_s for cost in costs),
             "tree_us": 1e6 * statistics.median(cost.tree_s for cost in costs)}
            for name, costs in ((name, costs[_WARM_UP_ROUNDS:]) for name, costs in in_rounds(cases, _ROUNDS).items())]


def cost_table(records: Sequence[Record]) -> Table:
    return Table.of_records("The cost of DRY", (
        ("DRY", "dry", ""), ("step of one row, ms", "step_ms", ".3f"), ("choosing for a tree, us", "tree_us", ".0f"),
        ("nodes", "nodes", "")), records)


_SCHEMA = {"type": "object", "additionalProperties": False, "required": ["title", "characters"], "properties": {
    "title": {"type": "string", "maxLength": 60},
    "characters": {"type": "array", "minItems": 40, "maxItems": 40, "items": {
        "type": "object", "additionalProperties": False,
        "required": ["name", "occupation", "year_of_birth", "is_married", "description"],
        "properties": {"name": {"type": "string", "maxLength": 30}, "occupation": {"type": "string", "maxLength": 30},
                       "year_of_birth": {"type": "integer", "minimum": 1780, "maximum": 1860},
                       "is_married": {"type": "boolean"}, "description": {"type": "string", "maxLength": 120}}}}}}
_MASKED_TOKENS, _UNMASKED_TOKENS = 8000, 4000  # at most, and exactly


def measure_structure(engine: Engine, prompt: Sequence[int], drafters: Sequence[str]) -> list[Record]:
    """A long JSON text with plain decoding and with drafters, and plain decoding of a text without a mask, in turns."""
    masked = SamplingParams(max_new_tokens=_MASKED_TOKENS, seed=7, structured_outputs=("json", json.dumps(_SCHEMA)),
                            **BASE)
    free = SamplingParams(max_new_tokens=_UNMASKED_TOKENS, seed=7, ignore_eos=True, **BASE)
    texts: dict[str, Generation] = {
        name: engine.with_drafter(name).generate(list(prompt), masked) for name in ("plain", *drafters)}
    texts["plain, without a mask"] = engine.with_drafter("plain").generate(list(prompt), free)
    seconds = dict.fromkeys(texts, 0.0)
    while not all(text.is_finished for text in texts.values()):
        for name, text in texts.items():
            if not text.is_finished:
                seconds[name] += write_turn(text, len(text.tokens) + _TURN)["seconds"]
    hashes = {text.stats()["sha256_tokens"] for name, text in texts.items() if name in ("plain", *drafters)}
    assert len(hashes) == 1, "speculative text differs"
    return [{"drafter": name, "tokens": len(text.tokens), "finish_reason": text.finish_reason,
             "tokens_per_second": len(text.tokens) / seconds[name],
             "to_plain": (len(text.tokens) / seconds[name]) / (len(texts["plain"].tokens) / seconds["plain"]),
             "mean_accepted_length": text.stats()["mean_accepted_length"],
             "accepted_by_source": {source: counts["accepted"] for source, counts in text.stats()["by_source"].items()}}
            for name, text in texts.items()]


def structure_table(records: Sequence[Record]) -> Table:
    return Table.of_records("A structured text", (
        ("drafter", "drafter", ""), ("tokens", "tokens", ","), ("ended by", "finish_reason", ""),
        ("tokens/s", "tokens_per_second", ",.0f"), ("to plain", "to_plain", ".2f"),
        ("mean accepted length", "mean_accepted_length", ".2f")), records)
