"""Resume: a text resumed after any step equals the uncut text; a resume that could differ is refused, with a reason."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import random
import resource
import shutil
from pathlib import Path

import pytest

import longdraft
from helpers import resuming
from helpers.checkpoints import make_checkpoint
from helpers.resuming import SETTINGS, cut, written
from longdraft.__main__ import run
from longdraft.engine import generation as generating
from longdraft.errors import JournalError, UsageError
from longdraft.journal import writer as writing
from longdraft.journal.format import FILE, read_journal

folder = pytest.fixture(scope="module")(resuming.model_folder)
engine = pytest.fixture(scope="module")(resuming.suffix_engine)


SAMPLINGS = {
    "greedy": dict(temperature=0.0, repetition_penalty=1.0),
    "filters": dict(top_k=50, top_p=0.9, min_p=0.02, eta_cutoff=1e-3),
    "samplers": dict(dry_multiplier=0.8, presence_penalty=0.3, xtc_probability=0.5, temperature_last=True),
    "at least": dict(min_new_tokens=55, temperature=1.5),
    "stop text": dict(stop=("e",), min_new_tokens=30),
    "stop id": dict(stop_token_ids=(70, 71, 72, 73, 74, 75), min_new_tokens=20),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_text_resumed_after_any_step_equals_the_uncut_text(engine, tmp_path, sampling):
    settings = SETTINGS | SAMPLINGS[sampling]
    text, tokens, stats = written(engine.generate("It was", longdraft.SamplingParams(**settings)))
    for after in (0, 1, 2, 5, 17):
        journal = tmp_path / str(after)
        given = cut(engine, journal, after, **SAMPLINGS[sampling])
        again = engine.resume(journal)
        first = next(again)
        assert again.num_resumed == len(given) and (not after or list(first.tokens) == given)
        rest = written(again)
        assert first.text + rest[0] == text and [*first.tokens, *rest[1]] == tokens
        for name in ("sha256_tokens", "finish_reason", "new_tokens", "distinct_4", "sampling", "exactness"):
            assert rest[2][name] == stats[name]
        assert rest[2]["resumed_tokens"] == len(given)


def test_every_drafter_resumes_the_text_of_every_other_drafter(tiny, tmp_path):
    engines = {name: longdraft.load(str(tiny["mha"]), drafter=name) for name in ("plain", "ngram", "tokenswift",
                                                                                 "magicdec", "auto")}
    expected = written(engines["plain"].generate("It was", longdraft.SamplingParams(**SETTINGS)))[:2]
    chance = random.Random(1)
    for turn in range(6):
        journal = tmp_path / str(turn)
        cut(chance.choice([*engines.values()]), journal, 1)
        while True:
            generation = chance.choice([*engines.values()]).resume(journal)
            events = [event for event, _ in zip(generation, range(chance.randrange(1, 12)), strict=False)]
            generation.close()
            if events[-1].finish_reason:
                break
        assert "".join(event.text for event in events) == expected[0]
        assert [token for event in events for token in event.tokens] == expected[1]


def test_resuming_a_finished_journal_writes_nothing(engine, tmp_path, monkeypatch):
    text, tokens, _ = written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path))
    before = (tmp_path / FILE).read_bytes()
    monkeypatch.setattr(generating, "prefill", None)  # nothing is computed
    generation = engine.resume(tmp_path)
    (event,) = generation
    assert event.text == text and list(event.tokens) == tokens and event.finish_reason == "length"
    assert event.stats["resumed_tokens"] == 60 and event.stats["steps"] == 0
    assert (tmp_path / FILE).read_bytes() == before


def test_an_end_missing_from_the_journal_is_found_in_its_tokens(engine, tmp_path):
    """The journal ends between the last tokens and the record that marks the end."""
    written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path))
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:-1])
    assert read_journal(tmp_path).finish is None
    (event,) = engine.resume(tmp_path)
    assert event.finish_reason == "length" and read_journal(tmp_path).finish == "length"


def test_tokens_are_in_the_journal_before_they_are_returned(engine, tmp_path):
    given: list[int] = []
    with engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path, fsync="never") as generation:
        for event in generation:
            given += event.tokens
            assert read_journal(tmp_path).tokens.tolist() == given
    assert given


def test_two_writers_exclude_each_other_until_one_is_dropped_or_closed(engine, tmp_path):
    params = longdraft.SamplingParams(**SETTINGS)
    generation = engine.generate("It was", params, journal=tmp_path)
    next(generation)
    with pytest.raises(JournalError, match="is being written"):
        engine.resume(tmp_path)
    with pytest.raises(JournalError, match="longdraft resume"):
        engine.generate("It was", params, journal=tmp_path)
    del generation
    gc.collect()  # it and its iterator hold one another
    other = engine.resume(tmp_path)  # never iterated over
    del other
    gc.collect()
    closed = engine.resume(tmp_path)  # never iterated over
    closed.close()
    assert written(engine.resume(tmp_path))[2]["finish_reason"] == "length"


def test_a_refused_request_leaves_no_journal_behind(tiny, tmp_path, monkeypatch):
    """The corrected command can then use the same journal path."""
    engine = longdraft.load(str(tiny["gqa"]), drafter="medusa", drafter_options={"tree": "1,1,1,1"})
    params = longdraft.SamplingParams(**SETTINGS)
    with pytest.raises(UsageError, match="4 deep; allowed: at most 3"):
        engine.generate("It was", params, journal=tmp_path / "work")
    assert not (tmp_path / "work").exists()

    def full(*settings, **options):
        raise MemoryError("no room for the cache")

    put_right = engine.with_drafter("suffix")
    with monkeypatch.context() as patched:
        patched.setattr(generating, "Context", full)
        with pytest.raises(MemoryError):
            put_right.generate("It was", params, journal=tmp_path / "work")
    assert written(put_right.generate("It was", params, journal=tmp_path / "work"))[2]["finish_reason"] == "length"

    cut(put_right, tmp_path / "cut", 3)
    before = (tmp_path / "cut" / FILE).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(generating, "Context", full)
        with pytest.raises(MemoryError):
            put_right.resume(tmp_path / "cut")
    assert (tmp_path / "cut" / FILE).read_bytes() == before
    assert written(put_right.resume(tmp_path / "cut"))[2]["finish_reason"] == "length"


def test_a_file_is_checked_against_the_model_before_it_is_used(engine, folder, tmp_path):
    """Each difference is refused with its reason, and the journal is unchanged."""
    cut(engine, tmp_path / "j", 3)
    before = (tmp_path / "j" / FILE).read_bytes()
    make_checkpoint(tmp_path / "weights", num_key_value_heads=2, seed=9)
    shutil.copytree(folder, tmp_path / "tokenizer")
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    shutil.copytree(folder, tmp_path / "config")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-4}))
    for name, reason in (("weights", "weights are other"), ("tokenizer", "tokenizer is other"),
                         ("config", "configuration is other")):
        with pytest.raises(JournalError, match=reason):
            longdraft.resume(tmp_path / "j", model=str(tmp_path / name))
    with pytest.raises(JournalError, match="quantize was none, now int8"):
        longdraft.load(str(folder), drafter="suffix", quantize="int8").resume(tmp_path / "j")
    assert (tmp_path / "j" / FILE).read_bytes() == before
    shutil.copytree(folder, tmp_path / "moved")  # the same, elsewhere
    written(longdraft.resume(tmp_path / "j", model=str(tmp_path / "moved")))


def test_resuming_on_other_kernels_is_refused_or_marked(engine, folder, tmp_path, monkeypatch):
    cut(engine, tmp_path, 3)
    monkeypatch.setenv("LONGDRAFT_KERNELS", "reference")
    with pytest.raises(JournalError, match=r"kernels .*, now reference.*--allow-different-kernels"):
        longdraft.resume(tmp_path)
    generation = longdraft.resume(tmp_path, allow_different_kernels=True)
    next(generation)
    next(generation)
    generation.close()
    monkeypatch.delenv("LONGDRAFT_KERNELS")
    stats = written(longdraft.resume(tmp_path))[2]  # the first ones again: part of it is the other's all the same
    assert stats["exactness"] == "distribution" and stats["kernels"] != "reference"
    assert [one.arithmetic["kernels"] == "reference" for one in read_journal(tmp_path).runs] == [False, True, False]
    assert run(["inspect", str(tmp_path)]) == 0


def test_resume_uses_the_kernels_of_the_journal_if_available(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_KERNELS", "reference")
    engine = longdraft.load(str(folder), drafter="suffix")
    expected = written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS)))[1]
    cut(engine, tmp_path, 3)
    monkeypatch.delenv("LONGDRAFT_KERNELS")
    _, tokens, stats = written(longdraft.resume(tmp_path))
    assert stats["kernels"] == "reference" and stats["exactness"] == "bit-exact" and tokens == expected


def test_a_text_begun_on_a_device_is_resumed_on_the_cpu_where_there_is_none(engine, tmp_path, monkeypatch):
    """As `--allow-different-kernels` allows; without it the refusal names the device, not a missing option."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cut(engine, tmp_path, 3)
    content = read_journal(tmp_path)
    (tmp_path / FILE).unlink()
    arithmetic = content.header.arithmetic | {"device": "cuda:0", "dtype": "float16", "kernels": "triton-16"}
    header, began = (dataclasses.replace(each, arithmetic=arithmetic) for each in (content.header, content.runs[0]))
    with writing.Journal.create(tmp_path, header, began, 0) as new:
        new.append(tuple(content.tokens.tolist()), 0, 0.0)
    with pytest.raises(JournalError, match=r"device cuda:0, now cpu.*--allow-different-kernels"):
        longdraft.resume(tmp_path)
    assert written(longdraft.resume(tmp_path, allow_different_kernels=True))[2]["exactness"] == "distribution"


