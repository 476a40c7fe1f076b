"""The sampler's filters, compared with the `transformers` processors of the same names, and their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from longdraft.errors import NumericalError
from longdraft.kernels import noise
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import chain, from_paths, root_only
from longdraft.sampling import process
from longdraft.sampling.process import Support
from longdraft.sampling.sampler import NO_TOKEN, Sampler, gumbel_argmax

SMALL = 12  # tokens in a small vocabulary


def logits(seed: int, size: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def theirs(row: np.ndarray, *processors: object) -> set[int]:
    """The ids that transformers leaves."""
    scores = LogitsProcessorList(processors)(torch.tensor([[0]]), torch.tensor(row)[None].double())
    return set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


def ours(row: np.ndarray, **settings: object) -> set[int]:
    return set(process.filtered(row, SamplingParams(**settings)).ids.tolist())


@pytest.mark.parametrize("size", [5, 300, 5000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_each_filter_keeps_what_transformers_keeps(seed, size, spread):
    row = logits(seed, size, spread)
    for k in (1, 3, 40):
        assert ours(row, top_k=k) == theirs(row, TopKLogitsWarper(k))
    for p in (0.1, 0.5, 0.9, 0.999):
        assert ours(row, top_p=p) == theirs(row, TopPLogitsWarper(p))
    for keep in (1, 20):
        for p in (0.02, 0.1, 0.5):
            expected = theirs(row, MinPLogitsWarper(p, min_tokens_to_keep=min(keep, size)))
            assert ours(row, min_p=p, min_tokens_to_keep=keep) == expected
        for epsilon in (2e-4, 3e-3, 0.1):
            assert ours(row, eta_cutoff=epsilon, min_tokens_to_keep=keep) == theirs(
                row, EtaLogitsWarper(epsilon, min_tokens_to_keep=min(keep, size)))


@pytest.mark.parametrize("seed", range(8))
def test_filters_act_in_the_documented_order(seed):
    row = logits(seed, 2000)
    expected = theirs(row, TemperatureLogitsWarper(0.7), TopKLogitsWarper(60), TopPLogitsWarper(0.95),
                      MinPLogitsWarper(0.02), EtaLogitsWarper(1e-3))
    assert ours(row, temperature=0.7, top_k=60, top_p=0.95, min_p=0.02, eta_cutoff=1e-3) == expected


def test_a_sampled_distribution_is_the_processed_softmax():
    """Scores of the support are logit / temperature: the noise samples their softmax."""
    row = logits(1, 50)
    kept = process.filtered(row, SamplingParams(temperature=0.5, top_k=7))
    scores = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(7)])(
        torch.tensor([[0]]), torch.tensor(row)[None])
    np.testing.assert_allclose(kept.scores, scores[0, kept.ids].numpy(), rtol=1e-6)


@pytest.mark.parametrize("penalty", [0.8, 1.2, 2.0])
def test_penalty_is_sign_aware_as_in_transformers(penalty):
    row = logits(2, 100)
    window = torch.tensor([[3, 3, 50, 99]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(window, torch.tensor(row)[None])[0].numpy()
    got = row.copy()
    got[[3, 50, 99]] = process.penalise(row[[3, 50, 99]], penalty)
    np.testing.assert_array_equal(got, expected)


def test_equal_scores_resolve_by_the_smaller_id():
    row = np.array([1, 2, 2, 2, 0], dtype=np.float32)
    assert ours(row, top_k=2) == {1, 2}
    assert ours(row, top_p=0.2) == {1}
    assert ours(row, min_p=0.9, min_tokens_to_keep=4) == {0, 1, 2, 3}
    assert process.best_token(row) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    row = logits(0, 10)
    row[4] = bad
    with pytest.raises(NumericalError):
        process.filtered(row, SamplingParams())
    with pytest.raises(NumericalError):
        process.best_token(row)


def test_a_row_that_is_not_finite_is_an_error_only_if_the_text_reaches_it():
    rows = torch.tensor(np.stack([logits(1, SMALL), np.full(SMALL, np.nan, dtype=np.float32), logits(2, SMALL)]))
    for temperature in (0.0, 1.0):
        sampler = Sampler(SamplingParams(seed=1, temperature=temperature))
        tree = from_paths(2, [[5], [6]], "test")
        chosen = sampler.choose(rows, tree, Context([1, 2]))
        assert chosen[1] == NO_TOKEN and chosen[0] >= 0 and chosen[2] >= 0
        assert sampler.ranked(rows[1], Context([1, 2]), [], 3).tokens == []


@given(st.integers(0, 10**6), st.integers(1, 3000), st.sampled_from([0.1, 1.0, 6.0]))
def test_noise_is_skipped_only_where_it_cannot_decide(seed, size, spread):
    scores = np.random.default_rng(seed).normal(0, spread, size)
    kept = Support(np.arange(size), scores)
    total = scores + noise.gumbel(seed, 77, kept.ids)
    assert gumbel_argmax(kept, seed, 77) == int(total.argmax())


# The penalty window, exact for each node of a tree.


def reference_choice(row: np.ndarray, text: list[int], params: SamplingParams) -> int:
    """The choice at one node, from the whole text up to it."""
    scores = torch.tensor(row)[None].clone()
    window = torch.tensor([text[-params.penalty_window :]])
    return int(RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(window, scores)[0].argmax())


@given(st.data())
def test_each_node_is_penalised_with_its_own_window(data):
    token = st.integers(0, SMALL - 1)
    text = data.draw(st.lists(token, min_size=1, max_size=30))
    paths = data.draw(st.lists(st.lists(token, max_size=9), max_size=4))
    params = SamplingParams(temperature=0.0, repetition_penalty=data.draw(st.sampled_from([0.5, 1.3, 3.0])),
                            penalty_window=data.draw(st.integers(1, 40)))
    tree = from_paths(text[-1], paths, "test")
    rows = np.random.default_rng(len(text)).normal(0, 1, (len(tree), SMALL)).astype(np.float32)
    sampler, context = Sampler(params), Context(text[:1])
    for known in text[1:]:  # the window follows the text step by step, as in a generation
        sampler.choose(torch.tensor(rows[:1]), root_only(context.last), context)
        context.extend([known])
    expected = [reference_choice(rows[node], text + [tree.tokens[n] for n in tree.path(node)[1:]], params)
                for node in range(len(tree))]
    assert sampler.choose(torch.tensor(rows), tree, context) == expected


def test_end_of_text_is_impossible_before_the_minimum_at_every_depth():
    params = SamplingParams(temperature=0.0, min_new_tokens=3)
    sampler, context = Sampler(params, banned=[9]), Context([1, 2])
    row = np.zeros((1, SMALL), dtype=np.float32)
    row[0, 9] = 5
    tree = chain(2, [0, 0, 0, 0], "test")
    assert sampler.choose(torch.tensor(np.repeat(row, 5, 0)), tree, context) == [0, 0, 0, 9, 9]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_with_the_targets_logits_ranks_the_targets_token_first(temperature):
    params = SamplingParams(seed=3, temperature=temperature, min_p=0.05 if temperature else 0.0,
                            repetition_penalty=1.2, penalty_window=4)
    sampler, context = Sampler(params), Context([1, 2, 3, 4, 5])
    for seed in range(50):
        row = torch.tensor(logits(seed, 200))
        taken = sampler.choose(row[None], root_only(context.last), context)
        ranked = sampler.ranked(row, context, [], 150).tokens
        assert ranked[0] == taken[0]
        assert len(set(ranked)) == 150
        context.extend(taken)


# Further filters.


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_typical_keeps_what_transformers_keeps(seed, spread):
    row = logits(seed, 3000, spread)
    for p in (0.05, 0.5, 0.9, 0.99):
        assert ours(row, typical_p=p) == theirs(row, TypicalLogitsWarper(p))


@pytest.mark.parametrize("seed", range(5))
def test_top_n_sigma_is_llama_cpps_threshold(seed):
    """On finite logits only (ggml-org/llama.cpp#13344), by the population's standard deviation; at any temperature."""
    row = logits(seed, 3000)
    row[:100] = -np.inf
    finite = row[100:].astype(np.float64)
    for n in (0.5, 1.0, 2.5):
        expected = {100 + i for i in np.flatnonzero(finite >= finite.max() - n * finite.std())}
        for temperature in (0.5, 1.0, 1.5):
            assert ours(row, top_n_sigma=n, temperature=temperature) == expected
    assert ours(row, top_n_sigma=-1) == ours(row)


def test_xtc_keeps_the_least_likely_top_choice_and_all_others():
    row = np.log(np.array([0.3, 0.05, 0.3, 0.2, 0.15], np.float32))
    kept = process.filtered(row, SamplingParams(xtc_probability=0.5, xtc_threshold=0.18), coin=0.4)
    assert kept.ids.tolist() == [1, 3, 4]
    for threshold, coin in ((0.18, 0.5), (0.3, 1.0), (0.6, 0.1)):
        whole = process.filtered(row, SamplingParams(xtc_probability=0.5, xtc_threshold=threshold), coin=coin)
        assert whole.ids.tolist() == [0, 1, 2, 3, 4]
    equal = process.filtered(row, SamplingParams(xtc_probability=0.5, xtc_threshold=0.25), coin=0.1)
    assert equal.ids.tolist() == [1, 2, 3, 4]  # of equal ones the smaller id is the more likely


def test_xtc_does_nothing_where_a_protected_token_would_go():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.15)
    assert process.filtered(row, params, 0.1, frozenset({1})).ids.tolist() == [0, 1, 2, 3]
    assert process.filtered(row, params, 0.1, frozenset({2, 3})).ids.tolist() == [2, 3]


