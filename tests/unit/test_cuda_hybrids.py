"""Delta layers in the graph of a step, and the commit of a path of all of them at once, against their launches one by
one.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.cuda_kernels import DEVICE, HAS_CUDA, kernels, rows_of
from helpers.cuda_texts import agree, by_definition, load, text_of_shared_chunks, use_small_chunks
from helpers.equality import prompt_of
from helpers.families import make_family, make_hybrid
from helpers.recorded_graphs import watched
from longdraft.cache.full import FullCache
from longdraft.cache.states import StateCache, kept_positions
from longdraft.kernels.cuda.delta import DeltaNets, stacked
from longdraft.kernels.cuda.row_invariance import delta_is_row_invariant
from longdraft.kernels.delta import DeltaRows, DeltaShape, DeltaWeights
from longdraft.model.transformer import Transformer, chain_rows, tree_rows
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree

pytestmark = pytest.mark.full

SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=12, value_dim=20, width=4)
TREE = Tree((7, 3, 9, 4, 1), (-1, 0, 0, 2, 3), ("", "a", "a", "a", "a"))
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


def weights_of(seed: int, shape: DeltaShape = SHAPE) -> DeltaWeights:
    conv = rows_of(shape.width, shape.channels, seed=seed)
    decay, bias = -rows_of(shape.value_heads, seed=seed + 1).abs(), rows_of(shape.value_heads, seed=seed + 2)
    return DeltaWeights(shape, conv, decay, bias, rows_of(shape.value_dim, seed=seed + 3), 1e-6)


def filled(cache: StateCache, count: int, seed: int) -> Sequence[DeltaRows]:
    """Rows of a forward whose inputs are random, with the states after the last of them."""
    rows = cache.append(count)
    for place, each in enumerate(rows):
        each.mixed.copy_(rows_of(*each.mixed.shape, seed=seed + place))
        each.gates.copy_(rows_of(*each.gates.shape, seed=seed + 50 + place))
    return rows


@pytest.mark.parametrize("path", [[0], [0, 2, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("num", [1, 3])
def test_all_layers_commit_a_path_with_the_bits_of_one_layer_after_another(path, num, monkeypatch):
    """And with two launches, however many layers there are."""
    ops, layers = kernels(), [weights_of(10 * layer) for layer in range(num)]
    found = []
    for is_on in (True, False):
        if not is_on:
            monkeypatch.setattr(DeltaNets, "states_after", lambda *given: False)
        launches: list[str] = []
        if not HAS_CUDA:
            count_launches(monkeypatch, launches)
        cache = StateCache(ops, layers)
        for seed in (1, 200):
            filled(cache, 6, seed)
            cache.commit(path)
        found.append([part for state in cache.current for part in state])
        if not HAS_CUDA:
            names = ["convolve_kernel", "delta_rule_kernel"]
            assert launches == 2 * (1 if is_on else num) * names
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert all(part.abs().sum() > 0 for part in found[0])


def count_launches(monkeypatch: pytest.MonkeyPatch, launches: list[str]) -> None:
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *args, **named: (launches.append(self.fn.__name__), launch(self, *args, **named)))


def test_layers_of_unlike_shapes_commit_one_after_another():
    ops, other = kernels(), SHAPE._replace(value_heads=1)
    layers = [weights_of(1), weights_of(2, other)]
    cache, alone = StateCache(ops, layers), [StateCache(ops, [layer]) for layer in layers]
    for place, each in enumerate(filled(cache, 3, 5)):
        (own,) = alone[place].append(3)
        own.mixed.copy_(each.mixed)
        own.gates.copy_(each.gates)
    for each in (cache, *alone):
        each.commit([0, 1])
    expected = [part for each in alone for state in each.current for part in state]
    found = [part for state in cache.current for part in state]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("hybrid")
    make_family(folder, "qwen3_next", num_hidden_layers=len(LAYERS), layer_types=LAYERS)
    return load(folder)


def steps(model: Transformer) -> list[torch.Tensor]:
    """What a plain step, trees of which some rows stay, and plain steps after them compute; then the states."""
    cache, found = model.new_cache(), list[torch.Tensor]()
    assert isinstance(cache, FullCache) and cache.states is not None
    model.forward(chain_rows([5, 6, 7], 0), cache)
    cache.commit([0, 1, 2])
    for rows, path in (([3], [0]), (TREE, [0, 2, 3]), ([8], [0]), ([9], [0]), (TREE, [0]), (TREE, [0, 1])):
        place = cache.length
        given = tree_rows(rows, place) if isinstance(rows, Tree) else chain_rows(rows, place)
        result = model.forward(given, cache, len(given.tokens))
        found += [result.hidden.clone(), result.logits.clone()]
        cache.commit(path)
    return found + [part.clone() for state in cache.states.current for part in state]


def test_delta_layers_in_a_graph_have_the_bits_of_their_launches_one_by_one(model, monkeypatch):
    """One graph for each bucket of rows, although a text's states change places with each step."""
    ran = watched(monkeypatch, model.kernels.graphs)
    decoder = model._decoder
    assert decoder.can_capture
    captured = steps(model)
    assert len(ran) == 7 and len(set(ran)) == 3, "for 1, 4 and 8 rows"
    monkeypatch.setattr(DeltaNets, "states_after", lambda *given: False)
    with by_definition(model):
        assert agree(captured, steps(model))
    assert len(ran) == 7


