"""Batches through the Python API: `Engine.generate_many` and the life of an `Engine.batch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from threading import Thread

import pytest

import longdraft
from helpers.equality import batch_params, prompt_of
from longdraft.engine.generation import Generation
from longdraft.errors import JournalError, UsageError


@pytest.fixture(scope="module")
def plain(tiny) -> longdraft.Engine:
    return longdraft.load(str(tiny["gqa"]), drafter="plain")


def test_generate_many_admits_a_prompt_when_a_request_ends(plain):
    taken = []

    def prompts() -> Iterator[list[int]]:
        for seed in range(6):
            taken.append(seed)
            yield prompt_of(9, seed)

    events = plain.generate_many(prompts(), batch_params(max_new_tokens=3), batch_size=2)
    next(events)
    assert taken == [0, 1]
    assert {place for place, event in events if event.finish_reason} == set(range(6)) and taken == list(range(6))


def test_generate_many_continues_after_a_prompt_that_is_refused(plain):
    last = dict(plain.generate_many(["It was", "", [10**9], "Once"], batch_params()))
    assert [last[place].finish_reason for place in range(4)] == ["length", None, None, "length"]
    assert "empty" in str(last[1].error) and "token id" in str(last[2].error)


@pytest.mark.parametrize("error", [MemoryError("no room for its cache"), JournalError("it is there already")])
def test_generate_many_continues_after_a_request_that_cannot_start(plain, monkeypatch, error):
    start = Generation.start

    def refuses(model, drafter, prompt, *settings, **options):
        if prompt == "no":
            raise error
        return start(model, drafter, prompt, *settings, **options)

    monkeypatch.setattr(Generation, "start", refuses)
    last = dict(plain.generate_many(["It was", "no", "Once"], batch_params(), batch_size=2))
    assert [last[place].finish_reason for place in range(3)] == ["length", None, "length"] and last[1].error is error


def test_generate_many_releases_finished_requests(plain, monkeypatch):
    """An endless iterator of prompts can therefore be served."""
    prompts = (prompt_of(9, seed) for seed in count())
    texts = plain.generate_many(prompts, batch_params(max_new_tokens=2), batch_size=2)
    ended = 0
    while ended < 40:
        ended += next(texts)[1].finish_reason is not None
    assert len(texts.gi_frame.f_locals["indices"]) <= 2
    texts.close()


def test_generate_many_rejects_invalid_arguments(plain):
    with pytest.raises(UsageError, match="batch_size is 0; allowed: 1 to 4096 texts"):
        plain.generate_many(["a"], batch_size=0)
    with pytest.raises(UsageError, match="params has 1 settings and there are more prompts; give one for each"):
        list(plain.generate_many(["a", "b"], [batch_params()]))


def test_closing_a_batch_closes_its_requests(plain):
    with plain.batch() as batch:
        text = batch.add("It was", batch_params())
        batch.step()
        generation = batch[text]
    assert not batch and generation.finish_reason == "cancelled"
    with pytest.raises(UsageError, match="text 7 is not in the batch; there are: none"):
        batch.remove(7)


def test_a_step_of_an_empty_batch_does_nothing(plain):
    assert plain.batch().step() == [] and list(plain.generate_many([])) == []


@pytest.mark.parametrize("drafter", ["plain", "suffix"])
def test_another_thread_may_close_a_text_at_any_moment(plain, drafter, tmp_path):
    """It ends with the step that is being written, and can be resumed."""
    params = longdraft.SamplingParams(max_new_tokens=400, seed=5, ignore_eos=True)
    whole = [token for event in plain.generate(prompt_of(9, 1), params) for token in event.tokens]
    for turn in range(6):
        generation = plain.with_drafter(drafter).generate(prompt_of(9, 1), params, journal=tmp_path / str(turn))
        written = list[int]()
        writer = Thread(target=lambda generation=generation, written=written: [
            written.extend(event.tokens) for event in generation])
        writer.start()
        while len(written) < 20 * turn + 1:
            time.sleep(0)
        generation.close()
        writer.join(30)
        assert not writer.is_alive() and generation.is_closed
        assert written == whole[: len(written)]
        assert [token for event in plain.resume(tmp_path / str(turn)) for token in event.tokens] == whole
