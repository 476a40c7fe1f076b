"""Figures of a text, drawn with matplotlib for print and for colour-blind readers (line styles and markers beside
colours): minutes, speedup, step, sources, lengths.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from longdraft.report.turns import MeasuredText, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
MARKERS, _LINES = "os^Dvp*X", ("-", "--", "-.", ":")
_MAX_STEP_LENGTH = 20  # `lengths` counts longer steps in its last row
TARGET = "the model"  # source of the token that each verification adds


def of_text(text: MeasuredText, session: Record) -> Iterator[tuple[str, Figure]]:
    """The figures that the records of a text allow, each with its name."""
    systems = [name for name in text.turns if _turns(text, name)]
    if not systems:
        return
    yield "minutes", minutes(text, systems)
    if len(systems) > 1:
        yield "speedup", speedup(text, [name for name in systems if name != text.about["reference"]])
    yield "step", step(text, systems, session)
    if drafting := [name for name in systems if any(turn["accepted"] for turn in text.turns[name])]:
        fastest = min(drafting, key=lambda name: _seconds_per_token(text.turns[name]))
        yield "sources", sources(text, fastest)
        yield "lengths", lengths(text, fastest)


def minutes(text: MeasuredText, systems: Sequence[str]) -> Figure:
    """Minutes by new tokens, a line for each system (figure 1 of TokenSwift)."""
    figure, (axes,) = new_figure("new tokens", "minutes (prompt not counted)")
    for index, name in enumerate(systems):
        turns = _turns(text, name)
        add_line(axes, [0, *turn_ends(turns)], [0.0, *accumulate(turn["seconds"] / 60 for turn in turns)], name, index)
    _finish(axes, text)
    return figure


def speedup(text: MeasuredText, systems: Sequence[str]) -> Figure:
    """Speed relative to the reference system, and accepted draft tokens per drafted depth, by new tokens."""
    figure, (left, right) = new_figure("new tokens", f"times as fast as {text.about['reference']}, up to there",
                                    "accepted draft tokens / depth of the drafts")
    reference = text.turns[text.about["reference"]]
    for index, name in enumerate(systems, 1):
        turns = text.turns[name][: len(reference)]
        ratios = [_seconds_per_token(reference[:count]) / _seconds_per_token(turns[:count])
                  for count in range(1, len(turns) + 1)]
        add_line(left, turn_ends(turns), ratios, name, index)
        drafted = [turn for turn in turns if turn["depth"]]
        add_line(right, turn_ends(drafted), [turn["accepted"] / turn["depth"] for turn in drafted], name, index)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1)
    add_legend(right)
    return figure


def step(text: MeasuredText, systems: Sequence[str], session: Record) -> Figure:
    """Milliseconds of a step by context, beside the floor that memory bandwidth sets."""
    figure, (axes,) = new_figure("context, tokens", "ms per step")
    prefill = text.about["prefill"]
    for index, name in enumerate(systems):
        turns = _turns(text, name)
        add_line(axes, [prefill + end for end in turn_ends(turns)],
              [1e3 * turn["seconds"] / turn["steps"] for turn in turns], name, index)
    if bandwidth := session.get("limits", {}).get("read_bandwidth_gb_per_s"):
        contexts = [prefill + end for end in turn_ends(_turns(text, systems[0]))]
        floors = [(session["weights_bytes"] + session["cache_bytes_per_token"] * context) / bandwidth / 1e6
                  for context in contexts]
        axes.plot(contexts, floors, color="grey", linewidth=3, alpha=0.6,
                  label=f"floor: weights and cache read once at {bandwidth:.0f} GB/s")
    _finish(axes, text)
    return figure


def sources(text: MeasuredText, system: str) -> Figure:
    """The share of tokens that each drafter contributed, by new tokens."""
    figure, (axes,) = new_figure("new tokens", "share of the tokens")
    turns = _turns(text, system)
    names = sorted({name for turn in turns for name in turn["accepted_by_source"]})
    shares = [[turn["accepted_by_source"].get(name, 0) / turn["tokens"] for turn in turns] for name in names]
    shares.append([1 - sum(share[turn] for share in shares) for turn in range(len(turns))])
    edges = _edges(turns)
    widths = [end - start for start, end in pairwise(edges)]
    bottom = [0.0] * len(turns)
    for index, (name, share) in enumerate(zip([*names, TARGET], shares)):
        axes.bar(edges[:-1], share, widths, bottom, align="edge", label=name, color=colour_of(name, names),
                 edgecolor="white", linewidth=0.3, hatch=("", "//", "..", "xx", "\\\\")[index % 5])
        bottom = [low + high for low, high in zip(bottom, share)]
    axes.set(ylim=(0, 1), xlim=(edges[0], edges[-1]), title=f"source of the tokens: {system}")
    add_legend(axes)
    return figure


def colour_of(source: str, names: Sequence[str]) -> str:
    """The colour of a source; grey for the tokens that the model itself adds."""
    return "#BBBBBB" if source == TARGET else COLOURS[1:][list(names).index(source) % (len(COLOURS) - 1)]


def lengths(text: MeasuredText, system: str) -> Figure:
    """How many tokens the steps of each turn wrote."""
    figure, (axes,) = new_figure("new tokens", "tokens per step")
    turns = _turns(text, system)
    longest = min(_MAX_STEP_LENGTH, max(int(length) for turn in turns for length in turn["lengths"]))
    shares = [[0.0] * len(turns) for _ in range(longest)]
    for index, turn in enumerate(turns):
        for length, count in turn["lengths"].items():
            shares[min(int(length), longest) - 1][index] += count / turn["steps"]
    mesh = axes.pcolormesh(_edges(turns), [height + 0.5 for height in range(longest + 1)], shares, cmap="cividis",
                           vmin=0)
    figure.colorbar(mesh, ax=axes, label="share of the steps")
    more = " (last row: or more)" if longest == _MAX_STEP_LENGTH else ""
    axes.set(title=f"{system}: tokens per step along the text{more}")
    axes.grid(visible=False)
    return figure


def main_texts(texts: Iterable[MeasuredText]) -> list[MeasuredText]:
    """Of each prompt length the text with the most systems, without those that have less than half of the most."""
    by_prefill: dict[int, MeasuredText] = {}
    for text in texts:
        best = by_prefill.get(text.about["prefill"])
        if best is None or len(text.turns) > len(best.turns):
            by_prefill[text.about["prefill"]] = text
    most = max((len(text.turns) for text in by_prefill.values()), default=0)
    return [text for text in by_prefill.values() if 2 * len(text.turns) >= most]


def data_url(figure: Figure) -> str:
    """The figure as an SVG in a `data:` URL. Equal figures give equal URLs."""
    buffer = io.BytesIO()
    write_figure(figure, buffer, "svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def write_figure(figure: Figure, target: Any, form: str) -> None:
    """Write the figure to a path or a binary file. Equal figures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "longdraft"}):
        figure.savefig(target, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)


