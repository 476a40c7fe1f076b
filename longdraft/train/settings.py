"""The settings of trainings: a frozen dataclass for each kind, checked on construction.

They are part of the checkpoint and of the trained model's config.json. Each field's help text is that of its option.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from longdraft.errors import ModelError, UsageError, check
from longdraft.train.data_files import is_hub_data

MAX_HEADS = 16
# A resumed training may change these: they do not change the trained weights.
MAY_CHANGE = ("eval_every", "checkpoint_every", "threads", "device", "tensorboard", "probe_tokens")


def setting(default: Any, what: str) -> Any:
    """A field with its help text."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of all trainings. Raises UsageError for values out of range."""

    KIND: ClassVar[str] = ""

    data: tuple[str, ...] = setting(MISSING,
        "Training text: a .parquet, .jsonl or .txt file, or a data set of the hub: hf:NAME or hf:NAME:CONFIG@SPLIT. "
        "Repeatable.")
    validation: tuple[str, ...] = setting((),
        "Validation text, like --data. Repeatable. Default: a part of the data, see --holdout.")
    text_column: str = setting("text", "Column (parquet, data sets) or key (jsonl) of the text.")
    holdout: float = setting(0.05,
        "Share of the documents held out for validation if there is no --validation; above 0, at most 0.5.")
    max_documents: int = setting(0, "Documents that are read at most, of --data and of --validation each; 0: all.")
    min_tokens: int = setting(0, "Shorter documents are left out.")
    document_tokens: int = setting(0, "First tokens of each document that are used; 0: all.")
    sequence_length: int = setting(2048, "Length of a training sequence in tokens.")
    steps: int = setting(200, "Maximum number of optimizer steps.")
    max_seconds: float | None = setting(None,
        "Time limit in seconds. The schedule ends with this or with --steps, whichever is first. Default: none.")
    batch_size: int = setting(4, "Sequences per forward, in each process.")
    gradient_accumulation: int = setting(1, "Forwards per step.")
    learning_rate: float = setting(1e-2, "Peak learning rate of AdamW; above 0, at most 1.")
    warmup_steps: int = setting(50, "Steps of linear warm-up.")
    schedule: str = setting("product",
        "product: linear warm-up times a cosine over all steps; warmup-cosine: a cosine that begins after the warm-up "
        "at the full rate, as that of transformers.")
    weight_decay: float = setting(0.1, "Weight decay of AdamW, for matrices only; 0 to below 1.")
    beta2: float = setting(0.999, "beta2 of AdamW; 0 to below 1.")
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm; 0: never.")
    seed: int = setting(42, "Seed of the data's order and of all random numbers.")
    dtype: str = setting("auto", "Dtype of the frozen model: auto (the checkpoint's), float32 or bfloat16.")
    device: str = setting("auto", "auto (a GPU if there is one), cpu or cuda.")
    threads: int = setting(0, "CPU threads; 0: all cores.")
    eval_every: int = setting(100, "Steps between validations; 0: only at the end.")
    eval_tokens: int = setting(262144, "Maximum number of validation tokens, evenly spread over the text; 0: all.")
    checkpoint_every: int = setting(100, "Steps between checkpoints; 0: only on a signal and at the end.")
    tensorboard: bool = setting(False, "Write event files for TensorBoard beside metrics.jsonl.")
    probe_tokens: int = setting(200,
        "Tokens per text of the final measurement, which compares the drafter with plain decoding on held-out "
        "prompts; 0: no measurement.")

    def __post_init__(self) -> None:
        check(bool(self.data), "data", list(self.data), "one file or more", "give --data FILE")
        at_least(self, steps=1, batch_size=1, gradient_accumulation=1, warmup_steps=0, seed=0, threads=0,
                 eval_every=0, eval_tokens=0, checkpoint_every=0, probe_tokens=0, max_documents=0, min_tokens=0,
                 document_tokens=0)
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
        one_of(self, dtype=("auto", "float32", "bfloat16"), device=("auto", "cpu", "cuda"),
               schedule=("product", "warmup-cosine"))

    @property
    def shortest(self) -> int:
        """The minimum length of a sequence in tokens."""
        return 2

    def ineffective(self) -> Iterator[tuple[str, str]]:
        """Names of settings without effect in this combination, and why."""
        if self.validation:
            yield "holdout", "with --validation"

    def require_effective(self) -> None:
        """Raise UsageError for a setting without effect. Construction does not, for the sake of old checkpoints."""
        usual = {each.name: each.default for each in fields(self)}
        for name, why in self.ineffective():
            if (value := getattr(self, name)) != usual[name]:
                raise UsageError(f"{name} is {value!r}, but has no effect {why}; leave it out", name)

    @property
    def sequences_per_step(self) -> int:
        """In one process."""
        return self.batch_size * self.gradient_accumulation

    def as_dict(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(self).items()}

    def local_files(self) -> list[str]:
        """Data files on this machine."""
        return [name for name in (*self.data, *self.validation) if not is_hub_data(name)]


