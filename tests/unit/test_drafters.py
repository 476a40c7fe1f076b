"""Trees, the n-gram table compared with a simple reference, drafters' trees, and options."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from helpers.checkpoints import load, released
from helpers.equality import prompt_of
from longdraft import drafters
from longdraft.drafters.ngram import NgramDrafter, NgramMatcher, NgramOptions
from longdraft.drafters.ngram_table import RANKED, NgramTable
from longdraft.drafters.self_draft import TokenSwiftOptions
from longdraft.errors import ModelError, UsageError
from longdraft.parts import heads
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie, chain, from_paths, root_only
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone

token = st.integers(0, 3)


@given(st.lists(st.lists(token, max_size=6), max_size=8))
def test_a_tree_of_paths_holds_each_prefix_once(paths):
    tree = from_paths(9, paths, "test")
    held = [tuple(tree.tokens[n] for n in tree.path(node)[1:]) for node in range(len(tree))]
    assert len(held) == len(set(held))
    assert set(held) == {tuple(path[:end]) for path in paths for end in range(len(path) + 1)} | {()}
    assert list(tree.depths) == [len(path) for path in held]


@given(st.lists(st.lists(token, max_size=6), max_size=8), st.integers(0, 6))
def test_pruning_keeps_the_nodes_up_to_a_depth(paths, depth):
    tree = from_paths(9, paths, "test")
    assert tree.pruned(depth) == from_paths(9, [path[:depth] for path in paths], "test")


@given(st.lists(st.lists(token, max_size=6), max_size=8), st.lists(token, min_size=7, max_size=7))
def test_the_walk_follows_the_targets_choices(paths, text):
    """When the target's text does not depend on the path, the walk is the longest prefix in the tree."""
    tree = from_paths(9, paths, "test")
    choices = [text[depth] for depth in tree.depths]
    longest = max([0, *(len(p) for p in ([*path[:end]] for path in paths for end in range(len(path) + 1))
                       if p == text[: len(p)])])
    assert [choices[node] for node in tree.along(choices)] == text[: longest + 1]


def test_a_token_guessed_twice_is_credited_to_the_first_source():
    trie = Trie(1)
    trie.graft(0, [2, 3], "heads")
    trie.graft(0, [2, 3, 4], "ngram")
    assert trie.tree().sources == ("", "heads", "heads", "ngram")


class ReferenceTable:
    """All n-grams of the text with their count and last position, sorted at each call."""

    def __init__(self, order: int) -> None:
        self.order, self.text = order, []

    def continuations(self, first: int, num: int) -> list[tuple[int, ...]]:
        counts, latest = Counter(), {}
        for place in range(len(self.text) - self.order + 1):
            gram = tuple(self.text[place : place + self.order])
            if gram[0] == first:
                counts[gram[1:]] += 1
                latest[gram[1:]] = place
        return sorted(counts, key=lambda rest: (counts[rest], latest[rest]), reverse=True)[:num]


@given(st.lists(token, max_size=300), st.integers(2, 5), st.integers(1, RANKED))
def test_the_table_ranks_by_count_then_recency(text, order, num):
    table, obvious = NgramTable(order), ReferenceTable(order)
    for place, this in enumerate(text):
        table.extend([this])
        obvious.text.append(this)
        if place % 17 == 0 or place == len(text) - 1:
            for first in range(4):
                assert table.continuations(first, num) == obvious.continuations(first, num)


def test_the_ranking_bug_of_the_published_code_is_absent():
    """Insert A, B, B: the paper's code drops A and lists B twice."""
    table = NgramTable(2)
    table.extend([0, 1, 0, 2, 0, 2])
    assert table.continuations(0, 5) == [(2,), (1,)]


def test_the_memory_of_a_table_is_about_what_it_says():
    random = np.random.default_rng(3)
    tokens = random.zipf(1.3, 20_000) % 5000
    table = NgramTable(4)
    tracemalloc.start()
    for start in range(0, len(tokens), 8):
        table.extend(tokens[start : start + 8].tolist())
    measured = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.7 <= table.nbytes / measured <= 1.3


def test_the_table_is_bounded_and_drops_rare_ngrams():
    table = NgramTable(order=2, capacity=50)
    for i in range(5000):
        table.extend([7, 8, 100 + i])
        assert len(table) <= 50
    assert table.continuations(7, 1) == [(8,)]


def test_only_ngrams_that_occurred_often_enough_are_returned():
    table = NgramTable(2)
    table.extend([0, 1, 0, 2, 0, 2])
    assert table.continuations(0, 5, seen=2) == [(2,)]
    assert table.continuations(0, 5, seen=3) == []


