"""The linear map of least squares: against the pseudo-inverse, its size against rows, its factors against the SVD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longdraft.train.least_squares import RIDGE, LinearMap, NormalEquations

INPUTS, OUTPUTS, ROWS = 12, 7, 4000


def rows(noise: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    correlated = torch.eye(INPUTS) + 0.2 * torch.randn(INPUTS, INPUTS, generator=generator)
    x = torch.randn(ROWS, INPUTS, generator=generator) @ correlated
    y = x @ torch.randn(INPUTS, OUTPUTS, generator=generator)
    return x, y + noise * torch.randn(ROWS, OUTPUTS, generator=generator)


def fitted(x: Tensor, y: Tensor, parts: int = 5) -> LinearMap:
    equations = NormalEquations(INPUTS, OUTPUTS, x.device)
    for some_x, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        equations.add(some_x, some_y)
    return equations.solve(lambda values: values)


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_the_map_is_that_of_least_squares(noise):
    """The ridge is one more row for each input, whose outputs are zero."""
    x, y = rows(noise)
    more_x = torch.cat([x, (RIDGE * INPUTS) ** 0.5 * torch.eye(INPUTS)]).double()
    more_y = torch.cat([y, torch.zeros(INPUTS, OUTPUTS)]).double()
    wanted = (torch.linalg.pinv(more_x) @ more_y).float()
    torch.testing.assert_close(fitted(x, y).weight.T, wanted, atol=1e-4, rtol=1e-4)


def test_with_fewer_rows_than_inputs_the_map_stays_small():
    x, y = (part[:5] for part in rows(0.0))
    found = fitted(x, y)
    assert float(found.weight.norm()) < 2 * float((torch.linalg.pinv(x) @ y).norm())


def test_processes_with_rows_of_their_own_find_the_map_of_all_rows():
    x, y = rows(1.0)
    shares = [NormalEquations(INPUTS, OUTPUTS, x.device) for _ in range(2)]
    for share, part in zip(shares, (slice(0, 1500), slice(1500, None)), strict=True):
        share.add(x[part], y[part])
    one, other = shares
    sums = {id(value): value + more for value, more in zip(vars(one).values(), vars(other).values(), strict=True)}
    found = one.solve(lambda values: sums[id(values)])
    torch.testing.assert_close(found.weight, fitted(x, y).weight, atol=1e-4, rtol=1e-4)


def test_the_size_is_that_of_the_outputs():
    x, y = rows(1.0)
    found = fitted(x, y)
    for columns in (slice(None), slice(3, 8)):
        outputs = x[:, columns] @ found.weight[:, columns].T
        assert found.size(columns) == pytest.approx(float(outputs.square().mean().sqrt()), rel=1e-3)


def test_factors_of_a_rank_lose_least_for_these_inputs():
    """The rest has the size of the singular values of the outputs that the rank leaves out."""
    x, y = rows(1.0)
    found, columns = fitted(x, y), slice(2, 9)
    outputs = x[:, columns] @ found.weight[:, columns].T
    for rank in (1, 3, 5):
        first, second = found.factors(columns, rank)
        assert first.shape == (OUTPUTS, rank) and second.shape == (rank, 7)
        rest = (outputs - x[:, columns] @ (first @ second).T).norm()
        assert float(rest) == pytest.approx(float(torch.linalg.svdvals(outputs)[rank:].norm()), rel=1e-3)


def test_factors_of_a_rank_above_the_largest_are_padded_with_zeros():
    x, y = rows(1.0)
    found = fitted(x, y)
    first, second = found.factors(slice(0, 4), 9)
    assert first.shape == (OUTPUTS, 9) and second.shape == (9, 4)
    torch.testing.assert_close(first @ second, found.weight[:, :4], atol=1e-4, rtol=1e-4)
