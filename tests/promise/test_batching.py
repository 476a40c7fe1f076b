"""Batches: the text of a request does not depend on the other requests of its batch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longdraft
from helpers.block import block_of
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import DRAFTERS, LIARS, SETTINGS, batch_params, liar, prompt_of
from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters import chain
from longdraft.engine import batching
from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.engine.loaded_model import DrafterChoice
from longdraft.kernels.cpu.chain import ChainsApart
from longdraft.model.transformer import ForwardRequest, Rows, Transformer
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.prefill import PREFILL_SHARED

# A forward of several texts.


def filled(model: Transformer, length: int, seed: int) -> FullCache:
    """A cache that holds random keys and values for `length` positions."""
    cache, config = model.new_cache(), model.config
    torch.manual_seed(seed)
    if length:
        cache.append(*torch.randn(2, config.num_layers, length, config.num_kv_heads, config.head_dim)
                     .to(model.kernels.dtype))
        cache.commit(range(length))
    return cache


def rows_of(parents: Sequence[int], length: int, seed: int) -> Rows:
    pick, depths = random.Random(seed), []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return Rows([pick.randrange(2, 258) for _ in parents], [length + depth for depth in depths], parents)


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """(cache length, parents of the rows, seed); many lengths lie at the edges of groups, blocks and splits."""
    length = draw(st.sampled_from([0, 1, 31, 32, 33, 255, 256, 300]) | st.integers(0, 600))
    rows = draw(st.sampled_from([1, 1, 1, 4, 17, 40]))
    is_chain = draw(st.booleans())
    parents = [row - 1 if is_chain else draw(st.integers(-1, row - 1)) for row in range(rows)]
    return length, parents, draw(st.integers(0, 99))


@pytest.fixture(scope="module", params=[*[(name, dtype) for name in kernels.available()[:-1]
                                          for dtype in ("bfloat16", "float32")], ("reference", "float32")],
                ids=lambda pair: "-".join(pair))
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    """A model with one full-attention layer and one sliding-window layer, on each CPU kernel."""
    folder = tmp_path_factory.mktemp("windowed")
    make_checkpoint(folder, num_key_value_heads=2)
    name, dtype = request.param
    chosen = kernels.choose("cpu", dtype, name)
    model = checkpoint.load_transformer(TensorFiles(folder), config_file.read_config(folder), chosen)
    layers = model.weights.layers
    weights = model.weights._replace(layers=(layers[0], layers[1]._replace(window=40)))
    return Transformer(model.config, weights, chosen)


@given(st.lists(parts(), min_size=2, max_size=6))
@settings(max_examples=12, deadline=None)
def test_a_batched_forward_gives_each_request_the_bits_of_its_own_forward(windowed, texts):
    model = windowed
    asks, alone = [], []
    for length, parents, seed in texts:
        rows = rows_of(parents, length, seed)
        count = seed % (len(parents) + 1)
        asks.append(ForwardRequest(model, rows, filled(model, length, seed), count))
        alone.append((filled(model, length, seed), model.forward(rows, filled(model, length, seed), count)))
    for ask, result, (cache, expected) in zip(asks, model.forward_batch(asks), alone, strict=True):
        assert torch.equal(result.hidden, expected.hidden) and torch.equal(result.logits, expected.logits)
        assert all(torch.equal(a, b) for a, b in zip(result.attention_output, expected.attention_output, strict=True))
        path = [row for row in range(len(ask.rows.tokens)) if ask.rows.parents[row] == row - 1][:5]
        ask.cache.commit(path)
        model.forward(ask.rows, cache)
        cache.commit(path)
        places = torch.arange(cache.length).expand(2, -1)
        for mine, theirs in zip(ask.cache.stores, cache.stores, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine.read(places), theirs.read(places), strict=True))


def test_drafts_with_remainders_and_verifications_share_a_forward(tiny):
    """Each request has its own remainder of the positions that its cache leaves out, or none."""
    for name in kernels.available():
        model = load(tiny["gqa"], "float32", name)
        asks = [ForwardRequest(model, rows_of([-1, 0, 0][: 1 + seed % 3], 50 + seed, seed), with_rest(model, seed), 1)
                for seed in range(7)]
        for ask, result in zip(asks, model.forward_batch(asks), strict=True):
            expected = model.forward(ask.rows, ask.cache, 1)
            assert torch.equal(result.hidden, expected.hidden) and torch.equal(result.logits, expected.logits)


def with_rest(model: Transformer, seed: int) -> FullCache:
    """A cache with a remainder for the positions it leaves out; every third cache has none."""
    cache, config = filled(model, 50 + seed, seed), model.config
    rest = torch.randn(config.num_layers, config.num_heads, config.head_dim + 1, config.head_dim + 1)
    if seed % 3:
        append = cache.append
        cache.append = lambda k, v: append(k, v)._replace(remainder=rest)
    return cache


# Texts.


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tiny) -> longdraft.Engine:
    return longdraft.load(str(tiny[request.param]), dtype="bfloat16" if request.param == "gqa" else "float32")


@pytest.fixture(scope="module")
def drafts(engine, tiny) -> dict[str, Transformer]:
    folder = tiny["mha" if engine.model.config.num_kv_heads == 1 else "gqa"]
    files, config = TensorFiles(folder), config_file.read_config(folder)
    another = checkpoint.load_transformer(files, config, engine.model.kernels)
    return {"another": another, "itself": engine.model}


def begin(engine: longdraft.Engine, drafts: dict[str, Transformer], drafter: str, prompt: list[int],
          params: SamplingParams, truth: Sequence[int] = ()) -> Generation:
    """A generation with a drafter of DRAFTERS or LIARS."""
    name, options = DRAFTERS.get(drafter, ("plain", {}))
    loaded = replace(engine.loaded, draft=drafts.get(options.get("model")), draft_name=options.get("model", ""),
                     block=block_of(engine.model) if name == "block" else None)
    generation = Engine(loaded, DrafterChoice.parse(name, options)).generate(prompt, params)
    if drafter in LIARS:
        generation.step = generation.step._replace(drafter=liar(drafter, list(truth), len(prompt)))
    return generation


def cases(engine, drafts, count: int, seed: int) -> Iterator[tuple[list[int], SamplingParams, str, list[int]]]:
    """`count` tuples of (prompt, settings, drafter, plain text), with all drafters and settings in turn."""
    pick = random.Random(seed)
    mix = [*DRAFTERS, *LIARS]
    pick.shuffle(mix)
    for drafter, (_, sampling) in islice(zip(cycle(mix), cycle(SETTINGS.items()), strict=False), count):
        prompt = prompt_of(pick.choice([1, 2, 30, 90, PREFILL_SHARED + 1, 150]), seed=pick.randrange(50))
        params = SamplingParams(max_new_tokens=pick.randrange(20, 34), seed=pick.randrange(99), ignore_eos=True,
                                on_loop="off", **sampling)
        truth = begin(engine, drafts, "plain", prompt, params)
        list(truth)
        yield prompt, params, drafter, truth.tokens.tolist()


def share_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have texts read the weights together when they draft, as they do with large models."""
    monkeypatch.setattr(chain, "SMALL_BYTES", 0)


