"""Write the tables of settings in the documents, which are made from the declarations of the settings.

    python packaging/settings_tables.py

tests/unit/test_settings.py fails if a document has another table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from longdraft.request.sampling_params import SamplingParams
from longdraft.request.settings import Setting, settings_of
from longdraft.server.settings import SERVE_OPTIONS


def sampling_table(settings: Iterable[Setting]) -> str:
    """The settings with their ranges and other names."""
    lines = ["| setting | default | allowed | meaning |", "|---|---|---|---|"]
    for each in settings:
        others = f" Also {', '.join(f'`{name}`' for name in each.aliases)}." if each.aliases else ""
        lines.append(f"| `{each.name}` | {each.shown_default} | {each.allowed_words} | {each.help}{others} |")
    return "\n".join(lines).replace("*", r"\*").replace("<", "&lt;") + "\n"


def options_table(settings: Iterable[Setting]) -> str:
    """The options of the command line."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for each in settings:
        is_shown = each.shown or each.option_default not in (None, "")  # otherwise the help says what the default is
        lines.append(f"| `{each.flag}` | {each.shown_default if is_shown else ''} | {each.help} |")
    return "\n".join(lines) + "\n"


DOCUMENTS = Path(__file__).resolve().parents[1] / "docs"
TABLES = {
    "sampling.md": lambda: sampling_table(settings_of(SamplingParams).values()),
    "server.md": lambda: options_table(SERVE_OPTIONS),
}
_TABLE = re.compile(r"(<!-- settings: [^>]*-->\n).*?(<!-- end of the settings -->\n)", re.DOTALL)


def with_table(document: str, table: str) -> str:
    """The document with its table of settings replaced."""
    replaced, count = _TABLE.subn(lambda match: f"{match[1]}\n{table}\n{match[2]}", document)
    assert count == 1, "the document has the two comments around its table once"
    return replaced


def main() -> None:
    for name, table in TABLES.items():
        path = DOCUMENTS / name
        document = path.read_text(encoding="utf-8")
        path.write_text(with_table(document, table()), encoding="utf-8")


if __name__ == "__main__":
    main()
