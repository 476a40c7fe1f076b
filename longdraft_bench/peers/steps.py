"""Plain decoding by other engines beside longdraft, one at work at a time, in turns; `longdraft bench peers`.

An engine that is missing, fails or takes too long gets a record with the reason; the measurement continues.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from longdraft.checkpoint import config_file, fingerprint
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import UsageError
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.text.tokenizer import Tokenizer
from longdraft_bench.peers.process import SETTLE_S, PeerError, PeerProcess, PeerProgram, portable_model
from longdraft_bench.timing import Timing

_SHORT_PROMPT = "It was a dark and stormy night, and the rain fell upon the roof of the old house"
_NUM_GREEDY = 20  # tokens that are compared
_MIN_POSITIONS = 256


class PeersPlan(NamedTuple):
    """The measurements to make.

    text_positions  prompt and new tokens of the whole texts; 0: none are written
    modes           names of the modes that write them (texts.py); empty: all
    quantize        longdraft's weights in the whole texts: none or file
    """

    model: str
    folder: Path
    programs: Mapping[str, PeerProgram]
    python: str
    contexts: Sequence[int]
    prefill: int
    steps: int
    repeats: int
    limit_s: float
    text_positions: int = 0
    modes: Sequence[str] = ()
    quantize: str = "none"

    @property
    def num_positions(self) -> int:
        """Positions that an engine must have room for."""
        longest = max(self.contexts) + self.steps * self.repeats + 8
        return max(longest, self.prefill, self.text_positions, _MIN_POSITIONS)

    def check(self) -> None:
        limit = config_file.read_config(self.folder).max_positions
        if self.num_positions > limit:
            raise UsageError(f"--contexts, --steps and --prefill come to {self.num_positions} positions; allowed: "
                             f"{limit} (the model's context limit)")


def measure_peers(plan: PeersPlan, filled: Record, status: Callable[[str], Any]) -> None:
    """Fill the document: `engines`, `steps` and `prefill`. `status(what)` is a context that shows what is measured."""
    filled |= {"model": plan.model, "weights_sha256": fingerprint.weights_sha256(TensorFiles(plan.folder)),
               "repeats": plan.repeats, "steps_per_round": plan.steps, "limit_seconds": plan.limit_s,
               "engines": [], "steps": [], "prefill": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = portable_model(plan.folder, folder)
        processes: dict[str, PeerProcess] = {}
        for name, program in plan.programs.items():
            with status(f"loading {name}"):
                process = stack.enter_context(PeerProcess(program, plan.python))
                record = open_or_error(process, plan, folder)
            filled["engines"].append({"engine": name, **record})
            if "version" in record:
                processes[name] = process
        prompt = Tokenizer(plan.folder).encode(_SHORT_PROMPT)
        _compare_greedy(processes, plan, prompt, filled["engines"])
        for context in plan.contexts:
            with status(f"{context:,} tokens of context"):
                filled["steps"] += _time_steps(processes, plan, context)
        if plan.prefill:
            tokens = (prompt * (plan.prefill // len(prompt) + 1))[: plan.prefill]
            for name, process in list(processes.items()):
                with status(f"prefill of {plan.prefill:,} tokens: {name}"):
                    filled["prefill"].append(_time_prefill(name, process, plan, tokens))


def open_or_error(process: PeerProcess, plan: PeersPlan, folder: Path, **options: Any) -> dict[str, Any]:
    """The engine's report about itself, or the `error`."""
    try:
        return process.open(folder, plan.num_positions, plan.limit_s, **options)
    except PeerError as error:
        return {"error": str(error)}


def _compare_greedy(processes: dict[str, PeerProcess], plan: PeersPlan, prompt: list[int],
                    engines: list[dict[str, Any]]) -> None:
    """Count how many greedy tokens after a short prompt each engine shares with the first, from the start."""
    first: list[int] | None = None
    for record in engines:
        process = processes.get(record["engine"])
        if process is None:
            continue
        try:
            tokens = process.ask(plan.limit_s, do="greedy", prompt=prompt, count=_NUM_GREEDY)["tokens"]
        except PeerError as error:
            record["error"] = str(error)
            del processes[record["engine"]]
            continue
        first = first or tokens
        equal = [a == b for a, b in zip(tokens, first, strict=True)]
        record |= {"greedy_tokens": tokens, "greedy_agreement": [*equal, False].index(False),
                   "greedy_asked": _NUM_GREEDY}


def _time_steps(processes: dict[str, PeerProcess], plan: PeersPlan, context: int) -> list[dict[str, Any]]:
    """Fill the cache of every engine to a length of context, then time rounds of a few steps of each."""
    records: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[float]] = {name: [] for name in processes}

    def ask(name: str, **request: Any) -> dict[str, Any] | None:
        try:
            return processes[name].ask(plan.limit_s * 1.5, **request)
        except PeerError as error:
            records[name] = {"engine": name, "context": context, "error": str(error)}
            del processes[name]
            return None

    for name in list(processes):
        if answer := ask(name, do="fill", length=context, within_s=plan.limit_s):
            records[name] = {"engine": name, "context": context, "cache": answer["cache"],
                             "context_reached": answer["length"]}
    for _ in range(plan.repeats):
        for name in list(processes):
            time.sleep(SETTLE_S)
            if answer := ask(name, do="steps", count=plan.steps):
                samples[name] += answer["seconds"]
    for name in processes:
        records[name] |= Timing.of(samples[name]).in_ms()
    if ours := records.get("longdraft", {}).get("ms"):
        for record in records.values():
            if "ms" in record:
                record["to_longdraft"] = record["ms"] / ours
    return list(records.values())


def _time_prefill(name: str, process: PeerProcess, plan: PeersPlan, tokens: list[int]) -> dict[str, Any]:
    try:
        seconds = process.ask(plan.limit_s, do="prefill", tokens=tokens)["seconds"]
    except PeerError as error:
        return {"engine": name, "tokens": len(tokens), "error": str(error)}
    return {"engine": name, "tokens": len(tokens), "seconds": seconds, "tokens_per_second": len(tokens) / seconds}


def tables(document: Record) -> list[Table]:
    all_tables = [
        Table.of_records("Engines", (
            ("engine", "engine", ""), ("version", "version", ""),
            ("greedy tokens as the first", "greedy_agreement", ""), ("of", "greedy_asked", ""),
            ("error", "error", "")), document["engines"]),
        Table.of_records("A step of plain decoding", (
            ("context", "context", ","), ("engine", "engine", ""), ("cache", "cache", ""),
            ("reached", "context_reached", ","), ("ms", "ms", ".2f"), ("low", "ms_low", ".2f"),
            ("high", "ms_high", ".2f"), ("to longdraft", "to_longdraft", ".2f"), ("error", "error", "")),
            document["steps"])]
    if document["prefill"]:
        all_tables.append(Table.of_records("Prefill", (
            ("engine", "engine", ""), ("tokens", "tokens", ","), ("seconds", "seconds", ".2f"),
            ("tokens/s", "tokens_per_second", ",.0f"), ("error", "error", "")), document["prefill"]))
    return all_tables
