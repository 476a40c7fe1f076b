"""An interrupted training resumes and ends with the weights of an uninterrupted one; disk errors are one line."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import training
from helpers.training import At, losses, settings
from longdraft.engine.engine import Engine
from longdraft.errors import OutputError, UsageError
from longdraft.train import job, self_generated
from longdraft.train.processes import DistributedProcesses
from longdraft.train.progress import MetricsLog, TrainingProgress

pytestmark = pytest.mark.full

base = pytest.fixture(scope="module")(training.alphabet)


def test_a_training_stopped_by_a_signal_and_resumed_equals_an_uninterrupted_one(base, tmp_path):
    wanted = settings(base, gradient_accumulation=2, eval_every=4)
    whole = job.train(wanted, tmp_path / "whole")
    cut = job.train(wanted, tmp_path / "cut", At(5, lambda: signal.raise_signal(signal.SIGTERM)))
    assert cut.signal == signal.SIGTERM and cut.step == 5 and not cut.validation
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    resumed = job.resume("heads", tmp_path / "cut", {})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert resumed.validation == whole.validation and resumed.step == whole.step
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)
    modes = {(tmp_path / "cut" / name).stat().st_mode for name in ("model.safetensors", job.METRICS)}
    assert len(modes) == 1
    left = sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert left == ["config.json", job.METRICS, "model.safetensors"]


def test_a_killed_training_resumes_from_its_last_checkpoint(base, tmp_path):
    wanted = settings(base, checkpoint_every=4)
    job.train(wanted, tmp_path / "whole")
    with pytest.raises(Killed):
        job.train(wanted, tmp_path / "cut", At(7, kill))
    with (tmp_path / "cut" / job.METRICS).open("a") as file:
        file.write('{"step": 8, "lo')
    job.resume("heads", tmp_path / "cut", {"eval_every": 6})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


def test_a_training_killed_before_its_first_checkpoint_can_be_resumed_or_restarted(base, tmp_path):
    wanted = settings(base)
    job.train(wanted, tmp_path / "whole")
    for name in ("on", "again"):
        with pytest.raises(Killed):
            job.train(wanted, tmp_path / name, At(3, kill))
        assert not (tmp_path / name / "checkpoint.safetensors").exists()
    with pytest.raises(UsageError, match=r"learning_rate is 0.5, but the training to resume has 0.01"):
        job.resume("heads", tmp_path / "on", {"learning_rate": 0.5})
    with pytest.raises(UsageError, match=r"holds a training of 'heads', not of 'glide'"):
        job.resume("glide", tmp_path / "on", {})
    job.resume("heads", tmp_path / "on", {})
    job.train(wanted, tmp_path / "again")
    for name in ("on", "again"):
        assert losses(tmp_path / name) == losses(tmp_path / "whole")
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == [
            "config.json", job.METRICS, "model.safetensors"]


def test_self_generated_text_saved_before_a_kill_is_reused(base, tmp_path, monkeypatch):
    wanted = settings(base, own_tokens=200, steps=2)  # seven texts of 32 new tokens
    job.train(wanted, tmp_path / "whole")
    monkeypatch.setattr(self_generated, "_SAVE_EVERY_S", 0.0)
    with pytest.raises(Killed):
        job.train(wanted, tmp_path / "cut", At(5, kill))
    written = []
    generate = Engine.generate_many
    monkeypatch.setattr(Engine, "generate_many", lambda engine, prompts, *given, **named: (
        written.extend(prompts) or generate(engine, prompts, *given, **named)))
    stop = At(3, lambda: signal.raise_signal(signal.SIGTERM))  # after two more texts and one step
    assert job.train(wanted, tmp_path / "cut", stop).signal and len(written) == 2
    job.resume("heads", tmp_path / "cut", {})
    assert len(written) == 2 and losses(tmp_path / "cut") == losses(tmp_path / "whole")
    with pytest.raises(Killed):
        job.train(wanted, tmp_path / "other", At(7, kill))
    stop = At(8, kill)
    with pytest.raises(Killed):
        job.train(settings(base, own_tokens=200, steps=2, seed=7), tmp_path / "other", stop)  # needs other texts
    assert len(written) == 2 + 7 + 7


def test_self_generated_text_of_an_earlier_version_is_found(base, tmp_path):
    """Earlier versions wrote own.npy beside the checkpoint."""
    texts = np.arange(3 * 64, dtype=np.int32).reshape(3, 64)
    np.save(tmp_path / "own.npy", texts)
    progress = TrainingProgress(sys.stderr, quiet=True)
    found = self_generated.write(settings(base, own_tokens=100), "", [], tmp_path, progress)
    assert np.array_equal(found, texts)
    self_generated.remove(tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_the_main_process_checks_that_files_can_be_written(base, tmp_path, monkeypatch):
    """Several processes would overwrite each other's test file."""
    job.train(settings(base), tmp_path / "cut", At(2, lambda: signal.raise_signal(signal.SIGTERM)))
    tried = []
    monkeypatch.setattr(job, "_check_writable", tried.append)
    monkeypatch.setattr(DistributedProcesses, "is_main", False)
    job.resume("heads", tmp_path / "cut", {})
    assert not tried
    monkeypatch.setattr(DistributedProcesses, "is_main", True)
    job.resume("heads", tmp_path / "cut", {})
    assert tried == [tmp_path / "cut"]


def test_kept_metrics_are_not_rewritten(tmp_path, monkeypatch):
    """Truncating in place keeps them even if the disk is full or the process is killed."""
    path = tmp_path / job.METRICS
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 6)]
    path.write_text("".join(lines) + '{"step": 6, "lo')
    before = path.stat().st_ino

    def full(*given, **named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with MetricsLog(path, 3) as told:
        with pytest.raises(UsageError, match="is being trained by another process"):
            MetricsLog(path, 3)
        assert path.read_text() == "".join(lines[:3]) and path.stat().st_ino == before
        told.write({"step": 4, "loss": 2.0})
    assert path.read_text() == "".join(lines[:3]) + '{"step": 4, "loss": 2.0}\n'


def test_a_full_disk_raises_a_clear_error_and_keeps_the_last_checkpoint(base, tmp_path, monkeypatch):
    wanted = settings(base, checkpoint_every=4)
    job.train(wanted, tmp_path / "whole")
    written = []

    def full(tensors, path, metadata):
        written.append(path)
        if len(written) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patched:
        patched.setattr("longdraft.train.checkpoint.save_file", full)
        with pytest.raises(OutputError, match="No space left on device; the last checkpoint is kept"):
            job.train(wanted, tmp_path / "cut")
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["checkpoint.safetensors", job.METRICS]
    job.resume("heads", tmp_path / "cut", {})
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
