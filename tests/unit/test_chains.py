"""Drafters of chains: a draft model with its own cache, the target on partial caches, and both together."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import SETTINGS, params_of, prompt_of
from helpers.extents import extent
from helpers.families import make_family, make_hybrid
from helpers.generation import by_name, generate
from longdraft import drafters
from longdraft.cache.full import FullCache
from longdraft.cache.partial import PartialBudget, PartialCache
from longdraft.drafters import self_draft
from longdraft.drafters import streaming_model as streaming_module
from longdraft.drafters.self_draft import MagicDecOptions, SelfDrafter
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.errors import UsageError
from longdraft.kernels import AttentionRows
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Tally


@pytest.fixture(scope="module")
def model(tiny: dict[str, Path]) -> Transformer:
    return load(tiny["gqa"])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("hybrid")
    make_hybrid(folder, max_position_embeddings=4096)
    return load(folder)


def contents(cache: FullCache) -> list[torch.Tensor]:
    places = torch.arange(cache.length).expand(cache.shapes[0][0], -1)
    states = cache.states.current if cache.states else []
    return [part for store in cache.stores for part in store.read(places)] + [part for each in states for part in each]


def same(first: FullCache, second: FullCache) -> bool:
    return first.length == second.length and all(
        torch.equal(a, b) for a, b in zip(contents(first), contents(second), strict=True))


# The streaming draft model.


@pytest.mark.parametrize("budget, sinks, refresh", [(4096, 4, 1024), (40, 3, 9), (30, 0, 1), (24, 2, 20), (9, 1, 7)])
@pytest.mark.parametrize("seed, kind", extent([(0, "model"), (1, "model"), (2, "hybrid")], [(2, "hybrid")]))
def test_its_rows_are_those_of_a_model_that_reads_the_window_anew(request, monkeypatch, budget, sinks, refresh, seed,
                                                                  kind):
    """Drafts are accepted, rejected in part or whole, or missing; sometimes the model is many tokens behind. States of
    delta layers are those of the rows as well."""
    model = request.getfixturevalue(kind)
    monkeypatch.setattr(streaming_module, "CHUNK", 16)
    pick = random.Random(seed)
    context = Context(prompt_of(50, seed))
    reader = StreamingDraftModel(model, model.config.vocab_size, budget, sinks, refresh)
    reader.begin(context)
    for _ in range(60):
        path = [context.last]
        for _ in range(pick.randrange(7)):
            logits = run_alone(reader.next_logits(context, path))
            if logits is None:
                break
            row = reader.cache.length
            places = [*range(min(sinks, row)), *range(reader._start, reader._start + row - min(sinks, row))]
            whole = context.slice(0, len(context)).tolist() + path[1:]
            assert row <= budget and places[-1] == len(whole) - 1 and len(set(places)) == row
            fresh = model.new_cache()
            hidden = model.forward(chain_rows([whole[place] for place in places], 0), fresh).hidden[-1:]
            fresh.commit(range(row))
            assert same(reader.cache, fresh) and torch.equal(logits, model.logits(hidden))
            path.append(pick.randrange(2, 258))
        kept = path[1 : 1 + pick.randrange(len(path))]
        context.extend([*kept, *(pick.randrange(2, 258) for _ in range(pick.choice([1, 1, 1, 2, 40])))])


def test_of_a_long_prompt_only_the_window_is_read(model, monkeypatch):
    reader = StreamingDraftModel(model, model.config.vocab_size, 40, 4, 10)
    read = []
    forward_batch = Transformer.forward_batch
    monkeypatch.setattr(Transformer, "forward_batch", lambda self, asks: (
        read.extend(len(ask.rows.tokens) for ask in asks), forward_batch(self, asks))[1])
    reader.begin(Context(prompt_of(3000)))
    assert read == [30]


def test_vocabularies_padded_to_different_sizes_fit(model, tmp_path):
    make_checkpoint(tmp_path / "small", vocab_size=300)
    small = load(tmp_path / "small")
    context = Context([*prompt_of(20), 310, 5])
    for size in (280, 300, 320):
        reader = StreamingDraftModel(small, size, 100, 0, 10)
        reader.begin(context)
        logits = run_alone(reader.next_logits(context, [5]))
        assert logits.shape == (1, size) and logits[0, 300:].isneginf().all()


# Drafts that equal the target's tokens are all accepted.

PERFECT = {
    "draft-model": dict(model="self", cache="full", chain=5),
    "draft-model, window": dict(model="self", budget=1000, refresh=100),
    "magicdec": dict(budget=400, chain=3, width=1, suffix=False),
    "magicdec, snapkv": dict(budget=400, selection="snapkv", width=1, suffix=False),
    "triforce": dict(model="self", budget=400),
    "triforce, n-grams": dict(budget=400, chain=6),
}


@pytest.mark.parametrize("settings", ["greedy, penalty", "paper", "all of it"])
@pytest.mark.parametrize("name", PERFECT)
def test_a_perfect_draft_is_accepted_whole(model, name, settings):
    tally = Tally()
    params = SamplingParams(max_new_tokens=40, seed=4, **SETTINGS[settings])
    draft = model if "model" in PERFECT[name] else None
    generate(model, prompt_of(90), params, by_name(name.split(",")[0], None, draft, **PERFECT[name]), tally=tally)
    assert tally.accepted == tally.drafted and tally.drafted.total() > 20


def test_triforce_accepts_the_drafts_of_a_perfect_first_level(model):
    """Where the small model is the target, level 2 accepts its two guesses and adds one, in each forward."""
    tally = Tally()
    options = dict(model="self", budget=400, window=1000, guesses=2, chain=3)
    params = SamplingParams(max_new_tokens=41, temperature=0.0)
    generate(model, prompt_of(90), params, by_name("triforce", None, model, **options), tally=tally)
    assert tally.accepted["draft"] == 2 * tally.accepted["retrieval"] > 0


# A proposal does not change the partial cache.


class Watched:
    """A drafter whose partial cache is compared before and after each proposal."""

    def __init__(self, drafter) -> None:
        self._drafter = drafter
        self.begin, self.observe = drafter.begin, drafter.observe
        self.selections = 0

    def propose(self, context, max_depth):
        rows = self._drafter.partial._rows
        before, length = contents(rows), rows.length
        tree = yield from self._drafter.propose(context, max_depth)
        assert rows.length == length
        assert all(torch.equal(a, b) for a, b in zip(before, contents(rows), strict=True))
        self.selections = self._drafter.partial.num_selections
        return tree


@pytest.mark.parametrize("name, options", [
    ("magicdec", dict(budget=24, sinks=4, refresh=5)),
    ("magicdec", dict(budget=48, sinks=4, refresh=5, selection="snapkv", width=3)),
    ("triforce", dict(budget=48, stride=6)),
    ("triforce", dict(budget=48, stride=6, model="another", window=30, refresh=8)),
])
def test_proposals_do_not_change_the_partial_cache(model, tiny, name, options):
    watched = []
    draft = load(tiny["mha"]) if "model" in options else None
    factory = by_name(name, None, draft, **options)
    params = SamplingParams(max_new_tokens=60, seed=4, repetition_penalty=1.2, penalty_window=20)
    generate(model, prompt_of(90), params, lambda given: watched.append(Watched(factory(given))) or watched[0])
    assert watched[0].selections > 3


def test_between_selections_a_streaming_cache_holds_the_rows_of_the_text(model):
    """After steps with rejected drafts, its rows are those of the full cache, bit for bit."""
    seen = []

    def factory(given: drafters.Resources):
        drafter = by_name("magicdec", budget=24, sinks=4, refresh=50)(given)
        seen.append((drafter, given.cache))
        return drafter

    generate(model, prompt_of(90), SamplingParams(max_new_tokens=30, seed=2), factory)
    drafter, full = seen[0]
    rows = drafter.partial._rows
    places = torch.tensor([[*range(4), *range(full.length - rows.length + 4, full.length)]])
    for mine, theirs in zip(rows.stores, full.stores, strict=True):
        held = mine.read(torch.arange(rows.length).expand(1, -1))
        assert all(torch.equal(a, b) for a, b in zip(held, theirs.read(places), strict=True))


def test_low_acceptance_selects_the_retrieval_cache_again(model):
    """With a floor that is never reached, rows are selected more often than by the stride alone."""
    counts = []
    for floor in (0.0, 0.99):
        seen = []
        factory = by_name("triforce", budget=48, stride=100, floor=floor, remainder="false")
        generate(model, prompt_of(200), SamplingParams(max_new_tokens=150, seed=2),
                 lambda given, factory=factory, seen=seen: seen.append(factory(given)) or seen[0])
        counts.append(seen[0].partial.num_selections)
    assert counts[0] <= 2 and counts[1] > counts[0] + 2


def test_budget_auto_reads_the_full_cache_of_a_short_text_where_its_rows_cost_little_beside_the_weights(
        tmp_path, model, monkeypatch):
    monkeypatch.setattr(self_draft, "_MOST_ROWS", 2048)
    make_family(tmp_path, "gemma3")
    windowed = load(tmp_path)
    windows = [each.window for each in windowed.config.kv_attention]
    assert 0 in windows and 0 < max(windows) < 192
    in_full = windows.count(0) / len(windows)  # layers that read more rows than their window has
    for drafts, bytes_of_row in ((model, model.cache_bytes_per_token),
                                 (windowed, in_full * windowed.cache_bytes_per_token)):
        for whole, share in ((2048, 1.1), (2048, 9.0), (1024, 0.9), (512, 0.3), (0, 0.0)):
            monkeypatch.setattr(self_draft, "_SHARE_OF_WEIGHTS", 2048 * share * bytes_of_row / drafts.weights_bytes)
            size = MagicDecOptions().partial_budget(drafts)
            assert (size.selected, size.whole) == (192, whole)
            assert MagicDecOptions(budget=300).partial_budget(drafts).whole == 0
    for name, given, rows in (("magicdec", {}, 256), ("tokenswift", {}, 256), ("magicdec", {"sinks": 432}, 497),
                              ("tokenswift", {"sinks": 512}, 640), ("magicdec", {"budget": 300}, 364)):
        assert drafters.parse_options(name, given).partial_rows(model) == rows


def test_budget_auto_selects_as_many_rows_as_the_longest_window_has_where_they_cost_little(tmp_path, monkeypatch):
    make_family(tmp_path, "gemma3", sliding_window=300)
    windowed = load(tmp_path)
    for share, rows in ((1e9, 300), (0.0, 192)):
        monkeypatch.setattr(self_draft, "_SHARE_OF_WEIGHTS", share)
        assert MagicDecOptions().partial_budget(windowed).selected == rows


def test_rows_are_selected_when_a_text_outgrows_the_length_up_to_which_drafts_use_the_full_cache(model):
    cache = model.new_cache()
    partial = PartialCache(cache, model.kernels, PartialBudget(12, 1, 2, 4, whole=21))
    for length, rows in ((10, 10), (16, 16), (20, 20), (22, 8), (25, 11), (27, 8)):
        forward = model.forward(chain_rows(prompt_of(length - cache.length), cache.length), cache, 0)
        cache.commit(range(length - cache.length))
        partial.update(AttentionRows(forward.attention_output, range(-1, 0)))
        assert partial.length == rows, length


def test_without_such_a_length_drafts_never_use_the_full_cache_however_short_the_text_is(model):
    cache = model.new_cache()
    partial = PartialCache(cache, model.kernels, PartialBudget(12, 1, 2, 4))
    partial.update(None)  # after a prompt of one token
    partial.append(*torch.zeros(2, model.config.num_layers, 1, *model.config.kv_shapes[0]))
    partial.commit([0])
    assert (partial.length, cache.length) == (1, 0)


@pytest.mark.parametrize("name", ["magicdec", "tokenswift", "auto"])
@pytest.mark.parametrize("whole", [70, 4096])
def test_texts_whose_drafts_use_the_full_cache_are_those_of_plain_decoding(tiny, monkeypatch, name, whole):
    monkeypatch.setattr(self_draft, "whole_rows", lambda model: whole)
    plain, engine = (longdraft.load(str(tiny["gqa"]), drafter=each) for each in ("plain", name))
    prompts = [prompt_of(40), prompt_of(66, 5), prompt_of(90, 3)]
    for setting in ("top-k", "few tokens"):
        wanted = [list(plain.generate(prompt, params_of(setting)))[-1].stats["sha256_tokens"] for prompt in prompts]
        found = [list(engine.generate(prompt, params_of(setting)))[-1].stats for prompt in prompts]
        assert [stats["sha256_tokens"] for stats in found] == wanted
        assert name == "auto" or sum(stats["accepted_tokens"] for stats in found) > 0
        together = {place: event.stats["sha256_tokens"] for place, event in engine.generate_many(
            prompts, params_of(setting), batch_size=3) if event.stats}
        assert [together[place] for place in range(3)] == wanted


def test_a_draft_that_is_given_up_leaves_no_rows_in_the_full_cache(tiny, monkeypatch):
    monkeypatch.setattr(self_draft, "whole_rows", lambda model: 4096)
    model = load(tiny["gqa"], name="reference")  # which drafts forward by forward
    cache, context, params = model.new_cache(), Context(prompt_of(30)), SamplingParams(seed=1)
    model.forward(chain_rows(prompt_of(29), 0), cache, 0)
    cache.commit(range(29))
    drafter = SelfDrafter(MagicDecOptions(), model, cache, Sampler(params), params, None, None, None, None)
    drafter.begin(context, None)
    draft = drafter.propose(context, 8)
    request = next(draft)
    while cache.length == 29:
        request = draft.send(model.forward_batch([request])[0])
    draft.close()
    assert cache.length == 29


# What users see.


@pytest.mark.parametrize("name, options, message", [
    ("magicdec", {"selection": "all"}, "selection is 'all'; allowed: streaming or snapkv"),
    ("magicdec", {"chain": "0"}, "chain is 0; allowed: 1 to 64"),
    ("magicdec", {"budget": "40", "selection": "snapkv"}, r"budget is 40; allowed: at least 48 \(sinks and the latest"),
    ("magicdec", {"budget": "many"}, "budget is 'many'; allowed: auto, or a number of rows"),
    ("magicdec", {"refresh": "0"}, "refresh is 0"),
    ("magicdec", {"sinks": "-1"}, "sinks is -1"),
    ("magicdec", {"width": "17"}, "width is 17; allowed: 1 to 16"),
    ("draft-model", {"model": "m", "cache": "partial"}, "cache is 'partial'; allowed: streaming or full"),
    ("draft-model", {"model": "m", "cache": "full", "budget": "999"}, "'full'; allowed: streaming, with budget"),
    ("draft-model", {"model": "m", "budget": "260"}, r"budget is 260; allowed: more than sinks \+ refresh \(260\)"),
    ("triforce", {"budget": "47"}, "budget is 47; allowed: at least 48"),
    ("triforce", {"floor": "1"}, "floor is 1.0; allowed: 0 to below 1; 0 selects by the stride alone"),
    ("triforce", {"stride": "0"}, "stride is 0"),
    ("triforce", {"guesses": "0"}, "guesses is 0; allowed: 1 to 16"),
    ("triforce", {"model": "m", "window": "60"}, r"window is 60; allowed: more than sinks \+ refresh \(68\)"),
])
def test_options_out_of_range_are_refused_with_the_range(name, options, message):
    with pytest.raises(UsageError, match=message):
        drafters.parse_options(name, options)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder, num_hidden_layers=1, max_position_embeddings=512)
    return folder


def stats_of(target: Path, drafter: str, **options: object) -> dict:
    engine = longdraft.load(str(target), drafter=drafter, drafter_options=options)
    generation = engine.generate(prompt_of(60), SamplingParams(max_new_tokens=30, seed=3))
    return [event.stats for event in generation][-1]


@pytest.mark.parametrize("name, options", [("draft-model", {"budget": 40, "refresh": 20}), ("triforce", {})])
def test_a_smaller_model_drafts_by_name(tiny, small, name, options):
    stats = stats_of(tiny["gqa"], name, model=str(small), **options)
    assert stats["sha256_tokens"] == stats_of(tiny["gqa"], "plain")["sha256_tokens"]
    assert stats["by_source"]["draft" if name == "draft-model" else "retrieval"]["drafted"] > 0
    assert stats["drafter_memory_bytes"] > 0 and stats["drafter_options"]["model"] == str(small)


@pytest.mark.parametrize("name, options", [("draft-model", {"budget": 60, "refresh": 20}),
                                           ("triforce", {"window": 60, "refresh": 20})])
def test_a_window_uses_the_rotations_of_its_own_length(tiny, tmp_path, name, options, caplog):
    """However long the text: rotations are not stretched, and no warning is logged."""
    make_checkpoint(tmp_path, num_hidden_layers=1, max_position_embeddings=64,
                    rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
    stats = stats_of(tiny["gqa"], name, model=str(tmp_path), **options)
    assert stats["by_source"]["draft"]["drafted"] > 0 and "is longer than" not in caplog.text


@pytest.fixture(scope="module")
def with_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a smaller one in its sub-folder `draft`."""
    folder = tmp_path_factory.mktemp("pair")
    make_checkpoint(folder)
    make_checkpoint(folder / "draft", num_hidden_layers=1, max_position_embeddings=2048)
    return folder