def at_least(settings: TrainingSettings, **least: int) -> None:
    for name, limit in least.items():
        check(getattr(settings, name) >= limit, name, getattr(settings, name), f"{limit} or more")


def one_of(settings: TrainingSettings, **known: tuple[str, ...]) -> None:
    for name, values in known.items():
        check(getattr(settings, name) in values, name, getattr(settings, name), ", ".join(values))


@dataclass(frozen=True, kw_only=True)
class FrozenTargetSettings(TrainingSettings):
    """The settings of all trainings of a part that drafts for a frozen model."""

    model: str = setting("novelist", "Frozen target model: bundled name, folder or hub id.")
    own_tokens: int = setting(0,
        "Tokens of additional training text that the model writes first (temperature 1, min-p 0.1, penalty 1.2).")
    shard: bool = setting(False, "Distribute the frozen model over all GPUs, in one process.")
    start: str = setting("",
        "Folder of a trained part of the same kind and sizes to continue from, also one of another model with the same "
        "vocabulary. Default: new weights.")

    def __post_init__(self) -> None:
        at_least(self, own_tokens=0)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class HeadSettings(FrozenTargetSettings):
    """The settings of `longdraft train heads`."""

    KIND: ClassVar[str] = "heads"

    heads: int = setting(3, "Number of heads; 1 to 16.")
    kind: str = setting("mlp",
        "mlp: chained residual MLPs; tokenswift: the paper's chained linear maps; medusa: independent residual "
        "blocks.")
    init: str = setting("identity",
        "Initialisation of chained heads. identity: the model's own prediction; paper: norms 1, random maps.")
    distill: float = setting(0.5,
        "Share of the loss against the model's own distribution, 0 to 1; the rest is against the text's token.")
    window: int = setting(0,
        "Train on hidden states of a model that attends to the first --sinks and this many latest positions, as with "
        "a partial KV cache; 0: all positions.")
    sinks: int = setting(16, "First positions that are attended to with --window.")

    def __post_init__(self) -> None:
        at_least(self, heads=1, window=0, sinks=0)
        check(self.heads <= MAX_HEADS, "heads", self.heads, f"1 to {MAX_HEADS}")
        check(0 <= self.distill <= 1, "distill", self.distill, "0 to 1")
        one_of(self, kind=("mlp", "tokenswift", "medusa"), init=("identity", "paper"))
        super().__post_init__()

    def ineffective(self) -> Iterator[tuple[str, str]]:
        yield from super().ineffective()
        if not self.window:
            yield "sinks", "without --window"
        if self.kind == "medusa":
            yield "init", "with --kind medusa, whose heads are not chained"
        if self.start:
            yield "init", "with --start, which gives the weights"

    @property
    def shortest(self) -> int:
        return self.heads + 2


