"""Rows of keys and values in the formats of a cache (`cache_format`), which the type of a store's elements names:

    int8     a number is scale * code; the row's largest magnitude has the code 127
    uint8    two numbers of 4 bits: scale * code + least. A byte holds a number of the row's first half and, in its
             upper bits, one of the second half. The row's least number has the code 0, its largest 15
    others   the numbers
"""

import triton
import triton.language as tl

# Added to a float32 of at most 2^22, it rounds it to a whole number, which is then the number's lowest bits.
_ROUNDS = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def place_in_row(store, dim, DIM: tl.constexpr):
    """The element of a row that holds the number of each dimension `dim`."""
    if store.dtype.element_ty == tl.uint8:
        return dim % (DIM // 2)
    else:
        return dim


@triton.jit
def codes_of(elements, dim, like, DIM: tl.constexpr):
    """What elements at `place_in_row` of the dimensions `dim` (broadcast to their shape) stand for, before a scale, in
    the dtype of the tensor `like`. All codes are exact there."""
    if elements.dtype == tl.uint8:
        code = (elements >> tl.where(dim < DIM // 2, 0, 4).to(tl.uint8)) & 15
        return code.to(tl.int8).to(like.dtype)
    else:
        return elements.to(like.dtype)


@triton.jit
def store_row(first, second, mask, slot, store, scales, HALF: tl.constexpr, half):
    """Write one row, given as two float32 halves, to a slot.

    Every step rounds once, so all kernels that call this write the same bits. A row that has a number that is not
    finite gets a scale that is NaN.
    """
    WIDTH: tl.constexpr = HALF if store.dtype.element_ty == tl.uint8 else 2 * HALF
    at = store + slot * WIDTH + half
    if store.dtype.element_ty == tl.int8:
        largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        scale = tl.div_rn(largest, 127.0)
        divisor = tl.where(scale > 0, scale, 1.0)
        tl.store(scales + slot, _nan_unless_finite(scale, first, second))
        tl.store(at, _rounded(tl.div_rn(first, divisor)).to(tl.int8), mask=mask)
        tl.store(at + HALF, _rounded(tl.div_rn(second, divisor)).to(tl.int8), mask=mask)
    elif store.dtype.element_ty == tl.uint8:
        least = tl.min(tl.where(mask, tl.minimum(first, second), float("inf")), 0)
        largest = tl.max(tl.where(mask, tl.maximum(first, second), float("-inf")), 0)
        scale = tl.div_rn(largest - least, 15.0)
        divisor = tl.where(scale > 0, scale, 1.0)
        low, high = _rounded(tl.div_rn(first - least, divisor)), _rounded(tl.div_rn(second - least, divisor))
        tl.store(scales + 2 * slot, _nan_unless_finite(scale, first, second))
        tl.store(scales + 2 * slot + 1, least)
        tl.store(at, (low | high << 4).to(tl.uint8), mask=mask)
    else:
        tl.store(at, first.to(store.dtype.element_ty), mask=mask)
        tl.store(at + HALF, second.to(store.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x):
    """To nearest, ties to even, as int32 whose lowest byte is right."""
    return (x + _ROUNDS).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def _nan_unless_finite(scale, first, second):
    is_finite = (first - first == 0) & (second - second == 0)
    return tl.where(tl.min(is_finite.to(tl.int32), 0) > 0, scale, float("nan"))
