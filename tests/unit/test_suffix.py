"""The suffix index compared with its Python reference, and the drafter that uses it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longdraft
from helpers.checkpoints import VOCAB
from helpers.equality import prompt_of
from longdraft import drafters
from longdraft.drafters import suffix_index as index_module
from longdraft.drafters.corpus import Corpora
from longdraft.drafters.suffix import SuffixDrafter, SuffixMatcher, SuffixOptions
from longdraft.drafters.suffix_index import RECENT, SEPARATOR, ReferenceIndex, SuffixIndex, new_index
from longdraft.errors import UsageError
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie, chain, root_only
from longdraft.speculation.routine import run_alone

compiled = pytest.mark.skipif(SuffixIndex is None, reason="the compiled module is missing")
KINDS = [ReferenceIndex, pytest.param(SuffixIndex, marks=compiled)]
LIMITS = dict(budget=64, depth=3, min_match=1, seen=1, contexts=1, min_probability=0.0)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def made(kind: type, tokens: list[int], capacity: int = 0, longest: int = 16):
    index = kind(capacity, longest)
    index.extend(ids(*tokens))
    return index


limits = st.fixed_dictionaries(dict(
    budget=st.sampled_from([1, 4, 40]), depth=st.integers(0, 6), min_match=st.integers(1, 3), seen=st.integers(1, 3),
    contexts=st.sampled_from([1, 2, 3, 8]), min_probability=st.sampled_from([0.0, 0.01, 0.1, 0.3])))


@st.composite
def streams(draw: st.DrawFn) -> list[int]:
    """Up to 150 tokens of a small alphabet with separators among them; hypothesis' own lists are mostly short."""
    letters, length, pick = draw(st.integers(1, 4)), draw(st.integers(0, 150)), draw(st.randoms(use_true_random=True))
    return [pick.randrange(letters) if pick.random() < 0.97 else SEPARATOR for _ in range(length)]


@compiled
@settings(deadline=None, max_examples=200)
@given(streams(), st.sampled_from([0, 2, 3, 8, 17, 40]), st.sampled_from([1, 2, 3, 5, 9]), limits, st.integers(1, 12),
       st.lists(st.integers(0, 4), max_size=8))