@pytest.mark.parametrize("name, source", [("draft-model", "draft"), ("triforce", "draft"), ("auto", "")])
def test_a_smaller_model_in_the_models_folder_is_found(with_draft, name, source):
    stats = stats_of(with_draft, name, **({"window": 99} if name == "triforce" else {}))
    assert stats["sha256_tokens"] == stats_of(with_draft, "plain")["sha256_tokens"]
    if name == "auto":
        assert "draft-model" in stats["tokens_by_choice"]
    else:
        assert stats["by_source"][source]["drafted"] > 0


def test_a_drafter_that_needs_a_smaller_model_is_refused_without_one(tiny):
    with pytest.raises(longdraft.ModelError, match=r"needs a smaller model and .* give --drafter-option model=NAME"):
        stats_of(tiny["gqa"], "draft-model")
    with pytest.raises(UsageError, match=r"model is ''; allowed: a smaller model, with window, sinks or refresh"):
        stats_of(tiny["gqa"], "triforce", window=99)


def test_auto_ignores_a_draft_model_with_a_short_context(tmp_path):
    make_checkpoint(tmp_path)
    make_checkpoint(tmp_path / "draft", num_hidden_layers=1, max_position_embeddings=512)
    assert "draft-model" not in stats_of(tmp_path, "auto")["tokens_by_choice"]


def test_memory_of_drafters_is_reported(tiny):
    sizes = {name: stats_of(tiny["gqa"], name, **options)["drafter_memory_bytes"] for name, options in (
        ("plain", {}), ("ngram", {}), ("magicdec", {"budget": 200}), ("tokenswift", {"budget": 200}),
        ("triforce", {"budget": 200}))}
    assert sizes.pop("plain") == 0 < min(sizes.values())


def test_another_vocabulary_of_the_same_size_is_refused(tiny, small, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(small, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    a, b = vocabulary["B"], vocabulary["A"]
    for name in ("draft-model", "triforce"):
        message = rf"2 tokens differ: 'A' is {a} in the target and {b} in the draft model, 'B' is"
        with pytest.raises(UsageError, match=message) as caught:
            longdraft.load(str(tiny["gqa"]), drafter=name, drafter_options={"model": str(other)})
        assert len(str(caught.value).splitlines()) == 1


def test_a_window_beyond_the_draft_models_context_is_refused(tiny, small):
    with pytest.raises(UsageError, match="budget is 1024; allowed: at most 512, the draft model's context"):
        stats_of(tiny["gqa"], "draft-model", model=str(small))
