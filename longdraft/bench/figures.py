"""Pictures of results: drawn for print and for the colour-blind (line styles and markers beside colours).

    minutes   minutes against tokens, a line for each system (the paper's figure 1)
    speedup   how much faster than the reference, and how many guesses are right, by length
    sources   who guessed the tokens of a text, by length
    step      what a step costs beside reading weights and cache once at the measured bandwidth
    lengths   how many tokens a step wrote, along the text
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longdraft.bench.results import Record, Results, Text
from longdraft.errors import OutputError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
_MARKERS, _LINES = "os^Dvp*X", ("-", "--", "-.", ":")
_LONGEST = 20  # tokens a step wrote; more are counted with these
TARGET = "the model"  # source of the token that each verification adds


def require_matplotlib(option: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{option} needs matplotlib; install it with: pip install 'longdraft[bench]'") from error


def of_text(text: Text, session: Record) -> Iterator[tuple[str, Figure]]:
    """All figures of one text, by name; those for which it has what they show."""
    systems = [name for name in text.turns if _turns(text, name)]
    if not systems:
        return
    reference = text.about["reference"]
    yield "minutes", minutes(text, systems)
    if len(systems) > 1:
        yield "speedup", speedup(text, [name for name in systems if name != reference])
    drafting = [name for name in systems if any(turn["accepted"] for turn in text.turns[name])]
    yield "step", step(text, systems, session)
    if drafting:
        best = min(drafting, key=lambda name: _seconds(text.turns[name]) / _tokens(text.turns[name]))
        yield "sources", sources(text, best)
        yield "lengths", lengths(text, best)


def minutes(text: Text, systems: Sequence[str]) -> Figure:
    figure, axes = _single("new tokens", "minutes (prompt not counted)")
    for place, name in enumerate(systems):
        turns = _turns(text, name)
        spent = accumulate(turn["seconds"] / 60 for turn in turns)
        _line(axes, [0, *_until(turns)], [0.0, *spent], name, place)
    _finish(axes, text)
    return figure


def speedup(text: Text, systems: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    reference = text.turns[text.about["reference"]]
    for place, name in enumerate(systems, 1):
        pairs = list(zip(text.turns[name], reference))
        ratios = [_pace([other for _, other in pairs[: count + 1]]) / _pace([mine for mine, _ in pairs[: count + 1]])
                  for count in range(len(pairs))]
        _line(left, _until(mine for mine, _ in pairs), ratios, name, place)
        rates = [(turn["until"], turn["accepted"] / turn["depth"]) for turn, _ in pairs if turn["depth"]]
        _line(right, [end for end, _ in rates], [rate for _, rate in rates], name, place)
    left.axhline(1, color="grey", linewidth=0.8)
    left.set(xlabel="new tokens", ylabel=f"times as fast as {text.about['reference']}, up to there")
    right.set(xlabel="new tokens", ylabel="accepted guesses / places guessed ahead", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    left.set_ylim(bottom=0)
    _legend(right)
    return figure


def sources(text: Text, system: str) -> Figure:
    figure, axes = _single("new tokens", "share of the tokens")
    turns = _turns(text, system)
    names = sorted({name for turn in turns for name in turn["accepted_by_source"]})
    shares = [[turn["accepted_by_source"].get(name, 0) / turn["tokens"] for turn in turns] for name in names]
    shares.append([1 - sum(share[place] for share in shares) for place in range(len(turns))])
    edges = [turns[0]["until"] - turns[0]["tokens"], *(turn["until"] for turn in turns)]
    below = [0.0] * len(turns)
    widths = [end - start for start, end in pairwise(edges)]
    for place, (name, share) in enumerate(zip([*names, TARGET], shares)):
        axes.bar(edges[:-1], share, widths, below, align="edge", label=name, color=colour_of(name, names),
                 edgecolor="white", linewidth=0.3, hatch=("", "//", "..", "xx", "\\\\")[place % 5])
        below = [low + high for low, high in zip(below, share)]
    axes.set(ylim=(0, 1), xlim=(edges[0], edges[-1]), title=f"who guessed the tokens: {system}")
    _legend(axes)
    return figure


def colour_of(source: str, names: Sequence[str]) -> str:
    """A source's colour: grey for the model's own tokens."""
    return "#BBBBBB" if source == TARGET else COLOURS[1:][list(names).index(source) % (len(COLOURS) - 1)]


def step(text: Text, systems: Sequence[str], session: Record) -> Figure:
    figure, axes = _single("context, tokens", "ms for each step")
    prefill = text.about["prefill"]
    for place, name in enumerate(systems):
        turns = _turns(text, name)
        _line(axes, [prefill + end for end in _until(turns)],
              [1e3 * turn["seconds"] / turn["steps"] for turn in turns], name, place)
    bandwidth = session.get("limits", {}).get("read_bandwidth_gb_per_s")
    if bandwidth:
        contexts = [prefill + end for end in _until(_turns(text, systems[0]))]
        floors = [(session["weights_bytes"] + session["cache_bytes_per_token"] * context) / bandwidth / 1e6
                  for context in contexts]
        axes.plot(contexts, floors, color="grey", linewidth=3, alpha=0.6,
                  label=f"floor: weights and cache read once at {bandwidth:.0f} GB/s")
    _finish(axes, text)
    return figure


def lengths(text: Text, system: str) -> Figure:
    figure, axes = _single("new tokens", "tokens that a step wrote")
    turns = _turns(text, system)
    longest = min(_LONGEST, max(int(length) for turn in turns for length in turn["lengths"]))
    shares = [[0.0] * len(turns) for _ in range(longest)]
    for place, turn in enumerate(turns):
        for length, count in turn["lengths"].items():
            shares[min(int(length), longest) - 1][place] += count / turn["steps"]
    edges = [turns[0]["until"] - turns[0]["tokens"], *(turn["until"] for turn in turns)]
    mesh = axes.pcolormesh(edges, [height + 0.5 for height in range(longest + 1)], shares, cmap="cividis", vmin=0)
    figure.colorbar(mesh, ax=axes, label="share of the steps")
    more = " (the last: or more)" if longest == _LONGEST else ""
    axes.set(title=f"{system}: tokens of each step along the text{more}")
    axes.grid(visible=False)
    return figure


def peers(records: Sequence[Record]) -> Figure:
    """Times of engines to ours, with the spread over their rounds."""
    figure, axes = _single("ms for each new token; whiskers: the fastest and the slowest run", "engine and drafting")
    axes.xaxis.set_major_formatter("{x:g}")
    shown = [record for record in records if record.get("ms")]
    names = [f"{record['engine']}\n{record['system']}" for record in shown]
    middle = [record["ms"] for record in shown]
    spread = [[record["ms"] - record["ms_low"] for record in shown],
              [record["ms_high"] - record["ms"] for record in shown]]
    axes.barh(names, middle, xerr=spread, color=[COLOURS[1] if "longdraft" in name else COLOURS[7] for name in names],
              capsize=3)
    axes.invert_yaxis()
    figure.set_size_inches(7, 1.2 + 0.45 * len(shown))
    return figure


def _single(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes: Axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, place: int) -> None:
    again = place // len(COLOURS)  # the second time round markers are hollow and lines of another style
    axes.plot(x, y, _LINES[(place + again) % 4], marker=_MARKERS[place % 8], color=COLOURS[place % 8], label=name,
              linewidth=1.4, markersize=4, markevery=max(1, len(x) // 10), markerfacecolor="white" if again else None)


def _finish(axes: Axes, text: Text) -> None:
    axes.set_ylim(bottom=0)
    axes.set_title(f"behind {text.about['prefill']:,} tokens of prompt", fontsize=9)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Beside the lines, where it hides none."""
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _turns(text: Text, system: str) -> list[Record]:
    """Its turns, but those that a long step of the turn before had done already."""
    return [turn for turn in text.turns[system] if turn["steps"]]