def test_ngrams_of_the_penalty_window_are_not_yet_in_the_table():
    context = Context([1, 2, 3, 4, 1])
    now = NgramMatcher(NgramOptions(delay=0, seen=1), SamplingParams())
    waits = NgramMatcher(NgramOptions(seen=1), SamplingParams(repetition_penalty=1.2, penalty_window=3))
    for table, expected in ((now, 4), (waits, 1)):
        table.update(context)
        trie = Trie(1)
        table.add_matches(trie, 0, context, (), 3)
        assert len(trie) == expected
    context.extend([9, 9])
    waits.update(context)
    trie = Trie(1)
    waits.add_matches(trie, 0, context, [1], 2)  # cut to two tokens
    assert trie.tree() == chain(1, [2, 3], "ngram")


def test_ngram_drafts_nothing_without_an_earlier_occurrence():
    drafter = NgramDrafter(NgramOptions(), SamplingParams())
    context = Context([5])
    drafter.begin(context, None)
    assert run_alone(drafter.propose(context, 10)) == root_only(5)


def tokenswift(tiny: dict[str, Path], prompt: list[int], **options: object):
    model = load(tiny["gqa"])
    params = SamplingParams(temperature=0.0)
    cache = model.new_cache()
    given = drafters.Resources(model, cache, Sampler(params), params, heads.load_heads(tiny["gqa"] / "heads", model))
    from longdraft.model.transformer import chain_rows
    from longdraft.speculation.drafter import Verified

    result = model.forward(chain_rows(prompt[:-1], 0), cache)
    cache.commit(range(len(prompt) - 1))
    parsed = drafters.parse_options("tokenswift", options)
    drafter = drafters.DRAFTERS["tokenswift"].build(parsed, given)
    context = Context(prompt)
    drafter.begin(context, Verified(result, [-1]))
    return drafter, context


def test_tokenswift_builds_the_papers_tree(tiny):
    drafter, context = tokenswift(tiny, prompt_of(60), chain=1, tree="1,3,3,3", continuations=0)
    tree = run_alone(drafter.propose(context, 100))
    assert len(tree) == 41
    assert Counter(tree.depths) == {0: 1, 1: 1, 2: 3, 3: 9, 4: 27}


def test_tokenswift_adds_ngrams_after_its_first_token(tiny):
    prompt = prompt_of(60)
    drafter, context = tokenswift(tiny, prompt, chain=1, tree="1", delay=0, seen=1, budget=500)
    drafter._sampler.rank = lambda logits, context, path, num, ahead=0: prompt[:1]  # what has a known successor
    tree = run_alone(drafter.propose(context, 100))
    assert [tree.tokens[n] for n in tree.path(len(tree) - 1)[1:]][:2] == prompt[:2]
    assert tree.sources[1] == "self" and set(tree.sources[2:]) == {"ngram"} and max(tree.depths) == 4
    assert max(run_alone(drafter.propose(context, 2)).depths) <= 2
    assert run_alone(drafter.propose(context, 0)) == root_only(context.last)


def test_with_a_partial_cache_that_holds_the_whole_text_every_guess_is_right(tiny):
    """On all rows the drafter computes what the target computes: every token of the chain is the target's."""
    drafter, context = tokenswift(tiny, prompt_of(60), budget=500, chain=4, width=1, tree="1", continuations=0)
    model = load(tiny["gqa"])
    from longdraft.model.transformer import chain_rows

    ids = context.slice(0, len(context)).tolist()
    for token in run_alone(drafter.propose(context, 9)).tokens[1:]:
        logits = model.logits(model.forward(chain_rows(ids, 0), model.new_cache()).hidden)
        assert token == int(logits[-1].argmax())
        ids.append(token)
    assert len(ids) == 64


@pytest.mark.parametrize("max_depth", [0, 1, 2, 3, 5, 9])
def test_drafts_stay_within_the_allowed_depth_and_do_not_change_the_cache(tiny, max_depth):
    drafter, context = tokenswift(tiny, prompt_of(60), chain=3, tree="2,2,1", continuations=0)
    held = drafter.partial.length
    assert max(run_alone(drafter.propose(context, max_depth)).depths) == min(max_depth, 5)
    assert drafter.partial.length == held


def test_released_checkpoints_contain_their_heads(tiny, tmp_path):
    """TokenSwift's files: the whole model plus model.medusa_layers.*, in one folder."""
    released(tmp_path / "released", tiny["mha"])
    model = load(tmp_path / "released")
    assert len(heads.load_heads(tmp_path / "released", model)) == 3


def test_heads_of_another_model_are_refused(tiny, tmp_path):
    from helpers.checkpoints import make_checkpoint, make_heads

    base = make_checkpoint(tmp_path / "model", hidden_size=32)
    make_heads(tmp_path / "heads", base)
    make_heads(tmp_path / "foreign", base, base_sha256="0" * 64)
    with pytest.raises(ModelError, match="hidden_size 32, but the model has 48"):
        heads.load_heads(tmp_path / "heads", load(tiny["mha"]))
    with pytest.raises(ModelError, match="trained on other weights"):
        heads.load_heads(tmp_path / "foreign", load(tmp_path / "model"), lambda: "f" * 64)


