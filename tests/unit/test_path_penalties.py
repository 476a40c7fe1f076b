"""Presence and frequency penalties, DRY and repeated n-grams: the compiled class, its reference, and who uses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

import longdraft
from longdraft.errors import UsageError
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import from_paths, root_only
from longdraft.sampling.path_penalties import CompiledPenalties, ReferencePathPenalties, dry_amounts, new_path_penalties
from longdraft.sampling.sampler import Sampler

compiled = pytest.mark.skipif(CompiledPenalties is None, reason="the compiled module is missing")
LETTERS = {letter: token for token, letter in enumerate("abcy")}


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def made(params: SamplingParams, text: list[int], breakers: list[int] = (), prompt: int = 0, is_fast: bool = True):
    penalties = new_path_penalties(params, 8, prompt, breakers, is_fast)
    penalties.extend(ids(*text))
    return penalties


@st.composite
def rules(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        banned_strings=draw(st.sampled_from([(), ("phrase",)])),
        dry_multiplier=draw(st.sampled_from([0.0, 0.8, 0.8])), dry_base=draw(st.sampled_from([1.0, 1.75])),
        dry_allowed_length=draw(st.integers(1, 4)), dry_penalty_last_n=draw(st.sampled_from([0, 0, 1, 2, 7, 20, 60])),
        no_repeat_ngram_size=draw(st.sampled_from([0, 1, 2, 3, 5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])), frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.3])),
        penalty_window=draw(st.sampled_from([1, 3, 10, 999])))


@compiled
@settings(deadline=None, max_examples=150)
@given(rules(), st.integers(1, 3), st.randoms(use_true_random=True), st.sets(st.integers(0, 3)))
def test_the_compiled_penalties_are_those_of_the_reference(params, letters, pick, breakers):
    """Texts of up to four different tokens, of which one is frequent, with cuts, and with paths after them."""
    prompt = pick.randrange(1, 20)
    fast, obvious = (new_path_penalties(params, 5, prompt, breakers, is_fast) for is_fast in (True, False))
    for _ in range(pick.randrange(1, 8)):
        new = ids(*(pick.randrange(letters + 1) if pick.random() < 0.7 else 0 for _ in range(pick.randrange(1, 30))))
        length = max(0, len(fast) - pick.choice([0, 0, 1, 3, 6, 99]))
        for each in (fast, obvious):
            each.truncate(length)
            each.extend(new)
        path, follows = [pick.randrange(letters + 1) for _ in range(pick.randrange(8))], pick.random() < 0.9
        found, expected = (sorted(zip(*each.edits(path, follows), strict=True)) for each in (fast, obvious))
        assert found == expected
        parents = [-1, *(pick.randrange(node) for node in range(1, 7))]
        tokens = [pick.randrange(letters + 1) for _ in parents]
        assert fast.hopeful(tokens, parents, 1.5) == obvious.hopeful(tokens, parents, 1.5)


@pytest.mark.parametrize("is_fast", [pytest.param(True, marks=compiled), False])
def test_dry_finds_the_longest_repeat_that_each_token_would_continue(is_fast):
    """The example of the sampler's author: after "a b c c b c y a b c", c lengthens "a b c", b "c", and y "b c"."""
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    text = [LETTERS[letter] for letter in "abccbcyabc"]
    for split in range(len(text) + 1):  # the end of the text may be a draft
        tokens, amounts = made(params, text[:split], is_fast=is_fast).edits(text[split:], True)
        found = dict(zip(tokens, amounts, strict=True))
        assert found == {LETTERS["c"]: 4.0, LETTERS["b"]: 1.0, LETTERS["y"]: 2.0}


@pytest.mark.parametrize("is_fast", [pytest.param(True, marks=compiled), False])
def test_a_breaker_ends_a_repeat_and_is_not_penalised(is_fast):
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=1)
    assert made(params, [1, 2, 3, 1, 2], [2], is_fast=is_fast).edits([], True) == ([], [])
    assert made(params, [1, 2, 3, 1], [2], is_fast=is_fast).edits([], True) == ([], [])
    tokens, amounts = made(params, [1, 2, 3, 4, 1, 2, 3], [2], is_fast=is_fast).edits([], True)
    assert tokens == [4] and amounts == [1.0]  # one token after the breaker


def test_amounts_grow_up_to_fifty_tokens_and_stay_finite():
    amounts = dry_amounts(SamplingParams(dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=2))
    assert amounts[:2] == [0.0, 0.0] and amounts[2:5] == [0.8, 0.8 * 1.75, 0.8 * 1.75 * 1.75] and len(amounts) == 51
    assert np.isfinite(np.float32(dry_amounts(SamplingParams(dry_multiplier=100, dry_base=10))[-1]))
    assert set(dry_amounts(SamplingParams(dry_multiplier=0.5, dry_base=1))[2:]) == {0.5}
    assert dry_amounts(SamplingParams()) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_banned_ngrams_are_those_of_transformers(text, size):
    theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), torch.zeros(1, 8))
    tokens, amounts = made(SamplingParams(no_repeat_ngram_size=size), text).edits([], True)
    assert sorted(tokens) == torch.isinf(theirs[0]).nonzero()[:, 0].tolist() and set(amounts) <= {np.inf}


