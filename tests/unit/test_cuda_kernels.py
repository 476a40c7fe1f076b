"""The layers of the CUDA kernels against the reference, and their row invariance (see helpers.cuda_kernels)."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it


from helpers.attention import parents_of
from helpers.cuda_kernels import DEVICE, DTYPES, HAS_CUDA, close, every_dtype, fill, kernels, reference, rows_of
from longdraft.kernels import KV, AttentionOutput, Geometry, LayersKV, LayerWeights, Taps
from longdraft.kernels.cuda import linear, prefill
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.kernels import CudaKernels
from longdraft.kernels.cuda.launch import RecentlyUsed
from longdraft.kernels.cuda.linear import CudaLinear
from longdraft.kernels.cuda.row_invariance import first_difference
from longdraft.kernels.interface import TokenRows
from longdraft_bench.models.shapes import SHAPES


@every_dtype
@pytest.mark.parametrize("quantize", ["none", "int8"])
@pytest.mark.parametrize("shape", [(70, 48), (130, 128)])
def test_linears_agree_with_the_reference_and_are_row_invariant(dtype, quantize, shape):
    ours, definition = kernels(dtype), reference(dtype)
    weight, bias = rows_of(*shape, seed=1) / math.sqrt(shape[1]), rows_of(shape[0], seed=2)
    x = rows_of(18, shape[1], dtype=ours.dtype)
    packed, wanted = (k.pack(weight, bias, quantize=quantize) for k in (ours, definition))
    for keep_float in (False, True):
        together = ours.linear(x, packed, keep_float=keep_float)
        close(together, definition.linear(x, wanted, keep_float=keep_float), dtype)
        alone = torch.cat([ours.linear(x[i : i + 1], packed, keep_float=keep_float) for i in (0, 17)])
        assert torch.equal(together[[0, 17]], alone)
    assert torch.equal(ours.embed(packed, [3, 0, 3]), definition.embed(wanted, [3, 0, 3]))
    close(packed.matmul(x), definition.linear(x, wanted), dtype, times=4)


def test_the_splits_of_a_large_weight_depend_on_its_shape_alone():
    packed = kernels().pack(rows_of(64, 1024, seed=1))
    assert packed.splits > 1
    small, large = (packed.partial_sums(rows_of(n, 1024), 16).sums.shape for n in (1, 17))
    assert small == (packed.splits, 1, 64) and large == (packed.splits, 17, 64)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float32"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_an_activation_in_one_launch_with_its_product_has_the_bits_of_two(dtype, has_bias, monkeypatch):
    kernel, width, inner = kernels(dtype), 96, 128
    weight, bias = rows_of(2 * width, inner, seed=1) / 9, rows_of(2 * width, seed=2) if has_bias else None
    packed, x = kernel.pack(weight, bias), rows_of(18, inner, dtype=kernel.dtype)
    assert packed.fuses_gate
    assert not any(kernel.pack(weight, bias, quantize=quantize).fuses_gate for quantize in ("int8", "int4"))
    for rows in (1, 18):
        one, two = (torch.empty(rows, width, dtype=kernel.dtype, device=DEVICE) for _ in range(2))
        packed.multiply_gated(x[:rows], kernel.tile, one)
        with monkeypatch.context() as patch:
            patch.setattr(linear, "FUSES_GATE", False)
            packed.multiply_gated(x[:rows], kernel.tile, two)
        assert torch.equal(one, two) and torch.equal(one, kernel.swiglu(kernel.linear(x[:rows], packed)))


@pytest.mark.parametrize("shape", [SHAPES["llama-3.1-8b"], SHAPES["qwen2.5-1.5b"]])
def test_large_models_multiply_gate_and_up_in_one_launch(shape):
    width = shape["intermediate_size"]
    tiling = linear.Tiling.of(2 * width, shape["hidden_size"], torch.bfloat16)
    assert tiling.splits == 1 and 2 * width % tiling.columns == 0 and shape["hidden_size"] % tiling.block == 0


@every_dtype
@pytest.mark.parametrize("rounds_once", [False, True])
def test_norms_activations_and_rotations_agree_with_the_reference(dtype, rounds_once):
    ours, definition = kernels(dtype), reference(dtype)
    x, norm = rows_of(5, 90, dtype=ours.dtype), rows_of(90, seed=1, dtype=ours.dtype)
    heads, cos, sin = rows_of(5, 3, 20, dtype=ours.dtype), rows_of(5, 10, seed=4), rows_of(5, 10, seed=5)
    for operation in (lambda k: k.rms_norm(x, norm, 1e-5, rounds_once=rounds_once), lambda k: k.swiglu(x),
                      lambda k: k.rope(heads, cos, sin)):
        close(operation(ours), operation(definition), dtype)
    gate_up = torch.full((1, 4), -3e4, device=DEVICE, dtype=ours.dtype)  # exp of the gate overflows
    assert ours.swiglu(gate_up).abs().max() == 0


def layers_of(kernel, geometry: Geometry, num: int, norms: str, bias: bool,
              quantize: str = "none") -> list[LayerWeights]:
    heads, kv_heads, dim = geometry[:3]
    hidden, inner, made = 48, 40, []
    for index in range(num):
        def weight(out: int, into: int, seed: int, index: int = index) -> object:
            return kernel.pack(rows_of(out, into, seed=100 * index + seed) / math.sqrt(into),
                               rows_of(out, seed=seed + 50) if bias else None, quantize=quantize)

        def norm(width: int, seed: int) -> torch.Tensor:
            return (1 + rows_of(width, seed=seed) / 9).to(kernel.dtype)

        widths = {"none": None, "each": (dim, dim), "all": (heads * dim, kv_heads * dim)}[norms]
        made.append(LayerWeights(
            norm(hidden, 1), weight((heads + 2 * kv_heads) * dim, hidden, 2), weight(hidden, heads * dim, 3),
            norm(hidden, 4), weight(2 * inner, hidden, 5), weight(hidden, inner, 6), window=30 * (index % 2),
            q_norm=widths and norm(widths[0], 7), k_norm=widths and norm(widths[1], 8),
            rotates=index != 1 or norms != "none"))
    return made


FAMILIES = {
    "llama": (Geometry(6, 2, 20, 1e-5), "none", False),
    "qwen2": (Geometry(4, 4, 16, 1e-6), "none", True),
    "qwen3": (Geometry(8, 2, 16, 1e-6), "each", False),
    "olmo2": (Geometry(4, 2, 16, 1e-6, post_norm=True, rounds_once=True), "all", False),
    "granite": (Geometry(4, 1, 32, 1e-5, query_factor=0.7, residual_factor=0.3), "none", True),
}


MIXED = [("float32", "llama", True), ("float16", "llama", False), ("float16", "qwen2", False),
         ("float16", "qwen3", True), ("float16", "olmo2", True), ("float16", "granite", False)]
if HAS_CUDA:
    MIXED = [(dtype, family, has_remainder)
             for dtype in DTYPES for family in FAMILIES for has_remainder in (False, True)]


@pytest.mark.full
@pytest.mark.parametrize("dtype, family, has_remainder", MIXED)
def test_layers_agree_with_the_reference_and_are_row_invariant(dtype, family, has_remainder):
    """The decoder over several layers, in buckets of rows, with a remainder that is a function of the query."""
    geometry, norms, bias = FAMILIES[family]
    heads, kv_heads, dim = geometry[:3]
    num, rows, length, results = 2, 5, 40, []  # the second layer has a window of 30
    parents = parents_of([-1, 0, 0, 2, 3])
    for kernel in (kernels(dtype), reference(dtype)):
        decoder = kernel.new_decoder(layers_of(kernel, geometry, num, norms, bias), geometry)
        stores = [kernel.new_store(kv_heads, dim) for _ in range(num)]
        for index, store in enumerate(stores):
            held = rows_of(length, kv_heads, dim, seed=index + 5, dtype=kernel.dtype)
            store.reserve(length + rows)
            fill(store, held, held)
        remainder = rows_of(num, heads, dim + 1, dim + 1, seed=6) / 3 if has_remainder else None
        x, angles = rows_of(rows, 48, seed=8, dtype=kernel.dtype), rows_of(rows, dim // 2, seed=7)

        def run(chosen: list[int], parents: torch.Tensor, decoder=decoder, stores=stores, remainder=remainder, x=x,
                angles=angles, kernel=kernel) -> tuple[torch.Tensor, ...]:
            k, v = (torch.empty(num, len(chosen), kv_heads, dim, dtype=kernel.dtype, device=DEVICE) for _ in range(2))
            taps = Taps((1, num), torch.empty(2, len(chosen), 48, dtype=kernel.dtype, device=DEVICE))
            out, attention_output = decoder.forward(x[chosen], angles[chosen].cos(), angles[chosen].sin(),
                                            [LayersKV(stores, length, k, v, remainder, taps=taps)], parents)
            assert torch.equal(taps.rows[1], out)
            return (out, k, v, taps.rows, *attention_output)

        results.append(run(list(range(rows)), parents))
        if len(results) == 1:
            alone = run([0], parents_of([-1]))
            path = run([0, 2, 3, 4], parents_of([-1, 0, 1, 2]))
            for index, (whole, one, four) in enumerate(zip(results[0], alone, path, strict=True)):
                axis = 1 if index else 0
                assert torch.equal(whole.select(axis, 0), one.select(axis, 0))
                assert torch.equal(whole.index_select(axis, torch.tensor([0, 2, 3, 4], device=DEVICE)), four)
    for got, expected in zip(*results, strict=True):
        close(got, expected, dtype, times=10)


@pytest.mark.full
@pytest.mark.parametrize("dtype, family, piece", [("float16", "llama", 16), ("float32", "olmo2", 16384)])
def test_a_chunk_of_a_prompt_agrees_with_the_reference(dtype, family, piece, monkeypatch):
    """The positions before the chunk are read in one piece or in three, the last one shorter."""
    monkeypatch.setattr(prefill, "DEVICE_PIECE", piece)
    geometry, norms, bias = FAMILIES[family]
    _, kv_heads, dim = geometry[:3]
    reported = prefill.REPORTED_ROWS
    if not HAS_CUDA:  # the interpreter takes minutes for a chunk of more than 128 rows
        reported = 6
        monkeypatch.setattr(prefill, "REPORTED_ROWS", reported)
    num, length, rows, results = 2, 40, reported + 12, []
    for kernel in (kernels(dtype), reference(dtype)):
        decoder = kernel.new_decoder(layers_of(kernel, geometry, num, norms, bias, quantize="int8"), geometry)
        stores = [kernel.new_store(kv_heads, dim) for _ in range(num)]
        for index, store in enumerate(stores):
            held = rows_of(length, kv_heads, dim, seed=index + 5, dtype=kernel.dtype)
            store.reserve(length + rows)
            fill(store, held, held)
        k, v = (torch.empty(num, rows, kv_heads, dim, dtype=kernel.dtype, device=DEVICE) for _ in range(2))
        angles = rows_of(rows, dim // 2, seed=7)
        out, attention_output = decoder.forward(
            rows_of(rows, 48, seed=8, dtype=kernel.dtype), angles.cos(), angles.sin(),
            [LayersKV(stores, length, k, v, is_prompt=True)], torch.arange(-1, rows - 1, dtype=torch.int32))
        results.append((out, k, v, *(part[:, -reported:] for part in attention_output)))
    for got, expected in zip(*results, strict=True):
        close(got, expected, dtype, times=20)


@pytest.mark.parametrize("quantize, factor", [("none", 1.0), ("int8", 1.7)])
def test_a_decoder_that_embeds_tokens_computes_the_same_rows(quantize, factor):
    geometry, kernel = Geometry(2, 1, 16, 1e-5), kernels("float16")
    decoder = kernel.new_decoder(layers_of(kernel, geometry, 1, "none", False), geometry)
    table, tokens = kernel.pack(rows_of(30, 48, seed=9), quantize=quantize), [4, 29, 0]
    angles, parents = rows_of(3, 8, seed=7), parents_of([-1, 0, 0])
    store, found = kernel.new_store(1, 16), []
    for is_embedded in (False, True):
        k, v = (torch.empty(1, 3, 1, 16, dtype=kernel.dtype, device=DEVICE) for _ in range(2))
        kv = LayersKV([store], 0, k, v)
        if is_embedded:
            x = kernel.embed(table, tokens)
            x = x if factor == 1 else x * factor
            out, attended = decoder.forward(x, angles.cos(), angles.sin(), [kv], parents)
        else:
            rows = TokenRows(table, factor, tokens, angles.cos().cpu(), angles.sin().cpu())
            out, attended = decoder.forward_tokens(rows, [kv], parents)
        found.append((out, k, v, *attended))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    with pytest.raises(ValueError, match="token ids below 30"):
        decoder.forward_tokens(rows._replace(tokens=[4, 30, 0]), [kv], parents)


def test_the_most_recently_used_buffers_are_kept():
    made, held = [], RecentlyUsed(2)
    for key in ("a", "b", "a", "c", "a"):
        assert held.get(key, lambda key=key: made.append(key) or key.upper()) == key.upper()
    assert made == ["a", "b", "c"] and [*held._held] == ["c", "a"]
    held.drop("b")
    held.drop("c")
    assert [*held._held] == ["a"]


@pytest.mark.full
def test_nothing_keeps_the_cache_of_a_finished_request_alive():
    """Buffers and graphs are cached, but hold no cache alive, and are dropped when their cache is freed."""
    geometry = Geometry(2, 1, 16, 1e-5)
    kernel = kernels("float16")
    decoder = kernel.new_decoder(layers_of(kernel, geometry, 1, "none", False), geometry)
    for rows in (1, 3, 3):
        store = kernel.new_store(1, 16)
        store.reserve(8)
        k, v = (torch.empty(1, rows, 1, 16, dtype=kernel.dtype, device=DEVICE) for _ in range(2))
        angles = rows_of(rows, 8, seed=7)
        decoder.forward(rows_of(rows, 48, seed=8, dtype=kernel.dtype), angles.cos(), angles.sin(),
                        [LayersKV([store], 0, k, v, None)], parents_of(list(range(-1, rows - 1))))
        assert len(decoder._buffers._held) == len(kernel.graphs._graphs) == 1
        gone = weakref.ref(store)
        del store
        gc.collect()
        assert gone() is None and not decoder._buffers._held and not kernel.graphs._graphs


@pytest.mark.full
def test_a_partial_cache_is_freed_when_its_request_ends():
    """What it gives rows has buffers for each partial cache (`Kernels.remainder`)."""
    kernel = kernels("float16")
    store = kernel.new_store(1, 16)
    store.write(0, rows_of(20, 1, 16, seed=1), rows_of(20, 1, 16, seed=2))
    q = rows_of(1, 3, 2, 16, seed=3, dtype=kernel.dtype)
    kernel.remainder([store], 20, AttentionOutput(q, q, rows_of(1, 3, 2, seed=4), q))
    held = kernel._partial_attentions._held._held
    assert len(held) == 1
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None and not held


def test_the_row_invariance_check_names_the_operation_that_is_wrong(monkeypatch):
    """The wrong product is wrong in one row of a tree of more than two."""
    geometry = Geometry(2, 1, 16, 1e-5)
    kernel = kernels("float16")
    decoder = kernel.new_decoder(layers_of(kernel, geometry, 1, "none", False), geometry)
    assert first_difference(kernel, decoder, geometry, 48, 9, 3, 2, has_remainder=True) is None
    honest, planted = CudaLinear.partial_sums, 0

    def wrong(self, x, tile, buffer=None):
        parts = honest(self, x, tile, buffer)
        if len(x) > 2 and self.out_features == planted:
            parts.sums[:, 2] *= 1.01
        return parts

    monkeypatch.setattr(CudaLinear, "partial_sums", wrong)
    for width, stage in ((64, "queries, keys"), (48, "after attention")):
        planted = width
        found = first_difference(kernel, decoder, geometry, 48, 9, 3, 2)
        assert found and stage in found and found.endswith("row 2 of 3")


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("rows", [1, 5])
def test_a_layer_has_nine_kernels(rows, monkeypatch):
    """In 16 bits, as a Llama has them."""
    from triton.runtime import interpreter

    geometry, hidden, names, launch = Geometry(4, 2, 16, 1e-5), 64, list[str](), interpreter.GridExecutor.__call__
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda executor, *args, **named: (
        names.append(executor.fn.__name__), launch(executor, *args, **named)))
    kernel = kernels("float16")

    def weight(out: int, into: int, seed: int) -> CudaLinear:
        return kernel.pack(rows_of(out, into, seed=seed, dtype=torch.float16) / 8)

    norm = torch.ones(hidden, dtype=torch.float16)
    layer = LayerWeights(norm, weight(128, hidden, 1), weight(hidden, 64, 2), norm, weight(256, hidden, 3),
                         weight(hidden, 128, 4))
    x, angles = rows_of(rows, hidden, seed=8, dtype=torch.float16), rows_of(rows, 8, seed=7)
    held = rows_of(400, 2, 16, seed=5, dtype=torch.float16)

    def launches(layers: int) -> int:
        decoder, stores = CudaDecoder(kernel, [layer] * layers, geometry), [kernel.new_store(2, 16)] * layers
        stores[0].reserve(400 + rows)
        fill(stores[0], held, held)
        names.clear()
        k, v = (torch.empty(layers, rows, 2, 16, dtype=torch.float16) for _ in range(2))
        decoder.forward(x, angles.cos(), angles.sin(), [LayersKV(stores, 400, k, v)], parents_of(range(-1, rows - 1)))
        return len(names)

    one = launches(1)
    assert launches(2) - one == 9, names


def test_arguments_that_do_not_fit_are_refused():
    kernel = kernels()
    store = kernel.new_store(2, 16)
    store.write(0, rows_of(9, 2, 16), rows_of(9, 2, 16))
    q, rows = rows_of(3, 4, 16), rows_of(3, 2, 16)
    weight = kernel.pack(rows_of(70, 48))
    for wrong in (
        lambda: kernel.linear(rows_of(2, 47), weight),
        lambda: kernel.embed(weight, [70]), lambda: kernel.embed(weight, [-1]), lambda: kernel.embed(weight, []),
        lambda: kernel.attention(q, KV(store, 10**9, rows, rows), parents_of([-1, 0, 1])),
        lambda: kernel.attention(q[:, :3], KV(store, 3, rows, rows), parents_of([-1, 0, 1])),
        lambda: kernel.attention(q, KV(store, 3, rows, rows), parents_of([-1, 0])),
        lambda: kernel.keep(LayersKV([store], 3, rows[None], rows[None]), [3]),
        lambda: kernel.swiglu(rows_of(2, 5)), lambda: CudaKernels(DEVICE, "float32", "triton-17"),
    ):
        with pytest.raises(ValueError, match="CUDA kernels want"):
            wrong()
