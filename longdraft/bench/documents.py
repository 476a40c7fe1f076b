"""Single JSON documents of benchmarks, read again for a report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longdraft.bench.grid import Table


def peers(path: Path) -> dict[str, Any] | None:
    """What `bench peers --prompt-file ... --output` wrote; None for another file."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("bench") == "peers" and found.get("texts") else None


def machine(document: dict[str, Any]) -> Table:
    """Where it was measured."""
    about = document["machine"] | {name: document.get(name) for name in ("model", "weights_sha256", "draft_model")}
    return Table("Provenance", ["", "value"], [[name, str(value)] for name, value in about.items() if value is not None])
