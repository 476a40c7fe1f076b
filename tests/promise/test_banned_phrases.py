"""Banned phrases: none is in a text, and every drafter, step size and resume point gives the same text."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import longdraft
from helpers.equality import DRAFTERS, prompt_of
from helpers.processes import Fork, run_longdraft, wait_for
from longdraft.drafters.matches import DelayedTokens
from longdraft.errors import UsageError
from longdraft.journal.format import FILE, read_journal
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import from_paths
from longdraft.sampling import sampler
from longdraft.sampling.path_penalties import new_path_penalties
from longdraft.sampling.sampler import Sampler
from longdraft.text.banned_phrases import MAX_BANS, ChosenToken, PhraseFilter, folded


class Words:
    """A tokenizer whose tokens are the texts of a list."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def stream(self) -> Words:
        return self

    copy = stream

    def push(self, token: int) -> str:
        return self.texts[token]


def wanted(text: list[int], bans: set[int], vocabulary: int) -> int:
    """A model: the token that is likeliest after a text, without the banned ones."""
    order = random.Random(repr(text)).sample(range(vocabulary), vocabulary)
    return next((token for token in order if token not in bans), 0)


def obvious(words: Words, phrases: list[str], prompt: list[int], count: int, vocabulary: int) -> list[int]:
    """The rule, one token at a time, looking at the whole text."""
    tokens: list[int] = []
    bans: dict[int, set[int]] = {}
    before = len(folded("".join(words.texts[token] for token in prompt)))
    while len(tokens) < count:
        tokens.append(wanted([*prompt, *tokens], bans.get(len(tokens), set()), vocabulary))
        text = folded("".join(words.texts[token] for token in [*prompt, *tokens]))
        start = len(text) - len(words.texts[tokens[-1]])
        ends = [(end, end - max(len(p) for p in phrases if text[:end].endswith(p)))
                for end in range(start + 1, len(text) + 1) if any(text[:end].endswith(p) for p in phrases)]
        if not ends:
            continue
        began, at, place = ends[0][1], 0, before
        while at + 1 < len(tokens) and place + len(words.texts[tokens[at]]) <= began:
            place += len(words.texts[tokens[at]])
            at += 1
        if len(bans.setdefault(at, set())) < MAX_BANS:
            bans[at].add(tokens[at])
            bans = {position: banned for position, banned in bans.items() if position <= at}
            del tokens[at:]
    return tokens


@pytest.mark.parametrize("seed", range(40))
def test_the_filter_cuts_as_the_rule_says_whatever_the_steps_are(seed):
    pick = random.Random(seed)
    words = Words([*"abcAB", "ab", "ba", "abc", "cab", "bb", "cc", "aca"])
    phrases = ["".join(pick.choice("abcB") for _ in range(pick.randrange(2, 6))) for _ in range(pick.randrange(1, 6))]
    prompt, count = [pick.randrange(len(words.texts)) for _ in range(4)], 60
    expected = obvious(words, [folded(phrase) for phrase in phrases], prompt, count, len(words.texts))
    params = SamplingParams(max_new_tokens=count, banned_strings=tuple(phrases))
    found = PhraseFilter(words, params, prompt, (), ())
    tokens: list[int] = []
    settled: list[int] = []
    while len(settled) < count:
        step, bans = [], found.banned_tokens
        for _ in range(min(pick.randrange(1, 6), count - len(tokens))):
            step.append(wanted([*prompt, *tokens, *step], set(bans), len(words.texts)))
            bans = []
        new, cut = found.push([ChosenToken(token) for token in step])
        tokens = [*tokens, *step] if cut is None else [*tokens, *step][:cut]
        settled += [each.token for each in new]
        assert settled == tokens[: len(settled)]
        is_whole = len(settled) == count
        assert is_whole or min(found._bans, default=count) >= found.earliest_cut, "settled positions are forgotten"
    assert settled == expected
    text = folded("".join(words.texts[token] for token in settled))
    assert not any(folded(phrase) in text for phrase in phrases)


