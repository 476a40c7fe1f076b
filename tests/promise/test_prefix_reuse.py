"""Prefix reuse: a text that takes rows over from former texts is the text that reads everything itself."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import longdraft
from helpers.block import block_of
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import DRAFTERS, READING, SETTINGS, batch_params, prompt_of
from helpers.extents import extent
from helpers.families import make_hybrid
from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.engine.loaded_model import DrafterChoice
from longdraft.kernels.interface import STORE_BLOCK
from longdraft.model.transformer import Transformer
from longdraft.parallel import SingleProcess
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation import reuse
from longdraft.speculation.reuse import shareable_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("long")
    make_checkpoint(where, num_key_value_heads=2, max_position_embeddings=16384)
    return where


@pytest.fixture
def engine(folder) -> longdraft.Engine:
    return longdraft.load(str(folder), drafter="plain", dtype="bfloat16", cache_ram=100)


def text_of(generation: Generation) -> list[int]:
    for _ in generation:
        pass
    return generation.tokens.tolist()


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward from now on."""
    seen: list[int] = []
    forward_batch = Transformer.forward_batch
    monkeypatch.setattr(Transformer, "forward_batch", lambda self, requests: (
        seen.extend(len(request.rows.tokens) for request in requests), forward_batch(self, requests))[1])
    return seen


# In the core, one drafter for each way of reading the cache.
@pytest.mark.parametrize("drafter", [name if name in READING.values() else pytest.param(name, marks=pytest.mark.full)
                                     for name in DRAFTERS])
def test_every_drafter_writes_the_same_text_cold_and_warm(tiny, drafter):
    """The rows come from a plain text, and from the drafter's own text."""
    name, options = DRAFTERS[drafter]
    engine = longdraft.load(str(tiny["gqa"]), dtype="bfloat16", cache_ram=50)
    drafts = {"itself": engine.model, "another": load(tiny["mha"], "bfloat16")}
    loaded = replace(engine.loaded, draft=drafts.get(options.get("model")), draft_name=options.get("model", ""),
                     block=block_of(engine.model) if name == "block" else None)
    plain = engine.with_drafter("plain")
    drafting = Engine(loaded, DrafterChoice.parse(name, options))
    settings = list(SETTINGS.items())[list(DRAFTERS).index(drafter) % len(SETTINGS)][1]
    params = SamplingParams(max_new_tokens=40, seed=11, ignore_eos=True, on_loop="off", **settings)
    prompt = prompt_of(300)
    cold = text_of(plain.generate(prompt, params, cache_salt=None))
    assert text_of(plain.generate(prompt, params)) == cold
    for expected in (len(prompt) - 1 - 128, len(prompt) - 1 - 128):
        warm = drafting.generate(prompt, params)
        assert text_of(warm) == cold and warm.reuse.cached_tokens == expected
    longer = [*prompt, *cold, *prompt_of(30, seed=8)]
    warm = drafting.generate(longer, params)
    assert text_of(warm) == text_of(plain.generate(longer, params, cache_salt=None))
    assert warm.reuse.cached_tokens == len(longer) - 1 - 128