def test_a_window_longer_than_the_text_counts_every_new_token():
    """OpenAI's definition: tokens of the prompt are not counted."""
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, penalty_window=1000)
    tokens, amounts = made(params, [1, 1, 2, 3, 3, 3], prompt=2).edits([3, 4], True)
    assert dict(zip(tokens, amounts, strict=True)) == {2: 0.75, 3: 1.5, 4: 0.75}
    tokens, amounts = made(SamplingParams(presence_penalty=0.5, penalty_window=2), [1, 2, 3], prompt=1).edits([4], True)
    assert dict(zip(tokens, amounts, strict=True)) == {3: 0.5, 4: 0.5}


@pytest.mark.parametrize("is_fast", [pytest.param(True, marks=compiled), False])
def test_hopeless_guesses_are_dropped_before_the_forward(is_fast):
    text = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    context = Context(text)
    tree = from_paths(4, [[5, 6, 7], [6]], "test")
    sampler = Sampler(SamplingParams(seed=1, dry_multiplier=2.0), is_fast=is_fast)
    assert sampler.pruned(tree, context) is tree  # the vocabulary is not known yet
    sampler.choose(torch.zeros(1, 8), root_only(4), context)
    assert sampler.pruned(tree, context).tokens == (4, 6)
    assert Sampler(SamplingParams(seed=1)).pruned(tree, context) is tree


def test_a_drafter_knows_what_dry_forbids():
    """`ranked` sees the penalty after its own path; with unknown tokens between, it sees none."""
    context = Context([0, 1, 2, 3, 4, 0, 1, 2])
    row = torch.tensor([0.0, 0, 0, 2, 1, 0, 0, 0])
    sampler = Sampler(SamplingParams(temperature=0, dry_multiplier=0.8))
    assert sampler.ranked(row, context, [], 2).tokens == [4, 3]
    assert sampler.ranked(row, context, [], 1, ahead=1).tokens == [3]
    assert sampler.ranked(torch.tensor([0.0, 0, 0, 1, 2, 0, 0, 0]), context, [3], 1).tokens == [3]


@pytest.fixture(scope="module")
def engine() -> longdraft.Engine:
    return longdraft.load("novelist", drafter="suffix", threads=1)


def test_breakers_are_the_tokens_that_contain_their_text(engine):
    words = engine.tokenizer
    with_colon = words.tokens_with(":")
    assert with_colon and all(":" in words.text_of(token) for token in with_colon)
    assert words.encode("a: b", add_special_tokens=False)[1] in with_colon
    marked = engine.loaded.marked_tokens(SamplingParams(dry_multiplier=1, dry_sequence_breakers=(":", ";")))
    assert marked.breakers == with_colon | words.tokens_with(";") and not marked.protected
    protected = engine.loaded.marked_tokens(SamplingParams(xtc_probability=0.5, stop_token_ids=(7,))).protected
    assert protected >= {*engine.model.config.eos_token_ids, 7} | words.tokens_with("\n")


def test_a_breaker_that_no_token_contains_is_refused_by_name(engine):
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=("\n", "no token has this"))
    with pytest.raises(UsageError, match=r"dry_sequence_breakers is 'no token has this'; allowed: texts that are part"):
        engine.generate("It was", params)


def test_no_passage_of_three_tokens_occurs_twice(engine):
    params = SamplingParams(max_new_tokens=80, temperature=0, no_repeat_ngram_size=3, ignore_eos=True)
    with engine.generate("It was the best of times, it was", params) as generation:
        list(generation)
        text = [*generation.prompt, *generation.tokens.tolist()]
    grams = list(zip(text, text[1:], text[2:]))
    assert len(set(grams)) == len(grams)


@pytest.mark.parametrize("settings, message", [
    (dict(dry_multiplier=-1), "dry_multiplier is -1; allowed: 0 to 100; 0 turns it off"),
    (dict(dry_allowed_length=0), "dry_allowed_length is 0; allowed: 1 to 50"),
    (dict(dry_sequence_breakers=("",)), "dry_sequence_breakers is"),
    (dict(no_repeat_ngram_size=52), "allowed: 0 to 51"),
    (dict(presence_penalty=3), "presence_penalty is 3; allowed: -2 to 2"),
    (dict(xtc_probability=1.5), "xtc_probability is 1.5; allowed: 0 to 1"),
    (dict(temperature_last=1), "temperature_last is 1; allowed: true or false"),
    (dict(dynatemp_range=1), "without temperature_last"),
    (dict(typical_p=0), "typical_p is 0; allowed: above 0"),
    (dict(samplers=["xtc", "dry", "temperature"]), "samplers is .* allowed, with or without some of them: penalties"),
    (dict(samplers=["min_p", "temperature"], dry_multiplier=0.8), "dry_multiplier is 0.8, but samplers leaves dry out"),
    (dict(typical=0.3, typical_p=0.4), "'typical_p' contradicts another spelling"),
])
def test_wrong_settings_are_refused_with_their_range(settings, message):
    with pytest.raises(UsageError, match=message):
        SamplingParams.from_names(settings)


def test_llama_cpps_list_of_samplers_says_where_temperature_is():
    last = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    assert SamplingParams.from_names({"samplers": last, "min_p": 0.1}).temperature_last
    assert not SamplingParams.from_names({"samplers": ["penalties", "temperature", "min_p"]}).temperature_last
    assert not SamplingParams.from_names({"samplers": ["temperature"]}).temperature_last


def test_the_reference_serves_without_the_compiled_module():
    assert isinstance(new_path_penalties(SamplingParams(dry_multiplier=1), 8, 0, [], is_fast=False),
                      ReferencePathPenalties)
