"""Triton kernels for mixtures of experts (longdraft/kernels/experts.py).

    route_kernel    the experts of each row, and their weights
    group_kernel    pairs (row, choice) in tiles, each of up to ROWS pairs of one expert
    grouped_kernel  the products of a tile's pairs with its expert
    combine_kernel  a row's experts, in ascending order, and the shared expert

Products with experts of few bits are cut into parts along their inputs, as those of any such weight are:

    grouped_few_bits_kernel  the parts of the products of a tile's pairs
    gated_pairs_kernel       the activation, from the parts of gate and up

A pair is row * CHOSEN + choice. An expert's tiles begin at `first_tile`; its pairs are `members` from first_tile * ROWS
on. A program always multiplies ROWS rows with one expert, so other pairs change where a pair is computed and never how.
The grid covers the most tiles that there can be; programs without one end at once. So nothing waits for the host.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_activations import gated, gated_sums, sigmoid
from longdraft.kernels.cuda.jit_chain import wait_for_inputs
from longdraft.kernels.cuda.jit_few_bits import sums_of_blocks
from longdraft.kernels.cuda.jit_rows import rounded, sum_of_parts


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(parts, scale, bias, like, scales, experts, weights, num_rows, NUM: tl.constexpr, PADDED: tl.constexpr,
                 CHOSEN: tl.constexpr, PADDED_CHOSEN: tl.constexpr, PARTS: tl.constexpr, HAS_SCALE: tl.constexpr,
                 HAS_BIAS: tl.constexpr, NORMALISES: tl.constexpr, HAS_SCALES: tl.constexpr, ROUNDS: tl.constexpr,
                 IS_CHAINED: tl.constexpr):
    """The CHOSEN likeliest experts [R, CHOSEN] int64 of logits [R, NUM], best first, and their weights, float32.

    The logits are the router's product, rounded to the element type of the pointer `like`. Of equal probabilities the
    lower index comes first. A row that is not finite chooses the first experts, and its weights are NaN. scales [NUM]
    float32, where HAS_SCALES. Grid (R,).
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0)
    place = tl.arange(0, PADDED)
    slot = tl.arange(0, PADDED_CHOSEN)
    mask = place < NUM
    logit = rounded(sum_of_parts(parts, row * NUM + place, place, mask, scale, bias, num_rows * NUM, PARTS, HAS_SCALE,
                                 HAS_BIAS), like)
    logit = tl.where(mask, logit, float("-inf"))
    largest = tl.max(logit, 0)
    wrong = tl.sum(((logit != logit) | (logit == float("inf"))).to(tl.int32), 0) + (largest == float("-inf"))
    power = tl.exp(logit - largest)
    left = tl.where(mask, tl.where(wrong > 0, 0.0, tl.div_rn(power, tl.sum(power, 0))), -1.0)
    chosen = tl.zeros([PADDED_CHOSEN], tl.int32)
    values = tl.zeros([PADDED_CHOSEN], tl.float32)
    total = 0.0
    for choice in tl.static_range(CHOSEN):
        best = tl.max(left, 0)
        index = tl.min(tl.where(left == best, place, PADDED), 0)
        chosen = tl.where(slot == choice, index, chosen)
        values = tl.where(slot == choice, best, values)
        total += best
        left = tl.where(place == index, -1.0, left)
    if NORMALISES:
        values = tl.div_rn(values, total)
    if HAS_SCALES:
        values = values * tl.load(scales + chosen)
    if ROUNDS:
        values = rounded(values, like)
    at = row * CHOSEN + slot
    tl.store(experts + at, chosen.to(tl.int64), mask=slot < CHOSEN)
    tl.store(weights + at, tl.where(wrong > 0, float("nan"), values), mask=slot < CHOSEN)


