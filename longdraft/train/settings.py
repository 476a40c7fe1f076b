"""The settings of trainings: a frozen dataclass for each kind, checked on construction.

They are part of the checkpoint and of the trained model's config.json. A field declares the setting once: its default,
the help text of its option and its allowed values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from longdraft.errors import ModelError, UsageError, check
from longdraft.request.settings import Range, setting, settings_of

# A resumed training may change these: they do not change the trained weights.
MAY_CHANGE = ("eval_every", "checkpoint_every", "threads", "device", "tensorboard", "probe_tokens")
HUB = "hf:"  # of training data: hf:NAME, hf:NAME:CONFIG, either with @SPLIT
HYBRID = "hybrid"
ATTENTION_EVERY = 4  # layers of a hybrid
_NO_DEFAULT: Any = MISSING
DELTA_STEP = 16  # the delta layers' heads are a multiple of this


def is_hub_data(name: str) -> bool:
    return name.startswith(HUB)


def another_default(kind: type[TrainingSettings], name: str, default: Any) -> Any:
    """The field `name` of a kind of settings, with another default."""
    return field(default=default, metadata={"setting": replace(settings_of(kind)[name], default=default)})


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of all trainings. Raises UsageError for values out of range."""

    KIND: ClassVar[str] = ""

    data: tuple[str, ...] = setting(_NO_DEFAULT,
        "Training text: a .parquet, .jsonl or .txt file, or a data set of the hub: hf:NAME or hf:NAME:CONFIG@SPLIT. "
        "Repeatable.")
    validation: tuple[str, ...] = setting((),
        "Validation text, like --data. Repeatable. Default: a part of the data, see --holdout.")
    text_column: str = setting("text", "Column (parquet, data sets) or key (jsonl) of the text.")
    holdout: float = setting(0.05,
        "Share of the documents held out for validation if there is no --validation; above 0, at most 0.5.",
        Range(0, 0.5, above=True))
    max_documents: int = setting(0, "Documents that are read at most, of --data and of --validation each; 0: all.",
                                 Range(0))
    min_tokens: int = setting(0, "Shorter documents are left out.", Range(0))
    document_tokens: int = setting(0, "First tokens of each document that are used; 0: all.", Range(0))
    sequence_length: int = setting(2048, "Length of a training sequence in tokens.")
    steps: int = setting(200, "Maximum number of optimizer steps.", Range(1))
    max_seconds: float | None = setting(None,
        "Time limit in seconds. The schedule ends with this or with --steps, whichever is first. Default: none.",
        Range(0, above=True, words="above 0"))
    batch_size: int = setting(4, "Sequences per forward, in each process.", Range(1))
    gradient_accumulation: int = setting(1, "Forwards per step.", Range(1))
    optimizer: str = setting("adamw",
        "adamw: for all weights; muon: Muon for the maps between rows, AdamW for norms and tables of tokens.",
        ("adamw", "muon"))
    learning_rate: float = setting(1e-2, "Peak learning rate; above 0, at most 1.", Range(0, 1, above=True))
    warmup_steps: int = setting(50, "Steps of linear warm-up.", Range(0))
    schedule: str = setting("product",
        "product: linear warm-up times a cosine over all steps; warmup-cosine: a cosine that begins after the warm-up "
        "at the full rate, as that of transformers.", ("product", "warmup-cosine"))
    weight_decay: float = setting(0.1, "Weight decay, for matrices only; 0 to below 1.",
                                  Range(0, 1, below=True))
    beta2: float = setting(0.999, "beta2 of AdamW; 0 to below 1.", Range(0, 1, below=True))
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm; 0: never.", Range(0))
    seed: int = setting(42, "Seed of the data's order and of all random numbers.", Range(0))
    dtype: str = setting("auto",
        "Dtype of the frozen model: auto (the checkpoint's; float32 on a CPU without instructions for bfloat16), "
        "float32 or bfloat16.", ("auto", "float32", "bfloat16"))
    device: str = setting("auto", "auto (a GPU if there is one), cpu or cuda.", ("auto", "cpu", "cuda"))
    threads: int = setting(0, "CPU threads; 0: all cores.", Range(0))
    eval_every: int = setting(100, "Steps between validations; 0: only at the end.", Range(0))
    eval_tokens: int = setting(262144,
        "Maximum number of validation tokens, evenly spread over the text; 0: all.", Range(0))
    checkpoint_every: int = setting(100, "Steps between checkpoints; 0: only on a signal and at the end.", Range(0))
    tensorboard: bool = setting(False, "Write event files for TensorBoard beside metrics.jsonl.")
    probe_tokens: int = setting(200,
        "Tokens per text of the final measurement, which compares the drafter with plain decoding on held-out "
        "prompts; 0: no measurement.", Range(0))

    def __post_init__(self) -> None:
        check(bool(self.data), "data", list(self.data), "one file or more", "give --data FILE")
        for name, each in settings_of(type(self)).items():
            each.require(getattr(self, name))
        check(self.sequence_length >= self.shortest, "sequence_length", self.sequence_length,
              f"{self.shortest} or more")

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
        defaults = {each.name: each.default for each in fields(self)}
        for name, why in self.ineffective():
            if (value := getattr(self, name)) != defaults[name]:
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