SETTINGS = dict(max_new_tokens=40, seed=3, temperature=1.0, min_p=0.02, repetition_penalty=1.2, penalty_window=20,
                dry_multiplier=0.5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: dict[str, Path]) -> longdraft.Engine:
    return longdraft.load(str(tiny["gqa"]), drafter="plain", threads=1)


@pytest.fixture(scope="module")
def params(engine) -> SamplingParams:
    """Phrases of the text that the model writes without them: pairs of characters, and single ones."""
    text = "".join(event.text for event in engine.generate(prompt_of(60), SamplingParams(**SETTINGS)))
    letters = [letter for letter in text if letter.isascii() and letter.isprintable()]
    banned = {text[4:6], text[11:13], *letters[2:14], "no such phrase in this text"}
    return SamplingParams(**SETTINGS, banned_strings=tuple(sorted(banned)))


@pytest.fixture(scope="module")
def plain(engine, params) -> list[int]:
    generation = engine.generate(prompt_of(60), params)
    text = "".join(event.text for event in generation)
    assert generation.stats()["rewinds"] > 2
    assert not any(folded(phrase) in folded(text) for phrase in params.banned_strings)
    return generation.tokens.tolist()


@pytest.mark.parametrize("drafter", ["auto", "ngram", "suffix", "tokenswift", "magicdec, streaming", "glide", "medusa",
                                     "eagle", "draft-model, window", "triforce"])
def test_every_drafter_writes_the_plain_text(tiny, engine, params, plain, drafter):
    name, options = DRAFTERS[drafter]
    if "model" in options:
        options = options | {"model": str(tiny["mha"])}
    other = engine.with_drafter(name, options) if name not in ("glide", "medusa", "eagle", "tokenswift") else (
        longdraft.load(str(tiny["gqa"]), drafter=name, drafter_options=options, threads=1))
    generation = other.generate(prompt_of(60), params)
    list(generation)
    assert generation.tokens.tolist() == plain


@pytest.mark.parametrize("drafter", ["auto", "ngram", "suffix", "tokenswift", "magicdec, streaming", "glide",
                                     "triforce, n-grams"])
def test_a_cut_has_no_index_read_the_text_again(tiny, params, monkeypatch, drafter):
    name, options = DRAFTERS[drafter]
    other = longdraft.load(str(tiny["gqa"]), drafter=name, drafter_options=options, threads=1)
    readers: set[DelayedTokens] = set()
    take = DelayedTokens.take
    monkeypatch.setattr(DelayedTokens, "take", lambda self, context: readers.add(self) or take(self, context))
    counts = []
    for banned in ((), (), params.banned_strings):  # the first text of `auto` measures costs, with indexes of its own
        readers.clear()
        list(generation := other.generate(prompt_of(60), replace(params, banned_strings=banned)))
        counts.append(len(readers))
    assert generation.stats()["rewinds"] > 2
    assert counts[2] == counts[1] > 0


def test_a_cut_has_no_penalties_read_the_text_again(engine, params, monkeypatch):
    made = []
    monkeypatch.setattr(sampler, "new_path_penalties", lambda *args: made.append(new_path_penalties(*args)) or made[-1])
    list(generation := engine.generate(prompt_of(60), params))
    assert generation.stats()["rewinds"] > 2 and len(made) == 1


def test_a_banned_guess_is_not_verified():
    tree, chooses = from_paths(3, [[4, 3], [5, 4]], "test"), Sampler(SamplingParams(seed=1))
    chooses.ban(60, [4])
    assert chooses.pruned(tree, Context(range(60))).tokens == (3, 5, 4)
    assert chooses.pruned(tree, Context(range(61))) is tree