@pytest.mark.full
@pytest.mark.parametrize("seed, cache_ram", [(0, 3), (1, 8), (5, 30)])
def test_random_trees_of_prompts_evictions_and_cancelled_texts(folder, seed, cache_ram):
    """Alone and in batches; the tree has room for a few of the texts only."""
    pick = random.Random(seed)
    engine = longdraft.load(str(folder), drafter="plain" if seed else "magicdec", cache_ram=cache_ram)
    tree, hits, prompts, truth = engine.loaded.prefixes, 0, [prompt_of(4500, seed)], {}
    for step in range(14):
        start = pick.choice(prompts)
        prompts.append(start[: pick.choice([1, 200, 700, STORE_BLOCK - 1, STORE_BLOCK, STORE_BLOCK + 1, len(start)])]
                       + prompt_of(pick.choice([1, 150, 400]), seed=step))
        chosen = [pick.choice(prompts) for _ in range(pick.choice([1, 3]))]
        with engine.batch() as batch:
            texts = {batch.add(prompt, batch_params(seed=7)): prompt for prompt in chosen}
            while batch:
                for text, event in batch.step():
                    assert event.error is None
                    if event.stats:
                        hits += event.stats["cached_tokens"]
                        key = tuple(texts[text])
                        if key not in truth:
                            truth[key] = list(engine.generate(list(key), batch_params(seed=7), cache_salt=None))[-1]
                        assert event.stats["sha256_tokens"] == truth[key].stats["sha256_tokens"]
                if batch and pick.random() < 0.02:
                    batch.remove(pick.choice(list(batch)))
                assert tree.nbytes <= tree.max_bytes
        if pick.random() < 0.2:
            tree.make_room(0)
    assert hits > 5000
    assert not tree._readings and all(piece.leases == 0 for piece in tree._pieces)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    where = tmp_path_factory.mktemp("hybrid")
    make_hybrid(where, max_position_embeddings=16384)
    return where


@pytest.mark.parametrize("drafter", extent(["plain", "auto", "suffix", "magicdec"], ["plain", "magicdec"]))
def test_texts_of_a_hybrid_continue_from_kept_states(hybrid, drafter):
    """The same prompt again, its text continued, and texts with a short and a long common beginning."""
    engine = longdraft.load(str(hybrid), drafter=drafter, cache_ram=100)
    cold, params = engine.with_drafter("plain"), batch_params()
    prompt = prompt_of(STORE_BLOCK + 700)
    first = engine.generate(prompt, params)
    answer = text_of(first)
    assert first.reuse.cached_tokens == 0
    for text, expected in ((prompt, len(prompt) - 1 - 16), (prompt + answer + prompt_of(30), len(prompt + answer) - 1),
                           (prompt[:600] + prompt_of(90, 9), 496), (prompt[: STORE_BLOCK + 5] + prompt_of(90, 9), 4080),
                           (prompt[:400] + prompt_of(90, 9), 0)):
        warm = engine.generate(text, params)
        assert text_of(warm) == text_of(cold.generate(text, params, cache_salt=None))
        assert warm.reuse.cached_tokens == expected


class OtherRank(SingleProcess):
    """A rank whose tree has the rows of the text, but states at `places` only, and takes part in the agreement."""

    def __init__(self, places: list[int]) -> None:
        self._places = places

    def smallest(self, number: int) -> int:
        own = max((place for place in self._places if place <= number), default=0)
        return min(number, own)


@pytest.mark.full
@pytest.mark.parametrize("places, expected", [([STORE_BLOCK - 16, 496], STORE_BLOCK - 16), ([900, 496], 496),
                                              ([900], 0), ([], 0)])
def test_ranks_that_kept_different_states_continue_where_all_have_one(hybrid, places, expected):
    engine, prompt = longdraft.load(str(hybrid), drafter="plain", cache_ram=100), prompt_of(STORE_BLOCK + 700)
    cold = text_of(engine.generate(prompt, batch_params()))
    ranks = Engine(replace(engine.loaded, ranks=OtherRank(places)), engine.choice)
    warm = ranks.generate(prompt, batch_params())
    assert text_of(warm) == cold and warm.reuse.cached_tokens == expected


def test_a_hybrid_takes_no_rows_after_which_no_states_were_kept(hybrid, monkeypatch):
    """By the rule of a device, whole chunks of the prompt could be taken, but no states are kept at their ends."""
    engine, prompt = longdraft.load(str(hybrid), drafter="plain", cache_ram=100), prompt_of(STORE_BLOCK + 700)
    cold = text_of(engine.generate(prompt, batch_params()))
    monkeypatch.setattr(reuse, "shareable_rows", lambda _, *given: shareable_rows(True, *given))
    warm = engine.generate(prompt, batch_params())
    assert text_of(warm) == cold and warm.reuse.cached_tokens == 0