@pytest.mark.parametrize("began, resumes, named", [
    ("aarch64", "x86_64", "machine aarch64, now x86_64"), ("x86_64", "arm64", "machine x86_64, now arm64"),
    ("x86_64", "x86_64", None), ("aarch64", "aarch64", None)])
def test_a_text_is_resumed_on_the_kind_of_machine_that_began_it(engine, tmp_path, monkeypatch, began, resumes, named):
    monkeypatch.setattr("platform.machine", lambda: began)
    cut(engine, tmp_path, 3)
    assert read_journal(tmp_path).header.arithmetic.get("machine") == (None if began == "x86_64" else began)
    monkeypatch.setattr("platform.machine", lambda: resumes)
    if named:
        with pytest.raises(JournalError, match=named):
            longdraft.resume(tmp_path)
    else:
        assert written(longdraft.resume(tmp_path))[2]["exactness"] == "bit-exact"


def test_a_token_outside_the_vocabulary_is_refused(engine, tmp_path):
    cut(engine, tmp_path, 2)
    journal, _ = writing.Journal.open(tmp_path)
    journal.append((70_000,), 0, 0.0)
    journal.close()
    with pytest.raises(JournalError, match="token id 70000; allowed: 0 to 319"):
        engine.resume(tmp_path)


def test_tokens_after_the_end_are_refused(engine, tmp_path):
    cut(engine, tmp_path, 2)
    journal, _ = writing.Journal.open(tmp_path)
    journal.append((1, 5), 0, 0.0)  # 1 ends a text
    journal.close()
    with pytest.raises(JournalError, match="after the end of the text"):
        next(engine.resume(tmp_path))


