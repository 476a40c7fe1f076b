"""The loss curve of a model that was trained in several goes, as the cards of the bundled models show it.

    python benchmarks/loss_curve.py "1,024 tokens=A/metrics.jsonl" "32,768 tokens=B/metrics.jsonl" --output loss.svg

Each go is what `longdraft train` writes; the line is the running mean over 400,000 tokens.
`--keep FILE.jsonl` keeps the points that are drawn. A line with `is_mean` (an older log) is drawn as it stands.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

SPAN = 400_000  # tokens of the running mean
POINTS = 150  # of each go


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
    return found[:: max(1, len(found) // POINTS)] + found[-1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goes", nargs="+", help="NAME=metrics.jsonl, in the order in which they were made")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    matplotlib.rcParams["svg.hashsalt"] = "longdraft"
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    start, kept = 0, []
    for name, _, path in (each.rpartition("=") for each in given.goes):
        points = read(Path(path))
        axes.plot([(start + tokens) / 1e6 for tokens, _ in points], [loss for _, loss in points], label=name)
        kept += [{"go": name, "tokens": tokens, "loss": round(loss, 4), "is_mean": True} for tokens, loss in points]
        start += points[-1][0]
    axes.set(xlabel="million tokens seen", ylabel="training loss, nats per token")
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.6 * min(point["loss"] for point in kept)))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(given.output, metadata={"Date": None})
    if given.keep:
        given.keep.write_text("".join(json.dumps(point) + "\n" for point in kept))


if __name__ == "__main__":
    main()