def test_random_trees_of_hybrid_texts_in_batches(hybrid):
    pick, prompts, truth, hits = random.Random(1), [prompt_of(2300)], {}, 0
    engine = longdraft.load(str(hybrid), drafter="suffix", cache_ram=2)
    for step in range(8):
        start = pick.choice(prompts)
        prompts.append(start[: pick.choice([40, 520, 1030, 2100, len(start)])] + prompt_of(pick.choice([1, 150]), step))
        chosen = [pick.choice(prompts) for _ in range(3)]
        for place, event in engine.generate_many(chosen, batch_params(), batch_size=3):
            if event.stats:
                hits, key = hits + event.stats["cached_tokens"], tuple(chosen[place])
                if key not in truth:
                    truth[key] = list(engine.generate(list(key), batch_params(), cache_salt=None))[-1].stats
                assert event.stats["sha256_tokens"] == truth[key]["sha256_tokens"]
            assert engine.loaded.prefixes.nbytes <= engine.loaded.prefixes.max_bytes
    assert hits > 2000 and all(piece.leases == 0 for piece in engine.loaded.prefixes._pieces)


def test_wrong_states_write_another_text(hybrid, monkeypatch):
    engine, prompt = longdraft.load(str(hybrid), drafter="plain", cache_ram=100), prompt_of(700)
    truth = text_of(engine.generate(prompt, batch_params(temperature=0.0)))
    for piece in engine.loaded.prefixes._pieces:
        for state in (state for states in piece.states.values() for state in states):
            state.matrix.mul_(-8)
    lied = engine.generate(prompt, batch_params(temperature=0.0))
    assert text_of(lied) != truth and lied.reuse.cached_tokens


def test_a_tree_with_wrong_rows_writes_another_text(engine, monkeypatch):
    """The equality above can fail: rows that are not the text's own change it."""
    prompt = prompt_of(400)
    truth = text_of(engine.generate(prompt, batch_params(temperature=0.0)))
    copy_block = FullCache.copy_block

    def lying(cache: FullCache, start: int, count: int):
        stores = copy_block(cache, start, count)
        for store in stores:
            k, v = store.read(torch.arange(count).expand(2, -1))
            store.write_heads(0, k.flip(1), v.flip(1))
        return stores

    engine.loaded.prefixes.limit(0)
    engine.loaded.prefixes.limit(100 << 20)
    monkeypatch.setattr(FullCache, "copy_block", lying)
    assert text_of(engine.generate(prompt, batch_params(temperature=0.0))) == truth  # it read the prompt itself
    lied = engine.generate(prompt, batch_params(temperature=0.0))
    assert text_of(lied) != truth and lied.reuse.cached_tokens


@pytest.mark.full
@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_stored_rows_equal_recomputed_rows_on_every_kernel(folder, name, quantize):
    engine = longdraft.load(str(folder), drafter="plain", kernels_name=name, quantize=quantize, cache_ram=100)
    prompt = prompt_of(STORE_BLOCK + 300 if name != "reference" else 300)
    caches = []
    for salt in (None, "", ""):
        generation = engine.generate(prompt, batch_params(max_new_tokens=4), cache_salt=salt)
        list(generation)
        caches.append(generation.step.cache)
    assert generation.reuse.cached_tokens == len(prompt) - 129
    places = torch.arange(caches[0].length).expand(2, -1)
    for cold, warm in zip(caches[0].stores, caches[2].stores, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(cold.read(places), warm.read(places), strict=True))


def test_texts_with_one_beginning_read_it_once(engine, monkeypatch):
    """Eight texts begin together: one reads, the others wait for its rows. The same for other ends."""
    prompt = prompt_of(2000)
    prompts = [prompt + prompt_of(5, seed) for seed in range(8)]
    expected = [text_of(engine.generate(each, batch_params(), cache_salt=None)) for each in prompts]
    seen = rows_read(monkeypatch)
    found: dict[int, list[int]] = {place: [] for place in range(8)}
    for place, event in engine.generate_many(prompts, batch_params(), batch_size=8):
        found[place] += event.tokens
    assert [found[place] for place in range(8)] == expected
    assert sum(seen) <= 2004 + 7 * 133 + 8 * 10


