"""Damaged and hostile user input; `longdraft bench soak fuzz`. Each input depends on its number only.

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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from longdraft import kernels
from longdraft.checkpoint.tensor_files import TORCH_WEIGHTS as BIN
from longdraft.errors import LongdraftError
from longdraft_bench.document import ROOT, in_checkout
from longdraft_bench.reliability.fuzzing_inputs import KINDS, Samples

SECONDS = 20  # for one input, on a busy machine
BYTES = 1 << 30  # that a process may grow by
_MOST_ANSWERED = 60_000  # bytes, which a pipe holds


@dataclass
class Outcome:
    """What inputs led to.

    counts       "KIND accepted", "KIND refused" or "KIND failed" -> inputs
    failures     a line for each
    grown_bytes  by which the largest process grew
    slowest_s    of one input
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    slowest_s: float = 0.0

    def add(self, other: Outcome) -> None:
        self.counts.update(other.counts)
        self.failures += other.failures
        self.grown_bytes = max(self.grown_bytes, other.grown_bytes)
        self.slowest_s = max(self.slowest_s, other.slowest_s)


def run(first: int, count: int, chunk: int, chosen: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each failure.

    chunk   inputs of a process
    chosen  kinds of inputs; none: all

    Raises UsageError without a checkout, whose tests make the sound files.
    """
    kernels.set_threads(1)
    began = time.monotonic()
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_model(folder / "model")
        for start in range(first, first + count, chunk):
            outcome.add(_in_child(folder, start, min(chunk, first + count - start), chosen))
    kinds = {kind: {what: outcome.counts[f"{kind} {what}"] for what in ("accepted", "refused")}
             for kind in chosen or KINDS}
    figures = {"inputs": outcome.counts.total(), "kinds": kinds, "failures": len(outcome.failures),
               "largest_growth_bytes": outcome.grown_bytes, "slowest_seconds": outcome.slowest_s,
               "seconds": time.monotonic() - began}
    return figures, outcome.failures


def _make_model(folder: Path) -> None:
    sys.path.insert(0, str(in_checkout(ROOT / "tests" / "helpers" / "checkpoints.py").parents[1]))
    from helpers.checkpoints import make_checkpoint  # type: ignore[import-not-found]
    from helpers.gguf_files import convert  # type: ignore[import-not-found]
    from helpers.sentencepiece_files import write  # type: ignore[import-not-found]

    torch.save(make_checkpoint(folder, num_hidden_layers=1).state_dict(), folder / BIN)
    write(folder, add_bos_token=True)
    small = make_checkpoint(folder / "small", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    convert(folder, small, folder / "model.gguf", "Q8_0")
    shutil.rmtree(folder / "small")


def _in_child(folder: Path, start: int, count: int, chosen: Sequence[str]) -> Outcome:
    """Try inputs in a child process. If it ends, its exit status is the failure."""
    current = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            answer = json.dumps(asdict(_try(Samples(folder), current, start, count, chosen)))
            os.write(writer, answer.encode()[:_MOST_ANSWERED])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answered = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not answered:
        number = int.from_bytes(current[:8], "little")
        return Outcome(failures=[f"input {number}: the process ended ({status})"])
    outcome = Outcome(**json.loads(answered))
    if outcome.grown_bytes > BYTES:
        outcome.failures.append(f"inputs from {start}: {outcome.grown_bytes} bytes")
    return outcome


class Hang(BaseException):
    pass


def _hang(number: int, frame: object) -> None:
    raise Hang


def _try(samples: Samples, current: mmap.mmap, start: int, count: int, chosen: Sequence[str]) -> Outcome:
    """Try inputs in this process. current: gets the number of the input that is tried."""
    outcome = Outcome()
    before = _peak()
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
            outcome.counts[f"{kind} accepted"] += 1
        except LongdraftError as error:
            outcome.counts[f"{kind} refused"] += 1
            if "\n" in str(error).strip() or len(str(error)) > 5000:
                outcome.failures.append(f"input {number} ({kind}): not one line: {str(error)[:200]!r}")
        except BaseException as error:  # every other exception is a failure
            outcome.failures.append(f"input {number} ({kind}): {type(error).__name__}: {str(error)[:200]}")
            outcome.counts[f"{kind} failed"] += 1
        signal.alarm(0)
        outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)
    shutil.rmtree(samples.here)
    outcome.grown_bytes = _peak() - before
    return outcome


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
