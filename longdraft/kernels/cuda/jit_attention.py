"""Attention of a tree's rows over a long prefix, in splits: what runs on the device.

Positions are cut into splits that depend on the position alone (512 positions each up to 8,192, then 2,048), and
splits into blocks. A split is one online softmax over its blocks in order; `merge` joins splits in order.

    prefix, shared by all rows       [ block | block | ... | block ]              one program: a split, many lanes
    a row's own end                                        [ rest of the prefix, its path, itself ]
                                                                                  one program: a split, one row

A *lane* is a query head of a row. Both stages are one compiled program: the second goes on with the state of the split
that the first left unfinished, and finds drafted keys through the row's path. So a node of a tree gets, to the bit,
what plain decoding gives it, whatever the compiler makes of the source. Numbers that change between launches are read
from memory, both for CUDA graphs and because they must not choose another compiled program.

    where  int64 [2]: committed positions; the slot of drafted row 0
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def split_of(position, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, LONG: tl.constexpr):
    """The split that holds a position."""
    return tl.where(position < NUM_SHORT * SHORT, position // SHORT,
                    NUM_SHORT + (position - NUM_SHORT * SHORT) // LONG)


@triton.jit
def split_start(split, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr, LONG: tl.constexpr):
    return tl.where(split < NUM_SHORT, split * SHORT, NUM_SHORT * SHORT + (split - NUM_SHORT) * LONG)


@triton.jit(do_not_specialize=["is_end", "num_rows", "capacity", "num_splits", "path_stride", "window"])
def attend(q, k, v, k_scale, v_scale, where, path, depths, peaks, masses, mixed,
           is_end, num_rows, capacity, num_splits, path_stride, window, factor,
           KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
           LANES: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, NUM_SHORT: tl.constexpr,
           LONG: tl.constexpr, IS_SCALED: tl.constexpr):
    """One split for some lanes of a KV head: peaks, masses [R, H, S] and mixed [R, H, S, D] float32, in base 2.

    q [R, H, D]; k, v [Hkv, capacity, D] with scales [Hkv, capacity]; path [R, path_stride] int32: the drafted row at
    each depth of a row's path; depths [R] int32. factor: log2(e) / sqrt(D).
    Grid (splits, Hkv, tiles): of lanes where is_end is 0, of one row's lanes and the splits from the prefix's end on
    where it is 1.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    TILES: tl.constexpr = (GROUP + LANES - 1) // LANES  # of one row
    kv_head = tl.program_id(1)
    tile = tl.program_id(2)
    length = tl.load(where)
    drafts_at = tl.load(where + 1)
    whole = length // BLOCK * BLOCK  # blocks of the prefix that are full, and so shared

    row = tile // TILES
    first_lane = tl.where(is_end != 0, row * GROUP + tile % TILES * LANES, tile * LANES)
    end_lane = tl.where(is_end != 0, row * GROUP + GROUP, num_rows * GROUP)
    lane = first_lane + tl.arange(0, LANES)
    is_lane = lane < end_lane
    lane_row = lane // GROUP
    head = kv_head * GROUP + lane % GROUP

    split = tl.program_id(0) + tl.where(is_end != 0, split_of(whole, SHORT, NUM_SHORT, LONG), 0)
    begin = split_start(split, SHORT, NUM_SHORT, LONG)
    own = length + tl.load(depths + row, mask=is_end != 0, other=0)  # of a row's end: the row's own position
    start = tl.maximum(begin, tl.where(is_end != 0, whole, 0))
    stop = tl.minimum(split_start(split + 1, SHORT, NUM_SHORT, LONG), tl.where(is_end != 0, own + 1, whole))

    if start < stop:
        dim = tl.arange(0, PADDED)
        is_dim = dim < DIM
        at = (lane_row * HEADS + head).to(tl.int64)
        queries = tl.load(q + at[:, None] * DIM + dim[None, :], mask=is_lane[:, None] & is_dim[None, :], other=0.0)
        depth = tl.load(depths + lane_row, mask=is_lane, other=0)
        oldest = tl.where(window > 0, length + depth + 1 - window, 0)  # that a lane sees

        state = at * num_splits + split
        goes_on = lane < tl.where(start > begin, end_lane, 0)
        peak = tl.load(peaks + state, mask=goes_on, other=float("-inf"))
        mass = tl.load(masses + state, mask=goes_on, other=0.0)
        mix_at = mixed + state[:, None] * DIM + dim[None, :]
        mix = tl.load(mix_at, mask=goes_on[:, None] & is_dim[None, :], other=0.0)

        base = kv_head.to(tl.int64) * capacity
        unseen = tl.where(window > 0, tl.maximum(length + 1 - window, 0) // BLOCK * BLOCK, 0)
        for block in range(tl.maximum(start, unseen), stop, BLOCK):
            position = block + tl.arange(0, BLOCK)
            is_inside = position < stop
            is_draft = is_inside & (position >= length)
            node = tl.load(path + row * path_stride + (position - length), mask=is_draft, other=0)
            slot = base + tl.where(is_draft, drafts_at + node, position)
            keys = tl.load(k + slot[None, :] * DIM + dim[:, None], mask=is_inside[None, :] & is_dim[:, None], other=0.0)
            scores = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * factor
            if IS_SCALED:
                scores = scores * tl.load(k_scale + slot, mask=is_inside, other=0.0)[None, :]
            is_seen = is_inside[None, :] & (position[None, :] >= oldest[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - safe[:, None])
            fade = tl.exp2(peak - safe)
            mass = mass * fade + tl.sum(weights, 1)
            if IS_SCALED:
                weights = weights * tl.load(v_scale + slot, mask=is_inside, other=0.0)[None, :]
            values = tl.load(v + slot[:, None] * DIM + dim[None, :], mask=is_inside[:, None] & is_dim[None, :],
                             other=0.0)
            mix = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), mix * fade[:, None],
                         input_precision="ieee")
            peak = new_peak
        tl.store(peaks + state, peak, mask=is_lane)
        tl.store(masses + state, mass, mask=is_lane)
        tl.store(mix_at, mix, mask=is_lane[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def merge(peaks, masses, mixed, where, depths, remainder, out, lse, num_splits,
          HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, SHORT: tl.constexpr,
          NUM_SHORT: tl.constexpr, LONG: tl.constexpr, HAS_REST: tl.constexpr):
    """The splits of one row and head, in order, then `rest` [R, H, D + 1] as one more key: out [R, H, D], lse [R, H]
    (natural). Grid (R, H)."""
    row, head = tl.program_id(0), tl.program_id(1)
    at = row.to(tl.int64) * HEADS + head
    last = tl.load(where) + tl.load(depths + row)
    count = split_of(last, SHORT, NUM_SHORT, LONG) + 1
    dim = tl.arange(0, PADDED)
    is_dim = dim < DIM
    top = float("-inf")
    total = 0.0
    mix = tl.zeros([PADDED], tl.float32)
    for first in range(0, count, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        is_split = split < count
        state = at * num_splits + split
        peak = tl.load(peaks + state, mask=is_split, other=float("-inf"))
        mass = tl.load(masses + state, mask=is_split, other=0.0)
        part = tl.load(mixed + state[:, None] * DIM + dim[None, :], mask=is_split[:, None] & is_dim[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(peak, 0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(peak - safe)
        fade = tl.exp2(top - safe)
        total = total * fade + tl.sum(weight * mass, 0)
        mix = mix * fade + tl.sum(weight[:, None] * part, 0)
        top = new_top
    if HAS_REST:
        theirs = tl.load(remainder + at * (DIM + 1) + dim, mask=is_dim, other=0.0)
        their_top = tl.load(remainder + at * (DIM + 1) + DIM) * _LOG2E
        new_top = tl.maximum(top, their_top)
        fade, share = tl.exp2(top - new_top), tl.exp2(their_top - new_top)
        total = total * fade + share
        mix = mix * fade + theirs * share
        top = new_top
    tl.store(out + at * DIM + dim, (mix / total).to(out.dtype.element_ty), mask=is_dim)
    tl.store(lse + at, (top + tl.log2(total)) * _LN2)


@triton.jit(do_not_specialize=["stride"])
def paths(parents, path, depths, stride):
    """From parents [R] int32 each row's depth [R] and its path [R, stride] from depth 0 to itself. Grid (R,)."""
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
