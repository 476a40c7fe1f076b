"""What a training was asked for: one frozen record of each kind, checked before anything is read.

It is written whole into the checkpoint and into the config.json of what was trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from longdraft.errors import ModelError, UsageError, check
from longdraft.train.data import is_hub_data

MAX_HEADS = 16
# A resumed training may change these: they alter when it reports and saves, not what it learns.
MAY_CHANGE = ("eval_every", "checkpoint_every", "threads", "device", "tensorboard", "probe_tokens")


def said(default: Any, what: str) -> Any:
    """A field with what --help says of it."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all trainings share. Checked on construction (UsageError)."""

    KIND: ClassVar[str] = ""

    data: tuple[str, ...] = said(MISSING,
        "Text to train on; repeatable. .parquet, .jsonl (one object a line), .txt, or a hub data set: hf:NAME or "
        "hf:NAME:CONFIG@SPLIT.")
    validation: tuple[str, ...] = said((),
        "Text to validate on; repeatable. Default: a part of the data, see --holdout.")
    text_column: str = said("text", "Column (parquet, data sets) or key (jsonl) of the text.")
    holdout: float = said(0.05, "Part of the documents held out where no --validation is given, above 0, at most 0.5.")
    sequence_length: int = said(2048, "Length of a training sequence, tokens.")
    steps: int = said(200, "Optimizer steps at most.")
    max_seconds: float | None = said(None,
        "Wall clock budget, seconds; the schedule follows whichever of this and --steps ends first. Default: none.")
    batch_size: int = said(4, "Sequences in one forward, of each process.")
    gradient_accumulation: int = said(1, "Forwards in one step.")
    learning_rate: float = said(1e-2, "Peak of AdamW's learning rate, at most 1.")
    warmup_steps: int = said(50, "Steps of linear warm-up; a cosine falls to zero at the end.")
    weight_decay: float = said(0.1, "AdamW's weight decay, of the linear maps only.")
    beta2: float = said(0.999, "AdamW's memory of squared gradients, 0 to below 1.")
    max_grad_norm: float = said(1.0, "Longer gradients are cut to this; 0: never.")
    seed: int = said(42, "Orders the data and draws what is drawn.")
    dtype: str = said("auto", "Arithmetic of the frozen model: auto (the checkpoint's), float32, bfloat16.")
    device: str = said("auto", "auto (a GPU where there is one), cpu, cuda.")
    threads: int = said(0, "CPU threads; 0: all.")
    eval_every: int = said(100, "Steps between validations; 0: only at the end.")
    eval_tokens: int = said(262144, "Validation tokens at most, spread evenly over the validation text; 0: all.")
    checkpoint_every: int = said(100, "Steps between checkpoints; 0: only when interrupted, and at the end.")
    tensorboard: bool = said(False, "Write event files for TensorBoard beside metrics.jsonl.")
    probe_tokens: int = said(200,
        "Tokens written at the end from each of some held-out prompts, with the drafter and without, to say what it "
        "is worth; 0: none.")

    def __post_init__(self) -> None:
        check(bool(self.data), "data", list(self.data), "one file or more", "give --data FILE")
        at_least(self, steps=1, batch_size=1, gradient_accumulation=1, warmup_steps=0, seed=0, threads=0,
                 eval_every=0, eval_tokens=0, checkpoint_every=0, probe_tokens=0)
        check(self.sequence_length >= self.shortest, "sequence_length", self.sequence_length,
              f"{self.shortest} or more")
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            check(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        check(0 < self.learning_rate <= 1, "learning_rate", self.learning_rate, "above 0, at most 1")
        check(0 <= self.beta2 < 1, "beta2", self.beta2, "0 to below 1")
        check(0 <= self.weight_decay < 1, "weight_decay", self.weight_decay, "0 to below 1")
        check(self.max_grad_norm >= 0, "max_grad_norm", self.max_grad_norm, "0 or more", "0 never cuts")
        check(0 < self.holdout <= 0.5, "holdout", self.holdout, "above 0, at most 0.5")
        check(self.max_seconds is None or 0 < self.max_seconds < math.inf, "max_seconds", self.max_seconds,
              "above 0")
        one_of(self, dtype=("auto", "float32", "bfloat16"), device=("auto", "cpu", "cuda"))

    @property
    def shortest(self) -> int:
        """Tokens that a sequence must have at least, to say anything."""
        return 2

    def idle(self) -> Iterator[tuple[str, str]]:
        """Settings that have no effect beside the others, and why."""
        if self.validation:
            yield "holdout", "beside --validation"

    def check_idle(self) -> None:
        """UsageError for a setting that says something and has no effect. Not on construction: checkpoints of before
        may hold such settings."""
        usual = {each.name: each.default for each in fields(self)}
        for name, why in self.idle():
            if (value := getattr(self, name)) != usual[name]:
                raise UsageError(f"{name} is {value!r}, but has no effect {why}; leave it out", name)

    @property
    def sequences_per_step(self) -> int:
        """Of one process."""
        return self.batch_size * self.gradient_accumulation

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(self).items()}

    def local_files(self) -> list[str]:
        """Data files of this machine, which can be checked before anything is loaded."""
        return [name for name in (*self.data, *self.validation) if not is_hub_data(name)]


