"""Triton kernels for the operations between the matrix products, each on one row.

A matrix product arrives as partial sums [P, R, N] float32 (`jit_linear`). The kernel that reads it adds the parts in
order, multiplies by the scale (int8 weights), adds the bias, and rounds to the model's dtype.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_cache_rows import store_row
from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_few_bits import numbers_at


@triton.jit
def sum_of_parts(parts, at, column, mask, scale, bias, num, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
                 HAS_BIAS: tl.constexpr):
    """A product's elements at offsets `at`, float32, before rounding. A part has `num` elements."""
    total = tl.load(parts + at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + num * part + at, mask=mask, other=0.0)
    if HAS_SCALE:
        total = total * tl.load(scale + column, mask=mask, other=0.0)
    if HAS_BIAS:
        total = total + tl.load(bias + column, mask=mask, other=0.0)
    return total


@triton.jit
def rounded(x, like):
    """x rounded to the element type of the pointer `like`, as float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(x, weight, width: tl.constexpr, squares, eps, like, ROUNDS_ONCE: tl.constexpr):
    """RMS norm: x / sqrt(squares / width + eps) * weight, rounded as `rounded` does.

    `squares` is the sum of the row's squares. Unless ROUNDS_ONCE, the normalised row is also rounded before `weight`.
    """
    scaled = x * tl.rsqrt(tl.div_rn(squares, width * 1.0) + eps)
    if not ROUNDS_ONCE:
        scaled = rounded(scaled, like)
    return rounded(weight * scaled, like)


@triton.jit(do_not_specialize=["num_rows"])
def sum_parts_kernel(parts, scale, bias, out, rest, num_rows, WIDTH: tl.constexpr, CUT: tl.constexpr,
                     BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
                     IS_CHAINED: tl.constexpr):
    """The product [R, WIDTH], rounded to the dtype of out. Grid (R, WIDTH / BLOCK).

    out, rest  [R, CUT] and [R, WIDTH - CUT], of one dtype
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = sum_of_parts(parts, row * WIDTH + column, column, mask, scale, bias, num_rows.to(tl.int64) * WIDTH, PARTS,
                         HAS_SCALE, HAS_BIAS)
    total = total.to(out.dtype.element_ty)
    tl.store(out + row * CUT + column, total, mask=column < CUT)
    if CUT < WIDTH:
        tl.store(rest + row * (WIDTH - CUT) + column - CUT, total, mask=mask & (column >= CUT))


