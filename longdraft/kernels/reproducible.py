"""exp and log that return the same bits on every machine.

The vectorised exp and log of a library may run other code for the tail of a buffer, or on another processor. These use
only IEEE-754 basic operations in a fixed order, without fused multiply-adds. A result depends on its argument alone,
not on its position in the array, the array's length, the library or the hardware. The error is a few units in the last
place, which is accurate enough for sampling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]

_LN2_HI = 6.93147180369123816490e-01  # ln 2 split so that n * _LN2_HI is exact for |n| < 2**20
_LN2_LO = 1.90821492927058770002e-10
_LOG2_E = 1.44269504088896338700e00
_SQRT_HALF = 0.70710678118654752440
_LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(11, -1, -1))  # 2 * atanh(s) / s = sum 2 s^2i / (2i+1)
_EXP_TERMS = tuple(1.0 / f for f in (
    6227020800, 479001600, 39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1))


def log(x: Float64s) -> Float64s:
    """Natural logarithm of positive finite doubles."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    n = (exponent - small).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.full_like(square, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        series = series * square + term
    return n * _LN2_HI + (n * _LN2_LO + s * series)


def exp(x: Float64s) -> Float64s:
    """Exponential of doubles that are at most 0. Below -700 the result is 0."""
    n = np.rint(np.maximum(x, -750.0) * _LOG2_E)
    r = (np.maximum(x, -750.0) - n * _LN2_HI) - n * _LN2_LO
    series = np.full_like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series = series * r + term
    return np.where(x < -700.0, 0.0, np.ldexp(series, n.astype(np.int32)))
