"""The Triton kernels of weights of 4, 5, 6 or 8 bits (longdraft/kernels/formats: int4.py, groups.py, mxfp4.py).

A weight is cut into tiles of COLUMNS output features and blocks of 128 inputs. A tile is one piece of memory, int32: a
record for each block and, of kinds with common scales, those of its pairs of blocks. A record has

    words   [COLUMNS, 16], of 8 bits [2, COLUMNS, 16]: four bits of each value, or all eight
    upper   [COLUMNS, 16] of int8 or int16: the fifth bits, or the fifth and sixth ones
    scales  [1, 2, 4 or 6, COLUMNS]: two numbers of 16 bits in each word, see `scale_and_least`

The weight is the first operand of the product and the rows are the second: numbers that are unpacked in registers can
feed Hopper's tensor cores only there. The order makes unpacking cheap. Of 128 inputs of one output feature, word j has

    nibble      0     4  |   1     5  |   2     6  |   3     7
    input      2j  2j+1  |  32+2j ..  |  64+2j ..  |  96+2j ..         j = 0 .. 15

so that one shift and one mask leave two neighbouring inputs of group i = 0 .. 3 in the halves of a word. Bytes lie in
the same way: those of groups 0 and 1 in the first 16 words, those of 2 and 3 in the second. Upper bits: the lower half
of a number has those of input 2j of all groups, its upper half those of 2j+1.

With the bits of a 16-bit number whose last place is 1 above them, the halves are the floats 128 + value (bfloat16) or
1024 + value (float16), and the subtraction that follows is exact. bfloat16 has seven bits for that: of eight, which
are two's complements, the highest is subtracted by itself.
"""

import os

import torch
import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import prefetch, wait_for_inputs

# Whether instructions can be given: NVIDIA's compiler has them, Triton's interpreter and AMD's have not.
HAS_PTX = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)
GROUP: tl.constexpr = tl.constexpr(32)  # inputs with a scale
WIDTH: tl.constexpr = tl.constexpr(128)  # inputs of a block
# What a group has besides its values; `scale_and_least` has the layouts. The ones below `ZERO` take half the memory.
SCALE, COMMON_LEAST, COMMON_HALVES, ZERO, LEAST, HALVES, SHARED, POWERS = (tl.constexpr(form) for form in range(8))


@triton.jit
def spread(upper, BITS: tl.constexpr):
    """The upper bits of the values of a word: of input 2j from bit 0 on, and of input 2j + 1 from bit 16 on."""
    if BITS == 5:
        wide = upper.to(tl.int32)
        result = (wide & 0xF) | ((wide & 0xF0) << 12)
    elif BITS == 6:
        wide = upper.to(tl.int32)
        result = (wide & 0xFF) | ((wide & 0xFF00) << 8)
    else:
        result = upper
    return result


