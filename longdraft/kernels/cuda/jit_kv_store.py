"""Triton kernels that write rows of keys and values to stores and copy them between stores, all layers in one launch.

Stores are passed as tables int64 [L, 5], those of several texts as [L, texts, 5]: the addresses of keys, values and
their scales, and the number of slots.
KEY and VALUE are the types of their elements, which name the format (`jit_cache_rows`).
"""

import triton
import triton.language as tl

from longdraft.kernels.cuda.jit_cache_rows import store_row


@triton.jit(do_not_specialize=["num_texts"])
def scatter_rows_kernel(k, v, table, rows, targets, texts, num_texts, k_stride, v_stride, k_row_stride, v_row_stride,
                        k_head_stride, v_head_stride, HALF: tl.constexpr, PADDED: tl.constexpr, KEY: tl.constexpr,
                        VALUE: tl.constexpr, HAS_TEXTS: tl.constexpr, TARGET_STRIDE: tl.constexpr):
    """Write row rows[i] of k, v [L, T, Hkv, D] to slot targets[i] of each store. Grid (N, Hkv, L).

    Targets are TARGET_STRIDE elements apart.

    A row with a negative target is skipped. The strides of layers, rows and heads are in elements.

    texts  [N] int32: the text of each row, where HAS_TEXTS
    """
    index, head, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    target = tl.load(targets + index * TARGET_STRIDE).to(tl.int64)
    if target >= 0:
        at = table + layer * num_texts * 5
        if HAS_TEXTS:
            at += tl.load(texts + index).to(tl.int64) * 5
        k_store = tl.load(at).to(tl.pointer_type(KEY))
        v_store = tl.load(at + 1).to(tl.pointer_type(VALUE))
        k_scale = tl.load(at + 2).to(tl.pointer_type(tl.float32))
        v_scale = tl.load(at + 3).to(tl.pointer_type(tl.float32))
        slot = head * tl.load(at + 4) + target
        half = tl.arange(0, PADDED)
        mask = half < HALF
        source = k + layer * k_stride + row * k_row_stride + head * k_head_stride + half
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        store_row(first, second, mask, slot, k_store, k_scale, HALF, half)
        source = v + layer * v_stride + row * v_row_stride + head * v_head_stride + half
        first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
        store_row(first, second, mask, slot, v_store, v_scale, HALF, half)


@triton.jit
def _copy_bits(source, target, source_scales, target_scales, source_slot, target_slot, is_row, dim, DIM: tl.constexpr):
    """Copy rows of DIM numbers from slots to slots [N], bit for bit, where is_row [N]."""
    ELEMENT: tl.constexpr = source.dtype.element_ty
    WIDTH: tl.constexpr = DIM // 2 if ELEMENT == tl.uint8 else DIM
    SCALES: tl.constexpr = 2 if ELEMENT == tl.uint8 else 1 if ELEMENT == tl.int8 else 0
    mask = is_row[:, None] & (dim < WIDTH)[None, :]
    rows = tl.load(source + source_slot[:, None] * WIDTH + dim[None, :], mask=mask)
    tl.store(target + target_slot[:, None] * WIDTH + dim[None, :], rows, mask=mask)
    for each in tl.static_range(SCALES):
        scale = tl.load(source_scales + SCALES * source_slot + each, mask=is_row)
        tl.store(target_scales + SCALES * target_slot + each, scale, mask=is_row)


@triton.jit
def move_rows_kernel(table, moves, turns, HALF: tl.constexpr, PADDED: tl.constexpr, KEY: tl.constexpr,
                     VALUE: tl.constexpr, DTYPE: tl.constexpr, TEXTS: tl.constexpr):
    """Move rows of each text's stores to other slots, bit for bit, or with their keys rotated. Grid (N, Hkv, L * T).

    moves  int64 [T, N, 3]: source, target, and whether the key is rotated. Those with a negative target are skipped. A
           target is not another one's source
    turns  float32 [T, 2, HALF]: cos and sin
    DTYPE  of rows before they are written to a store of fewer bits
    """
    index, head, number = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    text, at = number % TEXTS, table + number * 5
    move = moves + (text * tl.num_programs(0) + index) * 3
    target = tl.load(move + 1)
    if target >= 0:
        slots = head * tl.load(at + 4)
        source, target = slots + tl.load(move), slots + target
        keys, values = tl.load(at).to(tl.pointer_type(KEY)), tl.load(at + 1).to(tl.pointer_type(VALUE))
        key_scales = tl.load(at + 2).to(tl.pointer_type(tl.float32))
        value_scales = tl.load(at + 3).to(tl.pointer_type(tl.float32))
        dim, one = tl.arange(0, 2 * PADDED), tl.zeros([1], tl.int64)
        _copy_bits(values, values, value_scales, value_scales, source + one, target + one, one == 0, dim, 2 * HALF)
        if tl.load(move + 2) > 0:
            half = tl.arange(0, PADDED)
            mask = half < HALF
            first = tl.load(keys + source * 2 * HALF + half, mask=mask, other=0.0).to(tl.float32)
            second = tl.load(keys + source * 2 * HALF + HALF + half, mask=mask, other=0.0).to(tl.float32)
            c = tl.load(turns + text * 2 * HALF + half, mask=mask, other=0.0)
            s = tl.load(turns + (text * 2 + 1) * HALF + half, mask=mask, other=0.0)
            if KEY == tl.int8:
                scale = tl.load(key_scales + source)
                first = (first * scale).to(DTYPE).to(tl.float32)
                second = (second * scale).to(DTYPE).to(tl.float32)
            turned = (first * c - second * s).to(DTYPE).to(tl.float32)
            second = (second * c + first * s).to(DTYPE).to(tl.float32)
            store_row(turned, second, mask, target, keys, key_scales, HALF, half)
        else:
            _copy_bits(keys, keys, key_scales, key_scales, source + one, target + one, one == 0, dim, 2 * HALF)


@triton.jit(do_not_specialize=["count", "start", "run_start"])
def copy_rows_kernel(sources, targets, positions, count, start, run_start, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                     PADDED: tl.constexpr, BLOCK: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
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
    source_slot = head * tl.load(sources + layer * 5 + 4) + position
    target_slot = head * tl.load(targets + layer * 5 + 4) + start + index
    for kind in tl.static_range(2):
        source = tl.load(sources + layer * 5 + kind).to(tl.pointer_type(VALUE if kind == 1 else KEY))
        target = tl.load(targets + layer * 5 + kind).to(tl.pointer_type(VALUE if kind == 1 else KEY))
        source_scales = tl.load(sources + layer * 5 + 2 + kind).to(tl.pointer_type(tl.float32))
        target_scales = tl.load(targets + layer * 5 + 2 + kind).to(tl.pointer_type(tl.float32))
        _copy_bits(source, target, source_scales, target_scales, source_slot, target_slot, is_row, dim, DIM)
