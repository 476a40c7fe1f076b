"""Options that several commands of `longdraft bench` have, and the checks that go with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longdraft.errors import check

if TYPE_CHECKING:
    from longdraft.bench.measure import Limits
    from longdraft.kernels import Kernels

Plot = Annotated[Path | None, typer.Option(help="Draw this .png, .svg or .pdf (needs matplotlib).")]
Output = Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")]
Model = Annotated[str, typer.Option(help="Bundled name, model folder or hub id.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Quantize = Annotated[str, typer.Option(help="Weights as they are (none) or as int8.")]
Threads = Annotated[int | None, typer.Option(help="Threads; default: PyTorch's choice.")]
Repeats = Annotated[int, typer.Option(help="Rounds; a figure is the median over them.")]
Memory = Annotated[float, typer.Option(
    help="GiB that are read in rotation, more than the processor's caches hold; a quarter of the free memory at most.")]
Contexts = Annotated[str, typer.Option(help="Lengths of context, tokens.")]


def numbers(option: str, text: str, most: int) -> list[int]:
    """'1,2,4' -> [1, 2, 4]"""
    parts = [part.strip() for part in text.split(",")]
    right = all(part.isdecimal() and 1 <= int(part) <= most for part in parts)
    check(right, option, text, f"whole numbers from 1 to {most} with commas between them")
    return [int(part) for part in parts]


def prepare(threads: int | None, repeats: int, memory: float) -> int:
    """Check what all commands share, set the threads; returns the bytes to rotate through."""
    check(1 <= repeats <= 1000, "--repeats", repeats, "1 to 1000")
    check(0 < memory <= 1024, "--memory", memory, "above 0, at most 1024 GiB")
    check(threads is None or 1 <= threads <= 1024, "--threads", threads, "1 to 1024")
    from longdraft import kernels
    from longdraft.bench import machine

    if threads:
        kernels.set_threads(threads)
    return machine.affordable(int(memory * (1 << 30)))


def choose(dtype: str) -> Kernels:
    from longdraft import kernels

    check(dtype in ("float32", "bfloat16"), "--dtype", dtype, "float32 or bfloat16")
    return kernels.choose("cpu", dtype)


def checked_quantize(quantize: str) -> str:
    check(quantize in ("none", "int8"), "--quantize", quantize, "none or int8")
    return quantize


def machine_limits(memory: int, repeats: int) -> Limits:
    from longdraft.bench import machine, report

    with report.doing("this machine's limits"):
        found = machine.limits(memory, repeats)
    report.limits_line(found.details)
    return found
