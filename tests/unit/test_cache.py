"""Caches: provisional rows, commits, and the rows of a partial cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import kernels
from longdraft.cache import row_selection
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.errors import UsageError

LAYERS, HEADS, DIM = 2, 2, 8
KERNELS = kernels.choose("cpu", "float32")
REFERENCE = kernels.choose("cpu", "float32", "reference")


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, HEADS, DIM, generator=generator) for _ in range(2))


def layered(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [L, count, Hkv, D]."""
    return tuple(torch.stack(of) for of in zip(*(rows(count, seed + layer) for layer in range(LAYERS)), strict=True))


def new_full(chosen: kernels.Kernels = KERNELS, windows: tuple[int, ...] = ()) -> FullCache:
    return FullCache(chosen, [(HEADS, DIM)] * LAYERS, windows)


def held(cache: FullCache, layer: int) -> torch.Tensor:
    return cache.stores[layer].read(torch.arange(cache.length).expand(HEADS, -1))[0].transpose(0, 1)


@given(st.lists(st.tuples(st.integers(1, 9), st.randoms(use_true_random=False)), max_size=12))
@settings(deadline=None)
def test_commit_keeps_the_given_rows_in_order_and_drops_the_others(steps):
    cache, expected = new_full(), [torch.zeros(0, HEADS, DIM)] * LAYERS
    for number, (count, pick) in enumerate(steps):
        kept = sorted(pick.sample(range(count), pick.randint(0, count)))
        k, v = layered(count, 100 * number)
        assert cache.append(k, v).length == cache.length
        expected = [torch.cat([before, new[kept]]) for before, new in zip(expected, k, strict=True)]
        cache.commit(kept)
    assert all(torch.equal(held(cache, layer), expected[layer]) for layer in range(LAYERS))


def test_growing_does_not_move_existing_rows():
    cache = new_full(REFERENCE)
    k, v = rows(3000, 1)
    places = []
    for _ in range(4):
        cache.append(*(torch.stack([x] * LAYERS) for x in (k, v)))
        cache.commit(range(3000))
        places.append(cache.stores[0].k[0].data_ptr())
    assert len(set(places)) == 1
    assert torch.equal(held(cache, 1), k.repeat(4, 1, 1))


# Which positions a partial cache holds.


@given(length=st.integers(1, 200), sinks=st.integers(0, 9), recent=st.integers(1, 20), heavy=st.integers(0, 30),
       seed=st.integers(0, 99))
def test_selection_holds_sinks_recent_and_the_heaviest_between(length, sinks, recent, heavy, seed):
    weights = torch.rand(3, length, generator=torch.Generator().manual_seed(seed))
    budget = sinks + recent + heavy
    chosen = row_selection.heaviest_positions(weights, budget, sinks, recent)
    assert chosen.shape == (3, min(budget, length))
    for head in range(3):
        got = chosen[head].tolist()
        assert got == sorted(set(got))
        if length > budget:
            middle = sorted(range(sinks, length - recent), key=lambda i: -weights[head, i].item())[:heavy]
            assert got == sorted([*range(sinks), *middle, *range(length - recent, length)])


def write(full: FullCache, count: int, seed: int) -> None:
    full.append(*layered(count, seed))
    full.commit(range(count))


def queries(seed: int) -> kernels.AttentionOutput:
    """Queries of some accepted tokens; their attention outputs do not matter for the selection."""
    q = torch.randn(LAYERS, 2, 4, DIM, generator=torch.Generator().manual_seed(seed))
    return kernels.AttentionOutput(q, torch.zeros_like(q), torch.zeros(LAYERS, 2, 4), q)


def verified(seed: int) -> kernels.AttentionRows:
    return kernels.AttentionRows.all(queries(seed))


def positions_held(full: FullCache, partial: PartialCache, layer: int, head: int) -> list[int]:
    """The positions of a partial cache's rows, found by their values."""
    everything = held(full, layer)[:, head]
    inside = held(partial._rows, layer)[:, head]
    matches = (inside[:, None] == everything[None]).all(-1)
    assert (matches.sum(1) == 1).all(), "every row held is exactly one row of the text"
    return matches.float().argmax(1).tolist()


SIZE = PartialBudget(budget=40, sinks=4, recent=8, room=8)