def at_least(settings: Settings, **least: int) -> None:
    for name, limit in least.items():
        check(getattr(settings, name) >= limit, name, getattr(settings, name), f"{limit} or more")


def one_of(settings: Settings, **known: tuple[str, ...]) -> None:
    for name, values in known.items():
        check(getattr(settings, name) in values, name, getattr(settings, name), ", ".join(values))


@dataclass(frozen=True, kw_only=True)
class HeadSettings(Settings):
    """The settings of `longdraft train heads`."""

    KIND: ClassVar[str] = "heads"

    model: str = said("novelist", "Frozen base model: a bundled name, a folder or a hub id.")
    heads: int = said(3, "Number of heads, 1 to 16.")
    kind: str = said("mlp",
        "mlp: chained residual MLPs; tokenswift: the paper's, chained, each one linear map; medusa: independent "
        "residual blocks.")
    init: str = said("identity",
        "Of chained heads. identity: they begin as the model's own next-token guess; paper: norms 1, random maps.")
    distill: float = said(0.5,
        "Part of the loss that compares with the model's own distribution, 0 to 1; the rest looks at the text's "
        "token.")
    own_tokens: int = said(0,
        "Tokens that the model first writes itself (T = 1, min-p 0.1, penalty 1.2), to be learnt beside the data.")
    window: int = said(0,
        "Learn from the rows that the model gives when it sees --sinks first and this many latest positions, as on "
        "a partial cache; 0: all positions.")
    sinks: int = said(16, "First positions seen with a --window.")
    shard: bool = said(False, "Spread the frozen model over all GPUs of the one process.")

    def __post_init__(self) -> None:
        at_least(self, heads=1, own_tokens=0, window=0, sinks=0)
        check(self.heads <= MAX_HEADS, "heads", self.heads, f"1 to {MAX_HEADS}")
        check(0 <= self.distill <= 1, "distill", self.distill, "0 to 1")
        one_of(self, kind=("mlp", "tokenswift", "medusa"), init=("identity", "paper"))
        super().__post_init__()

    def idle(self) -> Iterator[tuple[str, str]]:
        yield from super().idle()
        if not self.window:
            yield "sinks", "without --window"
        if self.kind == "medusa":
            yield "init", "with --kind medusa, whose heads are not chained"

    @property
    def shortest(self) -> int:
        return self.heads + 2


@dataclass(frozen=True, kw_only=True)
class GlideSettings(Settings):
    """The settings of `longdraft train glide`."""

    KIND: ClassVar[str] = "glide"

    model: str = said("novelist", "Frozen base model: a bundled name, a folder or a hub id.")
    window: int = said(512, "Positions that the drafter's own attention sees, 1 to 4096.")
    max_lag: int = said(8,
        "How many tokens the model's keys may lie behind the row that looks at them, 1 to 64: as many as will be "
        "drafted in one go.")
    positions: int = said(0, "Sequences are moved to positions up to this one; 0: the model's context.")
    anchors: int = said(4, "First positions that may stay where they are when the others are moved.")
    distill: float = said(0.5,
        "Part of the loss that compares with the model's own distribution, 0 to 1; the rest looks at the text's "
        "token.")
    own_tokens: int = said(0,
        "Tokens that the model first writes itself (T = 1, min-p 0.1, penalty 1.2), to be learnt beside the data.")
    shard: bool = said(False, "Spread the frozen model over all GPUs of the one process.")

    def __post_init__(self) -> None:
        at_least(self, window=1, max_lag=1, positions=0, anchors=0, own_tokens=0)
        check(self.window <= 4096, "window", self.window, "1 to 4096")
        check(self.max_lag <= 64, "max_lag", self.max_lag, "1 to 64")
        check(0 <= self.distill <= 1, "distill", self.distill, "0 to 1")
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return self.max_lag + 2


