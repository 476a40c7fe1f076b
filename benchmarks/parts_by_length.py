"""Tokens for each forward with the trained parts of a model, by the length of the text: the table of docs/training.md.

    python benchmarks/parts_by_length.py --model novelist --text audley.txt --text villette.txt --output parts.json

A text is read once. At each of `--contexts` tokens, a process for each drafter and temperature goes on from the cache
so far (it is forked, so that nothing is copied) and writes `--new-tokens` tokens. Chained heads draft as in
benchmarks/heads.py: one token of the model on its partial cache, one of each head, no n-grams. The others draft with
their defaults, EAGLE and glide also without suffixes of the text. The figures depend on weights and prompts only, not
on the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import longdraft
from longdraft import drafters
from longdraft.cache.full import FullCache
from longdraft.engine.engine import Engine
from longdraft.model.transformer import Transformer, chain_rows

SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}), "glide": ("glide", {}),
    "heads": ("tokenswift", {"tree": "1,1,1,1", "chain": 1, "width": 1, "continuations": 0}),
    "eagle alone": ("eagle", {"suffix": False}), "glide alone": ("glide", {"suffix": False}),
}
SAMPLING: tuple[dict[str, float], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "min_p": 0.1})
CHUNK = 512
LEFT = 256  # last tokens of a prompt that each process reads itself, because drafters begin with their rows


def write(engine: Engine, cache: FullCache, prompt: list[int], system: str, sampling: dict[str, float],
          new_tokens: int) -> dict[str, int]:
    """New tokens and forwards after a prompt of which `cache` has all but the last tokens."""
    Transformer.new_cache = lambda model: cache  # type: ignore[method-assign]
    drafters.WITH_EAGLE = tuple(drafters.DRAFTERS)  # the cache holds tapped states, whichever drafter reads it
    name, options = SYSTEMS[system]
    params = engine.params(max_new_tokens=new_tokens, seed=7, ignore_eos=True, on_loop="off", **sampling)
    with engine.with_drafter(name, options).generate(prompt, params) as text:
        for _ in text:
            pass
        stats = text.stats()
    return {"tokens": stats["new_tokens"], "forwards": stats["steps"]}


def forked(*given: Any) -> dict[str, int]:
    """`write` in a process of its own."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, json.dumps(write(*given)).encode())
            os._exit(0)
        except BaseException as error:
            print(f"error: {error}", flush=True)
            os._exit(1)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        text = answer.read()
    if status:
        raise SystemExit(f"the measurement of {given[3]} failed")
    return dict(json.loads(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="novelist", help="a model whose folder has the parts; default: novelist")
    parser.add_argument("--text", type=Path, action="append", required=True, help="a text file; repeatable")
    parser.add_argument("--contexts", default="1024,8192,32768,100000", help="tokens of the prompts, ascending")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: all")
    parser.add_argument("--new-tokens", type=int, default=200, help="tokens to write; default: 200")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file, written after each context")
    given = parser.parse_args()
    engine = longdraft.load(given.model, drafter="eagle", threads=1)  # one thread, which a fork keeps whole
    assert engine.eagle is not None
    model, systems = engine.model.with_taps(engine.eagle.taps), given.systems.split(",")
    counts: dict[str, dict[str, dict[str, list[int]]]] = defaultdict(lambda: defaultdict(dict))
    for path in given.text:
        ids, cache = engine.encode(path.read_text()), model.new_cache()
        for length in map(int, given.contexts.split(",")):
            while cache.length < length - LEFT:
                tokens = ids[cache.length : min(cache.length + CHUNK, length - LEFT)]
                model.forward(chain_rows(tokens, cache.length), cache)
                cache.commit(range(len(tokens)))
            for sampling in SAMPLING:
                for system in systems:
                    found = forked(engine, cache, ids[:length], system, sampling, given.new_tokens)
                    of = counts[f"T={sampling['temperature']:g}"][system].setdefault(str(length), [0, 0])
                    of[0] += found["tokens"]
                    of[1] += found["forwards"]
            figures = {kind: {name: {context: tokens / forwards for context, (tokens, forwards) in by.items()}
                              for name, by in of_kind.items()} for kind, of_kind in counts.items()}
            about = {"model": given.model, "weights": engine.identity["weights"],
                     "texts": [text.name for text in given.text], "new_tokens": given.new_tokens,
                     "tokens_per_forward": figures, "tokens_and_forwards": counts}
            given.output.write_text(json.dumps(about, indent=1) + "\n")
            print(path.name, length, {kind: {name: round(by[str(length)], 2) for name, by in of_kind.items()}
                                      for kind, of_kind in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
