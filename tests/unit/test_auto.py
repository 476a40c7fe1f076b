"""`auto`: what it decides."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.simulated_text import FORWARD, Chained, Clock, Text
from longdraft.drafters.auto import costs
from longdraft.drafters.auto.acceptance import AcceptanceByDepth
from longdraft.drafters.auto.costs import Costs, DraftCosts, ForwardCosts
from longdraft.drafters.auto.policy import Policy
from longdraft.drafters.auto.report import TOKENS_PER_PART
from longdraft.drafters.auto.settings import AUTO_SETTINGS
from longdraft.drafters.auto.shared import Candidate, Guesser, SharedStatistics
from longdraft.drafters.confidence import Confidence
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import chain, from_paths
from longdraft.speculation.drafter import Accepted
from longdraft.speculation.routine import atomic, run_alone


@pytest.mark.parametrize("token, rate, expected", [(0.02, 0.9, range(7, 17)), (0.3, 0.9, range(2, 6))])
def test_the_best_depth_follows_from_what_drafts_cost(token, rate, expected):
    candidate = Candidate(DraftCosts(0.0, token, 1.0, 16), AcceptanceByDepth(16, rate))
    steps = FORWARD.at(np.arange(40), 0)
    rating = candidate.rate(steps, 1.0, candidate.acceptance.reached())
    assert rating.depth in expected
    assert rating.least < rating.seconds < 1.0


def test_auto_drafts_with_the_fastest_from_the_first_steps_on():
    text = Text({"slow": (0.9, 0.9), "fast": (0.1, 0.9)})
    assert text.auto.policy.active == "fast", "a candidate that cannot gain is not even probed"
    text.write(2000)
    assert text.auto.report.turns["fast"] > 0.98 * 2000
    assert text.auto.report.turns["slow"] <= 3 * AUTO_SETTINGS.probe_steps, "its costs are checked once"
    assert not text.has_forgotten


def test_a_drafter_that_reads_the_text_alone_is_watched_and_not_probed():
    """The text repeats one token, as its drafts do. The chain costs more, so it should give way."""
    text = Text({"chain": (0.3, 0.9), "reader": (0.01, 1.0)}, reader="reader", prior=0.2)
    text.write(300)
    assert text.auto.report.turns["reader"] > 150
    wrong = Text({"chain": (0.3, 0.9), "reader": (0.01, 0.0)}, reader="reader")
    wrong.auto._drafters["reader"].propose = atomic(lambda context, depth: chain(context.last, [3] * depth, "self"))
    wrong.write(3000)
    assert wrong.auto.report.turns["reader"] == 0


def test_a_text_that_begins_to_repeat_itself_is_noticed_soon():
    """Its guesses cost next to nothing, so they are compared with the text every few tokens."""
    text = Text({"reader": (0.0005, 0.0)}, reader="reader")
    reader = text.drafters["reader"]
    right, reader.propose = reader.propose, atomic(lambda context, depth: chain(context.last, [3] * depth, "self"))
    text.write(1000)
    assert text.auto.report.turns["reader"] == 0
    reader.propose, reader.rate = right, 1.0
    text.write(200)
    assert text.auto.report.turns["reader"] > 140
    reader.propose, reader.rate = atomic(lambda context, depth: chain(context.last, [3] * depth, "self")), 0.0
    before = text.auto.report.turns["reader"]
    assert text.write(200) > 0.9, "wrong guesses are left out as soon as they have been wrong some times"
    assert text.auto.report.turns["reader"] - before < 100


def test_an_interruption_while_a_draft_is_watched_does_not_end_the_watch():
    text = Text({"reader": (0.0005, 0.0)}, reader="reader")
    reader = text.drafters["reader"]
    right, reader.propose = reader.propose, atomic(lambda context, depth: chain(context.last, [3] * depth, "self"))
    text.write(200)
    reader.propose, reader.rate = right, 1.0
    reader.seconds = 1e3
    text.write(20)
    reader.seconds = 0.0005
    text.write(200)
    assert text.auto.report.turns["reader"] > 140


def test_guesses_of_a_watched_drafter_that_do_not_pay_are_not_verified(monkeypatch):
    text = Text({"reader": (0.0005, 1.0)}, reader="reader")
    text.write(300)
    monkeypatch.setattr(Policy, "num_guesses", lambda self, name, reach: 0)
    text.rows.clear()
    text.write(20)
    assert set(text.rows) == {1}


def test_auto_notices_that_another_drafter_becomes_the_fastest():
    text = Text({"one": (0.2, 0.9), "other": (0.2, 0.5)})
    text.write(3000)
    assert text.auto.report.turns["one"] > 0.95 * 3000
    text.drafters["one"].rate, text.drafters["other"].rate = 0.2, 0.9
    text.write(6000)
    assert text.auto.report.turns["other"] > 0.85 * 6000


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.8])
def test_drafters_that_are_always_wrong_cost_three_percent_at_most_in_any_part_of_a_text(seconds):
    for seed in range(4):
        text = Text({"one": (seconds, 0.0), "two": (seconds, 0.0), "three": (seconds, 0.0)}, seed=seed)
        assert text.write(3000) > 0.99
        assert text.slowest(256) > 0.97


@pytest.mark.parametrize("rate", [0.3, 0.4, 0.5])
def test_drafters_near_break_even_cost_little(rate):
    """A draft of one token takes 0.4 plain steps, so it pays from a rate of 0.42 on. A part of the text may have bad
    luck; the whole has not."""
    for seed in range(4):
        text = Text({"one": (0.4, rate), "two": (0.4, rate), "three": (0.4, rate)}, seed=seed)
        assert text.write(3000) > 0.98
        assert text.slowest(256) > 0.93


def test_a_hopeful_drafter_is_tried_although_another_one_lost_much():
    """The first probe of `reads` costs a hundred plain steps, as when a head has to read a long text."""
    text = Text({"reads": (0.02, 0.0), "chain": (0.1, 0.9)}, prior=0.2)
    reads = text.drafters["reads"]
    propose = reads.propose

    def slow_propose(context, depth):
        text.clock.now += 100.0
        reads.propose = propose
        return propose(context, depth)

    reads.propose = slow_propose
    text.write(3000)
    assert text.auto.report.turns["chain"] > 1500


def test_several_texts_share_what_their_first_probes_may_lose():
    shared = SharedStatistics()
    texts = [Text({"one": (0.4, 0.0), "two": (0.4, 0.0)}, shared=shared, seed=seed) for seed in range(8)]
    for _ in range(256):
        for text in texts:
            text.step()
    assert sum(text.clock.now for text in texts) < 8 * 256 * FORWARD.rows[0] / 0.985
    later = Text({"one": (0.4, 0.0), "two": (0.4, 0.0)}, shared=shared)
    later.write(256)
    assert later.auto.report.turns["plain"] >= 250, "a new text starts with what the earlier ones have seen"


def test_a_request_decides_anew_as_soon_as_another_one_got_to_know_a_drafter():
    """Without that, texts that begin together would wait for their next decision."""
    shared, clock = SharedStatistics(), Clock()
    texts = [Text({"chain": (0.02, 0.9)}, shared=shared, clock=clock, seed=seed) for seed in range(8)]
    assert sum(text.auto.policy.active == "chain" for text in texts) == 2, "that is all that probes may lose"
    for _ in range(3):
        for text in texts:
            text.step()
    assert all(text.auto.policy.active == "chain" for text in texts)


def test_a_probe_ends_when_other_requests_join():
    """What it may lose was reckoned for another number of requests."""
    shared, clock = SharedStatistics(), Clock()
    text = Text({"chain": (0.3, 0.9)}, shared=shared, clock=clock)
    assert text.auto.policy.is_probing
    clock.batch_size = 8  # a drafted token is as dear as before, a step of plain decoding costs an eighth
    text.step()
    assert text.auto.policy.is_plain and shared.losses.seconds < 1.0


def test_requests_share_the_probes_of_plain_decoding():
    """What it learns of the machine counts for all of them."""
    shared, most = SharedStatistics(), 0
    texts = [Text({"chain": (0.4, 0.7)}, shared=shared, seed=seed) for seed in range(8)]
    for _ in range(200):
        for text in texts:
            text.step()
        most = max(most, sum(text.auto.policy.is_plain and text.auto.policy.is_probing for text in texts))
    assert 1 <= most <= 2, "they share what these probes may lose"


def test_drafters_that_guess_with_one_model_share_their_acceptance():
    target, heads, shared = Guesser("target", 0.9), Guesser("heads", 0.5), SharedStatistics()
    guessers = {"plain": Guesser("plain", 0.0), "one": target, "two": target, "three": heads}
    shared.begin(Costs(FORWARD, {name: DraftCosts(0.0, 0.1, 1.0, 16) for name in guessers}), guessers)
    policy = Policy(shared, Clock(), Context([2]))
    for _ in range(20):
        policy.learn("one", from_paths(1, [(3, 5)], "self"), 2, 0)
    one, two, three = (policy._candidates[name].acceptance.reached()[0] for name in ("one", "two", "three"))
    assert one == two < 0.3 and three == 0.5
    assert shared.candidates["two"].acceptance.steps == 20


def test_a_drafter_that_was_not_timed_is_expected_to_be_as_far_off_as_another_one_of_its_model():
    shared = SharedStatistics()
    guessers = {"plain": Guesser("plain", 0.0), "one": Guesser("target", 0.9), "two": Guesser("target", 0.9),
                "three": Guesser("heads", 0.9)}
    shared.begin(Costs(FORWARD, {name: DraftCosts(0.0, 0.1, 1.0, 16) for name in guessers}), guessers)
    policy = Policy(shared, Clock(), Context([2]))
    for _ in range(30):
        shared.pace.add_draft(policy._draft_kind("one"), 0.5 * shared.pace.machine, policy._draft_factor("one"))
    assert policy._draft_factor("two") == policy._draft_factor("one") == pytest.approx(0.5, rel=0.1)
    assert policy._draft_factor("three") == 1.0


def test_states_of_the_target_are_copied_only_for_a_drafter_that_could_be_the_fastest():
    """Drafters that read the same states find them copied where one of them could be."""
    text = Text({"dear": (2.0, 0.9), "dearer": (3.0, 0.9), "cheap": (0.05, 0.9)})
    wanted = {}
    for name in ("dear", "dearer"):
        text.auto._followers[name] = SimpleNamespace(follow=partial(wanted.__setitem__, name))
    text.write(200)
    assert wanted == {"dear": False, "dearer": False}
    text.auto._shared.candidates["dear"].costs = DraftCosts(0.0, 0.01, 1.0, 16)
    text.write(400)
    assert wanted == {"dear": True, "dearer": True}


def test_a_short_step_of_plain_decoding_reads_no_clock_and_the_report_has_all_tokens():
    """Beside a step of half a millisecond, all that is done for `auto` would be felt."""
    text = Text({"dear": (9.0, 0.0)}, between=0.25)
    text.write(3 * AUTO_SETTINGS.steps_per_decision)
    readings = []
    text.auto._clock = text.auto.policy._clock = Counting(text.clock, readings)
    text.write(4 * AUTO_SETTINGS.steps_per_decision)
    assert len(readings) < AUTO_SETTINGS.steps_per_decision, "of four times as many steps"
    assert text.auto.policy._seconds("plain") == pytest.approx(1.25, rel=0.02), "what passes between steps is counted"
    text.write(5)
    assert text.auto.summary(len(text.context) - 1)["tokens_by_choice"]["plain"] == len(text.context) - 1


def test_while_plain_decoding_leads_steps_may_be_computed_ahead_from_one_decision_to_the_next():
    text, timed = Text({"dear": (9.0, 0.0)}), []
    text.write(3 * AUTO_SETTINGS.steps_per_decision + 1)
    policy = text.auto.policy
    for _ in range(2 * AUTO_SETTINGS.steps_per_decision):
        timed.append(not text.auto.plain_steps)
        text.step()
    assert timed.count(True) * AUTO_SETTINGS.steps_per_decision == len(timed)
    text.auto._shared.num_known += 1
    for _ in range(AUTO_SETTINGS.steps_per_look + 1):
        text.step()
    assert not policy.has_news, "every eighth step looks for news, and the next one decides"


AHEAD = FORWARD._replace(ahead=0.4)


def test_plain_decoding_is_rated_by_its_steps_ahead():
    """Single steps of plain decoding take longer than this drafter's, those that are computed ahead do not. What they
    save is learned where the measured costs have too little or too much of it."""
    drafters, plain = {"chain": (0.35, 0.85)}, 1 / (1.0 - 0.4)
    for known in (0.4, 0.2, 0.0):
        believed = AHEAD._replace(ahead=known)
        rates = [Text(drafters, forward=AHEAD, believed_forward=believed, seed=seed).write(2000) for seed in range(4)]
        assert min(rates) > (0.95 if known == 0.4 else 0.85) * plain, known
    gains = {"chain": (0.2, 0.8)}
    rates = [Text(gains, believed_forward=FORWARD._replace(ahead=0.5), seed=seed).write(2000) for seed in range(4)]
    assert min(rates) > 1.4


def test_where_no_step_is_computed_ahead_plain_decoding_is_rated_by_single_ones():
    """As beside a grammar, or with log-probabilities."""
    text = Text({"chain": (0.45, 0.7)}, forward=AHEAD)
    text.is_ahead = False
    text.write(AUTO_SETTINGS.steps_per_decision * 2)
    assert text.auto.policy._seconds("plain") == pytest.approx(1.0, rel=0.01) and text.write(500) > 1.1


def test_a_drafter_that_gains_much_is_chosen_whatever_is_computed_ahead():
    assert Text({"chain": (0.1, 0.9)}, forward=AHEAD).write(1000) > 3.0


def test_a_drafter_that_cannot_be_probed_does_not_keep_others_from_their_turns():
    text = Text({"one": (0.3, 0.9), "two": (0.3, 0.9), "three": (5.0, 0.9)})
    policy, turns = text.auto.policy, set()
    policy._consider_probe = lambda name: None
    for _ in range(12):
        policy.decide(text.context)
        turns.add(policy.turn)
    assert turns == {"one", "two", "three"}


def test_forwards_of_drafts_that_are_dearer_than_their_costs_do_not_pass_for_a_slow_machine():
    """Costs are timed in warm caches; drafts leave cold ones to the forward that verifies them."""
    dear = FORWARD._replace(rows=(1.0, *(4.0 * seconds for seconds in FORWARD.rows[1:])))
    texts = [Text({"chain": (0.3, 0.9)}, forward=dear, believed_forward=FORWARD, seed=seed) for seed in range(8)]
    assert np.mean([text.write(512) for text in texts]) > 0.95
    assert min(text.write(512) for text in texts) > 0.95


def test_what_passes_between_steps_is_a_part_of_each_step():
    """A step of plain decoding pays it for one token, a draft for many."""
    text = Text({"chain": (0.9, 0.8)})
    text.write(400)
    busy = Text({"chain": (0.9, 0.8)}, between=1.0)
    busy.write(400)
    assert text.auto.report.turns["chain"] < 100 < 300 < busy.auto.report.turns["chain"]


def test_auto_verifies_as_many_guesses_as_pay_for_their_rows():
    dear = ForwardCosts(0.0, (1.0, 1.2, 1.6, 2.0, 2.4, 4.0, 7.2), 1e6)
    texts = [Text({"chain": (0.01, 0.7)}, forward=forward) for forward in (FORWARD, dear)]
    for text in texts:
        text.write(3000)
    cheap, few = (np.mean(text.rows[-500:]) for text in texts)
    assert 6 < cheap < 13 and 2 <= few < 5


def test_trees_are_smaller_after_a_text_whose_rows_are_dear():
    """Several query heads share keys, so that arithmetic is the limit: eight rows take four times one row's time."""
    texts = [Text({"chain": (0.01, 0.9)}, forward=ForwardCosts(0.0, FORWARD.rows, 100.0, growth))
             for growth in (0.0, 0.43)]
    for text in texts:
        text.write(2000)
    cheap, dear = (np.mean(text.rows[-100:]) for text in texts)
    assert dear < 0.7 * cheap


