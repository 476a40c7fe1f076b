"""What prefix reuse and snapshots save: times to the first token, rows read by a chat, resuming, plain decoding.

    python benchmarks/reuse.py first-token chat decoding resume --threads 2 --output reuse.json

    first-token  a text after a prompt, cold; the same again; and one after the first two thirds of it
    chat         turns of a conversation: rows that each turn computes beyond its new tokens
    decoding     plain decoding with and without the tree, in turns
    resume       a text with a journal is cut and resumed, without and with its snapshot
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import longdraft
from longdraft.engine.engine import Engine
from longdraft.model.transformer import Transformer
from longdraft.system.machine import description

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "chapter.txt"


def first_token(engine: Engine, ids: list[int], salt: str | None) -> tuple[float, int]:
    """Seconds until the first event of a text, and the tokens that came from the tree."""
    began = time.perf_counter()
    with engine.generate(ids, engine.params(max_new_tokens=8, seed=7, min_p=0.1), cache_salt=salt) as generation:
        next(generation)
        return time.perf_counter() - began, generation.cached_tokens


def measure_first_token(engine: Engine, ids: list[int], rounds: int) -> dict[str, Any]:
    third = len(ids) // 3
    other = ids[: 2 * third] + ids[:third]
    cold, warm, two_thirds = [], [], []
    for number in range(rounds):
        cold.append(first_token(engine, ids, f"{number}"))
        warm.append(first_token(engine, ids, f"{number}"))
        two_thirds.append(first_token(engine, other, f"{number}"))
    found = {name: {"seconds": statistics.median(seconds for seconds, _ in parts), "cached_tokens": parts[0][1]}
             for name, parts in (("cold", cold), ("warm", warm), ("two thirds", two_thirds))}
    return {"prompt_tokens": len(ids), "rounds": rounds, **found,
            "warm_to_cold": found["warm"]["seconds"] / found["cold"]["seconds"],
            "two_thirds_to_cold": found["two thirds"]["seconds"] / found["cold"]["seconds"],
            "tree_bytes": tree_bytes(engine)}


def tree_bytes(engine: Engine) -> dict[str, int]:
    tree = engine.loaded.prefixes
    return {"used": tree.nbytes, "limit": tree.max_bytes} if tree else {}


def measure_chat(engine: Engine, ids: list[int], turns: int) -> dict[str, Any]:
    """Rows of prompts that each turn computes beyond the tokens that are new in it."""
    rows: list[int] = []
    forward_batch = Transformer.forward_batch

    def counted(self: Transformer, requests: Any) -> Any:
        rows.extend(len(request.rows.tokens) for request in requests if request.is_prompt)
        return forward_batch(self, requests)

    Transformer.forward_batch = counted  # type: ignore[method-assign]
    context, beyond, seconds = ids[:2000], [], []
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


def measure_decoding(name: str, threads: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Tokens/s of plain decoding after 3,000 tokens, with the tree and without, in turns."""
    engines = {ram: longdraft.load(name, drafter="plain", threads=threads, cache_ram=ram) for ram in (0, 2048)}
    ids = prompt(engines[0], 3000)
    speeds: dict[int, list[float]] = {ram: [] for ram in engines}
    for number in range(rounds):
        for ram, engine in sorted(engines.items(), reverse=number % 2 == 1):
            last = list(engine.generate(ids, engine.params(max_new_tokens=tokens, seed=7, min_p=0.1)))[-1]
            assert last.stats is not None
            speeds[ram].append(last.stats["tokens_per_second"])
    ratios = [on / off for off, on in zip(speeds[0], speeds[2048], strict=True)]
    return {"rounds": rounds, "tokens": tokens, "off": statistics.median(speeds[0]),
            "on": statistics.median(speeds[2048]), "ratio": statistics.median(ratios)}


def measure_resume(engine: Engine, ids: list[int]) -> dict[str, Any]:
    """Prefill of a text that was cut, computed and restored."""
    params, found = engine.params(max_new_tokens=64, seed=7, min_p=0.1), {}
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        with engine.generate(ids, params, journal=journal, snapshot="always", cache_salt=None) as generation:
            next(generation)
            next(generation)
            began = time.perf_counter()
        found["closing_seconds"] = time.perf_counter() - began
        found["prefill_seconds"] = generation.stats()["prefill_seconds"]
        found["snapshot_bytes"] = sum(path.stat().st_size for path in (journal / "kv").iterdir())
        for name, mode in (("with", "auto"), ("without", "never")):
            with engine.resume(journal, snapshot=mode, cache_salt=None) as generation:
                next(generation)
                next(generation)
                stats = generation.stats()
            found[name] = {"prefill_seconds": stats["prefill_seconds"], "restored_tokens": stats["restored_tokens"]}
    ratio = found["with"]["prefill_seconds"] / found["without"]["prefill_seconds"]
    return {"tokens": len(ids), **found, "with_to_without": ratio}


def prompt(engine: Engine, length: int) -> list[int]:
    """So many tokens of the example, repeated."""
    ids = engine.encode(EXAMPLE.read_text())
    return (ids * (length // len(ids) + 1))[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("first-token", "chat", "decoding", "resume"))
    parser.add_argument("--model", default="novelist")
    parser.add_argument("--tokens", type=int, default=15_000, help="of the prompt, for first-token")
    parser.add_argument("--resume-tokens", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    engine = longdraft.load(given.model, drafter="plain", threads=given.threads, cache_ram=4096)
    found: dict[str, Any] = {"model": given.model, "machine": description(engine.model.kernels)}
    for part in given.parts:
        if part == "first-token":
            found[part] = measure_first_token(engine, prompt(engine, given.tokens), given.rounds)
        elif part == "chat":
            found[part] = measure_chat(engine, prompt(engine, 8000), 20)
        elif part == "decoding":
            found[part] = measure_decoding(given.model, given.threads, 7, 400)
        else:
            found[part] = measure_resume(engine, prompt(engine, given.resume_tokens))
        print(json.dumps({part: found[part]}, indent=2), flush=True)
    given.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
