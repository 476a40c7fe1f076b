"""Where chains end: what the leads of their guesses tell about their acceptance."""

from __future__ import annotations

import math

import pytest

from longdraft.drafters.confidence import Confidence, confidence_of
from longdraft.drafters.plain import PlainDrafter


def reached(confidence: Confidence, leads) -> float:
    return math.prod(confidence.end().rate(lead) for lead in leads)


def test_guesses_with_a_small_lead_are_expected_to_be_wrong_more_often():
    rates = [Confidence().end().rate(lead) for lead in (0.0, 0.1, 0.3, 0.7, 1.5, 3.0, math.inf)]
    assert rates == sorted(rates) and rates[0] < 0.7 and rates[-1] > 0.98


def test_outcomes_are_counted_by_lead():
    confidence = Confidence()
    for step in range(400):
        confidence.expect([1, 2, 3], [3.0, 0.05, 0.3])
        confidence.learn([1, 9] if step % 4 else [1, 2, 3, 4])  # the second guess is right in a quarter of the steps
    rate = confidence.end().rate
    assert rate(3.0) > 0.99 and rate(0.3) > 0.97
    assert rate(0.05) == pytest.approx(0.25, abs=0.05)
    assert rate(0.2) == Confidence().end().rate(0.2), "no outcome had this lead"


def test_guesses_after_a_wrong_one_and_after_the_text_are_not_counted():
    confidence, untouched = Confidence(), Confidence().end().rates
    confidence.expect([1, 2, 3], [0.0, 0.2, 0.3])
    confidence.learn([7])  # the first guess was wrong: nothing is known of the others
    rates = confidence.end().rates
    assert rates[0] < untouched[0] and rates[1:] == untouched[1:]
    confidence.learn([1, 2, 3])  # another drafter's step
    assert confidence.end().rates == rates


def test_a_token_that_the_target_adds_counts_as_an_outcome_of_a_guess_that_was_not_verified():
    confidence = Confidence()
    confidence.expect([1, 2, 3], [0.0, 0.2, 0.3])  # of which [1] was verified, and the target chose 2
    confidence.learn([1, 2])
    assert all(now > before for now, before in zip(confidence.end().rates[:2], Confidence().end().rates))
    assert confidence.end().rates[2] == Confidence().end().rates[2]


def test_an_end_is_reached_after_one_token_at_the_latest_point_and_never_by_default():
    assert Confidence().end().least == 0
    assert Confidence(0.999).end().least == 1.0, "each rate is below 1"
    assert 0.5 < Confidence(0.5).end().least < 0.6, "a further token is right with the mean rate"


def test_drafters_without_chains_have_no_confidence():
    assert confidence_of(PlainDrafter()) is None
