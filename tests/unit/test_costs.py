"""What steps and drafts cost on this machine: the model of a forward, the measurement, and the file that keeps it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import longdraft
from helpers.checkpoints import load
from longdraft.drafters.auto import calibration, costs
from longdraft.drafters.auto.costs import Costs, DraftCosts, ForwardCosts, load_or_measure
from longdraft.drafters.auto.pace import Pace
from longdraft.model.transformer import Transformer
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler

FORWARD = ForwardCosts(0.5, (10.0, 10.0, 11.0, 12.5, 14.0, 20.0, 32.0), 1000.0, 0.1)
COSTS = Costs(FORWARD, {"plain": DraftCosts(0.0, 0.0, 0.0, 0), "magicdec": DraftCosts(0.1, 2.0, 1.5, 12, 2, 3.0)})


def alone(number: float) -> float:
    return number


def test_a_forward_costs_its_rows_and_its_text():
    assert FORWARD.at([1, 4, 6, 16, 32, 48], 0).tolist() == pytest.approx([10.5, 11.5, 13.0, 20.5, 32.5, 44.5])
    assert FORWARD.at([1], 1000)[0] == pytest.approx(20.5), "1,000 positions take as long as the weights"
    assert FORWARD.at([4], 1000)[0] == pytest.approx(11.5 + 13.0), "and a tenth longer for each further row"


def test_the_first_part_of_a_text_may_be_read_from_the_processors_caches():
    forward = FORWARD._replace(near=200.0, near_positions=4000.0)
    assert forward.at([1], 200)[0] == pytest.approx(10.5 + 0.5)
    assert forward.at([1], 1200)[0] == pytest.approx(10.5 + 0.5 + 10.0)
    assert forward.at([1], 1200, 1, 4)[0] == pytest.approx(10.5 + 0.125 + 11.5), "four texts share the caches"
    costs = Costs(forward, {})
    assert Costs.from_numbers([], costs.numbers()) == costs


def test_the_parts_of_requests_that_do_the_same_add_up_to_the_forward():
    parts = 4 * FORWARD.at([2], 100, 4)[0]
    assert parts == pytest.approx(4 * 0.5 + 14.0 + 4 * 10.0 * 0.1 * 1.1), "own work, weights, texts"


def test_drafts_that_are_made_at_the_same_time_take_turns_on_the_threads():
    drafts = COSTS.drafts["magicdec"]
    assert drafts.at(10) == pytest.approx(20.1), "alone, with all threads"
    assert [4 * drafts.token_of(4), 3 * drafts.token_of(3)] == pytest.approx([6.0, 6.0]), "two turns of two texts"
    assert drafts._replace(lanes=1).token_of(4) == drafts.token


def test_measured_costs_are_kept_and_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names, identity = list(COSTS.drafts), {"model": "a"}
    assert load_or_measure(identity, names, alone, lambda: COSTS) == COSTS

    def never() -> Costs:
        raise AssertionError("measured again")

    assert load_or_measure(identity, names, alone, never) == COSTS
    with pytest.raises(AssertionError):
        load_or_measure({"model": "b"}, names, alone, never)
    costs.forget(identity)
    with pytest.raises(AssertionError):
        load_or_measure(identity, names, alone, never)


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '["x"]', "[NaN]", json.dumps([-1.0] * len(COSTS.numbers()))])
def test_a_damaged_file_is_measured_anew(monkeypatch, tmp_path, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = list(COSTS.drafts)
    load_or_measure({}, names, alone, lambda: COSTS)
    file, = (tmp_path / "longdraft" / "drafting-costs").iterdir()
    file.write_text(content, encoding="utf-8")
    assert load_or_measure({}, names, alone, lambda: COSTS) == COSTS
    assert json.loads(file.read_text(encoding="utf-8")) == COSTS.numbers()


def test_a_cache_folder_that_cannot_be_made_costs_only_time(monkeypatch, tmp_path):
    (tmp_path / "longdraft").write_text("a file where the folder should be", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_or_measure({}, list(COSTS.drafts), alone, lambda: COSTS) == COSTS
    costs.forget({})


def test_ranks_use_the_first_ranks_costs(monkeypatch, tmp_path):
    """Rank 0 has them in its cache folder, so no rank measures; a follower has its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sent = [1.0, *COSTS.numbers()]
    answers = iter(sent)
    found = load_or_measure({}, list(COSTS.drafts), lambda own: next(answers), lambda: pytest.fail("measured"))
    assert found == COSTS


def test_ranks_whose_parts_differ_in_size_time_the_same_steps(tiny, monkeypatch):
    """The last rank may hold fewer rows of the vocabulary. A step that one rank does not take would never end."""
    model, sampler, seen = load(tiny["gqa"]), Sampler(SamplingParams(temperature=0.0, seed=1), [1]), {}
    forward = model.forward_batch
    for own in (1000.0, 100.0):
        rows = seen.setdefault(own, [])
        model.forward_batch = lambda requests, rows=rows: rows.append(len(requests[0].rows.tokens)) or forward(requests)
        monkeypatch.setattr(Transformer, "weights_in_tokens", own)
        # The numbers of rank 0: the size of its weights, and seconds that are not measured again.
        calibration._text_costs(model, sampler, lambda number, own=own: 1000.0 if number == own else 1.0,
                          [1.0] * len(costs.ROWS))
    assert seen[1000.0] == seen[100.0] != []


