"""What a trained drafter is worth: tokens for each forward, and speed beside plain decoding, on held-out prompts."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

from longdraft.core import SamplingParams
from longdraft.engine import Engine
from longdraft.errors import LongdraftError
from longdraft.loading import load
from longdraft.train.data import Tokens

_PROMPTS = 3
_LONGEST = 4096  # tokens of a prompt
_AT: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "min_p": 0.1})


class Drafting(NamedTuple):
    """How to draft with what was trained."""

    model: str
    drafter: str
    options: dict[str, Any]
    heads: str | None


def probe(drafting: Drafting, prompts: Tokens, tokens: int) -> list[dict[str, float]]:
    """For each temperature: mean accepted length, and the median of the ratios to plain decoding.

    prompts [N, L]: the first few sequences are used. Empty where they leave no room to write.
    """
    engine = load(drafting.model, drafter=drafting.drafter, drafter_options=drafting.options, heads=drafting.heads)
    plain_engine = engine.with_drafter("plain")
    length = min(prompts.shape[1], _LONGEST, engine.model.config.max_positions - tokens)
    if length < 1:
        return []
    found = []
    for sampling in _AT:
        written, steps, ratios = 0, 0, []
        for prompt in prompts[:_PROMPTS, :length].tolist():
            params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, seed=1, **sampling)
            plain, _ = _write(plain_engine, prompt, params)
            drafted, stats = _write(engine, prompt, params)
            if plain[1] != drafted[1]:
                raise LongdraftError(f"{drafting.drafter} and plain decoding wrote different texts; that is a bug of "
                                     "longdraft, please report it")
            written, steps = written + stats["new_tokens"], steps + stats["steps"]
            ratios.append(plain[0] / drafted[0])
        found.append({"temperature": sampling["temperature"], "context": length, "new_tokens": written,
                      "mean_accepted_length": written / steps, "to_plain": statistics.median(ratios)})
    return found


def _write(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[tuple[float, str], dict[str, Any]]:
    """Seconds of writing and hash of the text; its statistics."""
    began = time.perf_counter()
    text = engine.generate(prompt, params)
    for _ in text:
        pass
    stats = text.stats()
    return (time.perf_counter() - began - stats["prefill_seconds"], stats["sha256_tokens"]), stats