@pytest.mark.parametrize("engine, size, count, shares", [
    ("mha", 2, 8, True), *(pytest.param(*each, marks=pytest.mark.full) for each in (
        ("gqa", 8, 30, False), ("gqa", 8, 30, True), ("mha", 16, 32, True)))],
    indirect=["engine"])
def test_a_text_does_not_depend_on_the_other_requests_of_its_batch(engine, drafts, size, count, shares, monkeypatch):
    """Requests join and leave at random, with all drafters and liars; a removed request starts again later."""
    if shares:
        share_drafts(monkeypatch)
    pick = random.Random(size)
    waiting = list(cases(engine, drafts, count, size))
    under_way: dict[int, tuple] = {}
    done = cuts = most = 0
    with engine.batch() as batch:
        while waiting or batch:
            while waiting and len(batch) < size and (not batch or pick.random() < 0.5):
                case = waiting.pop()
                prompt, params, drafter, truth = case
                under_way[batch.admit(begin(engine, drafts, drafter, prompt, params, truth))] = case
            most = max(most, len(batch))
            for text, event in batch.step():
                assert event.error is None
                if event.finish_reason:
                    case = under_way.pop(text)
                    assert event.stats["new_tokens"] == len(case[3])
                    done += 1
                    assert event.stats["sha256_tokens"] == alone(case), case[2]
            if len(batch) and cuts < count // 4 and pick.random() < 0.1:
                text = pick.choice(list(batch))
                tokens = batch.remove(text).tokens.tolist()
                case = under_way.pop(text)
                assert tokens == case[3][: len(tokens)]
                waiting.append(case)
                cuts += 1
    assert done == count and cuts and most == size


def alone(case: tuple) -> str:
    import hashlib

    return hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in case[3])).hexdigest()


@pytest.mark.parametrize("name", kernels.available())
def test_every_kernel_keeps_the_promise_in_a_batch(tiny, name):
    engine = longdraft.load(str(tiny["gqa"]), drafter="magicdec", dtype="bfloat16", kernels_name=name)
    params = [SamplingParams(max_new_tokens=12, seed=seed, min_p=0.05) for seed in range(5)]
    prompts = [prompt_of(20 * seed + 1, seed) for seed in range(5)]
    texts: dict[int, list[int]] = {place: [] for place in range(5)}
    for place, event in engine.generate_many(prompts, params, batch_size=3):
        texts[place] += event.tokens
    for place, prompt in enumerate(prompts):
        generation = engine.generate(prompt, params[place])
        list(generation)
        assert generation.tokens.tolist() == texts[place]


