"""Plain decoding of a model against the floor that memory sets, at several lengths of context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longdraft.bench import decode
from longdraft.bench.decode import Models
from longdraft.bench.measure import Limits

STEPS_PER_REPEAT = 4


def measure(models: Models, context: int, rows: Sequence[int], memory: int, repeats: int,
            limits: Limits) -> dict[str, Any]:
    """One context's record.

    step_ms            a step of plain decoding (T = 1, min-p, penalty), the same text again and again: what
                       the processor's caches can hold of it is read from there
    forward_cold_ms    a forward with logits of one row, texts and weights in rotation: all is read from memory
    rows               the same of several rows
    """
    texts = models.texts(context, memory)
    timings = decode.forwards(texts, rows, repeats)
    step = decode.steps(texts[0], STEPS_PER_REPEAT * repeats)
    floor = decode.floor_ms(models, context, limits)
    size = models.weights_bytes + models.cache_bytes(context)
    cold = timings[0].median_s * 1e3
    return {
        "context": context, "cache": "random", "weights_bytes": models.weights_bytes,
        "cache_bytes": models.cache_bytes(context), "bytes_in_rotation": size * len(texts), "floor_ms": floor,
        **step, "tokens_per_second": 1e3 / step["step_ms"], "share_of_floor": floor / step["step_ms"],
        "forward_cold_ms": cold, "share_of_floor_cold": floor / cold,
        "rows": [{"rows": count, **timing.in_ms(), "to_one_row": timing.median_s / timings[0].median_s}
                 for count, timing in zip(rows, timings, strict=True)],
    }
