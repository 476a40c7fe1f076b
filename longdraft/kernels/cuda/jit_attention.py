"""Triton kernels for the attention of a tree's rows over a long prefix, computed in splits.

The cut into splits depends on the position alone (`attention.Splits`). Splits are cut into blocks. A split is one
online softmax (Milakov and Gimelshein 2018) over its blocks in order; `merge_splits_kernel` merges the splits in order.

    whole splits of the prefix   [ split | split | ... | split ]
                                 a program computes one split, for many lanes
    the end of each row                                        [ rest of the prefix | path | the row ]
                                 a program computes one split, for the lanes of one row

A *lane* is one query head of one row. Both kinds of programs are one launch, and run at the same time: an end begins
where its split begins, so it waits for nothing. It finds drafted keys through the row's path. Both kinds execute the
same compiled loops, so a node of a tree gets the bits of plain decoding, whatever code the compiler generates. Numbers
that change between launches are read from memory: CUDA graphs require it, and such a number must not select another
compiled program.

    where  int64 [2]: the number of committed positions; the slot of drafted row 0
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_cache_rows import codes_of, place_in_row
from longdraft.kernels.cuda.jit_chain import wait_for_inputs

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def split_of(position, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, LONG: tl.constexpr):
    """The split that contains a position."""
    return tl.where(position < NUM_SHORT * SHORT, position // SHORT,
                    NUM_SHORT + (position - NUM_SHORT * SHORT) // LONG)


@triton.jit
def split_start(split, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, LONG: tl.constexpr):
    return tl.where(split < NUM_SHORT, split * SHORT, NUM_SHORT * SHORT + (split - NUM_SHORT) * LONG)


@triton.jit
def store_of_text(entry, k, v, k_scale, v_scale):
    """The store of a text: keys, values, their scales, and the number of slots.

    entry  int64 [5]: see `jit_kv_store`. k, v, k_scale, v_scale are pointers of the same types
    """
    return (tl.multiple_of(tl.load(entry).to(k.dtype), 16), tl.multiple_of(tl.load(entry + 1).to(v.dtype), 16),
            tl.load(entry + 2).to(k_scale.dtype), tl.load(entry + 3).to(v_scale.dtype), tl.load(entry + 4))


@triton.jit
def block_step(queries, keys, values, key_scale, value_scale, value_least, dim, is_seen, max_score, weight_sum,
               value_sum, factor, cap, DIM: tl.constexpr, IS_MASKED: tl.constexpr, HAS_CAP: tl.constexpr):
    """One block of an online softmax: its new maximum, sum of weights and weighted sum of values.

    queries  [LANES, PADDED]; keys [PADDED, BLOCK]; values [BLOCK, PADDED], as a store holds them (`jit_cache_rows`)
    key_scale, value_scale, value_least  [BLOCK], where the format has them
    is_seen  [LANES, BLOCK]: the keys that a lane sees, where IS_MASKED; otherwise every lane sees all
    """
    scores = tl.dot(queries, codes_of(keys, dim[:, None], queries, DIM), input_precision="ieee") * factor
    if keys.dtype == tl.int8:
        scores = scores * key_scale[None, :]
    if HAS_CAP:  # cap tanh(score / cap)
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / cap))))
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    rescale = tl.exp2(max_score - safe_max)
    weight_sum = weight_sum * rescale + tl.sum(weights, 1)
    value_sum = value_sum * rescale[:, None]
    if values.dtype == tl.uint8:
        value_sum += tl.sum(weights * value_least[None, :], 1)[:, None]
    if keys.dtype == tl.int8:
        weights = weights * value_scale[None, :]
    value_sum = tl.dot(weights.to(queries.dtype), codes_of(values, dim[None, :], queries, DIM), value_sum,
                       input_precision="ieee")
    return new_max, weight_sum, value_sum


@triton.jit(do_not_specialize=["end_splits", "num_rows", "capacity", "num_splits", "window"])
def attend_split_kernel(q, k, v, k_scale, v_scale, where, path, depths, max_scores, weight_sums, value_sums, table,
                        end_splits, num_rows, capacity, num_splits, window, factor, cap,
                        KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
                        LANES: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr,
                        LONG: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, STAGES: tl.constexpr,
                        HAS_TABLE: tl.constexpr, IS_CHAINED: tl.constexpr):
    """One split for some lanes of a KV head.

    q                        [R, H, D]
    k, v                     [Hkv, capacity, D], or D / 2 bytes of values (`jit_cache_rows`), with scales
                             [Hkv, capacity] float32, or pairs of them
    path                     [R, num_rows] int32: the drafted row at each depth of a row's path
    depths                   [R] int32
    max_scores, weight_sums  [R, H, S] float32: the maximum of the scores in base 2, the sum of the weights
    value_sums               [R, H, S, D] float32: the weighted sum of the values
    end_splits               splits of a row's end at most
    window                   positions that a row sees, itself included, where HAS_WINDOW
    factor                   log2(e) / sqrt(D)
    cap                      of the scores, times log2(e), where HAS_CAP
    num_rows                 of a text
    table                    int64 [texts, 5], where HAS_TABLE: the store of each text (`store_of_text`) in place of k,
                             v and their scales

    Grid (end_splits * Hkv * tiles of ends + whole splits * Hkv * tiles, texts). Tiles come first, so that programs that
    read the same keys run at the same time. Ends begin first, then whole splits from the last one: the long ones, which
    take longest. The splits of an end are counted from the one where the prefix ends, and its tiles hold lanes of one
    row.
    """
    wait_for_inputs(IS_CHAINED)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    IS_SCALED: tl.constexpr = k.dtype.element_ty == tl.int8
    IS_PACKED: tl.constexpr = v.dtype.element_ty == tl.uint8
    WIDTH: tl.constexpr = DIM // 2 if IS_PACKED else DIM  # of a value
    if HAS_TABLE:
        text = tl.program_id(1).to(tl.int64)
        k, v, k_scale, v_scale, capacity = store_of_text(table + text * 5, k, v, k_scale, v_scale)
        where += 2 * text
        q += text * num_rows * HEADS * DIM
        path += text * num_rows * num_rows
        depths += text * num_rows
    TILES: tl.constexpr = (GROUP + LANES - 1) // LANES  # of one row
    num_ends = end_splits * KV_HEADS * num_rows * TILES
    is_end = tl.program_id(0) < num_ends
    program = tl.where(is_end, tl.program_id(0), tl.program_id(0) - num_ends)
    tiles = tl.where(is_end, num_rows * TILES, (num_rows * GROUP + LANES - 1) // LANES)
    tile = program % tiles
    kv_head = program // tiles % KV_HEADS
    place_of_split = program // tiles // KV_HEADS
    length = tl.load(where)
    drafts_at = tl.load(where + 1)
    shared_end = length // BLOCK * BLOCK  # the full blocks of the prefix
    first_of_end = split_of(shared_end, SHORT, NUM_SHORT, LONG)

    row = tile // TILES
    first_lane = tl.where(is_end, row * GROUP + tile % TILES * LANES, tile * LANES)
    end_lane = tl.where(is_end, row * GROUP + GROUP, num_rows * GROUP)
    lane = first_lane + tl.arange(0, LANES)
    is_lane = lane < end_lane
    lane_row = lane // GROUP
    head = kv_head * GROUP + lane % GROUP

    whole_splits = (tl.num_programs(0) - num_ends) // (tiles * KV_HEADS)
    split = tl.where(is_end, first_of_end + place_of_split, whole_splits - 1 - place_of_split)
    start = split_start(split, SHORT, NUM_SHORT, LONG)
    own = length + tl.load(depths + row, mask=is_end, other=0)  # of an end: the row's own position
    stop = split_start(split + 1, SHORT, NUM_SHORT, LONG)
    stop = tl.where(is_end, tl.minimum(stop, own + 1), tl.where(split < first_of_end, stop, start))
    middle = tl.where(is_end, tl.maximum(start, tl.minimum(stop, shared_end)), stop)

    if start < stop:
        dim = tl.arange(0, PADDED)
        is_dim = dim < DIM
        value_at = place_in_row(v, dim, DIM)
        at = (lane_row * HEADS + head).to(tl.int64)
        queries = tl.load(q + at[:, None] * DIM + dim[None, :], mask=is_lane[:, None] & is_dim[None, :], other=0.0)
        oldest = tl.zeros([LANES], tl.int32)  # position that a lane sees
        if HAS_WINDOW:
            oldest += length.to(tl.int32) + tl.load(depths + lane_row, mask=is_lane, other=0) + 1 - window
        max_score = tl.full([LANES], float("-inf"), tl.float32)
        weight_sum = tl.zeros([LANES], tl.float32)
        value_sum = tl.zeros([LANES, PADDED], tl.float32)

        base = kv_head.to(tl.int64) * capacity
        if HAS_WINDOW:
            start = tl.maximum(start, tl.maximum(length + 1 - window, 0) // BLOCK * BLOCK)
        place = tl.arange(0, BLOCK)
        # Whole blocks of the prefix: no masks, addresses that are known before, so loads run ahead of the arithmetic.
        for block in tl.range(start, middle, BLOCK, num_stages=STAGES):
            slot = base + block + place
            if DIM == PADDED:
                keys = tl.load(k + slot[None, :] * DIM + dim[:, None])
                values = tl.load(v + slot[:, None] * WIDTH + value_at[None, :])
            else:
                keys = tl.load(k + slot[None, :] * DIM + dim[:, None], mask=is_dim[:, None], other=0.0)
                values = tl.load(v + slot[:, None] * WIDTH + value_at[None, :], mask=is_dim[None, :], other=0.0)
            key_scale, value_scale, value_least = place, place, place
            if IS_PACKED:
                value_scale, value_least = tl.load(v_scale + 2 * slot), tl.load(v_scale + 2 * slot + 1)
            elif IS_SCALED:
                value_scale = tl.load(v_scale + slot)
            if IS_SCALED:
                key_scale = tl.load(k_scale + slot)
            is_seen = (block + place)[None, :] >= oldest[:, None]
            max_score, weight_sum, value_sum = block_step(queries, keys, values, key_scale, value_scale, value_least,
                                                          dim, is_seen, max_score, weight_sum, value_sum, factor, cap,
                                                          DIM, HAS_WINDOW, HAS_CAP)
        # The row's own end: the last part of the prefix, then the drafted rows of its path.
        for block in tl.range(middle, stop, BLOCK, num_stages=1):
            position = block + place
            is_inside = position < stop
            is_draft = is_inside & (position >= length)
            node = tl.load(path + row * num_rows + (position - length), mask=is_draft, other=0)
            slot = base + tl.where(is_draft, drafts_at + node, position)
            keys = tl.load(k + slot[None, :] * DIM + dim[:, None], mask=is_inside[None, :] & is_dim[:, None], other=0.0)
            values = tl.load(v + slot[:, None] * WIDTH + value_at[None, :], mask=is_inside[:, None] & is_dim[None, :],
                             other=0.0)
            key_scale, value_scale, value_least = place, place, place
            if IS_PACKED:
                value_scale = tl.load(v_scale + 2 * slot, mask=is_inside, other=0.0)
                value_least = tl.load(v_scale + 2 * slot + 1, mask=is_inside, other=0.0)
            elif IS_SCALED:
                value_scale = tl.load(v_scale + slot, mask=is_inside, other=0.0)
            if IS_SCALED:
                key_scale = tl.load(k_scale + slot, mask=is_inside, other=0.0)
            is_seen = is_inside[None, :] & (position[None, :] >= oldest[:, None])
            max_score, weight_sum, value_sum = block_step(queries, keys, values, key_scale, value_scale, value_least,
                                                          dim, is_seen, max_score, weight_sum, value_sum, factor, cap,
                                                          DIM, True, HAS_CAP)
        if HAS_TABLE:  # here, so that no register holds it while keys are read
            at += tl.program_id(1).to(tl.int64) * num_rows * HEADS
        state = at * num_splits + split
        tl.store(max_scores + state, max_score, mask=is_lane)
        tl.store(weight_sums + state, weight_sum, mask=is_lane)
        tl.store(value_sums + state[:, None] * DIM + dim[None, :], value_sum, mask=is_lane[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_splits", "text_rows"])
def merge_splits_kernel(max_scores, weight_sums, value_sums, where, depths, remainder, out, lse, num_splits, text_rows,
                        HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
                        SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, LONG: tl.constexpr,
                        HAS_REMAINDER: tl.constexpr, HAS_SINKS: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Merge the splits of one row and head in order, then the remainder as one more key. Grid (R, H).

    remainder  [R, H, D + 1] float32: an output and its log-sum-exp; where HAS_SINKS, the log-sum-exps [H] float32 of an
               output of 0
    out, lse   [R, H, D] and [R, H] float32, the log-sum-exp in base e
    text_rows  rows of a text; `where` [texts, 2] has each one's place
    """
    wait_for_inputs(IS_CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(where + 2 * (row // text_rows)) + tl.load(depths + row)  # the row's own position
    at = row.to(tl.int64) * HEADS + head
    count = split_of(last, SHORT, NUM_SHORT, LONG) + 1
    dim = tl.arange(0, PADDED)
    is_dim = dim < DIM
    max_score = float("-inf")
    weight_sum = 0.0
    value_sum = tl.zeros([PADDED], tl.float32)
    for first in range(0, count, SPLITS_PER_STEP):
        split = first + tl.arange(0, SPLITS_PER_STEP)
        is_split = split < count
        state = at * num_splits + split
        split_max = tl.load(max_scores + state, mask=is_split, other=float("-inf"))
        split_weights = tl.load(weight_sums + state, mask=is_split, other=0.0)
        split_values = tl.load(value_sums + state[:, None] * DIM + dim[None, :],
                               mask=is_split[:, None] & is_dim[None, :], other=0.0)
        new_max = tl.maximum(max_score, tl.max(split_max, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        share = tl.exp2(split_max - safe_max)
        rescale = tl.exp2(max_score - safe_max)
        weight_sum = weight_sum * rescale + tl.sum(share * split_weights, 0)
        value_sum = value_sum * rescale + tl.sum(share[:, None] * split_values, 0)
        max_score = new_max
    if HAS_REMAINDER or HAS_SINKS:
        if HAS_SINKS:
            remainder_output = tl.zeros([PADDED], tl.float32)
            remainder_lse = tl.load(remainder + head) * _LOG2E
        else:
            remainder_output = tl.load(remainder + at * (DIM + 1) + dim, mask=is_dim, other=0.0)
            remainder_lse = tl.load(remainder + at * (DIM + 1) + DIM) * _LOG2E
        new_max = tl.maximum(max_score, remainder_lse)
        rescale, share = tl.exp2(max_score - new_max), tl.exp2(remainder_lse - new_max)
        weight_sum = weight_sum * rescale + share
        value_sum = value_sum * rescale + remainder_output * share
        max_score = new_max
    tl.store(out + at * DIM + dim, (value_sum / weight_sum).to(out.dtype.element_ty), mask=is_dim)
    tl.store(lse + at, (max_score + tl.log2(weight_sum)) * _LN2)


@triton.jit(do_not_specialize=["stride"])
def tree_paths_kernel(parents, path, depths, stride):
    """Compute each row's depth [R], and its path [R, stride] from depth 0 to itself, from parents [R]. Grid (R,).

    Each `stride` rows are a tree of their own, in which parents and paths are counted.
    """
    row = tl.program_id(0) % stride
    first = tl.program_id(0) - row
    parents += first
    depths += first
    path += first * stride
    depth = 0
    node = tl.load(parents + row)
    while node >= 0:
        depth += 1
        node = tl.load(parents + node)
    tl.store(depths + row, depth)
    node = row
    while depth >= 0:
        tl.store(path + row * stride + depth, node)
        node = tl.load(parents + node, mask=node >= 0, other=-1)
        depth -= 1