def test_a_text_waits_for_a_reader_only_while_it_reads(engine):
    """A reader that is cancelled, or that is not iterated over, does not hold up others."""
    prompt, params = prompt_of(3000), batch_params()
    expected = text_of(engine.generate(prompt, params, cache_salt=None))
    with engine.batch() as batch:
        reader, second = batch.add(prompt, params), batch.add(prompt, params)
        batch.step()
        batch.step()
        batch.remove(reader)
        tokens = [token for _ in range(100) for _, event in batch.step() for token in event.tokens]
        assert tokens == expected and not batch
    engine.loaded.prefixes.limit(0)
    engine.loaded.prefixes.limit(100 << 20)
    with engine.batch() as batch:
        batch.add(prompt, params)
        batch.step()
        second = batch.add(prompt, params)
        tokens = [token for _ in range(100) for _, event in batch.step(only=[second]) for token in event.tokens]
        assert tokens == expected


def test_a_chat_of_twenty_turns_reads_the_new_tokens_and_129_rows_a_turn(engine, monkeypatch):
    context: list[int] = prompt_of(200)
    seen = rows_read(monkeypatch)
    for turn in range(20):
        new = prompt_of(30, seed=turn)
        context += new
        seen.clear()
        generation = engine.generate(context, batch_params(seed=turn, max_new_tokens=20))
        answer = text_of(generation)
        assert sum(seen) <= (len(new) + 129 if turn else len(context)) + len(answer)
        context += answer


def test_salts_separate_texts_and_none_neither_takes_nor_gives(engine):
    prompt = prompt_of(300)
    cached = [list(engine.generate(prompt, batch_params(), cache_salt=salt))[-1].stats["cached_tokens"]
              for salt in ("a", "b", None, "a", "b", "")]
    assert cached == [0, 0, 0, 171, 171, 0]


def test_a_resumed_text_takes_over_what_it_wrote(engine, tmp_path):
    params = SamplingParams(max_new_tokens=60, seed=3, ignore_eos=True)
    expected = text_of(engine.generate(prompt_of(200), params, cache_salt=None))
    with engine.generate(prompt_of(200), params, journal=tmp_path) as generation:
        for _ in range(40):
            next(generation)
    resumed = engine.resume(tmp_path)
    assert text_of(resumed) == expected and resumed.reuse.cached_tokens == 240 - 129


def test_lengths_that_rotate_otherwise_share_nothing(tmp_path):
    make_checkpoint(tmp_path, max_position_embeddings=256,
                    rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    engine = longdraft.load(str(tmp_path), drafter="plain")
    for tokens, expected in ((10, 0), (20, 71), (300, 0), (300, 71), (310, 0)):
        params = batch_params(max_new_tokens=tokens)
        warm = engine.generate(prompt_of(200), params)
        assert text_of(warm) == text_of(engine.generate(prompt_of(200), params, cache_salt=None))
        assert warm.reuse.cached_tokens == expected, tokens


def test_short_prompts_and_an_absent_tree(folder, engine):
    for prompt in ([5], prompt_of(2), prompt_of(129), prompt_of(130)):
        assert len({tuple(text_of(engine.generate(prompt, batch_params()))) for _ in range(2)}) == 1
    off = longdraft.load(str(folder), drafter="plain", cache_ram=0)
    assert off.loaded.prefixes is None
    assert list(off.generate(prompt_of(300), batch_params()))[-1].stats["cached_tokens"] == 0
    with pytest.raises(longdraft.UsageError, match="cache_ram is -1"):
        longdraft.load(str(folder), cache_ram=-1)


def test_two_engines_share_no_rows_and_drafters_of_one_engine_do(folder, engine):
    prompt = prompt_of(300)
    text_of(engine.generate(prompt, batch_params()))
    other = longdraft.load(str(folder), drafter="plain")
    assert list(other.generate(prompt, batch_params()))[-1].stats["cached_tokens"] == 0
    assert list(engine.with_drafter("ngram").generate(prompt, batch_params()))[-1].stats["cached_tokens"] == 171


