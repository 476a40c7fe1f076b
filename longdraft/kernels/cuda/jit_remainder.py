"""Triton kernels of the upkeep of a partial cache's remainder (longdraft/cache/remainder.py), all layers in one launch.

    every step     gather_queries | attention to the partial cache | hold_rows | correct_base
    every 32 rows                                     add_held_rows | invert_gram | solve_maps | correct_base

A head is one query head of one layer; n = D + 1. It holds the rows that are not in its sums yet: x = (query, 1) and y =
(output, log-sum-exp) of the remainder, both [ROOM, n]. Rows are zeros where no key was left out or a number is not
finite. Its sums are the decayed x^T x and x^T y, both [n, n].

    numbers  int64: addresses of the rows' queries, output, log-sum-exps and content in the attention to the whole
             cache; rows of a layer there; number of rows; number of rows held before. They are uploaded at each step
    rows     int32: places of the rows there
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_chain import wait_for_inputs

NUM_NUMBERS = 7
_LEAST_PIVOT = tl.constexpr(1e-6)  # of an equation whose diagonal is 1; below it a pivot is a rounding error
_LEAST_MASS = tl.constexpr(1e-6)


@triton.jit
def gather_queries_kernel(numbers, rows, queries, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                          IS_CHAINED: tl.constexpr):
    """Copy the rows' queries to [L, num_rows, WIDTH]. Grid (num_rows, WIDTH / BLOCK, L)."""
    wait_for_inputs(IS_CHAINED)
    row, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < tl.where(row < tl.load(numbers + 5), WIDTH, 0)
    source = tl.load(numbers).to(queries.dtype) + (layer * tl.load(numbers + 4) + tl.load(rows + row)) * WIDTH
    value = tl.load(source + column, mask=mask, other=0.0)
    tl.store(queries + (layer * num_rows + row) * WIDTH + column, value, mask=mask)


