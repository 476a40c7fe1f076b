"""The training loop: schedule, steps, validation, checkpoints, and a clean stop on a signal.

Its state is the parameters, the optimizer's moments, the step and the elapsed seconds. The learning rate is a function
of step and seconds, data and random numbers are functions of the step. A resumed training therefore repeats an
uninterrupted one (with `max_seconds`, up to the clock).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longdraft.errors import NumericalError, UsageError
from longdraft.system.console import Interrupt, clock
from longdraft.train.data import Sequences
from longdraft.train.data_files import Tokens
from longdraft.train.processes import DistributedProcesses
from longdraft.train.progress import MetricsLog, TrainingProgress
from longdraft.train.settings import TrainingSettings

_OF_TOKENS = re.compile(r"embed|lm_head|markov")  # tables with a row for each token


class TrainingTask(Protocol):
    """A model with a loss."""

    @property
    def module(self) -> nn.Module:
        """Holds all trained parameters."""

    def accumulate(self, sequences: Tokens, scale: float, first: int) -> Tensor:
        """Add `scale` times the gradient of the loss over sequences [B, L]; returns the parts of the loss [parts].

        first  index of the first sequence in the data; random numbers are functions of it and the seed
        """

    def validate(self) -> list[dict[str, float]]:
        """The validation metrics of each part of the loss."""

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """Write the trained weights with their provenance."""


@dataclass
class Position:
    """The progress of a training."""

    step: int = 0
    seconds: float = 0.0


class Outcome(NamedTuple):
    """signal: the number of the signal that stopped the training; None if it ended by itself."""

    position: Position
    signal: int | None
    last_losses: list[float]


def progress_of(settings: TrainingSettings, position: Position) -> float:
    """The finished share of the training, 0 to 1: by steps or by the clock, whichever is larger."""
    by_clock = position.seconds / settings.max_seconds if settings.max_seconds else 0.0
    return min(1.0, max(position.step / settings.steps, by_clock))


def learning_rate(settings: TrainingSettings, position: Position) -> float:
    """Linear warm-up and a cosine that reaches zero at the end of the training: see `TrainingSettings.schedule`.

    The product stays below the given rate (0.86 of it with 50 of 200 steps of warm-up). The other reaches it and begins
    at zero, as that of `transformers` does.
    """
    done = progress_of(settings, position)
    warmup = settings.warmup_steps
    if settings.schedule == "warmup-cosine":
        begin = min(1.0, warmup / settings.steps)
        if position.step < warmup and done < 1:
            return settings.learning_rate * position.step / warmup
        share = (done - begin) / (1 - begin) if begin < 1 else 1.0  # of the cosine
        return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, share))))
    warm = min(1.0, (position.step + 1) / warmup) if warmup else 1.0
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(module: nn.Module, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the maps between rows and AdamW for the others: tables of tokens, norms.

    Muon (arXiv 2502.16982) scales its steps to the size of AdamW's, so both have one learning rate. Only matrices
    decay: the weights of norms belong near one, not zero.
    """
    maps: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        is_map = settings.optimizer == "muon" and parameter.ndim == 2 and not _OF_TOKENS.search(name)
        (maps if is_map else others).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if maps:
        optimizers.append(_muon()(maps, lr=settings.learning_rate, weight_decay=settings.weight_decay,
                                  adjust_lr_fn="match_rms_adamw"))
    groups = [{"params": [p for p in others if p.ndim > 1], "weight_decay": settings.weight_decay},
              {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0}]
    optimizers.append(torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, settings.beta2)))
    return optimizers


def _muon() -> Any:
    try:
        return torch.optim.Muon
    except AttributeError as error:
        raise UsageError(f"optimizer is 'muon', which needs PyTorch 2.9; this is {torch.__version__}; "
                         "give --optimizer adamw, or pip install -U torch", "optimizer") from error


class TrainingLoop:
    """One training. `save(position)` writes a checkpoint."""

    def __init__(self, task: TrainingTask, optimizers: Sequence[torch.optim.Optimizer], data: Sequences,
                 settings: TrainingSettings, save: Callable[[Position], None], metrics: MetricsLog,
                 progress: TrainingProgress, processes: DistributedProcesses) -> None:
        self._task = task
        self._optimizers = optimizers
        self._data = data
        self._settings = settings
        self._save = save
        self._metrics = metrics
        self._progress = progress
        self._processes = processes

    def run(self, position: Position) -> Outcome:
        """Train from `position` to the end, or until a signal arrives; then finish the current step."""
        began = time.monotonic()
        seconds_before, steps_before = position.seconds, position.step
        losses: list[float] = []
        with Interrupt() as stop:
            while progress_of(self._settings, position) < 1:
                rate = learning_rate(self._settings, position)
                losses, norm = self._step(position, rate)
                position.step += 1
                elapsed = self._processes.maximum(time.monotonic() - began)
                position.seconds = seconds_before + elapsed
                speed = (position.step - steps_before) * self._tokens_per_step() / elapsed
                self._report(position, losses, rate, norm, speed)
                if _due(position.step, self._settings.eval_every):
                    self._validate(position)
                signal = int(self._processes.maximum(stop.number))
                if signal or _due(position.step, self._settings.checkpoint_every):
                    self._save(position)
                if signal:
                    return Outcome(position, signal, losses)
        return Outcome(position, None, losses)

    def _tokens_per_step(self) -> int:
        return self._settings.sequences_per_step * self._settings.sequence_length * self._processes.size

    def _step(self, position: Position, rate: float) -> tuple[list[float], float]:
        settings, processes = self._settings, self._processes
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        parts = []
        for micro in range(settings.gradient_accumulation):
            forward = (position.step * settings.gradient_accumulation + micro) * processes.size + processes.rank
            first = forward * settings.batch_size
            sequences = self._data.read(first, settings.batch_size)
            parts.append(self._task.accumulate(sequences, 1 / settings.gradient_accumulation, first))
        processes.average_gradients(self._task.module.parameters())
        losses = processes.average(torch.stack(parts).mean(0)).tolist()
        limit = settings.max_grad_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(self._task.module.parameters(), limit))
        if not math.isfinite(sum(losses)) or not math.isfinite(norm):
            raise NumericalError(f"the loss is not finite at step {position.step + 1}; use a "
                                 "smaller --learning-rate, or with --dtype float32")
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return losses, norm

    def _report(self, position: Position, losses: list[float], rate: float, norm: float, speed: float) -> None:
        done = progress_of(self._settings, position)
        self._metrics.write({
            "step": position.step, "loss": sum(losses), "losses": losses, "learning_rate": rate,
            "grad_norm": norm, "tokens": position.step * self._tokens_per_step(),
            "elapsed_s": position.seconds, "tokens_per_second": speed,
        })
        left = clock(position.seconds * (1 - done) / done)
        each = f" ({' '.join(f'{loss:.2f}' for loss in losses)})" if len(losses) > 1 else ""
        self._progress.step(done, f"step {position.step}  loss {sum(losses):.3f}{each}  "
                                  f"{speed:,.0f} tokens/s  ETA {left}")

    def _validate(self, position: Position) -> None:
        parts = self._task.validate()
        self._metrics.write({"step": position.step, "validation": parts})
        top1 = " ".join(f"{part['top1']:.1%}" for part in parts)
        loss = sum(part["loss"] for part in parts)
        self._progress.say(f"step {position.step}  validation loss {loss:.3f}  top-1 {top1}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
