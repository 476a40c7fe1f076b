"""An engine that is measured beside longdraft, in a process of its own: how it is run, and what it is asked.

An engine that is missing, fails or takes too long raises PeerError with the reason; measurements record it and go on.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import torch

from longdraft.checkpoint import config_file
from longdraft.errors import LongdraftError, UsageError, check
from longdraft.kernels.weights import FILE

_SERVE = Path(__file__).parent / "workers" / "serve.py"
GGUF_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # llama_ftype of llama.h
SETTLE_S = 0.3  # before an engine's turn, until the threads of the engine before sleep


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
    "llama.cpp-as-stored": {  # without its repacked weights, for files with which they crash
        "llama.cpp, as stored": _LLAMA_CPP._replace(options={"flash": False, "repacks": False}),
        "llama.cpp, as stored, flash": _LLAMA_CPP._replace(options={"flash": True, "repacks": False})},
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
    program = shutil.which(str(path))
    if program is None:
        raise UsageError(f"--python is {path}, which cannot be run; give a Python interpreter")
    return program


class PeerError(LongdraftError):
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
        return _last_line_of(self._log.read().decode(errors="replace"), status)


def portable_model(folder: Path, target: Path) -> Path:
    """A model that old and new versions of all engines read: a GGUF file as it is, the files of a folder linked into
    the folder `target`, with a config.json of their common keys."""
    if folder.is_file():
        return folder
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name != "config.json":
            (target / path.name).symlink_to(path.resolve())
    config = config_file.read_json(folder / "config.json")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    config["rope_theta"] = rope.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        config["rope_scaling"] = rope
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    (target / "config.json").write_text(json.dumps(config))
    return target


def write_gguf_files(folder: Path, types: Sequence[str], python: str, threads: int) -> None:
    """Write a Llama's folder as GGUF files beside it: in bfloat16, and in GGUF_TYPES by llama.cpp's own rules.

    Raises PeerError if the other Python cannot.
    """
    given = [f"{name}={GGUF_TYPES[name]}" for name in types]
    done = subprocess.run([python, str(_SERVE.with_name("gguf_files.py")), str(folder), str(threads), *given],
                          check=False, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(_last_line_of(done.stderr, done.returncode))


def _last_line_of(log: str, status: int) -> str:
    lines = log.strip().splitlines()
    return lines[-1][:300] if lines else f"the engine ended with status {status}"