@triton.jit
def hold_rows_kernel(numbers, rows, part_output, part_lse, x, y, negligible, HEADS: tl.constexpr, DIM: tl.constexpr,
                     PADDED: tl.constexpr, ROWS: tl.constexpr, ROOM: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Hold the rows and their exact remainders: the whole attention minus that to the partial cache. Grid (H, L).

    part_output, part_lse  [L, ROWS, H, D] and [L, ROWS, H]: the attention to the partial cache
    negligible             share of the attention that rounding errors may produce
    """
    wait_for_inputs(IS_CHAINED)
    head, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED)
    is_row = row < tl.load(numbers + 5)
    mask = is_row[:, None] & (dim < DIM)[None, :]
    source = (layer * tl.load(numbers + 4) + tl.load(rows + row, mask=is_row, other=0)) * HEADS + head
    at = source[:, None] * DIM + dim[None, :]
    whole = tl.load(tl.load(numbers + 1).to(part_output.dtype) + at, mask=mask, other=0.0).to(tl.float32)
    whole_lse = tl.load(tl.load(numbers + 2).to(part_lse.dtype) + source, mask=is_row, other=0.0)
    content = tl.load(tl.load(numbers + 3).to(part_output.dtype) + at, mask=mask, other=0.0).to(tl.float32)
    own = (layer * ROWS + row) * HEADS + head
    part = tl.load(part_output + own[:, None] * DIM + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    share = tl.exp(tl.load(part_lse + own, mask=is_row, other=0.0) - whole_lse)
    left = 1.0 - share
    is_left = left >= negligible  # not where it is NaN
    safe = tl.where(is_left, left, 1.0)
    output = tl.div_rn(whole - share[:, None] * part, safe[:, None] + tl.zeros([ROWS, PADDED], tl.float32))
    lse = whole_lse + tl.log(safe)
    largest = tl.where(tl.abs(output) < float("inf"), tl.abs(content), float("inf"))
    is_finite = tl.min(tl.where(largest < float("inf"), 1, 0), 1)  # a NaN is not smaller than anything
    is_valid = tl.where(is_left, tl.where(tl.abs(lse) < float("inf"), is_finite, 0), 0) > 0
    held = (layer * HEADS + head) * ROOM + tl.load(numbers + 6) + row
    to = held[:, None] * (DIM + 1) + dim[None, :]
    tl.store(x + to, tl.where(is_valid[:, None], content, 0.0), mask=mask)
    tl.store(y + to, tl.where(is_valid[:, None], output, 0.0), mask=mask)
    tl.store(x + held * (DIM + 1) + DIM, tl.where(is_valid, 1.0, 0.0), mask=is_row)
    tl.store(y + held * (DIM + 1) + DIM, tl.where(is_valid, lse, 0.0), mask=is_row)


@triton.jit
def correct_base_kernel(numbers, x, y, base, maps, last_error, DIM: tl.constexpr, PADDED: tl.constexpr,
                        COLUMNS: tl.constexpr, ROOM: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The last row of maps [heads, n, n]: `base` [heads, n] and a share of the last held row's error.

    Grid (heads, n / COLUMNS).
    """
    wait_for_inputs(IS_CHAINED)
    N: tl.constexpr = DIM + 1
    head = tl.program_id(0).to(tl.int64)
    column, dim = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    is_column = column < N
    last = (head * ROOM + tl.load(numbers + 5) + tl.load(numbers + 6) - 1) * N
    query = tl.load(x + last + dim, mask=dim < DIM, other=0.0)
    slopes = tl.load(maps + head * N * N + dim[:, None] * N + column[None, :],
                     mask=(dim < DIM)[:, None] & is_column[None, :], other=0.0)
    start = tl.load(base + head * N + column, mask=is_column, other=0.0)
    error = tl.load(y + last + column, mask=is_column, other=0.0) - (start + tl.sum(query[:, None] * slopes, 0))
    result = start + last_error * error * tl.load(x + last + DIM)
    tl.store(maps + head * N * N + DIM * N + column, result, mask=is_column)


@triton.jit(do_not_specialize=["num_held"])
def add_held_rows_kernel(x, y, gram, cross, num_held, decay_rows, N: tl.constexpr, ROOM: tl.constexpr,
                         TILE: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Add the held rows to the sums, the older the less. Grid (heads, n / TILE squared, 2): x^T x, x^T y.

    Unlike the other kernels it changes what it reads, so it must not run twice: it is never captured.
    """
    wait_for_inputs(IS_CHAINED)
    head = tl.program_id(0).to(tl.int64)
    TILES: tl.constexpr = (N + TILE - 1) // TILE
    i = tl.program_id(1) // TILES * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) % TILES * TILE + tl.arange(0, TILE)
    place = head * N * N + i[:, None] * N + j[None, :]
    mask = (i < N)[:, None] & (j < N)[None, :]
    added, to = x, gram
    if tl.program_id(2) == 1:
        added, to = y, cross
    total = tl.load(to + place, mask=mask, other=0.0) * tl.exp(tl.div_rn(-num_held.to(tl.float32), decay_rows))
    for first in range(0, ROOM, BLOCK):
        row = first + tl.arange(0, BLOCK)
        is_held = row < num_held
        at = (head * ROOM + row) * N
        fade = tl.exp(tl.div_rn((row + 1 - num_held).to(tl.float32), decay_rows))
        left = tl.load(x + at[None, :] + i[:, None], mask=is_held[None, :] & (i < N)[:, None], other=0.0)
        left = left * tl.where(is_held, fade, 0.0)[None, :]
        right = tl.load(added + at[:, None] + j[None, :], mask=is_held[:, None] & (j < N)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(to + place, total, mask=mask)


@triton.jit
def invert_gram_kernel(gram, inverse, ridge_share, ridge_rows, least_spread, DIM: tl.constexpr, PADDED: tl.constexpr,
                       IS_CHAINED: tl.constexpr):
    """The inverse [heads, D, D] of the centred x^T x of the queries with its ridge. Grid (heads,).

    The matrix stays in registers and is inverted in place by sweeps, one for each row: a -= c c^T / p with the row c
    and the pivot p, except that the row and the column become c / p. With c[k] = p - 1 the same formula gives that, and
    2 - 1 / p for the pivot instead of -1 / p. A pivot that is a rounding error is left out, and its unknowns become 0.
    """
    wait_for_inputs(IS_CHAINED)
    N: tl.constexpr = DIM + 1
    head = tl.program_id(0).to(tl.int64)
    gram += head * N * N
    i, j = tl.arange(0, PADDED), tl.arange(0, PADDED)
    mass = tl.load(gram + DIM * N + DIM)
    sums = tl.load(gram + DIM * N + j, mask=j < DIM, other=0.0)
    squares = tl.load(gram + j * (N + 1), mask=j < DIM, other=0.0)
    count = tl.maximum(mass, _LEAST_MASS)
    mean = tl.div_rn(sums, count)
    spread = tl.div_rn(tl.sum(tl.div_rn(squares, count) - mean * mean, 0), DIM * 1.0)
    spread = tl.maximum(spread, least_spread * tl.div_rn(tl.sum(squares, 0), DIM * count))
    ridge = (ridge_share * mass + ridge_rows) * tl.maximum(spread, 1e-6)
    share = tl.div_rn(sums, mass + _LEAST_MASS)
    diagonal = tl.maximum(squares - sums * share + ridge, ridge)
    scale = tl.where(j < DIM, tl.div_rn(1.0, tl.sqrt_rn(diagonal)), 0.0)
    is_diagonal = i[:, None] == j[None, :]
    a = tl.load(gram + i[:, None] * N + j[None, :], mask=(i < DIM)[:, None] & (j < DIM)[None, :], other=0.0)
    a = a - sums[:, None] * share[None, :] + tl.where(is_diagonal, ridge, 0.0)
    a = a * scale[:, None] * scale[None, :]
    is_kept = scale
    for k in range(DIM):
        row = tl.sum(tl.where((i == k)[:, None], a, 0.0), 0)
        pivot = tl.sum(tl.where(j == k, row, 0.0), 0)
        is_usable = pivot > _LEAST_PIVOT
        safe = tl.where(is_usable, pivot, 1.0)
        row = tl.where(j == k, safe - 1.0, row)
        factors = tl.where(is_usable, tl.div_rn(row, safe + tl.zeros([PADDED], tl.float32)), 0.0)
        is_kept = tl.where(j == k, tl.where(is_usable, is_kept, 0.0), is_kept)
        a = a - row[:, None] * factors[None, :]
    a = (tl.where(is_diagonal, 2.0, 0.0) - a) * is_kept[:, None] * is_kept[None, :]
    tl.store(inverse + head * DIM * DIM + i[:, None] * DIM + j[None, :], a,
             mask=(i < DIM)[:, None] & (j < DIM)[None, :])


@triton.jit
def solve_maps_kernel(gram, cross, inverse, maps, base, log_zero, DIM: tl.constexpr, PADDED: tl.constexpr,
                      COLUMNS: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The first D rows of maps [heads, n, n] and their `base` [heads, n], from the sums. Grid (heads, n / COLUMNS)."""
    wait_for_inputs(IS_CHAINED)
    N: tl.constexpr = DIM + 1
    head = tl.program_id(0).to(tl.int64)
    gram += head * N * N
    cross += head * N * N
    i, column = tl.arange(0, PADDED), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < N
    mass = tl.load(gram + DIM * N + DIM)
    share = tl.div_rn(tl.load(cross + DIM * N + column, mask=is_column, other=0.0), mass + _LEAST_MASS)
    slopes = tl.zeros([PADDED, COLUMNS], tl.float32)
    for first in range(0, DIM, BLOCK):
        k = first + tl.arange(0, BLOCK)
        rows = tl.load(inverse + head * DIM * DIM + i[:, None] * DIM + k[None, :],
                       mask=(i < DIM)[:, None] & (k < DIM)[None, :], other=0.0)
        known = tl.load(cross + k[:, None] * N + column[None, :], mask=(k < DIM)[:, None] & is_column[None, :],
                        other=0.0)
        sums = tl.load(gram + DIM * N + k, mask=k < DIM, other=0.0)
        slopes = tl.dot(rows, known - sums[:, None] * share[None, :], slopes, input_precision="ieee")
    tl.store(maps + head * N * N + i[:, None] * N + column[None, :], slopes,
             mask=(i < DIM)[:, None] & is_column[None, :])
    mean = tl.div_rn(tl.load(gram + DIM * N + i, mask=i < DIM, other=0.0), mass + _LEAST_MASS)
    found = share - tl.sum(mean[:, None] * slopes, 0)
    found = tl.where(column == DIM, tl.where(mass < 1e-3, log_zero, found), found)  # nothing was ever left out
    tl.store(base + head * N + column, found, mask=is_column)
