"""What events tell beside the text, what may be asked of a text under way, and logit_bias."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.extents import extent
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine.engine import Engine
from longdraft.engine.loaded_model import DrafterChoice
from longdraft.errors import NumericalError, UsageError
from longdraft.journal.format import read_journal
from longdraft.request.context import Context
from longdraft.request.events import TokenLogprob
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import root_only
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.logprobs import likeliest, text_logprobs
from longdraft.speculation.plain_speed import measure_plain_step

DRAFTERS = ("plain", "ngram", "suffix", "tokenswift", "medusa", "magicdec", "auto")
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "warm": SamplingParams(seed=3),
    "min-p": SamplingParams(seed=3, min_p=0.1),
    "penalty": SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.3, penalty_window=20),
    "filters": SamplingParams(seed=3, top_k=12, top_p=0.9, eta_cutoff=0.01),
    "three letters": SamplingParams(seed=3, logit_bias=tuple((token, 100.0) for token in (66, 67, 68))),
}


@pytest.fixture(scope="module")
def engine(tiny):
    return longdraft.load(str(tiny["gqa"]), dtype="float32", threads=1)


def logits_of(seed: int, rows: int = 1, vocabulary: int = 320) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


# logit_bias


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_to_the_logits_and_nothing_else(kind):
    """The same token as from logits that have it already; compiled and defined sampler agree."""
    bias = ((3, 5.0), (17, -100.0), (40, 2.5))
    params = replace(KINDS[kind], logit_bias=bias, seed=3)
    for seed in range(30):
        logits, context = logits_of(seed), Context([1, 2, 3, 40])
        biased = logits.clone()
        for token, value in bias:
            biased[0, token] += value
        plain = Sampler(replace(params, logit_bias=())).choose(biased, root_only(40), context)
        before = logits.clone()
        for is_fast in (True, False):
            sampler = Sampler(params, is_fast=is_fast)
            assert sampler.choose(logits, root_only(40), context) == plain
            assert sampler.ranked(logits[0], context, [], 1).tokens == plain
        assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_writes_the_same_text_with_a_bias(engine, kind):
    params = replace(KINDS[kind], seed=5, max_new_tokens=40, logit_bias=((7, 4.0), (9, -50.0)))
    texts = {drafter: [token for event in engine.with_drafter(drafter).generate("abcabcab", params)
                       for token in event.tokens] for drafter in DRAFTERS}
    assert len(set(map(tuple, texts.values()))) == 1
    assert 9 not in texts["plain"]


def test_a_journal_keeps_the_bias(engine, tmp_path):
    params = SamplingParams(max_new_tokens=40, seed=5, logit_bias=((7, 4.0), (9, -50.0)))
    whole = [token for event in engine.generate("abc", params) for token in event.tokens]
    with engine.generate("abc", params, journal=tmp_path) as generation:
        next(generation)
    assert read_journal(tmp_path).header.params.logit_bias == params.logit_bias
    assert [token for event in engine.resume(tmp_path) for token in event.tokens] == whole


@pytest.mark.parametrize("bias", [{-1: 1.0}, {1: 101.0}, {1: float("nan")}, {1: "a"}, {1: True}, {"a": 1.0}])
def test_a_bias_that_makes_no_sense_is_refused(bias):
    with pytest.raises(UsageError, match="logit_bias"):
        SamplingParams.from_names({"logit_bias": bias})


def test_a_bias_for_a_token_that_is_not_there_is_refused(engine):
    with pytest.raises(UsageError, match="logit_bias is 320; allowed: token ids, 0 to 319"):
        engine.generate("a", engine.params(logit_bias={320: 1.0}))


# Log-probabilities


@pytest.mark.parametrize("kind", ["warm", "greedy"])
def test_without_filters_log_probabilities_are_the_softmax(kind):
    logits, context = logits_of(1), Context([1, 2])
    kept = Sampler(KINDS[kind]).log_probabilities(logits, context, [[]])[0]
    expected = torch.log_softmax(logits[0].double(), 0).numpy()
    assert len(kept.ids) == 320 and np.allclose(kept.scores, expected, atol=1e-12)


@pytest.mark.parametrize("kind", extent(["min-p", "penalty", "filters"], ["penalty"]))
def test_log_probabilities_are_how_often_the_law_takes_each_token(kind):
    """Over 1,500 seeds the shares are within four standard deviations."""
    logits, context, count = logits_of(2, vocabulary=24), Context([1, 2, 3]), 1500
    params = KINDS[kind]
    kept = Sampler(params).log_probabilities(logits, context, [[]])[0]
    taken = np.bincount([Sampler(params.with_seed(seed)).choose(logits, root_only(3), context)[0]
                         for seed in range(count)], minlength=24)
    assert set(np.flatnonzero(taken)) <= set(kept.ids.tolist())
    expected = np.exp(kept.scores)
    assert np.all(np.abs(taken[kept.ids] / count - expected) < 4 * np.sqrt(expected * (1 - expected) / count) + 1e-9)


def test_the_likeliest_come_first_and_equal_ones_by_their_ids():
    from longdraft.sampling.process import Support

    kept = Support(np.array([2, 5, 7, 9]), np.array([-2.0, -1.0, -1.0, -3.0]))
    assert likeliest(kept, 2) == ((5, -1.0), (7, -1.0))
    assert likeliest(kept, 0) == ()
    assert [token for token, _ in likeliest(kept, 9)] == [5, 7, 2, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_told_log_probabilities_do_not_depend_on_the_drafter(engine, kind):
    params = replace(KINDS[kind], seed=5, max_new_tokens=30)
    told = {}
    for drafter in DRAFTERS:
        events = list(engine.with_drafter(drafter).generate("abcabcab", params, logprobs=2))
        entries = [entry for event in events for entry in event.logprobs]
        assert [entry.token for entry in entries] == [token for event in events for token in event.tokens]
        told[drafter] = entries
    assert all(entries == told["plain"] for entries in told.values())


SCORED = torch.randint(2, 300, (700,), generator=torch.Generator().manual_seed(9)).tolist()  # two chunks


def test_log_probabilities_of_a_prompt_are_the_softmax_of_the_models_logits(engine, tiny):
    """Whatever the settings are. The first token has none."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tiny["gqa"])(torch.tensor([SCORED])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1)
    params = SamplingParams(max_new_tokens=3, seed=5, temperature=0.3, top_k=2, repetition_penalty=1.5,
                            logit_bias=((7, 50.0),), ignore_eos=True)
    first, *others = engine.with_drafter("plain").generate(SCORED, params, prompt_logprobs=3)
    beginning, *rest = first.prompt_logprobs
    assert beginning == TokenLogprob(SCORED[0], None)
    assert [each.token for each in rest] == SCORED[1:]
    own = expected.gather(1, torch.tensor(SCORED[1:])[:, None])[:, 0]
    assert [each.logprob for each in rest] == pytest.approx(own.tolist(), abs=1e-3)
    best = [[value for _, value in each.top] for each in rest]
    torch.testing.assert_close(torch.tensor(best), expected.topk(3).values, atol=1e-3, rtol=0)
    assert all(dict(each.top).get(each.token, each.logprob) == each.logprob for each in rest)
    assert not any(event.prompt_logprobs for event in others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_of_a_prompt_are_the_same_bits_alone_beside_others_and_after_them(tiny, dtype):
    """The chunks of a prompt are smaller beside other texts. Rows that the prefix tree knows are computed again."""
    engine = longdraft.load(str(tiny["gqa"]), dtype=dtype, threads=1, cache_ram=50)
    params, found = SamplingParams(max_new_tokens=8, seed=5), {}
    alone = next(engine.generate(SCORED, params, prompt_logprobs=2)).prompt_logprobs
    *_, last = engine.generate(SCORED, params)
    *_, again = engine.generate(SCORED, params)
    assert again.stats["cached_tokens"] > last.stats["cached_tokens"] == 0, "only texts without scores share rows"
    with engine.batch() as batch:
        lengths = {batch.add(SCORED[:count], params, prompt_logprobs=2): count for count in (700, 1, 2, 333)}
        batch.add(SCORED, params)
        while batch:
            found.update({text: event.prompt_logprobs for text, event in batch.step() if event.prompt_logprobs})
    assert found == {text: alone[:count] for text, count in lengths.items()}


@pytest.mark.parametrize("drafter", ["plain", "magicdec", "auto"])
def test_a_text_without_new_tokens_reads_its_prompt_only(engine, drafter, tmp_path):
    params, engine = SamplingParams(max_new_tokens=0, seed=5), engine.with_drafter(drafter)
    assert isinstance(engine.generate(SCORED, params).step.drafter, PlainDrafter), "no drafter reads it, too"
    event, = engine.generate(SCORED, params, prompt_logprobs=1, journal=tmp_path / "journal")
    assert (event.tokens, event.text, event.finish_reason, event.stats["new_tokens"]) == ((), "", "length", 0)
    assert event.prompt_logprobs == next(engine.generate(SCORED, prompt_logprobs=1)).prompt_logprobs
    resumed, = engine.resume(tmp_path / "journal")
    assert (resumed.tokens, resumed.finish_reason) == ((), "length")


def test_a_damaged_model_has_no_log_probabilities(engine):
    with pytest.raises(NumericalError, match="not finite"):
        list(text_logprobs(engine.model, torch.full((1, engine.model.config.hidden_size), torch.nan), [1], 1))


# Pieces, sources, work


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_pieces_and_sources_go_with_the_tokens(engine, drafter):
    params = replace(KINDS["three letters"], max_new_tokens=60)
    generation = engine.with_drafter(drafter).generate("abcabcab", params)
    accepted = steps = 0
    for event in generation:
        assert len(event.tokens) == len(event.pieces) == len(event.sources)
        assert "".join(event.pieces) == event.text
        assert all(event.sources[:-1]) and event.depth <= event.drafted
        accepted += sum(source != "" for source in event.sources)
        steps += 1
    assert generation.stats()["accepted_tokens"] == accepted and generation.stats()["steps"] == steps
    assert accepted > 9 or drafter in ("plain", "auto")


def test_a_stop_texts_rest_belongs_to_the_last_piece(engine):
    """Held back letters come with the token after which nothing can follow."""
    events = list(engine.generate("abc", SamplingParams(max_new_tokens=20, temperature=0, stop=("no such text",))))
    assert "".join(piece for event in events for piece in event.pieces) == "".join(event.text for event in events)


def test_trying_plain_decoding_changes_nothing(engine):
    params = SamplingParams(max_new_tokens=50, seed=5)
    for drafter in DRAFTERS:
        expected = [token for event in engine.generate("abcabcab", params) for token in event.tokens]
        generation, found = engine.with_drafter(drafter).generate("abcabcab", params), []
        for event in generation:
            found += event.tokens
            if not event.finish_reason:
                assert measure_plain_step(generation.step, generation.statistics.decode_seconds) > 0
        assert found == expected, drafter


def test_a_text_that_was_begun_without_a_journal_can_be_kept(engine, tmp_path):
    params = SamplingParams(max_new_tokens=50, seed=5)
    expected = [token for event in engine.generate("abc", params) for token in event.tokens]
    for count in (0, 3):
        generation = engine.generate("abc", params)
        for _ in range(count):
            next(generation)
        generation.close()
        generation.save_journal(tmp_path / str(count))
        resumed = list(engine.resume(tmp_path / str(count)))
        assert [token for event in resumed for token in event.tokens] == expected
        assert len(read_journal(tmp_path / str(count)).tokens) == 50


def on_loaded(engine, name, options=None):
    """The engine with another drafter, as the server switches it: nothing is read from files."""
    return Engine(engine.loaded, DrafterChoice.parse(name, options))


def test_another_drafter_on_the_same_weights(engine):
    other = engine.with_drafter("suffix", {"max_match": 8})
    assert other.model is engine.model and engine.drafter == "auto" and other.drafter == "suffix"
    for name, options in (("oracle", {}), ("suffix", {"what": 1}), ("draft-model", {"model": "novelist"})):
        with pytest.raises(UsageError):
            on_loaded(engine, name, options)
    with pytest.raises(UsageError, match="needs a smaller model, which the model was loaded without; choose"):
        on_loaded(engine, "draft-model", {"chain": 2})
    bare = longdraft.load(engine.name, drafter="plain", dtype="float32")
    for switch in (on_loaded, Engine.with_drafter):
        with pytest.raises(UsageError, match="needs trained heads, which the model was loaded without; choose this"):
            switch(bare, "medusa")


@pytest.mark.parametrize("switch", [Engine.with_drafter, on_loaded])
def test_every_drafter_can_take_over_from_one_with_a_model_of_its_own(engine, tmp_path, switch):
    """... and what it does not name stays as it was: a journal must tell which model drafts."""
    make_checkpoint(tmp_path / "small", seed=8, hidden_size=24, num_hidden_layers=1)
    small = str(tmp_path / "small")
    drafting = longdraft.load(engine.name, drafter="draft-model", drafter_options={"model": small}, dtype="float32")
    params = SamplingParams(max_new_tokens=20, seed=5)
    expected = [token for event in engine.generate("abcabcab", params) for token in event.tokens]
    for name, options in (("plain", {}), ("suffix", {"depth": 4}), ("magicdec", {}), ("auto", {}), ("triforce", {}),
                          ("draft-model", {}), ("draft-model", {"chain": 2}), ("draft-model", {"model": small})):
        other = switch(drafting, name, options)
        assert [token for event in other.generate("abcabcab", params) for token in event.tokens] == expected, name
        assert other.draft is drafting.draft, name
        if name in ("draft-model", "triforce"):
            assert other.options.model == small
    assert drafting.with_drafter("plain").with_drafter("draft-model").options.model == small
    with pytest.raises(UsageError, match="needs a smaller model, which the model was loaded without; choose"):
        on_loaded(drafting, "draft-model", {"model": "novelist"})