@given(st.integers(1, 120), st.lists(st.integers(1, 6), max_size=40), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_a_partial_cache_stays_within_its_budget_and_keeps_sinks_and_recent_rows(prompt, steps, seed):
    full = new_full()
    partial = PartialCache(full, KERNELS, SIZE)
    for number, count in enumerate([prompt, *steps]):
        write(full, count, 1000 * seed + 10 * number)
        partial.update(verified(seed + number))
        assert partial.length <= SIZE.budget
        for layer in range(LAYERS):
            for head in range(HEADS):
                got = positions_held(full, partial, layer, head)
                assert len(got) == len(set(got)) == partial.length
                wanted = {*range(min(4, full.length)), *range(max(0, full.length - 8), full.length)}
                assert wanted <= set(got)
                if full.length <= SIZE.budget:
                    assert got == list(range(full.length))


def test_between_selections_only_new_rows_are_written(monkeypatch):
    full = new_full()
    partial = PartialCache(full, KERNELS, SIZE)
    write(full, 100, 1)
    partial.update(verified(1))
    copied = []
    original = type(KERNELS).copy
    monkeypatch.setattr(type(KERNELS), "copy", lambda self, sources, targets, positions, start: (
        copied.append(len(positions)), original(self, sources, targets, positions, start))[1])
    write(full, 3, 50)
    partial.update(verified(2))
    assert copied == [3]
    assert partial.num_selections == 1


def test_static_and_full_modes():
    full = new_full()
    static = PartialCache(full, KERNELS, SIZE, "static")
    whole = PartialCache(full, KERNELS, SIZE, "full")
    write(full, 100, 1)
    static.update(verified(1))
    before = positions_held(full, static, 0, 0)
    write(full, 5, 50)
    static.update(verified(2))
    whole.update(verified(2))
    assert positions_held(full, static, 0, 0) == before
    assert whole.length == 105 and whole.nbytes == 0


def test_drafted_rows_are_dropped():
    full = new_full()
    partial = PartialCache(full, KERNELS, SIZE)
    write(full, 20, 1)
    partial.update(verified(1))
    partial.append(*layered(3, 9))
    partial.commit([0, 2])
    assert partial.append(*layered(1, 9)).length == 22, "a draft sees the drafts before it"
    partial.commit([0])
    partial.drop_drafts()
    assert partial.length == full.length == 20


@pytest.mark.parametrize("windows", [(0, 0), (0, 60), (60, 50)])
def test_the_remainder_is_the_attention_to_the_omitted_keys(windows):
    """With it, the last rows' attention over the partial cache equals their attention over the whole text, or over
    their layer's window."""
    chain = torch.tensor([-1, 0, 1], dtype=torch.int32)
    for kernel in (KERNELS, REFERENCE):
        full = new_full(kernel, windows)
        partial = PartialCache(full, kernel, SIZE)
        write(full, 97, 1)
        tail = layered(3, 70)
        q = torch.randn(3, 4, DIM, generator=torch.Generator().manual_seed(3))
        kv = full.append(*tail)
        each = [kernel.attention(q, kv.layer(layer), chain, windows[layer]) for layer in range(LAYERS)]
        whole = kernels.AttentionOutput(*(torch.stack(part) for part in zip(*each, strict=True)))
        full.commit([0, 1, 2])
        partial.update(kernels.AttentionRows.all(whole))
        assert partial.length < full.length
        held = partial.append(*tail)
        rests = kernel.remainder(held.stores, held.length, whole)
        for layer in range(LAYERS):
            # The same queries, over the partial cache's rows and the remainders.
            kv = held.layer(layer)._replace(length=held.length - 3, remainder=rests[layer])
            again = kernel.attention(q, kv, chain)
            torch.testing.assert_close(again.output, whole.output[layer], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(again.lse, whole.lse[layer], atol=1e-5, rtol=1e-4)


def test_a_layer_with_a_window_holds_the_latest_rows():
    full = new_full(windows=(0, 60))
    partial = PartialCache(full, KERNELS, SIZE)
    for seed in (1, 5):  # while the window sees everything, it chooses as the others do
        write(full, 50, seed)
        partial.update(verified(1))
        latest = [*range(full.length - partial.length, full.length)]
        assert [positions_held(full, partial, layer, 0) == latest for layer in range(2)] == [False, full.length > 60]


def test_without_queries_the_sinks_and_the_latest_rows_are_held():
    full = new_full()
    partial = PartialCache(full, KERNELS, SIZE)
    write(full, 100, 1)
    partial.update(None)
    assert positions_held(full, partial, 0, 0) == [*range(4), *range(72, 100)]


@pytest.mark.parametrize("sizes", [dict(budget=10), dict(sinks=-1), dict(recent=0), dict(room=0)])
def test_an_impossible_budget_is_refused(sizes):
    with pytest.raises(UsageError, match="allowed"):
        PartialBudget(**sizes)


# Other selections.


def test_streaming_holds_the_first_and_the_last():
    assert row_selection.latest(10, 20, 4).tolist() == list(range(10))
    assert row_selection.latest(100, 20, 4).tolist() == [*range(4), *range(84, 100)]
    full = new_full()
    write(full, 100, 1)
    chosen = row_selection.streaming(20, 4)(0, full.stores[0], 100, queries(1).queries[0])
    assert chosen.tolist() == [[*range(4), *range(84, 100)]] * HEADS


def test_pooled_weights_select_neighbours_too():
    full = new_full()
    write(full, 100, 1)
    asked = queries(1).queries[0]
    weights = full.stores[0].weights(asked, 100)
    chosen = row_selection.pooled(30, 4, 8)(0, full.stores[0], 100, asked)
    for head in range(HEADS):
        mean = [weights[head, max(0, i - 2) : i + 3].sum().item() for i in range(100)]
        heavy = sorted(range(4, 92), key=lambda i: -mean[i])[:18]
        assert chosen[head].tolist() == sorted([*range(4), *heavy, *range(92, 100)])


def reference_chunks(keys: torch.Tensor, query: torch.Tensor, budget: int, recent: int) -> list[list[int]]:
    """TriForce's selection from all keys [Hkv, n, D] at once, head by head, as lists of positions."""
    length, chosen = keys.shape[1], []
    for head, group in enumerate(query.view(HEADS, -1, DIM)):
        chunks = [list(range(start, min(start + 8, length))) for start in range(0, length, 8)]
        late = [chunk for chunk in chunks if chunk[-1] >= length - recent]
        others = chunks[1 : len(chunks) - len(late)]
        scores = torch.stack([group @ keys[head, chunk].mean(0) for chunk in others], -1) / DIM**0.5  # [g, chunks]
        order = scores.softmax(-1).sum(0).argsort(descending=True).tolist()
        num = (budget - 8 - sum(len(chunk) for chunk in late)) // 8
        held = [chunks[0], *(others[i] for i in order[:num]), *late]
        chosen.append(sorted(place for chunk in held for place in chunk))
    return chosen


@pytest.mark.parametrize("length", [49, 60, 64, 71, 200, 5000])
@pytest.mark.parametrize("recent", [8, 11])
def test_chunks_are_selected_by_their_mean_key_however_the_text_grew(length, recent):
    full = new_full()
    chunks = row_selection.Chunks(LAYERS, 48, recent)
    for number, count in enumerate([length // 2, length - length // 2]):
        write(full, count, 10 * number)
        for layer, asked in enumerate(queries(number).queries):
            got = chunks(layer, full.stores[layer], full.length, asked)
            if full.length > 48:
                keys = held(full, layer).transpose(0, 1)
                assert got.tolist() == reference_chunks(keys, asked[-1], 48, recent)
            else:
                assert got.tolist() == [list(range(full.length))] * HEADS
    assert chunks.nbytes == LAYERS * HEADS * (length // 8) * DIM * 4


def test_the_means_of_old_chunks_are_not_computed_again(monkeypatch):
    full = new_full()
    chunks = row_selection.Chunks(1, 48, 8)
    read = []
    original = type(full.stores[0]).read
    monkeypatch.setattr(type(full.stores[0]), "read",
                        lambda self, at: (read.append(at.shape[1]), original(self, at))[1])
    for count, expected in ((1000, [1000]), (7, []), (1, [8]), (20, [16])):
        write(full, count, count)
        chunks(0, full.stores[0], full.length, queries(1).queries[0])
        assert read == expected
        read.clear()


def test_select_again_selects_unless_the_whole_text_is_held():
    full = new_full()
    partial = PartialCache(full, KERNELS, SIZE)
    for count, expected in ((20, 0), (100, 1), (1, 1)):
        write(full, count, count)
        partial.update(verified(1))
        assert partial.num_selections == expected
    partial.select_again()
    write(full, 1, 9)
    partial.update(verified(2))
    assert partial.num_selections == 2 and partial.length == SIZE.selected
    small = PartialCache(full, KERNELS, PartialBudget(500, 4, 8, 8))
    small.update(verified(1))
    small.select_again()
    small.update(verified(1))
    assert small.num_selections == 0 and positions_held(full, small, 1, 1) == list(range(full.length))