def test_the_coin_is_uniform_and_a_function_of_seed_and_position():
    coins = [noise.coin(7, position) for position in range(4000)]
    assert stats.kstest(coins, "uniform").pvalue > 1e-4
    assert coins == [noise.coin(7, position) for position in range(4000)]
    assert noise.coin(8, 0) != coins[0] and 0 < noise.coin(2**64 - 1, 10**6) < 1


def test_with_temperature_last_the_filters_see_temperature_one():
    row = logits(3, 500)
    for settings in (dict(min_p=0.1), dict(top_p=0.8), dict(typical_p=0.7)):
        last = process.filtered(row, SamplingParams(temperature=0.5, temperature_last=True, **settings))
        assert set(last.ids.tolist()) == ours(row, **settings)
        np.testing.assert_array_equal(last.scores, row[last.ids].astype(np.float64) / 0.5)


def test_dynamic_temperature_is_llama_cpps_formula():
    row = logits(4, 50)
    params = SamplingParams(temperature=0.9, temperature_last=True, dynatemp_range=0.5, dynatemp_exponent=1.3, top_k=20)
    kept = process.filtered(row, params)
    before = row[kept.ids].astype(np.float64)
    law = np.exp(before - before.max())
    law /= law.sum()
    share = -(law * np.log(law)).sum() / np.log(20)
    np.testing.assert_allclose(kept.scores, before / (0.4 + 1.0 * share**1.3), rtol=1e-12)
    alone = process.filtered(row, SamplingParams(temperature=0.9, temperature_last=True, dynatemp_range=5, top_k=1))
    assert alone.scores[0] == float(row.max()) / 0.9