def new_figure(xlabel: str, *ylabels: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a panel for each label of a y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4) if len(ylabels) == 1 else (11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(ylabels), squeeze=False)[0]
    for axes, ylabel in zip(panels, ylabels):
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    return figure, panels


def add_line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, index: int) -> None:
    """The line of a system, whose colour and marker its index chooses."""
    again = index // len(COLOURS)  # from the ninth line on, markers are hollow and line styles shift
    axes.plot(x, y, _LINES[(index + again) % 4], marker=MARKERS[index % 8], color=COLOURS[index % 8], label=name,
              linewidth=1.4, markersize=4, markevery=max(1, len(x) // 10), markerfacecolor="white" if again else None)


def _finish(axes: Axes, text: MeasuredText) -> None:
    axes.set_ylim(bottom=0)
    axes.set_title(f"after {text.about['prefill']:,} tokens of prompt", fontsize=9)
    add_legend(axes)


def add_legend(axes: Axes) -> None:
    """A legend to the right of the panel, where it covers no line."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _turns(text: MeasuredText, system: str) -> list[Record]:
    """The turns of a system that have steps. A long step at the end of a turn may complete the next turn too."""
    return [turn for turn in text.turns[system] if turn["steps"]]


def turn_ends(turns: Iterable[Record]) -> list[int]:
    """New tokens at the end of each turn."""
    return [turn["until"] for turn in turns]


def _edges(turns: Sequence[Record]) -> list[int]:
    return [turns[0]["until"] - turns[0]["tokens"], *turn_ends(turns)]


def _seconds_per_token(turns: Sequence[Record]) -> float:
    return float(sum(turn["seconds"] for turn in turns)) / (sum(turn["tokens"] for turn in turns) or 1)