@pytest.fixture(scope="module")
def plain(tiny) -> longdraft.Engine:
    return longdraft.load(str(tiny["gqa"]), drafter="plain")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Record the number of rows per request for each forward from now on."""
    seen: list[list[int]] = []
    forward_batch = Transformer.forward_batch
    monkeypatch.setattr(Transformer, "forward_batch", lambda self, asks: (
        seen.append([len(ask.rows.tokens) for ask in asks]), forward_batch(self, asks))[1])
    return seen


def test_one_forward_serves_all_requests_of_a_batch(plain, monkeypatch):
    batch = plain.batch()
    for seed in range(8):
        batch.add(prompt_of(9, seed), batch_params(seed))
    seen = counted(monkeypatch)
    while batch:
        batch.step()
    assert seen == [[8] * 8] + [[1] * 8] * 10


def test_a_rounds_own_work_is_charged_to_its_texts(plain, monkeypatch):
    """Else a step of a batch looks cheaper to `auto` than it is."""
    work, run_batched = 0.02, batching.run_batched
    monkeypatch.setattr(batching, "run_batched", lambda *given: (time.sleep(work), run_batched(*given))[1])
    with plain.batch() as batch:
        texts = [batch.add(prompt_of(9, seed), batch_params(seed)) for seed in range(2)]
        for rounds in range(1, 4):
            batch.step()
            assert all(batch[text].clock.charged >= rounds * work / len(texts) for text in texts)


def test_prompts_are_prefilled_in_small_chunks_while_other_requests_decode(plain, monkeypatch):
    batch = plain.batch()
    batch.add(prompt_of(30), batch_params(max_new_tokens=20))
    batch.step()
    batch.add(prompt_of(3 * PREFILL_SHARED + 1, seed=9), batch_params())
    seen = counted(monkeypatch)
    for _ in range(4):
        batch.step()
    assert seen == [[1, PREFILL_SHARED]] * 3 + [[1, 1]]


def test_drafts_of_one_request_and_verifications_of_another_share_a_forward(tiny, monkeypatch):
    share_drafts(monkeypatch)
    engine = longdraft.load(str(tiny["gqa"]), drafter="magicdec", drafter_options={"chain": 3, "suffix": "false"})
    batch = engine.batch()
    batch.add(prompt_of(20), batch_params(max_new_tokens=30))
    batch.step()
    batch.step()
    batch.add(prompt_of(30), batch_params(max_new_tokens=30))
    batch.step()
    seen = counted(monkeypatch)
    for _ in range(8):
        batch.step()
    assert all(len(rows) == 2 for rows in seen) and any(1 in rows and max(rows) > 1 for rows in seen)


def test_small_models_draft_all_chains_of_a_round_in_one_call(tiny, monkeypatch):
    engine = longdraft.load(str(tiny["gqa"]), drafter="magicdec", drafter_options={"chain": 3, "suffix": "false"})
    batch = engine.batch()
    for seed in range(2):
        batch.add(prompt_of(30, seed), batch_params(seed, max_new_tokens=30))
    batch.step()
    seen, apart, launch = counted(monkeypatch), [], ChainsApart.launch
    monkeypatch.setattr(ChainsApart, "launch", lambda self, parts: apart.append(len(parts)) or launch(self, parts))
    for _ in range(4):
        batch.step()
    assert all(len(rows) == 2 and min(rows) > 3 for rows in seen), "verifications only"
    assert apart == [2] * 4


def test_chains_of_different_kernels_are_not_drafted_together(tiny, monkeypatch):
    """Their weights are packed differently."""
    calls, launch = [], ChainsApart.launch
    monkeypatch.setattr(ChainsApart, "launch", lambda self, parts: (
        calls.append([part.kernels.name for part in parts]), launch(self, parts))[1])
    engines = [longdraft.load(str(tiny["gqa"]), drafter="magicdec", kernels_name=name)
               for name in kernels.available() if name != "reference"][:2]
    batch = engines[0].batch()
    for seed in range(2 * len(engines)):
        batch.admit(engines[seed % len(engines)].generate(prompt_of(30, seed), batch_params(seed, max_new_tokens=20)))
    while batch:
        batch.step()
    assert calls and all(len(set(names)) == 1 for names in calls)
    assert len({names[0] for names in calls}) == len(engines)


def test_requests_of_different_models_do_not_share_a_forward(plain, tiny):
    other = longdraft.load(str(tiny["mha"]), drafter="plain")
    expected = [list(engine.generate(prompt_of(20), batch_params()))[-1].stats["sha256_tokens"]
                for engine in (plain, other)]
    batch = plain.batch()
    texts = [batch.admit(engine.generate(prompt_of(20), batch_params())) for engine in (plain, other)]
    found = {}
    while batch:
        found |= {text: event.stats["sha256_tokens"] for text, event in batch.step() if event.stats}
    assert [found[text] for text in texts] == expected


def test_requests_of_different_lengths_keep_their_own_rotations(tmp_path):
    make_checkpoint(tmp_path, max_position_embeddings=64,
                    rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    engine = longdraft.load(str(tmp_path), drafter="plain")
    lengths = [10, 80, 150]
    expected = [list(engine.generate(prompt_of(20), batch_params(max_new_tokens=length)))[-1].stats["sha256_tokens"]
                for length in lengths]
    found = {place: event.stats["sha256_tokens"] for place, event in engine.generate_many(
        [prompt_of(20)] * 3, [batch_params(max_new_tokens=length) for length in lengths]) if event.stats}
    assert [found[place] for place in range(3)] == expected and len(set(expected)) == 3
