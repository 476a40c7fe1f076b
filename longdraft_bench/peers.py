"""Plain decoding by other engines beside longdraft: each in its own process, one at work at a time, in turns.

An engine that is missing, fails or takes too long gets a record with the reason; the measurement continues.
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

from longdraft.checkpoint import config_file, fingerprint
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import UsageError, check
from longdraft.kernels.weights import FILE
from longdraft.report.table import Table
from longdraft.report.turns import Record
from longdraft.system.timing import Timing
from longdraft.text.tokenizer import Tokenizer

_SERVE = Path(__file__).parent / "workers" / "serve.py"
SETTLE_S = 0.3  # before an engine's turn, until the threads of the engine before sleep
_SHORT_PROMPT = "It was a dark and stormy night, and the rain fell upon the roof of the old house"
_NUM_GREEDY = 20  # tokens that are compared
_MIN_POSITIONS = 256


class PeerProgram(NamedTuple):
    """How an engine is run: the module in workers/, the packages it needs, and the command that installs them."""

    worker: str
    needs: tuple[str, ...] = ()
    install: str = ""
    options: Mapping[str, Any] = {}


_LLAMA_CPP = PeerProgram("llama_cpp", ("llama_cpp", "gguf", "safetensors", "torch"),
                         "pip install llama-cpp-python gguf safetensors torch")
PEERS: dict[str, dict[str, PeerProgram]] = {  # name on the command line -> the variants that are measured
    "longdraft": {"longdraft": PeerProgram("longdraft")},
    "transformers": {"transformers": PeerProgram("transformers", ("torch", "transformers"),
                                                 "pip install transformers")},
    "llama.cpp": {"llama.cpp": _LLAMA_CPP._replace(options={"flash": False}),
                  "llama.cpp, flash": _LLAMA_CPP._replace(options={"flash": True})},
    "openvino": {"openvino": PeerProgram("openvino", ("openvino", "optimum.intel"),
                                         "pip install openvino optimum-intel")},
}


_QUANTIZED: dict[str, dict[str, Mapping[str, Any]]] = {  # --quantize -> options of the workers that can do the like
    "none": {},
    "int8": {"longdraft": {"quantize": "int8"}, "llama_cpp": {"weights": "q8_0"}},
    "int4": {"longdraft": {"quantize": "int4"}, "llama_cpp": {"weights": "q4_0"}},
    FILE: {"longdraft": {"quantize": FILE}, "llama_cpp": {}},
}


def named(text: str, quantize: str = "none") -> dict[str, PeerProgram]:
    """'longdraft,llama.cpp' -> the variants to measure.

    quantize  none | int8 | int4: longdraft's weights, beside llama.cpp's Q8_0 or Q4_0; file: both have those of a GGUF
    """
    chosen: dict[str, PeerProgram] = {}
    for name in text.split(","):
        check(name.strip() in PEERS, "--peers", text, f"names with commas between them: {', '.join(PEERS)}")
        chosen |= PEERS[name.strip()]
    options = _QUANTIZED[quantize]
    for name, program in chosen.items():
        check(not options or program.worker in options, "--peers", text,
              f"longdraft and llama.cpp with --quantize {quantize}")
        chosen[name] = program._replace(options={**program.options, **options.get(program.worker, {})})
    return chosen


def interpreter(path: Path | None) -> str:
    if path is None:
        return sys.executable
    found = shutil.which(str(path))
    if found is None:
        raise UsageError(f"--python is {path}, which cannot be run; give a Python interpreter")
    return found


class PeersPlan(NamedTuple):
    """The measurements to make.

    text_positions  prompt and new tokens of the whole texts; 0: none are written
    modes           names of the modes that write them (peers_text.py); empty: all
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


class PeerError(Exception):
    """An engine gave no answer. The message is the reason."""


class PeerProcess:
    """An engine in its own process, which ends with the `with` block."""

    def __init__(self, program: PeerProgram, python: str, role: str = "steps") -> None:
        """role: "steps" (single steps of plain decoding) or "texts" (the engine's own generation)."""
        self._program = program
        is_longdraft = program.worker == "longdraft"
        threads = str(torch.get_num_threads())
        environment = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if is_longdraft:  # the worker imports this package, whether it is installed or not
            environment["PYTHONPATH"] = str(_SERVE.parents[3])
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._process = subprocess.Popen(
            [sys.executable if is_longdraft else python, str(_SERVE), program.worker, role], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def open(self, folder: Path, num_positions: int, limit_s: float, **options: Any) -> dict[str, Any]:
        """Load the model of a folder, with room for `num_positions` positions. Returns the engine's version.

        options  are added to those of the program

        Raises PeerError if loading fails or a package is not installed.
        """
        answer = self.ask(limit_s, do="open", folder=str(folder), threads=torch.get_num_threads(),
                          longest=num_positions, needs=self._program.needs,
                          options={**self._program.options, **options})
        if "missing" in answer:
            raise PeerError(f"not installed: {self._program.install} (missing: {', '.join(answer['missing'])})")
        return answer

    def ask(self, limit_s: float, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises PeerError if the process ends, or is killed after `limit_s` seconds."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
        except BrokenPipeError as error:
            raise PeerError(self._last_line()) from error
        answer, end = b"", time.monotonic() + limit_s
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self._process.kill()
                raise PeerError(f"no answer to {request['do']!r} within {limit_s:g} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise PeerError(self._last_line())
            answer += piece
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def _last_line(self) -> str:
        """The last line that the process printed before it ended."""
        status = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"the engine ended with status {status}"


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


def portable_model(folder: Path, place: Path) -> Path:
    """A model that old and new versions of all engines read: a GGUF file as it is, the files of a folder linked into
    the folder `place`, with a config.json of their common keys."""
    if folder.is_file():
        return folder
    place.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != "config.json":
            (place / path.name).symlink_to(path.resolve())
    config = config_file.read_json(folder / "config.json")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    config["rope_theta"] = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        config["rope_scaling"] = rope
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    (place / "config.json").write_text(json.dumps(config))
    return place


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
    found = [
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
        found.append(Table.of_records("Prefill", (
            ("engine", "engine", ""), ("tokens", "tokens", ","), ("seconds", "seconds", ".2f"),
            ("tokens/s", "tokens_per_second", ",.0f"), ("error", "error", "")), document["prefill"]))
    return found
