"""One training of heads from files to files: check, load, train, validate, write.

    outcome = train_heads(HeadSettings(model="novelist", data=("books.parquet",)), Path("heads"))

While it runs the output folder holds checkpoint.safetensors and metrics.jsonl; at the end model.safetensors,
config.json and metrics.jsonl, and no checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longdraft.errors import UsageError
from longdraft.model.library import bundled, resolve
from longdraft.train import checkpoint as checkpoints
from longdraft.train import data, heads
from longdraft.train.data import Sequences, Tokens
from longdraft.train.heads import Base, TokenSwiftHeads
from longdraft.train.loop import Loop, Outcome, Position, make_optimizer
from longdraft.train.progress import MetricsFile, Progress
from longdraft.train.settings import HeadSettings, from_dict, resumed

METRICS = "metrics.jsonl"


class Result(NamedTuple):
    """`validation` is empty where a signal stopped the training."""

    output: Path
    step: int
    tokens: int
    seconds: float
    validation: list[dict[str, float]]
    signal: int | None


@dataclass
class HeadsTrainee:
    """Heads over a frozen model, as the loop wants them."""

    module: TokenSwiftHeads
    base: Base
    validation: Tokens

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        return self.module.groups(weight_decay)

    def accumulate(self, sequences: Tokens, scale: float) -> Tensor:
        return heads.accumulate(self.module, self.base, heads.as_ids(sequences, self.base.device), scale)

    def validate(self) -> list[dict[str, float]]:
        return [metrics._asdict() for metrics in heads.evaluate(self.module, self.base, self.validation)]


def _checkpoint(output: Path) -> checkpoints.Checkpoint:
    path = output / checkpoints.FILE
    if not path.is_file():
        raise UsageError(f"{str(output)!r} holds no checkpoint to resume; leave --resume out to start there")
    return checkpoints.load(path)


def prepare_output(output: Path) -> None:
    """UsageError unless `output` is a folder, new or empty, in which files can be written."""
    if (output / checkpoints.FILE).exists():
        raise UsageError(f"{str(output)!r} holds an unfinished training; go on with --resume, "
                         "or give another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise UsageError(f"{str(output)!r} is not empty; give another --output")
    except OSError as error:
        raise UsageError(f"cannot write to {str(output)!r}: {error.strerror or error}; "
                         "give another --output") from error
    _check_writable(output)


def _check_writable(output: Path) -> None:
    probe = output / ".longdraft-probe"
    try:
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to {str(output)!r}: {error.strerror or error}; "
                         "give another --output") from error


def train_heads(settings: HeadSettings, output: Path, progress: Progress | None = None) -> Result:
    """Train heads into a new folder. Everything a user can get wrong is checked before the first step."""
    data.check_files([*settings.data, *settings.validation])
    folder = resolve(settings.model)
    prepare_output(output)
    return _train(settings, folder, output, None, progress)


def resume_heads(output: Path, given: Mapping[str, Any], progress: Progress | None = None) -> Result:
    """Go on with the training in `output`; `given` are settings the user repeats or changes."""
    saved = _checkpoint(output)
    settings = resumed(from_dict(saved.state["settings"]), given)
    data.check_files([*settings.data, *settings.validation])
    folder = resolve(settings.model)
    _check_writable(output)
    return _train(settings, folder, output, saved, progress)


def _train(settings: HeadSettings, folder: Path, output: Path, saved: checkpoints.Checkpoint | None,
           progress: Progress | None) -> Result:
    _use_threads(settings.threads)
    base = heads.load_base(folder, settings.dtype, heads.choose_device(settings.device))
    with progress or Progress(sys.stderr, quiet=True) as shown:
        shown.say(f"reading {', '.join(data.names(settings.data))}")
        sequences, validation = load_data(settings, base)
        module = TokenSwiftHeads(base, settings.heads, settings.init, settings.seed, sequences.packed[:1])
        trainee = HeadsTrainee(module, base, validation)
        optimizer = make_optimizer(trainee, settings)
        identity = {"settings": settings.as_dict(), "data_sha256": sequences.fingerprint(),
                    "base_sha256": base.fingerprint}
        position = Position()
        if saved is not None:
            position = _restore(saved, identity, module, optimizer)
        shown.say(f"{sequences.packed.size:,} tokens for training, {validation.size:,} for validation; "
                  f"{sum(p.numel() for p in module.parameters()):,} parameters; step {position.step} "
                  f"of {settings.steps}")

        def save(at: Position) -> None:
            checkpoints.save(output / checkpoints.FILE, module, optimizer,
                             identity | {"step": at.step, "elapsed_s": at.seconds})

        with MetricsFile(output / METRICS, position.step) as metrics:
            outcome = Loop(trainee, optimizer, sequences, settings, save, metrics, shown).run(position)
            if outcome.signal is not None:
                return _result(output, settings, outcome, [])
            save(outcome.position)  # the last validation can be long; a kill in it loses nothing
            parts = trainee.validate()
            metrics.write({"step": outcome.position.step, "validation": parts, "is_final": True})
    return _finish(settings, output, trainee, outcome, parts)


def _use_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # the tokenizer's; read once, at its first use


def load_data(settings: HeadSettings, base: Base) -> tuple[Sequences, Tokens]:
    """Packed training sequences in their order, and those of the validation."""
    tokenizer = data.load_tokenizer(base.folder, base.config.vocab_size)
    end = next(iter(base.config.eos_token_ids), None)

    def read(files: tuple[str, ...]) -> list[Tokens]:
        return list(data.tokenise(data.read_documents(files, settings.text_column), tokenizer, end))

    split = data.Split(read(settings.data), read(settings.validation))
    if not settings.validation and split.training:
        split = data.hold_out(split.training, settings.holdout, settings.seed)
    length, seed = settings.sequence_length, settings.seed
    training = data.pack(split.training, length, seed, "training")
    validation = data.pack(split.validation, length, seed, "validation")
    return Sequences(training, seed), data.spread(validation, settings.eval_tokens)


def _restore(saved: checkpoints.Checkpoint, identity: Mapping[str, Any], module: TokenSwiftHeads,
             optimizer: torch.optim.Optimizer) -> Position:
    for name, what in (("data_sha256", "data"), ("base_sha256", "base model")):
        if saved.state[name] != identity[name]:
            raise UsageError(f"the {what} is not what the checkpoint was trained on (sha256 "
                             f"{identity[name][:12]}, was {saved.state[name][:12]}); restore it, or start "
                             "again in another --output")
    checkpoints.restore(saved, module, optimizer)
    return Position(int(saved.state["step"]), float(saved.state["elapsed_s"]))


def _result(output: Path, settings: HeadSettings, outcome: Outcome, parts: list[dict[str, float]]) -> Result:
    step = outcome.position.step
    tokens = step * settings.sequences_per_step * settings.sequence_length
    return Result(output, step, tokens, outcome.position.seconds, parts, outcome.signal)


def _finish(settings: HeadSettings, output: Path, trainee: HeadsTrainee, outcome: Outcome,
            parts: list[dict[str, float]]) -> Result:
    result = _result(output, settings, outcome, parts)
    files = {"model": base_name(settings.model), "data": data.names(settings.data),
             "validation": data.names(settings.validation)}
    training = settings.as_dict() | files | {
        "steps_done": result.step, "tokens_seen": result.tokens, "seconds": result.seconds,
        "final_training_losses": outcome.last_losses, "validation_tokens": int(trainee.validation.size),
        "validation_metrics": parts, "versions": data.versions(),
    }
    heads.export(output, trainee.module, trainee.base, base_name(settings.model), training)
    (output / checkpoints.FILE).unlink()
    return result


def base_name(model: str) -> str:
    """A model's name for the record: a folder's own name, not where it lies on this machine."""
    return Path(model).resolve().name if model not in bundled() and Path(model).is_dir() else model
