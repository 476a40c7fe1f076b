"""Keyed Gumbel noise: a pure function of (seed, position, token id), without generator state.

    hash  = mix(mix(mix(seed) + position * A) + token * B)          64-bit, counter based
    u     = ((hash >> 12) + 1/2) / 2**52                             in (0, 1), exact in float64
    noise = -log(-log u)                                             Gumbel(0, 1)

`mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014), applied after adding its increment. The target's token
at a position is argmax(logit / T + noise) over the support: the Gumbel-max trick. Every drafter, every resumed run and
every process computes the same noise.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from longdraft.kernels import reproducible

UInt64s = NDArray[np.uint64]

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_POSITION = np.uint64(0xD1342543DE82EF95)
_TOKEN = np.uint64(0xAF251AF3B0F025B5)
_COIN = 0xD6E8FEB86659FD93  # makes another seed for the coins


def _mix(x: UInt64s) -> UInt64s:
    x = x + _INCREMENT
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_seed(seed: int) -> UInt64s:
    """mix(seed), which `bits` starts from: [1]."""
    return _mix(np.array([seed], dtype=np.uint64))


Positions = int | NDArray[np.integer]  # one position for all tokens, or one per token


def bits(seed: int, positions: Positions, tokens: NDArray[np.integer]) -> UInt64s:
    """The 52 random bits of each token id [N] at its position: [N], integers below 2**52."""
    key = _mix(mix_seed(seed) + np.atleast_1d(np.asarray(positions, dtype=np.uint64)) * _POSITION)
    return _mix(key + tokens.astype(np.uint64) * _TOKEN) >> np.uint64(12)


def coin(seed: int, position: int) -> float:
    """A uniform number in (0, 1) for each position, independent of the noise of its tokens."""
    value = int(bits(seed ^ _COIN, position, np.zeros(1, np.int64))[0])
    return (value + 0.5) * 2.0**-52


def from_bits(random_bits: UInt64s) -> NDArray[np.float64]:
    """The Gumbel noise of random bits, in which it is increasing: float64 of the same shape."""
    u = (random_bits.astype(np.float64) + 0.5) * 2.0**-52
    return -reproducible.log(-reproducible.log(u))


def gumbel(seed: int, positions: Positions, tokens: NDArray[np.integer]) -> NDArray[np.float64]:
    """The Gumbel noise of each token id at its position: float64 of the same shape as `tokens`."""
    return from_bits(bits(seed, positions, tokens))


def bits_reaching(noise: float) -> int:
    """A lower bound of the random bits whose noise is `noise` or more, with a margin for rounding."""
    u = math.exp(-math.exp(-noise))
    return max(0, math.floor(u * (1 - 1e-9) * 2.0**52) - 2)
