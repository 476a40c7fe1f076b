"""Weights of 4 bits on the device: the numbers of kernels/formats/int4.py, row invariance (helpers.cuda_kernels)."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.cuda_kernels import TOLERANCE, every_dtype, kernels, rows_of
from longdraft.kernels.cuda.int4_linear import CudaInt4Linear
from longdraft.kernels.formats import int4
from longdraft.kernels.formats.int4 import Int4Weight

pytestmark = pytest.mark.full


def packed(dtype: str, out: int, inner: int, bias: bool = True) -> tuple[CudaInt4Linear, Int4Weight, torch.Tensor]:
    kernel = kernels(dtype)
    weight, added = rows_of(out, inner, seed=1) / math.sqrt(inner), rows_of(out, seed=2)
    found = kernel.pack(weight, added if bias else None, quantize="int4")
    assert isinstance(found, CudaInt4Linear)
    return found, int4.quantise(weight), added.to(kernel.dtype)


@every_dtype
@pytest.mark.parametrize("out, inner", [(70, 40), (130, 256), (128, 1090)])
def test_products_are_those_of_the_definitions_numbers_and_row_invariant(dtype, out, inner):
    kernel = kernels(dtype)
    weight, numbers, bias = packed(dtype, out, inner)
    x = rows_of(18, inner, dtype=kernel.dtype)
    together = kernel.linear(x, weight, keep_float=True)
    exact = x.double() @ int4.dequantise(numbers).double().T + bias.double()
    torch.testing.assert_close(together.double(), exact, atol=TOLERANCE["float32"] * 4, rtol=1e-4)
    alone = torch.cat([kernel.linear(x[row : row + 1], weight, keep_float=True) for row in (0, 17)])
    assert torch.equal(together[[0, 17]], alone)
    torch.testing.assert_close(weight.matmul(x).double(), exact, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


@every_dtype
@pytest.mark.parametrize("out, inner", [(70, 40), (128, 128), (200, 300)])
def test_packing_keeps_every_number(out, inner, dtype):
    """What a prompt multiplies with: the definition's numbers, rounded once."""
    weight, numbers, _ = packed(dtype, out, inner, bias=False)
    values = torch.arange(256).repeat(out, inner // 128 + 1)[:, :inner]
    every = Int4Weight((values % 16).to(torch.uint8), numbers.scale.cpu(), (values[:, ::32] // 16).to(torch.uint8))
    for ours, theirs in ((weight, numbers), (kernels(dtype).pack(every), every)):
        assert torch.equal(ours.dequantised().cpu(), int4.dequantise(theirs).to(ours.dtype).cpu())


def test_all_pairs_of_value_and_zero_point_are_exact():
    """A row that selects one input gives the weight itself: value minus zero, times the scale."""
    values = torch.arange(256, dtype=torch.int32).view(16, 16).repeat(1, 2)  # [16, 32]: 16 rows of all values
    weight = Int4Weight((values % 16).to(torch.uint8), torch.full((16, 1), 0.5, dtype=torch.float16),
                        torch.arange(16, dtype=torch.uint8)[:, None])
    for dtype in ("float32", "float16"):
        kernel = kernels(dtype)
        x = torch.eye(32, dtype=kernel.dtype, device=kernel.device)
        found = kernel.linear(x, kernel.pack(weight), keep_float=True)
        assert torch.equal(found.T.cpu(), int4.dequantise(weight))


def test_the_splits_depend_on_the_shape_alone_and_a_damaged_group_gives_nan():
    weight, *_ = packed("float16", 70, 1090, bias=False)
    assert weight.splits == 4 and packed("float16", 16, 512, bias=False)[0].splits == 2
    assert weight.nbytes < 128 * 1152 * 0.65  # 5 bits and the padding: a scale with its zero point takes a word
    values = rows_of(20, 64)
    values[3, 40] = math.inf
    kernel = kernels("float16")
    found = kernel.linear(rows_of(2, 64, dtype=torch.float16), kernel.pack(values, quantize="int4"))
    assert found[:, 3].isnan().all() and found[:, :3].isfinite().all()