@triton.jit(do_not_specialize=["num_pairs"])
def group_kernel(experts, members, tile_experts, first_tile, counts, num_tiles, num_pairs, NUM: tl.constexpr,
                 PADDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Tiles of pairs with these experts [pairs]. Grid (1,).

    members             the pairs of all tiles, ROWS places each
    tile_experts        of each tile
    first_tile, counts  [NUM]: of each expert, its first tile and its number of pairs
    num_tiles           one number
    """
    wait_for_inputs(IS_CHAINED)
    expert = tl.arange(0, PADDED)
    counted = tl.zeros([PADDED], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        counted += tl.sum((own[None, :] == expert[:, None]).to(tl.int32), 1)
    tiles = (counted + ROWS - 1) // ROWS
    first = tl.cumsum(tiles, 0) - tiles
    tl.store(first_tile + expert, first, mask=expert < NUM)
    tl.store(counts + expert, counted, mask=expert < NUM)
    tl.store(num_tiles, tl.sum(tiles, 0))
    before = first * ROWS
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        own = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        is_of = (own[None, :] == expert[:, None]).to(tl.int32)
        place = tl.sum(is_of * (before[:, None] + tl.cumsum(is_of, 1) - 1), 0)
        tl.store(members + place, pair, mask=pair < num_pairs)
        tl.store(tile_experts + place // ROWS, own, mask=pair < num_pairs)
        before += tl.sum(is_of, 1)


@triton.jit
def pairs_of_tile(tile, members, tile_experts, first_tile, counts, ROWS: tl.constexpr):
    """The expert of a tile, its pairs [ROWS] int64, and which of them there are."""
    expert = tl.load(tile_experts + tile)
    place = (tile - tl.load(first_tile + expert)) * ROWS + tl.arange(0, ROWS)
    is_pair = place < tl.load(counts + expert)
    return expert, tl.load(members + tile * ROWS + tl.arange(0, ROWS), mask=is_pair, other=0).to(tl.int64), is_pair


@triton.jit
def pointer_of(table, expert, part: tl.constexpr, ELEMENT: tl.constexpr):
    """Where a part of an expert's weight is."""
    return tl.load(table + expert * 3 + part).to(tl.pointer_type(ELEMENT))


@triton.jit
def grouped_kernel(x, table, members, tile_experts, first_tile, counts, num_tiles, out, alpha, limit,
                   WIDTH: tl.constexpr, INNER: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ELEMENT: tl.constexpr, HAS_SCALE: tl.constexpr,
                   HAS_BIAS: tl.constexpr, HAS_GATE: tl.constexpr, ACTIVATION: tl.constexpr,
                   IS_CHAINED: tl.constexpr):
    """The product of each pair with its expert: out [pairs, WIDTH]. Grid (tiles, WIDTH / COLUMNS).

    x      [pairs / CHOSEN, INNER]: a pair reads the row pair // CHOSEN
    table  int64 [experts, 3]: addresses of the weight, whose elements are ELEMENT, of its scale and of its bias
    out    with HAS_GATE the activation of the first half of 2 WIDTH outputs, times the second half; else float32
    """
    wait_for_inputs(IS_CHAINED)
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        expert, pair, is_pair = pairs_of_tile(tile, members, tile_experts, first_tile, counts, ROWS)
        weight = tl.multiple_of(pointer_of(table, expert, 0, ELEMENT), 16)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        inner = tl.arange(0, BLOCK)
        x_at = x + (pair // CHOSEN)[None, :] * INNER + inner[:, None]
        first_at = weight + column.to(tl.int64)[:, None] * INNER + inner[None, :]
        first = tl.zeros([COLUMNS, ROWS], tl.float32)
        second = tl.zeros([COLUMNS, ROWS], tl.float32)
        for start in range(0, INNER, BLOCK):
            if WIDTH % COLUMNS == 0 and INNER % BLOCK == 0:
                rows = tl.load(x_at + start, mask=is_pair[None, :], other=0.0)
                weights = tl.load(first_at + start)
            else:
                is_inner = start + inner < INNER
                inside = is_column[:, None] & is_inner[None, :]
                rows = tl.load(x_at + start, mask=is_pair[None, :] & is_inner[:, None], other=0.0)
                weights = tl.load(first_at + start, mask=inside, other=0)
            first = tl.dot(weights.to(rows.dtype), rows, first, input_precision="ieee")
            if HAS_GATE:
                second_at = first_at + WIDTH * INNER + start
                if WIDTH % COLUMNS == 0 and INNER % BLOCK == 0:
                    weights = tl.load(second_at)
                else:
                    weights = tl.load(second_at, mask=inside, other=0)
                second = tl.dot(weights.to(rows.dtype), rows, second, input_precision="ieee")
        if HAS_SCALE:
            scale = pointer_of(table, expert, 1, tl.float32)
            first = first * tl.load(scale + column, mask=is_column, other=0.0)[:, None]
            if HAS_GATE:
                second = second * tl.load(scale + WIDTH + column, mask=is_column, other=0.0)[:, None]
        if HAS_BIAS:
            bias = pointer_of(table, expert, 2, tl.float32)
            first = first + tl.load(bias + column, mask=is_column, other=0.0)[:, None]
            if HAS_GATE:
                second = second + tl.load(bias + WIDTH + column, mask=is_column, other=0.0)[:, None]
        if HAS_GATE:
            first = gated(rounded(first, out), rounded(second, out), out, alpha, limit, ACTIVATION)
        tl.store(out + pair[None, :] * WIDTH + column[:, None], first.to(out.dtype.element_ty),
                 mask=is_pair[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def grouped_few_bits_kernel(x, table, members, tile_experts, first_tile, counts, num_tiles, parts, num_pairs,
                            BITS: tl.constexpr, FORM: tl.constexpr, OFFSET: tl.constexpr, OUT: tl.constexpr,
                            INNER: tl.constexpr, BLOCKS: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr,
                            COLUMNS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
                            IS_CHAINED: tl.constexpr):
    """The product of each pair with its expert of few bits: parts [SPLITS, pairs, OUT] float32.

    x      [pairs / CHOSEN, INNER]: a pair reads the row pair // CHOSEN
    table  int64 [experts, 3]: addresses of the weight (`few_bits_kernel`, whose sums these are) and of the bias,
           which is added later

    Grid (tiles, OUT / COLUMNS, SPLITS), rounded up.
    """
    EACH: tl.constexpr = (BLOCKS + SPLITS - 1) // SPLITS
    wait_for_inputs(IS_CHAINED)
    tile, of_weight, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile < tl.load(num_tiles):
        expert, pair, is_pair = pairs_of_tile(tile, members, tile_experts, first_tile, counts, ROWS)
        weight = tl.multiple_of(pointer_of(table, expert, 0, tl.int32), 16)
        first = part * EACH
        total = sums_of_blocks(x, weight, of_weight, pair // CHOSEN, is_pair, first,
                               tl.minimum(first + EACH, BLOCKS), BITS, FORM, OFFSET, INNER, BLOCKS, ROWS, COLUMNS,
                               STAGES)
        column = of_weight * COLUMNS + tl.arange(0, COLUMNS)
        at = parts + (part.to(tl.int64) * num_pairs + pair[None, :]) * OUT + column[:, None]
        tl.store(at, total, mask=is_pair[None, :] & (column < OUT)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def gated_pairs_kernel(parts, table, experts, out, num_pairs, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                       ACTIVATION: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr,
                       IS_CHAINED: tl.constexpr):
    """The activation of each pair, from the parts of its product [pairs, 2 WIDTH]: out [pairs, WIDTH].

    table, experts  as in `grouped_few_bits_kernel`; the expert of each pair. Grid (pairs, WIDTH / BLOCK).
    """
    wait_for_inputs(IS_CHAINED)
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = parts
    if HAS_BIAS:
        bias = pointer_of(table, tl.load(experts + pair), 2, tl.float32)
    gated_sums(parts, pair, column, parts, bias, out, num_pairs, alpha, limit, WIDTH, ACTIVATION, PARTS, False,
               HAS_BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def combine_kernel(given, table, experts, weights, shared, shared_scale, shared_bias, gate, gate_scale, gate_bias, out,
                   num_rows, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, PADDED_CHOSEN: tl.constexpr,
                   BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, SHARED_PARTS: tl.constexpr,
                   SHARED_SCALE: tl.constexpr, SHARED_BIAS: tl.constexpr, GATE_PARTS: tl.constexpr,
                   GATE_SCALE: tl.constexpr, GATE_BIAS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """The weighted sum of a row's experts in ascending order: out [R, WIDTH]. Grid (R, WIDTH / BLOCK).

    given             [PARTS, R CHOSEN, WIDTH] float32: the parts of each pair's product
    table             as in `grouped_kernel`: the bias, where HAS_BIAS, is added to the sum of the parts
    experts, weights  [R, CHOSEN]
    shared, gate      the products [R, WIDTH] and [R, 1] of the shared expert and of its gate: shared * sigmoid(gate) is
                      added last. SHARED_PARTS is 0 where there is none
    """
    wait_for_inputs(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    slot = tl.arange(0, PADDED_CHOSEN)
    none = 1 << 30
    chosen = tl.load(experts + row * CHOSEN + slot, mask=slot < CHOSEN, other=none).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(CHOSEN):
        expert = tl.min(chosen, 0)
        pair = row * CHOSEN + tl.min(tl.where(chosen == expert, slot, PADDED_CHOSEN), 0)
        bias = given
        if HAS_BIAS:
            bias = pointer_of(table, expert, 2, tl.float32)
        product = sum_of_parts(given, pair * WIDTH + column, column, mask, given, bias,
                               num_rows.to(tl.int64) * (CHOSEN * WIDTH), PARTS, False, HAS_BIAS)
        total += product * tl.load(weights + pair)
        chosen = tl.where(slot == pair - row * CHOSEN, none, chosen)
    if SHARED_PARTS > 0:
        weight = sigmoid(sum_of_parts(gate, row, 0, row >= 0, gate_scale, gate_bias, num_rows.to(tl.int64), GATE_PARTS,
                                      GATE_SCALE, GATE_BIAS))
        total += weight * sum_of_parts(shared, row * WIDTH + column, column, mask, shared_scale, shared_bias,
                                       num_rows.to(tl.int64) * WIDTH, SHARED_PARTS, SHARED_SCALE, SHARED_BIAS)
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), mask=mask)
