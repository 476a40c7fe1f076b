"""Triton kernels for the attention of a tree's rows over a long prefix, computed in splits.

The cut into splits depends on the position alone: 512 positions each up to 8,192, then 2,048. Splits are cut into
blocks. A split is one online softmax (Milakov and Gimelshein 2018) over its blocks in order; `merge_splits_kernel`
merges the splits in order.

    stage 0, the prefix that all rows share   [ block | block | ... | block ]
                                              a program computes one split, for many lanes
    stage 1, the end of each row                                      [ last part of the prefix | path | the row ]
                                              a program computes one split, for the lanes of one row

A *lane* is one query head of one row. Both stages are the same compiled program: stage 1 continues with the state of
the split that stage 0 left unfinished, and finds drafted keys through the row's path. A node of a tree therefore gets
the bits of plain decoding, whatever code the compiler generates. Numbers that change between launches are read from
memory: CUDA graphs require it, and such a number must not select another compiled program.

    where  int64 [2]: the number of committed positions; the slot of drafted row 0
"""

import triton
import triton.language as tl

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
def block_step(queries, keys, values, key_scale, value_scale, is_seen, max_score, weight_sum, value_sum, factor,
               IS_SCALED: tl.constexpr, IS_MASKED: tl.constexpr):
    """One block of an online softmax: its new maximum, sum of weights and weighted sum of values.

    queries  [LANES, PADDED]; keys [PADDED, BLOCK]; values [BLOCK, PADDED]; scales [BLOCK], of 8-bit rows
    is_seen  [LANES, BLOCK]: the keys that a lane sees, where IS_MASKED; otherwise every lane sees all
    """
    scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * factor
    if IS_SCALED:
        scores = scores * key_scale[None, :]
    if IS_MASKED:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(max_score, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - safe_max[:, None])
    rescale = tl.exp2(max_score - safe_max)
    weight_sum = weight_sum * rescale + tl.sum(weights, 1)
    if IS_SCALED:
        weights = weights * value_scale[None, :]
    value_sum = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), value_sum * rescale[:, None],
                       input_precision="ieee")
    return new_max, weight_sum, value_sum


