"""The remainder: what the keys outside a partial cache give a query, as a function of the query, fitted while writing.

    r(u) = u W + b      u: a query before its rotation [D]
                        r: an output and its log-sum-exp [D + 1]
                        W, b: for each layer and query head

Verification computes, for every row that became text, what the full cache gave it beyond the partial cache: the exact
remainder of that row. Drafts have other queries. W and b are a ridge regression of the remainders on the queries over
about the last 100 verified rows, whose weights decay exponentially. Neighbouring rows have similar errors, so a part
of the last row's error is added to b. With the bundled model, the fit raises the share of first guesses that are
right from 0.76 (every draft uses the last row's remainder) to 0.9 (notebook/2026-11.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.kernels import AttentionRows, Kernels, KVStore
from longdraft.kernels.interface import FitRules, RemainderFit

_DECAY_ROWS = 128.0  # rows after which a row's weight is 1 / e
_RIDGE = 0.05  # ridge penalty, relative to the queries' mean variance
_RIDGE_ROWS = 4.0  # rows' worth of further penalty: it keeps the slope small while few rows are known
_LEAST_SPREAD = 1e-3  # of the queries' mean square
_LAST_ERROR = 0.4  # share of the last row's error that is added
_FIT_EVERY = 32  # rows between two solutions of the normal equations
_LOG_ZERO = -1e30  # log-sum-exp of no keys
_RULES = FitRules(_FIT_EVERY, _DECAY_ROWS, _RIDGE, _RIDGE_ROWS, _LEAST_SPREAD, _LAST_ERROR, _LOG_ZERO)


def new_fit(kernels: Kernels, stores: Sequence[KVStore], num_heads: int) -> RemainderFit:
    """The fit for a partial cache in these stores, which have one shape."""
    own = kernels.new_fit(stores, num_heads, _RULES)
    return own or Remainder(kernels, len(stores), num_heads, stores[0].shape[1])


class Remainder:
    """The fit with PyTorch, on any device. Its fast twins are `CompiledRemainder` and, on a device, `CudaRemainder`."""

    def __init__(self, kernels: Kernels, num_layers: int, num_heads: int, head_dim: int) -> None:
        self._kernels = kernels
        self._shape = (num_layers, num_heads, head_dim + 1, head_dim + 1)
        count, device = num_layers * num_heads, kernels.device
        # Decayed sums over rows of x^T x and x^T y with x = (u, 1) and y = r; and the solution (W, b) [L H, D+1, D+1].
        self._gram, self._cross, self._fit = (torch.zeros(count, *self._shape[2:], device=device) for _ in range(3))
        self._base = self._fit[:, -1:].clone()  # b, to which the last row's error is added
        self._new: list[tuple[Tensor, Tensor]] = []  # rows (x, y) that are not in the sums yet
        self._has_fit = False

    @property
    def nbytes(self) -> int:
        return self._gram.nbytes + self._cross.nbytes + self._fit.nbytes

    def update(self, stores: Sequence[KVStore], length: int, whole: AttentionRows) -> Tensor:
        """See RemainderFit."""
        output = whole.gathered()
        return self.learn(output.content, self._kernels.remainder(stores, length, output))

    def learn(self, content: Tensor, remainders: Tensor) -> Tensor:
        """`update` with rows whose remainders are known.

        content     the rows' queries before rotation [L, T, H, D]
        remainders  the rows' exact remainders [L, T, H, D + 1], from `Kernels.remainder`
        """
        x, y = (part.transpose(1, 2).flatten(0, 1).float() for part in (content, remainders))  # [L H, T, ...]
        x = torch.cat([x, torch.ones_like(y[..., -1:])], -1)
        # Skip rows for which no key was left out, and rows with NaN: a NaN would never leave the sums.
        is_valid = torch.isfinite(x.sum(-1, keepdim=True) + y.sum(-1, keepdim=True))
        x, y = torch.where(is_valid, x, 0.0), torch.where(is_valid, y, 0.0)
        self._new.append((x, y))
        if not self._has_fit or sum(x.shape[1] for x, _ in self._new) >= _FIT_EVERY:
            self._fit.copy_(self._fit_to_new_rows())  # drafts read this memory
            self._base.copy_(self._fit[:, -1:])
            self._has_fit = True
        last = x[:, -1:, :-1]
        error = y[:, -1:] - (last @ self._fit[:, :-1] + self._base)
        self._fit[:, -1:] = self._base + _LAST_ERROR * error * is_valid[:, -1:]
        return self._fit.view(self._shape)

    def _fit_to_new_rows(self) -> Tensor:
        x, y = (torch.cat(parts, 1) for parts in zip(*self._new, strict=True))
        self._new.clear()
        self._add(x, y)
        return self._solve()

    def _add(self, x: Tensor, y: Tensor) -> None:
        """Add rows to the sums."""
        rows = x.shape[1]
        fade = torch.exp(torch.arange(1 - rows, 1, device=x.device) / _DECAY_ROWS)
        weighted, before = (x * fade[:, None]).transpose(1, 2), math.exp(-rows / _DECAY_ROWS)
        self._gram.baddbmm_(weighted, x, beta=before)
        self._cross.baddbmm_(weighted, y, beta=before)

    def _solve(self) -> Tensor:
        """The solution of the normal equations, by layer and head."""
        mass = self._gram[:, -1, -1]
        diagonal = self._gram.diagonal(dim1=1, dim2=2)[:, :-1]
        count = mass.clamp_min(1e-6)
        mean = self._gram[:, :-1, -1] / count[:, None]
        spread = (diagonal / count[:, None] - mean.square()).mean(-1)
        # Rows that are nearly equal would make the equations singular in float32.
        spread = torch.maximum(spread, _LEAST_SPREAD * diagonal.mean(-1) / count).clamp_min(1e-6)
        ridge = torch.zeros_like(self._gram[:, 0])
        ridge[:, :-1] = ((_RIDGE * mass + _RIDGE_ROWS) * spread)[:, None]
        ridge[:, -1] = 1e-6
        fit = torch.cholesky_solve(self._cross, torch.linalg.cholesky_ex(self._gram + torch.diag_embed(ridge))[0])
        fit = fit.contiguous()
        fit[:, -1, -1].masked_fill_(mass < 1e-3, _LOG_ZERO)  # heads of which nothing was ever left out
        return fit
