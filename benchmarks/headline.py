"""Draw the README's picture: tokens per second over the length of the context, longdraft beside other engines.

    python benchmarks/headline.py                          # writes docs/speed.svg
    python benchmarks/headline.py --output picture.png     # any format of matplotlib

It measures nothing. It reads three files of benchmarks/results/: one run of `longdraft bench length`, in which plain
decoding and `auto` wrote the same 100,000 tokens in turns, and two runs of `longdraft bench peers`, which timed steps
of plain decoding in every engine. Needs matplotlib: pip install '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Greys and colours with enough contrast on white and on a dark page alike; the background stays transparent.
TEXT, GRID = "#7d848d", "#7d848d55"
LENGTH_STYLES = {"auto": ("longdraft, drafting (auto)", "#d9480f", "o-", 2.6),
                 "plain": ("longdraft, plain", "#1c7ed6", "o-", 1.8)}
PEER_STYLES = {"llama.cpp": ("llama.cpp", "#2b8a3e", "s--"), "openvino": ("OpenVINO", "#9c59d1", "^--"),
               "transformers": ("transformers", "#a1722b", "D--")}


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def length_curves(report: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """For each drafter (context at the middle of a bucket, tokens per second)."""
    curves = {}
    for drafter in LENGTH_STYLES:
        buckets = report["drafters"][drafter]["buckets"]
        curves[drafter] = [(report["prefill"] + bucket["until"] - bucket["tokens"] / 2, bucket["tokens_per_second"])
                           for bucket in buckets]
    return curves


def peer_curves(*reports: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
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
            for engine in PEER_STYLES}


def draw() -> Figure:
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "longdraft", "font.family": "sans-serif",
                                "font.size": 11})
    report = read("length-4096-new-100000.json")
    figure = Figure(figsize=(8.4, 4.3), layout="constrained")
    axes = figure.subplots()
    for drafter, points in length_curves(report).items():
        label, color, style, width = LENGTH_STYLES[drafter]
        _curve(axes, points, label, color, style, width)
    for engine, curve in peer_curves(read("peers.json"), read("peers-short.json")).items():
        _curve(axes, curve, *PEER_STYLES[engine], 1.4)
    ratio = report["drafters"]["auto"]["buckets"][-1]["to_first"]
    context, speed = length_curves(report)["auto"][-1]
    axes.annotate(f"{ratio:.1f}x plain", (context, speed), (0, 9), textcoords="offset points", ha="center",
                  color=LENGTH_STYLES["auto"][1], weight="bold")
    axes.set(yscale="log", xlim=(0, 138_000), ylim=(4.5, 1300), xlabel="context, tokens", ylabel="tokens per second")
    axes.set_xticks(range(0, 100_001, 20_000), ["0", "20K", "40K", "60K", "80K", "100K"])
    axes.set_yticks([5, 10, 20, 50, 100, 200, 500, 1000], ["5", "10", "20", "50", "100", "200", "500", "1000"])
    axes.set_yticks([], minor=True)
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(colors=TEXT)
    axes.xaxis.label.set_color(TEXT)
    axes.yaxis.label.set_color(TEXT)
    for name, spine in axes.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=TEXT)
    return figure


def _curve(axes: Any, points: list[Any], label: str, color: str, style: str, width: float) -> None:
    axes.plot(*zip(*points, strict=True), style, color=color, linewidth=width, markersize=4.5)
    axes.annotate(label, points[-1], (9, 0), textcoords="offset points", va="center", color=color)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "speed.svg")
    output = parser.parse_args().output
    metadata = {"Date": None} if output.suffix == ".svg" else None
    draw().savefig(output, transparent=True, dpi=150, metadata=metadata)


if __name__ == "__main__":
    main()
