"""TokenSwift's published drafting, part by part, and the weak loop that its speed-ups divide by."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longdraft.cache.full import FullCache
from longdraft.engine.loading import load
from longdraft.errors import UsageError
from longdraft.kernels import AttentionOutput, AttentionRows
from longdraft.kernels.reference import ReferenceKernels
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft_bench.paper import published, rules
from longdraft_bench.systems import Engines, System
from longdraft_bench.turns import start

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 12
SYSTEM = System("tokenswift", {"tree": "1,3,3,3", "budget": 100}, rule="per-path", version="published")


@pytest.fixture(scope="module")
def engine(tiny):
    return load(str(tiny["gqa"]), dtype="float32", threads=1)


def test_the_ngrams_have_the_ranking_bug_of_the_published_code():
    """Insert A, B, B: A is lost and B is listed twice."""
    table = published.PublishedTable()
    a, b = (0, 1, 1, 1), (0, 2, 2, 2)
    table.extend([*a, *b, *b])
    assert table.continuations(0, 5) == [(2, 2, 2), (2, 2, 2)]


def test_ngrams_are_ranked_by_count_then_by_the_latest():
    table = published.PublishedTable()
    for last in (1, 2, 3):
        table.extend([0, 9, 9, last])
    assert table.continuations(0, 2) == [(9, 9, 3), (9, 9, 2)]
    assert table.continuations(5, 2) == []


def store_of(keys):
    kernels = ReferenceKernels("cpu", "float32")
    store = kernels.new_store(keys.shape[1], keys.shape[2])
    store.write(0, keys, keys)
    return store


def test_importance_is_the_sum_of_raw_products_of_one_query():
    generator = torch.Generator().manual_seed(3)
    keys, queries = (torch.randn(n, h, 8, generator=generator) for n, h in ((40, 2), (3, 6)))
    found = published.raw_products(12, 4)(0, store_of(keys), 40, queries)
    for head in range(2):
        scores = sum(keys[:, head] @ queries[-1, 3 * head + member] for member in range(3))
        best = sorted(range(4, 40), key=lambda place: -scores[place])[:8]
        assert found[head].tolist() == [0, 1, 2, 3, *best]


def test_new_rows_overwrite_the_lowest_ones_until_only_the_sinks_are_left():
    kernels = ReferenceKernels("cpu", "float32")
    full = FullCache(kernels, [(1, 4)])
    cache = published.PublishedCache(full, kernels, published.PublishedOptions(budget=10, sinks=2))

    def grow(count):
        rows = torch.zeros(1, count, 1, 4)
        rows[..., 0] = torch.arange(full.length, full.length + count)[None, :, None]  # the key tells the position
        full.append(rows, rows)
        full.commit(range(count))
        ones = torch.ones(1, 1, 1, 4)  # so later keys have larger products
        cache.update(AttentionRows.all(AttentionOutput(ones, ones, ones[..., 0], ones)))
        kept, _ = cache._rows.stores[0].read(torch.arange(cache.length)[None])
        return kept[0, :, 0].int().tolist()

    assert grow(20) == [0, 1, 19, 18, 17, 16, 15, 14, 13, 12]
    assert grow(1) == [0, 1, 19, 18, 17, 16, 15, 14, 13, 20]
    assert grow(3) == [0, 1, 19, 18, 17, 16, 23, 22, 21, 20]
    assert grow(4) == [0, 1, 27, 26, 25, 24, 23, 22, 21, 20] and cache.num_selections == 1
    assert grow(1) == [0, 1, 28, 27, 26, 25, 24, 23, 22, 21] and cache.num_selections == 1  # only the sinks are left
    assert grow(2) == [0, 1, 28, 27, 26, 25, 24, 23, 30, 29] and cache.num_selections == 2  # ranked, then the new ones
    assert grow(1) == [0, 1, 28, 27, 26, 25, 24, 31, 30, 29] and cache.num_selections == 2


def test_ngrams_are_chains_of_their_own(engine):
    """41 nodes, and after them 4 for each n-gram, which repeat the first guess."""
    prompt = engine.encode(TEXT)
    generation = start(engine, SYSTEM, prompt, SamplingParams(max_new_tokens=4, seed=1, penalty_window=20))
    drafter = generation.step.drafter
    next(generation)
    tree = drafter._tree(7, [[5], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert len(tree) == 41 and set(tree.sources) == {"", "self", "heads"}
    drafter._table.extend([5, 8, 8, 8, 5, 9, 9, 9])
    tree = drafter._tree(7, [[5], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    chains = [[tree.tokens[node] for node in tree.path(leaf)] for leaf in (44, 48)]
    assert chains == [[7, 5, 9, 9, 9], [7, 5, 8, 8, 8]] and len(tree) == 49


def test_the_walk_follows_the_chain_that_the_rule_took():
    """The first guess stands in the tree and, again, in the chain of an n-gram."""
    tree = Tree((0, 1, 2, 1, 3), (-1, 0, 1, 0, 3), ("", "self", "heads", "ngram", "ngram"))
    logits = torch.full((5, 4), -50.0)
    logits[[0, 1, 3], [1, 3, 3]] = logits[[2, 4], [0, 0]] = 50.0
    choices = rules.PathSampler(SamplingParams(seed=1)).choose(logits, tree, Context([0]))
    assert tree.along(choices) == [0, 3, 4] and choices[4] == 0
    assert tree.sources == ("", "self", "heads", "ngram", "ngram")


def test_the_published_rule_heeds_the_bias():
    tree = Tree((0,), (-1,), ("",))
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    params = SamplingParams(seed=1, temperature=0, logit_bias=((0, -100.0),))
    assert rules.PathSampler(params).choose(logits, tree, Context([0])) == [1]


@pytest.mark.parametrize("options", [{}, {"cache": "full", "continuations": 0}, {"cache": "static", "tree": "1,2"}])
def test_the_published_system_writes_and_ranks_again(engine, options):
    prompt = engine.encode(TEXT)
    system = System("tokenswift", {"budget": 40, **options}, rule="per-path", version="published")
    params = SamplingParams(max_new_tokens=60, seed=1, penalty_window=20, min_tokens_to_keep=20, ignore_eos=True)
    generation = start(engine, system, prompt, params)
    events = list(generation)
    assert sum(len(event.tokens) for event in events) == 60
    assert max(event.depth for event in events) == (2 if "tree" in options else 4)
    partial = generation.step.drafter.partial
    assert partial.num_selections == {"full": 0, "static": 1}.get(options.get("cache"), 3)
    if options.get("cache") != "full":
        assert partial.length == 40


@pytest.mark.parametrize("rule", ["keyed", "independent"])
def test_with_an_exact_rule_the_published_drafts_write_the_text_of_plain_decoding(engine, rule):
    prompt = engine.encode(TEXT)
    params = SamplingParams(max_new_tokens=40, seed=1, repetition_penalty=1.2, penalty_window=20, ignore_eos=True)

    def written(system):
        generation = start(engine, system, prompt, params)
        for _ in generation:
            pass
        return generation.tokens.tolist()

    drafted = written(System("tokenswift", {"budget": 40}, rule=rule, version="published"))
    assert drafted == written(System("plain"))


def test_a_model_with_sliding_windows_is_refused():
    kernels = ReferenceKernels("cpu", "float32")
    with pytest.raises(UsageError, match="no sliding windows"):
        published.PublishedCache(FullCache(kernels, [(1, 4)] * 2, (0, 8)), kernels, published.PublishedOptions())


@pytest.mark.parametrize("name", ["mha", "gqa"])
def test_the_weak_loop_computes_the_models_logits(tiny, name):
    engine = load(str(tiny[name]), dtype="float32", threads=1)
    weak = Engines(engine).of(System("plain", version="weak"))
    prompt = engine.encode(TEXT)
    params = SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)
    texts = []
    for each in (engine, weak):
        generation = start(each, System("plain"), prompt, params)
        for _ in generation:
            pass
        texts.append(generation.tokens.tolist())
    assert np.mean(np.array(texts[0]) == np.array(texts[1])) == 1
