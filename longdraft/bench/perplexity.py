"""What quantising costs and brings: nats per token of a text, bytes of weights, and speed, side by side.

    longdraft bench perplexity --text novel.txt --quantize "none int8"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from longdraft.bench import context as by_place
from longdraft.bench import decode
from longdraft.bench.decode import Models
from longdraft.errors import check
from longdraft.files import read_text
from longdraft.model import hub
from longdraft.model.tokenizer import Tokenizer
from longdraft.model.transformer import Transformer

_STEPS = 4  # of plain decoding, before the next setting's turn
_WARM = 2  # steps that `decode.steps` does not count


def steps_of(repeats: int) -> int:
    """By how many tokens a text grows while its speed is measured."""
    return (_WARM + _STEPS) * repeats


def read(model: str, path: Path, most: int, context: int) -> list[int]:
    """The first tokens of a text file, `context` or more."""
    text = read_text(str(path), "--text")
    ids = Tokenizer(hub.resolve(model)).encode(text)[:most]
    check(len(ids) >= context, "tokens in --text", len(ids), f"{context} (a window) or more")
    return ids


def measure(models: Sequence[Models], ids: Sequence[int], context: int, repeats: int) -> list[dict[str, Any]]:
    """A record for each setting. Steps are timed in turns, so that a slow moment of the machine hits all."""
    texts = [decode.Text(each.model, decode.random_cache(each.model, context)) for each in models]
    rounds = [[decode.steps(text, _STEPS)["step_ms"] for text in texts] for _ in range(repeats)]
    records = []
    for each, times in zip(models, zip(*rounds, strict=True), strict=True):
        nats, count = nats_of(each.model, ids, context)
        step = median(times)
        first = median(times[0] for times in rounds)
        records.append({
            "quantize": each.quantize, "nats_per_token": nats / count, "perplexity": math.exp(nats / count),
            "predicted_tokens": count, "weights_bytes": each.weights_bytes, "step_ms": step, "step_ms_low": min(times),
            "step_ms_high": max(times), "tokens_per_second": 1e3 / step, "to_first": first / step})
    return records


def nats_of(model: Transformer, ids: Sequence[int], context: int) -> tuple[float, int]:
    """Nats of all tokens but the first of each whole window, given those before them in it; and how many they are."""
    total, count = 0.0, 0
    for first in range(0, len(ids) - context + 1, context):
        window = ids[first : first + context]
        for nats in by_place.nats_of(model.for_length(context), window):
            total += float(nats.sum())
            count += len(nats)
    return total, count
