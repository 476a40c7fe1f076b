"""Training runs for tests: a small model with a predictable text, settings and metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from helpers.checkpoints import make_checkpoint
from longdraft.train import job
from longdraft.train.progress import TrainingProgress
from longdraft.train.settings import HeadSettings

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
QUICK = dict(sequence_length=32, steps=25, batch_size=4, learning_rate=2e-2, warmup_steps=3, eval_every=0,
             checkpoint_every=0, probe_tokens=0, device="cpu", threads=1, dtype="float32")
SMALL = QUICK | dict(layers=1, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1, context=256)


def alphabet(tmp_path_factory) -> Path:
    """A fixture function: a random Llama beside a text in which each token determines the next."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    make_checkpoint(folder, initializer_range=0.15)
    (folder.parent / "text.txt").write_text(ALPHABET * 400)
    return folder


def alphabet_text(tmp_path_factory) -> str:
    """A fixture function: the path of a text in which each token determines the next."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(ALPHABET * 200)
    return str(path)


def tokenizer_folder(tmp_path_factory) -> Path:
    """A fixture function: a model folder with a tokenizer, because training a tokenizer needs hundreds of words."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_checkpoint(folder, initializer_range=0.15)
    return folder


def settings(base: Path, **changes) -> HeadSettings:
    given = dict(model=str(base), data=(str(base.parent / "text.txt"),), sequence_length=64, threads=1,
                 steps=12, batch_size=2, warmup_steps=4, learning_rate=1e-2, eval_every=0, checkpoint_every=0,
                 probe_tokens=0, device="cpu")
    return HeadSettings(**(given | changes))


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / job.METRICS).read_text().splitlines()]


def losses(output: Path) -> list[list[float]]:
    return [line["losses"] for line in metrics(output) if "losses" in line]


class At(TrainingProgress):
    """A progress display that calls a function once, after a given step."""

    def __init__(self, step: int, act):
        super().__init__(sys.stderr, quiet=True)
        self._left, self._act = step, act

    def step(self, done, text):
        self._left -= 1
        if self._left == 0:
            self._act()
