"""The Triton kernel that multiplies a few rows with a weight.

The inner dimension is cut into SPLITS parts, so that enough programs read the weight at the same time. The cut depends
on the weight's shape alone. Each part is one running float32 sum in order; the kernels of `jit_rows` add the parts, in
order too. The weight is the first operand, whose tiles have 64 rows on Hopper's tensor cores; the second, the rows,
may be as few as 16. A program always multiplies ROWS rows: the number of rows of the forward changes the grid and
nothing else.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_activations import gated
from longdraft.kernels.cuda.jit_chain import LINE, prefetch, wait_for_inputs
from longdraft.kernels.cuda.jit_rows import rounded


@triton.jit
def prefetch_columns(weight, column, first, INNER: tl.constexpr, PREFETCHED: tl.constexpr):
    """Fetch inputs first .. first + PREFETCHED of these columns into the second-level cache."""
    STEP: tl.constexpr = LINE // (weight.dtype.element_ty.primitive_bitwidth // 8)
    ahead = first + tl.arange(0, PREFETCHED // STEP) * STEP
    prefetch(weight + column.to(tl.int64)[:, None] * INNER + tl.minimum(ahead, INNER - 1)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(x, weight, parts, num_rows, OUT: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PREFETCHED: tl.constexpr,
                    IS_CHAINED: tl.constexpr):
    """Multiply x [R, INNER] with weight [OUT, INNER], in x's dtype or int8: parts [SPLITS, R, OUT] float32.

    PREFETCHED  inputs of each output that are asked for while the kernel in front ends; a power of two

    Grid (R / ROWS, OUT / COLUMNS, SPLITS), rounded up: what the first tile of rows reads, the others find in the
    second-level cache.
    """
    EACH: tl.constexpr = (INNER + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    IS_EVEN: tl.constexpr = INNER % BLOCK == 0 and OUT % COLUMNS == 0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    is_row, is_column = row < num_rows, column < OUT
    first = part * EACH
    inner = tl.arange(0, BLOCK)
    if IS_CHAINED and PREFETCHED > 0 and IS_EVEN:
        prefetch_columns(weight, column, first, INNER, PREFETCHED)
    wait_for_inputs(IS_CHAINED)
    weight_at = weight + column.to(tl.int64)[:, None] * INNER + inner[None, :]
    x_at = x + row.to(tl.int64)[None, :] * INNER + inner[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(first, tl.minimum(first + EACH, INNER), BLOCK):
        if IS_EVEN:
            weights = tl.load(weight_at + start)
            rows = tl.load(x_at + start, mask=is_row[None, :], other=0.0)
        else:
            is_inner = start + inner < INNER
            weights = tl.load(weight_at + start, mask=is_column[:, None] & is_inner[None, :], other=0.0)
            rows = tl.load(x_at + start, mask=is_row[None, :] & is_inner[:, None], other=0.0)
        total = tl.dot(weights.to(rows.dtype), rows, total, input_precision="ieee")
    at = parts + (part.to(tl.int64) * num_rows + row[None, :]) * OUT + column[:, None]
    tl.store(at, total, mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def gated_rows_kernel(x, weight, bias, out, num_rows, alpha, limit, WIDTH: tl.constexpr, INNER: tl.constexpr,
                      ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
                      PREFETCHED: tl.constexpr, ACTIVATION: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The gated product of x [R, INNER]: out [R, WIDTH], in one launch with the activation (`jit_activations.gated`).

    weight  [2 WIDTH, INNER] in x's dtype: the gate's rows, then those of up
    bias    [2 WIDTH] float32, where HAS_BIAS

    The same sums and roundings as `few_rows_kernel` without splits and `gated_parts_kernel` after it. WIDTH is a
    multiple of COLUMNS, INNER of BLOCK. Grid (R / ROWS, WIDTH / COLUMNS).
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < num_rows
    inner = tl.arange(0, BLOCK)
    if IS_CHAINED and PREFETCHED > 0:
        prefetch_columns(weight, column, 0, INNER, PREFETCHED)
        prefetch_columns(weight, column + WIDTH, 0, INNER, PREFETCHED)
    wait_for_inputs(IS_CHAINED)
    gate_at = weight + column.to(tl.int64)[:, None] * INNER + inner[None, :]
    up_at = gate_at + WIDTH * INNER
    x_at = x + row.to(tl.int64)[None, :] * INNER + inner[:, None]
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, INNER, BLOCK):
        gates, ups = tl.load(gate_at + start), tl.load(up_at + start)
        rows = tl.load(x_at + start, mask=is_row[None, :], other=0.0)
        gate = tl.dot(gates, rows, gate, input_precision="ieee")
        up = tl.dot(ups, rows, up, input_precision="ieee")
    if HAS_BIAS:
        gate += tl.load(bias + column)[:, None]
        up += tl.load(bias + WIDTH + column)[:, None]
    result = gated(rounded(gate, out), rounded(up, out), out, alpha, limit, ACTIVATION)
    at = out + row.to(tl.int64)[None, :] * WIDTH + column[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=is_row[None, :])