def test_rows_that_are_timed_are_different_tokens(tiny):
    """Rows of one token would choose the same experts, and cost less than the rows of a text."""
    model, rows = load(tiny["gqa"]), []
    text = calibration._RandomText(model, Sampler(SamplingParams(temperature=0.0, seed=1), [1]), alone, 0)
    forward = model.forward_batch
    model.forward_batch = lambda requests: rows.append(requests[0].rows.tokens) or forward(requests)
    text.seconds(32)
    assert rows and all(len(set(tokens)) == 32 for tokens in rows)


def test_a_busy_machine_changes_no_comparison():
    pace = Pace()
    for _ in range(100):
        pace.add_forward("forward", 2.0, pace["forward"])
        pace.add_draft("draft", 2.0, pace["draft"])
    assert pace["forward"] == pytest.approx(pace["draft"], rel=0.1)
    assert not pace.is_off and pace["unknown"] == 1


def test_a_kind_of_work_that_takes_longer_than_the_others_is_corrected():
    pace = Pace()
    for _ in range(400):
        pace.add_forward("forward", 1.0, pace["forward"])
        pace.add_draft("draft", 4.0, pace["draft"])
    assert pace["draft"] / pace["forward"] == pytest.approx(4, rel=0.1)
    assert pace.is_off


def test_a_machine_that_slows_down_does_not_make_one_kind_of_forward_look_slow():
    pace = Pace()
    for step in range(400):
        pace.add_forward("one row", 1.0 if step < 100 else 2.0, pace["one row"])
    assert pace["one row"] == pytest.approx(pace["two rows"])
    for step in range(400):  # two rows cost 1.5 times what was measured
        kind, seconds = (("one row", 2.0), ("two rows", 3.0))[step % 2]
        pace.add_forward(kind, seconds, pace[kind])
    assert pace["two rows"] / pace["one row"] == pytest.approx(1.5, rel=0.1)


def test_a_short_draft_is_corrected_too_but_does_not_tell_that_costs_are_off():
    """A draft believed to take 1 % of a step takes 10 %, on a machine at half its speed."""
    pace = Pace()
    for _ in range(400):
        pace.add_forward("forward", 2.0, pace["forward"])
        pace.add_draft("draft", 0.2, 0.01 * pace["draft"], noise=0.1)
    assert pace["draft"] / pace["forward"] == pytest.approx(10, rel=0.2)
    assert 400 > pace._kinds["draft"].telling > 0
    few = Pace()
    for _ in range(400):
        few.add_draft("draft", 0.08, 0.01 * few["draft"], noise=0.1)
    assert few["draft"] > 5 and not few.is_off


def test_the_costs_of_every_candidate_are_measured(monkeypatch, tmp_path, tiny):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = longdraft.load(str(tiny["gqa"]), drafter="auto")
    prompt, params = "abcabc" * 9, SamplingParams(max_new_tokens=12, seed=1)
    texts = [[event.tokens for event in engine.generate(prompt, params)] for _ in range(2)]
    assert sum(texts[0], ()) == sum(texts[1], ()), "measuring leaves no trace in the text"
    knowledge = engine.loaded.knowledge_for(engine.choice)
    assert {"plain", "suffix", "magicdec", "tokenswift", "medusa", "glide"} <= set(knowledge.candidates)
    assert all(np.diff(knowledge.forward.rows) >= 0) and knowledge.forward.rows[0] > 0
    assert 0 <= knowledge.forward.ahead < knowledge.forward.rows[0] + knowledge.forward.host
    for name in ("magicdec", "tokenswift", "medusa", "glide"):
        drafted = knowledge.candidates[name].costs
        assert drafted.depth >= 1 and drafted.nodes > 0 and drafted.at(drafted.depth) > 0, name
    assert len(list((tmp_path / "longdraft" / "drafting-costs").iterdir())) == 1


def test_a_plain_step_that_is_interrupted_gives_no_negative_costs(monkeypatch, tmp_path, tiny):
    """Other work may take the processor while the first step chooses its token."""
    seconds, seen = calibration._RandomText.seconds, []

    def interrupted(text, *sizes):
        timings = seconds(text, *sizes)
        if len(sizes) > 1:
            timings[0].sample += 5.0
            seen.append(sizes)
        return timings

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration._RandomText, "seconds", interrupted)
    engine = longdraft.load(str(tiny["mha"]), drafter="auto", threads=1)
    events = list(engine.generate("It was", SamplingParams(max_new_tokens=4, seed=1, ignore_eos=True)))
    assert events[-1].finish_reason == "length"
    file, = (tmp_path / "longdraft" / "drafting-costs").iterdir()
    assert min(json.loads(file.read_text())) >= 0 and seen == [costs.ROWS]


def test_a_measurement_that_takes_long_is_announced_and_times_each_step_once(monkeypatch, tmp_path, tiny, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_LONG_S", 0.0)
    monkeypatch.setattr(calibration, "_SLOW_S", 0.0)
    engine = longdraft.load(str(tiny["gqa"]), drafter="auto")
    for _ in engine.generate("abc", SamplingParams(max_new_tokens=4, seed=1)):
        pass
    assert "timing the drafters of this model on this machine, once" in caplog.text
    assert "magicdec" in engine.loaded.knowledge_for(engine.choice).candidates
