"""The Triton kernel that multiplies a few rows with a weight.

The inner dimension is cut into SPLITS parts, so that enough programs read the weight at the same time. The cut depends
on the weight's shape alone. Each part is one running float32 sum in order; the kernels of `jit_rows` add the parts, in
order too. A program always multiplies ROWS rows: the number of rows of the forward changes the grid and nothing else.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(x, weight, parts, num_rows, OUT: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Multiply x [R, INNER] with weight [OUT, INNER], in x's dtype or int8: parts [SPLITS, R, OUT] float32.

    Grid (OUT / COLUMNS, R / ROWS, SPLITS), rounded up.
    """
    EACH: tl.constexpr = (INNER + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    IS_EVEN: tl.constexpr = INNER % BLOCK == 0 and OUT % COLUMNS == 0
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    is_row, is_column = row < num_rows, column < OUT
    first = part * EACH
    inner = tl.arange(0, BLOCK)
    x_at = x + row.to(tl.int64)[:, None] * INNER + inner[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * INNER + inner[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + EACH, INNER), BLOCK):
        if IS_EVEN:
            rows = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
            weights = tl.load(weight_at + start)
        else:
            is_inner = start + inner < INNER
            rows = tl.load(x_at + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            weights = tl.load(weight_at + start, mask=is_column[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(rows, weights.to(rows.dtype), total, input_precision="ieee")
    at = parts + (part.to(tl.int64) * num_rows + row[:, None]) * OUT + column[None, :]
    tl.store(at, total, mask=is_row[:, None] & is_column[None, :])
