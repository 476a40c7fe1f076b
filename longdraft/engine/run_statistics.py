"""The statistics of a run, under the names that `--stats` and the last event carry."""

from __future__ import annotations

import hashlib
import math
import resource
import sys
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from longdraft import kernels
from longdraft.model.transformer import Transformer
from longdraft.parts.draft_copy import SAME
from longdraft.speculation.step import Tally, Timings
from longdraft.version import __version__

_ENOUGH_PLAIN_STEPS = 16  # from this many steps without a draft, plain decoding counts as measured
_ENOUGH_STEPS = 16  # an estimate needs this many steps
_FEW_ROWS = 6  # products of so many rows read their weights once
_LARGEST_ERROR = 0.1  # an estimate with a larger relative standard error is left out
_OUTLIER = 3.0  # in the fit, a step counts as at most this many times the mean of those before


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


def of_machine(model: Transformer) -> dict[str, Any]:
    """The arithmetic of the target, and the memory that this process took."""
    found = model.kernels
    return {
        "kernels": found.name,
        "device": str(found.device),
        "dtype": str(found.dtype).removeprefix("torch."),
        "quantize": model.weights.quantize,
        "threads": kernels.threads(found),
        "peak_memory_bytes": peak_memory_bytes(),
        "longdraft_version": __version__,
        "torch_version": str(torch.__version__),
    }


def of_draft_copy(copy: Transformer | None) -> dict[str, Any]:
    """The quantised copy of the target that drafts."""
    return {"draft_weights": copy.weights.quantize if copy else SAME,
            "draft_weights_bytes": copy.weights_bytes if copy else 0}


def of_tokens(tokens: NDArray[np.int32]) -> dict[str, Any]:
    return {"sha256_tokens": sha256_tokens(tokens)} | {f"distinct_{n}": distinct(tokens, n) for n in range(1, 5)}


def of_steps(num_tokens: int, accepted: Counter[str], decode_seconds: float, tally: Tally,
             timings: Timings) -> dict[str, Any]:
    """Counts and times of decoding.

    num_tokens  new tokens, those that the target itself added included
    accepted    drafted tokens that are part of the text, by drafter
    """
    parts = asdict(timings)
    return {
        "decode_seconds": decode_seconds,
        "tokens_per_second": num_tokens / decode_seconds if decode_seconds else 0.0,
        "steps": tally.steps,
        "draft_tokens": tally.drafted.total(),
        "accepted_tokens": accepted.total(),
        "mean_accepted_length": num_tokens / tally.steps if tally.steps else 0.0,
        "by_source": {source: {"drafted": tally.drafted[source], "accepted": accepted[source]}
                      for source in sorted(tally.drafted)},
        "timings": parts | {"other": max(0.0, decode_seconds - sum(parts.values()))},
    }


class _Fit:
    """A least-squares line through the costs of steps by their rows."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # over the steps: 1, rows, cost, rows^2, rows * cost, cost^2

    def add(self, rows: int, cost: float) -> None:
        count, _, costs, *_ = self._sums
        if count > 3:
            cost = min(cost, _OUTLIER * costs / count)
        for place, value in enumerate((1.0, rows, cost, rows * rows, rows * cost, cost * cost)):
            self._sums[place] += value

    def of_one_row(self) -> float:
        """The fitted cost; 0.0 if its standard error is too large."""
        count = self._sums[0]
        if count < _ENOUGH_STEPS:
            return 0.0
        rows, cost, rows_2, rows_cost, cost_2 = (value / count for value in self._sums[1:])
        spread = rows_2 - rows * rows
        if spread <= 0:
            return 0.0
        covariance = rows_cost - rows * cost
        slope = max(0.0, covariance / spread)
        estimate = cost + slope * (1 - rows)
        variance = max(0.0, cost_2 - cost * cost - 2 * slope * covariance + slope * slope * spread)
        error = math.sqrt(variance / count * (1 + (1 - rows) ** 2 / spread))
        return estimate if error < _LARGEST_ERROR * estimate else 0.0


class PlainSpeed:
    """How fast plain decoding would have written the tokens of a run, from the run's own steps. It adds no forward.

    Apart from its drafting, a step takes about (a + b * rows) * (weights + context) seconds. Plain decoding verifies
    one row:

        measured    a + b is the mean over the steps without a draft
        estimated   a + b follows from a least-squares fit, if the steps' numbers of rows differ enough: over the steps
                    of few rows if they tell it, because on many kernels more rows read the weights twice; else over all

    weights  tokens of context whose KV cache is as large as the model's weights
    """

    def __init__(self, weights: float) -> None:
        self._weights = weights
        self._is_warm = False
        self._tokens, self._reads = 0, 0.0  # reads: weights + context, summed over the tokens
        self._plain_steps, self._plain_costs = 0, 0.0
        self._few, self._all = _Fit(), _Fit()

    def add(self, rows: int, context: int, tokens: int, seconds: float) -> None:
        """Count a step that verified `rows` rows and wrote `tokens` tokens. seconds: without those of drafting."""
        reads = self._weights + context
        self._tokens += tokens
        self._reads += tokens * reads
        if not self._is_warm:  # the first step of a run takes longer than the others
            self._is_warm = True
            return
        cost = seconds / reads
        if rows == 1:
            self._plain_steps += 1
            self._plain_costs += cost
        self._all.add(rows, cost)
        if rows <= _FEW_ROWS:
            self._few.add(rows, cost)

    def figures(self) -> dict[str, Any]:
        """Tokens per second, and "measured" or "estimated"; None for both if the steps support neither."""
        if self._plain_steps >= _ENOUGH_PLAIN_STEPS:
            cost, basis = self._plain_costs / self._plain_steps, "measured"
        else:
            cost, basis = self._few.of_one_row() or self._all.of_one_row(), "estimated"
        if not cost:
            return {"plain_tokens_per_second": None, "plain_is": None}
        return {"plain_tokens_per_second": self._tokens / (cost * self._reads), "plain_is": basis}
