"""What the keys that a partial cache leaves out give a query, as a function of the query, fitted while writing.

    rest(u) = u W + b      u: a query before its rotation; rest: an output and its log-sum-exp, for each layer and head

Verification tells, for every row that became text, what the full cache gave it beyond the partial one: the exact
*remainder* of that row. Drafts have other queries. Those of the last 100 rows or so say how the remainder goes with
the query: a ridge regression, exponentially forgotten. What the last row's own remainder differs from the fit by is
added in part, since neighbours err alike. On the bundled model the fit raises the share of first guesses that are
right from 0.76 (every draft takes the last row's remainder) to 0.9 (docs/notebook.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MEMORY = 128.0  # rows after which one counts 1 / e
_RIDGE = 0.05  # of the queries' mean variance
_DOUBT = 4.0  # rows' worth of ridge on top: a fit of few rows has little slope
_KEPT = 0.4  # of the last row's misfit
_FIT_EVERY = 32  # rows
_NEVER = -1e30  # the log of a weight that is nothing


class Remainder:
    """The fit of one partial cache."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, device: torch.device) -> None:
        self._shape = (num_layers, num_heads, head_dim + 1, head_dim + 1)
        count = num_layers * num_heads
        # Sums over rows of x^T x and x^T y with x = (u, 1), y = rest; and the solution of the normal equations.
        self._gram, self._cross, self._fit = (torch.zeros(count, *self._shape[2:], device=device) for _ in range(3))
        self._unfitted = _FIT_EVERY  # rows learned since the last fit

    @property
    def nbytes(self) -> int:
        return self._gram.nbytes + self._cross.nbytes + self._fit.nbytes

    def learn(self, content: Tensor, rests: Tensor) -> Tensor:
        """Rows' queries before rotation [L, T, H, D] and remainders [L, T, H, D + 1], as `Kernels.remainder` gives
        them; the function for the drafts that follow, as `LayersKV.rest` wants it."""
        rows = content.shape[1]
        x, y = (part.transpose(1, 2).flatten(0, 1).float() for part in (content, rests))  # [L H, T, ...]
        x = torch.cat([x, torch.ones_like(y[..., -1:])], -1)
        # Where nothing is left out, and where numbers are damaged: one NaN would stay in the sums for ever.
        is_there = (x.isfinite() & y.isfinite()).all(-1, keepdim=True)
        x, y = torch.where(is_there, x, 0.0), torch.where(is_there, y, 0.0)
        fade = torch.exp(torch.arange(1 - rows, 1, device=x.device) / _MEMORY)
        weighted = (x * fade[:, None]).transpose(1, 2)
        before = math.exp(-rows / _MEMORY)
        self._gram.baddbmm_(weighted, x, beta=before)
        self._cross.baddbmm_(weighted, y, beta=before)
        self._unfitted += rows
        if self._unfitted >= _FIT_EVERY:
            self._fit = self._solve()
            self._unfitted = 0
        mapped = self._fit.clone()
        last = x[:, -1:]
        mapped[:, -1:] += _KEPT * (y[:, -1:] - last @ self._fit) * is_there[:, -1:]
        return mapped.view(self._shape)

    def _solve(self) -> Tensor:
        mass = self._gram[:, -1, -1]
        diagonal = self._gram.diagonal(dim1=1, dim2=2)[:, :-1]
        count = mass.clamp_min(1e-6)
        mean = self._gram[:, :-1, -1] / count[:, None]
        spread = (diagonal / count[:, None] - mean.square()).mean(-1).clamp_min(1e-6)
        ridge = torch.zeros_like(self._gram[:, 0])
        ridge[:, :-1] = ((_RIDGE * mass + _DOUBT) * spread)[:, None]
        ridge[:, -1] = 1e-6
        fit: Tensor = torch.linalg.solve_ex(self._gram + torch.diag_embed(ridge), self._cross)[0]
        fit[:, -1, -1].masked_fill_(mass < 1e-3, _NEVER)  # a head to which nothing was ever left
        return fit.contiguous()