def _until(turns: Iterable[Record]) -> list[int]:
    return [turn["until"] for turn in turns]


def _tokens(turns: Iterable[Record]) -> float:
    return float(sum(turn["tokens"] for turn in turns)) or 1.0


def _seconds(turns: Iterable[Record]) -> float:
    return float(sum(turn["seconds"] for turn in turns))


def _pace(turns: Sequence[Record]) -> float:
    return _seconds(turns) / _tokens(turns)


def as_image(figure: Any) -> str:
    """A data: URL of the figure as SVG, the same for the same figure."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "longdraft"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def save(figure: Any, folder: Path, name: str) -> None:
    """As PNG and SVG."""
    try:
        for suffix in ("png", "svg"):
            figure.savefig(folder / f"{name}.{suffix}", dpi=150)
    except OSError as error:
        raise OutputError(f"cannot write {folder / name}: {error.strerror or error}") from error


def main_texts(results: Results) -> list[Text]:
    """The texts whose figures say most: of each prompt length the one with the most systems, the first of equals."""
    found: dict[int, Text] = {}
    for text in results.texts.values():
        best = found.get(text.about["prefill"])
        if best is None or len(text.turns) > len(best.turns):
            found[text.about["prefill"]] = text
    most = max((len(text.turns) for text in found.values()), default=0)
    return [text for text in found.values() if 2 * len(text.turns) >= most]
