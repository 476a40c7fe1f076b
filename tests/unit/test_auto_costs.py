"""`auto` and costs: measured on a busy machine, disturbed while a text is written, and what finding out may lose."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from helpers.simulated_text import FORWARD, Clock, Text
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.drafters.auto.shared import SharedStatistics


def test_auto_corrects_costs_that_were_measured_wrongly():
    """The draft takes eight times the expected time, so it does not pay."""
    text = Text({"chain": (0.8, 0.7)}, believed={"chain": 0.1})
    text.write(4000)
    before = text.auto.report.turns["plain"]
    text.write(4000)
    assert text.auto.report.turns["plain"] - before > 0.9 * 4000
    assert text.has_forgotten, "the next engine measures anew"


def test_drafts_that_a_busy_machine_made_look_too_dear_are_timed_again():
    """With these costs the candidate would lose even if all guesses were right. In fact it gains 1.4 times."""
    texts = [Text({"chain": (0.4, 0.9)}, believed={"chain": 1.2}, prior=0.92, seed=seed) for seed in range(8)]
    for text in texts:
        text.write(512)
        assert text.slowest(256) > 0.97
    assert np.median([text.auto.report.turns["chain"] for text in texts]) > 0.9 * 512
    for text in texts:
        text.write(2500)
    assert any(text.has_forgotten for text in texts), "the next engine measures anew"


def test_forwards_that_a_busy_machine_made_look_too_dear_are_timed_again():
    text = Text({"chain": (0.15, 0.9)}, believed_forward=FORWARD._replace(rows=(1.0, 3.0, 3.05, 3.1, 3.2, 3.4, 3.6)))
    text.write(256)
    before = text.auto.report.turns["chain"]
    text.write(256)
    assert text.auto.report.turns["chain"] - before > 200 and text.slowest(256) > 0.97
    assert np.mean(text.rows[-20:]) > 6, "more rows are as far off as fewer ones"


def test_drafters_that_are_as_dear_as_their_costs_say_lose_little_when_these_are_checked():
    for seed in range(4):
        text = Text({"one": (1.2, 0.9), "two": (3.0, 0.9), "three": (2.0, 0.5)}, seed=seed)
        assert text.write(3000) > 0.99
        assert text.slowest(256) > 0.97
        assert text.auto.report.turns["plain"] > 0.95 * 3000


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_step_that_is_interrupted_is_not_held_against_the_drafter_that_is_probed(place):
    """The first step of a text is often slow: its memory is new."""
    text = Text({"chain": (0.1, 0.9)})
    for number in range(4):
        text.forward = FORWARD._replace(host=100.0 * (number == place))
        text.step()
    text.forward = FORWARD
    text.write(1000)
    assert text.auto.report.turns["chain"] > 900


def test_a_machine_that_is_busier_than_when_costs_were_measured_tries_drafters_all_the_same():
    slow = FORWARD._replace(rows=tuple(2.5 * seconds for seconds in FORWARD.rows))
    texts = [Text({"chain": (0.375, 0.9)}, forward=slow, believed={"chain": 0.15}, believed_forward=FORWARD, seed=seed)
             for seed in range(4)]
    for text in texts:
        text.write(512)
    assert min(text.auto.report.turns["chain"] for text in texts) > 0.9 * 512


def test_a_few_slow_forwards_do_not_end_all_chains_before_their_number_of_rows():
    """Forwards of four to seven rows were slow when they were seen, so the fourth row seems dear."""
    text = Text({"chain": (0.1, 0.95)})
    text.write(200)
    policy = text.auto.policy
    policy._shared.pace._kinds[policy._costs.kind(3)].factor = 1.7
    policy.decide(text.context)
    assert policy._deepest() > 8 and (np.diff(policy._costs.steps[2:]) >= 0).all()


def test_a_drafter_whose_costs_were_found_right_is_not_checked_again():
    """If they were half of that it could be the fastest, and before its drafts are timed they may be a third."""
    text = Text({"dear": (2.6, 0.9)})
    text.write(8000)
    assert sum(rows > 1 for rows in text.rows) == AUTO_SETTINGS.probe_steps


def test_what_a_request_reserved_for_a_probe_is_free_again_when_the_request_ends():
    shared = SharedStatistics()
    text = Text({"chain": (0.4, 0.9)}, shared=shared)
    assert text.auto.policy.is_probing and shared.losses.seconds > 0 < shared.candidates["chain"].losses.seconds
    del text
    gc.collect()
    assert shared.losses.seconds == 0 == shared.candidates["chain"].losses.seconds


def test_other_requests_of_a_batch_wait_for_a_probe():
    for batch_size, times in ((1, 1.0), (8, AUTO_SETTINGS.batch_loss)):
        shared, clock = SharedStatistics(), Clock()
        text = Text({"chain": (9.0, 0.9)}, shared=shared, clock=clock)
        clock.batch_size, shared.seconds = batch_size, 1e6
        text.auto.policy._begin_probe("chain", 3, 2.0)
        assert shared.losses.seconds == 3 * times * 2.0
