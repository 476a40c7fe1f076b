"""The linear map of least squares over rows that come a part at a time: the first weights of a trained part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

RIDGE = 0.1  # for each input


class LinearMap(NamedTuple):
    """y = weight x, over rows whose inputs have the second moments `inputs`.

    weight  [outputs, inputs] float32
    inputs  [inputs, inputs] float32, the mean of x x^T
    """

    weight: Tensor
    inputs: Tensor

    def size(self, columns: slice) -> float:
        """Root mean square of the outputs that these inputs make: sqrt(tr(W C W^T) / outputs)."""
        weight = self.weight[:, columns]
        return math.sqrt(((weight @ self.inputs[columns, columns]) * weight).sum() / len(weight))

    def factors(self, columns: slice, rank: int) -> tuple[Tensor, Tensor]:
        """The best map of a rank for these inputs, as a product of [outputs, rank] and [rank, columns].

        With C = R R^T, the truncated singular value decomposition of W R makes the least mean square of the outputs.
        A rank above the largest possible is filled with zeros.
        """
        values, vectors = torch.linalg.eigh(self.inputs[columns, columns].double())
        scales = values.clamp(min=float(values[-1]) * 1e-9).sqrt()
        weight = self.weight[:, columns].double() @ (vectors * scales)
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        root = sizes[:rank].sqrt()
        first, second = left[:, :rank] * root, root[:, None] * right[:rank] / scales @ vectors.T
        missing = rank - first.shape[1]
        return functional.pad(first, (0, missing)).float(), functional.pad(second, (0, 0, 0, missing)).float()


class NormalEquations:
    """W = (sum y x^T) (sum x x^T + ridge)^-1, the map with the least sum of |y - W x|^2 + ridge |W|^2."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self._sums = torch.zeros(inputs, inputs + outputs, device=device)  # x x^T | x y^T
        self._count = torch.zeros((), device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows x [R, inputs] and y [R, outputs], float32."""
        self._sums += x.T @ torch.cat([x, y], 1)
        self._count += len(x)

    def solve(self, total: Callable[[Tensor], Tensor]) -> LinearMap:
        """total: the sum over the processes, each of which has added rows of its own"""
        inputs, rows = len(self._sums), total(self._count)
        means = total(self._sums) / rows
        moments, products = means[:, :inputs].double(), means[:, inputs:].double()
        ridge = RIDGE * inputs / rows * torch.eye(inputs, dtype=torch.float64, device=means.device)
        return LinearMap(torch.linalg.solve(moments + ridge, products).T.float(), means[:, :inputs])
