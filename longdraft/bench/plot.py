"""A picture of a roofline report: steps and their floor by context, and forwards by rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longdraft.errors import OutputError, UsageError

SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """UsageError where no plot could be written to `path`, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--plot is {path}; allowed: a name that ends with {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot cannot write {path}: no such folder; choose another place")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib; install it with: pip install 'longdraft[bench]'") from error


def roofline(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    records = report["contexts"]
    contexts = [record["context"] for record in records]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(contexts, [record["step_ms"] for record in records], "o-", label="step of plain decoding")
    left.plot(contexts, [record["forward_cold_ms"] for record in records], "s--", label="forward, nothing cached")
    left.plot(contexts, [record["floor_ms"] for record in records], "k:", label="floor at read bandwidth")
    left.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms")
    counts = [row["rows"] for row in records[0]["rows"]]
    for record in records:
        right.plot(counts, [row["ms"] for row in record["rows"]], "o-", label=f"{record['context']:,} tokens")
    right.set(xscale="log", yscale="log", xlabel="rows of one forward", ylabel="ms")
    for axes, ticks in ((left, contexts), (right, counts)):
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.legend()
        axes.grid(alpha=0.3, which="both")
    machine = report["machine"]
    figure.suptitle(f"{report['model']}: {machine['kernels']}, {machine['dtype']}, {machine['threads']} threads")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"--plot cannot write {path}: {error.strerror or error}") from error
