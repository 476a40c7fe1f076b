"""What is done to rows between the matrix products, each row by itself: what runs on the device.

The products come as parts [P, R, N] float32 (`jit_linear`); who reads them adds the parts in order, scales (int8
weights), adds the bias and rounds to the model's dtype, which is the linear's result.
"""

import triton
import triton.language as tl


@triton.jit
def joined(parts, at, column, mask, scale, bias, num, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
           HAS_BIAS: tl.constexpr):
    """Sums at offsets `at` of each part, which is `num` long: float32, not rounded yet."""
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
    """Rounded to the dtype of what the pointer `like` points to; float32 again."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(x, weight, width: tl.constexpr, squares, eps, like, ROUNDS_ONCE: tl.constexpr):
    """x / sqrt(squares / width + eps) * weight; `squares` is the sum over the row. float32, rounded to dtype."""
    scaled = x * tl.rsqrt(tl.div_rn(squares, width * 1.0) + eps)
    if not ROUNDS_ONCE:
        scaled = rounded(scaled, like)
    return rounded(weight * scaled, like)


@triton.jit(do_not_specialize=["num_rows"])
def sum_parts(parts, scale, bias, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
              HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The linear's result [R, WIDTH] in the dtype of out. Grid (R, WIDTH / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    total = joined(parts, row * WIDTH + column, column, mask, scale, bias, num_rows.to(tl.int64) * WIDTH, PARTS,
                   HAS_SCALE, HAS_BIAS)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm(x, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROUNDS_ONCE: tl.constexpr):
    """Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    result = normed(value, scale, WIDTH, tl.sum(value * value, 0), eps, out, ROUNDS_ONCE)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_and_norm(x, parts, scale, bias, own_norm, next_norm, x_out, out, num_rows, factor, eps,
                 WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
                 HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, NORMS_OWN: tl.constexpr,
                 NORMS_NEXT: tl.constexpr, ROUNDS_ONCE: tl.constexpr):
    """x + what a linear gave (normalised by own_norm; times factor): x_out; that by next_norm, or as it is: out.
    Grid (R,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    at = row * WIDTH + column
    given = rounded(joined(parts, at, column, mask, scale, bias, num_rows.to(tl.int64) * WIDTH, PARTS, HAS_SCALE,
                           HAS_BIAS), x)
    if NORMS_OWN:
        weight = tl.load(own_norm + column, mask=mask, other=0.0).to(tl.float32)
        given = normed(given, weight, WIDTH, tl.sum(given * given, 0), eps, x, ROUNDS_ONCE)
    if HAS_FACTOR:
        given = rounded(given * factor, x)
    result = rounded(tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + given, x)
    tl.store(x_out + at, result.to(x_out.dtype.element_ty), mask=mask)
    if NORMS_NEXT:
        weight = tl.load(next_norm + column, mask=mask, other=0.0).to(tl.float32)
        result = normed(result, weight, WIDTH, tl.sum(result * result, 0), eps, x, ROUNDS_ONCE)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu(gate):
    """gate / (1 + exp(-gate)); exp of a large number is infinity, and the result 0 as it should be."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["num_rows"])
