"""The speed of plain decoding, measured or estimated from the steps of a run with drafts."""

from __future__ import annotations

import pytest

import longdraft
from longdraft.request.sampling_params import SamplingParams
from longdraft.speculation.plain_speed import PlainSpeed

UNKNOWN = {"plain_tokens_per_second": None, "plain_is": None}


def seconds_of(rows: int, context: int) -> float:
    """A machine on which a row costs a fifth of the rest, and 1000 tokens of context as much as the weights."""
    return 1e-6 * (1 + 0.2 * rows) * (1000 + context)


def run_of(rows: list[int], tokens: int = 3, start: int = 0) -> tuple[PlainSpeed, float]:
    """What a run with such steps says, and the tokens per second of plain decoding over the same contexts."""
    speed, seconds, context = PlainSpeed(1000), 0.0, start
    for count in rows:
        speed.add(count, context, tokens, seconds_of(count, context))
        seconds += tokens * seconds_of(1, context)
        context += tokens
    return speed, len(rows) * tokens / seconds if seconds else 0.0


@pytest.mark.parametrize("rows, basis", [
    ([1] * 40, "measured"),
    ([1] * 20 + [16] * 400, "measured"),
    ([8, 9, 10, 12] * 30, "estimated"),
    ([1] * 5 + [8] * 100, "estimated"),
])
def test_plain_speed_follows_from_steps_at_other_contexts_and_with_more_rows(rows, basis):
    speed, expected = run_of(rows)
    assert speed.figures() == {"plain_tokens_per_second": pytest.approx(expected), "plain_is": basis}


@pytest.mark.parametrize("rows", [[], [1], [1] * 10, [8] * 100, [8, 9] * 5],
                         ids=["none", "first", "few", "equal", "short"])
def test_plain_speed_is_unknown_where_the_steps_do_not_support_it(rows):
    assert run_of(rows)[0].figures() == UNKNOWN


def test_rows_that_read_the_weights_twice_do_not_make_one_row_look_cheap():
    speed = PlainSpeed(1000)
    for step in range(120):
        rows = 3 + step % 8
        speed.add(rows, 0, 4, 1e-3 * (1 + 0.02 * rows) * (1 if rows <= 6 else 2))
    assert speed.figures()["plain_tokens_per_second"] == pytest.approx(1 / 1.02e-3, rel=0.01)


def test_an_estimate_with_a_large_error_is_left_out():
    speed = PlainSpeed(1000)
    for step in range(100):
        speed.add(30 + step % 2, 0, 3, 1e-3 * (1 + step % 7))
    assert speed.figures() == UNKNOWN


def test_a_slow_first_step_does_not_count():
    usual, slow = PlainSpeed(1000), PlainSpeed(1000)
    for step in range(50):
        usual.add(1, step, 1, seconds_of(1, step))
        slow.add(1, step, 1, seconds_of(1, step) + (step == 0))
    assert usual.figures() == slow.figures()


def test_the_latest_forwards_of_one_row_tell_the_speed_at_any_context():
    speed = PlainSpeed(1000)
    assert speed.seconds_at(0) is None
    for context in range(300):
        speed.add_latest(context, 3 * seconds_of(1, context))
    for context in range(300, 1000):  # the machine becomes faster
        speed.add_latest(context, seconds_of(1, context))
    assert speed.seconds_at(5000) == pytest.approx(seconds_of(1, 5000), rel=0.001)
    assert speed.figures() == UNKNOWN, "these forwards wrote no token"


def test_the_statistics_of_a_plain_run_give_about_its_own_speed(tiny):
    generation = longdraft.load(str(tiny["gqa"]), dtype="float32", threads=1, drafter="plain").generate(
        "abcabcab", SamplingParams(max_new_tokens=200, seed=1))
    stats = list(generation)[-1].stats
    assert stats["plain_is"] == "measured"
    assert stats["plain_tokens_per_second"] == pytest.approx(stats["tokens_per_second"], rel=0.5)
