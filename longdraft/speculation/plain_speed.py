"""How fast plain decoding would write a text, from the text's own steps.

Apart from its drafting, a step that verifies `rows` rows after `context` tokens takes about

    seconds  =  (a + b * rows) * reads        reads  =  weights + context

because it reads all weights and the KV cache of the text once. weights: tokens of context whose KV cache is as large as
the model's weights. Plain decoding verifies one row, so its cost is a + b:

    measured    the mean of seconds / reads over the steps without a draft
    estimated   a least-squares fit over all steps, if their numbers of rows differ enough: over the steps of few rows
                if these are enough, because on many kernels more rows read the weights twice; else over all steps
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from longdraft.kernels import single_threaded_torch
from longdraft.model.transformer import tree_rows
from longdraft.request.tree import root_only
from longdraft.speculation.decayed_rate import DecayedRate
from longdraft.speculation.step import Step

_ENOUGH_STEPS = 16  # a mean and a fit need this many steps
_FEW_ROWS = 6  # products of so many rows read their weights once
_LARGEST_ERROR = 0.1  # an estimate with a larger relative standard error is left out
_OUTLIER = 3.0  # in the fit, a step counts as at most this many times the mean of those before


@dataclass
class _Fit:
    """A least-squares line through the costs of steps by their rows: sums over the steps."""

    count: int = 0
    rows: float = 0.0
    cost: float = 0.0
    rows_squared: float = 0.0
    rows_cost: float = 0.0
    cost_squared: float = 0.0

    def add(self, rows: int, cost: float) -> None:
        if self.count > 3:
            cost = min(cost, _OUTLIER * self.cost / self.count)
        self.count += 1
        self.rows += rows
        self.cost += cost
        self.rows_squared += rows * rows
        self.rows_cost += rows * cost
        self.cost_squared += cost * cost

    def of_one_row(self) -> float:
        """The fitted cost; 0.0 if its standard error is too large.

            slope  =  cov(rows, cost) / var(rows)
            error² =  residual variance / count * (1 + (1 - mean rows)² / var(rows))
        """
        if self.count < _ENOUGH_STEPS:
            return 0.0
        rows = self.rows / self.count
        cost = self.cost / self.count
        spread = self.rows_squared / self.count - rows * rows
        if spread <= 0:
            return 0.0
        covariance = self.rows_cost / self.count - rows * cost
        slope = max(0.0, covariance / spread)
        estimate = cost + slope * (1 - rows)
        variance = max(0.0, self.cost_squared / self.count - cost * cost
                       - 2 * slope * covariance + slope * slope * spread)
        error = math.sqrt(variance / self.count * (1 + (1 - rows) ** 2 / spread))
        return estimate if error < _LARGEST_ERROR * estimate else 0.0


class PlainSpeed:
    """The speed of plain decoding over a text: of the whole for the statistics, and at its end while it is written.

    weights  tokens of context whose KV cache is as large as the model's weights
    """

    def __init__(self, weights: float) -> None:
        self._weights = weights
        self._is_warm = False
        self._tokens = 0
        self._reads = 0.0  # summed over the tokens
        self._latest = DecayedRate()  # seconds over reads
        self._plain_steps = 0
        self._plain_costs = 0.0
        self._few = _Fit()
        self._all = _Fit()

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

    def add_latest(self, context: int, seconds: float) -> None:
        """Count a forward of one row for `seconds_at`, by the text's own time: without that of other texts."""
        self._latest.add(seconds, self._weights + context)

    def seconds_at(self, context: int) -> float | None:
        """Seconds of a token, as in the latest forwards of one row; None before the first."""
        return self._latest.mean * (self._weights + context) if self._latest.tries else None

    def figures(self) -> dict[str, Any]:
        """Tokens per second over the text, and "measured" or "estimated"; None for both if neither is supported."""
        basis = "measured"
        if self._plain_steps >= _ENOUGH_STEPS:
            cost = self._plain_costs / self._plain_steps
        else:
            cost = self._few.of_one_row() or self._all.of_one_row()
            basis = "estimated"
        if not cost:
            return {"plain_tokens_per_second": None, "plain_is": None}
        return {"plain_tokens_per_second": self._tokens / (cost * self._reads), "plain_is": basis}


def measure_plain_step(step: Step, decode_seconds: float) -> float:
    """Seconds that plain decoding takes for the next token: a forward of the root alone, and the steps' overhead.

    The forward is computed now and its row dropped, so the text does not change. decode_seconds: of all steps so far
    """
    start = perf_counter()
    with single_threaded_torch(step.model.kernels):
        step.model.forward(tree_rows(root_only(step.context.last), len(step.context) - 1), step.cache, 1)
    seconds = perf_counter() - start
    step.cache.commit(())
    overhead, steps = decode_seconds - step.timings.draft - step.timings.verify, step.tally.steps
    return seconds + (max(0.0, overhead) / steps if steps else 0.0)