@dataclass(frozen=True, kw_only=True)
class FrozenTargetSettings(TrainingSettings):
    """The settings of all trainings of a part that drafts for a frozen model."""

    model: str = setting("novelist", "Frozen target model: bundled name, folder or hub id.")
    own_tokens: int = setting(0,
        "Tokens of additional training text that the model writes first (temperature 1, min-p 0.1, penalty 1.2).",
        Range(0))
    shard: bool = setting(False, "Distribute the frozen model over all GPUs, in one process.")
    start: str = setting("",
        "Folder of a trained part of the same kind and sizes to continue from, also one of another model with the same "
        "vocabulary. Default: new weights.")


@dataclass(frozen=True, kw_only=True)
class HeadSettings(FrozenTargetSettings):
    """The settings of `longdraft train heads`."""

    KIND: ClassVar[str] = "heads"

    heads: int = setting(3, "Number of heads; 1 to 16.", Range(1, 16))
    kind: str = setting("mlp",
        "mlp: chained residual MLPs; tokenswift: the paper's chained linear maps; medusa: independent residual "
        "blocks.", ("mlp", "tokenswift", "medusa"))
    init: str = setting("identity",
        "Initialisation of chained heads. identity: the model's own prediction; paper: norms 1, random maps.",
        ("identity", "paper"))
    distill: float = setting(0.5,
        "Share of the loss against the model's own distribution, 0 to 1; the rest is against the text's token.",
        Range(0, 1))
    window: int = setting(0,
        "Train on hidden states of a model that attends to the first --sinks and this many latest positions, as with "
        "a partial KV cache; 0: all positions.", Range(0))
    sinks: int = setting(16, "First positions that are attended to with --window.", Range(0))

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

    window: int = setting(512, "Positions of the drafter's self-attention; 1 to 4096.", Range(1, 4096))
    max_lag: int = setting(8,
        "Maximum distance in tokens between a row and the target's latest keys; 1 to 64. Use the number of tokens "
        "drafted per step.", Range(1, 64))
    positions: int = setting(0, "Sequences are offset to positions up to this one; 0: the model's context.", Range(0))
    anchors: int = setting(4, "Maximum number of first positions that are not offset.", Range(0))
    distill: float = another_default(HeadSettings, "distill", 0.5)

    @property
    def shortest(self) -> int:
        return self.max_lag + 2


