"""All figures of measurements. Those of a single text are in longdraft/report/figures.py, with what draws them.

    roofline, length, engines, sweep    of the documents that `longdraft bench` writes
    draw_headline                       the README's picture, from benchmarks/results/
    draw_losses                         the loss curve of a bundled model
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import OutputError, UsageError
from longdraft.report import figures as base
from longdraft.report import require_packages
from longdraft.report.turns import Record
from longdraft_bench.document import RESULTS, in_checkout

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENGINES_CAPTION = "Each engine's own generation of one text, plain and drafted; blue: longdraft."
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise UsageError before any measurement if no figure can be written to `path`."""
    if path.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot is {path}; allowed: a name that ends with {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot cannot write {path}: no such folder; choose another place")
    require_packages("--plot", ("matplotlib",))


def save_figure(figure: Figure, *paths: Path) -> None:
    """Write the figure to files whose suffixes name their formats. Raises OutputError."""
    for path in paths:
        try:
            base.write_figure(figure, path, path.suffix[1:])
        except OSError as error:
            raise OutputError(f"cannot write the figure {path}: {error.strerror or error}; choose another place"
                              ) from error


def engines(records: Sequence[Record]) -> Figure:
    """Milliseconds per token of each engine and drafting mode, with the range over the rounds."""
    figure, (axes,) = base.new_figure("ms per new token; whiskers: the fastest and the slowest run",
                                      "engine and drafting")
    axes.xaxis.set_major_formatter("{x:g}")
    shown = [record for record in records if record.get("ms")]
    names = [f"{record['engine']}\n{record['system']}" for record in shown]
    spread = [[record["ms"] - record["ms_low"] for record in shown],
              [record["ms_high"] - record["ms"] for record in shown]]
    axes.barh(names, [record["ms"] for record in shown], xerr=spread, capsize=3,
              color=[base.COLOURS[1] if "longdraft" in name else base.COLOURS[7] for name in names])
    axes.invert_yaxis()
    figure.set_size_inches(7, 1.2 + 0.45 * len(shown))
    return figure


def sweep(names: Sequence[str], series: Mapping[str, Sequence[tuple[float, float] | None]]) -> Figure:
    """Each measure by the cases of a table, a panel for each, with its deviation over the texts (TokenSwift, figure 4).

    series  measure -> (mean, standard deviation) of each case; None: not measured
    """
    figure, panels = base.new_figure("", *series)
    for index, (axes, values) in enumerate(zip(panels, series.values(), strict=True)):
        measured = [(case, *value) for case, value in enumerate(values) if value is not None]
        if measured:
            cases, means, deviations = zip(*measured, strict=True)
            axes.errorbar(cases, means, yerr=deviations, capsize=3, color=base.COLOURS[1 + index % 7],
                          marker=base.MARKERS[index % 8])
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        axes.set_ylim(bottom=0)
    return figure


def roofline(document: Record) -> Figure:
    """Plain decoding steps beside their floor by context, and forwards by their number of rows."""
    records = document["contexts"]
    contexts = [record["context"] for record in records]
    figure, (left, right) = base.new_figure("context, tokens", "ms", "ms")
    for index, (key, label) in enumerate((("step_ms", "step of plain decoding"),
                                          ("forward_cold_ms", "forward, nothing cached"),
                                          ("floor_ms", "floor at read bandwidth"))):
        base.add_line(left, contexts, [record[key] for record in records], label, index)
    counts = [row["rows"] for row in records[0]["rows"]]
    for index, record in enumerate(records):
        base.add_line(right, counts, [row["ms"] for row in record["rows"]], f"{record['context']:,} tokens", index)
    right.set_xlabel("rows of one forward")
    for axes, ticks in ((left, contexts), (right, counts)):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        base.add_legend(axes)
    figure.suptitle(f"{document['model']}: {_machine(document)}")
    return figure


def length(document: Record) -> Figure:
    """Tokens per second and mean accepted length by new tokens, a line for each drafter."""
    figure, panels = base.new_figure("new tokens", "tokens per second", "mean accepted length")
    for axes, key in zip(panels, ("tokens_per_second", "mean_accepted_length"), strict=True):
        for index, (drafter, figures) in enumerate(document["drafters"].items()):
            base.add_line(axes, base.turn_ends(figures["buckets"]), [bucket[key] for bucket in figures["buckets"]],
                          drafter, index)
        axes.set_ylim(bottom=0)
    base.add_legend(panels[-1])
    figure.suptitle(f"after {document['prefill']:,} tokens of prompt: {_machine(document)}")
    return figure


def _machine(document: Record) -> str:
    machine = document["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{machine['kernels']}, {machine['dtype']}, {threads}"


# Greys and colours with enough contrast on white and on a dark page alike; the background stays transparent.
_TEXT = "#7d848d"
_GRID = "#7d848d55"
_LENGTH_STYLES = {"auto": ("longdraft, drafting (auto)", "#d9480f", "o-", 2.6),
                 "plain": ("longdraft, plain", "#1c7ed6", "o-", 1.8)}
_PEER_STYLES = {"llama.cpp": ("llama.cpp", "#2b8a3e", "s--"), "openvino": ("OpenVINO", "#9c59d1", "^--"),
               "transformers": ("transformers", "#a1722b", "D--")}


def _read(name: str) -> Record:
    report: Record = json.loads(in_checkout(RESULTS / name).read_text(encoding="utf-8"))
    return report


def _length_curves(report: Record) -> dict[str, list[tuple[float, float]]]:
    """For each drafter (context at the middle of a bucket, tokens per second)."""
    curves = {}
    for drafter in _LENGTH_STYLES:
        buckets = report["drafters"][drafter]["buckets"]
        curves[drafter] = [(report["prefill"] + bucket["until"] - bucket["tokens"] / 2, bucket["tokens_per_second"])
                           for bucket in buckets]
    return curves


def _peer_curves(*reports: Record) -> dict[str, list[tuple[int, float]]]:
    """For each engine (context, tokens per second); a later report overrides an earlier one.

    llama.cpp was measured with and without flash attention: the faster of the two counts.
    """
    ms: dict[str, dict[int, float]] = {}
    for report in reports:
        measured: dict[tuple[str, int], float] = {}
        for step in report["steps"]:
            key = (step["engine"].split(",")[0], step["context"])
            measured[key] = min(step["ms"], measured.get(key, step["ms"]))
        for (engine, context), value in measured.items():
            ms.setdefault(engine, {})[context] = value
    return {engine: [(context, 1000 / value) for context, value in sorted(ms[engine].items())]
            for engine in _PEER_STYLES}


def draw_headline(output: Path) -> None:
    """Write the README's picture: tokens per second over the length of the context, longdraft beside other engines.

    It reads one run of `bench length`, in which plain decoding and `auto` wrote the same 100,000 tokens in turns, and
    two runs of `bench peers`, which timed steps of plain decoding in every engine.
    """
    import matplotlib

    style = {"svg.fonttype": "none", "svg.hashsalt": "longdraft", "font.family": "sans-serif", "font.size": 11}
    metadata = {"Date": None} if output.suffix == ".svg" else None
    with matplotlib.rc_context(style):
        _headline().savefig(output, transparent=True, dpi=150, metadata=metadata)


def _headline() -> Figure:
    from matplotlib.figure import Figure

    report = _read("length-4096-new-100000.json")
    figure = Figure(figsize=(8.4, 4.3), layout="constrained")
    axes = figure.subplots()
    for drafter, points in _length_curves(report).items():
        label, color, style, width = _LENGTH_STYLES[drafter]
        _add_curve(axes, points, label, color, style, width)
    for engine, curve in _peer_curves(_read("peers.json"), _read("peers-short.json")).items():
        _add_curve(axes, curve, *_PEER_STYLES[engine], 1.4)
    ratio = report["drafters"]["auto"]["buckets"][-1]["to_first"]
    context, speed = _length_curves(report)["auto"][-1]
    axes.annotate(f"{ratio:.1f}x plain", (context, speed), (0, 9), textcoords="offset points", ha="center",
                  color=_LENGTH_STYLES["auto"][1], weight="bold")
    axes.set(yscale="log", xlim=(0, 138_000), ylim=(4.5, 1300), xlabel="context, tokens", ylabel="tokens per second")
    axes.set_xticks(range(0, 100_001, 20_000), ["0", "20K", "40K", "60K", "80K", "100K"])
    axes.set_yticks([5, 10, 20, 50, 100, 200, 500, 1000], ["5", "10", "20", "50", "100", "200", "500", "1000"])
    axes.set_yticks([], minor=True)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.tick_params(colors=_TEXT)
    axes.xaxis.label.set_color(_TEXT)
    axes.yaxis.label.set_color(_TEXT)
    for name, spine in axes.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=_TEXT)
    return figure


def _add_curve(axes: Any, points: list[Any], label: str, color: str, style: str, width: float) -> None:
    axes.plot(*zip(*points, strict=True), style, color=color, linewidth=width, markersize=4.5)
    axes.annotate(label, points[-1], (9, 0), textcoords="offset points", va="center", color=color)


_SPAN = 400_000  # tokens of the running mean
_MAX_POINTS = 150  # of each run


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(tokens seen, running mean of the loss)."""
    points: list[tuple[int, float]] = []
    before, mean, weight = 0, 0.0, 0.0
    for line in map(json.loads, path.read_text().splitlines()):
        if "loss" not in line:
            continue
        kept = 0.0 if line.get("is_mean") else math.exp((before - line["tokens"]) / _SPAN)
        mean, weight, before = kept * mean + (1 - kept) * line["loss"], kept * weight + 1 - kept, line["tokens"]
        points.append((before, mean / weight))
    return points[:: max(1, len(points) // _MAX_POINTS)] + points[-1:]


def _loss_curve(runs: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Training loss of consecutive runs: name -> points (million tokens seen, loss in nats per token)."""
    figure, (axes,) = base.new_figure("million tokens seen", "training loss, nats per token")
    axes.xaxis.set_major_formatter("{x:g}")
    for name, points in runs.items():
        axes.plot(*zip(*points), label=name)
    lowest = min(loss for points in runs.values() for _, loss in points)
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.6 * lowest))
    axes.legend(frameon=False)
    return figure


def draw_losses(runs: Mapping[str, Path], output: Path, keep: Path | None) -> None:
    """Draw the loss of a model that was trained in several runs.

    runs  name -> the metrics.jsonl that `longdraft train` wrote, in the order of the training. Lines with `is_mean` are
          points of an earlier figure
    keep  a file for the points that are drawn
    """
    start, kept = 0, []
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, path in runs.items():
        points = read_losses(path)
        curves[name] = [((start + tokens) / 1e6, loss) for tokens, loss in points]
        kept += [{"go": name, "tokens": tokens, "loss": round(loss, 4), "is_mean": True} for tokens, loss in points]
        start += points[-1][0]
    save_figure(_loss_curve(curves), output)
    if keep:
        keep.write_text("".join(json.dumps(point) + "\n" for point in kept))
