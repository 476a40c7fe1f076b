"""Attention and the key/value store of the CUDA kernels: the bits of plain decoding, and the reference's results.

See helpers.cuda_kernels for the device.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.attention import obvious_attention, parents_of, path_of, random_parents
from helpers.cuda_kernels import (
    DEVICE,
    DTYPES,
    HAS_CUDA,
    TOLERANCE,
    close,
    fill,
    kernels,
    reference,
    rows_of,
)
from helpers.extents import extent
from longdraft.kernels import KV, AttentionOutput, LayersKV
from longdraft.kernels.cuda import attention
from longdraft.kernels.cuda.kernels import NAMES

SHAPES = [  # length, rows, KV heads, group, dim, window
    (0, 1, 1, 1, 16, 0), (1, 5, 2, 1, 64, 0), (64, 3, 2, 2, 80, 0), (100, 5, 1, 7, 96, 0), (126, 9, 1, 1, 16, 0),
    (130, 4, 1, 2, 128, 0), (256, 2, 1, 4, 256, 0), (300, 3, 1, 3, 24, 40), (250, 9, 1, 17, 16, 0),
    (90, 2, 1, 2, 32, 1),
]
CASES = [("float16", "triton-16", shape) for shape in SHAPES]
CASES += [(dtype, name, (125, 6, 1, 4, 64, 0)) for dtype in DTYPES
          for name in ("triton-16", "triton-64", "triton-16-kv8", "triton-16-k8v4")]
CASES += [("float16", "triton-16-k8v4", (100, 5, 1, 7, 96, 0)), ("float16", "triton-16-k8v4", (300, 3, 1, 3, 24, 40))]
if HAS_CUDA:
    CASES += [(dtype, name, (length, rows, 4, 4, dim, window)) for dtype in DTYPES for name in NAMES
              for length, rows, dim, window in ((1, 150, 64, 0), (500, 64, 80, 0), (3000, 40, 128, 900),
                                                (511, 33, 96, 0), (1025, 7, 256, 0))]


@pytest.mark.parametrize("dtype, name, shape", extent(CASES, CASES[1::3]), ids=str)
def test_a_tree_node_gets_the_bits_of_plain_decoding(dtype, name, shape):
    """Compare nodes with the same text decoded one row at a time, and with the formula in double precision."""
    length, rows, kv_heads, group, dim, window = shape
    kernel, heads = kernels(dtype, name), kv_heads * group
    prefix_k, prefix_v = (rows_of(length, kv_heads, dim, seed=s, dtype=kernel.dtype) for s in (1, 2))
    k, v = (rows_of(rows, kv_heads, dim, seed=s, dtype=kernel.dtype) for s in (3, 4))
    q = rows_of(rows, heads, dim, seed=5, dtype=kernel.dtype)
    parents = random_parents(rows, length) if length % 3 else torch.arange(-1, rows - 1, dtype=torch.int32)
    store = kernel.new_store(kv_heads, dim)
    store.reserve(length + rows)
    fill(store, prefix_k, prefix_v)
    got = kernel.attention(q, KV(store, length, k, v), parents, window)
    for row in random.Random(0).sample(range(rows), min(rows, 9 if HAS_CUDA else 2)):
        path = path_of(parents.tolist(), row)
        flat = kernel.new_store(kv_heads, dim)
        flat.reserve(length + len(path))
        flat.append(store, 0, length)
        flat.write(length, k[path[:-1]], v[path[:-1]])
        kv = KV(flat, length + len(path) - 1, k[[row]], v[[row]])
        plain = kernel.attention(q[row : row + 1], kv, parents_of([-1]), window)
        assert torch.equal(got.output[row], plain.output[0]) and torch.equal(got.lse[row], plain.lse[0])
        flat.write(length + len(path) - 1, k[[row]], v[[row]])
        every = torch.arange(length + len(path)).expand(kv_heads, -1)
        held = (part.transpose(0, 1)[-window:].cpu() for part in flat.read(every))
        exact = obvious_attention(q[row].cpu(), *held)
        torch.testing.assert_close(got.output[row].float().cpu(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("step", [1, 2, 64])
def test_splits_are_merged_in_steps_of_any_size(monkeypatch, step):
    """Seven splits of 1,301 positions."""
    monkeypatch.setattr(attention, "_SPLITS_PER_MERGE_STEP", step)
    kernel, store = kernels("float32"), kernels("float32").new_store(1, 16)
    k, v = (rows_of(1301, 1, 16, seed=seed) for seed in (1, 2))
    q = rows_of(1, 2, 16, seed=3)
    store.reserve(1301)
    fill(store, k[:1300], v[:1300])
    got = kernel.attention(q, KV(store, 1300, k[1300:], v[1300:]), parents_of([-1]))
    close(got.output[0].cpu(), obvious_attention(q[0].cpu(), k.cpu(), v.cpu()), "float32")


@pytest.mark.parametrize("name", ["triton-16", "triton-16-kv8", "triton-16-k8v4"])
def test_drafted_rows_change_no_committed_row(name):
    """Also when the length is shorter than the text, as in glide's layer, which reads the target's cache."""
    kernel = kernels("float16", name)
    store = kernel.new_store(2, 16)
    k, v = (rows_of(50, 2, 16, seed=s, dtype=kernel.dtype) for s in (1, 2))
    fill(store, k, v)
    before = store.k.clone(), store.v.clone()
    new = rows_of(9, 2, 16, seed=4, dtype=kernel.dtype)
    kernel.attention(rows_of(9, 4, 16, seed=3, dtype=kernel.dtype), KV(store, 40, new, new), random_parents(9, 1))
    for part, was in zip((store.k, store.v), before, strict=True):
        assert torch.equal(part[:, : store.room].view(torch.uint8), was[:, : store.room].view(torch.uint8))


@pytest.mark.parametrize("dtype, name", [*((dtype, "triton-16") for dtype in DTYPES), ("float32", "triton-16-kv8"),
                                         ("float32", "triton-16-k8v4")])
def test_rows_are_read_kept_and_copied_as_they_were_written(dtype, name):
    kernel = kernels(dtype, name)
    full, part = ([kernel.new_store(2, 24) for _ in range(3)] for _ in range(2))
    k, v = (rows_of(3, 50, 2, 24, seed=s, dtype=kernel.dtype) for s in (1, 2))
    kernel.keep(LayersKV(full, 0, k, v), range(40))
    kernel.keep(LayersKV(full, 40, k, v), [43, 45, 49])
    chosen = torch.stack([torch.randperm(43, generator=torch.Generator().manual_seed(s))[:35] for s in range(6)])
    kernel.copy(full, part, chosen.view(3, 2, 35), 5)
    kept = torch.cat([torch.arange(40), torch.tensor([43, 45, 49])])
    for layer in range(3):
        read = part[layer].read(torch.arange(5, 40).expand(2, -1))
        for rows, source in zip(read, kernel.format.rounded(k[layer], v[layer]), strict=True):
            for head in range(2):
                assert torch.equal(rows[head], source[kept[chosen[2 * layer + head]], head])


def test_a_store_that_grows_keeps_its_rows_and_their_positions():
    kernel = kernels()
    store = kernel.new_store(1, 16)
    k = rows_of(1000, 1, 16)
    written = []
    for start in range(0, 1000, 90):
        store.write(start, k[start : start + 9], k[start : start + 9])
        written += range(start, start + 9)
    store.reserve_drafts(700)
    assert torch.equal(store.read(torch.tensor([written]))[0][0], k[written, 0])
    assert store.room >= 1000 and store.capacity >= store.room + 700


@pytest.mark.parametrize("dtype, name, queries, cap", extent(
    [("float16", "triton-16", 8, 0.0), ("float16", "triton-16-k8v4", 3, 0.0), ("float32", "triton-16", 8, 2.0)],
    [("float16", "triton-16-k8v4", 3, 0.0)]))
def test_weights_are_the_attention_of_the_queries(dtype, name, queries, cap):
    """Of several blocks of positions, and of more lanes than a program has at a time."""
    kernel, definition = kernels(dtype, name), reference(dtype)
    k, q = rows_of(290, 2, 24, seed=1, dtype=kernel.dtype), 3 * rows_of(queries, 20, 24, seed=2, dtype=kernel.dtype)
    found = []
    for each in (kernel, definition):
        store = each.new_store(2, 24, cap)
        fill(store, k, k)
        k = store.read(torch.arange(290, device=DEVICE).expand(2, -1))[0].transpose(0, 1)  # as the cache has it
        found.append(store.weights(q, 280))
    torch.testing.assert_close(*found, atol=2e-3 if dtype == "float16" else 1e-5, rtol=0.02)


@pytest.mark.parametrize("name, share", [("triton-16-kv8", 0.54), ("triton-16-k8v4", 0.43)])
def test_a_cache_of_fewer_bits_holds_rounded_rows_in_less_memory(name, share):
    """Rows of zeros and of one number are exact, and rows of any size keep their shape."""
    k, v = (rows_of(150, 2, 128, seed=seed) for seed in (1, 2))
    for rows in (k, v):
        rows[3], rows[4], rows[5] = 0, 0.75, rows[5] * 1e6
    format = kernels(name=name).format
    exact, small = (kernels(name=each).new_store(2, 128) for each in ("triton-16", name))
    for store in (exact, small):
        fill(store, k, v)
    read = small.read(torch.arange(150, device=DEVICE).expand(2, -1))
    for found, expected in zip(read, format.rounded(k, v), strict=True):
        assert torch.equal(found.transpose(0, 1), expected)
    assert (read[1][:, 3] == 0).all() and (read[1][:, 4] == 0.75).all()
    assert small.nbytes < share * exact.nbytes / 2, "beside one of 16 bits"
    assert all(map(torch.equal, read, small.read_range(0, 150)))


@pytest.mark.parametrize("name", ["triton-16-kv8", "triton-16-k8v4"])
def test_a_row_that_is_not_finite_is_nan_for_all_that_see_it(name):
    kernel = kernels("float16", name)
    k, v = (rows_of(300, 2, 80, seed=s, dtype=kernel.dtype) for s in (1, 2))
    q = rows_of(1, 4, 80, seed=3, dtype=kernel.dtype)
    store = kernel.new_store(2, 80)
    store.reserve(301)
    fill(store, k, v)
    for number in (math.nan, math.inf):
        v[7, 1, 5] = number
        store.write(7, k[7:8], v[7:8])
        output = kernel.attention(q, KV(store, 299, k[299:], v[299:]), parents_of([-1])).output
        assert output[0, 2:].isnan().all() and output[0, :2].isfinite().all()


@pytest.mark.parametrize("dtype, length", [("float16", 300), ("float32", 2), ("bfloat16", 300)] if HAS_CUDA else [
    ("float16", 300), ("float32", 2)])  # 300 positions are three splits
def test_remainders_agree_with_the_reference(dtype, length):
    layers, kv_heads, heads, dim = 2, 2, 6, 24
    k, v = (rows_of(layers, length, kv_heads, dim, seed=s) for s in (1, 2))
    q = rows_of(layers, 2, heads, dim, seed=3)
    pick = torch.Generator().manual_seed(4)
    few = min(40, length)
    chosen = torch.stack([torch.cat([torch.randperm(length - 2, generator=pick)[: few - 2],
                                     torch.arange(length - 2, length)]) for _ in range(layers * kv_heads)])
    results = []
    for kernel in (kernels(dtype), reference(dtype)):
        full, part = ([kernel.new_store(kv_heads, dim) for _ in range(layers)] for _ in range(2))
        rows = LayersKV(full, 0, k.to(kernel.dtype), v.to(kernel.dtype))
        for layer, store in enumerate(full):
            fill(store, rows.k[layer], rows.v[layer])
        kernel.copy(full, part, chosen.view(layers, kv_heads, few), 0)
        asked = q.to(kernel.dtype)
        kv = [KV(full[i], length - 2, rows.k[i, -2:], rows.v[i, -2:]) for i in range(layers)]
        whole = [kernel.attention(asked[i], kv[i], parents_of([-1, 0])) for i in range(layers)]
        outputs = AttentionOutput(*(torch.stack(x) for x in zip(*whole, strict=True)))
        results.append(kernel.remainder(part, few, outputs))
    close(results[0], results[1], dtype, times=10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_propagate_to_the_results(bad):
    kernel = kernels("float16")
    store = kernel.new_store(2, 16)
    held = rows_of(300, 2, 16, dtype=kernel.dtype)
    fill(store, held, held)
    q = rows_of(2, 2, 16, dtype=kernel.dtype)
    q[1, 0, 3] = bad
    kv = KV(store, 300, *(rows_of(2, 2, 16, seed=s, dtype=kernel.dtype) for s in (1, 2)))
    with np.errstate(all="ignore"):
        output = kernel.attention(q, kv, parents_of([-1, 0])).output
    assert output[0].isfinite().all() and output[1, 1].isfinite().all()
    assert output[1, 0].isnan().all()


@pytest.mark.parametrize("parents", [[-1, 0, 1], [-1, 0, 0]])
def test_a_drafted_row_that_is_not_finite_changes_no_other_row(parents):
    kernel = kernels("float16")
    store = kernel.new_store(1, 16)
    prefix = rows_of(20, 1, 16, dtype=kernel.dtype)
    store.write(0, prefix, prefix)
    q, k, v = (rows_of(3, 1, 16, seed=s, dtype=kernel.dtype) for s in (1, 2, 3))
    sound = kernel.attention(q, KV(store, 20, k, v), parents_of(parents)).output
    v[1] = math.inf
    with np.errstate(all="ignore"):
        got = kernel.attention(q, KV(store, 20, k, v), parents_of(parents)).output
    assert torch.equal(got[0], sound[0]) and not got[1].isfinite().all()
    kernel.keep(LayersKV([store], 20, k[None], v[None]), [0])
    later = kernel.attention(q[:1], KV(store, 21, k[:1], v[:1]), parents_of([-1])).output
    assert later.isfinite().all()