@dataclass(frozen=True, kw_only=True)
class GlideSettings(FrozenTargetSettings):
    """The settings of `longdraft train glide`."""

    KIND: ClassVar[str] = "glide"

    window: int = setting(512, "Positions of the drafter's self-attention; 1 to 4096.")
    max_lag: int = setting(8,
        "Maximum distance in tokens between a row and the target's latest keys; 1 to 64. Use the number of tokens "
        "drafted per step.")
    positions: int = setting(0, "Sequences are offset to positions up to this one; 0: the model's context.")
    anchors: int = setting(4, "Maximum number of first positions that are not offset.")
    distill: float = setting(0.5,
        "Share of the loss against the model's own distribution, 0 to 1; the rest is against the text's token.")

    def __post_init__(self) -> None:
        at_least(self, window=1, max_lag=1, positions=0, anchors=0)
        check(self.window <= 4096, "window", self.window, "1 to 4096")
        check(self.max_lag <= 64, "max_lag", self.max_lag, "1 to 64")
        check(0 <= self.distill <= 1, "distill", self.distill, "0 to 1")
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return self.max_lag + 2


@dataclass(frozen=True, kw_only=True)
class EagleSettings(FrozenTargetSettings):
    """The settings of `longdraft train eagle`."""

    KIND: ClassVar[str] = "eagle"

    passes: int = setting(5,
        "Passes of training-time test over each sequence: the tokens of a chain that it is trained to draft; 1 to 16.")
    decay: float = setting(0.8, "Weight of the loss of each pass, as a share of the pass before; above 0, at most 1.")
    loss: str = setting("soft",
        "soft: cross-entropy to the model's distribution; tv: their total variation, which bounds the acceptance.")
    draft_vocab: int = setting(32000,
        "Number of tokens that the head can guess, the commonest of the data; 0, or more than the model has: all.")
    window: int = setting(2048, "Rows of the text that the head sees, in training and in drafting; 1 to 4096.")
    positions: int = setting(0, "Sequences are offset to positions up to this one; 0: the model's context.")
    anchors: int = setting(4, "Maximum number of first positions that are not offset.")
    learning_rate: float = setting(1e-3, "Peak learning rate of AdamW; above 0, at most 1.")
    beta2: float = setting(0.95, "beta2 of AdamW; 0 to below 1.")
    max_grad_norm: float = setting(0.5, "Gradients are clipped to this norm; 0: never.")

    def __post_init__(self) -> None:
        at_least(self, passes=1, draft_vocab=0, window=1, positions=0, anchors=0)
        check(self.passes <= 16, "passes", self.passes, "1 to 16")
        check(0 < self.decay <= 1, "decay", self.decay, "above 0, at most 1")
        check(self.window <= 4096, "window", self.window, "1 to 4096")
        one_of(self, loss=("soft", "tv"))
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return self.passes + 2


AnySettings = TypeVar("AnySettings", bound=TrainingSettings)


def from_dict(kind: type[AnySettings], data: Mapping[str, Any]) -> AnySettings:
    """The settings of a checkpoint. Raises ModelError if they are another version's."""
    known = {each.name for each in fields(kind)}
    if set(data) != known:
        raise ModelError(f"the checkpoint's settings are not this version's: {sorted(set(data) ^ known)}; "
                         "start again in another --output")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                              for name, value in data.items()}
    return kind(**values)


def resumed(stored: AnySettings, given: Mapping[str, Any]) -> AnySettings:
    """A checkpoint's settings with the user's changes. Raises UsageError if those would change the trained weights."""
    for name, value in given.items():
        if name not in MAY_CHANGE and getattr(stored, name) != value:
            raise UsageError(f"{name} is {value!r}, but the training to resume has "
                             f"{getattr(stored, name)!r}; leave the option out, or start again in another "
                             "--output")
    return from_dict(type(stored), stored.as_dict() | {n: value for n, value in given.items() if n in MAY_CHANGE})
