"""exp and log in Triton, with the bits of longdraft/kernels/reproducible.py.

They use float64 and only basic operations in a fixed order, without fused multiply-adds.
"""

import triton
import triton.language as tl


@triton.jit
def exact_log(x):
    """Natural logarithm of normal positive doubles, with the bits of `reproducible.log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    is_small = mantissa < 0.70710678118654752440
    mantissa = tl.where(is_small, mantissa * 2.0, mantissa)
    n = (exponent - is_small.to(tl.int64)).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * 0.0 + 2.0 / 23
    series = series * square + 2.0 / 21
    series = series * square + 2.0 / 19
    series = series * square + 2.0 / 17
    series = series * square + 2.0 / 15
    series = series * square + 2.0 / 13
    series = series * square + 2.0 / 11
    series = series * square + 2.0 / 9
    series = series * square + 2.0 / 7
    series = series * square + 2.0 / 5
    series = series * square + 2.0 / 3
    series = series * square + 2.0
    return n * 6.93147180369123816490e-01 + (n * 1.90821492927058770002e-10 + s * series)


@triton.jit
def exact_exp(x):
    """Exponential of doubles from -700 to 0, with the bits of `reproducible.exp`."""
    n = (x * 1.44269504088896338700 + 6755399441055744.0) - 6755399441055744.0  # to a whole number, halves to even
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    series = r * 0.0 + 1.0 / 6227020800
    series = series * r + 1.0 / 479001600
    series = series * r + 1.0 / 39916800
    series = series * r + 1.0 / 3628800
    series = series * r + 1.0 / 362880
    series = series * r + 1.0 / 40320
    series = series * r + 1.0 / 5040
    series = series * r + 1.0 / 720
    series = series * r + 1.0 / 120
    series = series * r + 1.0 / 24
    series = series * r + 1.0 / 6
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    return series * ((n.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
