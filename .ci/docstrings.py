"""Used by mkdocs.yml: turns the aligned columns of a docstring ("name   meaning") into a Markdown list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_COLUMN = re.compile(r"(\w+(?:, \w+)*) {2,}(\S.*)")


class AlignedColumns(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_list(obj.docstring.value)


def as_list(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        is_item = bool(lines) and lines[-1].startswith(("- ", "  "))
        if column := _COLUMN.fullmatch(line):
            lines += [*([] if is_item else [""]), f"- `{column[1]}`: {column[2]}"]
        elif is_item and line.startswith("  "):
            lines.append("  " + line.strip())
        else:
            lines += [*([""] if is_item and line.strip() else []), line]
    return "\n".join(lines)
