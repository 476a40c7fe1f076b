"""Numbers of 8 bits (float8 e4m3: sign, 4 bits of exponent with the bias 7, 3 bits of mantissa) for devices that do not
convert them: a store is then one of bytes, tl.uint8, whose bits are those that other devices write.
"""

import triton
import triton.language as tl


@triton.jit
def from_store(x, like):
    """Numbers of a store in the dtype of the tensor `like`."""
    if x.dtype == tl.uint8:
        # As a float16, whose exponent has the bias 15 and one bit more: 2^-8 times the number, small ones included.
        bits = x.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(like.dtype)
    else:
        return x.to(like.dtype)


@triton.jit
def to_store(x, like):
    """float32 numbers, rounded to nearest, as elements of the pointer `like`. Bytes stand for numbers up to 448."""
    if like.dtype.element_ty == tl.uint8:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Exponent and mantissa in one number: what is rounded up carries into the exponent.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 120 * 8
        # Below 2^-6 numbers are multiples of 2^-9, the last place of a float32 from 2^14 on.
        magnitude = size.to(tl.float32, bitcast=True)
        small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
        return (((bits >> 24) & 0x80) | tl.where(magnitude < 0.015625, small, normal)).to(tl.uint8)
    else:
        return x.to(like.dtype.element_ty)
