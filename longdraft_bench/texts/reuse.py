"""What prefix reuse and snapshots save; `longdraft bench reuse`.

    longdraft bench reuse first-token chat decoding resume --threads 2 --output reuse.json

    first-token  a text after a prompt, cold; the same again; and one after the first two thirds of it
    chat         turns of a conversation: rows that each turn computes beyond its new tokens
    decoding     plain decoding with and without the tree, in turns
    resume       a text with a journal is cut and resumed, without and with its snapshot
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.engine.engine import Engine
from longdraft.engine.loading import load
from longdraft.model.transformer import Transformer
from longdraft.report.turns import Record
from longdraft_bench.document import EXAMPLE, in_checkout
from longdraft_bench.timing import in_rounds, median_ratio

_CHAT_TOKENS, _CHAT_TURNS = 8000, 20  # of the example's text; turns of the conversation
_DECODING_ROUNDS, _DECODED_TOKENS = 7, 400


class ReusePlan(NamedTuple):
    """The measurements to make.

    tokens         of the prompt, for first-token
    resume_tokens  of the prompt, for resume
    rounds         of first-token
    """

    model: str
    tokens: int
    resume_tokens: int
    rounds: int
    threads: int


def parts_of(plan: ReusePlan, engine: Engine) -> dict[str, Callable[[], Record]]:
    """The parts by name. The engine drafts nothing and has a prefix tree."""
    return {"first-token": lambda: measure_first_token(engine, prompt(engine, plan.tokens), plan.rounds),
            "chat": lambda: measure_chat(engine, prompt(engine, _CHAT_TOKENS), _CHAT_TURNS),
            "decoding": lambda: measure_decoding(plan.model, plan.threads, _DECODING_ROUNDS, _DECODED_TOKENS),
            "resume": lambda: measure_resume(engine, prompt(engine, plan.resume_tokens))}


def prompt(engine: Engine, length: int) -> list[int]:
    """So many tokens of the example, repeated."""
    ids = engine.encode(in_checkout(EXAMPLE).read_text(encoding="utf-8"))
    return (ids * (length // len(ids) + 1))[:length]


class FirstToken(NamedTuple):
    """Seconds until the first event of a text, and the tokens that came from the tree."""

    seconds: float
    cached_tokens: int


def first_token(engine: Engine, ids: list[int], salt: str | None) -> FirstToken:
    began = time.perf_counter()
    with engine.generate(ids, engine.params(max_new_tokens=8, seed=7, min_p=0.1), cache_salt=salt) as generation:
        next(generation)
        return FirstToken(time.perf_counter() - began, generation.reuse.cached_tokens)


def measure_first_token(engine: Engine, ids: list[int], rounds: int) -> Record:
    """Cold, the same prompt again, and a prompt that shares the first two thirds; each round has a salt of its own."""
    third = len(ids) // 3
    other = ids[: 2 * third] + ids[:third]
    samples: dict[str, list[FirstToken]] = {"cold": [], "warm": [], "two thirds": []}
    for number in range(rounds):
        for name, of_case in samples.items():
            of_case.append(first_token(engine, other if name == "two thirds" else ids, f"{number}"))
    figures: dict[str, Any] = {
        name: {"seconds": statistics.median(sample.seconds for sample in of_case),
               "cached_tokens": of_case[0].cached_tokens} for name, of_case in samples.items()}
    return {"prompt_tokens": len(ids), "rounds": rounds, **figures,
            "warm_to_cold": figures["warm"]["seconds"] / figures["cold"]["seconds"],
            "two_thirds_to_cold": figures["two thirds"]["seconds"] / figures["cold"]["seconds"],
            "tree_bytes": tree_bytes(engine)}


def tree_bytes(engine: Engine) -> dict[str, int]:
    tree = engine.loaded.prefixes
    return {"used": tree.nbytes, "limit": tree.max_bytes} if tree else {}


def measure_chat(engine: Engine, ids: list[int], turns: int) -> Record:
    """Rows of prompts that each turn computes beyond the tokens that are new in it."""
    rows: list[int] = []
    forward_batch = Transformer.forward_batch

    def counted(self: Transformer, requests: Any) -> Any:
        rows.extend(len(request.rows.tokens) for request in requests if request.is_prompt)
        return forward_batch(self, requests)

    Transformer.forward_batch = counted  # type: ignore[method-assign]
    context = ids[:2000]
    beyond: list[int] = []
    seconds: list[float] = []
    try:
        for turn in range(turns):
            new = ids[2000 + 60 * turn : 2060 + 60 * turn]
            context = context + new
            rows.clear()
            began = time.perf_counter()
            with engine.generate(context, engine.params(max_new_tokens=100, seed=turn, min_p=0.1)) as generation:
                next(generation)
                seconds.append(time.perf_counter() - began)
                for _ in generation:
                    pass
            beyond.append(sum(rows) - len(new))
            context += generation.tokens.tolist()
    finally:
        Transformer.forward_batch = forward_batch  # type: ignore[method-assign]
    return {"turns": turns, "context_tokens": len(context), "rows_beyond_new_tokens": max(beyond[1:]),
            "first_token_seconds": {"first": seconds[0], "others": statistics.median(seconds[1:])}}


def measure_decoding(name: str, threads: int, rounds: int, tokens: int) -> Record:
    """Tokens/s of plain decoding after 3,000 tokens, with the tree and without, in turns."""
    engines = {"off": load(name, drafter="plain", threads=threads, cache_ram=0),
               "on": load(name, drafter="plain", threads=threads, cache_ram=2048)}
    ids = prompt(engines["off"], 3000)

    def speed(engine: Engine) -> float:
        *_, last = engine.generate(ids, engine.params(max_new_tokens=tokens, seed=7, min_p=0.1))
        assert last.stats is not None
        return float(last.stats["tokens_per_second"])

    speeds = in_rounds({state: partial(speed, engine) for state, engine in engines.items()}, rounds, alternates=True)
    return {"rounds": rounds, "tokens": tokens, **{state: statistics.median(taken) for state, taken in speeds.items()},
            "ratio": median_ratio(speeds["on"], speeds["off"])}


def measure_resume(engine: Engine, ids: list[int]) -> Record:
    """Prefill of a text that was cut, computed and restored."""
    params = engine.params(max_new_tokens=64, seed=7, min_p=0.1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        with engine.generate(ids, params, journal=journal, snapshot="always", cache_salt=None) as generation:
            next(generation)
            next(generation)
            began = time.perf_counter()
        figures["closing_seconds"] = time.perf_counter() - began
        figures["prefill_seconds"] = generation.stats()["prefill_seconds"]
        figures["snapshot_bytes"] = sum(path.stat().st_size for path in (journal / "kv").iterdir())
        for name, mode in (("with", "auto"), ("without", "never")):
            with engine.resume(journal, snapshot=mode, cache_salt=None) as generation:
                next(generation)
                next(generation)
                stats = generation.stats()
            figures[name] = {"prefill_seconds": stats["prefill_seconds"], "restored_tokens": stats["restored_tokens"]}
    ratio = figures["with"]["prefill_seconds"] / figures["without"]["prefill_seconds"]
    return {"tokens": len(ids), **figures, "with_to_without": ratio}