@triton.jit(do_not_specialize=["is_end", "num_rows", "capacity", "num_splits", "path_stride", "window"])
def attend_split_kernel(q, k, v, k_scale, v_scale, where, path, depths, max_scores, weight_sums, value_sums,
                        is_end, num_rows, capacity, num_splits, path_stride, window, factor,
                        KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
                        LANES: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr,
                        LONG: tl.constexpr, IS_SCALED: tl.constexpr, HAS_WINDOW: tl.constexpr, STAGES: tl.constexpr,
                        IS_CHAINED: tl.constexpr):
    """One split for some lanes of a KV head.

    q                        [R, H, D]
    k, v                     [Hkv, capacity, D], with scales [Hkv, capacity] float32 where IS_SCALED
    path                     [R, path_stride] int32: the drafted row at each depth of a row's path
    depths                   [R] int32
    max_scores, weight_sums  [R, H, S] float32: the maximum of the scores in base 2, the sum of the weights
    value_sums               [R, H, S, D] float32: the weighted sum of the values
    is_end                   the stage: 0 or 1
    window                   positions that a row sees, itself included, where HAS_WINDOW
    factor                   log2(e) / sqrt(D)

    Grid (tiles of lanes, Hkv, splits), so that programs that read the same keys run at the same time. Splits are
    counted down in stage 0: the long ones, which take longest, begin first. In stage 1, splits are counted from the one
    where the prefix ends, and a tile holds lanes of one row only.
    """
    wait_for_inputs(IS_CHAINED)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TILES: tl.constexpr = (GROUP + LANES - 1) // LANES  # of one row
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    length = tl.load(where)
    drafts_at = tl.load(where + 1)
    shared_end = length // BLOCK * BLOCK  # the full blocks of the prefix, which stage 0 computes for all rows

    row = tile // TILES
    first_lane = tl.where(is_end != 0, row * GROUP + tile % TILES * LANES, tile * LANES)
    end_lane = tl.where(is_end != 0, row * GROUP + GROUP, num_rows * GROUP)
    lane = first_lane + tl.arange(0, LANES)
    is_lane = lane < end_lane
    lane_row = lane // GROUP
    head = kv_head * GROUP + lane % GROUP

    split = tl.where(is_end != 0, split_of(shared_end, SHORT, NUM_SHORT, LONG) + tl.program_id(2),
                     tl.num_programs(2) - 1 - tl.program_id(2))
    begin = split_start(split, SHORT, NUM_SHORT, LONG)
    own = length + tl.load(depths + row, mask=is_end != 0, other=0)  # in stage 1: the row's own position
    start = tl.maximum(begin, tl.where(is_end != 0, shared_end, 0))
    stop = tl.minimum(split_start(split + 1, SHORT, NUM_SHORT, LONG), tl.where(is_end != 0, own + 1, shared_end))

    if start < stop:
        dim = tl.arange(0, PADDED)
        is_dim = dim < DIM
        at = (lane_row * HEADS + head).to(tl.int64)
        queries = tl.load(q + at[:, None] * DIM + dim[None, :], mask=is_lane[:, None] & is_dim[None, :], other=0.0)
        depth = tl.load(depths + lane_row, mask=is_lane, other=0)
        oldest = tl.where(window > 0, length + depth + 1 - window, 0)  # position that a lane sees

        state = at * num_splits + split
        continues = lane < tl.where(start > begin, end_lane, 0)
        max_score = tl.load(max_scores + state, mask=continues, other=float("-inf"))
        weight_sum = tl.load(weight_sums + state, mask=continues, other=0.0)
        value_sum_at = value_sums + state[:, None] * DIM + dim[None, :]
        value_sum = tl.load(value_sum_at, mask=continues[:, None] & is_dim[None, :], other=0.0)

        base = kv_head.to(tl.int64) * capacity
        if HAS_WINDOW:
            start = tl.maximum(start, tl.maximum(length + 1 - window, 0) // BLOCK * BLOCK)
        place = tl.arange(0, BLOCK)
        # Whole blocks of the prefix: no masks, addresses that are known before, so loads run ahead of the arithmetic.
        for block in tl.range(start, tl.where(is_end != 0, start, stop), BLOCK, num_stages=STAGES):
            slot = base + block + place
            if DIM == PADDED:
                keys = tl.load(k + slot[None, :] * DIM + dim[:, None])
                values = tl.load(v + slot[:, None] * DIM + dim[None, :])
            else:
                keys = tl.load(k + slot[None, :] * DIM + dim[:, None], mask=is_dim[:, None], other=0.0)
                values = tl.load(v + slot[:, None] * DIM + dim[None, :], mask=is_dim[None, :], other=0.0)
            key_scale, value_scale = place, place
            if IS_SCALED:
                key_scale, value_scale = tl.load(k_scale + slot), tl.load(v_scale + slot)
            is_seen = (block + place)[None, :] >= oldest[:, None]
            max_score, weight_sum, value_sum = block_step(queries, keys, values, key_scale, value_scale, is_seen,
                                                          max_score, weight_sum, value_sum, factor, IS_SCALED,
                                                          HAS_WINDOW)
        # The row's own end: the last part of the prefix, then the drafted rows of its path.
        for block in tl.range(tl.where(is_end != 0, start, stop), stop, BLOCK, num_stages=1):
            position = block + place
            is_inside = position < stop
            is_draft = is_inside & (position >= length)
            node = tl.load(path + row * path_stride + (position - length), mask=is_draft, other=0)
            slot = base + tl.where(is_draft, drafts_at + node, position)
            keys = tl.load(k + slot[None, :] * DIM + dim[:, None], mask=is_inside[None, :] & is_dim[:, None], other=0.0)
            values = tl.load(v + slot[:, None] * DIM + dim[None, :], mask=is_inside[:, None] & is_dim[None, :],
                             other=0.0)
            key_scale, value_scale = place, place
            if IS_SCALED:
                key_scale = tl.load(k_scale + slot, mask=is_inside, other=0.0)
                value_scale = tl.load(v_scale + slot, mask=is_inside, other=0.0)
            is_seen = is_inside[None, :] & (position[None, :] >= oldest[:, None])
            max_score, weight_sum, value_sum = block_step(queries, keys, values, key_scale, value_scale, is_seen,
                                                          max_score, weight_sum, value_sum, factor, IS_SCALED, True)
        tl.store(max_scores + state, max_score, mask=is_lane)
        tl.store(weight_sums + state, weight_sum, mask=is_lane)
        tl.store(value_sum_at, value_sum, mask=is_lane[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(max_scores, weight_sums, value_sums, where, depths, remainder, out, lse, num_splits,
                        HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS_PER_STEP: tl.constexpr,
                        SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, LONG: tl.constexpr,
                        HAS_REMAINDER: tl.constexpr, IS_CHAINED: tl.constexpr):
    """Merge the splits of one row and head in order, then the remainder as one more key. Grid (R, H).

    remainder  [R, H, D + 1] float32: an output and its log-sum-exp
    out, lse   [R, H, D] and [R, H] float32, the log-sum-exp in base e
    """
    wait_for_inputs(IS_CHAINED)
    row, head = tl.program_id(0), tl.program_id(1)
    at = row.to(tl.int64) * HEADS + head
    last = tl.load(where) + tl.load(depths + row)
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
    if HAS_REMAINDER:
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
    """Compute each row's depth [R], and its path [R, stride] from depth 0 to itself, from parents [R]. Grid (R,)."""
    row = tl.program_id(0)
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
