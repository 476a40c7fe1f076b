"""All figures, drawn with matplotlib for print and for colour-blind readers (line styles and markers beside colours).

Of a text:       minutes, speedup, step, sources, lengths
Of a benchmark:  roofline, length, engines (other engines beside longdraft), loss_curve
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.errors import OutputError, UsageError
from longdraft.report import require_packages
from longdraft.report.turns import MeasuredText, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_MARKERS, _LINES = "os^Dvp*X", ("-", "--", "-.", ":")
_MAX_STEP_LENGTH = 20  # `lengths` counts longer steps in its last row
TARGET = "the model"  # source of the token that each verification adds
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise UsageError before any measurement if no figure can be written to `path`."""
    if path.suffix not in PLOT_SUFFIXES:
        raise UsageError(f"--plot is {path}; allowed: a name that ends with {', '.join(PLOT_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot cannot write {path}: no such folder; choose another place")
    require_packages("--plot", ("matplotlib",))


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
    figure, (axes,) = _figure("new tokens", "minutes (prompt not counted)")
    for place, name in enumerate(systems):
        turns = _turns(text, name)
        _line(axes, [0, *_ends(turns)], [0.0, *accumulate(turn["seconds"] / 60 for turn in turns)], name, place)
    _finish(axes, text)
    return figure


def speedup(text: MeasuredText, systems: Sequence[str]) -> Figure:
    """Speed relative to the reference system, and accepted draft tokens per drafted depth, by new tokens."""
    figure, (left, right) = _figure("new tokens", f"times as fast as {text.about['reference']}, up to there",
                                    "accepted draft tokens / depth of the drafts")
    reference = text.turns[text.about["reference"]]
    for place, name in enumerate(systems, 1):
        turns = text.turns[name][: len(reference)]
        ratios = [_seconds_per_token(reference[:count]) / _seconds_per_token(turns[:count])
                  for count in range(1, len(turns) + 1)]
        _line(left, _ends(turns), ratios, name, place)
        drafted = [turn for turn in turns if turn["depth"]]
        _line(right, _ends(drafted), [turn["accepted"] / turn["depth"] for turn in drafted], name, place)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set_ylim(bottom=0)
    right.set_ylim(0, 1)
    _legend(right)
    return figure


def step(text: MeasuredText, systems: Sequence[str], session: Record) -> Figure:
    """Milliseconds of a step by context, beside the floor that memory bandwidth sets."""
    figure, (axes,) = _figure("context, tokens", "ms per step")
    prefill = text.about["prefill"]
    for place, name in enumerate(systems):
        turns = _turns(text, name)
        _line(axes, [prefill + end for end in _ends(turns)],
              [1e3 * turn["seconds"] / turn["steps"] for turn in turns], name, place)
    if bandwidth := session.get("limits", {}).get("read_bandwidth_gb_per_s"):
        contexts = [prefill + end for end in _ends(_turns(text, systems[0]))]
        floors = [(session["weights_bytes"] + session["cache_bytes_per_token"] * context) / bandwidth / 1e6
                  for context in contexts]
        axes.plot(contexts, floors, color="grey", linewidth=3, alpha=0.6,
                  label=f"floor: weights and cache read once at {bandwidth:.0f} GB/s")
    _finish(axes, text)
    return figure


def sources(text: MeasuredText, system: str) -> Figure:
    """The share of tokens that each drafter contributed, by new tokens."""
    figure, (axes,) = _figure("new tokens", "share of the tokens")
    turns = _turns(text, system)
    names = sorted({name for turn in turns for name in turn["accepted_by_source"]})
    shares = [[turn["accepted_by_source"].get(name, 0) / turn["tokens"] for turn in turns] for name in names]
    shares.append([1 - sum(share[place] for share in shares) for place in range(len(turns))])
    edges = _edges(turns)
    widths = [end - start for start, end in pairwise(edges)]
    bottom = [0.0] * len(turns)
    for place, (name, share) in enumerate(zip([*names, TARGET], shares)):
        axes.bar(edges[:-1], share, widths, bottom, align="edge", label=name, color=colour_of(name, names),
                 edgecolor="white", linewidth=0.3, hatch=("", "//", "..", "xx", "\\\\")[place % 5])
        bottom = [low + high for low, high in zip(bottom, share)]
    axes.set(ylim=(0, 1), xlim=(edges[0], edges[-1]), title=f"source of the tokens: {system}")
    _legend(axes)
    return figure


