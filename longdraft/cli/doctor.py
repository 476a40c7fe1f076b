"""`longdraft models` and `longdraft doctor`: what there is, and what this machine can do with it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

_Json = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]


def models(as_json: _Json = False) -> None:
    """List the bundled models."""
    from longdraft.model import library

    rows = [_describe(name) for name in library.bundled()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _table(rows)
    print("\nAny Llama checkpoint works as well: --model FOLDER or --model owner/name from the hub.")


def _describe(name: str) -> dict[str, Any]:
    from longdraft.model import checkpoint, config, library

    folder = library.resolve(name)
    parsed = config.read(folder)
    parameters = sum(_product(shape) for shape in checkpoint.expected_shapes(parsed).values())
    width = 4 if parsed.dtype == "float32" else 2
    return {
        "model": name,
        "parameters": parameters,
        "dtype": parsed.dtype,
        "weights_bytes": parameters * width,
        "context_limit": parsed.max_positions,
        "cache_bytes_per_token": 2 * parsed.num_layers * parsed.num_kv_heads * parsed.head_dim * width,
        "heads": (folder / "heads" / "config.json").exists(),
    }


def _product(shape: tuple[int, ...]) -> int:
    from math import prod

    return prod(shape)


def doctor(as_json: _Json = False) -> None:
    """Show versions, hardware and the kernels that would run, with what is missing."""
    report = _report()
    if as_json:
        print(json.dumps(report, indent=2))
        return
    width = max(len(name) for name in report)
    for name, value in report.items():
        print(f"{name:{width}}  {value}")


def _report() -> dict[str, Any]:
    import platform

    import numpy
    import torch

    from longdraft import drafters, kernels
    from longdraft.kernels import cpu
    from longdraft.model import library
    from longdraft.version import __version__

    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = kernels.choose(device, "bfloat16")
    return {
        "longdraft": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": kernels.threads(chosen),
        "memory_bytes": _memory_bytes(),
        "kernels": chosen.name,
        "kernels_available": ", ".join(kernels.available()),
        "kernels_missing": cpu.WHY_MISSING or "none",
        "exactness": "bit-exact" if chosen.is_row_invariant else "distribution",
        "drafters": ", ".join(drafters.KINDS),
        "bundled_models": ", ".join(library.bundled()),
    }


def _memory_bytes() -> int | None:
    import os

    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:,}" if type(value) is int else str(value) for value in row.values()))
    Console().print(table)
