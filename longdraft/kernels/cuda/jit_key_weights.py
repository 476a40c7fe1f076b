"""Triton kernels of the attention weights of a layer's keys, summed over queries: heavy hitters are selected by them.

    score_keys      reads the keys once, for all queries of a KV head, a block of positions in a program
    share_of_blocks softmax over the blocks, for each lane
    sum_weights     the weights of all lanes, from the first kernel's numbers and the blocks' shares

A lane is one query head of one query; a KV head has Q * GROUP of them. Within a block weights are relative to the
lane's largest score there.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_cache_rows import codes_of
from longdraft.kernels.cuda.jit_chain import wait_for_inputs


@triton.jit(do_not_specialize=["num_lanes", "length", "capacity"])
def score_keys_kernel(q, k, k_scale, weights, best, sums, num_lanes, length, capacity, factor, cap,
                      KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
                      LANES: tl.constexpr, BLOCK: tl.constexpr, HAS_CAP: tl.constexpr,
                      IS_CHAINED: tl.constexpr):
    """Grid (length / BLOCK, Hkv).

    q           [Q, H, D]
    k, k_scale  [Hkv, capacity, D], and the scales of 8-bit keys [Hkv, capacity] float32
    weights     [Hkv, lanes, length]: exp2(score - best of the block)
    best, sums  [Hkv, lanes, blocks] float32: the largest score, the sum of the weights
    factor      log2(e) / sqrt(D); cap: of the scores, times log2(e), where HAS_CAP
    """
    wait_for_inputs(IS_CHAINED)
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position, dim = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PADDED)
    is_inside, is_dim = position < length, dim < DIM
    slot = head * capacity + position
    keys = tl.load(k + slot[None, :] * DIM + dim[:, None], mask=is_inside[None, :] & is_dim[:, None], other=0.0)
    for first in range(0, num_lanes, LANES):
        lane = first + tl.arange(0, LANES)
        is_lane = lane < num_lanes
        row = lane // GROUP * (KV_HEADS * GROUP) + head * GROUP + lane % GROUP
        queries = tl.load(q + row[:, None] * DIM + dim[None, :], mask=is_lane[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(queries, codes_of(keys, dim[:, None], queries, DIM), input_precision="ieee") * factor
        if k.dtype.element_ty == tl.int8:
            scores = scores * tl.load(k_scale + slot, mask=is_inside, other=0.0)[None, :]
        if HAS_CAP:
            scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(scores * (2.0 / cap))))
        scores = tl.where(is_inside[None, :], scores, float("-inf"))
        largest = tl.max(scores, 1)
        found = tl.exp2(scores - largest[:, None])
        at = head * num_lanes + lane
        tl.store(weights + at[:, None] * length + position[None, :], found.to(weights.dtype.element_ty),
                 mask=is_lane[:, None] & is_inside[None, :])
        tl.store(best + at * tl.num_programs(0) + block, largest, mask=is_lane)
        tl.store(sums + at * tl.num_programs(0) + block, tl.sum(found, 1), mask=is_lane)


@triton.jit(do_not_specialize=["num_blocks"])
def share_of_blocks_kernel(best, sums, shares, num_blocks, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    """What a lane's weights in each block are multiplied by: exp2(best) over the sum of all. Grid (Hkv * lanes,)."""
    wait_for_inputs(IS_CHAINED)
    start = tl.program_id(0).to(tl.int64) * num_blocks
    largest, total = float("-inf"), 0.0
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        score = tl.load(best + start + block, mask=block < num_blocks, other=float("-inf"))
        new = tl.maximum(largest, tl.max(score, 0))
        own = tl.load(sums + start + block, mask=block < num_blocks, other=0.0)
        total = total * tl.exp2(largest - new) + tl.sum(own * tl.exp2(score - new), 0)
        largest = new
    for first in range(0, num_blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        score = tl.load(best + start + block, mask=block < num_blocks, other=float("-inf"))
        tl.store(shares + start + block, tl.exp2(score - largest) / total, mask=block < num_blocks)


@triton.jit(do_not_specialize=["num_lanes", "length"])
def sum_weights_kernel(weights, shares, out, num_lanes, length, LANES: tl.constexpr, BLOCK: tl.constexpr,
                       IS_CHAINED: tl.constexpr):
    """out [Hkv, length] float32: the sum over lanes of weights [Hkv, lanes, length] times their block's share.

    Grid (length / BLOCK, Hkv), with the blocks of `score_keys_kernel`.
    """
    wait_for_inputs(IS_CHAINED)
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = position < length
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_lanes, LANES):
        lane = first + tl.arange(0, LANES)
        at = head * num_lanes + lane
        share = tl.load(shares + at * tl.num_programs(0) + block, mask=lane < num_lanes, other=0.0)
        own = tl.load(weights + at[:, None] * length + position[None, :],
                      mask=(lane < num_lanes)[:, None] & is_inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(own * share[:, None], 0)
    tl.store(out + head * length + position, total, mask=is_inside)
