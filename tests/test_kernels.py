"""Row invariance of the reference kernels, and their agreement with obvious formulas."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import kernels
from longdraft.kernels import KV
from longdraft.kernels.reference import SPLIT, STEP

DTYPES = ("float32", "bfloat16")


def random_rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 20), width=st.sampled_from([16, 33, 96, 130]), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_row_does_not_depend_on_its_company(dtype, rows, width, seed):
    k = kernels.choose("cpu", dtype)
    x = random_rows(rows, width, seed=seed, dtype=k.dtype)
    weight = k.pack(random_rows(70, width, seed=1), random_rows(70, seed=2))
    norm = random_rows(width, seed=3, dtype=k.dtype)
    heads = random_rows(rows, 3, 16, seed=seed, dtype=k.dtype)
    cos, sin = random_rows(rows, 8, seed=4), random_rows(rows, 8, seed=5)
    gate_up = random_rows(rows, 2 * width, seed=seed, dtype=k.dtype)
    alone = [(k.linear(x[i : i + 1], weight), k.rms_norm(x[i : i + 1], norm, 1e-5), k.swiglu(gate_up[i : i + 1]),
              k.rope(heads[i : i + 1], cos[i : i + 1], sin[i : i + 1])) for i in range(rows)]
    together = (k.linear(x, weight), k.rms_norm(x, norm, 1e-5), k.swiglu(gate_up), k.rope(heads, cos, sin))
    for op, result in enumerate(together):
        assert torch.equal(result, torch.cat([parts[op] for parts in alone]))


def obvious_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One query [H, D] over keys and values [n, Hkv, D] in double precision."""
    group = q.shape[0] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    weights = torch.einsum("hd,nhd->hn", q.double(), k).div(math.sqrt(q.shape[1])).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v).float()


def random_parents(rows: int, seed: int) -> list[int]:
    pick = random.Random(seed)
    return [pick.randrange(-1, row) for row in range(rows)]


def path_of(parents: list[int], row: int) -> list[int]:
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


@pytest.mark.parametrize("dtype", DTYPES)
@given(length=st.sampled_from([0, 1, 100, STEP - 3, STEP, 3 * STEP + 1, SPLIT - 5, SPLIT, SPLIT + 7]),
       rows=st.integers(1, 14), kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_a_tree_node_gets_the_bits_of_plain_decoding(dtype, length, rows, kv_heads, seed):
    """Every node, against the same text laid out flat and decoded one row at a time; and against the formula."""
    kernel = kernels.choose("cpu", dtype)
    dim, heads = 16, 4
    prefix_k, prefix_v = (random_rows(length, kv_heads, dim, seed=s, dtype=kernel.dtype) for s in (1, 2))
    k, v = (random_rows(rows, kv_heads, dim, seed=seed + s, dtype=kernel.dtype) for s in (3, 4))
    q = random_rows(rows, heads, dim, seed=seed + 5, dtype=kernel.dtype)
    parents = random_parents(rows, seed)
    store = kernel.new_store(kv_heads, dim)
    store.reserve(length + rows)
    store.write(0, prefix_k, prefix_v)
    got = kernel.attention(q, KV(store, length, k, v), parents)
    for row in range(rows):
        path = path_of(parents, row)
        flat = kernel.new_store(kv_heads, dim)
        flat.reserve(length + len(path))
        flat.write(0, torch.cat([prefix_k, k[path[:-1]]]), torch.cat([prefix_v, v[path[:-1]]]))
        plain = kernel.attention(q[row : row + 1], KV(flat, length + len(path) - 1, k[[row]], v[[row]]), [-1])
        assert torch.equal(got[row], plain[0])
        exact = obvious_attention(q[row], torch.cat([prefix_k, k[path]]), torch.cat([prefix_v, v[path]]))
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        torch.testing.assert_close(got[row].float(), exact, atol=tolerance, rtol=tolerance)


def test_drafted_rows_leave_no_trace_in_what_is_committed():
    kernel = kernels.choose("cpu", "float32")
    store = kernel.new_store(2, 8)
    store.reserve(20)
    k, v = random_rows(5, 2, 8, seed=1), random_rows(5, 2, 8, seed=2)
    store.write(0, k, v)
    q = random_rows(9, 2, 8, seed=3)
    kernel.attention(q, KV(store, 5, random_rows(9, 2, 8), random_rows(9, 2, 8)), random_parents(9, 1))
    held = store.read(torch.arange(5).expand(2, -1))
    assert torch.equal(held[0], k.transpose(0, 1)) and torch.equal(held[1], v.transpose(0, 1))


def test_weights_are_the_attention_of_the_queries():
    kernel = kernels.choose("cpu", "float32")
    store = kernel.new_store(2, 8)
    k = random_rows(30, 2, 8, seed=1)
    store.write(0, k, k)
    q = random_rows(3, 4, 8, seed=2)
    expected = torch.zeros(2, 30)
    for query in q:
        for head in range(4):
            expected[head // 2] += (k[:, head // 2] @ query[head] / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(store.weights(q, 30), expected)


def test_the_number_of_threads_changes_no_bits():
    kernel = kernels.choose("cpu", "bfloat16")
    x, weight = random_rows(3, 256, dtype=kernel.dtype), kernel.pack(random_rows(4096, 256, seed=1))
    store = kernel.new_store(4, 64)
    store.write(0, random_rows(5000, 4, 64, seed=2), random_rows(5000, 4, 64, seed=3))
    kv = KV(store, 5000, random_rows(3, 4, 64, seed=4), random_rows(3, 4, 64, seed=5))
    q = random_rows(3, 4, 64, seed=6, dtype=kernel.dtype)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append((kernel.linear(x, weight, keep_float=True), kernel.attention(q, kv, [-1, 0, 0])))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
