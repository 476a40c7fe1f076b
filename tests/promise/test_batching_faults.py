"""Faults in batches: a fault in one request ends that request and changes no other."""

from __future__ import annotations

import errno

import pytest

import longdraft
from helpers.equality import batch_params, prompt_of
from helpers.journals import FaultyOS, replace_os
from longdraft.drafters import streaming_model
from longdraft.engine.generation import Generation
from longdraft.errors import NumericalError, OutputError
from longdraft.journal import writer as writing
from longdraft.model.transformer import Transformer
from longdraft.speculation import ahead
from longdraft.text import stream as text_stream


@pytest.fixture(scope="module")
def plain(tiny) -> longdraft.Engine:
    return longdraft.load(str(tiny["gqa"]), drafter="plain")


def run_beside(engine: longdraft.Engine, spoil) -> Exception:
    """Run three requests, spoil the second after its first step, check the other two, and return its error."""
    expected = [list(engine.generate(prompt_of(20, seed), batch_params(seed)))[-1].stats for seed in (0, 2)]
    batch = engine.batch()
    texts = [batch.add(prompt_of(20, seed), batch_params(seed)) for seed in range(3)]
    last = {}
    rounds = 0
    while batch:
        if rounds == 2:
            spoil(batch[texts[1]])
        rounds += 1
        last |= dict(batch.step())
    assert [last[text].stats["sha256_tokens"] for text in (texts[0], texts[2])] == [
        stats["sha256_tokens"] for stats in expected]
    failed = last[texts[1]]
    assert failed.finish_reason is None and failed.stats["finish_reason"] is None and failed.tokens == ()
    return failed.error


def test_a_cache_that_cannot_be_allocated_ends_only_its_request(plain):
    def spoil(generation: Generation) -> None:
        def refuse(k, v):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")

        generation.step.cache.append = refuse

    assert isinstance(run_beside(plain, spoil), MemoryError)


def test_damaged_logits_end_only_their_request(plain):
    def spoil(generation: Generation) -> None:
        sampler = generation.step.sampler
        generation.step.sampler.choose = lambda logits, tree, context, every: type(sampler).choose(
            sampler, logits * float("nan"), tree, context, every)

    assert isinstance(run_beside(plain, spoil), NumericalError)


def test_a_full_disk_ends_only_the_request_with_a_journal(plain, tmp_path, monkeypatch):
    batch = plain.batch()
    with_journal = batch.add(prompt_of(20), batch_params(), journal=tmp_path / "work")
    without = batch.add(prompt_of(20, 2), batch_params())
    last = dict(batch.step())
    replace_os(monkeypatch, FaultyOS(1, errno.ENOSPC))
    while batch:
        last |= dict(batch.step())
    assert isinstance(last[with_journal].error, OutputError) and last[without].finish_reason == "length"
    monkeypatch.undo()
    resumed = plain.batch()
    text = resumed.resume(tmp_path / "work")
    while resumed:
        last |= {("resumed", number): event for number, event in resumed.step()}
    assert last["resumed", text].stats["sha256_tokens"] == list(
        plain.generate(prompt_of(20), batch_params()))[-1].stats["sha256_tokens"]


def test_a_journal_that_cannot_be_closed_ends_its_request_once(plain, tmp_path, monkeypatch):
    """All tokens are written and reported; a disk error while closing is reported as the only end."""
    batch = plain.batch()
    text = batch.add(prompt_of(20), batch_params(), journal=tmp_path / "work")

    close, refused = writing.Journal.close, []

    def refuse(journal):
        close(journal)
        if not refused:
            refused.append(journal)
            raise OutputError("the disk is full")

    monkeypatch.setattr(writing.Journal, "close", refuse)
    events = []
    while batch:
        events += [event for number, event in batch.step() if number == text]
    ends = [event for event in events if event.finish_reason or event.error]
    assert len(ends) == 1 and isinstance(ends[0].error, OutputError) and ends[0] is events[-1]
    assert [token for event in events for token in event.tokens] == [
        token for event in plain.generate(prompt_of(20), batch_params()) for token in event.tokens]


def test_a_forward_that_runs_out_of_memory_is_split_by_request(plain, monkeypatch):
    forward_batch = Transformer.forward_batch

    def tight(self, asks):
        if len(asks) > 1:
            raise MemoryError("no room for all")
        return forward_batch(self, asks)

    monkeypatch.setattr(Transformer, "forward_batch", tight)
    texts = {}
    for place, event in plain.generate_many([prompt_of(20, seed) for seed in range(3)], batch_params()):
        texts[place] = event
    assert all(event.finish_reason == "length" for event in texts.values())


def test_an_interrupted_forward_leaves_a_complete_journal(plain, tmp_path, monkeypatch):
    def interrupt(self, asks):
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "WRITES_AHEAD", False)  # which computes tokens without a forward of the batch
    whole = list(plain.generate(prompt_of(20), batch_params()))[-1].stats["sha256_tokens"]
    generation = plain.generate(prompt_of(20), batch_params(), journal=tmp_path / "work")
    next(generation)
    with monkeypatch.context() as patched:
        patched.setattr(Transformer, "forward_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    assert list(plain.resume(tmp_path / "work"))[-1].stats["sha256_tokens"] == whole


def test_a_resumed_text_and_the_prompt_of_a_draft_model_are_read_between_the_steps_of_others(plain, tiny, tmp_path,
                                                                                             monkeypatch):
    """... a part of the journal's text, or a chunk of the prompt, in each round."""
    monkeypatch.setattr(text_stream, "_REPLAYED", 4)
    monkeypatch.setattr(streaming_model, "CHUNK", 16)
    params = batch_params(0, max_new_tokens=40)
    expected = list(plain.generate(prompt_of(100), params))[-1].stats["sha256_tokens"]
    with plain.generate(prompt_of(100), params, journal=tmp_path) as cut:
        for _ in range(20):
            next(cut)
    engine = longdraft.load(str(tiny["gqa"]), drafter="draft-model", drafter_options={"model": str(tiny["gqa"])})
    batch, events = engine.batch(), []
    other = batch.admit(plain.generate(prompt_of(5, seed=3), batch_params(3, max_new_tokens=200)))
    batch.step()
    text = batch.resume(tmp_path)
    while text in batch:
        events += batch.step()
    batch.close()
    numbers = [number for number, _ in events]
    assert numbers[-1] == text and events[-1][1].stats["sha256_tokens"] == expected
    replay = numbers.index(text)
    assert numbers[:replay] == [other] * replay and replay >= 20 // 4  # an event of the other text for each part
    chunks = numbers[replay + 1 :].index(text)  # of the target, which computes rows together, and of the draft model
    assert chunks >= 119 // 64 + 119 // 16
