"""The statistics of a run, under the names that `--stats` and the last event carry."""

from __future__ import annotations

import hashlib
import resource
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from longdraft.speculation.step import Tally, Timings


def sha256_tokens(tokens: NDArray[np.int32]) -> str:
    """Hash of the token ids as little-endian int32: equal texts, equal hash."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()


def distinct(tokens: NDArray[np.int32], n: int) -> float:
    """Distinct n-grams over n-grams, over the whole of `tokens`; 0 where there are none."""
    if len(tokens) < n:
        return 0.0
    grams = sliding_window_view(tokens, n)
    return len(np.unique(grams, axis=0)) / len(grams)


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def of_tokens(tokens: NDArray[np.int32]) -> dict[str, Any]:
    return {"sha256_tokens": sha256_tokens(tokens)} | {f"distinct_{n}": distinct(tokens, n) for n in range(1, 5)}


def of_steps(num_tokens: int, accepted: int, decode_seconds: float, tally: Tally, timings: Timings) -> dict[str, Any]:
    """Counts and times of decoding. `accepted` excludes the tokens that the target itself added."""
    parts = asdict(timings)
    return {
        "decode_seconds": decode_seconds,
        "tokens_per_second": num_tokens / decode_seconds if decode_seconds else 0.0,
        "steps": tally.steps,
        "draft_tokens": tally.drafted.total(),
        "accepted_tokens": accepted,
        "mean_accepted_length": num_tokens / tally.steps if tally.steps else 0.0,
        "by_source": {source: {"drafted": tally.drafted[source], "accepted": tally.accepted[source]}
                      for source in sorted(tally.drafted)},
        "timings": parts | {"other": max(0.0, decode_seconds - sum(parts.values()))},
    }