def test_texts_share_the_rows_and_states_of_whole_prompt_chunks(tmp_path, monkeypatch):
    """A text continues after a chunk of another one with the states that were kept there, and has its own bits."""
    use_small_chunks(monkeypatch)
    monkeypatch.setenv("LONGDRAFT_KERNELS", "triton-16")
    make_hybrid(tmp_path, num_hidden_layers=2, layer_types=LAYERS[:2])
    engine = longdraft.load(str(tmp_path), drafter="plain", device=DEVICE, dtype="float32", cache_ram=50)
    prompt, params = prompt_of(44), SamplingParams(max_new_tokens=3, seed=5, ignore_eos=True)
    text = text_of_shared_chunks(engine, prompt, params)
    monkeypatch.setattr(StateCache, "adopt", lambda self, kept: setattr(self, "length", max(kept)))
    *_, last = engine.generate(prompt, params)
    assert last.stats["sha256_tokens"] != text, "with other states the text is another one"


def test_states_are_kept_after_the_first_chunk_the_last_one_and_each_block():
    assert [*kept_positions(0, 9000, 9000, 2048)] == [2048, 4096, 8192] and [*kept_positions(0, 3, 3, 2048)] == []
    assert [*kept_positions(2048, 9000, 7000, 2048)] == [4096, 6144], "chunks of the prompt alone"
    assert [*kept_positions(0, 2048, 2048, 2048)] == [2048]


def test_another_text_has_graphs_of_its_own_stores_and_the_same_bits(model):
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(steps(model), steps(model), strict=True))


def test_the_check_of_the_delta_rule_finds_a_row_of_a_tree_that_differs(monkeypatch):
    ops, honest = kernels(), DeltaNets.run_placed
    assert delta_is_row_invariant(ops, weights_of(1))

    def wrong(self: DeltaNets, *given: Any) -> torch.Tensor:
        out = honest(self, *given)
        return out if len(out) == 1 else torch.cat([out[:-1], out[-1:] * 1.01])

    monkeypatch.setattr(DeltaNets, "run_placed", wrong)
    assert not delta_is_row_invariant(ops, weights_of(1))


def test_parts_of_one_tensor_are_found():
    whole = torch.arange(24, device=DEVICE).view(3, 2, 4)
    assert stacked(whole.unbind()).data_ptr() == whole.data_ptr()
    assert torch.equal(stacked(whole.unbind()), whole) and torch.equal(stacked([whole[1]]), whole[1:2])
    assert stacked([whole[0], whole[2]]).tolist() == whole[::2].tolist()
    assert stacked([whole[0], whole[2], whole[1]]) is None
    assert stacked([whole[0], whole[1].clone()]) is None
    assert stacked([whole[0], whole[0]]) is None
