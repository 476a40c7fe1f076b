"""What a training of heads was asked for: one frozen record, checked before anything is read.

It is written whole into the checkpoint and into the trained heads' config.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from longdraft.errors import ModelError, UsageError, check

MAX_HEADS = 16
# A resumed training may change these: they alter when it reports and saves, not what it learns.
MAY_CHANGE = ("eval_every", "checkpoint_every", "threads", "device")


@dataclass(frozen=True)
class HeadSettings:
    """The settings of `longdraft train heads`. Checked on construction (UsageError).

    model                  bundled name, folder or hub id of the frozen base model
    data, validation       files: .parquet, .jsonl or .txt
    text_column            column (parquet) or key (jsonl) of the text
    holdout                part of the documents held out where no validation files are given, (0, 0.5]
    heads                  number of chained heads, 1 .. 16
    init                   how the heads begin: see longdraft.train.heads.TokenSwiftHeads
    sequence_length        tokens in a sequence
    steps, max_seconds     where the training ends, whichever comes first; the schedule follows it
    batch_size             sequences in one forward
    gradient_accumulation  forwards in one step
    learning_rate          its peak, after warm-up
    warmup_steps           steps of linear warm-up; a cosine to zero runs over the whole training
    weight_decay           of the linear maps, not of the norms
    max_grad_norm          gradients longer than this are cut to it; 0: never
    seed                   orders the documents, then the sequences
    dtype                  of the frozen model's arithmetic: auto (the checkpoint's), float32, bfloat16
    device                 auto, cpu or cuda
    threads                CPU threads; 0: all
    eval_every             steps between validations; 0: only at the end
    eval_tokens            validation tokens at most, spread evenly; 0: all of them
    checkpoint_every       steps between checkpoints; 0: only when interrupted
    """

    model: str
    data: tuple[str, ...]
    validation: tuple[str, ...] = ()
    text_column: str = "text"
    holdout: float = 0.05
    heads: int = 3
    init: str = "identity"
    sequence_length: int = 2048
    steps: int = 200
    max_seconds: float | None = None
    batch_size: int = 4
    gradient_accumulation: int = 1
    learning_rate: float = 1e-2
    warmup_steps: int = 50
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    seed: int = 42
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    eval_every: int = 100
    eval_tokens: int = 262144
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        check(bool(self.data), "data", list(self.data), "one file or more", "give --data FILE")
        for name, least in (("heads", 1), ("sequence_length", 2), ("steps", 1), ("batch_size", 1),
                            ("gradient_accumulation", 1), ("warmup_steps", 0), ("seed", 0), ("threads", 0),
                            ("eval_every", 0), ("eval_tokens", 0), ("checkpoint_every", 0)):
            value = getattr(self, name)
            check(value >= least, name, value, f"{least} or more")
        check(self.heads <= MAX_HEADS, "heads", self.heads, f"1 to {MAX_HEADS}")
        check(self.sequence_length >= self.heads + 2, "sequence_length", self.sequence_length,
              f"{self.heads + 2} or more with {self.heads} heads")
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            check(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        check(0 < self.learning_rate <= 1, "learning_rate", self.learning_rate, "above 0, at most 1")
        check(0 <= self.weight_decay < 1, "weight_decay", self.weight_decay, "0 to below 1")
        check(self.max_grad_norm >= 0, "max_grad_norm", self.max_grad_norm, "0 or more", "0 never cuts")
        check(0 < self.holdout <= 0.5, "holdout", self.holdout, "above 0, at most 0.5")
        check(self.max_seconds is None or 0 < self.max_seconds < math.inf, "max_seconds", self.max_seconds,
              "above 0")
        for name, known in (("init", ("identity", "paper")), ("dtype", ("auto", "float32", "bfloat16")),
                            ("device", ("auto", "cpu", "cuda"))):
            check(getattr(self, name) in known, name, getattr(self, name), ", ".join(known))

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(self).items()}


def from_dict(data: Mapping[str, Any]) -> HeadSettings:
    """The settings of a checkpoint. ModelError where they are not this version's."""
    known = {field.name for field in fields(HeadSettings)}
    if set(data) != known:
        raise ModelError(f"the checkpoint's settings are not this version's: {sorted(set(data) ^ known)}; "
                         "start again in another --output")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in data.items()}
    return HeadSettings(**values)


def resumed(stored: HeadSettings, given: Mapping[str, Any]) -> HeadSettings:
    """The settings of a checkpoint with what the user gave anew; UsageError where that would change it."""
    for name, value in given.items():
        if name not in MAY_CHANGE and getattr(stored, name) != value:
            raise UsageError(f"{name} is {value!r}, but the training to resume has "
                             f"{getattr(stored, name)!r}; leave the option out, or start again in another "
                             "--output")
    return from_dict(stored.as_dict() | {name: value for name, value in given.items() if name in MAY_CHANGE})
