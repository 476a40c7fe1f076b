"""What arithmetic predicts for the slice `decide` on an H100 and an H200, and whether a device agrees.

The figures of plain steps are what the code is expected to reach; notebook/2026-11.md has the arithmetic. A prediction
that fails says which assumption is wrong, and so what is worth building next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TOLERANCE = 1.05  # by which a figure may miss a prediction
GPUS = ("H100", "H200")


class Prediction(NamedTuple):
    """A figure, and what it should be at most on each of `GPUS`.

    part  of the slice
    path  of keys to the figure in the part's figures
    unit  of the figure; "x": times plain decoding, which should be at least that
    """

    what: str
    part: str
    path: tuple[str, ...]
    unit: str
    h100: float
    h200: float

    def measured(self, parts: Mapping[str, Any]) -> float | None:
        """The figure in a document's parts; None where it was not measured."""
        found: Any = parts.get(self.part, {})
        if found.get("state") != "done":
            return None
        for key in ("figures", *self.path):
            found = found.get(key) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    def verdict(self, value: float, gpu: str) -> str:
        """PASS or FAIL on a GPU of this name; "" where nothing is predicted for it."""
        wanted = next((number for name, number in zip(GPUS, (self.h100, self.h200), strict=True) if name in gpu), None)
        if wanted is None:
            return ""
        is_met = value >= wanted / _TOLERANCE if self.unit == "x" else value <= wanted * _TOLERANCE
        return "PASS" if is_met else "FAIL"


_8B, _15B = "llama-3.1-8b", "qwen2.5-1.5b"
PREDICTIONS: Sequence[Prediction] = (
    Prediction("plain step, 8B, 4K", f"steps {_8B} 4096", ("plain_ms",), "ms", 6.1, 4.5),
    Prediction("plain step, 8B, 100K", f"steps {_8B} 102400", ("plain_ms",), "ms", 11.1, 8.05),
    Prediction("plain step, 1.5B, 4K", f"steps {_15B} 4096", ("plain_ms",), "ms", 1.95, 1.85),
    Prediction("plain ahead of the host, 8B, 4K", f"ahead {_8B} 4096", ("ahead",), "ms", 5.9, 4.25),
    Prediction("plain ahead of the host, 8B, 100K", f"ahead {_8B} 102400", ("ahead",), "ms", 10.7, 7.6),
    Prediction("plain ahead of the host, 1.5B, 4K", f"ahead {_15B} 4096", ("ahead",), "ms", 1.67, 1.4),
    Prediction("16 rows in plain steps, 8B, 100K", f"steps {_8B} 102400", ("to_one_row", "16"), "steps", 1.13, 1.13),
    Prediction("a persistent kernel, 1.5B, 5 barriers", "ring 1.5B", ("5 barriers",), "ms", 1.3, 0.95),
    Prediction("a persistent kernel, 8B, 5 barriers", "ring 8B", ("5 barriers",), "ms", 5.55, 3.95),
    Prediction("a persistent kernel, 8B int4, 5 barriers", "ring 8B int4", ("5 barriers",), "ms", 1.75, 1.3),
    Prediction("a chained kernel's boundary", "boundaries", ("chained_us",), "us", 1.5, 1.5),
    Prediction("a drafted token of an EAGLE head, 8B", f"oracles {_8B} 4096", ("eagle 0.72", "draft_ms"), "ms", 0.36,
               0.25),
    Prediction("a self-drafted token in int4, 8B", f"oracles {_8B} 4096", ("self int4 0.87", "draft_ms"), "ms", 2.9,
               2.2),
    Prediction("EAGLE right in 0.72, 4K", f"oracles {_8B} 4096", ("eagle 0.72", "in_plain_speed"), "x", 2.15, 2.15),
    Prediction("EAGLE right in 0.80, 4K", f"oracles {_8B} 4096", ("eagle 0.80", "in_plain_speed"), "x", 2.7, 2.7),
    Prediction("EAGLE right in 0.72, 100K", f"oracles {_8B} 102400", ("eagle 0.72", "in_plain_speed"), "x", 2.4, 2.4),
    Prediction("EAGLE right in 0.80, 100K", f"oracles {_8B} 102400", ("eagle 0.80", "in_plain_speed"), "x", 3.1, 3.1),
    Prediction("self-drafts right in 0.93, 100K", f"oracles {_8B} 102400", ("self int4 0.93", "in_plain_speed"), "x",
               1.68, 1.68),
    Prediction("a prompt of 102,400, again", f"prefill {_8B} 102400, again", ("seconds",), "s", 8.5, 8.5),
    Prediction("100,000 tokens, EAGLE 0.72", f"windows {_8B}", ("eagle 0.72", "minutes"), "min", 6.0, 4.3),
    Prediction("100,000 tokens, EAGLE 0.80", f"windows {_8B}", ("eagle 0.80", "minutes"), "min", 4.8, 3.4))


def table(document: Mapping[str, Any], predictions: Sequence[Prediction] = PREDICTIONS) -> list[str]:
    """A line for each prediction: the figure, what was predicted for each GPU, the verdict. Figures that were not
    measured have a line too."""
    gpu = str(document.get("machine", {}).get("gpu", ""))
    lines = [f"{'figure':<44}{'unit':>6}{'measured':>10}{'H100':>8}{'H200':>8}  {gpu or 'no GPU'}"]
    for each in predictions:
        value = each.measured(document.get("parts", {}))
        shown, verdict = ("-", "") if value is None else (f"{value:.2f}", each.verdict(value, gpu))
        lines.append(f"{each.what:<44}{each.unit:>6}{shown:>10}{each.h100:>8g}{each.h200:>8g}  {verdict}".rstrip())
    return lines
