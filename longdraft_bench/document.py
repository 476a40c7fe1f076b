"""Parts that all commands of `longdraft bench` share: preparation, a status line, and the JSON document of the results.

    memory = prepare_run(threads=None, repeats=9, memory=2.0)
    with document("machine", Path("machine.json")) as filled:
        limits = measure_limits(memory, repeats=9, filled=filled)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longdraft import kernels
from longdraft.engine.loading import checked_device
from longdraft.errors import UsageError, check
from longdraft.kernels import Kernels
from longdraft.system import machine
from longdraft.system.files import open_outputs
from longdraft_bench.machine.limits import Limits
from longdraft_bench.machine.limits import limits as limits_of_machine

ROOT = Path(__file__).resolve().parents[1]  # of a checkout
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLE = ROOT / "examples" / "chapter.txt"


def in_checkout(path: Path) -> Path:
    """A file that only a checkout has. Raises UsageError if it is missing."""
    if not path.is_file():
        raise UsageError(f"{path} does not exist; run this command with a checkout of longdraft "
                         "(pip install --editable '.[bench]')")
    return path


def prepare_run(threads: int | None, repeats: int, memory: float = 1.0) -> int:
    """Check the shared options and set the threads. Returns the bytes to read in rotation; `memory` is in GiB."""
    check(1 <= repeats <= 1000, "--repeats", repeats, "1 to 1000")
    check(0 < memory <= 1024, "--memory", memory, "above 0, at most 1024 GiB")
    check(threads is None or 1 <= threads <= 1024, "--threads", threads, "1 to 1024")
    if threads:
        kernels.set_threads(threads)
    return machine.affordable(int(memory * (1 << 30)))


def choose_kernels(dtype: str, device: str = "cpu") -> Kernels:
    check(dtype in ("float32", "bfloat16"), "--dtype", dtype, "float32 or bfloat16")
    return kernels.choose(checked_device(device), dtype)


@contextmanager
def document(bench: str, output: Path | None, chosen: Kernels | None = None, *, is_printed: bool = True,
             **about: Any) -> Iterator[dict[str, Any]]:
    """Yield a dictionary to fill, and write it to `output` as JSON if no exception leaves the block.

    The output file is opened first, so that a wrong path fails before any measurement. If stdout is not a terminal,
    the document is also the last line printed.
    """
    files = open_outputs({"--output": output})
    filled: dict[str, Any] = {"bench": bench, "machine": machine.description(chosen), **about}
    try:
        yield filled
        for file in files.values():
            file.write((json.dumps(filled, indent=2) + "\n").encode())
            file.finish()
        if is_printed and not sys.stdout.isatty():
            print(json.dumps(filled))
    finally:
        for file in files.values():
            file.abandon()


@contextmanager
def status(what: str) -> Iterator[None]:
    """Show a live line on stderr while something is measured, if stderr is a terminal."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield


def measure_limits(memory: int, repeats: int, filled: dict[str, Any] | None = None) -> Limits:
    """Measure and print the machine's limits, and add them to the document's description of the machine."""
    with status("the limits of this machine"):
        limits = limits_of_machine(memory, repeats)
    if filled is not None:
        filled["machine"] |= limits.details
    peaks = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in limits.details["peak_gflop_per_s"].items())
    print(f"measured limits: read {limits.read_bandwidth / 1e9:.1f} GB/s, {peaks}\n")
    return limits


def peers_document(path: Path) -> Mapping[str, Any] | None:
    """The document that `bench peers --prompt-file ... --output` wrote, or None for any other file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_peers = isinstance(content, dict) and content.get("bench") == "peers" and bool(content.get("texts"))
    return content if is_peers else None
