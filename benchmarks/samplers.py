"""The figures of docs/sampling.md: what samplers do to a long text, and what DRY costs.

    python benchmarks/samplers.py table --prompt novel.txt --tokens 5000 --output samplers.json
    python benchmarks/samplers.py cost --prompt novel.txt --positions 100000
    python benchmarks/samplers.py structure --prompt novel.txt

`table` writes a text with each setting, after the first 1,024 tokens of the prompt, with plain decoding and with
`--drafter`, in turns of 500 tokens, so that both meet the same load of the machine. It prints distinct n-grams, the
longest passage that occurs twice, loops, and the speed of the drafter in plain decoding's. `cost` times steps after
random keys and values and a text of that many tokens, with DRY and without, in turns. `structure` writes a long JSON
text with plain decoding and with drafters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import longdraft
import longdraft.model.transformer
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine import run_statistics
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.report.table import Table
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import from_paths
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings

BASE: dict[str, Any] = {"temperature": 1.0, "min_p": 0.1}
CHAT = {"dry_multiplier": 0.8, "dry_allowed_length": 2}
LONG = {"dry_multiplier": 0.8, "dry_allowed_length": 4}
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.1}
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {}, "penalty 1.2 within 1,024": {"repetition_penalty": 1.2}, "DRY, allowed 2": CHAT,
    "DRY, allowed 4": LONG, "XTC 0.5": XTC, "DRY, allowed 4, and XTC": LONG | XTC}
TURN = 500  # tokens


def longest_repeat(tokens: np.ndarray) -> int:
    """Tokens of the longest passage that occurs twice, overlaps included."""
    low, high = 0, len(tokens) - 1
    while low < high:  # if a passage of n tokens occurs twice, so does one of n - 1
        length = (low + high + 1) // 2
        windows = {tokens[i : i + length].tobytes() for i in range(len(tokens) - length + 1)}
        low, high = (length, high) if len(windows) < len(tokens) - length + 1 else (low, length - 1)
    return low


def write_in_turns(texts: list[Generation]) -> list[float]:
    """Write all texts to their ends, in turns; seconds of each, without the prompt."""
    seconds = [0.0] * len(texts)
    for text in texts:
        next(text)
    while not all(text.is_finished for text in texts):
        for place, text in enumerate(texts):
            goal, start = len(text.tokens) + TURN, time.perf_counter()
            while not text.is_finished and len(text.tokens) < goal:
                next(text)
            seconds[place] += time.perf_counter() - start
    return seconds


def table(engine: Engine, prompt: list[int], tokens: int, drafter: str, names: list[str], output: Path) -> None:
    found = json.loads(output.read_text())["settings"] if output.exists() else {}
    for name in names or SETTINGS:
        settings = SETTINGS[name]
        params = SamplingParams(max_new_tokens=tokens, seed=7, ignore_eos=True, **BASE, **settings)
        texts = [engine.with_drafter(each).generate(prompt, params) for each in ("plain", drafter)]
        plain, fast = write_in_turns(texts)
        written = texts[0].tokens
        assert np.array_equal(written, texts[1].tokens), "speculative text differs"
        stats = texts[1].stats()
        entry = {"distinct": [run_statistics.distinct(written, n) for n in (1, 2, 3, 4)],
                 "longest_repeat": longest_repeat(written), "loop": stats["loop"], "speed": plain / fast,
                 "mean_accepted_length": stats["mean_accepted_length"], "settings": BASE | settings,
                 "sha256_tokens": stats["sha256_tokens"], "plain_tokens_per_second": tokens / plain}
        found[name] = entry
        output.write_text(json.dumps({"model": engine.name, "drafter": drafter, "tokens": tokens, "prompt": len(prompt),
                                      "settings": found}, indent=1) + "\n")
    rows = [[name, *(f"{each:.2f}" for each in entry["distinct"]), str(entry["longest_repeat"]),
             f"at {entry['loop']['token']:,}" if entry["loop"] else "-", f"{entry['speed']:.2f}",
             f"{entry['mean_accepted_length']:.2f}"] for name, entry in found.items()]
    columns = ["setting", "distinct-1", "-2", "-3", "-4", "longest repeat", "loop", f"{drafter} / plain", "accepted"]
    print(Table("Samplers", columns, rows).markdown())


def cost(engine: Engine, prompt: list[int], positions: int) -> None:
    """Median times of a step after `positions` tokens, and of its sampling with a tree of 40 nodes."""
    assert len(prompt) >= positions, f"the prompt has {len(prompt)} tokens"
    cache = engine.model.random_cache(positions - 1, 1024)
    samplers = {name: Sampler(SamplingParams(seed=1, **BASE, **settings))
                for name, settings in {"without": {}, "allowed 2": CHAT, "allowed 4": LONG}.items()}
    tails = [prompt[place : place + 13] for place in (1000, 20_000, 50_000)]
    context = Context(prompt[:positions])
    tree = from_paths(context.last, tails, "test")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in samplers}
    for _ in range(30):
        for name, sampler in samplers.items():
            timings = Timings()
            step = Step(engine.model, cache, PlainDrafter(), sampler, context, timings, Tally())
            length, row = cache.length, len(context)
            run_alone(step.run(1))
            cache.truncate(length)
            context.truncate(row)
            logits = engine.model.forward(longdraft.model.transformer.tree_rows(tree, row - 1), cache, len(tree)).logits
            cache.commit(())
            start = time.perf_counter()
            sampler.pruned(tree, context)
            sampler.choose(logits, tree, context)
            times[name].append((timings.draft + timings.verify + timings.sample + timings.commit,
                                time.perf_counter() - start))
    for name, pairs in times.items():
        step_s, tree_s = (statistics.median(column) for column in zip(*pairs[3:], strict=True))
        print(f"{name:10} step of one row {step_s * 1e3:.3f} ms, choosing for {len(tree)} nodes {tree_s * 1e6:.0f} us")


SCHEMA = {"type": "object", "additionalProperties": False, "required": ["title", "characters"], "properties": {
    "title": {"type": "string", "maxLength": 60},
    "characters": {"type": "array", "minItems": 40, "maxItems": 40, "items": {
        "type": "object", "additionalProperties": False,
        "required": ["name", "occupation", "year_of_birth", "is_married", "description"],
        "properties": {"name": {"type": "string", "maxLength": 30}, "occupation": {"type": "string", "maxLength": 30},
                       "year_of_birth": {"type": "integer", "minimum": 1780, "maximum": 1860},
                       "is_married": {"type": "boolean"}, "description": {"type": "string", "maxLength": 120}}}}}}


def structure(engine: Engine, prompt: list[int], drafters: list[str]) -> None:
    """A long JSON text, with plain decoding and with drafters, and plain decoding of as many tokens without a mask."""
    masked = SamplingParams(max_new_tokens=8000, seed=7, structured_outputs=("json", json.dumps(SCHEMA)), **BASE)
    names = ["plain", *drafters]
    texts = [engine.with_drafter(name).generate(prompt, masked) for name in names]
    free = engine.with_drafter("plain").generate(prompt, SamplingParams(
        max_new_tokens=4000, seed=7, ignore_eos=True, **BASE))
    *seconds, unmasked = write_in_turns([*texts, free])
    assert len({text.stats()["sha256_tokens"] for text in texts}) == 1, "speculative text differs"
    print(f"plain, without a mask: {4000 / unmasked:.0f} tokens/s")
    for name, text, taken in zip(names, texts, seconds, strict=True):
        stats = text.stats()
        print(f"{name}: {len(text.tokens):,} tokens ({text.finish_reason}), {len(text.tokens) / taken:.0f} tokens/s, "
              f"{stats['mean_accepted_length']:.2f} tokens a forward, {taken and seconds[0] / taken:.2f} x plain; "
              + ", ".join(f"{source} {counts['accepted']}" for source, counts in stats["by_source"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "cost", "structure"))
    parser.add_argument("--model", default="novelist")
    parser.add_argument("--drafter", default="magicdec")
    parser.add_argument("--prompt", type=Path, required=True, help="a text file")
    parser.add_argument("--tokens", type=int, default=5000)
    parser.add_argument("--positions", type=int, default=100_000)
    parser.add_argument("--only", action="append", choices=list(SETTINGS), help="one of the settings; repeatable")
    parser.add_argument("--output", type=Path, default=Path("samplers.json"), help="renewed for each setting")
    given = parser.parse_args()
    engine = longdraft.load(given.model, drafter=given.drafter, threads=1)
    prompt = engine.encode(given.prompt.read_text())
    if given.what == "structure":
        structure(engine, prompt[:1024], ["suffix", given.drafter, "auto"])
    elif given.what == "cost":
        cost(engine, prompt, given.positions)
    else:
        table(engine, prompt[:1024], given.tokens, given.drafter, given.only or [], given.output)


if __name__ == "__main__":
    main()