def test_the_automaton_agrees_with_the_reference_to_the_last_bit(text, capacity, longest, limits, tail, foreign):
    obvious, automaton = ReferenceIndex(capacity, longest), SuffixIndex(capacity, longest)
    for place, token in enumerate(text):
        obvious.extend(ids(token))
        automaton.extend(ids(token))
        assert len(obvious) == len(automaton)
        if place % 7 == 0 or place == len(text) - 1:
            for end in (text[max(0, place + 1 - tail) : place + 1], foreign, text[: place // 2] + foreign[:1]):
                assert obvious.guess(ids(*end), **limits) == automaton.guess(ids(*end), **limits)


@compiled
def test_they_agree_where_a_token_has_more_successors_than_are_considered():
    text = [token for i in range(5 * RECENT) for token in (7, 100 + i * i % 37, 8, 100 + i * i % 37)]
    obvious, automaton = made(ReferenceIndex, text), made(SuffixIndex, text)
    for tail in (ids(7), ids(100, 8), ids(8, 101), ids(104, 7)):
        assert obvious.guess(tail, **LIMITS | {"contexts": 3}) == automaton.guess(tail, **LIMITS | {"contexts": 3})
    assert len(automaton.guess(ids(7), **LIMITS | {"depth": 1})[0]) == RECENT


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_follow_from_the_counts_of_successors(kind):
    """`1 2` was followed by 3 twice and by 4 once: N = 3, T = 2, E = 8 * 2 / (3 * 2)."""
    index = made(kind, [1, 2, 3, 0, 1, 2, 4, 9, 1, 2, 3, 5, 1, 2])
    escape = 8 * 2 / (3 * 2)
    expected = ([3, 4], [-1, -1], [2 / (3 + escape), 1 / (3 + escape)])
    assert index.guess(ids(1, 2), **LIMITS | {"depth": 1}) == expected
    # The shorter context `2` ends at the same positions, so it is not counted again.
    assert index.guess(ids(1, 2), **LIMITS | {"depth": 1, "contexts": 2}) == expected
    # Where only `2` matches, its weight is smaller.
    escape = 8 * 2 / (3 * 1)
    expected = ([3, 4], [-1, -1], [2 / (3 + escape), 1 / (3 + escape)])
    assert index.guess(ids(8, 2), **LIMITS | {"depth": 1}) == expected
    assert index.guess(ids(8, 2), **LIMITS | {"min_match": 2})[0] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_match_leaves_probability_to_shorter_ones(kind):
    index = made(kind, [1, 2, 3, 9, 2, 4, 9, 2, 4, 8, 2, 4])
    after_2 = {3: 1 / (4 + 4), 4: 3 / (4 + 4)}  # N = 4, T = 2, E = 8 * 2 / (4 * 1); and E(1 2) = 8 / (1 * 2)
    tokens, _, probabilities = index.guess(ids(1, 2), **LIMITS | {"depth": 1, "contexts": 2})
    assert dict(zip(tokens, probabilities)) == {3: (1 + 4 * after_2[3]) / (1 + 4), 4: 4 * after_2[4] / (1 + 4)}
    # `1 2` was followed once only: where two are asked for, the shorter match alone speaks.
    seen_twice = index.guess(ids(1, 2), **LIMITS | {"depth": 1, "seen": 2})
    assert dict(zip(seen_twice[0], seen_twice[2])) == after_2


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_match_outweighs_more_frequent_short_ones(kind):
    index = made(kind, [5, 1, 2, 3] + [1, 2, 4] * 9 + [5, 1, 2])
    assert index.guess(ids(5, 1, 2), **LIMITS)[0][0] == 3
    assert index.guess(ids(1, 2), **LIMITS)[0][0] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_separator_is_never_guessed_and_nothing_is_matched_across_it(kind):
    index = made(kind, [1, 2, SEPARATOR, 1, 2, 3])
    assert index.guess(ids(1, 2), **LIMITS)[0] == [3]
    assert index.guess(ids(2, 1), **LIMITS | {"min_match": 2})[0] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("longest", [1, 4, 16])
def test_an_index_of_bounded_size_holds_the_last_tokens(kind, longest):
    """It holds at least half of its capacity and never all of it, and guesses only tokens that it holds."""
    index = kind(100, longest)
    pick = np.random.default_rng(1)
    text = pick.integers(0, 50, 1000).astype(np.int32)
    peak = 0
    for place, token in enumerate(text):
        index.extend(ids(token))
        peak = max(peak, index.nbytes)
        assert len(index) == (place + 1 if place < 50 else 50 + (place + 1) % 50)
    # The last 50 tokens are there: each is guessed after the `longest` before it.
    for place in range(950 + longest, 1000):
        assert text[place] in index.guess(text[place - longest : place], **LIMITS | {"depth": 1})[0]
    assert peak <= 100 * 500


@compiled
def test_memory_is_bounded_however_long_and_however_repetitive_the_text_is():
    pick = np.random.default_rng(1)
    many = 200_000
    for text in (pick.integers(0, 3000, many), np.zeros(many), np.arange(many) % 7, pick.integers(0, 2, many)):
        index = SuffixIndex(16_384, 16)
        bound = 0
        for start in range(0, len(text), 1000):
            index.extend(text[start : start + 1000].astype(np.int32))
            bound = max(bound, index.nbytes)
        assert bound <= 16_384 * 400, "bytes for each token of the capacity"


def test_the_end_of_the_text_is_matched_although_the_index_lags_behind():
    context = Context([1, 2, 3, 4, 5, 1, 2])
    options = SuffixOptions(min_match=2, min_probability=0.0, depth=2, delay=4)
    text = SuffixMatcher(options, SamplingParams())
    text.update(context)  # 1 2 3 is indexed, 4 5 1 2 is not
    trie = Trie(2)
    text.add_matches(trie, 0, context, (), 9)
    assert trie.tree() == chain(2, [3], "suffix")
    context.extend([9, 9, 1, 2])
    text.update(context)
    trie = Trie(2)
    text.add_matches(trie, 0, context, (), 9)
    assert trie.tree() == chain(2, [3, 4], "suffix")


def test_the_delay_may_be_the_penalty_window_while_there_is_a_penalty():
    context = Context([1, 2, 3, 1, 2])
    now, waits = (SuffixDrafter(SuffixOptions(min_probability=0.0, delay=-1), params) for params in (
        SamplingParams(), SamplingParams(repetition_penalty=1.2, penalty_window=4)))
    for drafter, expected in ((now, 3), (waits, 1)):
        drafter.begin(context, None)
        assert len(run_alone(drafter.propose(context, 2))) == expected


def test_matches_are_added_after_the_guesses_of_another_drafter():
    context = Context([1, 2, 3, 4, 5, 1])
    text = SuffixMatcher(SuffixOptions(min_match=2, min_probability=0.0), SamplingParams())
    text.update(context)
    trie = Trie(1)
    node = trie.graft(0, [2, 3], "heads")
    text.add_matches(trie, node, context, [2, 3], 2)
    assert trie.tree().tokens == (1, 2, 3, 4, 5)
    assert trie.tree().parents == (-1, 0, 1, 2, 3)
    assert trie.tree().sources == ("", "heads", "heads", "suffix", "suffix")


@pytest.mark.parametrize("max_depth", [0, 1, 3, 20])
@pytest.mark.parametrize("budget", [1, 5, 100])
def test_trees_stay_within_their_bounds(max_depth, budget):
    drafter = SuffixDrafter(SuffixOptions(budget=budget, depth=6, min_match=1, min_probability=0.0), SamplingParams())
    context = Context(prompt_of(400))
    drafter.begin(context, None)
    tree = run_alone(drafter.propose(context, max_depth))
    assert len(tree) <= 1 + budget and max(tree.depths) <= min(max_depth, 6)
    assert len(tree) > 1 or max_depth == 0


def test_nothing_is_drafted_without_an_earlier_occurrence():
    drafter = SuffixDrafter(SuffixOptions(), SamplingParams())
    for prompt in ([5], [1, 2, 3, 4]):
        context = Context(prompt)
        drafter.begin(context, None)
        assert run_alone(drafter.propose(context, 9)) == root_only(prompt[-1])


def test_without_the_compiled_module_the_reference_drafts_the_same(monkeypatch):
    context = Context(prompt_of(300))
    trees = []
    for missing in (False, True):
        if missing:
            monkeypatch.setattr(index_module, "SuffixIndex", None)
            assert isinstance(new_index(0, 4), ReferenceIndex)
        drafter = SuffixDrafter(SuffixOptions(min_probability=0.05), SamplingParams())
        drafter.begin(context, None)
        trees.append(run_alone(drafter.propose(context, 9)))
        assert drafter.nbytes > 0
    assert trees[0] == trees[1] and len(trees[0]) > 1


# The corpus.


def corpora() -> Corpora:
    return Corpora(lambda text: [2 + ord(letter) % 50 for letter in text], VOCAB)


def test_a_corpus_is_searched_together_with_the_text(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4], np.int32))
    np.save(tmp_path / "b.npy", np.array([1, 2, 5], np.int64))
    index = corpora().index(str(tmp_path), 8)
    drafter = SuffixDrafter(SuffixOptions(min_match=2, min_probability=0.0, depth=2), SamplingParams(), index)
    context = Context([1, 2, 9, 9, 1, 2])
    drafter.begin(context, None)
    tree = run_alone(drafter.propose(context, 9))
    paths = {tuple(tree.tokens[n] for n in tree.path(node)[1:]): tree.sources[node] for node in range(1, len(tree))}
    assert paths == {(9,): "suffix", (9, 9): "suffix", (3,): "corpus", (3, 4): "corpus", (5,): "corpus"}
    few = SuffixDrafter(SuffixOptions(min_match=2, min_probability=0.0, depth=2, budget=3), SamplingParams(), index)
    few.begin(context, None)
    assert len(run_alone(few.propose(context, 9))) == 4