# Beside a writer


def test_inspect_reads_a_journal_while_it_is_written(engine, tmp_path, capfd):
    generation = engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path)
    assert run(["inspect", str(tmp_path), "--json"]) == 0  # not one token yet
    next(generation)
    assert run(["inspect", str(tmp_path)]) == 0
    assert "being written" in capfd.readouterr().out
    generation.close()


# Memory and time


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not tell resident memory so")
def test_only_the_kv_cache_grows_with_the_text(tmp_path):
    """A short version of `longdraft bench soak long`, which writes 100,000 tokens."""
    make_checkpoint(tmp_path / "m", hidden_size=128, max_position_embeddings=16384)
    engine = longdraft.load(str(tmp_path / "m"), drafter="plain")
    # One token more than is measured: with the last one, the prefix tree copies the rows of the last block.
    params = longdraft.SamplingParams(max_new_tokens=6001, seed=1, ignore_eos=True)
    generation = engine.generate([5, 6], params, journal=tmp_path / "j", snapshot="never")
    beyond = {}
    for steps, _ in enumerate(generation, 1):
        if steps in (3000, 6000):
            beyond[steps] = resident_bytes() - generation.step.cache.nbytes
    assert generation.step.cache.nbytes > 6 << 20
    assert beyond[6000] - beyond[3000] < 4 << 20  # the allocator takes memory by pages of two megabytes
