"""A report as one HTML page that embeds its figures and needs neither the network nor another file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

from longdraft.report import figures
from longdraft.report.table import Table
from longdraft.report.turns import MeasuredText, Record, seeds_of

CAPTIONS = {
    "minutes": "Minutes by new tokens. All systems took turns in one run.",
    "speedup": "Speed relative to the reference up to each length, and the share of draft tokens that each turn "
               "accepted.",
    "step": "Time of a step: drafting, one forward, sampling. The grey line is the floor: reading weights and cache "
            "once at the measured bandwidth.",
    "sources": "The drafter that each token came from. Every verification adds one token of the model itself.",
    "lengths": "Tokens per step, along the text.",
}
_SHOWN_SAMPLING = ("temperature", "min_p", "top_p", "repetition_penalty", "penalty_window", "seed")
_SHOWN_PROVENANCE = ("experiment", "scale", "model", "weights_sha256", "heads_sha256", "prompt_file", "prompt_sha256",
                     "seeds", "processor", "threads", "kernels", "dtype", "device", "quantize", "python", "torch",
                     "longdraft", "commit")


class Section(NamedTuple):
    """A part of a page.

    figures  (caption, matplotlib figure)
    pieces   (text, source): text whose pieces are underlined in the colour of their source
    colours  source -> colour
    """

    title: str
    intro: str = ""
    figures: Sequence[tuple[str, Any]] = ()
    tables: Sequence[Table] = ()
    pieces: Sequence[tuple[str, str]] = ()
    colours: Mapping[str, str] = {}


def render_page(title: str, sections: Iterable[Section]) -> str:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True)
    environment.filters["data_url"] = figures.data_url
    return environment.get_template("page.html").render(title=title, sections=sections)


def text_sections(texts: Iterable[MeasuredText], session: Record) -> list[Section]:
    """The figures of the main texts of a run."""
    sections = []
    for text in figures.main_texts(texts):
        sampling = ", ".join(f"{name} {text.about['sampling'][name]}" for name in _SHOWN_SAMPLING)
        sections.append(Section(f"After {text.about['prefill']:,} tokens of prompt", f"Sampling: {sampling}.",
                                [(CAPTIONS[name], figure) for name, figure in figures.of_text(text, session)]))
    return sections


def provenance_section(sessions: Sequence[Record]) -> Section:
    """The machine, the software and the settings of a run."""
    first = sessions[0] | {"seeds": seeds_of(sessions) or None}
    rows = [[name, str(first[name])] for name in _SHOWN_PROVENANCE if first.get(name) is not None]
    limits = [session["limits"] for session in sessions if session.get("limits")]
    if limits:
        rows.append(["read bandwidth, GB/s", ", ".join(f"{each['read_bandwidth_gb_per_s']:.1f}" for each in limits)])
    if peaks := [each["peak_gflop_per_s"]["bfloat16"] for each in limits if "peak_gflop_per_s" in each]:
        rows.append(["bf16 peak, GFLOP/s", ", ".join(f"{peak:,.0f}" for peak in peaks)])
    rows.append(["measured", ", ".join(session["began"] for session in sessions)])
    return Section("Machine and settings", tables=[Table("Provenance", ["", "value"], rows)])


def coloured_section(title: str, intro: str, pieces: Iterable[tuple[str, str]]) -> Section:
    """A text whose pieces (text, source) are underlined in the colours of their sources."""
    merged: list[tuple[str, str]] = []
    for piece, source in pieces:
        if merged and merged[-1][1] == source:
            merged[-1] = (merged[-1][0] + piece, source)
        else:
            merged.append((piece, source))
    names = sorted({source for _, source in merged} - {figures.TARGET})
    colours = {name: figures.colour_of(name, names) for name in (*names, figures.TARGET)}
    return Section(title, intro, pieces=merged, colours=colours)