@dataclass(frozen=True, kw_only=True)
class EagleSettings(FrozenTargetSettings):
    """The settings of `longdraft train eagle`."""

    KIND: ClassVar[str] = "eagle"

    passes: int = setting(5,
        "Passes of training-time test over each sequence: the tokens of a chain that it is trained to draft; 1 to 16.",
        Range(1, 16))
    decay: float = setting(0.8, "Weight of the loss of each pass, as a share of the pass before; above 0, at most 1.",
                           Range(0, 1, above=True))
    loss: str = setting("soft",
        "soft: cross-entropy to the model's distribution; tv: their total variation, which bounds the acceptance.",
        ("soft", "tv"))
    draft_vocab: int = setting(32000,
        "Number of tokens that the head can guess, the commonest of the data; 0, or more than the model has: all.",
        Range(0))
    window: int = setting(2048, "Rows of the text that the head sees, in training and in drafting; 1 to 4096.",
                          Range(1, 4096))
    positions: int = another_default(GlideSettings, "positions", 0)
    anchors: int = another_default(GlideSettings, "anchors", 4)
    optimizer: str = another_default(TrainingSettings, "optimizer", "muon")
    learning_rate: float = another_default(TrainingSettings, "learning_rate", 1e-3)
    beta2: float = another_default(TrainingSettings, "beta2", 0.95)
    max_grad_norm: float = another_default(TrainingSettings, "max_grad_norm", 0.5)

    @property
    def shortest(self) -> int:
        return self.passes + 2


@dataclass(frozen=True, kw_only=True)
class BlockSettings(FrozenTargetSettings):
    """The settings of `longdraft train block`."""

    KIND: ClassVar[str] = "block"

    block: int = setting(8, "Rows of a block: the tokens that one pass guesses; 2 to 64.", Range(2, 64))
    layers: int = setting(2, "Layers of the head; 1 to 16.", Range(1, 16))
    rank: int = setting(64, "Rank of the Markov head, which scores a token after the one before it; 0: none.",
                        Range(0, 4096))
    min_p: float = setting(0.1,
        "The loss compares distributions as sampling with this min-p leaves them; 0: whole ones.",
        Range(0, 1, below=True))
    blocks: int = setting(128, "Blocks of each sequence, which begin at random tokens.", Range(1))
    draft_vocab: int = another_default(EagleSettings, "draft_vocab", 32000)
    window: int = another_default(EagleSettings, "window", 1024)
    positions: int = another_default(GlideSettings, "positions", 0)
    anchors: int = another_default(GlideSettings, "anchors", 4)
    learning_rate: float = another_default(TrainingSettings, "learning_rate", 1e-3)
    beta2: float = another_default(TrainingSettings, "beta2", 0.95)
    max_grad_norm: float = another_default(TrainingSettings, "max_grad_norm", 0.5)

    @property
    def shortest(self) -> int:
        return self.block + 2


