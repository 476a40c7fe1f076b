"""One HTML page that shows results, whole in itself: it needs no network and no other file."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from longdraft.bench import figures
from longdraft.bench.grid import Table
from longdraft.bench.results import Record, Results

_STYLE = """
body { font: 16px/1.5 Georgia, serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
table { border-collapse: collapse; margin: 1.5rem 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding-bottom: .3rem; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.note { font-size: .85rem; color: #444; margin-top: -1rem; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; } figcaption { font-size: .85rem; color: #444; }
.text { white-space: pre-wrap; border-left: 3px solid #ddd; padding-left: 1rem; }
.text span { border-bottom: 3px solid transparent; } .legend span { margin-right: 1.2rem; border-bottom: 4px solid; }
"""
CAPTIONS = {
    "minutes": "Minutes against tokens. All systems wrote in turns, in one run.",
    "speedup": "How much faster than the reference up to each length, and how many guesses were right in each turn.",
    "step": "What a step costs: drafting, one forward, choosing. The grey line is what memory alone sets for a step "
            "that reads weights and cache once.",
    "sources": "Which drafter each token came from. The model's own: the one that every verification adds.",
    "peers": "Each engine's own generation of one text, plain and drafted; blue: ours.",
    "lengths": "How many tokens each step wrote, along the text.",
}


class Section(NamedTuple):
    """A heading, a sentence, pictures with captions, tables, and HTML of its own."""

    title: str
    said: str = ""
    pictures: Sequence[tuple[str, Any]] = ()
    grids: Sequence[Table] = ()
    extra: str = ""


def render(title: str, sections: Iterable[Section]) -> str:
    parts = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
             f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
             f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(section.said)}</p>"] if section.said else []
        for caption, figure in section.pictures:
            parts.append(f'<figure><img alt="{html.escape(caption)}" src="{figures.as_image(figure)}">'
                         f"<figcaption>{html.escape(caption)}</figcaption></figure>")
        parts += [grid.html() for grid in section.grids]
        parts.append(section.extra)
    return "\n".join([*parts, "</body></html>", ""])


def of_texts(results: Results) -> list[Section]:
    """Figures of the texts that say most."""
    session = results.sessions[0]
    found = []
    for text in figures.main_texts(results):
        sampling = ", ".join(f"{name} {text.about['sampling'][name]}" for name in
                             ("temperature", "min_p", "top_p", "repetition_penalty", "penalty_window", "seed"))
        found.append(Section(f"Behind {text.about['prefill']:,} tokens of prompt", f"Sampling: {sampling}.",
                             [(CAPTIONS[name], figure) for name, figure in figures.of_text(text, session)]))
    return found


def where(sessions: Sequence[Record]) -> Section:
    """The machine and everything else that a figure depends on."""
    shown = ("experiment", "scale", "model", "weights_sha256", "heads_sha256", "prompt_file", "prompt_sha256", "seeds",
             "processor", "threads", "kernels", "dtype", "device", "quantize", "python", "torch", "longdraft", "commit")
    first = sessions[0]
    rows = [[name, str(first[name])] for name in shown if first.get(name) is not None]
    limits = [session["limits"] for session in sessions if session.get("limits")]
    if limits:
        rows.append(["read bandwidth, GB/s", ", ".join(f"{each['read_bandwidth_gb_per_s']:.1f}" for each in limits)])
        peaks = [each["peak_gflop_per_s"]["bfloat16"] for each in limits if "peak_gflop_per_s" in each]
        rows += [["bf16 peak, GFLOP/s", ", ".join(f"{peak:,.0f}" for peak in peaks)]] if peaks else []
    rows.append(["measured", ", ".join(session["began"] for session in sessions)])
    return Section("Where and with what", grids=[Table("Provenance", ["", "value"], rows)])


def coloured(pieces: Iterable[tuple[str, str]]) -> str:
    """A text whose pieces (text, source) are underlined in their source's colour, with a legend."""
    merged: list[tuple[str, str]] = []
    for piece, source in pieces:
        if merged and merged[-1][1] == source:
            merged[-1] = (merged[-1][0] + piece, source)
        else:
            merged.append((piece, source))
    names = sorted({source for _, source in merged} - {figures.TARGET})
    colours = {name: figures.colour_of(name, names) for name in (*names, figures.TARGET)}
    legend = "".join(f'<span style="border-color:{colour}">{html.escape(name)}</span>'
                     for name, colour in colours.items())
    body = "".join(f'<span title="{html.escape(source)}" style="border-color:{colours[source]}">{html.escape(piece)}'
                   "</span>" for piece, source in merged)
    return f'<p class="legend">{legend}</p><div class="text">{body}</div>'
