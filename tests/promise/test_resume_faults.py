"""Resume after faults: a full disk, no memory, a clock that jumps, files that change under the engine."""

from __future__ import annotations

import random
import shutil
import time

import pytest

import longdraft
from helpers import resuming
from helpers.journals import FaultyOS, replace_os
from helpers.processes import Fork, run_code
from helpers.resuming import SETTINGS, cut, written
from longdraft.checkpoint.tensor_files import WEIGHTS
from longdraft.errors import OutputError
from longdraft.journal.format import read_journal

pytestmark = pytest.mark.full

folder = pytest.fixture(scope="module")(resuming.model_folder)
engine = pytest.fixture(scope="module")(resuming.suffix_engine)


@pytest.mark.parametrize("at", [3, 4, 5, 8, 11])
def test_a_full_disk_stops_the_text_and_the_journal_resumes(engine, tmp_path, monkeypatch, at):
    expected = written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS)))[1]
    generation = engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path, fsync="always")
    given: list[int] = []
    with monkeypatch.context() as patch:
        replace_os(patch, FaultyOS(at, 28))
        with pytest.raises(OutputError, match="No space left"):
            given.extend(token for event in generation for token in event.tokens)
    generation.close()
    assert given == expected[: len(given)] == read_journal(tmp_path).tokens.tolist()[: len(given)]
    assert written(engine.resume(tmp_path))[1] == expected


@pytest.mark.parametrize("kind, message", [
    (MemoryError, ""), (RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried"),
    (OSError, (12, "Cannot allocate memory"))], ids=["ours", "torch's", "the system's"])
def test_out_of_memory_in_a_step_leaves_a_journal_that_resumes(engine, tmp_path, monkeypatch, kind, message):
    expected = written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS)))[1]
    generation = engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path)
    next(generation)
    forward_batch = type(engine.model).forward_batch

    def failing(self, asks):
        forward_batch(self, asks)  # the cache holds provisional rows when it happens
        raise kind(*message) if isinstance(message, tuple) else kind(message)

    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "forward_batch", failing)
        with pytest.raises(MemoryError):
            next(generation)
    generation.close()
    assert written(engine.resume(tmp_path))[1] == expected


def test_a_clock_that_jumps_changes_nothing(engine, tmp_path, monkeypatch):
    """The wall clock is recorded for display only; durations use a monotonic clock."""
    import datetime

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(1970 + random.randrange(100), 1, 1, tzinfo=tz)

    expected = written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS)))[1]
    monkeypatch.setattr(datetime, "datetime", Jumping)
    monkeypatch.setattr(time, "time", lambda: random.uniform(-1e12, 1e12))
    cut(engine, tmp_path, 3)
    assert written(engine.resume(tmp_path))[1] == expected
    assert all(step.seconds < 10 for step in read_journal(tmp_path).steps)


def test_replacing_the_model_folder_while_it_writes_changes_nothing(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    engine = longdraft.load(str(tmp_path / "m"), drafter="plain")
    expected = written(engine.generate("It was", longdraft.SamplingParams(**SETTINGS)))[1]
    generation = engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path / "j")
    tokens = [*next(generation).tokens]
    weights = tmp_path / "m" / WEIGHTS
    weights.write_bytes(bytes(weights.stat().st_size))  # in place: a reader of the file would see zeros
    assert tokens + written(generation)[1] == expected
    engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path / "k").close()
    assert read_journal(tmp_path / "k").header.weights == read_journal(tmp_path / "j").header.weights


def test_truncating_the_models_files_after_loading_changes_nothing(folder, tmp_path):
    """In another process: the system ends one that reads a page which its file no longer has."""
    shutil.copytree(folder, tmp_path / "m")
    code = f"""
import hashlib, os, sys, longdraft, longdraft.kernels
params = longdraft.SamplingParams(max_new_tokens=20, seed=7)
for kernels in longdraft.kernels.available()[-2:]:
    os.environ["LONGDRAFT_KERNELS"] = kernels
    whole = longdraft.load({str(folder)!r}, drafter="auto")
    engine = longdraft.load({str(tmp_path / "m")!r}, drafter="auto")
    expected = [token for event in whole.generate("It was", params) for token in event.tokens]
    size = os.path.getsize({str(tmp_path / "m" / WEIGHTS)!r})
    os.truncate({str(tmp_path / "m" / WEIGHTS)!r}, 0)
    assert [token for event in engine.generate("It was", params) for token in event.tokens] == expected
    import shutil
    shutil.copyfile({str(folder / WEIGHTS)!r}, {str(tmp_path / "m" / WEIGHTS)!r})
"""
    assert Fork(tmp_path / "process", run_code, code).wait() == 0


def test_weights_that_were_replaced_before_they_were_hashed_have_no_hash(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    engine = longdraft.load(str(tmp_path / "m"), drafter="plain")
    weights = tmp_path / "m" / WEIGHTS
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(longdraft.ModelError, match="was replaced after it was loaded"):
        engine.generate("It was", longdraft.SamplingParams(**SETTINGS), journal=tmp_path / "k")
    assert not (tmp_path / "k").exists()


def test_a_model_without_a_folder_cannot_write_a_journal(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    writer = longdraft.from_transformers(AutoModelForCausalLM.from_pretrained(folder))
    with pytest.raises(longdraft.UsageError, match="those of a model in memory are not kept"):
        writer.engine.generate([1, 2], journal=tmp_path / "j")