@dataclass(frozen=True, kw_only=True)
class LmSettings(TrainingSettings):
    """The settings of `longdraft train lm`."""

    KIND: ClassVar[str] = "lm"

    tokenizer: str = setting("",
        "Bundled name, folder or hub id of the model whose tokenizer is used. Default: a byte-level BPE tokenizer "
        "is trained on the data.")
    vocab_size: int = setting(4096, "Vocabulary size of a trained tokenizer; 300 or more.", Range(300))
    start: str = setting("", "Model to start from, with its shape and tokenizer. Default: random weights.")
    kind: str = setting("llama",
        "Kind of a new model. llama; hybrid: Qwen3.5's layers, attention in every fourth one and gated delta nets in "
        "the other layers, with as many heads of the same size.", ("llama", HYBRID))
    layers: int = setting(6, "Layers of a new model; 4 or more of a hybrid.", Range(1))
    hidden_size: int = setting(256, "Hidden size of a new model.", Range(2))
    intermediate_size: int = setting(704, "Inner size of a new model's MLPs.", Range(1))
    num_heads: int = setting(4, "Query heads of a new model.", Range(1))
    num_kv_heads: int = setting(0,
        "KV heads; 0: as many as query heads, or as in --start. If --start has more, each is the mean of a group.",
        Range(0))
    tied: bool = setting(True, "The embeddings of a new model are its output head too.")
    rope_theta: float = setting(500000.0, "Base frequency of a new model's rotary embeddings.",
                                Range(1, above=True, words="above 1"))
    context: int = setting(131072,
        "Context length of a new model in tokens, also of its training positions. With --start: that model's.",
        Range(2))
    skip: float = setting(0.5,
        "Share of the sequences that jump to far positions (positional skip-wise training); 0 to 1.", Range(0, 1))
    distill_from: str = setting("",
        "Teacher model with the same vocabulary, for distillation. Default: none.")
    distill: float = setting(0.5, "Share of the loss against the teacher's distribution; 0 to 1.", Range(0, 1))
    sequence_length: int = another_default(TrainingSettings, "sequence_length", 1024)
    batch_size: int = another_default(TrainingSettings, "batch_size", 8)
    beta2: float = another_default(TrainingSettings, "beta2", 0.95)
    learning_rate: float = another_default(TrainingSettings, "learning_rate", 3e-3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == HYBRID and not self.start:
            check(self.layers >= ATTENTION_EVERY, "layers", self.layers, f"{ATTENTION_EVERY} or more of a hybrid")
            check(self.hidden_size % (DELTA_STEP * self.num_heads) == 0, "hidden_size", self.hidden_size,
                  f"of a hybrid, a multiple of {DELTA_STEP} x num_heads ({DELTA_STEP * self.num_heads})")
        check(self.hidden_size % (2 * self.num_heads) == 0, "hidden_size", self.hidden_size,
              f"a multiple of 2 x num_heads ({2 * self.num_heads})")
        if not self.start:
            check(self.num_heads % (self.num_kv_heads or self.num_heads) == 0, "num_heads", self.num_heads,
                  f"a multiple of num_kv_heads ({self.num_kv_heads})")
            # With --start, the limit is that model's context.
            check(self.sequence_length <= self.context, "sequence_length", self.sequence_length,
                  f"at most the context ({self.context})")

    def ineffective(self) -> Iterator[tuple[str, str]]:
        yield from super().ineffective()
        if self.start:
            for name in ("tokenizer", "vocab_size", "kind", "layers", "hidden_size", "intermediate_size", "num_heads",
                         "tied", "rope_theta"):
                yield name, "with --start, which gives shape and tokenizer"
        elif self.tokenizer:
            yield "vocab_size", "with --tokenizer"
        yield from self._ineffective_distillation()

    def _ineffective_distillation(self) -> Iterator[tuple[str, str]]:
        if not self.distill_from and self.distill:
            yield "distill", "without --distill-from"
        if not self.distill:
            yield "distill_from", "with --distill 0"


@dataclass(frozen=True, kw_only=True)
class DraftSettings(LmSettings):
    """The settings of `longdraft train draft`: a small model with the tokenizer of `model`, distilled from it."""

    KIND: ClassVar[str] = "draft"

    model: str = setting("novelist",
        "Target model, which is also the teacher: bundled name, folder or hub id.")
    layers: int = another_default(LmSettings, "layers", 1)
    hidden_size: int = another_default(LmSettings, "hidden_size", 128)
    intermediate_size: int = another_default(LmSettings, "intermediate_size", 352)
    num_heads: int = another_default(LmSettings, "num_heads", 2)
    context: int = another_default(LmSettings, "context", 4096)
    skip: float = another_default(LmSettings, "skip", 0.0)

    def ineffective(self) -> Iterator[tuple[str, str]]:
        yield from super().ineffective()
        for name in ("tokenizer", "vocab_size"):
            yield name, "in `train draft`: the tokenizer is the model's"

    def _ineffective_distillation(self) -> Iterator[tuple[str, str]]:
        yield "distill_from", "in `train draft`: --model is the teacher"


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
