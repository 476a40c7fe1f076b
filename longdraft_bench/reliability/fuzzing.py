"""Inputs for `soak.py fuzz`: damaged and hostile user input. Each input depends on its number only.

Each process tries some thousands. An input passes if it is accepted or raises a LongdraftError with one line, within
seconds and less than a GiB of memory.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fuzzing_inputs import KINDS, Samples

from longdraft import kernels
from longdraft.checkpoint.tensor_files import TORCH_WEIGHTS as BIN
from longdraft.errors import LongdraftError

SECONDS = 20  # for one input, on a busy machine
BYTES = 1 << 30  # that a process may grow by


def run(first: int, count: int, chunk: int, chosen: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each failure. chosen: kinds of inputs; none: all."""
    kernels.set_threads(1)
    began, failures = time.monotonic(), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_model(folder / "model")
        counts: Counter[str] = Counter()
        for start in range(first, first + count, chunk):
            done, failed = _child(folder, start, min(chunk, first + count - start), chosen)
            counts.update(done)
            failures += failed
    kinds = {kind: {what: counts[f"{kind} {what}"] for what in ("accepted", "refused")}
             for kind in chosen or KINDS}
    figures = {"inputs": counts.total(), "kinds": kinds, "failures": len(failures), "largest_growth_bytes": _grown[0],
               "slowest_seconds": _slowest[0], "seconds": time.monotonic() - began}
    return figures, failures


_grown, _slowest = [0], [0.0]


def _make_model(folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from helpers.checkpoints import make_checkpoint
    from helpers.gguf_files import convert
    from helpers.sentencepiece_files import write

    torch.save(make_checkpoint(folder, num_hidden_layers=1).state_dict(), folder / BIN)
    write(folder, add_bos_token=True)
    small = make_checkpoint(folder / "small", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    convert(folder, small, folder / "model.gguf", "Q8_0")
    shutil.rmtree(folder / "small")


def _child(folder: Path, start: int, count: int, chosen: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """Try inputs in a child process. Returns its counts and failures, or its exit status as a failure."""
    shared = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            found = _try(Samples(folder), shared, start, count, chosen)
            os.write(writer, json.dumps(found).encode()[:60_000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not answer:
        return Counter(), [f"input {int.from_bytes(shared[:8], 'little')}: the process ended ({status})"]
    found = json.loads(answer)
    _grown[0], _slowest[0] = max(_grown[0], found["grown"]), max(_slowest[0], found["slowest"])
    failures = found["failures"] + ([f"inputs from {start}: {found['grown']} bytes"] if found["grown"] > BYTES else [])
    return Counter(found["counts"]), failures


class Hang(BaseException):
    pass


def _hang(number: int, frame: object) -> None:
    raise Hang


def _try(samples: Samples, current: mmap.mmap, start: int, count: int, chosen: Sequence[str]) -> dict[str, Any]:
    """Try inputs in this process. current: gets the number of the input that is tried"""
    counts: Counter[str] = Counter()
    failures, before, slowest = [], _peak(), 0.0
    signal.signal(signal.SIGALRM, _hang)
    names = [name for name, kind in KINDS.items() for _ in range(kind[0]) if not chosen or name in chosen]
    for number in range(start, start + count):
        current[:] = number.to_bytes(8, "little")
        rng = random.Random(number)
        kind = names[number % len(names)]
        began = time.monotonic()
        signal.alarm(SECONDS)
        try:
            KINDS[kind][1](samples, rng)
            counts[f"{kind} accepted"] += 1
        except LongdraftError as error:
            counts[f"{kind} refused"] += 1
            if "\n" in str(error).strip() or len(str(error)) > 5000:
                failures.append(f"input {number} ({kind}): not one line: {str(error)[:200]!r}")
        except BaseException as error:  # every other exception is a failure
            failures.append(f"input {number} ({kind}): {type(error).__name__}: {str(error)[:200]}")
            counts[f"{kind} failed"] += 1
        signal.alarm(0)
        slowest = max(slowest, time.monotonic() - began)
    shutil.rmtree(samples.here)
    return {"counts": counts, "failures": failures, "grown": _peak() - before, "slowest": slowest}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
