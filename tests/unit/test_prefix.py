"""The prefix tree finds the longest beginning that it has, gives back the same bits, and stays within its bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.cache.prefix import Lease, PrefixTree, common_prefix
from longdraft.kernels.interface import DEVICE_CHUNK, STORE_BLOCK
from longdraft.speculation.reuse import shareable_rows

HEADS, DIM = 2, 8


def ids_of(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def cache_of(ids: np.ndarray, name: str | None = None, dtype: str = "float32", extra: int = 0) -> FullCache:
    """A cache whose rows are a function of the tokens up to their own, and `extra` rows of other tokens after them."""
    chosen = kernels.choose("cpu", dtype, name)
    cache = FullCache(chosen, [(HEADS, DIM)] * 2)
    tokens = np.concatenate([ids, np.full(extra, 77)]).astype(np.int64)
    state = torch.from_numpy(np.cumsum(tokens * 2654435761 % 65521))
    factors = torch.arange(1, 2 * HEADS * DIM + 1).view(2, 1, HEADS, DIM)
    k = (state[None, :, None, None] * factors % 509 - 254).float() / 64
    tail = cache.append(k.to(chosen.dtype).contiguous(), (k + 1).to(chosen.dtype).contiguous())
    assert tail.length == 0
    cache.commit(range(len(state)))
    return cache


def rows(cache: FullCache, length: int) -> list[torch.Tensor]:
    places = torch.arange(length).expand(HEADS, -1)
    return [part for store in cache.stores for part in store.read(places)]


def taken(tree: PrefixTree, cache: FullCache, ids: np.ndarray, limit: int | None = None) -> int:
    """Fill an empty cache with what the tree has of `ids`."""
    found = tree.match("", ids, len(ids) if limit is None else limit)
    for stores, count in found.parts:
        cache.adopt(stores, count)
    assert cache.length == found.length
    return found.length


ONE = cache_of(ids_of([1])).block_bytes(1)
TEXTS = [(ids, cache_of(ids)) for start in range(4) for count in (0, 3, 300, STORE_BLOCK + 1)
         for ids in [ids_of([start] + [5] * count)]]


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 100, 255, STORE_BLOCK - 1, STORE_BLOCK, 2 * STORE_BLOCK + 7])
def test_rows_come_back_bit_for_bit(name, dtype, length):
    ids, tree = ids_of(range(length)), PrefixTree(1 << 30)
    source = cache_of(ids, name, dtype, extra=40)
    tree.publish("", ids, source)
    for limit in {1, length // 2 + 1, length}:
        cache = FullCache(source._kernels, [(HEADS, DIM)] * 2)
        assert taken(tree, cache, ids, limit) == limit
        assert all(torch.equal(a, b) for a, b in zip(rows(cache, limit), rows(source, limit), strict=True))


@pytest.mark.parametrize("name", [kernels.available()[0], "reference"])
def test_a_text_that_writes_below_its_length_changes_no_other_text(name):
    """Whole blocks are shared. A cache that is cut and written again writes to its own copy."""
    ids, tree = ids_of(range(STORE_BLOCK + 50)), PrefixTree(1 << 30)
    source = cache_of(ids, name)
    before = [part.clone() for part in rows(source, len(ids))]
    tree.publish("", ids, source)
    cache = FullCache(source._kernels, [(HEADS, DIM)] * 2)
    taken(tree, cache, ids)
    for each in (cache, source):
        each.truncate(STORE_BLOCK - 30)
        each.append(torch.full((2, 5, HEADS, DIM), 9.0), torch.full((2, 5, HEADS, DIM), 9.0))
        each.commit(range(5))
        fresh = FullCache(source._kernels, [(HEADS, DIM)] * 2)
        assert taken(tree, fresh, ids) == len(ids)
        assert all(torch.equal(a, b) for a, b in zip(rows(fresh, len(ids)), before, strict=True))
        assert rows(each, STORE_BLOCK)[0][0, STORE_BLOCK - 30, 0] == 9


def test_stores_of_other_shapes_and_places_are_refused():
    chosen = kernels.choose("cpu", "float32")
    store, other, wide = chosen.new_store(2, 8), chosen.new_store(2, 8), chosen.new_store(2, 16)
    other.write(0, torch.ones(300, 2, 8), torch.ones(300, 2, 8))
    for source, first, count in ((wide, 0, 0), (other, 256, 10), (other, 0, 5000)):
        with pytest.raises(ValueError, match="want"):
            store.append(source, first, count)
    store.append(other, 0, 300)
    with pytest.raises(ValueError, match="whole blocks"):
        store.append(other, 0, 10)


@given(st.randoms(use_true_random=False), st.integers(1, 20))
@settings(max_examples=15)
def test_the_tree_finds_what_an_obvious_list_of_texts_finds(pick: random.Random, count: int):
    tree, texts = PrefixTree(1 << 40), []
    for _ in range(count):
        start = ids_of([])
        if texts and pick.random() < 0.8:
            start = pick.choice(texts)[: pick.choice([1, 5, STORE_BLOCK, 5000])]
        end = [pick.randrange(3) for _ in range(pick.choice([0, 1, 3, 60]))] + [9] * pick.choice([0, 0, STORE_BLOCK])
        ids = np.concatenate([start, ids_of(end)])
        expected = max((common_prefix(ids, text) for text in texts), default=0)
        assert tree.match("", ids, len(ids)).length == expected
        if len(ids):
            tree.publish("", ids, cache_of(ids))
            texts.append(ids)
    assert tree.match("other group", ids_of([1, 2, 3]), 3).length == 0


@given(st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_bytes_stay_within_the_bound_and_leased_pieces_stay(pick: random.Random):
    tree = PrefixTree(pick.choice([0, ONE - 1, ONE, 3 * ONE, 20 * ONE, 60 * ONE]))
    leases: list[Lease] = []
    for _ in range(40):
        ids, cache = pick.choice(TEXTS)
        leases.append(tree.publish("", ids, cache) if pick.random() < 0.7 else tree.match("", ids, len(ids)).lease)
        if pick.random() < 0.8:
            leases.pop(pick.randrange(len(leases))).release()
        if pick.random() < 0.3:
            leased = {piece for piece in tree._pieces if piece.leases}
            tree.make_room(0)
            assert tree._pieces == leased and tree.idle_bytes == 0
        assert tree.nbytes <= tree.max_bytes and tree.nbytes == sum(piece.nbytes for piece in tree._pieces)
    for lease in leases:
        lease.release()
    assert not any(piece.leases for piece in tree._pieces)
    tree.limit(0)
    assert tree.nbytes == 0 and not tree._pieces and not tree._roots


def test_the_least_recently_used_end_is_evicted_first():
    one = cache_of(ids_of([1])).block_bytes(1)
    tree = PrefixTree(2 * one)
    for token in (1, 2):
        tree.publish("", ids_of([token] * 9), cache_of(ids_of([token] * 9))).release()
    tree.match("", ids_of([1] * 9), 9).lease.release()
    tree.publish("", ids_of([3] * 9), cache_of(ids_of([3] * 9))).release()
    assert [tree.match("", ids_of([token] * 9), 9).length for token in (1, 2, 3)] == [9, 0, 9]


def test_a_longer_text_takes_the_place_of_its_own_beginning():
    """A conversation that grows does not fill the tree with its former turns."""
    tree = PrefixTree(1 << 30)
    for length in (10, 100, 200):
        tree.publish("", ids_of(range(length)), cache_of(ids_of(range(length))))
    assert len(tree._pieces) == 1 and tree.match("", ids_of(range(300)), 300).length == 200
    tree.publish("", ids_of(range(50)), cache_of(ids_of(range(50))))
    assert len(tree._pieces) == 1


def test_on_a_device_only_whole_chunks_of_prompts_are_shared():
    """Rows of the last chunk of a prompt, and of what was written after it, are computed by other operations."""
    chunk = DEVICE_CHUNK
    for prompt, length, expected in ((1, 1, 0), (chunk, chunk, 0), (chunk + 1, chunk, chunk),
                                     (3 * chunk, 5 * chunk, 2 * chunk), (9 * chunk, chunk + 5, chunk)):
        assert shareable_rows(True, prompt, length) == expected
        assert shareable_rows(False, prompt, length) == length