@triton.jit
def rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
                    IS_CHAINED: tl.constexpr):
    """RMS norm of rows x [R, WIDTH]. Grid (R,)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    result = normed(value, scale, WIDTH, tl.sum(value * value, 0), eps, out, ROUNDS_ONCE)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_and_norm_kernel(x, parts, scale, bias, own_norm, next_norm, x_out, out, num_rows, factor, scalar, eps,
                        WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
                        HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SCALAR: tl.constexpr,
                        NORMS_OWN: tl.constexpr, NORMS_NEXT: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
                        IS_CHAINED: tl.constexpr):
    """The residual sum, and the norm of the next operation. Grid (R,).

    x_out = x + product, where the product is first normalised by own_norm (NORMS_OWN) and multiplied by factor
    (HAS_FACTOR), and their sum is multiplied by scalar (HAS_SCALAR); out = x_out normalised by next_norm (NORMS_NEXT),
    otherwise untouched.
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    at = row * WIDTH + column
    given = rounded(sum_of_parts(parts, at, column, mask, scale, bias, num_rows.to(tl.int64) * WIDTH, PARTS, HAS_SCALE,
                                 HAS_BIAS), x)
    if NORMS_OWN:
        weight = tl.load(own_norm + column, mask=mask, other=0.0).to(tl.float32)
        given = normed(given, weight, WIDTH, tl.sum(given * given, 0), eps, x, ROUNDS_ONCE)
    if HAS_FACTOR:
        given = rounded(given * factor, x)
    result = rounded(tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + given, x)
    if HAS_SCALAR:
        result = rounded(result * scalar, x)
    tl.store(x_out + at, result.to(x_out.dtype.element_ty), mask=mask)
    if NORMS_NEXT:
        weight = tl.load(next_norm + column, mask=mask, other=0.0).to(tl.float32)
        result = normed(result, weight, WIDTH, tl.sum(result * result, 0), eps, x, ROUNDS_ONCE)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def embedding_of(token, table, scale, column, mask, factor, like, HIDDEN: tl.constexpr, HAS_SCALE: tl.constexpr,
                 HAS_FACTOR: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr):
    """Columns of a token's embedding in the element type of the pointer `like`.

    table               [V, HIDDEN] in the model's dtype, or int8 with a scale [V] float32, or of few bits
    BITS, FORM, OFFSET  of a table of few bits (jit_few_bits); 0: of another one
    """
    if BITS == 0:
        value = tl.load(table + token.to(tl.int64) * HIDDEN + column, mask=mask, other=0).to(tl.float32)
    else:
        value = numbers_at(table, token + column * 0, column, mask, BITS, FORM, OFFSET, (HIDDEN + 127) // 128, 128)
    if HAS_SCALE:
        value = value * tl.load(scale + token)
    value = rounded(value, like)
    if HAS_FACTOR:
        value = value * factor
    return value.to(like.dtype.element_ty)


@triton.jit
def embed_rows_kernel(tokens, table, scale, x, factor, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
                      HAS_SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr,
                      OFFSET: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The embeddings x [R, HIDDEN] of tokens [R] int32. Grid (R, HIDDEN / BLOCK)."""
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < HIDDEN
    value = embedding_of(tl.load(tokens + row), table, scale, column, mask, factor, x, HIDDEN, HAS_SCALE, HAS_FACTOR,
                         BITS, FORM, OFFSET)
    tl.store(x + row * HIDDEN + column, value, mask=mask)


@triton.jit
def rope_kernel(x, cos, sin, out, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Rotary position embedding of x [R, HEADS, 2 HALF], halves paired. Grid (R, HEADS)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, PADDED)
    mask = dim < HALF
    at = (row * HEADS + head) * (2 * HALF) + dim
    c, s = tl.load(cos + row * HALF + dim, mask=mask, other=0.0), tl.load(sin + row * HALF + dim, mask=mask, other=0.0)
    first = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "capacity", "text_rows"])
def finish_qkv_kernel(parts, scale, bias, q_norm, k_norm, v_norm, cos, sin, where, content, q, k, v, gate, k_store,
                      v_store, k_scale, v_scale, table, num_rows, capacity, text_rows, eps, factor,
                      HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GATES: tl.constexpr, HALF: tl.constexpr,
                      PADDED: tl.constexpr, ALL_PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
                      HAS_BIAS: tl.constexpr, NORMS: tl.constexpr, HAS_V_NORM: tl.constexpr, ROTATES: tl.constexpr,
                      TURNS: tl.constexpr, Q_TURN: tl.constexpr, K_TURN: tl.constexpr, KV_ROW: tl.constexpr,
                      KV_HEAD: tl.constexpr, ROUNDS_ONCE: tl.constexpr, HAS_TABLE: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """Turn the QKV product into queries, keys and values: norms, rotation, and writes to the store.

    content, q  [R, H, D]: the queries before the rotation, and after it and times factor
    k, v        [R, Hkv, D], whose rows are KV_ROW elements apart, and whose heads KV_HEAD; also written to the slots
                where[1] + row of the store. With KV_HEADS = 0 the product has queries only
    gate        [R, H, D], the last heads of the product, where GATES is H and not 0
    cos, sin    [R, TURNS]: queries are turned by the columns from Q_TURN on, keys by those from K_TURN on
    table       int64 [texts, 5], where HAS_TABLE: the store of each text, as in `attend_split_kernel`. A text has
                text_rows rows, and two numbers of `where`
    NORMS       of queries and keys. 0: none, 1: each head is normalised by itself, 2: all heads of a row as one vector
    HAS_V_NORM  each head of the values is normalised by itself

    Grid (R, H + 2 Hkv + GATES): a program computes one head of one row.
    """
    wait_for_inputs(IS_CHAINED)
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS + GATES) * DIM
    place = row  # in its text
    if HAS_TABLE:
        text = row // text_rows
        entry = table + text * 5
        k_store, v_store = tl.load(entry).to(k_store.dtype), tl.load(entry + 1).to(v_store.dtype)
        k_scale, v_scale = tl.load(entry + 2).to(k_scale.dtype), tl.load(entry + 3).to(v_scale.dtype)
        capacity = tl.load(entry + 4)
        where += 2 * text
        place = row - text * text_rows
    num = num_rows.to(tl.int64) * WIDTH
    half = tl.arange(0, PADDED)
    mask = half < HALF
    column = unit * DIM + half
    first = rounded(sum_of_parts(parts, row * WIDTH + column, column, mask, scale, bias, num, PARTS, HAS_SCALE,
                                 HAS_BIAS), q)
    second = rounded(sum_of_parts(parts, row * WIDTH + column + HALF, column + HALF, mask, scale, bias, num, PARTS,
                                  HAS_SCALE, HAS_BIAS), q)
    is_query, is_key = unit < HEADS, (unit >= HEADS) & (unit < HEADS + KV_HEADS)
    is_gate = unit >= HEADS + 2 * KV_HEADS
    if HAS_V_NORM:
        if (unit >= HEADS + KV_HEADS) & (unit < HEADS + 2 * KV_HEADS):
            of_values = tl.sum(first * first, 0) + tl.sum(second * second, 0)
            low = tl.load(v_norm + half, mask=mask, other=0.0).to(tl.float32)
            high = tl.load(v_norm + HALF + half, mask=mask, other=0.0).to(tl.float32)
            first = normed(first, low, DIM, of_values, eps, q, ROUNDS_ONCE)
            second = normed(second, high, DIM, of_values, eps, q, ROUNDS_ONCE)
    if NORMS > 0:
        if unit < HEADS + KV_HEADS:
            if NORMS == 1:
                squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
                norm_at = 0
            else:
                begin = tl.where(is_query, 0, HEADS * DIM)
                every = tl.arange(0, ALL_PADDED)
                inside = every < tl.where(is_query, HEADS * DIM, KV_HEADS * DIM)
                whole = rounded(sum_of_parts(parts, row * WIDTH + begin + every, begin + every, inside, scale, bias,
                                             num, PARTS, HAS_SCALE, HAS_BIAS), q)
                squares = tl.sum(whole * whole, 0)
                norm_at = unit * DIM - begin
            # Triton cannot select between two pointers, so both norms are loaded under masks and added.
            of_query, of_key = half < tl.where(is_query, HALF, 0), half < tl.where(is_key, HALF, 0)
            low = tl.load(q_norm + norm_at + half, mask=of_query, other=0.0).to(tl.float32) \
                + tl.load(k_norm + norm_at + half, mask=of_key, other=0.0).to(tl.float32)
            high = tl.load(q_norm + norm_at + HALF + half, mask=of_query, other=0.0).to(tl.float32) \
                + tl.load(k_norm + norm_at + HALF + half, mask=of_key, other=0.0).to(tl.float32)
            if NORMS == 1:
                first = normed(first, low, DIM, squares, eps, q, ROUNDS_ONCE)
                second = normed(second, high, DIM, squares, eps, q, ROUNDS_ONCE)
            else:
                count = tl.where(is_query, HEADS * DIM * 1.0, KV_HEADS * DIM * 1.0)
                squares = tl.div_rn(squares, count)
                first = normed(first, low, 1, squares, eps, q, ROUNDS_ONCE)
                second = normed(second, high, 1, squares, eps, q, ROUNDS_ONCE)
    if is_query:
        at = (row * HEADS + unit) * DIM + half
        tl.store(content + at, first.to(content.dtype.element_ty), mask=mask)
        tl.store(content + at + HALF, second.to(content.dtype.element_ty), mask=mask)
    if unit < HEADS + KV_HEADS:
        if ROTATES:
            turn = row * TURNS + tl.where(is_query, Q_TURN, K_TURN) + half
            c, s = tl.load(cos + turn, mask=mask, other=0.0), tl.load(sin + turn, mask=mask, other=0.0)
        else:
            c = tl.zeros([PADDED], tl.float32) + 1.0
            s = tl.zeros([PADDED], tl.float32)
        times = tl.where(is_query, factor, 1.0)
        c, s = c * times, s * times
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    first, second = rounded(first, q), rounded(second, q)
    if is_query:
        at = (row * HEADS + unit) * DIM + half
        tl.store(q + at, first.to(q.dtype.element_ty), mask=mask)
        tl.store(q + at + HALF, second.to(q.dtype.element_ty), mask=mask)
    elif is_gate:
        at = (row * GATES + unit - HEADS - 2 * KV_HEADS) * DIM + half
        tl.store(gate + at, first.to(gate.dtype.element_ty), mask=mask)
        tl.store(gate + at + HALF, second.to(gate.dtype.element_ty), mask=mask)
    else:
        head = tl.where(is_key, unit - HEADS, unit - HEADS - KV_HEADS)
        slot = head.to(tl.int64) * capacity + tl.load(where + 1) + place
        at = row * KV_ROW + head * KV_HEAD + half
        if is_key:
            tl.store(k + at, first.to(k.dtype.element_ty), mask=mask)
            tl.store(k + at + HALF, second.to(k.dtype.element_ty), mask=mask)
            store_row(first, second, mask, slot, k_store, k_scale, HALF, half)
        else:
            tl.store(v + at, first.to(v.dtype.element_ty), mask=mask)
            tl.store(v + at + HALF, second.to(v.dtype.element_ty), mask=mask)
            store_row(first, second, mask, slot, v_store, v_scale, HALF, half)


@triton.jit(do_not_specialize=["text_rows"])
def map_remainder_kernel(content, table, remainder, text_rows, HEADS: tl.constexpr, DIM: tl.constexpr,
                         COLUMNS: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The remainder [R, H, D + 1] of each query, by an affine map of its content. Grid (R, H, (D + 1) / COLUMNS).

    content  [R, H, D]: the queries before the rotation
    table    int64 [texts]: the address of each text's map [H, D + 1, D + 1] float32, whose first D rows are multiplied
             by the content, and whose last row is added; 0: nothing remains of its keys. A text has text_rows rows

    BLOCK rows of the map are read at a time, so that a program waits for memory only D / BLOCK times.
    """
    wait_for_inputs(IS_CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < DIM + 1
    address = tl.load(table + row // text_rows)
    inside = column < tl.where(address != 0, DIM + 1, 0)
    base = address.to(remainder.dtype) + head * (DIM + 1) * (DIM + 1)
    total = tl.load(base + DIM * (DIM + 1) + column, mask=inside, other=0.0)
    for first in range(0, DIM, BLOCK):
        dim = first + tl.arange(0, BLOCK)
        value = tl.load(content + (row * HEADS + head) * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        rows = tl.load(base + dim[:, None] * (DIM + 1) + column[None, :], mask=(dim < DIM)[:, None] & inside[None, :],
                       other=0.0)
        total += tl.sum(value[:, None] * rows, 0)
    total = tl.where(inside | (column < DIM), total, float("-inf"))
    tl.store(remainder + (row * HEADS + head) * (DIM + 1) + column, total, mask=mask)
