"""Loop detection: loops are detected, legitimate repetition is not. The result depends on the tokens only."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import longdraft
from helpers.extents import extent
from longdraft.checkpoint import hub
from longdraft.request import loops
from longdraft.request.loops import LEAST_LOOP, PERIODS, REPEATS, WINDOW, FullAcceptance, LoopGuard
from longdraft.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(hub.resolve("novelist"))


def noticed(tokens) -> loops.Loop | None:
    guard = LoopGuard()
    for token in tokens:
        guard.push(int(token))
    return guard.loop


def prose(count: int, seed: int = 0) -> list[int]:
    """Tokens with the variety of a novel."""
    return random.Random(seed).choices(range(4096), k=count)


@pytest.mark.parametrize("period", [1, 2, 3, 17, 100, 500, PERIODS])
def test_an_exact_loop_is_detected_with_its_period(period):
    once = prose(period, seed=1)
    text = prose(3000) + once * (20 + LEAST_LOOP // period)
    loop = noticed(text)
    assert loop is not None and loop.period == period
    assert loop.token == 3000 + period + max(LEAST_LOOP, REPEATS * period)
    assert f"every {period:,} tokens" in str(loop)


def test_the_shortest_period_is_reported():
    assert noticed(prose(100) + [1, 2] * 2000).period == 2


def test_a_loop_longer_than_the_longest_period_is_detected_only_by_low_variety():
    assert noticed(prose(PERIODS + 1) * 10) is None


def test_a_loop_with_small_changes_is_detected_by_its_low_variety():
    """In `... he said . he said, and said. ...` no period repeats exactly, but there are few distinct 4-grams."""
    chance = random.Random(2)
    text = prose(3000)
    for _ in range(800):
        text += chance.choice([[1, 2, 3], [1, 2, 3, 4], [1, 2]])
    loop = noticed(text)
    assert loop is not None and loop.period == 0 and loop.distinct < loops.POOR
    assert "distinct" in str(loop)


def periods_by_token(tokens) -> list[int]:
    """For each token the shortest period that has held for long enough, counted for all periods at each token."""
    held, found = np.zeros(PERIODS, int), []
    needed = np.maximum(LEAST_LOOP, REPEATS * np.arange(1, PERIODS + 1))
    for place, token in enumerate(tokens):
        before = np.full(PERIODS, -1)
        before[: min(place, PERIODS)] = tokens[max(0, place - PERIODS) : place][::-1]
        held = (held + 1) * (before == token)
        long_enough = np.flatnonzero(held >= needed)
        found.append(int(long_enough[0]) + 1 if len(long_enough) else 0)
    return found


@pytest.mark.parametrize("seed", extent(range(3), [0]))
def test_periods_are_found_at_the_token_where_counting_at_each_token_finds_them(seed):
    """Loops of several periods that begin, are interrupted and begin again, longer than the held tokens."""
    chance = random.Random(seed)
    text: list[int] = []
    while len(text) < 9 * PERIODS:
        text += prose(chance.randrange(1, 900), seed=len(text))
        for once in (prose(chance.choice([1, 2, 3, 130, 600]), seed=len(text)), text[-chance.randrange(1, 200) :]):
            text += (once * (1200 // len(once) + 5))[: chance.randrange(400, 3000)]
            text.append(chance.randrange(4096))
    guard, found = LoopGuard(), []
    for token in text:
        guard.push(token)
        found.append(guard.period)
    assert found == periods_by_token(text) and any(found)


def table() -> str:
    """A table of names and numbers with a hundred rows."""
    chance = random.Random(3)
    rows = ["| name | 2019 | 2020 | 2021 |", "| --- | ---: | ---: | ---: |"]
    rows += [f"| {chance.choice(['Leeds', 'York', 'Hull'])} | {chance.randrange(100)} | {chance.randrange(100)} | 0 |"
             for _ in range(100)]
    return "\n".join(rows)


def ballad() -> str:
    """Forty verses, each with the same refrain of eight lines."""
    refrain = "".join(f"And it's home, boys, home, and it's home we ought to be, line {i}\n" for i in range(8))
    chance = random.Random(4)
    words = ["sea", "storm", "mother", "harbour", "night", "lantern", "sailor", "rope", "deck", "wind", "morning"]
    return "".join(" ".join(chance.choices(words, k=7)) + "\n" + " ".join(chance.choices(words, k=7)) + "\n" + refrain
                   for _ in range(40))


def code() -> str:
    """Typical repetition in programs: getters, and a table of zeros."""
    names = ["width", "height", "depth", "left", "right", "top", "bottom", "first", "last", "count", "size", "length",
             "rank", "weight", "value", "index", "start", "stop", "step", "scale"]
    getters = "".join(f"    def get_{name}(self) -> int:\n        return self._{name}\n\n" for name in names)
    zeros = "    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,\n" * 8
    return f"class Box:\n{getters}\nTABLE = [\n{zeros}]\n"


@pytest.mark.parametrize("text", [table, ballad, code], ids=lambda text: text.__name__)
def test_legitimate_repetition_is_not_reported_as_a_loop(text):
    tokens = TOKENIZER.encode(text())
    assert len(tokens) > 800
    assert noticed(prose(3000) + tokens + prose(3000)) is None
    assert noticed(tokens) is None


def test_a_text_with_constant_low_variety_is_not_reported_as_a_loop():
    """A matrix of zeros and ones has few distinct 4-grams from the first token to the last."""
    chance = random.Random(5)
    assert noticed(chance.choices([7, 8], k=4 * WINDOW)) is None


def test_time_and_memory_do_not_grow_with_the_text():
    guard = LoopGuard()
    times = []
    for part in range(6):
        text = prose(5000, seed=part)
        start = time.process_time()
        for token in text:
            guard.push(token)
        times.append(time.process_time() - start)
    assert len(guard._grams) == WINDOW and len(guard._counts) <= WINDOW and len(guard._last) == 8 * PERIODS
    assert min(times[3:]) < 2 * min(times[:3]) and min(times) / 5000 < 200e-6


def test_distinct_n_is_computed_over_the_window():
    text = prose(500) + [1, 2, 3] * 900
    guard = LoopGuard()
    for end, token in enumerate(text, 1):
        guard.push(token)
        if end % 271 == 0:
            grams = np.lib.stride_tricks.sliding_window_view(text[:end], 4)[-WINDOW:]
            assert guard.distinct == len(np.unique(grams, axis=0)) / len(grams)


def test_drafts_that_are_always_accepted_are_reported():
    drafts = FullAcceptance()
    for _ in range(400):
        drafts.push(4, 4)
        drafts.push(0, 0)  # steps without a draft do not count
    assert drafts.is_high
    for _ in range(10):
        drafts.push(2, 4)
    assert not drafts.is_high


@pytest.fixture(scope="module")
def engines():
    return {name: longdraft.load("novelist", drafter=name) for name in ("plain", "ngram", "suffix")}


GREEDY = dict(max_new_tokens=1500, temperature=0.0, seed=0)  # the bundled model soon loops with greedy decoding


@pytest.mark.full
def test_a_looping_text_ends_at_the_same_token_with_every_drafter(engines):
    ends = set()
    for engine in engines.values():
        *_, last = engine.generate("It was", longdraft.SamplingParams(**GREEDY, on_loop="stop"))
        assert last.finish_reason == last.stats["finish_reason"] == "loop"
        ends.add((last.stats["new_tokens"], last.stats["sha256_tokens"]))
        assert last.stats["loop"]["token"] == last.stats["new_tokens"]
    assert len(ends) == 1


@pytest.mark.full
def test_a_text_resumed_inside_its_loop_ends_at_the_same_token(engines, tmp_path):
    params = longdraft.SamplingParams(**GREEDY, on_loop="stop")
    *_, uncut = engines["plain"].generate("It was", params)
    for engine, count in ((engines["plain"], 400), (engines["ngram"], 40)):
        generation = engine.generate("It was", params, journal=tmp_path / str(count))
        for _ in zip(range(count), generation, strict=False):
            pass
        generation.close()
        *_, last = engines["suffix"].resume(tmp_path / str(count))
        assert last.finish_reason == "loop" and 0 < last.stats["resumed_tokens"] < last.stats["new_tokens"]
        assert last.stats["sha256_tokens"] == uncut.stats["sha256_tokens"]
        assert last.stats["loop"] == uncut.stats["loop"]


def test_on_loop_warn_warns_once_and_continues(engines, caplog):
    *_, last = engines["suffix"].generate("It was", longdraft.SamplingParams(**GREEDY))
    assert last.finish_reason == "length" and last.stats["loop"] and last.stats["recent_distinct_4"] < 0.5
    assert len([record for record in caplog.records if "the text repeats every" in record.message]) == 1


def test_on_loop_off_disables_the_detection(engines, caplog):
    *_, last = engines["suffix"].generate("It was", longdraft.SamplingParams(**GREEDY, on_loop="off"))
    assert last.finish_reason == "length" and last.stats["loop"] is None and last.stats["recent_distinct_4"] is None
    assert not caplog.records


def test_a_loop_does_not_end_a_text_before_its_minimum_length(engines):
    *_, first = engines["suffix"].generate("It was", longdraft.SamplingParams(**GREEDY, on_loop="stop"))
    minimum = first.stats["new_tokens"] + 30  # where the loop is found depends on the processor's rounding
    params = longdraft.SamplingParams(**GREEDY, on_loop="stop", min_new_tokens=minimum)
    *_, last = engines["suffix"].generate("It was", params)
    assert last.finish_reason == "loop" and last.stats["new_tokens"] == minimum


def test_unknown_values_of_on_loop_are_refused():
    with pytest.raises(longdraft.UsageError, match="warn, stop, answer or off"):
        longdraft.SamplingParams(on_loop="maybe")
