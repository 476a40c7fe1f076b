"""The Triton kernel that multiplies a few rows with a weight of 4-bit integers (longdraft/kernels/formats/int4.py).

The weight is the first operand of the product and the rows are the second: numbers that are unpacked in registers can
feed Hopper's tensor cores only there. Packing makes unpacking cheap. Of 128 inputs of one output feature, word j has

    nibble      0     4  |   1     5  |   2     6  |   3     7
    input      2j  2j+1  |  32+2j ..  |  64+2j ..  |  96+2j ..         j = 0 .. 15

so that one shift and one mask leave two neighbouring inputs of group i = 0 .. 3 in the halves of a word. One integer
addition subtracts the zero point from both and sets the upper bits of a 16-bit number whose last place is 1: the halves
are then the floats 144 + value - zero (bfloat16) or 1040 + value - zero (float16), and the last subtraction is exact.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import prefetch, wait_for_inputs


@triton.jit
def unpacked(packed, scale_and_zero, group: tl.constexpr, like, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The inputs of one group, less their zero points: [COLUMNS, GROUP] in the element type of the pointer `like`."""
    IS_BF16: tl.constexpr = like.dtype.element_ty == tl.bfloat16
    pair = (packed >> (4 * group)) & 0x000F000F
    zero = scale_and_zero >> 16
    if like.dtype.element_ty == tl.float32:
        low, high = (pair & 0xF).to(tl.float32), (pair >> 16).to(tl.float32)
        value = tl.join(low, high).reshape(COLUMNS, GROUP) - zero.to(tl.float32)[:, None]
    else:
        # Halves of 16 + value - zero, 1 to 31: no bit is carried from one to the other.
        pair = pair + ((0x43104310 if IS_BF16 else 0x64106410) - zero * 0x00010001)[:, None]
        low = (pair & 0xFFFF).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
        value = tl.join(low, high).reshape(COLUMNS, GROUP) - (144.0 if IS_BF16 else 1040.0)
    return value


@triton.jit
def sums_of_blocks(x, words, scales, tile, row, is_row, first, end, INNER: tl.constexpr, BLOCKS: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """The products of these rows with inputs of the blocks first .. end of one tile: [COLUMNS, ROWS] float32.

    row, is_row  [ROWS] int64 and bool: the rows of x [..., INNER]. Others are as in `few_rows_int4_kernel`

    Each group's sum is multiplied by its scale and added, rounded once, in float32.
    """
    GROUP: tl.constexpr = 32  # inputs with one scale and one zero point
    WIDTH: tl.constexpr = 128
    column = tl.arange(0, COLUMNS)
    word = tl.arange(0, 16)
    inner = tl.arange(0, GROUP)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        base = (tile * BLOCKS + block).to(tl.int64) * COLUMNS
        packed = tl.load(words + (base + column)[:, None] * 16 + word[None, :])
        for group in tl.static_range(4):
            place = block * WIDTH + group * GROUP + inner
            if INNER % WIDTH == 0:
                rows = tl.load(x + row[None, :] * INNER + place[:, None], mask=is_row[None, :], other=0.0)
            else:
                rows = tl.load(x + row[None, :] * INNER + place[:, None],
                               mask=is_row[None, :] & (place < INNER)[:, None], other=0.0)
            held = tl.load(scales + base * 4 + group * COLUMNS + column)
            sums = tl.dot(unpacked(packed, held, group, x, COLUMNS, GROUP), rows, input_precision="ieee")
            scale = (held & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            total = tl.fma(sums, scale[:, None].broadcast_to(COLUMNS, ROWS), total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_int4_kernel(x, words, scales, parts, num_rows, OUT: tl.constexpr, INNER: tl.constexpr,
                         BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
                         STAGES: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Multiply x [R, INNER] with a weight [OUT, INNER] of 4 bits: parts [SPLITS, R, OUT] float32.

    BLOCKS  number of blocks of 128 inputs; the last may be padded with zeros
    words   int32 [OUT / COLUMNS, BLOCKS, COLUMNS, 16]
    scales  int32 [OUT / COLUMNS, BLOCKS, 4, COLUMNS]: the bits of the float16 scale, and 65,536 times the zero point

    A program's order of sums depends on the weight's shape alone. Grid (R / ROWS, OUT / COLUMNS, SPLITS), rounded up.
    """
    EACH: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    tile, part = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    first = part * EACH
    if IS_CHAINED:
        line = tl.arange(0, COLUMNS)  # of the first two blocks: 64 bytes of words for each column
        ahead = (tile * BLOCKS + tl.minimum(first, BLOCKS - 2 if BLOCKS > 1 else 0)).to(tl.int64) * COLUMNS * 16
        prefetch(words + ahead + line * 32)
    wait_for_inputs(IS_CHAINED)
    total = sums_of_blocks(x, words, scales, tile, row.to(tl.int64), is_row, first, tl.minimum(first + EACH, BLOCKS),
                           INNER, BLOCKS, ROWS, COLUMNS, STAGES)
    out = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = parts + (part.to(tl.int64) * num_rows + row[None, :]) * OUT + out[:, None]
    tl.store(at, total, mask=is_row[None, :] & (out < OUT)[:, None])


@triton.jit
def dequantise_kernel(words, scales, out, OUT: tl.constexpr, INNER: tl.constexpr, BLOCKS: tl.constexpr,
                      COLUMNS: tl.constexpr):
    """The numbers that a weight of 4 bits stands for, rounded to the dtype of out [OUT, INNER]. Grid (tiles, BLOCKS).
    """
    column, word, inner = tl.arange(0, COLUMNS), tl.arange(0, 16), tl.arange(0, 32)
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = (tile * BLOCKS + block) * COLUMNS
    packed = tl.load(words + (base + column)[:, None] * 16 + word[None, :])
    row = tile * COLUMNS + column
    for group in tl.static_range(4):
        pair = packed >> (4 * group)
        value = tl.join((pair & 0xF).to(tl.float32), ((pair >> 16) & 0xF).to(tl.float32)).reshape(COLUMNS, 32)
        held = tl.load(scales + base * 4 + group * COLUMNS + column)
        scale = (held & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        value = (value - (held >> 16).to(tl.float32)[:, None]) * scale[:, None]
        place = block * 128 + group * 32 + inner
        tl.store(out + row[:, None] * INNER + place[None, :], value.to(out.dtype.element_ty),
                 mask=(row < OUT)[:, None] & (place < INNER)[None, :])