@triton.jit
def unpacked(packed, upper, held, group: tl.constexpr, like, BITS: tl.constexpr, FORM: tl.constexpr,
             OFFSET: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """Inputs of one group, less their offset or zero points: [COLUMNS, PART] in the element type of the pointer `like`.

    packed, upper  [COLUMNS, PART / 2]: words, and what `spread` makes of upper bits
    held           [COLUMNS]: words of scales, with zero points where FORM is ZERO
    """
    IS_BF16: tl.constexpr = like.dtype.element_ty == tl.bfloat16
    FLOAT: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400
    MINUS_ONE: tl.constexpr = 0xBF80BF80 - (1 << 32) if IS_BF16 else 0xBC00BC00 - (1 << 32)
    if BITS == 8:
        pair = packed >> (8 * (group % 2))
    else:
        pair = packed >> (4 * group)
    if BITS == 5:
        upper = (upper << (4 - group)) & 0x00100010
    if BITS == 6:
        if group == 3:
            upper = (upper >> 2) & 0x00300030
        else:
            upper = (upper << (4 - 2 * group)) & 0x00300030
    if like.dtype.element_ty == tl.float32:
        if BITS == 8:
            pair = (pair & 0x00FF00FF) ^ 0x00800080
        else:
            pair = pair & 0x000F000F
            if BITS > 4:
                pair = pair | upper
        low, high = pair & 0xFF, pair >> 16
        if FORM == POWERS:
            low, high = number_of_code(low), number_of_code(high)
        value = tl.join(low.to(tl.float32), high.to(tl.float32)).reshape(COLUMNS, PART)
        if FORM == ZERO or FORM == SHARED:
            value = value - (held >> 16).to(tl.float32)[:, None]
        else:
            value = value - OFFSET
    elif FORM == POWERS:
        value = halves_of_codes(packed, group, like, COLUMNS, PART)
    else:
        if BITS == 8:
            less = masked_or(pair, 0x00800080, FLOAT)
            pair = masked_or(pair, 0x007F007F, FLOAT)
        else:
            pair = masked_or(pair, 0x000F000F, FLOAT)
            if BITS > 4:
                pair = pair | upper
            if FORM == ZERO or FORM == SHARED:
                less = ((held >> 16) * 0x00010001 | FLOAT)[:, None].broadcast_to(COLUMNS, PART // 2)
            else:
                less = tl.full([COLUMNS, PART // 2], FLOAT + OFFSET * 0x00010001, tl.int32)
        value = multiply_add(less, MINUS_ONE, pair, like, COLUMNS, PART)
    return value


@triton.jit
def number_of_code(code):
    """The number of a code of MXFP4: a sign, two bits of exponent and one of mantissa (E2M1), float32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    double = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where((code & 8) != 0, -double, double).to(tl.float32) * 0.5


@triton.jit
def halves_of_codes(packed, group: tl.constexpr, like, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """The numbers of the codes of MXFP4 of one group, as 16-bit floats [COLUMNS, PART].

    Their bits are put where a 16-bit float has its sign, the lowest two bits of its exponent and the highest one of its
    mantissa. That float, which may be subnormal, is the number times 2^-126 (bfloat16) or 2^-14 (float16).
    """
    IS_BF16: tl.constexpr = like.dtype.element_ty == tl.bfloat16
    LEFT: tl.constexpr = (6 if IS_BF16 else 9) - 4 * group
    REST: tl.constexpr = 0x01C001C0 if IS_BF16 else 0x0E000E00
    POWER: tl.constexpr = 0x7E807E80 if IS_BF16 else 0x74007400
    rest = packed << LEFT if LEFT > 0 else packed >> -LEFT
    pair = ((packed << (12 - 4 * group)) & (0x80008000 - (1 << 32))) | (rest & REST)
    return multiply_add(pair, POWER, 0, like, COLUMNS, PART)


@triton.jit
def masked_or(word, MASK: tl.constexpr, OTHER: tl.constexpr):
    """(word & MASK) | OTHER. The compiler makes two instructions of it, because both numbers are constants."""
    if HAS_PTX:
        result = tl.inline_asm_elementwise("lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [word, MASK, OTHER],
                                           dtype=tl.int32, is_pure=True, pack=1)
    else:
        result = (word & MASK) | OTHER
    return result


@triton.jit
def multiply_add(a, b, c, like, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """a * b + c of the 16-bit floats in the halves of words, rounded once: [COLUMNS, PART]. All results are exact here.

    a or c is [COLUMNS, PART / 2]; the others may be numbers. Every card from Ampere on multiplies and adds pairs of
    bfloat16. Words stay whole: of halves, the compiler permutes bytes.
    """
    if HAS_PTX:
        IS_BF16: tl.constexpr = like.dtype.element_ty == tl.bfloat16
        ASM: tl.constexpr = "fma.rn.bf16x2 $0, $1, $2, $3;" if IS_BF16 else "fma.rn.f16x2 $0, $1, $2, $3;"
        pair = tl.inline_asm_elementwise(ASM, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)
        result = halves_of(pair, like, COLUMNS, PART)
    else:
        nothing = tl.zeros([COLUMNS, PART // 2], tl.int32)
        result = (halves_of(nothing | a, like, COLUMNS, PART) * halves_of(nothing | b, like, COLUMNS, PART)
                  + halves_of(nothing | c, like, COLUMNS, PART))
    return result


@triton.jit
def halves_of(pair, like, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """The halves of words [COLUMNS, PART / 2] as 16-bit floats [COLUMNS, PART]."""
    low = (pair & 0xFFFF).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    return tl.join(low, high).reshape(COLUMNS, PART)


@triton.jit
def float_of(held):
    """The float16 in the lower half of a word, float32."""
    return (held & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_and_least(scales, common, column, group, half, FORM: tl.constexpr, COLUMNS: tl.constexpr):
    """The scale of a half of a group, the group's least value, both float32, and the word that has the zero point.

    Words of each output feature, with the lower half first:

        SCALE          scales of the groups 0 and 1; of 2 and 3
        COMMON_LEAST   as SCALE, each an int8 scale and an int8 least value; common: float16 factors of both
        COMMON_HALVES  as SCALE, each with int8 scales of both halves; common: their float16 factor
        ZERO           of each group, scale and zero point
        LEAST          of each group, scale and least value
        HALVES         of each group, scales of both halves; then as SCALE least values
        SHARED         scale and zero point of all four groups
        POWERS         exponents of the four groups' powers of two, a byte for each
    """
    least = 0.0
    if FORM < ZERO:
        held = tl.load(scales + group // 2 * COLUMNS + column)
        entry = held >> (16 * (group % 2))
        if FORM == SCALE:
            scale = float_of(entry)
        elif FORM == COMMON_LEAST:
            scale = ((entry << 24) >> 24).to(tl.float32) * float_of(common)
            least = ((entry << 16) >> 24).to(tl.float32) * float_of(common >> 16)
        else:
            scale = ((entry << (24 - 8 * half)) >> 24).to(tl.float32) * float_of(common)
    else:
        held = tl.load(scales + (column if FORM >= SHARED else group * COLUMNS + column))
        if FORM == POWERS:
            scale = (((held >> (8 * group)) & 0xFF) << 23).to(tl.float32, bitcast=True)  # 2^(exponent - 127)
        elif FORM == HALVES:
            scale = float_of(held >> (16 * half))
            least = float_of(tl.load(scales + (4 + group // 2) * COLUMNS + column) >> (16 * (group % 2)))
        else:
            scale = float_of(held)
            if FORM == LEAST:
                least = float_of(held >> 16)
    return scale, least, held


@triton.jit
def record_of(BITS: tl.constexpr, FORM: tl.constexpr, COLUMNS: tl.constexpr):
    """int32 of a record before its scales, and in all."""
    SCALES_AT: tl.constexpr = ((2 if BITS == 8 else 1) * 16 + BITS % 4 * 4) * COLUMNS
    WORDS: tl.constexpr = 2 if FORM < ZERO else 6 if FORM == HALVES else 1 if FORM >= SHARED else 4
    return SCALES_AT, SCALES_AT + WORDS * COLUMNS


@triton.jit
def tile_at(weight, tile, BITS: tl.constexpr, FORM: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a tile begins, int64."""
    _, record = record_of(BITS, FORM, COLUMNS)
    IS_COMMON: tl.constexpr = FORM == COMMON_LEAST or FORM == COMMON_HALVES
    return weight + tile.to(tl.int64) * (BLOCKS * record + (BLOCKS + 1) // 2 * COLUMNS * IS_COMMON)


@triton.jit
def common_of(of_tile, block, column, BITS: tl.constexpr, FORM: tl.constexpr, BLOCKS: tl.constexpr,
              COLUMNS: tl.constexpr):
    """The words of a block's common scales; anything where there are none."""
    common = column
    if FORM == COMMON_LEAST or FORM == COMMON_HALVES:
        _, record = record_of(BITS, FORM, COLUMNS)
        common = tl.load(of_tile + BLOCKS * record + block // 2 * COLUMNS + column)
    return common


@triton.jit
def sums_of_blocks(x, weight, tile, row, is_row, first, end, BITS: tl.constexpr, FORM: tl.constexpr,
                   OFFSET: tl.constexpr, INNER: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    """The products of these rows with inputs of the blocks first .. end of one tile: [COLUMNS, ROWS] float32.

    row, is_row  [ROWS] int64 and bool: the rows of x [..., INNER]. Others are as in `few_bits_kernel`

    The sum of each group, half of one, or all four, is multiplied by its scale and added, rounded once, in float32;
    then the sum of its rows, multiplied by its least value.
    """
    PARTS: tl.constexpr = 2 if FORM == COMMON_HALVES or FORM == HALVES else 1
    PART: tl.constexpr = GROUP // PARTS
    HAS_LEAST: tl.constexpr = FORM == LEAST or FORM == COMMON_LEAST or FORM == HALVES
    column = tl.arange(0, COLUMNS)
    word = tl.arange(0, PART // 2)
    inner = tl.arange(0, PART)
    of_tile = tile_at(weight, tile, BITS, FORM, BLOCKS, COLUMNS)
    scales_at, size = record_of(BITS, FORM, COLUMNS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in tl.range(first, end, num_stages=STAGES):
        record = of_tile + block * size
        common = common_of(of_tile, block, column, BITS, FORM, BLOCKS, COLUMNS)
        for half in tl.static_range(PARTS):
            at = column[:, None] * 16 + half * (PART // 2) + word[None, :]
            packed = tl.load(record + at)
            upper = packed
            if BITS == 5:
                upper = tl.load((record + COLUMNS * 16).to(tl.pointer_type(tl.int8), bitcast=True) + at)
            if BITS == 6:
                upper = tl.load((record + COLUMNS * 16).to(tl.pointer_type(tl.int16), bitcast=True) + at)
            upper = spread(upper, BITS)
            for group in tl.static_range(4):
                if BITS == 8 and group == 2:
                    packed = tl.load(record + COLUMNS * 16 + at)
                place = block * WIDTH + group * GROUP + half * PART + inner
                if INNER % 128 == 0:
                    rows = tl.load(x + row[None, :] * INNER + place[:, None], mask=is_row[None, :], other=0.0)
                else:
                    rows = tl.load(x + row[None, :] * INNER + place[:, None],
                                   mask=is_row[None, :] & (place < INNER)[:, None], other=0.0)
                scale, least, held = scale_and_least(record + scales_at, common, column, group, half, FORM, COLUMNS)
                numbers = unpacked(packed, upper, held, group, x, BITS, FORM, OFFSET, COLUMNS, PART)
                if FORM != SHARED or group == 0:
                    sums = tl.dot(numbers, rows, input_precision="ieee")
                else:
                    sums = tl.dot(numbers, rows, sums, input_precision="ieee")
                if FORM != SHARED or group == 3:
                    total = tl.fma(sums, scale[:, None].broadcast_to(COLUMNS, ROWS), total)
                if HAS_LEAST:
                    # The sum of a group's inputs is the same for all columns: half of them are computed, and doubled.
                    ones = tl.full([COLUMNS // 2, PART], 1.0, x.dtype.element_ty)
                    sums = tl.dot(ones, rows, input_precision="ieee")
                    sums = tl.join(sums, sums).permute(2, 0, 1).reshape(COLUMNS, ROWS)
                    total = tl.fma(sums, least[:, None].broadcast_to(COLUMNS, ROWS), total)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def few_bits_kernel(x, weight, parts, num_rows, BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr,
                    OUT: tl.constexpr, INNER: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, STRIDE: tl.constexpr,
                    IS_CHAINED: tl.constexpr):
    """Multiply x [R, INNER] with a weight [OUT, INNER] of few bits: parts [SPLITS, R, OUT] float32.

    weight              int32: OUT / COLUMNS tiles, see above
    BITS, FORM, OFFSET  of values, of groups, and what values are more than their numbers
    BLOCKS              number of blocks of 128 inputs; the last may be padded with zeros
    STRIDE              from one row of the parts to the next

    A program's order of sums depends on the weight's shape alone. Grid (R / ROWS, OUT / COLUMNS, SPLITS), rounded up.
    """
    EACH: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    tile, part = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    first = part * EACH
    if IS_CHAINED:
        line = tl.arange(0, COLUMNS)  # of the first two blocks: 64 bytes of words for each column
        _, size = record_of(BITS, FORM, COLUMNS)
        ahead = tl.minimum(first, BLOCKS - 2 if BLOCKS > 1 else 0) * size
        prefetch(tile_at(weight, tile, BITS, FORM, BLOCKS, COLUMNS) + ahead + line * 32)
    wait_for_inputs(IS_CHAINED)
    total = sums_of_blocks(x, weight, tile, row.to(tl.int64), is_row, first, tl.minimum(first + EACH, BLOCKS),
                           BITS, FORM, OFFSET, INNER, BLOCKS, ROWS, COLUMNS, STAGES)
    out = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = parts + (part.to(tl.int64) * num_rows + row[None, :]) * STRIDE + out[:, None]
    tl.store(at, total, mask=is_row[None, :] & (out < OUT)[:, None])


@triton.jit
def numbers_at(weight, feature, place, mask, BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr,
               BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """The numbers that a weight stands for at output features and inputs of one shape, float32."""
    feature, place = tl.where(mask, feature, 0), tl.where(mask, place, 0)
    scales_at, size = record_of(BITS, FORM, COLUMNS)
    of_tile = tile_at(weight, feature // COLUMNS, BITS, FORM, BLOCKS, COLUMNS)
    block, group, inside, column = place // WIDTH, place % WIDTH // GROUP, place % GROUP, feature % COLUMNS
    record, word, upper_half = of_tile + block * size, column * 16 + inside // 2, inside % 2
    if BITS == 8:
        words = tl.load(record + group // 2 * COLUMNS * 16 + word)
        value = (words >> (8 * (group % 2) + 16 * upper_half)) & 0xFF ^ 0x80
    else:
        value = (tl.load(record + word) >> (4 * group + 16 * upper_half)) & 0xF
    if BITS == 5:
        upper = tl.load((record + COLUMNS * 16).to(tl.pointer_type(tl.int8), bitcast=True) + word)
        value |= ((upper.to(tl.int32) >> (group + 4 * upper_half)) & 1) << 4
    if BITS == 6:
        upper = tl.load((record + COLUMNS * 16).to(tl.pointer_type(tl.int16), bitcast=True) + word)
        value |= ((upper.to(tl.int32) >> (2 * group + 8 * upper_half)) & 3) << 4
    common = common_of(of_tile, block, column, BITS, FORM, BLOCKS, COLUMNS)
    scale, least, held = scale_and_least(record + scales_at, common, column, group, inside // 16, FORM, COLUMNS)
    number = number_of_code(value) if FORM == POWERS else value.to(tl.float32) - OFFSET
    if FORM == ZERO or FORM == SHARED:
        number = value.to(tl.float32) - (held >> 16).to(tl.float32)
    return number * scale + least


@triton.jit
def dequantise_kernel(weight, out, BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, OUT: tl.constexpr,
                      INNER: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """The numbers that a weight stands for, rounded to the dtype of out [OUT, INNER]. Grid (OUT / ROWS, BLOCKS)."""
    feature = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    place = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    mask = (feature < OUT) & (place < INNER)
    feature, place = tl.broadcast(feature, place)
    number = numbers_at(weight, feature, place, mask, BITS, FORM, OFFSET, BLOCKS, COLUMNS)
    tl.store(out + feature.to(tl.int64) * INNER + place, number.to(out.dtype.element_ty), mask=mask)


@triton.jit
def table_rows_kernel(ids, weight, out, BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr,
                      INNER: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Output features ids [R] int64 of a weight, as rows of out [R, INNER]. Grid (R, INNER / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = numbers_at(weight, tl.load(ids + row) + place * 0, place, place < INNER, BITS, FORM, OFFSET, BLOCKS,
                        COLUMNS)
    tl.store(out + row * INNER + place, number.to(out.dtype.element_ty), mask=place < INNER)
