"""The remainder of a partial cache: a function fitted to the attention to the rows that the cache omits."""

from __future__ import annotations

import pytest
import torch

from longdraft import kernels
from longdraft.cache.remainder import Remainder, new_fit
from longdraft.kernels import KV, AttentionOutput, AttentionRows, LayersKV
from longdraft.kernels.cpu.remainder import CompiledRemainder

REFERENCE = kernels.choose("cpu", "float32", "reference")


def random_rests(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_fit_is_the_weighted_ridge_regression_of_all_rows_so_far():
    """Compared with a fit to all rows at once, centred, one head at a time."""
    steps, layers, heads, dim = [5, 3, 1, 7, 9, 4, 3] * 3, 2, 3, 6
    fit = Remainder(REFERENCE, layers, heads, dim)
    contents = [random_rests(layers, rows, heads, dim, seed=i) for i, rows in enumerate(steps)]
    rests = [random_rests(layers, rows, heads, dim + 1, seed=100 + i) for i, rows in enumerate(steps)]
    total, fitted, seen = 0, 0, 0
    for rows, content, remainder in zip(steps, contents, rests, strict=True):
        got = fit.learn(content, remainder)
        total, seen = total + rows, seen + rows
        if seen >= 32 or total == rows:
            fitted, seen = total, 0
    x, y = (torch.cat(parts, 1).double() for parts in (contents, rests))
    age = torch.arange(fitted - 1, -1, -1).double()
    weight = (-age / 128).exp()
    for layer in range(layers):
        for head in range(heads):
            u, r = x[layer, :fitted, head], y[layer, :fitted, head]
            mean_u, mean_r = ((weight[:, None] * part).sum(0) / weight.sum() for part in (u, r))
            spread = (weight[:, None] * (u - mean_u) ** 2).sum(0).mean() / weight.sum()
            gram = (weight[:, None] * (u - mean_u)).T @ (u - mean_u)
            gram += (0.05 * weight.sum() + 4) * spread * torch.eye(dim)
            slope = torch.linalg.solve(gram, (weight[:, None] * (u - mean_u)).T @ (r - mean_r))
            base = mean_r - mean_u @ slope
            base = base + 0.4 * (y[layer, -1, head] - x[layer, -1, head] @ slope - base)
            torch.testing.assert_close(got[layer, head, :dim].double(), slope, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(got[layer, head, dim].double(), base, atol=1e-4, rtol=1e-3)


def test_rows_with_nan_do_not_change_the_fit():
    content, rests = random_rests(2, 40, 3, 6, seed=1), random_rests(2, 40, 3, 7, seed=2)
    fits = [Remainder(REFERENCE, 2, 3, 6) for _ in range(2)]
    damaged, others = content.clone(), rests.clone()
    damaged[:, 5], others[:, 9, :, 2], others[:, 12] = torch.nan, torch.inf, torch.nan
    content[:, [5, 9, 12]], rests[:, [5, 9, 12], :, -1] = 0.0, -torch.inf
    assert torch.equal(fits[0].learn(damaged, others), fits[1].learn(content, rests))
    assert fits[0].learn(damaged, others).isfinite().all()


@pytest.mark.parametrize("dim", [6, 64, 128])
def test_nearly_equal_rows_give_a_finite_fit(dim):
    fit = Remainder(REFERENCE, 2, 3, dim)
    same, noise = random_rests(2, 1, 3, dim, seed=1), random_rests(2, 5, 3, dim, seed=2)
    rests = 1 + 0.01 * random_rests(2, 5, 3, dim + 1, seed=3)
    for _ in range(9):
        got = fit.learn(20 * same + 1e-3 * noise, rests)
    assert got.isfinite().all() and got.abs().max() < 10


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("dim", [6, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_compiled_call_gives_the_fit_of_pytorch(name, dim, dtype):
    """A text and a partial cache with its last positions, which new rows join. The rows are a view of more. For two
    heads nothing was left out, and one row is damaged."""
    layers, kv_heads, heads = 2, 2, 4
    kernel = kernels.choose("cpu", dtype, name)
    full, part = ([kernel.new_store(kv_heads, dim) for _ in range(layers)] for _ in range(2))
    start, fits = 500, ()
    for step, rows in enumerate((80, 1, 9, 30, 4, 60, 2, 5, 12)):
        first = start if step else 0
        k, v = (random_rests(layers, start + rows - first, kv_heads, dim, seed=10 * step + i).to(kernel.dtype)
                for i in (1, 2))
        kernel.keep(LayersKV(full, first, k, v), range(start + rows - first))
        length = start + rows - 400
        positions = torch.arange(start + rows - length, start + rows).expand(layers, kv_heads, -1)
        kernel.copy(full, part, positions, 0)
        q, content = (random_rests(layers, rows + 3, heads, dim, seed=10 * step + i).to(kernel.dtype) for i in (3, 4))
        kv = [KV(full[i], start, k[i, -rows:].contiguous(), v[i, -rows:].contiguous()) for i in range(layers)]
        chain = torch.arange(-1, rows - 1, dtype=torch.int32)
        whole = [kernel.attention(q[i, :rows].contiguous(), kv[i], chain) for i in range(layers)]
        output, lse = (torch.stack([torch.cat([x, x[:1].expand(3, *x.shape[1:])]) for x in parts])
                       for parts in zip(*((each.output, each.lse) for each in whole), strict=True))
        lse[1, :, 2:] = -100.0
        if step == 3:
            content[0, 5] = torch.nan
        found = AttentionOutput(q, output, lse, content).cut(slice(0, rows))
        fits = fits or (new_fit(kernel, part, heads), Remainder(kernel, layers, heads, dim))
        assert isinstance(fits[0], CompiledRemainder) and fits[0].nbytes > 0
        got, expected = (fit.update(part, length, AttentionRows.all(found)) for fit in fits)
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)
        start += rows


def test_the_fit_is_exact_for_linear_remainders_and_for_heads_without_omitted_keys():
    dim = 4
    truth, base = random_rests(2, dim, dim + 1, seed=1), random_rests(2, dim + 1, seed=2)
    fit = Remainder(REFERENCE, 1, 3, dim)
    for step in range(200):
        content = random_rests(1, 5, 3, dim, seed=3 + step)
        rests = torch.empty(1, 5, 3, dim + 1)
        rests[:, :, :2] = torch.einsum("lthd,hde->lthe", content[:, :, :2], truth) + base
        rests[:, :, 2] = 0.0
        rests[:, :, 2, -1] = -torch.inf  # nothing is left out for this head
        got = fit.learn(content, rests)
    torch.testing.assert_close(got[0, :2, :dim], truth, atol=0.2, rtol=0.1)
    torch.testing.assert_close(got[0, :2, dim], base, atol=0.3, rtol=0.1)
    assert got.isfinite().all()
    assert (got[0, 2, dim] @ torch.eye(dim + 1))[-1] < -1e20, "the weight is 0"