def test_a_corpus_is_read_once(tmp_path):
    (tmp_path / "text.txt").write_text("it was the best of times")
    held = corpora()
    assert held.index(str(tmp_path / "text.txt"), 8) is held.index(str(tmp_path / "text.txt"), 8)
    assert len(held.index(str(tmp_path / "text.txt"), 8)) == 25


@pytest.mark.parametrize("name, data, message", [
    ("a.txt", b"\xff\xfe", "cannot read .*txt: it is not UTF-8 text; give a UTF-8 text"),
    ("a.npy", b"not numpy", "npy: it is not a .npy file of numbers"),
    ("a.npy", b"", "npy: it is not a .npy file of numbers"),
    ("a.npy", np.zeros((2, 2), np.int32), r"holds int32 of shape \[2, 2\]; allowed: one row of ids"),
    ("a.npy", np.zeros(2), "holds float64"),
    ("a.npy", np.array([5, 900]), f"holds the token id 900; allowed: 0 to {VOCAB - 1}"),
    ("a.npy", np.array([-5, 9]), "holds the token id -5"),
    ("a.md", b"text", "a folder without .txt or .npy files"),
])
def test_a_bad_corpus_is_one_clear_line(tmp_path, name, data, message):
    if isinstance(data, bytes):
        (tmp_path / name).write_bytes(data)
    else:
        np.save(tmp_path / name, data)
    with pytest.raises(UsageError, match=message) as caught:
        corpora().index(str(tmp_path), 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options, message", [
    ({"corpus": "/no/such/corpus"}, "corpus is '/no/such/corpus'; allowed: an existing UTF-8 text"),
    ({"budget": "0"}, "budget is 0; allowed: 1 to 1024"),
    ({"min_match": "40"}, r"min_match is 40; allowed: 1 to max_match \(32\)"),
    ({"min_probability": "1"}, "min_probability is 1.0; allowed: 0 to below 1"),
    ({"contexts": "9"}, "contexts is 9; allowed: 1 to 8"),
    ({"capacity": "3"}, "capacity is 3"),
    ({"continuations": "3"}, "no option 'continuations'; known: budget, depth, min_match"),
])
def test_options_are_checked(options, message):
    with pytest.raises(UsageError, match=message):
        drafters.parse_options("suffix", options)


def test_an_engine_reads_its_corpus_and_writes_the_same_text(tiny, tmp_path):
    """The corpus is the text that will be written: guesses are accepted, and the text is the same."""
    params = SamplingParams(max_new_tokens=40, seed=3, ignore_eos=True)
    plain = longdraft.load(str(tiny["mha"]), drafter="plain").generate("It was", params)
    list(plain)
    np.save(tmp_path / "earlier.npy", plain.tokens)
    engine = longdraft.load(str(tiny["mha"]), drafter="suffix",
                            drafter_options={"corpus": str(tmp_path / "earlier.npy")})
    for _ in range(2):
        written = engine.generate("It was", params)
        *_, last = written
        assert written.tokens.tolist() == plain.tokens.tolist()
        assert last.stats["accepted_tokens"] > 20
    (tmp_path / "earlier.txt").write_text("It was the best of times")
    by_text = longdraft.load(str(tiny["mha"]), drafter="suffix",
                             drafter_options={"corpus": str(tmp_path / "earlier.txt")}).generate("It was", params)
    list(by_text)
    assert by_text.tokens.tolist() == plain.tokens.tolist()
