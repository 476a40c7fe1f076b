"""The process that runs parts of a slice: `python -m longdraft_bench.cuda.worker PLAN SLICE DOCUMENT ENDS_AT PART...`.

PLAN is `device` or `interpret`. `longdraft bench cuda` starts it, and starts another one if it dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from longdraft_bench.cuda.plan import INTERPRETED, ON_DEVICE, CudaPlan, Part, parts_of
from longdraft_bench.cuda.visit import Document, is_fatal, measure_parts

_SET_PARENT_DEATH_SIGNAL = 1


class Worker:
    """Measures parts. It keeps the models that several parts use."""

    def __init__(self, plan: CudaPlan, prompt: str, ends_at: float, folder: Path,
                 keep: Callable[[str, Any], None] = lambda name, figures: None) -> None:
        """keep: writes what a part has measured so far."""
        from longdraft_bench.cuda.models import Bench

        self._plan, self._keep = plan, keep
        self._bench = Bench(plan, prompt, ends_at, folder)

    def measure(self, part: Part) -> Any:
        from longdraft_bench.cuda import checks, decide, families, skeletons, speed, switches, texts, trace

        modules = checks, decide, families, skeletons, speed, switches, texts, trace
        found = next(getattr(module, part.kind) for module in modules if hasattr(module, part.kind))
        self._bench.keep = partial(self._keep, part.name)
        return found(self._plan, self._bench, **part.options)

    def describe(self) -> dict[str, Any]:
        from longdraft_bench.cuda.models import describe

        return describe(self._plan)


def end_with_parent() -> None:
    """Have this process killed when the driver is: the next visit must not find it at the same document."""
    with suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    end_with_parent()
    which, name, path, ends_at, *names = arguments
    if which == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    plan = INTERPRETED if which == "interpret" else ON_DEVICE
    document = Document(Path(path), json.loads(Path(path).read_text(encoding="utf-8"))["sources"])
    document.reload()
    worker = Worker(plan, document.filled.get("prompt", ""), float(ends_at), document.path.parent, document.keep)
    if "machine" not in document.filled:
        document.filled["machine"] = worker.describe()
        document.save()
    parts = {part.name: part for part in parts_of(plan, name)}
    return measure_parts(document, [parts[wanted] for wanted in names], float(ends_at), worker.measure, is_fatal)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
