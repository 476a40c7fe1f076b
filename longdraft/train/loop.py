"""The training loop: schedule, steps, validation, checkpoints, and a clean stop when asked.

Its state is the parameters, the optimizer's moments, the step and the seconds spent. The learning rate
follows from step and seconds, the data and all that is drawn from the step, so a resumed training repeats an uncut one
(with `max_seconds`, as far as clocks do).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from longdraft.console import Interrupt, clock
from longdraft.errors import NumericalError
from longdraft.train.data import Sequences, Tokens
from longdraft.train.progress import Metrics, Progress
from longdraft.train.settings import Settings
from longdraft.train.team import Team


class Trainee(Protocol):
    """What the loop trains."""

    @property
    def module(self) -> nn.Module:
        """Holds every parameter that learns."""

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for AdamW."""

    def accumulate(self, sequences: Tokens, scale: float, place: int) -> Tensor:
        """Add scale * gradient of the loss over sequences [B, L]; the loss's parts [parts].

        place  of the first sequence among all that are read; what is drawn follows from it and the seed
        """

    def validate(self) -> list[dict[str, float]]:
        """Validation metrics of each part."""


@dataclass
class Position:
    """Where a training stands."""

    step: int = 0
    seconds: float = 0.0


class Outcome(NamedTuple):
    """`signal` is the one that stopped it, None where it ran to its end."""

    position: Position
    signal: int | None
    last_losses: list[float]


def progress_of(settings: Settings, position: Position) -> float:
    """The part of the training behind us, by steps or by the clock, whichever is further."""
    by_clock = position.seconds / settings.max_seconds if settings.max_seconds else 0.0
    return min(1.0, max(position.step / settings.steps, by_clock))


def learning_rate(settings: Settings, position: Position) -> float:
    """Linear warm-up times a cosine that reaches zero where the training ends."""
    warm = min(1.0, (position.step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    return settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * progress_of(settings, position)))


def decayed(named: list[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for the optimizer: decay pulls a linear map to zero, but would pull a norm from one."""
    return [{"params": [p for _, p in named if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0}]


def make_optimizer(trainee: Trainee, settings: Settings) -> torch.optim.AdamW:
    betas = (0.9, settings.beta2)
    return torch.optim.AdamW(trainee.groups(settings.weight_decay), lr=settings.learning_rate, betas=betas)


class Loop:
    """One training. `save(position)` writes a checkpoint."""

    def __init__(self, trainee: Trainee, optimizer: torch.optim.AdamW, data: Sequences, settings: Settings,
                 save: Callable[[Position], None], metrics: Metrics, progress: Progress, team: Team) -> None:
        self._trainee, self._optimizer, self._data, self._settings = trainee, optimizer, data, settings
        self._save, self._metrics, self._progress, self._team = save, metrics, progress, team

    def run(self, position: Position) -> Outcome:
        """Train from `position` to the end, or until a signal asks to stop after the step at hand."""
        began, before, first = time.monotonic(), position.seconds, position.step
        losses: list[float] = []
        with Interrupt() as stop:
            while progress_of(self._settings, position) < 1:
                rate = learning_rate(self._settings, position)
                losses, norm = self._step(position, rate)
                position.step += 1
                position.seconds = before + self._team.largest(time.monotonic() - began)
                speed = (position.step - first) * self._tokens_per_step() / (position.seconds - before)
                self._tell(position, losses, rate, norm, speed)
                if _due(position.step, self._settings.eval_every):
                    self._validate(position)
                signal = int(self._team.largest(stop.number))
                if signal or _due(position.step, self._settings.checkpoint_every):
                    self._save(position)
                if signal:
                    return Outcome(position, signal, losses)
        return Outcome(position, None, losses)

    def _tokens_per_step(self) -> int:
        return self._settings.sequences_per_step * self._settings.sequence_length * self._team.size

    def _step(self, position: Position, rate: float) -> tuple[list[float], float]:
        settings, team = self._settings, self._team
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        parts = []
        for micro in range(settings.gradient_accumulation):
            forward = (position.step * settings.gradient_accumulation + micro) * team.size + team.rank
            place = forward * settings.batch_size
            sequences = self._data.read(place, settings.batch_size)
            parts.append(self._trainee.accumulate(sequences, 1 / settings.gradient_accumulation, place))
        team.average_gradients(self._trainee.module.parameters())
        losses = team.average(torch.stack(parts).mean(0)).tolist()
        limit = settings.max_grad_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(self._trainee.module.parameters(), limit))
        if not math.isfinite(sum(losses)) or not math.isfinite(norm):
            raise NumericalError(f"the loss is not a number at step {position.step + 1}; train with a "
                                 "smaller --learning-rate, or with --dtype float32")
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses, norm

    def _tell(self, position: Position, losses: list[float], rate: float, norm: float, speed: float) -> None:
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
        parts = self._trainee.validate()
        self._metrics.write({"step": position.step, "validation": parts})
        top1 = " ".join(f"{part['top1']:.1%}" for part in parts)
        loss = sum(part["loss"] for part in parts)
        self._progress.say(f"step {position.step}  validation loss {loss:.3f}  top-1 {top1}")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
