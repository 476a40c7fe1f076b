"""Draw the loss curve of a model that was trained in several runs, for the README of a bundled model.

    python benchmarks/loss_curve.py "1,024 tokens=A/metrics.jsonl" "32,768 tokens=B/metrics.jsonl" --output loss.svg

Each file is what `longdraft train` writes. The line is a running mean over 400,000 tokens. `--keep FILE.jsonl` writes
the points that are drawn; lines with `is_mean` in an input file are such points.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from longdraft.report import figures

SPAN = 400_000  # tokens of the running mean
MAX_POINTS = 150  # of each run


def read(path: Path) -> list[tuple[int, float]]:
    """(tokens seen, running mean of the loss)."""
    found: list[tuple[int, float]] = []
    before, mean, weight = 0, 0.0, 0.0
    for line in map(json.loads, path.read_text().splitlines()):
        if "loss" not in line:
            continue
        kept = 0.0 if line.get("is_mean") else math.exp((before - line["tokens"]) / SPAN)
        mean, weight, before = kept * mean + (1 - kept) * line["loss"], kept * weight + 1 - kept, line["tokens"]
        found.append((before, mean / weight))
    return found[:: max(1, len(found) // MAX_POINTS)] + found[-1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="NAME=metrics.jsonl, in the order of the training")
    parser.add_argument("--output", type=Path, required=True, help="the figure: .svg, .png or .pdf")
    parser.add_argument("--keep", type=Path, help="write the points to this file")
    given = parser.parse_args()
    start, kept, curves = 0, [], {}
    for name, _, path in (each.rpartition("=") for each in given.runs):
        points = read(Path(path))
        curves[name] = [((start + tokens) / 1e6, loss) for tokens, loss in points]
        kept += [{"go": name, "tokens": tokens, "loss": round(loss, 4), "is_mean": True} for tokens, loss in points]
        start += points[-1][0]
    figures.save_figure(figures.loss_curve(curves), given.output)
    if given.keep:
        given.keep.write_text("".join(json.dumps(point) + "\n" for point in kept))


if __name__ == "__main__":
    main()