def swiglu(parts, scale, bias, out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
           HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """silu(gate) * up from the parts of a linear of 2 WIDTH: out [R, WIDTH]. Grid (R, WIDTH / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    num = num_rows.to(tl.int64) * (2 * WIDTH)
    at = row * (2 * WIDTH) + column
    gate = rounded(joined(parts, at, column, mask, scale, bias, num, PARTS, HAS_SCALE, HAS_BIAS), out)
    up = rounded(joined(parts, at + WIDTH, column + WIDTH, mask, scale, bias, num, PARTS, HAS_SCALE, HAS_BIAS), out)
    tl.store(out + row * WIDTH + column, (rounded(silu(gate), out) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_rows(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The same of rows [R, 2 WIDTH] in the model's dtype."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row * (2 * WIDTH) + column
    gate = tl.load(gate_up + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (rounded(silu(gate), out) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope(x, cos, sin, out, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Grid (R, HEADS)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, PADDED)
    mask = dim < HALF
    at = (row * HEADS + head) * (2 * HALF) + dim
    c, s = tl.load(cos + row * HALF + dim, mask=mask, other=0.0), tl.load(sin + row * HALF + dim, mask=mask, other=0.0)
    first = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at + HALF, (second * c + first * s).to(out.dtype.element_ty), mask=mask)


@triton.jit
def put(first, second, mask, at, scale_at, store, scales, HALF: tl.constexpr, half, IS_SCALED: tl.constexpr):
    """A row in two halves into a store, with a scale of its own where the store is of 8 bits.

    The largest magnitude becomes 448, the largest number of float8 e4m3. Every step rounds once, so the bits are the
    same wherever this is done.
    """
    if IS_SCALED:
        largest = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
        scale = tl.div_rn(largest, 448.0)
        divisor = tl.where(scale > 0, scale, 1.0)
        first, second = tl.div_rn(first, divisor), tl.div_rn(second, divisor)
        tl.store(scales + scale_at, scale)
    tl.store(store + at + half, first.to(store.dtype.element_ty), mask=mask)
    tl.store(store + at + HALF + half, second.to(store.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "capacity"])
def rotate(parts, scale, bias, q_norm, k_norm, cos, sin, where, content, q, k, v, k_store, v_store, k_scale, v_scale,
           num_rows, capacity, eps, factor, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
           PADDED: tl.constexpr, ALL_PADDED: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
           HAS_BIAS: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr, ROUNDS_ONCE: tl.constexpr,
           IS_SCALED: tl.constexpr):
    """Behind the linear of queries, keys and values: norms, rotation, and drafted keys and values into the store.

    content, q [R, H, D]: queries before and after the rotation (and times factor); k, v [R, Hkv, D], and the store's
    slots where[1] + row. NORMS: 0 none, 1 each head by itself, 2 all heads of a row as one. Grid (R, H + 2 Hkv).
    """
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    num = num_rows.to(tl.int64) * WIDTH
    half = tl.arange(0, PADDED)
    mask = half < HALF
    column = unit * DIM + half
    first = rounded(joined(parts, row * WIDTH + column, column, mask, scale, bias, num, PARTS, HAS_SCALE, HAS_BIAS), q)
    second = rounded(joined(parts, row * WIDTH + column + HALF, column + HALF, mask, scale, bias, num, PARTS,
                            HAS_SCALE, HAS_BIAS), q)
    is_query, is_key = unit < HEADS, (unit >= HEADS) & (unit < HEADS + KV_HEADS)
    if NORMS > 0:
        if unit < HEADS + KV_HEADS:
            if NORMS == 1:
                squares = tl.sum(first * first, 0) + tl.sum(second * second, 0)
                norm_at = 0
            else:
                begin = tl.where(is_query, 0, HEADS * DIM)
                every = tl.arange(0, ALL_PADDED)
                inside = every < tl.where(is_query, HEADS * DIM, KV_HEADS * DIM)
                whole = rounded(joined(parts, row * WIDTH + begin + every, begin + every, inside, scale, bias, num,
                                       PARTS, HAS_SCALE, HAS_BIAS), q)
                squares = tl.sum(whole * whole, 0)
                norm_at = unit * DIM - begin
            # A pointer cannot be chosen, what it points to can.
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
            c = tl.load(cos + row * HALF + half, mask=mask, other=0.0)
            s = tl.load(sin + row * HALF + half, mask=mask, other=0.0)
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
    else:
        head = tl.where(is_key, unit - HEADS, unit - HEADS - KV_HEADS)
        slot = head.to(tl.int64) * capacity + tl.load(where + 1) + row
        at = (row * KV_HEADS + head) * DIM + half
        if is_key:
            tl.store(k + at, first.to(k.dtype.element_ty), mask=mask)
            tl.store(k + at + HALF, second.to(k.dtype.element_ty), mask=mask)
            put(first, second, mask, slot * DIM, slot, k_store, k_scale, HALF, half, IS_SCALED)
        else:
            tl.store(v + at, first.to(v.dtype.element_ty), mask=mask)
            tl.store(v + at + HALF, second.to(v.dtype.element_ty), mask=mask)
            put(first, second, mask, slot * DIM, slot, v_store, v_scale, HALF, half, IS_SCALED)


@triton.jit
def map_remainder(content, function, remainder, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr):
    """rest [R, H, D + 1] of queries [R, H, D] by their function [H, D + 1, D + 1]: its first D rows times the query,
    plus its last. Grid (R, H)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    mask = column < DIM + 1
    base = function + head.to(tl.int64) * (DIM + 1) * (DIM + 1)
    total = tl.load(base + DIM * (DIM + 1) + column, mask=mask, other=0.0)
    for dim in range(DIM):
        value = tl.load(content + (row * HEADS + head) * DIM + dim).to(tl.float32)
        total += value * tl.load(base + dim * (DIM + 1) + column, mask=mask, other=0.0)
    tl.store(remainder + (row * HEADS + head) * (DIM + 1) + column, total, mask=mask)