def colour_of(source: str, names: Sequence[str]) -> str:
    """The colour of a source; grey for the tokens that the model itself adds."""
    return "#BBBBBB" if source == TARGET else COLOURS[1:][list(names).index(source) % (len(COLOURS) - 1)]


def lengths(text: MeasuredText, system: str) -> Figure:
    """How many tokens the steps of each turn wrote."""
    figure, (axes,) = _figure("new tokens", "tokens per step")
    turns = _turns(text, system)
    longest = min(_MAX_STEP_LENGTH, max(int(length) for turn in turns for length in turn["lengths"]))
    shares = [[0.0] * len(turns) for _ in range(longest)]
    for place, turn in enumerate(turns):
        for length, count in turn["lengths"].items():
            shares[min(int(length), longest) - 1][place] += count / turn["steps"]
    mesh = axes.pcolormesh(_edges(turns), [height + 0.5 for height in range(longest + 1)], shares, cmap="cividis",
                           vmin=0)
    figure.colorbar(mesh, ax=axes, label="share of the steps")
    more = " (last row: or more)" if longest == _MAX_STEP_LENGTH else ""
    axes.set(title=f"{system}: tokens per step along the text{more}")
    axes.grid(visible=False)
    return figure


def engines(records: Sequence[Record]) -> Figure:
    """Milliseconds per token of each engine and drafting mode, with the range over the rounds."""
    figure, (axes,) = _figure("ms per new token; whiskers: the fastest and the slowest run", "engine and drafting")
    axes.xaxis.set_major_formatter("{x:g}")
    shown = [record for record in records if record.get("ms")]
    names = [f"{record['engine']}\n{record['system']}" for record in shown]
    spread = [[record["ms"] - record["ms_low"] for record in shown],
              [record["ms_high"] - record["ms"] for record in shown]]
    axes.barh(names, [record["ms"] for record in shown], xerr=spread, capsize=3,
              color=[COLOURS[1] if "longdraft" in name else COLOURS[7] for name in names])
    axes.invert_yaxis()
    figure.set_size_inches(7, 1.2 + 0.45 * len(shown))
    return figure


def sweep(names: Sequence[str], series: Mapping[str, Sequence[tuple[float, float] | None]]) -> Figure:
    """Each measure by the cases of a table, a panel for each, with its deviation over the texts (TokenSwift, figure 4).

    series  measure -> (mean, standard deviation) of each case; None: not measured
    """
    figure, panels = _figure("", *series)
    for place, (axes, values) in enumerate(zip(panels, series.values(), strict=True)):
        found = [(at, *value) for at, value in enumerate(values) if value is not None]
        if found:
            at, means, deviations = zip(*found, strict=True)
            axes.errorbar(at, means, yerr=deviations, capsize=3, color=COLOURS[1 + place % 7],
                          marker=_MARKERS[place % 8])
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        axes.set_ylim(bottom=0)
    return figure


def roofline(document: Record) -> Figure:
    """Plain decoding steps beside their floor by context, and forwards by their number of rows."""
    records = document["contexts"]
    contexts = [record["context"] for record in records]
    figure, (left, right) = _figure("context, tokens", "ms", "ms")
    for place, (key, label) in enumerate((("step_ms", "step of plain decoding"),
                                          ("forward_cold_ms", "forward, nothing cached"),
                                          ("floor_ms", "floor at read bandwidth"))):
        _line(left, contexts, [record[key] for record in records], label, place)
    counts = [row["rows"] for row in records[0]["rows"]]
    for place, record in enumerate(records):
        _line(right, counts, [row["ms"] for row in record["rows"]], f"{record['context']:,} tokens", place)
    right.set_xlabel("rows of one forward")
    for axes, ticks in ((left, contexts), (right, counts)):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        _legend(axes)
    figure.suptitle(f"{document['model']}: {_machine(document)}")
    return figure