@pytest.mark.parametrize("delay", [0, 10])
def test_an_index_goes_on_behind_a_cut_with_the_new_tokens(delay):
    context, index = Context(range(60)), DelayedTokens(delay, SamplingParams())
    given = index.take(context).tolist()
    context.extend(range(100, 103))
    given += index.take(context).tolist()
    context.truncate(61)
    given += index.take(context).tolist()
    context.extend(range(200, 220))
    given += index.take(context).tolist()
    taken_back = [] if delay else [101, 102]
    assert given == ([*range(60), 100, *taken_back, *range(200, 220)])[: len(given)]
    assert len(given) == len(context) - delay + len(taken_back)


def test_a_batch_writes_the_plain_texts(engine, params, plain):
    other = engine.with_drafter("suffix")
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for place, event in other.generate_many([prompt_of(60)] * 2, params):
        tokens[place] += event.tokens
    assert tokens == {0: plain, 1: plain}


def test_log_probabilities_belong_to_the_tokens_of_the_text(engine, params, plain):
    generation = engine.with_drafter("suffix").generate(prompt_of(60), params, logprobs=0)
    assert [entry.token for event in generation for entry in event.logprobs] == plain


def test_a_phrase_that_never_occurs_changes_nothing(engine):
    base = dict(max_new_tokens=30, seed=3, ignore_eos=True)
    texts = [engine.generate(prompt_of(60), SamplingParams(**base, banned_strings=banned))
             for banned in ((), ("a phrase that nobody would write",))]
    first, second = ([event.tokens for event in text] for text in texts)
    assert sum(first, ()) == sum(second, ()) and texts[1].stats()["rewinds"] == 0


@pytest.mark.parametrize("after", [1, 4, 11])
def test_a_text_cut_anywhere_is_resumed_to_the_same_text(engine, params, plain, tmp_path, after):
    generation = engine.generate(prompt_of(60), params, journal=tmp_path)
    for _ in range(after):
        next(generation)
    generation.close()
    kept = read_journal(tmp_path).tokens.tolist()
    assert kept == plain[: len(kept)] and len(kept) < len(plain)
    resumed = engine.with_drafter("suffix").resume(tmp_path)
    list(resumed)
    assert resumed.tokens.tolist() == plain


@pytest.mark.full
def test_a_killed_process_loses_only_what_was_held(tmp_path):
    process = Fork(tmp_path / "process", run_longdraft, "generate", "It was the", "--journal", tmp_path / "j", "--seed",
                   5, "--max-new-tokens", 300, "--ignore-eos", "--threads", 1, "--quiet", "--drafter", "suffix",
                   "--ban", "the", "--ban", " of ")
    wait_for(lambda: (tmp_path / "j" / FILE).exists() and len(read_journal(tmp_path / "j").tokens) > 20, 60)
    process.kill(signal.SIGKILL)
    process.wait()
    assert 20 < len(read_journal(tmp_path / "j").tokens) < 300
    with longdraft.load("novelist", drafter="plain", threads=1) as engine:
        resumed = engine.resume(tmp_path / "j")
        text = "".join(event.text for event in resumed)
        params = read_journal(tmp_path / "j").header.params
        whole = engine.generate("It was the", params)
        assert "".join(event.text for event in whole) == text
    assert "the" not in text.lower() and " of " not in text.lower()


def test_stop_texts_are_found_in_what_was_held(engine, params):
    whole = "".join(event.text for event in engine.generate(prompt_of(60), params))
    stop = whole[7:9]
    found = engine.generate(prompt_of(60), replace(params, stop=(stop,)))
    assert "".join(event.text for event in found) == whole[: whole.index(stop)] and found.finish_reason == "stop"


@pytest.mark.parametrize("phrases", [("",), ("x" * 201,), ("x",) * 1001])
def test_wrong_phrases_are_refused(phrases):
    with pytest.raises(UsageError, match="banned_strings"):
        SamplingParams(banned_strings=phrases)
