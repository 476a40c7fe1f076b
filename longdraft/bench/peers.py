"""Plain decoding by other engines beside our own: one process each, one at work at a time, rounds interleaved.

An engine that is missing, fails or takes too long is a record with a reason; the others go on.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import torch

from longdraft.bench import machine
from longdraft.bench.measure import Timing
from longdraft.errors import UsageError, check
from longdraft.model import config as model_config
from longdraft.model import fingerprint
from longdraft.model.checkpoint import TensorFiles
from longdraft.model.tokenizer import Tokenizer

_SERVE = Path(__file__).parent / "workers" / "serve.py"
_SETTLE_S = 0.3  # before a round, so that the threads of the engine before have gone to sleep
_PROMPT = "It was a dark and stormy night, and the rain fell upon the roof of the old house"
_GREEDY = 20


class Kind(NamedTuple):
    """An engine as it is measured: the program that serves it, the modules it needs and what installs them."""

    worker: str
    needs: tuple[str, ...] = ()
    install: str = ""
    options: Mapping[str, Any] = {}


_LLAMA = Kind("llama_cpp", ("llama_cpp", "gguf", "safetensors", "torch"),
              "pip install llama-cpp-python gguf safetensors torch")
KINDS: dict[str, dict[str, Kind]] = {  # what may be named -> the variants that are measured for it
    "longdraft": {"longdraft": Kind("longdraft")},
    "transformers": {"transformers": Kind("transformers", ("torch", "transformers"), "pip install transformers")},
    "llama.cpp": {"llama.cpp": _LLAMA._replace(options={"flash": False}),
                  "llama.cpp, flash": _LLAMA._replace(options={"flash": True})},
    "openvino": {"openvino": Kind("openvino", ("openvino", "optimum.intel"), "pip install openvino optimum-intel")},
}


def named(text: str) -> dict[str, Kind]:
    """'longdraft,llama.cpp' -> the variants to measure."""
    chosen: dict[str, Kind] = {}
    for name in text.split(","):
        check(name.strip() in KINDS, "--peers", text, f"names with commas between them: {', '.join(KINDS)}")
        chosen |= KINDS[name.strip()]
    return chosen


def interpreter(path: Path | None) -> str:
    if path is None:
        return sys.executable
    found = shutil.which(str(path))
    if found is None:
        raise UsageError(f"--python is {path}, which cannot be run; give a Python interpreter")
    return found


class Plan(NamedTuple):
    """What is to be measured."""

    model: str
    folder: Path
    kinds: Mapping[str, Kind]
    python: str
    contexts: Sequence[int]
    prefill: int
    steps: int
    repeats: int
    limit_s: float
    text: int = 0  # positions of the texts that are written whole

    @property
    def longest(self) -> int:
        """Positions that an engine must have room for: a context, and the steps behind it."""
        return max(max(self.contexts) + self.steps * self.repeats + 8, self.prefill, self.text, 256)

    def check(self) -> None:
        limit = model_config.read_config(self.folder).max_positions
        if self.longest > limit:
            raise UsageError(f"--contexts, --steps and --prefill come to {self.longest} positions; allowed: {limit} "
                             "(the model's context limit)")


class Failed(Exception):
    """An engine gave no answer; the message says why."""


class Worker:
    """An engine in its own process. Leaving the context ends it."""

    def __init__(self, kind: Kind, python: str, part: str = "engine") -> None:
        """part: of its program, engine (steps) or writer (whole texts)."""
        self._kind = kind
        is_ours = kind.worker == "longdraft"
        threads = str(torch.get_num_threads())
        environment = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if is_ours:  # found where this package was found, installed or not
            environment["PYTHONPATH"] = str(_SERVE.parents[3])
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed when it ends
        self._process = subprocess.Popen(
            [sys.executable if is_ours else python, str(_SERVE), kind.worker, part], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def open(self, folder: Path, longest: int, limit_s: float, **options: Any) -> dict[str, Any]:
        """Load the model of a folder, with room for `longest` positions; options beside its kind's. What it says of
        itself. Failed too where what it needs is not installed."""
        answer = self.ask(limit_s, do="open", folder=str(folder), threads=torch.get_num_threads(), longest=longest,
                          needs=self._kind.needs, options={**self._kind.options, **options})
        if "missing" in answer:
            raise Failed(f"not installed: {self._kind.install} (missing: {', '.join(answer['missing'])})")
        return answer

    def ask(self, limit_s: float, **request: Any) -> dict[str, Any]:
        """Its answer. Failed when it ends instead, or takes longer than the limit (it is then stopped)."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
        except BrokenPipeError as error:
            raise Failed(self._last_line()) from error
        answer, end = b"", time.monotonic() + limit_s
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._process.kill()
                raise Failed(f"no answer to {request['do']!r} within {limit_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise Failed(self._last_line())
            answer += piece
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def _last_line(self) -> str:
        """What it died of: the last line that it wrote."""
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"the engine ended with status {status}"


def measure(plan: Plan, report: dict[str, Any], doing: Callable[[str], Any]) -> None:
    """Fill the report: `engines`, `steps` and `prefill`. `doing(what)` is a context that shows what is done."""
    report |= {"bench": "peers", "machine": machine.describe(), "model": plan.model,
               "weights_sha256": fingerprint.weights_sha256(TensorFiles(plan.folder)), "repeats": plan.repeats,
               "steps_per_round": plan.steps, "limit_seconds": plan.limit_s, "engines": [], "steps": [], "prefill": []}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        portable(plan.folder, place)
        workers: dict[str, Worker] = {}
        for name, kind in plan.kinds.items():
            with doing(f"loading {name}"):
                worker = stack.enter_context(Worker(kind, plan.python))
                record = opened(worker, plan, place)
            report["engines"].append({"engine": name, **record})
            if "version" in record:
                workers[name] = worker
        prompt = Tokenizer(plan.folder).encode(_PROMPT)
        _agree(workers, plan, prompt, report["engines"])
        for context in plan.contexts:
            with doing(f"{context:,} tokens of context"):
                report["steps"] += _steps(workers, plan, context)
        if plan.prefill:
            tokens = (prompt * (plan.prefill // len(prompt) + 1))[: plan.prefill]
            for name, worker in list(workers.items()):
                with doing(f"prefill of {plan.prefill:,} tokens: {name}"):
                    report["prefill"].append(_prefill(name, worker, plan, tokens))


def portable(folder: Path, place: Path) -> None:
    """The model folder under `place`, with a config.json that older and newer readers understand alike."""
    for path in folder.iterdir():
        if path.is_file() and path.name != "config.json":
            (place / path.name).symlink_to(path.resolve())
    config = model_config.read_json(folder / "config.json")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    config["rope_theta"] = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        config["rope_scaling"] = rope
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    (place / "config.json").write_text(json.dumps(config))


def opened(worker: Worker, plan: Plan, folder: Path, **options: Any) -> dict[str, Any]:
    """What the engine says of itself, or the error."""
    try:
        return worker.open(folder, plan.longest, plan.limit_s, **options)
    except Failed as error:
        return {"error": str(error)}


def _agree(workers: dict[str, Worker], plan: Plan, prompt: list[int], engines: list[dict[str, Any]]) -> None:
    """Greedy tokens of each engine after a short prompt; how many of them are the first one's, from the start."""
    first: list[int] | None = None
    for record in engines:
        worker = workers.get(record["engine"])
        if worker is None:
            continue
        try:
            tokens = worker.ask(plan.limit_s, do="greedy", prompt=prompt, count=_GREEDY)["tokens"]
        except Failed as error:
            record["error"] = str(error)
            del workers[record["engine"]]
            continue
        first = first or tokens
        equal = [a == b for a, b in zip(tokens, first, strict=True)]
        record |= {"greedy_tokens": tokens, "greedy_agreement": [*equal, False].index(False), "greedy_asked": _GREEDY}


def _steps(workers: dict[str, Worker], plan: Plan, context: int) -> list[dict[str, Any]]:
    """Decoding at one length of context: fill every engine, then rounds of a few steps of each."""
    records: dict[str, dict[str, Any]] = {}
    samples: dict[str, list[float]] = {name: [] for name in workers}

    def attempt(name: str, **request: Any) -> dict[str, Any] | None:
        try:
            return workers[name].ask(plan.limit_s * 1.5, **request)
        except Failed as error:
            records[name] = {"engine": name, "context": context, "error": str(error)}
            del workers[name]
            return None

    for name in list(workers):
        answer = attempt(name, do="fill", length=context, within_s=plan.limit_s)
        if answer:
            records[name] = {"engine": name, "context": context, "cache": answer["cache"],
                             "context_reached": answer["length"]}
    for _ in range(plan.repeats):
        for name in list(workers):
            time.sleep(_SETTLE_S)
            answer = attempt(name, do="steps", count=plan.steps)
            samples[name] += answer["seconds"] if answer else []
    for name in workers:
        records[name] |= Timing.of(samples[name]).in_ms()
    ours = records.get("longdraft", {}).get("ms")
    for record in records.values():
        if ours and "ms" in record:
            record["to_longdraft"] = record["ms"] / ours
    return list(records.values())


def _prefill(name: str, worker: Worker, plan: Plan, tokens: list[int]) -> dict[str, Any]:
    try:
        seconds = worker.ask(plan.limit_s, do="prefill", tokens=tokens)["seconds"]
    except Failed as error:
        return {"engine": name, "tokens": len(tokens), "error": str(error)}
    return {"engine": name, "tokens": len(tokens), "seconds": seconds, "tokens_per_second": len(tokens) / seconds}