def length(document: Record) -> Figure:
    """Tokens per second and mean accepted length by new tokens, a line for each drafter."""
    figure, panels = _figure("new tokens", "tokens per second", "mean accepted length")
    for axes, key in zip(panels, ("tokens_per_second", "mean_accepted_length"), strict=True):
        for place, (drafter, found) in enumerate(document["drafters"].items()):
            _line(axes, _ends(found["buckets"]), [bucket[key] for bucket in found["buckets"]], drafter, place)
        axes.set_ylim(bottom=0)
    _legend(panels[-1])
    figure.suptitle(f"after {document['prefill']:,} tokens of prompt: {_machine(document)}")
    return figure


def loss_curve(runs: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Training loss of consecutive runs: name -> points (million tokens seen, loss in nats per token)."""
    figure, (axes,) = _figure("million tokens seen", "training loss, nats per token")
    axes.xaxis.set_major_formatter("{x:g}")
    for name, points in runs.items():
        axes.plot(*zip(*points), label=name)
    lowest = min(loss for points in runs.values() for _, loss in points)
    axes.set_ylim(top=min(axes.get_ylim()[1], 1.6 * lowest))
    axes.legend(frameon=False)
    return figure


def main_texts(texts: Iterable[MeasuredText]) -> list[MeasuredText]:
    """Of each prompt length the text with the most systems, without those that have less than half of the most."""
    found: dict[int, MeasuredText] = {}
    for text in texts:
        best = found.get(text.about["prefill"])
        if best is None or len(text.turns) > len(best.turns):
            found[text.about["prefill"]] = text
    most = max((len(text.turns) for text in found.values()), default=0)
    return [text for text in found.values() if 2 * len(text.turns) >= most]


def data_url(figure: Figure) -> str:
    """The figure as an SVG in a `data:` URL. Equal figures give equal URLs."""
    buffer = io.BytesIO()
    _write(figure, buffer, "svg")
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def save_figure(figure: Figure, *paths: Path) -> None:
    """Write the figure to files whose suffixes name their formats. Raises OutputError."""
    for path in paths:
        try:
            _write(figure, path, path.suffix[1:])
        except OSError as error:
            raise OutputError(f"cannot write the figure {path}: {error.strerror or error}; choose another place"
                              ) from error


def _write(figure: Figure, target: Any, form: str) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "longdraft"}):
        figure.savefig(target, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)


def _figure(xlabel: str, *ylabels: str) -> tuple[Figure, Sequence[Axes]]:
    """A figure with a panel for each label of a y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4) if len(ylabels) == 1 else (11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(ylabels), squeeze=False)[0]
    for axes, ylabel in zip(panels, ylabels):
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    return figure, panels


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, place: int) -> None:
    again = place // len(COLOURS)  # from the ninth line on, markers are hollow and line styles shift
    axes.plot(x, y, _LINES[(place + again) % 4], marker=_MARKERS[place % 8], color=COLOURS[place % 8], label=name,
              linewidth=1.4, markersize=4, markevery=max(1, len(x) // 10), markerfacecolor="white" if again else None)


def _finish(axes: Axes, text: MeasuredText) -> None:
    axes.set_ylim(bottom=0)
    axes.set_title(f"after {text.about['prefill']:,} tokens of prompt", fontsize=9)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """A legend to the right of the panel, where it covers no line."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _machine(document: Record) -> str:
    machine = document["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{machine['kernels']}, {machine['dtype']}, {threads}"


def _turns(text: MeasuredText, system: str) -> list[Record]:
    """The turns of a system that have steps. A long step at the end of a turn may complete the next turn too."""
    return [turn for turn in text.turns[system] if turn["steps"]]


def _ends(turns: Iterable[Record]) -> list[int]:
    return [turn["until"] for turn in turns]


def _edges(turns: Sequence[Record]) -> list[int]:
    return [turns[0]["until"] - turns[0]["tokens"], *_ends(turns)]


def _seconds_per_token(turns: Sequence[Record]) -> float:
    return float(sum(turn["seconds"] for turn in turns)) / (sum(turn["tokens"] for turn in turns) or 1)