@dataclass(frozen=True, kw_only=True)
class LmSettings(Settings):
    """The settings of `longdraft train lm` and `longdraft train draft`."""

    KIND: ClassVar[str] = "lm"

    tokenizer: str = said("",
        "Bundled name, folder or hub id whose tokenizer to use. Default: one is trained on the data (byte-level "
        "BPE).")
    vocab_size: int = said(4096, "Of a tokenizer that is trained, 300 or more.")
    start: str = said("", "Model to go on from, which gives shape and tokenizer. Default: random weights.")
    layers: int = said(6, "Layers of a new model.")
    hidden_size: int = said(256, "Its hidden size.")
    intermediate_size: int = said(704, "Its MLP's inner size.")
    num_heads: int = said(4, "Its query heads.")
    num_kv_heads: int = said(0,
        "Its KV heads; 0: as many as query heads, or as --start has. Fewer than --start has: the means of groups of "
        "those.")
    rope_theta: float = said(500000.0, "Base of its rotations.")
    context: int = said(131072, "Positions that a new model declares, and is shown; of --start: what that declares.")
    skip: float = said(0.5,
        "Part of the sequences that jump to far positions at a random place (positional skip-wise training), 0 to "
        "1.")
    distill_from: str = said("",
        "Model of the same vocabulary whose distribution is learnt beside the text. Default: none.")
    distill: float = said(0.5, "Part of the loss that compares with it, 0 to 1.")
    sequence_length: int = said(1024, "Length of a training sequence, tokens.")
    batch_size: int = said(8, "Sequences in one forward, of each process.")
    beta2: float = said(0.95, "AdamW's memory of squared gradients, 0 to below 1.")
    learning_rate: float = said(3e-3, "Peak of AdamW's learning rate, at most 1.")

    def __post_init__(self) -> None:
        at_least(self, vocab_size=300, layers=1, hidden_size=2, intermediate_size=1, num_heads=1, num_kv_heads=0,
                 context=2)
        check(self.hidden_size % (2 * self.num_heads) == 0, "hidden_size", self.hidden_size,
              f"a multiple of 2 x num_heads ({2 * self.num_heads})")
        check(bool(self.start) or self.num_heads % (self.num_kv_heads or self.num_heads) == 0, "num_heads",
              self.num_heads, f"a multiple of num_kv_heads ({self.num_kv_heads})")
        check(0 <= self.skip <= 1, "skip", self.skip, "0 to 1")
        check(0 <= self.distill <= 1, "distill", self.distill, "0 to 1")
        check(self.rope_theta > 1, "rope_theta", self.rope_theta, "above 1")
        super().__post_init__()
        # Whoever goes on from a model is held to that one's context.
        check(bool(self.start) or self.sequence_length <= self.context, "sequence_length", self.sequence_length,
              f"at most the context ({self.context})")

    def idle(self) -> Iterator[tuple[str, str]]:
        yield from super().idle()
        if self.start:
            for name in ("tokenizer", "vocab_size", "layers", "hidden_size", "intermediate_size", "num_heads",
                         "rope_theta"):
                yield name, "with --start, which gives shape and tokenizer"
        elif self.tokenizer:
            yield "vocab_size", "with --tokenizer"
        yield from self._idle_teaching()

    def _idle_teaching(self) -> Iterator[tuple[str, str]]:
        if not self.distill_from and self.distill:
            yield "distill", "without --distill-from"
        if not self.distill:
            yield "distill_from", "with --distill 0"


@dataclass(frozen=True, kw_only=True)
class DraftSettings(LmSettings):
    """The settings of `longdraft train draft`: a small model with `model`'s tokenizer, taught by it."""

    KIND: ClassVar[str] = "draft"

    model: str = said("novelist",
        "The model that it will draft for, and learn from: a bundled name, a folder or a hub id.")
    layers: int = said(1, "Layers of a new model.")
    hidden_size: int = said(128, "Its hidden size.")
    intermediate_size: int = said(352, "Its MLP's inner size.")
    num_heads: int = said(2, "Its query heads.")
    context: int = said(4096, "Positions that a new model declares, and is shown; of --start: what that declares.")
    skip: float = said(0.0,
        "Part of the sequences that jump to far positions at a random place (positional skip-wise training), 0 to "
        "1.")

    def idle(self) -> Iterator[tuple[str, str]]:
        yield from super().idle()
        for name in ("tokenizer", "vocab_size"):
            yield name, "in `train draft`: the tokenizer is the model's"

    def _idle_teaching(self) -> Iterator[tuple[str, str]]:
        yield "distill_from", "in `train draft`: it learns from --model"


Kept = TypeVar("Kept", bound=Settings)


def from_dict(kind: type[Kept], data: Mapping[str, Any]) -> Kept:
    """The settings of a checkpoint. ModelError where they are not this version's."""
    known = {each.name for each in fields(kind)}
    if set(data) != known:
        raise ModelError(f"the checkpoint's settings are not this version's: {sorted(set(data) ^ known)}; "
                         "start again in another --output")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in data.items()}
    return kind(**values)


def resumed(stored: Kept, given: Mapping[str, Any]) -> Kept:
    """The settings of a checkpoint with what the user gave anew; UsageError where that would change it."""
    for name, value in given.items():
        if name not in MAY_CHANGE and getattr(stored, name) != value:
            raise UsageError(f"{name} is {value!r}, but the training to resume has "
                             f"{getattr(stored, name)!r}; leave the option out, or start again in another "
                             "--output")
    return from_dict(type(stored), stored.as_dict() | {n: value for n, value in given.items() if n in MAY_CHANGE})
