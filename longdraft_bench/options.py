"""The options that several commands of `longdraft bench` share, and the checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from longdraft.errors import check

ModelOption = Annotated[str, typer.Option(help="Bundled name, model folder or hub id.")]
OutputOption = Annotated[Path | None, typer.Option(help="Write all figures to this JSON file.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw this .png, .svg or .pdf (needs matplotlib).")]
DtypeOption = Annotated[str, typer.Option(help="float32 or bfloat16.")]
QuantizeOption = Annotated[str, typer.Option(help="Weights as they are (none), as int8 or as int4.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads; default: PyTorch's choice.")]
RepeatsOption = Annotated[int, typer.Option(help="Rounds; a figure is the median over them.")]
MemoryOption = Annotated[float, typer.Option(
    help="GiB that are read in rotation, more than the processor's caches hold; at most a quarter of the free memory.")]
ContextsOption = Annotated[str, typer.Option(help="Lengths of context, tokens.")]
PythonOption = Annotated[Path | None, typer.Option(
    help="Python interpreter that has the packages of the other engines; default: this one.")]
LimitOption = Annotated[float, typer.Option(help="Seconds that one answer of another engine may take.")]

MAX_TOKENS = 10**8


def numbers(option: str, text: str, most: int = MAX_TOKENS) -> list[int]:
    """'1,2,4' -> [1, 2, 4]. Raises UsageError for anything but whole numbers from 1 to `most`."""
    parts = [part.strip() for part in text.split(",")]
    is_valid = all(part.isdecimal() and 1 <= int(part) <= most for part in parts)
    check(is_valid, option, text, f"whole numbers from 1 to {most} with commas between them")
    return [int(part) for part in parts]


def within(option: str, value: float, least: float, most: float, unit: str = "") -> None:
    """Raise UsageError unless least <= value <= most."""
    check(least <= value <= most, option, value, f"{least} to {most}" + (f" {unit}" if unit else ""))


def checked_quantize(quantize: str) -> str:
    from longdraft.checkpoint.checkpoint import QUANTIZE, QUANTIZE_CHOICES

    check(quantize in QUANTIZE, "--quantize", quantize, QUANTIZE_CHOICES)
    return quantize


def settings(option: str, text: str) -> list[str]:
    """'plain magicdec,chain=6' -> the settings, separated by spaces. Raises UsageError if there is none."""
    check(bool(text.split()), option, text, "at least one name")
    return text.split()
