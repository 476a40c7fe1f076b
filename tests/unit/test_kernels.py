"""The CPU kernels: row invariance of every variant to the bit, and agreement with formulas and the reference."""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention import obvious_attention, parents_of, path_of, random_parents, random_rows
from longdraft import kernels
from longdraft.errors import UsageError
from longdraft.kernels import KV, AttentionOutput, Geometry, LayersKV, LayerWeights
from longdraft.kernels.cpu import _cpu, native
from longdraft.kernels.reference import SPLIT, STEP
from longdraft.kernels.weights import Convolution

every_kernel = pytest.mark.parametrize("name", kernels.available())
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
every_storage = pytest.mark.parametrize("quantize", ["none", "int8", "int4"])


@every_kernel
@every_dtype
@every_storage
@given(rows=st.integers(1, 20), width=st.sampled_from([16, 33, 96, 130]), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_row_does_not_depend_on_other_rows(name, dtype, quantize, rows, width, seed):
    k = kernels.choose("cpu", dtype, name)
    x = random_rows(rows, width, seed=seed, dtype=k.dtype)
    weight = k.pack(random_rows(70, width, seed=1), random_rows(70, seed=2), quantize=quantize)
    norm = random_rows(width, seed=3, dtype=k.dtype)
    heads = random_rows(rows, 3, 16, seed=seed, dtype=k.dtype)
    cos, sin = random_rows(rows, 8, seed=4), random_rows(rows, 8, seed=5)
    gate_up = random_rows(rows, 2 * width, seed=seed, dtype=k.dtype)
    alone = [(k.linear(x[i : i + 1], weight), k.rms_norm(x[i : i + 1], norm, 1e-5), k.swiglu(gate_up[i : i + 1]),
              k.rope(heads[i : i + 1], cos[i : i + 1], sin[i : i + 1])) for i in range(rows)]
    together = (k.linear(x, weight), k.rms_norm(x, norm, 1e-5), k.swiglu(gate_up), k.rope(heads, cos, sin))
    for op, result in enumerate(together):
        assert torch.equal(result, torch.cat([parts[op] for parts in alone]))


@every_kernel
@every_dtype
@given(length=st.sampled_from([0, 1, 15, 16, 100, STEP - 3, STEP, 3 * STEP + 1, SPLIT - 5, SPLIT, SPLIT + 7]),
       rows=st.integers(1, 20), kv_heads=st.sampled_from([1, 2]), group=st.sampled_from([1, 2, 3, 4, 7, 8]),
       dim=st.sampled_from([8, 16, 64, 80, 96]), window=st.sampled_from([0, 0, 1, 40, 300, 4100]),
       seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_a_tree_node_gets_the_bits_of_plain_decoding(name, dtype, length, rows, kv_heads, group, dim, window, seed):
    """Compare every node with the same text decoded one row at a time, and with the formula in double precision."""
    kernel = kernels.choose("cpu", dtype, name)
    heads = kv_heads * group
    prefix_k, prefix_v = (random_rows(length, kv_heads, dim, seed=s, dtype=kernel.dtype) for s in (1, 2))
    k, v = (random_rows(rows, kv_heads, dim, seed=seed + s, dtype=kernel.dtype) for s in (3, 4))
    q = random_rows(rows, heads, dim, seed=seed + 5, dtype=kernel.dtype)
    parents = random_parents(rows, seed) if seed % 4 else torch.arange(-1, rows - 1, dtype=torch.int32)  # or a chain
    store = kernel.new_store(kv_heads, dim)
    store.reserve(length + rows)
    store.write(0, prefix_k, prefix_v)
    got = kernel.attention(q, KV(store, length, k, v), parents, window).output
    for row in range(rows):
        path = path_of(parents.tolist(), row)
        flat = kernel.new_store(kv_heads, dim)
        flat.reserve(length + len(path))
        flat.write(0, torch.cat([prefix_k, k[path[:-1]]]), torch.cat([prefix_v, v[path[:-1]]]))
        kv = KV(flat, length + len(path) - 1, k[[row]], v[[row]])
        plain = kernel.attention(q[row : row + 1], kv, parents_of([-1]), window).output
        assert torch.equal(got[row], plain[0])
        seen = [torch.cat([before, own[path]])[-window:] for before, own in ((prefix_k, k), (prefix_v, v))]
        exact = obvious_attention(q[row], *seen)
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        torch.testing.assert_close(got[row].float(), exact, atol=tolerance, rtol=tolerance)


@every_kernel
def test_drafted_rows_change_no_committed_row(name):
    kernel = kernels.choose("cpu", "float32", name)
    store = kernel.new_store(2, 8)
    store.reserve(20)
    k, v = random_rows(5, 2, 8, seed=1), random_rows(5, 2, 8, seed=2)
    store.write(0, k, v)
    q = random_rows(9, 2, 8, seed=3)
    kernel.attention(q, KV(store, 5, random_rows(9, 2, 8), random_rows(9, 2, 8)), random_parents(9, 1))
    held = store.read(torch.arange(5).expand(2, -1))
    assert torch.equal(held[0], k.transpose(0, 1)) and torch.equal(held[1], v.transpose(0, 1))


@every_kernel
def test_weights_are_the_attention_of_the_queries(name):
    kernel = kernels.choose("cpu", "float32", name)
    store = kernel.new_store(2, 8)
    k = random_rows(30, 2, 8, seed=1)
    store.write(0, k, k)
    q = random_rows(3, 4, 8, seed=2)
    expected = torch.zeros(2, 30)
    for query in q:
        for head in range(4):
            expected[head // 2] += (k[:, head // 2] @ query[head] / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(store.weights(q, 30), expected)


@every_kernel
@every_dtype
@every_storage
def test_the_number_of_threads_changes_no_bits(name, dtype, quantize):
    kernel = kernels.choose("cpu", dtype, name)
    x, weight = random_rows(3, 256, dtype=kernel.dtype), kernel.pack(random_rows(4096, 256, seed=1), quantize=quantize)
    store = kernel.new_store(2, 64)
    store.write(0, random_rows(9000, 2, 64, seed=2), random_rows(9000, 2, 64, seed=3))
    rows = 21
    kv = KV(store, 9000, *(random_rows(rows, 2, 64, seed=s, dtype=kernel.dtype) for s in (4, 5)))
    q = random_rows(rows, 4, 64, seed=6, dtype=kernel.dtype)
    results = []
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        attention_output = kernel.attention(q, kv, random_parents(rows, 2))
        results.append((kernel.linear(x, weight, keep_float=True), attention_output.output, attention_output.lse))
    kernels.set_threads(1)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_memory_of_many_rows_after_a_long_text_is_bounded_and_changes_no_bits(name, threads):
    """A row's states of eleven splits, of which it sees one or two, do not fit in this memory."""
    kernel = kernels.choose("cpu", "bfloat16", name)
    length, rows, heads, dim, window = 10 * SPLIT - 100, 2000, 8, 256, 300
    store = kernel.new_store(1, dim)
    prefix, k, v = (random_rows(count, 1, dim, seed=count, dtype=kernel.dtype) for count in (window, rows, rows))
    store.write(length - window, prefix, prefix)
    q = random_rows(rows, heads, dim, seed=3, dtype=kernel.dtype)
    before = native.workspace_bytes()
    kernels.set_threads(threads)
    try:
        together = kernel.attention(q, KV(store, length, k, v), parents_of(list(range(-1, rows - 1))), window)
    finally:
        kernels.set_threads(1)
    assert native.workspace_bytes() - before < 64 << 20
    for row in (0, 99, 100, 250, 1999):
        alone = kernel.attention(q[row : row + 1], KV(store, length + row, k[row : row + 1], v[row : row + 1]),
                                 parents_of([-1]), window)
        assert torch.equal(alone.output[0], together.output[row]) and torch.equal(alone.lse[0], together.lse[row])


@pytest.mark.parametrize("name", kernels.available()[:-1])
@every_dtype
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("dim", [12, 64, 80, 96, 128, 256])
def test_fast_kernels_agree_with_the_reference(name, dtype, group, dim):
    fast, slow = kernels.choose("cpu", dtype, name), kernels.choose("cpu", dtype, "reference")
    kv_heads, rows, length = 2, 9, 700
    k, v = (random_rows(length, kv_heads, dim, seed=s, dtype=fast.dtype) for s in (1, 2))
    tail = [random_rows(rows, kv_heads, dim, seed=s, dtype=fast.dtype) for s in (3, 4)]
    q = random_rows(rows, kv_heads * group, dim, seed=5, dtype=fast.dtype)
    results = []
    for kernel in (fast, slow):
        store = kernel.new_store(kv_heads, dim)
        store.write(0, k, v)
        results.append(kernel.attention(q, KV(store, length, *tail), random_parents(rows, dim + group)).output.float())
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", kernels.available()[:-1])
@every_dtype
@every_storage
@pytest.mark.parametrize("rows, inner, outer", [(1, 33, 70), (7, 256, 64), (64, 130, 200), (300, 64, 65)])
def test_fast_products_norms_and_activations_agree_with_the_reference(name, dtype, quantize, rows, inner, outer):
    fast, slow = kernels.choose("cpu", dtype, name), kernels.choose("cpu", dtype, "reference")
    x = random_rows(rows, inner, dtype=fast.dtype)
    w, bias = random_rows(outer, inner, seed=1), random_rows(outer, seed=2)
    tolerance = dict(atol=2e-5, rtol=2e-5) if dtype == "float32" else dict(atol=2e-2, rtol=1.6e-2)

    def close(of):
        torch.testing.assert_close(of(fast).float(), of(slow).float(), **tolerance)

    close(lambda k: k.linear(x, k.pack(w, bias, quantize=quantize)))
    close(lambda k: k.linear(x, k.pack(w, quantize=quantize), keep_float=True))
    close(lambda k: k.embed(k.pack(w, quantize=quantize), [0, outer - 1, 3]))
    close(lambda k: k.rms_norm(x, random_rows(inner, seed=3, dtype=k.dtype), 1e-5))
    close(lambda k: k.swiglu(random_rows(rows, 2 * inner, seed=4, dtype=k.dtype) * 30))
    heads = random_rows(rows, 3, 24, seed=5, dtype=fast.dtype)[:, 1:]  # a view, as queries are
    close(lambda k: k.rope(heads, random_rows(rows, 12, seed=6), random_rows(rows, 12, seed=7)))


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_hostile_tensors_are_refused_or_handled(name):
    kernel = kernels.choose("cpu", "bfloat16", name)
    weight = kernel.pack(random_rows(8, 16))
    x = random_rows(4, 32, dtype=kernel.dtype)
    assert torch.equal(kernel.linear(x[:, ::2], weight), kernel.linear(x[:, ::2].contiguous(), weight))
    odd = torch.zeros(65, dtype=kernel.dtype)[1:].view(4, 16)  # not aligned to words
    assert torch.equal(kernel.linear(odd, weight), torch.zeros(4, 8, dtype=kernel.dtype))
    store = kernel.new_store(2, 8)
    rows = random_rows(3, 2, 8, dtype=kernel.dtype)
    store.write(0, rows, rows)
    q = random_rows(3, 4, 8, dtype=kernel.dtype)
    for wrong in (
        lambda: kernel.linear(x, weight),
        lambda: kernel.embed(weight, [8]),
        lambda: kernel.embed(weight, [-1]),
        lambda: store.write(-1, rows, rows),
        lambda: store.write(0, rows, rows[:2]),
        lambda: store.write(0, rows[:, :1], rows[:, :1]),
        lambda: store.read(torch.tensor([[0], [10**9]])),
        lambda: store.read(torch.tensor([[0]])),
        lambda: store.weights(q, 10**9),
        lambda: kernel.attention(q, KV(store, 10**9, rows, rows), parents_of([-1, 0, 1])),
        lambda: kernel.attention(q, KV(store, 3, rows, rows), parents_of([-1, 0, 2])),
        lambda: kernel.attention(q, KV(store, 3, rows, rows), parents_of([-1, 0])),
        lambda: kernel.attention(q[:2], KV(store, 3, rows, rows), parents_of([-1, 0])),
        lambda: kernel.keep(LayersKV([store], 3, rows[None], rows[None]), [3]),
        lambda: kernel.keep(LayersKV([store, store], 3, rows[None], rows[None]), [0]),
        lambda: kernel.copy([store], [store], torch.full((1, 2, 1), 10**9), 0),
        lambda: kernel.remainder([store], 10**9, AttentionOutput(q[None], q[None], torch.zeros(1, 3, 4), q[None])),
        lambda: kernel.remainder([store], 2, AttentionOutput(q[None], q[None], torch.zeros(1, 3, 4), q[None])),
        lambda: kernel.rope(q, torch.zeros(3, 3), torch.zeros(3, 3)),
        lambda: kernel.swiglu(x[:, :5]),
        lambda: kernel.new_store(0, 8),
        lambda: kernel.new_store(2, 0),
        lambda: kernel.linear(x[:, ::2].to("meta"), weight),
        lambda: kernel.pack(random_rows(8, 16).to("meta")),
        lambda: kernel.rms_norm(x, x[0].to("meta"), 1e-5),
        lambda: store.write(0, rows.to("meta"), rows.to("meta")),
        lambda: store.read(torch.zeros(2, 1).to("meta")),
        lambda: kernel.attention(q.to("meta"), KV(store, 3, rows, rows), parents_of([-1, 0, 1])),
        lambda: kernel.attention(q[:, :0], KV(store, 3, rows, rows), parents_of([-1, 0, 1])),
        lambda: kernel.native.keep([None], 3, [0], rows[None], rows[None]),
        lambda: kernel.native.copy([None], [store.native], torch.zeros(1, 2, 1).long(), 0),
        lambda: kernel.native.remainder([store.native], 3, *[q[None, :, :0]] * 2, torch.zeros(1, 3, 0), q[None]),
    ):
        with pytest.raises(ValueError, match="CPU kernels want"):
            wrong()


def test_token_ids_outside_the_vocabulary_and_no_threads_are_refused_by_the_compiled_module():
    ids, logits = np.array([3, 8], np.int32), torch.zeros(2, 8)
    rules = dict(presence=0.5, frequency=0.0, window=4, dry=[], allowed=2, range=0, ngram=3, held=0, prompt_length=0)
    penalties = _cpu.PathPenalties(**rules, vocabulary=8, breakers=[])
    choice = _cpu.Choice(1.0, -math.inf, -math.inf, 1.0, 1.2, 4, 7, 0, 1.0, 8, [])
    for wrong in (
        lambda: penalties.extend(ids),
        lambda: penalties.extend(-ids),
        lambda: penalties.edits([8], follows=True),
        lambda: penalties.hopeful([1, 8], [-1, 0], 4.0),
        lambda: _cpu.PathPenalties(**rules, vocabulary=8, breakers=[8]),
        lambda: choice.extend(ids),
        lambda: choice.choose(logits, [1, 8], [-1, 0], 1, 0, True),
        lambda: choice.rank(logits[:1], [8], 1, False, 2, 1.0),
        lambda: choice.set_penalties(_cpu.PathPenalties(**rules, vocabulary=9, breakers=[])),
        lambda: _cpu.set_threads(0),
    ):
        with pytest.raises(ValueError, match="CPU kernels want"):
            wrong()


@pytest.mark.parametrize("name", kernels.available()[:-1])
@every_storage
def test_no_rows_times_a_weight_are_no_rows(name, quantize):
    kernel = kernels.choose("cpu", "float32", name)
    assert kernel.linear(torch.zeros(0, 64), kernel.pack(random_rows(40, 64), quantize=quantize)).shape == (0, 40)


@pytest.mark.parametrize("name", kernels.available()[:-1])
@every_dtype
def test_copies_and_remainders_agree_with_the_reference(name, dtype):
    """Copies between stores, and the remainders of the last rows of a text."""
    layers, kv_heads, heads, dim, length = 2, 2, 6, 24, 500
    k, v = (random_rows(layers, length, kv_heads, dim, seed=s) for s in (1, 2))
    q = random_rows(layers, 3, heads, dim, seed=3)
    pick = torch.Generator().manual_seed(4)
    chosen = torch.stack([torch.randperm(length, generator=pick)[:40] for _ in range(layers * kv_heads)])
    results = []
    for kernel in (kernels.choose("cpu", dtype, name), kernels.choose("cpu", dtype, "reference")):
        full, part = ([kernel.new_store(kv_heads, dim) for _ in range(layers)] for _ in range(2))
        rows = LayersKV(full, 0, k.to(kernel.dtype), v.to(kernel.dtype))
        kernel.keep(rows, range(length))
        kernel.copy(full, part, chosen.view(layers, kv_heads, 40), 0)
        held = [store.read(torch.arange(40).expand(kv_heads, -1))[0].float() for store in part]
        asked = q.to(kernel.dtype)
        kv = [KV(full[i], length - 3, rows.k[i, -3:], rows.v[i, -3:]) for i in range(layers)]
        whole = [kernel.attention(asked[i], kv[i], parents_of([-1, 0, 1])) for i in range(layers)]
        outputs = AttentionOutput(*(torch.stack(each) for each in zip(*whole, strict=True)))
        results.append((torch.stack(held), kernel.remainder(part, 40, outputs)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4 if dtype == "float32" else 2e-2, rtol=1e-2)


@pytest.mark.parametrize("name", kernels.available()[:-1])
@every_dtype
def test_layers_with_a_remainder_agree_with_the_reference(name, dtype):
    """One layer that reads a store and a remainder, which is a function of the query."""
    heads, kv_heads, dim, hidden, rows = 6, 2, 20, 48, 3
    results = []
    for kernel in (kernels.choose("cpu", dtype, name), kernels.choose("cpu", dtype, "reference")):
        layer = LayerWeights(
            torch.ones(hidden, dtype=kernel.dtype),
            kernel.pack(random_rows((heads + 2 * kv_heads) * dim, hidden, seed=1) / 7),
            kernel.pack(random_rows(hidden, heads * dim, seed=2) / 11),
            torch.ones(hidden, dtype=kernel.dtype),
            kernel.pack(random_rows(64, hidden, seed=3) / 7), kernel.pack(random_rows(hidden, 32, seed=4) / 6))
        store = kernel.new_store(kv_heads, dim)
        held = random_rows(40, kv_heads, dim, seed=5, dtype=kernel.dtype)
        store.write(0, held, held)
        remainder = random_rows(1, heads, dim + 1, dim + 1, seed=6).contiguous()
        k, v = (torch.empty(1, rows, kv_heads, dim, dtype=kernel.dtype) for _ in range(2))
        angles = random_rows(rows, dim // 2, seed=7)
        decoder = kernel.new_decoder([layer], Geometry(heads, kv_heads, dim, 1e-5))
        x, attention_output = decoder.forward(
            random_rows(rows, hidden, seed=8, dtype=kernel.dtype), angles.cos(), angles.sin(),
            [LayersKV([store], 40, k, v, remainder)], parents_of([-1, 0, 0]))
        rotated = kernel.rope(attention_output.content[0], angles.cos(), angles.sin())
        torch.testing.assert_close(rotated, attention_output.queries[0])
        results.append([part.float() for part in (x, *attention_output)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4 if dtype == "float32" else 5e-2, rtol=2e-2)


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_an_input_of_the_first_layer_besides_its_rows_is_convolved_as_in_the_reference(name):
    heads, dim, hidden, rows = 2, 16, 32, 3
    norm, angles, results = torch.ones(hidden), random_rows(rows, dim // 2, seed=1), []
    for kernel in (kernels.choose("cpu", "float32", name), kernels.choose("cpu", "float32", "reference")):
        widths = 3 * hidden, hidden, 2 * hidden, hidden, 16  # hidden == heads * dim == the width of the MLP
        qkv, out, gate_up, down, projection = (
            kernel.pack(random_rows(width, hidden, seed=width) / 6) for width in widths)
        layer = LayerWeights(norm, qkv, out, norm, gate_up, down,
                             attention_conv=Convolution(random_rows(2, 2, hidden, seed=6), projection))
        k, v = (torch.empty(1, rows, heads, dim) for _ in range(2))
        decoder = kernel.new_decoder([layer], Geometry(heads, heads, dim, 1e-5))
        x, _ = decoder.forward(random_rows(rows, 2 * hidden, seed=8), angles.cos(), angles.sin(),
                               [LayersKV([kernel.new_store(heads, dim)], 0, k, v)], parents_of([-1, 0, 1]))
        results.append(x)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-3)


def test_an_unknown_variant_is_refused_and_the_known_ones_are_listed(monkeypatch):
    monkeypatch.setenv("LONGDRAFT_KERNELS", "abacus")
    with pytest.raises(UsageError, match=r"LONGDRAFT_KERNELS is 'abacus'; allowed here: auto, .*reference"):
        kernels.choose("cpu", "float32")


def test_without_the_compiled_module_the_reference_is_used_and_a_warning_logged(monkeypatch, caplog):
    monkeypatch.setattr(native, "IMPORT_ERROR", "no module named _cpu")
    assert kernels.choose("cpu", "float32").name == "reference"
    assert "reinstall longdraft with a C++ compiler" in caplog.text


@pytest.mark.parametrize("name", kernels.available()[:-1])
@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_propagate_to_the_results(name, dtype, bad):
    """NaN weights must lead to an error about the model, not to plausible text."""
    kernel = kernels.choose("cpu", dtype, name)
    store = kernel.new_store(2, 16)
    store.write(0, random_rows(300, 2, 16), random_rows(300, 2, 16))
    q = random_rows(2, 2, 16, dtype=kernel.dtype)
    q[1, 0, 3] = bad
    kv = KV(store, 300, *(random_rows(2, 2, 16, seed=s, dtype=kernel.dtype) for s in (1, 2)))
    output = kernel.attention(q, kv, parents_of([-1, 0])).output
    assert output[0].isfinite().all() and output[1, 1].isfinite().all()
    assert output[1, 0].isnan().all()
    gate_up = random_rows(2, 32, dtype=kernel.dtype)
    gate_up[0, 3] = float("nan")
    assert kernel.swiglu(gate_up)[0, 3].isnan()


@every_kernel
@pytest.mark.parametrize("is_chain", [True, False])
def test_a_drafted_row_that_is_not_finite_changes_no_other_row(name, is_chain):
    """Values that are not finite reach no row before or beside their own, in this forward or a later one."""
    kernel = kernels.choose("cpu", "bfloat16", name)
    store = kernel.new_store(1, 16)
    prefix = random_rows(20, 1, 16, dtype=kernel.dtype)
    store.write(0, prefix, prefix)
    q, k, v = (random_rows(3, 1, 16, seed=s, dtype=kernel.dtype) for s in (1, 2, 3))
    parents = parents_of([-1, 0, 1] if is_chain else [-1, 0, 0])
    sound = kernel.attention(q, KV(store, 20, k, v), parents).output
    v[1] = float("inf")
    got = kernel.attention(q, KV(store, 20, k, v), parents).output
    assert torch.equal(got[0], sound[0]) and not got[1].isfinite().all()
    kernel.keep(LayersKV([store], 20, k[None], v[None]), [0])
    later = kernel.attention(q[:1], KV(store, 21, k[:1], v[:1]), parents_of([-1])).output
    assert later.isfinite().all()


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_a_product_does_not_depend_on_what_its_threads_make_of_subnormal_numbers(name):
    """torch.set_flush_denormal changes the thread that calls it, and no other one."""
    kernel = kernels.choose("cpu", "float32", name)
    x, weight = random_rows(8, 256) * 1e-19, kernel.pack(random_rows(4096, 256, seed=1) * 1e-20)
    kernels.set_threads(2)
    expected = kernel.linear(x, weight)
    assert torch.count_nonzero(expected) == expected.numel()
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("PyTorch cannot turn subnormal numbers off here")
        found = [kernel.linear(x, weight) for _ in range(9)]
    finally:
        torch.set_flush_denormal(False)
        kernels.set_threads(1)
    assert all(torch.equal(each.view(torch.int32), expected.view(torch.int32)) for each in found)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_its_own_threads():
    kernel = kernels.choose("cpu", "float32")
    x, weight = random_rows(8, 512), kernel.pack(random_rows(2048, 512, seed=1))
    kernels.set_threads(2)
    expected = kernel.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(kernel.linear(x, weight), expected) else 1)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    kernels.set_threads(1)
    if done == (0, 0):
        os.kill(child, 9)
    assert done == (child, 0)


def test_weights_of_another_dtype_are_refused():
    bf16, float32 = (kernels.choose("cpu", dtype) for dtype in ("bfloat16", "float32"))
    weight = float32.pack(random_rows(8, 16))
    for wrong in (lambda: bf16.linear(random_rows(2, 16, dtype=bf16.dtype), weight), lambda: bf16.embed(weight, [1]),
                  lambda: bf16.embed(bf16.pack(random_rows(8, 16)), [])):
        with pytest.raises(ValueError, match="CPU kernels want"):
            wrong()
    store = bf16.new_store(2, 8)
    rows = random_rows(4, 2, 8, dtype=bf16.dtype)
    store.write(0, rows, rows)
    strided = torch.tensor([-1, 7, 0, 7, 1, 7, 2, 7], dtype=torch.int32)[::2]
    for parents in (strided, parents_of([])):
        with pytest.raises(ValueError, match="CPU kernels want"):
            bf16.attention(rows[: len(parents)], KV(store, 4, rows[: len(parents)], rows[: len(parents)]), parents)