@pytest.mark.parametrize("name, options, message", [
    ("ngram", {"budget": "3"}, "no option 'budget'; known: continuations, seen, order, capacity, delay"),
    ("plain", {"tree": "1"}, "no option 'tree'; known: none"),
    ("ngram", {"order": "1"}, "order is 1; allowed: 2 to 16"),
    ("ngram", {"order": "four"}, "order is 'four'; allowed: a whole number"),
    ("tokenswift", {"tree": "1,x"}, "allowed: whole numbers such as 1,3,3,3"),
    ("tokenswift", {"tree": [1, 2.5]}, "tree is .*; allowed: whole numbers such as 1,3,3,3"),
    ("tokenswift", {"tree": 3}, "tree is 3; allowed: whole numbers such as 1,3,3,3"),
    ("tokenswift", {"chain": 1e999}, "chain is inf; allowed: a whole number"),
    ("tokenswift", {"chain": 1.9}, "chain is 1.9; allowed: a whole number"),
    ("tokenswift", {"chain": True}, "chain is True; allowed: a whole number"),
    ("tokenswift", {"margin": 10**400}, "margin is 10+; allowed: a number"),
    ("tokenswift", {"margin": True}, "margin is True; allowed: a number"),
    ("tokenswift", {"remainder": 5}, "remainder is 5; allowed: true or false"),
    ("tokenswift", {"remainder": "yes"}, "remainder is 'yes'; allowed: true or false"),
    ("tokenswift", {"cache": ["full"]}, "cache is .*; allowed: a text"),
    ("tokenswift", {"tree": [10**9] * 3}, "at most 1024 nodes"),
    ("medusa", {"tree": [1, 3]}, r"tree is \[1, 3\]; allowed: a text"),
    ("suffix", {"corpus": 5}, "corpus is 5; allowed: a text"),
    ("tokenswift", {"tree": "9,9,9,9"}, "at most 1024 nodes"),
    ("tokenswift", {"budget": "20"}, r"budget is 20; allowed: at least sinks \+ recent \+ room"),
    ("tokenswift", {"cache": "none"}, "dynamic, static or full"),
    ("block", {"rows": 1}, "rows is 1; allowed: 0, or 2 or more"),
    ("ngram", {"continuations": 10**6}, "continuations is 1000000; allowed: 1 to"),
])
def test_options_are_checked_and_an_unknown_option_lists_the_known_ones(name, options, message):
    with pytest.raises(UsageError, match=message):
        drafters.parse_options(name, options)


def test_options_are_parsed_from_text_as_on_the_command_line():
    assert drafters.parse_options("tokenswift", {"tree": "2,2", "budget": "300", "cache": "static"}) == \
        TokenSwiftOptions(tree=(2, 2), budget=300, cache="static")


OPTIONS = [(name, field.name) for name, spec in drafters.DRAFTERS.items() for field in fields(spec.options)]
NUMBERS = [(name, field.name) for name, spec in drafters.DRAFTERS.items() for field in fields(spec.options)
           if type(field.default) in (int, float)]
ANYTHING = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
                        lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=2))


@pytest.mark.parametrize("name, key", NUMBERS)
def test_no_option_takes_a_number_below_its_range(name, key):
    with pytest.raises(UsageError, match=f"{key} is -2"):
        drafters.parse_options(name, {key: "-2"})


@example(option=("tokenswift", "tree"), value=[1, 3])  # the one option that is a list
@given(option=st.sampled_from(OPTIONS), value=ANYTHING | st.sampled_from([10**400, -(2**63), [10**9] * 3000]))
@settings(max_examples=400, deadline=None)
def test_any_value_of_an_option_is_taken_unchanged_or_refused(option, value):
    name, key = option
    if (name, key) == ("suffix", "corpus"):
        assume(not isinstance(value, str))  # the name of a file
    try:
        taken = getattr(drafters.parse_options(name, {key: value}), key)
    except UsageError:
        return
    if isinstance(value, list):
        assert list(taken) == value
    elif not isinstance(value, str):
        assert taken == (float(value) if isinstance(taken, float) else value)
        assert isinstance(taken, bool) == isinstance(value, bool)


def test_docs_drafters_lists_every_option_with_its_default():
    document = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")
    told = {part.split("\n", 1)[0]: part for part in document.split("\n## ")[1:]}
    assert list(told) == [name for name, spec in drafters.DRAFTERS.items() if fields(spec.options)]
    for name, part in told.items():
        rows = [line.split(" | ")[:2] for line in part.splitlines() if line.startswith("| `")]
        assert [(key.strip("| `"), value.strip(" `")) for key, value in rows] == [
            (option.name, shown(option.default)) for option in fields(drafters.DRAFTERS[name].options)], name


def shown(value: object) -> str:
    """The value as written for `--drafter-option`."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
