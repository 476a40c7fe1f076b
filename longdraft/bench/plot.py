"""Pictures of reports: steps and their floor by context, forwards by rows; speed by length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import OutputError, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    """Steps and their floor by context, and forwards by rows."""
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
    _finish(figure, f"{report['model']}: {_machine(report)}", path)


def length(report: dict[str, Any], path: Path) -> None:
    """Speed and mean accepted length by what was written, a line for each drafter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, key, name in zip(figure.subplots(1, 2), ("tokens_per_second", "mean_accepted_length"),
                               ("tokens per second", "mean accepted length"), strict=True):
        for drafter, figures in report["drafters"].items():
            buckets = figures["buckets"]
            axes.plot([bucket["until"] / 1000 for bucket in buckets], [bucket[key] for bucket in buckets], "o-",
                      label=drafter)
        axes.set(xlabel="thousand new tokens", ylabel=name, ylim=(0, None))
        axes.legend()
        axes.grid(alpha=0.3)
    _finish(figure, f"behind {report['prefill']:,} tokens of prompt: {_machine(report)}", path)


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    return f"{machine['kernels']}, {machine['dtype']}, {machine['threads']} threads"


def _finish(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OutputError(f"--plot cannot write {path}: {error.strerror or error}") from error
