"""int4 weights: the numbers they hold, the products of every kernel, and the promise for models made of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.checkpoints import load
from helpers.equality import DRAFTERS, READING, factory_of, params_of, prompt_of
from helpers.extents import extent
from helpers.generation import by_name, generate
from longdraft import kernels
from longdraft.kernels.cpu import kernels as cpu
from longdraft.kernels.formats import int4

every_kernel = pytest.mark.parametrize("name", kernels.available())
compiled_kernels = pytest.mark.parametrize("name", kernels.available()[:-1])
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def weights(rows: int, columns: int, magnitude: float = 0.05, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return (torch.randn(rows, columns, generator=generator) * magnitude).to(dtype)


@given(rows=st.integers(1, 9), columns=st.integers(1, 100), magnitude=st.sampled_from([1e-3, 1.0, 1e4]))
@settings(max_examples=30, deadline=None)
def test_weights_inside_the_clipping_range_are_off_by_at_most_half_a_step(rows, columns, magnitude):
    weight = weights(rows, columns, magnitude)
    packed = int4.quantise(weight)
    error = (int4.dequantise(packed) - weight).abs()
    step = packed.scale.float().repeat_interleave(int4.GROUP, 1)[:, :columns]
    inside = (packed.values > 0) & (packed.values < 15)
    assert (error[inside] <= 0.501 * step[inside]).all()
    assert (packed.values <= 15).all() and (packed.zero <= 15).all()


def test_the_search_for_a_clipping_range_lowers_the_error():
    weight = weights(64, 256)
    weight[:, ::32] *= 4  # an outlier in each group
    plain = int4._clipped(int4._groups(weight), *_range(weight), ratio=1.0)[3].sum()
    found = (int4.dequantise(int4.quantise(weight)) - weight).square().sum()
    assert found < 0.97 * plain


def _range(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = int4._groups(weight)
    least = groups.amin(2).clamp(max=0)
    return least, groups.amax(2).clamp(min=0) - least


@compiled_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, columns", [(1, 1), (70, 100), (65, 96)])
def test_compiled_kernels_quantise_to_the_same_numbers(name, dtype, rows, columns):
    weight = weights(rows, columns, dtype=dtype)
    weight[0] = 0
    weight[-1, : columns // 2] *= 1e-4  # steps that float16 holds as subnormal numbers
    kernel = kernels.choose("cpu", "bfloat16", name)
    assert isinstance(kernel, cpu.CpuKernels)
    found, wanted = kernel.quantise_int4(weight), int4.quantise(weight)
    assert all(torch.equal(getattr(found, part), getattr(wanted, part)) for part in ("values", "scale", "zero"))


@every_kernel
@every_dtype
def test_groups_of_zeros_stay_zero_and_damaged_groups_give_nan(name, dtype):
    kernel = kernels.choose("cpu", dtype, name)
    weight = weights(70, 40, magnitude=1.0)
    weight[3], weight[5, 7], weight[6, 1] = 0.0, float("nan"), float("-inf")
    packed = kernel.pack(weight, quantize="int4")
    out = kernel.linear(torch.randn(2, 40).to(kernel.dtype), packed, keep_float=True)
    assert (out[:, 3] == 0).all() and out[:, [5, 6]].isnan().all()
    assert out[:, [n for n in range(70) if n not in (5, 6)]].isfinite().all()
    rows = kernel.embed(packed, [3, 5])
    assert (rows[0] == 0).all() and rows[1].isnan().any()


@every_kernel
@every_dtype
def test_a_row_that_is_not_finite_gives_nan_and_leaves_other_rows_alone(name, dtype):
    kernel = kernels.choose("cpu", dtype, name)
    packed = kernel.pack(weights(70, 64), quantize="int4")
    x = torch.randn(3, 64).to(kernel.dtype)
    before = kernel.linear(x, packed)
    x[1, 40] = float("inf")
    out = kernel.linear(x, packed)
    assert out[1].isnan().all() and torch.equal(out[[0, 2]], before[[0, 2]])


@every_kernel
@every_dtype
def test_the_product_is_that_of_the_quantised_rows_and_weights(name, dtype):
    """Against the formula in double precision."""
    kernel = kernels.choose("cpu", dtype, name)
    weight, bias = weights(130, 300), torch.randn(130)
    x = torch.randn(21, 300).to(kernel.dtype)
    packed = int4.quantise(weight)
    got = kernel.linear(x, kernel.pack(weight, bias, quantize="int4"), keep_float=True)
    groups = int4._groups(x.float())
    steps = groups.abs().amax(2, keepdim=True) / 127
    whole = (groups * (torch.tensor(127.0) / groups.abs().amax(2, keepdim=True))).round()
    rows = (whole.double() * steps.double()).flatten(1)[:, :300]
    exact = rows @ int4.dequantise(packed).double().T + bias.to(kernel.dtype).double()
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


@every_kernel
def test_a_group_of_tiny_inputs_counts_as_zeros(name):
    """127 / magnitude would be infinite. The groups beside it are as before."""
    kernel = kernels.choose("cpu", "float32", name)
    packed, x = kernel.pack(weights(70, 64), quantize="int4"), torch.randn(2, 64)
    x[:, 32:] = 0
    zeros = kernel.linear(x, packed)
    x[0, 33], x[0, 40], x[1, 50] = 1e-37, -2e-37, 1e-44
    assert torch.equal(kernel.linear(x, packed), zeros)


@compiled_kernels
@every_dtype
def test_a_row_has_the_same_bits_in_any_company(name, dtype):
    """By vector instructions and by the matrix unit, which multiplies many rows."""
    kernel = kernels.choose("cpu", dtype, name)
    packed, x = kernel.pack(weights(130, 300), quantize="int4"), torch.randn(37, 300).to(kernel.dtype)
    together = kernel.linear(x, packed, keep_float=True)
    for rows in (1, 4, 9, 10, 16, 25):
        assert torch.equal(kernel.linear(x[-rows:].clone(), packed, keep_float=True), together[-rows:])


@compiled_kernels
def test_int4_takes_nineteen_bits_for_four_weights(name):
    kernel = kernels.choose("cpu", "bfloat16", name)
    assert kernel.pack(weights(640, 256), quantize="int4").nbytes == 640 * 256 * 19 // 32


@pytest.fixture(scope="module")
def quantised(tiny):
    """An int4 model, another one to draft with, and the folder of its heads and glide layer."""
    return load(tiny["mha"], "bfloat16", None, "int4"), load(tiny["gqa"], "bfloat16", None, "int4"), tiny["mha"]


@pytest.fixture(scope="module")
def plain(quantised):
    return {name: generate(quantised[0], prompt_of(90), params_of(name), by_name("plain"))
            for name in ("greedy, penalty", "paper")}


@pytest.mark.parametrize("drafter", extent(DRAFTERS, READING.values()))
def test_every_drafter_writes_the_plain_text_of_the_int4_model(quantised, plain, drafter):
    model, another, folder = quantised
    factory = factory_of(drafter, model, another, folder)
    for settings_name, expected in plain.items():
        assert generate(model, prompt_of(90), params_of(settings_name), factory) == expected, settings_name


@pytest.mark.parametrize("name", [*kernels.available()[:-1], pytest.param("reference", marks=pytest.mark.full)])
@every_dtype
def test_a_draft_chain_writes_the_plain_text_of_the_int4_model_on_every_kernel(tiny, name, dtype):
    model = load(tiny["gqa"], dtype, name, "int4")
    expected = generate(model, prompt_of(60), params_of("paper"), by_name("plain"))
    assert generate(model, prompt_of(60), params_of("paper"), by_name("magicdec", budget=24, sinks=4)) == expected
    assert generate(model, prompt_of(60), params_of("paper"), by_name("plain"), chunk=7) == expected
