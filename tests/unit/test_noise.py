"""Keyed noise: a function of (seed, position, token), Gumbel distributed, independent along all three."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from longdraft.kernels import noise, reproducible

MASK = 2**64 - 1
KNOWN = [0.3986635241178472, -1.314632270246364, 2.088831296438528]  # the noise of (7, 4096, [0, 1, 4095])


def obvious_bits(seed: int, position: int, token: int) -> int:
    """The hash again, in Python's whole numbers."""

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    key = mix((mix(seed) + position * 0xD1342543DE82EF95) & MASK)
    return mix((key + token * 0xAF251AF3B0F025B5) & MASK) >> 12


@given(st.integers(0, MASK), st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
def test_the_hash_is_what_it_says(seed, position, tokens):
    bits = noise.bits(seed, position, np.array(tokens))
    assert bits.tolist() == [obvious_bits(seed, position, token) for token in tokens]


def test_the_noise_of_known_keys_never_changes():
    """A text written today must be written again tomorrow: these bits are part of the file formats."""
    assert noise.bits(7, 4096, np.array([0, 1, 4095])).tolist() == [obvious_bits(7, 4096, i) for i in (0, 1, 4095)]
    assert noise.gumbel(7, 4096, np.array([0, 1, 4095])).tolist() == KNOWN




@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=40))
def test_log_is_a_function_of_the_value_alone_and_accurate(values):
    together = reproducible.log(np.array(values))
    assert together.tolist() == [reproducible.log(np.array([value])).item() for value in values]
    np.testing.assert_allclose(together, np.log(values), rtol=4e-16, atol=1e-15)


@given(st.lists(st.floats(-690, 0), min_size=1, max_size=40))
def test_exp_is_a_function_of_the_value_alone_and_accurate(values):
    together = reproducible.exp(np.array(values))
    assert together.tolist() == [reproducible.exp(np.array([value])).item() for value in values]
    np.testing.assert_allclose(together, np.exp(values), rtol=6e-16)


def test_exp_at_the_ends():
    assert reproducible.exp(np.array([0.0, -701.0, -1e300])).tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("draw", [
    pytest.param(lambda n: noise.gumbel(7, 100, np.arange(n)), id="along tokens"),
    pytest.param(lambda n: [noise.gumbel(7, p, np.array([33])).item() for p in range(n // 50)], id="along positions"),
    pytest.param(lambda n: [noise.gumbel(s, 9, np.array([33])).item() for s in range(n // 50)], id="along seeds"),
])
def test_noise_follows_the_gumbel_law(draw):
    assert stats.kstest(draw(100_000), stats.gumbel_r.cdf).pvalue > 1e-4


def test_every_bit_is_fair_and_flips_with_every_key():
    """Avalanche: one step in seed, position or token flips each of the 52 bits about half of the time."""
    tokens = np.arange(20_000)
    here = noise.bits(3, 50, tokens)
    for other in (noise.bits(4, 50, tokens), noise.bits(3, 51, tokens), noise.bits(3, 50, tokens + 1),
                  noise.bits(3 + 2**40, 50, tokens)):
        flips = [(((here ^ other) >> np.uint64(bit)) & np.uint64(1)).mean() for bit in range(52)]
        assert max(abs(flip - 0.5) for flip in flips) < 0.02


@pytest.mark.parametrize("neighbour", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)])
def test_neighbours_are_independent(neighbour):
    """Chi-square on a 16 x 16 table of (noise here, noise at a neighbouring key)."""
    seed, position, token = neighbour
    tokens = np.arange(0, 120_000, 2)
    here = (noise.bits(11, 200, tokens) >> np.uint64(48)).astype(int)
    there = (noise.bits(11 + seed, 200 + position, tokens + token) >> np.uint64(48)).astype(int)
    table = np.zeros((16, 16))
    np.add.at(table, (here, there), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_the_extremes_are_finite_and_bounded():
    low, high = noise.from_bits(np.array([0, 2**52 - 1], dtype=np.uint64))
    assert -3.7 < low < high <= 36.75  # -log(-log(1 - 2**-53)), rounded up


@given(st.floats(-3, 36))
def test_bits_below_the_bound_do_not_reach_the_noise(value):
    bound = noise.bits_reaching(value)
    if bound:
        assert noise.from_bits(np.array([bound - 1], dtype=np.uint64)).item() < value
    u = (Fraction(bound) + 2) / 2**52  # the bound is not far too low either: a few candidates, not all
    assert float(u) <= math.exp(-math.exp(-value)) + 1e-8
