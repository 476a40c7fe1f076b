"""A table of measurements, for every output: a terminal (rich), and Markdown, LaTeX and HTML (pandas).

    table = Table.of_records("Speed", [("context", "context", ","), ("ms", "ms", ".2f")], records)
    table.show()
    Path("speed.md").write_text(table.markdown())
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from longdraft.report import require_packages

if TYPE_CHECKING:
    from pandas import DataFrame

_LATEX = str.maketrans({
    "&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "^": r"\^{}", "~": r"\~{}",
    "\\": r"\textbackslash{}", "×": r"$\times$", "±": r"$\pm$", "–": "--", "α": r"$\alpha$", "β": r"$\beta$",
    "θ": r"$\theta$", "τ": r"$\tau$"})

Column = tuple[str, str, str]  # heading, key in the records, format specification of the values


class Table(NamedTuple):
    """Cells as text. `note` tells the reader how to read the table. Columns of numbers are aligned to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @classmethod
    def of_records(cls, title: str, columns: Sequence[Column], records: Sequence[Mapping[str, Any]]) -> Table:
        """Format the values of records. A column that has no value in any record is left out."""
        shown = [column for column in columns if any(record.get(column[1]) is not None for record in records)]
        rows = [["" if record.get(key) is None else format(record[key], form) for _, key, form in shown]
                for record in records]
        return cls(title, [heading for heading, _, _ in shown], rows)

    def show(self) -> None:
        """Print the table to stdout."""
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        grid = RichTable(box=None, pad_edge=False)
        for heading, side in zip(self.columns, self._alignment()):
            grid.add_column(Text(heading), justify=side)
        for row in self.rows:
            grid.add_row(*map(Text, row))
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=200)
        console.print(Text(self.title, style="italic"))
        console.print(grid)
        console.print(self.note + "\n" if self.note else "", markup=False)

    def markdown(self) -> str:
        frame = self._frame(lambda cell: cell.replace("|", r"\|"))
        table = frame.to_markdown(index=False, disable_numparse=True, colalign=self._alignment())
        return "\n".join([f"**{self.title}**", "", table, "", *([self.note, ""] if self.note else [])])

    def latex(self) -> str:
        """A `table` environment for the booktabs package."""
        caption = f"{self.title}. {self.note}".rstrip().translate(_LATEX)
        style = self._frame(lambda cell: cell.translate(_LATEX)).style.hide(axis="index")
        text: str = style.to_latex(hrules=True, caption=caption, position_float="centering",
                                   column_format="".join(side[0] for side in self._alignment()))
        return text

    def html(self) -> str:
        style = self._frame(html.escape).style.hide(axis="index").set_caption(html.escape(self.title))
        table: str = style.to_html(exclude_styles=True)
        return table + (f"<p class=note>{html.escape(self.note)}</p>\n" if self.note else "")

    def _frame(self, escape: Callable[[str], str]) -> DataFrame:
        require_packages("a table in a file", ("pandas", "tabulate"))
        import pandas

        return pandas.DataFrame([[escape(cell) for cell in row] for row in self.rows],
                                columns=[escape(heading) for heading in self.columns], dtype=object)

    def _alignment(self) -> list[Any]:
        """"left" or "right" for each column."""
        return ["right" if all(_is_numeric(row[column]) for row in self.rows) else "left"
                for column in range(len(self.columns))]


def _is_numeric(cell: str) -> bool:
    """Whether a cell shows a number, which may be missing or have a spread or a published value after it."""
    return not cell or cell[0].isdigit() or cell[0] in "–-"

