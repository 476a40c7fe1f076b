"""The CUDA kernels of hybrids, mixtures of experts and Gemmas against the reference, and their texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.cuda_kernels import HAS_CUDA, close, every_dtype, kernels, reference, rows_of
from helpers.cuda_texts import LENGTH, NEW, agree, by_definition, generate, load
from helpers.equality import liar, prompt_of
from helpers.families import CPU_FAMILIES, GEMMA4, HYBRIDS, MIXTURES, UNIFIED, make_family
from helpers.generation import by_name
from helpers.recorded_graphs import watched
from longdraft.cache.full import FullCache
from longdraft.kernels.cuda import decoder as decoders
from longdraft.kernels.cuda import experts as cuda_experts
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.forward_buffers import ForwardBuffers
from longdraft.kernels.delta import DeltaRows, DeltaShape, DeltaWeights
from longdraft.kernels.experts import experts_forward
from longdraft.kernels.experts import route as routed
from longdraft.kernels.weights import Experts, Mlp
from longdraft.model.transformer import Rows, Transformer, chain_rows
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.step import Tally
from longdraft_bench.cuda.models import switched

pytestmark = pytest.mark.full

HIDDEN, INNER, NUM = 40, 24, 6
TREE = [-1, 0, 1, 0, -1, 4, 2, 6, 3]


def delta_weights(shape: DeltaShape) -> DeltaWeights:
    return DeltaWeights(shape, rows_of(shape.width, shape.channels, seed=1), -rows_of(shape.value_heads, seed=2).abs(),
                        rows_of(shape.value_heads, seed=3), rows_of(shape.value_dim, seed=4), 1e-6)


def applied(ops, weights, mixed, gates, z, parents, before=None):
    """The outputs of rows, and the state after the last one."""
    text = DeltaRows(before or ops.new_state(weights), ops.new_state(weights), mixed, gates)
    return ops.delta_rule(weights, [text], z, torch.tensor(parents, dtype=torch.int32)), text.after


@every_dtype
@pytest.mark.parametrize("shape", [DeltaShape(1, 3, 32, 48, 2), DeltaShape(2, 2, 16, 64, 4)])
def test_the_delta_rule_agrees_with_the_reference_and_a_rows_path_decides_its_bits(dtype, shape):
    """After a state that is not zero. A row of zeros has no direction."""
    ours, definition = kernels(dtype), reference(dtype)
    weights, count = delta_weights(shape), len(TREE)
    mixed, z = (rows_of(count, width, seed=seed, dtype=ours.dtype)
                for width, seed in ((shape.channels, 5), (shape.channels + shape.values, 6)))
    z = z[:, shape.channels :]  # the columns after others, as in a layer
    mixed[1] = 0
    gates = rows_of(count, 2 * shape.value_heads, seed=7) * 4
    _, before = applied(ours, weights, mixed, gates, None, range(-1, count - 1))
    found, after = applied(ours, weights, mixed, gates, z, TREE, before)
    expected, state = applied(definition, weights, mixed, gates, z, TREE, before)
    close(found, expected, dtype, times=5)
    close(after.matrix, state.matrix, "float32", times=5)
    assert torch.equal(after.history, state.history)
    for row in range(count):  # one by one, each after its own path
        path, node = [], row
        while node >= 0:
            path.insert(0, node)
            node = TREE[node]
        chained, last = applied(ours, weights, mixed[path], gates[path], z[path], range(-1, len(path) - 1), before)
        assert torch.equal(chained[-1], found[row])
        alone = before
        for node in path:
            out, alone = applied(ours, weights, mixed[node : node + 1], gates[node : node + 1], z[node : node + 1],
                                 [-1], alone)
        assert torch.equal(out[0], found[row])
        assert all(torch.equal(*pair) for pair in zip(alone, last, strict=True))
        if row == count - 1:
            assert all(torch.equal(*pair) for pair in zip(alone, after, strict=True))


@every_dtype
def test_activations_and_gates_agree_with_the_reference(dtype):
    ours, definition = kernels(dtype), reference(dtype)
    x, gates = rows_of(3, 90, dtype=ours.dtype) * 4, rows_of(3, 100, seed=1, dtype=ours.dtype)[:, 10:55]
    for operation in (lambda k: k.geglu(x), lambda k: k.clamped_swiglu(x, 1.702, 3.0),
                      lambda k: k.gate(x[:, :45], gates), lambda k: k.soft_cap(x.float(), 2.5),
                      lambda k: k.sigmoid(x.float())):
        close(operation(ours), operation(definition), dtype, times=4)
    x[1] = torch.nan
    assert ours.clamped_swiglu(x, 1.702, 3.0)[1].isnan().all() and ours.geglu(x)[1].isnan().all()


def mixture(ops, quantize: str = "none", bias: bool = False, shared: bool = False, hidden: int = HIDDEN,
            inner: int = INNER, **settings: object) -> Experts:
    def packed(out: int, into: int, seed: int) -> object:
        return ops.pack(rows_of(out, into, seed=seed) * 0.3, rows_of(out, seed=seed + 50) if bias else None,
                        quantize=quantize)

    def mlp(seed: int) -> Mlp:
        return Mlp(packed(2 * inner, hidden, seed), packed(hidden, inner, seed + 10))

    return Experts(ops.pack(rows_of(NUM, hidden, seed=99)), tuple(map(mlp, range(NUM))), 3, True, False,
                   shared=mlp(90) if shared else None, shared_gate=packed(1, hidden, 91) if shared else None,
                   **settings)


@pytest.mark.parametrize("settings", [
    dict(), dict(shared=True), dict(bias=True, clamp=(1.702, 3.0)), dict(quantize="int8"), dict(quantize="int4"),
    dict(has_gelu=True, scales=rows_of(NUM, seed=5))])
def test_experts_agree_with_the_reference_and_a_rows_company_changes_nothing(settings):
    for dtype in ("float32", "float16") if not settings else ("float16",):
        ours, definition = kernels(dtype), reference(dtype)
        x = rows_of(18, HIDDEN, seed=3, dtype=ours.dtype)
        mine, theirs = mixture(ours, **settings), mixture(definition, **settings)
        together = experts_forward(ours, x, mine)
        # The reference quantises rows that meet weights of 4 bits.
        close(together, experts_forward(definition, x, theirs), dtype, times=60 if "int4" in settings.values() else 8)
        for rows in ([0], [17], [5, 2]):
            assert torch.equal(experts_forward(ours, x[rows], mine), together[rows])
        assert ours.groups_experts(mine)


@pytest.mark.parametrize("settings", [dict(shared=True), dict(bias=True, clamp=(1.702, 3.0)),
                                      dict(has_gelu=True, hidden=40, inner=530)])
def test_experts_of_4_bits_have_the_bits_of_one_expert_after_another(settings):
    """With products in one part and in two, and more rows of an expert than a program has."""
    for dtype in ("float32", "float16") if "inner" in settings else ("float16",):
        ours, obvious = kernels(dtype), kernels(dtype)
        mine = mixture(ours, "int4", **dict(hidden=390, inner=24) | settings)
        x = rows_of(36, mine.mlps[0].down.out_features, seed=3, dtype=ours.dtype)
        together = experts_forward(ours, x, mine)
        assert {mine.mlps[0].gate_up.splits, mine.mlps[0].down.splits} == {1, 2}
        with switched(cuda_experts, "GROUPS_INT4", False):
            assert not obvious.groups_experts(mine) and ours.groups_experts(mine)
            assert torch.equal(together, experts_forward(obvious, x, mine))
        assert torch.equal(experts_forward(ours, x[[30]], mine), together[[30]])


def test_experts_are_multiplied_together_if_each_of_their_two_weights_has_one_form():
    ours, definition = kernels("float16"), reference("float16")
    of_4_bits, of_16 = mixture(ours, "int4", bias=True), mixture(ours, bias=True)
    assert not ours.groups_experts(of_16._replace(mlps=(*of_16.mlps[:3], *of_4_bits.mlps[3:])))
    x = rows_of(18, HIDDEN, seed=3, dtype=ours.dtype)
    for gate_up, down in ((of_4_bits, of_16), (of_16, of_4_bits)):
        crossed = of_16._replace(mlps=tuple(Mlp(each.gate_up, other.down) for each, other in
                                            zip(gate_up.mlps, down.mlps, strict=True)))
        together = experts_forward(ours, x, crossed)
        assert ours.groups_experts(crossed)
        theirs = [mixture(definition, quantize, bias=True).mlps
                  for quantize in (("int4", "none") if gate_up is of_4_bits else ("none", "int4"))]
        expected = mixture(definition)._replace(mlps=tuple(Mlp(each.gate_up, other.down) for each, other in
                                                           zip(*theirs, strict=True)))
        close(together, experts_forward(definition, x, expected), "float16", times=60)
        assert torch.equal(experts_forward(ours, x[[5, 2]], crossed), together[[5, 2]])


def test_experts_are_chosen_as_in_the_definition():
    """Equal probabilities, and rows that are not finite."""
    ours = kernels("float16")
    experts = mixture(ours)
    logits = rows_of(9, NUM, seed=2, dtype=ours.dtype).round()
    logits[0] = 0
    logits[1, 2] = torch.inf
    logits[2, 4] = torch.nan
    logits[3] = -torch.inf
    logits[4, :4] = -torch.inf
    for each in (experts, experts._replace(normalises=False, rounds=True)):
        found, expected = ours.route(logits, each), routed(logits, each)
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights, equal_nan=True, atol=1e-6, rtol=1e-3)
        assert found.weights[1:4].isnan().all() and not found.weights[4:].isnan().any()


# Hybrids; experts and sinks; norms on both sides, GELU and soft caps; two rotations; heads of two sizes
QUICK = {"qwen3_next": ["linear_attention", "full_attention"], "gpt_oss": ["sliding_attention", "full_attention"],
         "gemma2": ["sliding_attention", "full_attention"], "ministral3": None,
         "gemma4, experts": ["sliding_attention", "full_attention"]}  # kinds of layers in the interpreter
EVERY = [*HYBRIDS, *MIXTURES, *CPU_FAMILIES, *GEMMA4, *UNIFIED]
PARAMS = SamplingParams(max_new_tokens=NEW, seed=11, min_p=0.05, repetition_penalty=1.3, penalty_window=7)


@pytest.mark.parametrize("name", EVERY if HAS_CUDA else QUICK)
def test_families_agree_with_the_reference_and_every_drafter_writes_the_plain_text(tmp_path, name, monkeypatch):
    layers = None if HAS_CUDA else QUICK[name]
    make_family(tmp_path, name, **(dict(num_hidden_layers=2, layer_types=layers) if layers else {}))
    model, definition = load(tmp_path), load(tmp_path, "reference")
    assert isinstance(model._decoder, CudaDecoder)
    check_rows_of(model, definition)
    made: list[object] = []
    monkeypatch.setattr(decoders, "ForwardBuffers", lambda *given, **named: made.append(given) or ForwardBuffers(
        *given, **named))
    plain = generate(model, PARAMS, by_name("plain"))
    assert len(made) == 1, "a text has one graph for plain decoding"
    tally = Tally()
    assert generate(model, PARAMS, lambda given: liar("half true", plain, LENGTH), tally) == plain
    assert tally.accepted.total() > 0 and tally.steps < NEW
    if HAS_CUDA or name == "qwen3_next":  # the interpreter takes a minute for each
        assert generate(model, PARAMS, by_name("magicdec", chain=2, budget=40, sinks=4, refresh=5)) == plain


def check_rows_of(model: Transformer, definition: Transformer) -> None:
    """Logits after a prompt are near those of the reference; rows of a tree have the bits of rows one by one."""
    tokens, found = prompt_of(40), []
    # The true continuation is the path 0, 2, 3 of a tree; its other nodes are wrong.
    rows = Rows([tokens[30], 7, tokens[31], tokens[32], 9], [30, 31, 31, 32, 32], [-1, 0, 0, 2, 2])
    for each in (model, definition):
        cache = each.new_cache()
        prompt = each.forward(chain_rows(tokens[:30], 0), cache, 2, is_prompt=True).logits
        cache.commit(range(30))
        tree = each.forward(rows, cache, 5).logits
        cache.commit([0, 2, 3])
        found.append((prompt, tree, each.forward(chain_rows(tokens[33:35], 33), cache, 2).logits))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=3e-4)
    alone = model.new_cache()
    model.forward(chain_rows(tokens[:30], 0), alone, is_prompt=True)
    alone.commit(range(30))
    logits = []
    for place in range(30, 35):
        logits.append(model.forward(chain_rows(tokens[place : place + 1], place), alone, 1).logits)
        alone.commit([0])
    _, tree, behind = found[0]
    assert torch.equal(torch.cat([tree[[0, 2, 3]], behind]), torch.cat(logits))
    if not alone.states:  # test_cuda_hybrids.py has those of layers with states
        alone.truncate(30)
        with by_definition(model):
            expected = rows_of_forward(model, alone, rows)
        assert agree(rows_of_forward(model, alone, rows), expected)


def rows_of_forward(model: Transformer, cache: FullCache, rows: Rows) -> list[torch.Tensor]:
    """What a forward of these rows computes."""
    result = model.forward(rows, cache, len(rows.tokens))
    found = [result.logits, *result.attention_output, *(part for parts in cache.provisional for part in parts)]
    cache.commit([])
    return [part.clone() for part in found]


@pytest.mark.parametrize("name", ["qwen3_next", "gemma4, experts"])
def test_drafts_with_a_remainder_are_part_of_a_graph(tmp_path, name, monkeypatch):
    """With maps of all layers in one tensor, and one by one where the heads differ. Other maps give other rows."""
    make_family(tmp_path, name, num_hidden_layers=2, layer_types=QUICK[name])
    model = load(tmp_path)
    cache, append = model.new_cache(), FullCache.append
    model.forward(chain_rows([5, 6, 7], 0), cache)
    cache.commit(range(3))
    maps = [[0.3 * rows_of(model.config.num_heads, store.dim + 1, store.dim + 1, seed=10 * turn + layer)
             for layer, store in enumerate(cache.stores)] for turn in range(2)]
    if name == "qwen3_next":
        maps = [torch.stack(each) for each in maps]
    ran = watched(monkeypatch, model.kernels.graphs)
    found = []
    for given in (None, *maps):
        monkeypatch.setattr(FullCache, "append", lambda self, k, v, given=given: append(self, k, v)._replace(
            remainder=given))
        for rows in (Rows([5], [3], [-1]), Rows([5, 7, 9], [3, 4, 4], [-1, 0, 0])):
            captured = rows_of_forward(model, cache, rows)
            with by_definition(model):
                assert agree(captured, rows_of_forward(model, cache, rows))
            found.append(captured[0])
    assert len(ran) == 6 and len(set(ran)) == 4, "a graph for each number of rows, with and without a remainder"
    assert not any(torch.equal(found[place], found[place + 2]) for place in range(4))


def test_experts_of_4_bits_are_part_of_a_graph(tmp_path, monkeypatch):
    """A graph holds no wait of the host. Expert by expert, the host launches the layers, which have the same bits."""
    make_family(tmp_path, "qwen3_moe", num_hidden_layers=2)
    found, rows = [], Rows([5, 7, 6], [3, 4, 4], [-1, 0, 0])
    for is_on in (True, False):
        monkeypatch.setattr(cuda_experts, "GROUPS_INT4", is_on)
        model = load(tmp_path, quantize="int4")
        assert model._decoder.can_capture == is_on
        cache = model.new_cache()
        model.forward(chain_rows([5, 6, 7], 0), cache)
        cache.commit(range(3))
        found += [rows_of_forward(model, cache, rows) for _ in range(2)]
        with by_definition(model):
            assert agree(found[-1], rows_of_forward(model, cache, rows))
    for parts in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(parts, found[0], strict=True))


WINDOWED, DELTAS = ["sliding_attention", "full_attention"], ["full_attention", "linear_attention"]
KERNELS = {"llama": (10, None), "gemma2": (10, WINDOWED), "gemma3": (10, WINDOWED), "gemma4": (10, WINDOWED),
           "glm4": (10, None), "ministral3": (10, None), "qwen3_moe": (13, None), "gpt_oss": (13, WINDOWED),
           "gemma4, experts": (22, WINDOWED), "gemma4, inputs": (16, WINDOWED),
           "qwen3_next": (19, DELTAS)}  # in the mean: 18 and 20


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_has_so_many_kernels(tmp_path, name, monkeypatch):
    """Those of longdraft and of PyTorch, for one row: what docs/cuda.md says. No layer adds any beside the graph."""
    from triton.runtime import interpreter

    expected, kinds = KERNELS[name]
    counted, beside, launch = list[str](), list[str](), interpreter.GridExecutor.__call__
    is_counting = False

    def launched(executor: Any, *args: Any, **named: Any) -> None:
        nonlocal is_counting
        was, is_counting = is_counting, False  # the interpreter itself computes with tensors
        if was:
            counted.append(executor.fn.__name__)
        launch(executor, *args, **named)
        is_counting = was

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **kwargs or {})
            name = function.overloadpacket.__name__
            if not function.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view")):
                (counted if is_counting else beside).append(name)
            return found

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    totals = []
    for layers in (2, 4):
        folder = tmp_path / str(layers)
        changes = {} if kinds is None else dict(layer_types=kinds * (layers // 2))
        changes |= dict(num_kv_shared_layers=0) if name == "gemma4, inputs" else {}
        make_family(folder, name, num_hidden_layers=layers, **changes)
        model = load(folder)
        cache, run = model.new_cache(), model.kernels.graphs.run
        model.forward(chain_rows([5, 6, 7], 0), cache)
        cache.commit(range(3))

        def replay(owner: object, work: Callable[[], None], key: object = None, run: Any = run) -> None:
            nonlocal is_counting
            is_counting = True
            run(owner, work, key)
            is_counting = False

        monkeypatch.setattr(model.kernels.graphs, "run", replay)
        counted.clear(), beside.clear()
        with Counting():
            model.forward(chain_rows([5], 3), cache)
        totals.append((len(counted), len(beside)))
    (few, beside_few), (many, beside_many) = totals
    assert many - few == 2 * expected, counted
    assert beside_many == beside_few, beside
