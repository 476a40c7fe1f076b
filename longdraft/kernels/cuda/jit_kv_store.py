"""Triton kernels that write rows of keys and values to stores and copy them between stores, all layers in one launch.

Stores are passed as tables int64 [L, 5]: the addresses of keys, values and their scales, and the number of slots.
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_float8 import from_store
from longdraft.kernels.cuda.jit_rows import store_row


@triton.jit
def scatter_rows_kernel(k, v, table, rows, targets, texts, k_stride, v_stride, k_row_stride, v_row_stride,
                        k_head_stride, v_head_stride, HALF: tl.constexpr, PADDED: tl.constexpr, ELEMENT: tl.constexpr,
                        IS_SCALED: tl.constexpr, HAS_TEXTS: tl.constexpr, TARGET_STRIDE: tl.constexpr):
    """Write row rows[i] of k, v [L, T, Hkv, D] to slot targets[i] of each store. Grid (N, Hkv, L).

    Targets are TARGET_STRIDE elements apart.

    A row with a negative target is skipped. The strides of layers, rows and heads are in elements.

    texts  [N] int32: the text of each row, where HAS_TEXTS; the table is [texts, L, 5] then
    """
    index, head, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    target = tl.load(targets + index * TARGET_STRIDE).to(tl.int64)
    if target >= 0:
        at = table + layer * 5
        if HAS_TEXTS:
            at += tl.load(texts + index).to(tl.int64) * tl.num_programs(2) * 5
        k_store = tl.load(at).to(tl.pointer_type(ELEMENT))
        v_store = tl.load(at + 1).to(tl.pointer_type(ELEMENT))
        k_scale = tl.load(at + 2).to(tl.pointer_type(tl.float32))
        v_scale = tl.load(at + 3).to(tl.pointer_type(tl.float32))
        slot = head * tl.load(at + 4) + target
        half = tl.arange(0, PADDED)
        mask = half < HALF
        source = k + layer * k_stride + row * k_row_stride + head * k_head_stride + half
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        store_row(first, second, mask, slot * 2 * HALF, slot, k_store, k_scale, HALF, half, IS_SCALED)
        source = v + layer * v_stride + row * v_row_stride + head * v_head_stride + half
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        store_row(first, second, mask, slot * 2 * HALF, slot, v_store, v_scale, HALF, half, IS_SCALED)


@triton.jit
def move_rows_kernel(table, moves, turns, HALF: tl.constexpr, PADDED: tl.constexpr, ELEMENT: tl.constexpr,
                     DTYPE: tl.constexpr, IS_SCALED: tl.constexpr, TEXTS: tl.constexpr):
    """Move rows of each text's stores to other slots, bit for bit, or with their keys rotated. Grid (N, Hkv, L * T).

    table  [L, T, 5]
    moves  int64 [T, N, 3]: source, target, and whether the key is rotated. Those with a negative target are skipped. A
           target is not another one's source
    turns  float32 [T, 2, HALF]: cos and sin
    DTYPE  of rows before they are written to an 8-bit store
    """
    index, head, number = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    text, at = number % TEXTS, table + number * 5
    move = moves + (text * tl.num_programs(0) + index) * 3
    target = tl.load(move + 1)
    if target >= 0:
        slots = head * tl.load(at + 4)
        source, target = slots + tl.load(move), slots + target
        half = tl.arange(0, PADDED)
        mask = half < HALF
        for kind in tl.static_range(2):
            store = tl.load(at + kind).to(tl.pointer_type(ELEMENT))
            scales = tl.load(at + 2 + kind).to(tl.pointer_type(tl.float32))
            low = tl.load(store + source * 2 * HALF + half, mask=mask, other=0.0)
            high = tl.load(store + source * 2 * HALF + HALF + half, mask=mask, other=0.0)
            if (kind == 0) & (tl.load(move + 2) > 0):
                c = tl.load(turns + text * 2 * HALF + half, mask=mask, other=0.0)
                s = tl.load(turns + (text * 2 + 1) * HALF + half, mask=mask, other=0.0)
                first, second = from_store(low, c), from_store(high, c)
                if IS_SCALED:
                    scale = tl.load(scales + source)
                    first = (first * scale).to(DTYPE).to(tl.float32)
                    second = (second * scale).to(DTYPE).to(tl.float32)
                turned = (first * c - second * s).to(DTYPE).to(tl.float32)
                second = (second * c + first * s).to(DTYPE).to(tl.float32)
                store_row(turned, second, mask, target * 2 * HALF, target, store, scales, HALF, half, IS_SCALED)
            else:
                tl.store(store + target * 2 * HALF + half, low, mask=mask)
                tl.store(store + target * 2 * HALF + HALF + half, high, mask=mask)
                if IS_SCALED:
                    tl.store(scales + target, tl.load(scales + source))


@triton.jit(do_not_specialize=["count", "start", "run_start"])
def copy_rows_kernel(sources, targets, positions, count, start, run_start, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                     PADDED: tl.constexpr, BLOCK: tl.constexpr, ELEMENT: tl.constexpr, IS_SCALED: tl.constexpr,
                     IS_RUN: tl.constexpr):
    """Copy the rows at positions [L, Hkv, count] of each source to start, start + 1, ... of its target, bit for bit.

    IS_RUN  the positions are run_start, run_start + 1, ... instead, in all layers and heads

    Grid (count / BLOCK, Hkv, L).
    """
    head, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = index < count
    if IS_RUN:
        position = index.to(tl.int64) + run_start
    else:
        position = tl.load(positions + (layer * KV_HEADS + head) * count + index, mask=is_row, other=0)
    dim = tl.arange(0, PADDED)
    mask = is_row[:, None] & (dim < DIM)[None, :]
    source_slot = head * tl.load(sources + layer * 5 + 4) + position
    target_slot = head * tl.load(targets + layer * 5 + 4) + start + index
    for kind in tl.static_range(2):
        source = tl.load(sources + layer * 5 + kind).to(tl.pointer_type(ELEMENT))
        target = tl.load(targets + layer * 5 + kind).to(tl.pointer_type(ELEMENT))
        rows = tl.load(source + source_slot[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        tl.store(target + target_slot[:, None] * DIM + dim[None, :], rows, mask=mask)
        if IS_SCALED:
            source_scale = tl.load(sources + layer * 5 + 2 + kind).to(tl.pointer_type(tl.float32))
            target_scale = tl.load(targets + layer * 5 + 2 + kind).to(tl.pointer_type(tl.float32))
            scale = tl.load(source_scale + source_slot, mask=is_row, other=0.0)
            tl.store(target_scale + target_slot, scale, mask=is_row)
