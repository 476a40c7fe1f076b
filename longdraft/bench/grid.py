"""A table that has been measured, for every place it is shown: a terminal, Markdown, LaTeX, HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "×": r"$\times$", "α": r"$\alpha$",
          "β": r"$\beta$", "±": r"$\pm$", "–": "--", "{": r"\{", "}": r"\}", "^": r"\^{}", "~": r"\~{}",
          "\\": r"\textbackslash{}", "θ": r"$\theta$", "τ": r"$\tau$"}


class Table(NamedTuple):
    """Cells as they are shown; the first column names the row. `note` says what a reader must know."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def show(self) -> None:
        """On stdout, for a person."""
        from rich.console import Console
        from rich.table import Table

        grid = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for place, column in enumerate(self.columns):
            grid.add_column(column, justify="right" if place else "left")
        for row in self.rows:
            grid.add_row(*row)
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=200)
        console.print(grid)
        console.print(self.note + "\n" if self.note else "", markup=False)

    def markdown(self) -> str:
        def line(cells: Sequence[str]) -> str:
            return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

        rule = "|" + "|".join(["---", *["---:"] * (len(self.columns) - 1)]) + "|"
        parts = [f"**{self.title}**", "", line(self.columns), rule, *map(line, self.rows)]
        return "\n".join([*parts, "", *([self.note, ""] if self.note else [])])

    def latex(self) -> str:
        """A `table` for the booktabs package."""
        def line(cells: Sequence[str]) -> str:
            return " & ".join(map(_latex, cells)) + r" \\"

        note = f" {_latex(self.note)}" if self.note else ""
        return "\n".join([
            r"\begin{table}", r"\centering", rf"\caption{{{_latex(self.title)}.{note}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}", r"\toprule", line(self.columns), r"\midrule",
            *map(line, self.rows), r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])

    def html(self) -> str:
        def line(cells: Sequence[str], kind: str) -> str:
            return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"

        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        return "\n".join([f"<table><caption>{html.escape(self.title)}</caption>",
                          f"<thead>{line(self.columns, 'th')}</thead><tbody>",
                          *(line(row, "td") for row in self.rows), f"</tbody></table>{note}"])


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
