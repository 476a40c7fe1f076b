"""The decoding time of a long text by each system, estimated from measured segments; `longdraft bench extrapolate`.

    longdraft bench run segments --prompt-file novel.txt --output segments.jsonl
    longdraft bench extrapolate segments.jsonl --prefill 4096 --tokens 100000

Seconds per token are known at the middle of each segment. Between two segments they are interpolated linearly (the
bytes that attention reads grow linearly), and beyond the outermost ones extrapolated on the nearest line. Acceptance
after a novel may differ from that after a model's own text, so these are estimates of cost, not measurements.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from longdraft.errors import UsageError
from longdraft.report.table import Table
from longdraft_bench.paper import experiment
from longdraft_bench.results import Results

Points = Sequence[tuple[float, float]]  # (context, seconds per token), by rising context


def pace(points: Points, context: float) -> float:
    """Seconds per token at a context, on the lines through neighbouring points. Needs at least two points."""
    right = min(max(bisect_right([each for each, _ in points], context), 1), len(points) - 1)
    (before, low), (after, high) = points[right - 1 : right + 1]
    return low + (high - low) * (context - before) / (after - before)


def seconds(points: Points, prefill: int, tokens: int) -> float:
    """Seconds of `tokens` tokens after `prefill`: the exact sum over the lines, by the middle of each stretch."""
    marks = [each for each, _ in points if prefill < each < prefill + tokens]
    edges = [float(prefill), *marks, float(prefill + tokens)]
    return sum((end - start) * pace(points, (start + end) / 2) for start, end in pairwise(edges))


def measured(results: Results) -> dict[str, list[tuple[float, float]]]:
    """System -> points; the median if a context was measured with several seeds or stretches."""
    all_paces: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    for text in results.texts.values():
        for system, turns in text.turns.items():
            tokens = sum(turn["tokens"] for turn in turns)
            middle = text.about["prefill"] + tokens / 2
            all_paces[system, middle].append(sum(turn["seconds"] for turn in turns) / tokens)
    systems: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for (system, middle), paces in sorted(all_paces.items()):
        systems[system].append((middle, statistics.median(paces)))
    return {system: points for system, points in systems.items() if len(points) > 1}


def table(results: Results, prefill: int, tokens: int) -> Table:
    """Minutes, and speed relative to the reference, fastest first. Raises UsageError if no system has two contexts."""
    systems = measured(results)
    if not systems:
        raise UsageError(f"{results.name} has no system at two contexts; give the file that `bench run segments` wrote")
    reference = next(iter(results.texts.values())).about["reference"]
    whole = {system: seconds(points, prefill, tokens) for system, points in systems.items()}
    names = {case.system: case.name.removesuffix(", after {prefill}")
             for table in experiment.load_experiment("segments").tables for case in table.cases}
    rows = [[names.get(system, system), f"{taken / 60:.1f}", f"{whole[reference] / taken:.2f}"]
            for system, taken in sorted(whole.items(), key=lambda each: each[1])]
    return Table(f"{tokens:,} tokens after {prefill:,}, extrapolated", ["system", "minutes", "×"], rows)
