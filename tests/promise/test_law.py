"""The law: over many seeds, the written tokens follow the processed softmax.

The same test fails for the verification rule of the published TokenSwift code, which samples once for each *path* and
keeps the longest match. The rule is kept here to show that the test can detect such a bias.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from helpers.extents import extent
from helpers.generation import NoCache, TableModel, TreeDrafter
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree, from_paths, root_only
from longdraft.sampling import process
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings

SEEDS = 10_000
ALPHA = 1e-4
VOCAB = 5
LOGITS = np.random.default_rng(0).normal(0, 1, (VOCAB, VOCAB)).astype(np.float32)
PROMPT = [0, 3]
SETTINGS = [
    dict(temperature=1.0),
    dict(temperature=0.7, top_k=4, repetition_penalty=1.5, penalty_window=2),
    dict(temperature=1.3, min_p=0.1, repetition_penalty=1.3, penalty_window=1024),
]


def logits_after(path: tuple[int, ...]) -> list[float]:
    return LOGITS[path[-1]].tolist()


def adversarial(context: Context) -> Tree:
    """Many paths share their first tokens, which gives per-path sampling several tries for each."""
    return from_paths(context.last, [(1, 2), (1, 0), (1, 1), (1, 3), (1, 4), (0, 0), (0, 1), (2, 2)], "test")


def next_law(text: list[int], params: SamplingParams) -> np.ndarray:
    """The processed softmax for the token after a text, computed without the sampler."""
    row = LOGITS[text[-1]].copy()
    for token in range(VOCAB):
        new = text[max(len(PROMPT), len(text) - params.penalty_window) :]
        row[token] -= params.presence_penalty * (token in new) + params.frequency_penalty * new.count(token)
        repeats = [length for length in range(1, len(text)) for i in range(length, len(text))
                   if text[i] == token and text[i - length : i] == text[-length:]]
        if params.dry_multiplier and max(repeats, default=0) >= params.dry_allowed_length:
            row[token] -= params.dry_multiplier * params.dry_base ** (max(repeats) - params.dry_allowed_length)
    if params.repetition_penalty != 1:
        window = sorted(set(text[-params.penalty_window :]))
        row[window] = process.penalise(row[window], params.repetition_penalty)
    kept = process.filtered(row, params)
    law = np.zeros(VOCAB)
    law[kept.ids] = np.exp(kept.scores - kept.scores.max())
    return law / law.sum()


def pair_law(params: SamplingParams) -> np.ndarray:
    """Probability of each (first token, second token), flattened."""
    first = next_law(PROMPT, params)
    return np.concatenate([first[a] * next_law([*PROMPT, a], params) for a in range(VOCAB)])


def departure(counts: np.ndarray, law: np.ndarray) -> float:
    """The p-value of a chi-square test; 0 if a token of probability 0 was written."""
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    return float(stats.chisquare(counts[possible], law[possible] * counts.sum()).pvalue)


def first_two(seed: int, params: SamplingParams, propose) -> tuple[int, int]:
    context = Context(PROMPT)
    sampler = Sampler(params.with_seed(seed))
    step = Step(TableModel(logits_after), NoCache(), TreeDrafter(propose), sampler, context, Timings(), Tally())
    while context.num_new < 2:
        run_alone(step.run(2 - context.num_new))
    first, second = context.slice(2, 4).tolist()
    return first, second


@pytest.mark.parametrize("settings", [*(pytest.param(each, marks=pytest.mark.full) for each in SETTINGS[:-1]),
                                      SETTINGS[-1]])
def test_the_first_two_tokens_follow_the_processed_softmax(settings):
    """With drafts. Without drafts the tokens are the same, seed by seed, which every tenth seed shows."""
    params = SamplingParams(**settings)
    counts = np.zeros(VOCAB * VOCAB)
    for seed in range(SEEDS):
        first, second = first_two(seed, params, adversarial)
        counts[first * VOCAB + second] += 1
        if seed % 10 == 0:
            assert first_two(seed, params, lambda context: root_only(context.last)) == (first, second)
    assert departure(counts, pair_law(params)) > ALPHA
    first_counts = counts.reshape(VOCAB, VOCAB).sum(1)
    assert departure(first_counts, next_law(PROMPT, params)) > ALPHA


MORE = [
    dict(presence_penalty=0.5, frequency_penalty=0.7, penalty_window=3, temperature_last=True, min_p=0.1),
    dict(dry_multiplier=1.2, dry_allowed_length=1, typical_p=0.9),
]


@pytest.mark.parametrize("settings", extent(MORE, MORE[1:]))
def test_texts_with_penalties_by_path_follow_their_law(settings):
    params = SamplingParams(temperature=1.2, **settings)
    counts = np.zeros(VOCAB * VOCAB)
    for seed in range(SEEDS // 10):
        first, second = first_two(seed, params, adversarial)
        counts[first * VOCAB + second] += 1
    assert departure(counts, pair_law(params)) > ALPHA


@pytest.mark.full
def test_xtc_excludes_top_choices_as_often_as_its_coin_says():
    """Either all tokens can be chosen, or those without the top choices but the least likely of them."""
    params = SamplingParams(xtc_probability=0.4, xtc_threshold=0.15)
    counts = np.zeros(VOCAB)
    for seed in range(SEEDS // 10):
        counts[first_two(seed, params, adversarial)[0]] += 1
    whole = next_law(PROMPT, SamplingParams())
    top = [token for token in np.argsort(-whole) if whole[token] >= 0.15]
    assert len(top) >= 2
    rest = whole.copy()
    rest[top[:-1]] = 0
    assert departure(counts, 0.6 * whole + 0.4 * rest / rest.sum()) > ALPHA


def published_rule(pick: random.Random, tree: Tree, laws: list[np.ndarray]) -> list[int]:
    """Sample each path independently, keep the longest match, and add the next sample of that path."""
    leaves = [node for node in range(len(tree)) if node not in tree.parents]
    best: list[int] = []
    for leaf in leaves:
        path = tree.path(leaf)
        written = []
        for node, child in zip(path, [*path[1:], None], strict=True):
            written.append(pick.choices(range(VOCAB), laws[node])[0])
            if child is None or tree.tokens[child] != written[-1]:
                break
        if len(written) > len(best):
            best = written
    return best


def test_the_published_verification_rule_fails_this_test():
    params = SamplingParams()
    pick = random.Random(0)
    tree = adversarial(Context(PROMPT))
    laws = [next_law([*PROMPT, *(tree.tokens[n] for n in tree.path(node)[1:])], params) for node in range(len(tree))]
    counts = np.zeros(VOCAB)
    for _ in range(SEEDS):
        counts[published_rule(pick, tree, laws)[0]] += 1
    assert departure(counts, next_law(PROMPT, params)) < 1e-50
    assert counts[1] / SEEDS > 1.5 * next_law(PROMPT, params)[1]  # the much-tried token comes far too often


@pytest.mark.full
def test_the_published_rule_fails_a_small_counterexample():
    """A fair coin and the leaves (A, A), (A, B): the published rule writes A three times out of four."""
    tree = from_paths(0, [(0, 0), (0, 1)], "test")
    pick = random.Random(1)
    fair = [np.array([0.5, 0.5, 0, 0, 0])] * len(tree)
    heads = sum(published_rule(pick, tree, fair)[0] == 0 for _ in range(4000)) / 4000
    assert abs(heads - 0.75) < 0.03
    params = SamplingParams()
    ours = 0
    for seed in range(4000):
        choice = Sampler(params.with_seed(seed)).choose(
            torch.tensor([[0.0, 0.0, -1e9, -1e9, -1e9]] * len(tree)), tree, Context([2, 0]))
        ours += choice[0] == 0
    assert abs(ours / 4000 - 0.5) < 0.03