class Counting:
    """A clock that notes each reading."""

    def __init__(self, clock: Clock, readings: list[float]) -> None:
        self._clock, self._readings = clock, readings

    def __getattr__(self, name):
        return getattr(self._clock, name)

    def __call__(self):
        self._readings.append(self._clock())
        return self._readings[-1]


class Hesitant(Chained):
    """Its chains end after one token, whatever `auto` expects, and cost as much as long ones."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, 0.0, 0.95)
        self.confidence = Confidence()

    @atomic
    def propose(self, context, max_depth):
        self.confidence.expect([2], [9.0])
        self.clock.now += 1.5
        return chain(context.last, [2], "self")


def test_a_drafter_that_delivers_less_than_its_rating_is_given_up():
    """No outcome tells anything about the depths that it does not draft, which are expected to be like the first."""
    text = Text({"chain": (0.1, 0.95)}, shared=(shared := SharedStatistics()))
    text.drafters["chain"] = text.auto._drafters["chain"] = Hesitant(text.clock)
    text.auto._confidences["chain"] = text.drafters["chain"].confidence
    shared.candidates["chain"].costs = DraftCosts(1.49, 0.01, 1.0, 16)
    text.write(2000)
    assert text.auto.report.turns["plain"] > 0.9 * 2000


def test_where_no_guess_seems_to_pay_outcomes_decide(monkeypatch):
    monkeypatch.setattr(Policy, "num_guesses", lambda self, name, reach: 0)
    text = Text({"chain": (0.1, 0.9)})
    text.write(1000)
    assert text.auto.report.turns["chain"] > 0.9 * 1000 and np.mean(text.rows) > 4


def test_drafts_begin_to_pay_when_requests_share_the_weights_and_trees_become_smaller():
    """Rows cost little beside reading the weights, and much when eight requests share that reading."""
    forward = ForwardCosts(0.0, (1.0, 1.0, 1.02, 1.06, 1.1, 2.0, 3.8), 1e6)
    text = Text({"chain": (0.1, 0.8)}, forward=forward)
    text.write(1000)
    alone = np.mean(text.rows[-100:])
    text.clock.batch_size = 8.0
    for drafter in text.drafters.values():
        drafter.seconds *= 0.25
    text.write(1000)
    assert np.mean(text.rows[-100:]) < 0.7 * alone


def test_tokens_after_the_end_are_not_counted():
    text = Text({})
    run_alone(text.auto.propose(text.context, 9))
    text.context.extend([1, 1, 1])
    text.auto.observe(text.context, Accepted((1, 1, 1), (0,), (), None))
    summary = text.auto.summary(1)
    assert summary["tokens_by_choice"] == {"plain": 1} == summary["choices"][0]
    assert text.auto.summary(3)["tokens_by_choice"] == {"plain": 3}


def test_the_report_counts_each_part_of_the_text():
    text = Text({"fast": (0.1, 0.9)})
    text.write(3 * TOKENS_PER_PART)
    assert len(text.auto.report.choices) >= 3 and text.auto.nbytes == 0
    choices = text.auto.summary(num_new := len(text.context) - 1)["choices"]
    assert sum(sum(counts.values()) for counts in choices) == num_new
    counts = [sum(part.values()) for part in text.auto.summary(3 * TOKENS_PER_PART)["choices"]]
    assert counts == [TOKENS_PER_PART] * 3, "a text that ends with a part begins no further one"
    assert all(first <= second for first, second in pairwise(text.ends))


def test_the_requests_of_an_engine_share_their_knowledge(tiny, tmp_path, monkeypatch):
    forward = ForwardCosts(1e-4, (1e-2,) * len(costs.ROWS), 1e5, 0.0)  # drafts always pay, on any machine
    monkeypatch.setattr(costs, "load_or_measure", lambda identity, names, agree, measured: Costs(
        forward, {name: DraftCosts(0.0, 1e-6, 1.0, 4) for name in names}))
    engine = longdraft.load(str(tiny["gqa"]), drafter="auto")
    for _ in engine.generate("abcabc" * 9, SamplingParams(max_new_tokens=40, seed=1)):
        pass
    knowledge = engine.loaded.knowledge_for(engine.choice)
    assert sum(candidate.acceptance.steps for candidate in knowledge.candidates.values()) > 0
    same = engine.with_drafter("auto")
    assert same.loaded.knowledge_for(same.choice) is knowledge
    make_checkpoint(tmp_path, num_hidden_layers=1)
    other = engine.with_drafter("draft-model", {"model": str(tmp_path)}).with_drafter("auto")
    assert other.loaded.knowledge_for(other.choice) is not knowledge, "another draft model has other costs"
    other = engine.with_drafter("auto", {"draft_weights": "same"})
    assert other.loaded.knowledge_for(other.choice) is not knowledge, "other weights have other costs"
