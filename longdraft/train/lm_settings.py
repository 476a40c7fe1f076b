"""The settings of `longdraft train lm` and `longdraft train draft`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from longdraft.errors import check
from longdraft.train.settings import TrainingSettings, at_least, one_of, setting

HYBRID = "hybrid"
ATTENTION_EVERY = 4  # layers of a hybrid
DELTA_STEP = 16  # the delta layers' heads are a multiple of this


@dataclass(frozen=True, kw_only=True)
class LmSettings(TrainingSettings):
    """The settings of `longdraft train lm` and `longdraft train draft`."""

    KIND: ClassVar[str] = "lm"

    tokenizer: str = setting("",
        "Bundled name, folder or hub id of the model whose tokenizer is used. Default: a byte-level BPE tokenizer "
        "is trained on the data.")
    vocab_size: int = setting(4096, "Vocabulary size of a trained tokenizer; 300 or more.")
    start: str = setting("", "Model to start from, with its shape and tokenizer. Default: random weights.")
    kind: str = setting("llama",
        "Kind of a new model. llama; hybrid: Qwen3.5's layers, attention in every fourth one and gated delta nets in "
        "the other layers, with as many heads of the same size.")
    layers: int = setting(6, "Layers of a new model; 4 or more of a hybrid.")
    hidden_size: int = setting(256, "Hidden size of a new model.")
    intermediate_size: int = setting(704, "Inner size of a new model's MLPs.")
    num_heads: int = setting(4, "Query heads of a new model.")
    num_kv_heads: int = setting(0,
        "KV heads; 0: as many as query heads, or as in --start. If --start has more, each is the mean of a group.")
    tied: bool = setting(True, "The embeddings of a new model are its output head too.")
    rope_theta: float = setting(500000.0, "Base frequency of a new model's rotary embeddings.")
    context: int = setting(131072,
        "Context length of a new model in tokens, also of its training positions. With --start: that model's.")
    skip: float = setting(0.5,
        "Share of the sequences that jump to far positions (positional skip-wise training); 0 to 1.")
    distill_from: str = setting("",
        "Teacher model with the same vocabulary, for distillation. Default: none.")
    distill: float = setting(0.5, "Share of the loss against the teacher's distribution; 0 to 1.")
    sequence_length: int = setting(1024, "Length of a training sequence in tokens.")
    batch_size: int = setting(8, "Sequences per forward, in each process.")
    beta2: float = setting(0.95, "beta2 of AdamW; 0 to below 1.")
    learning_rate: float = setting(3e-3, "Peak learning rate of AdamW; above 0, at most 1.")

    def __post_init__(self) -> None:
        at_least(self, vocab_size=300, layers=1, hidden_size=2, intermediate_size=1, num_heads=1, num_kv_heads=0,
                 context=2)
        one_of(self, kind=("llama", HYBRID))
        if self.kind == HYBRID and not self.start:
            check(self.layers >= ATTENTION_EVERY, "layers", self.layers, f"{ATTENTION_EVERY} or more of a hybrid")
            check(self.hidden_size % (DELTA_STEP * self.num_heads) == 0, "hidden_size", self.hidden_size,
                  f"of a hybrid, a multiple of {DELTA_STEP} x num_heads ({DELTA_STEP * self.num_heads})")
        check(self.hidden_size % (2 * self.num_heads) == 0, "hidden_size", self.hidden_size,
              f"a multiple of 2 x num_heads ({2 * self.num_heads})")
        check(bool(self.start) or self.num_heads % (self.num_kv_heads or self.num_heads) == 0, "num_heads",
              self.num_heads, f"a multiple of num_kv_heads ({self.num_kv_heads})")
        check(0 <= self.skip <= 1, "skip", self.skip, "0 to 1")
        check(0 <= self.distill <= 1, "distill", self.distill, "0 to 1")
        check(self.rope_theta > 1, "rope_theta", self.rope_theta, "above 1")
        super().__post_init__()
        # With --start, the limit is that model's context.
        check(bool(self.start) or self.sequence_length <= self.context, "sequence_length", self.sequence_length,
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
    layers: int = setting(1, "Layers of a new model.")
    hidden_size: int = setting(128, "Hidden size of a new model.")
    intermediate_size: int = setting(352, "Inner size of a new model's MLPs.")
    num_heads: int = setting(2, "Query heads of a new model.")
    context: int = setting(4096,
        "Context length of a new model in tokens, also of its training positions. With --start: that model's.")
    skip: float = setting(0.0,
        "Share of the sequences that jump to far positions (positional skip-wise training); 0 to 1.")

    def ineffective(self) -> Iterator[tuple[str, str]]:
        yield from super().ineffective()
        for name in ("tokenizer", "vocab_size"):
            yield name, "in `train draft`: the tokenizer is the model's"

    def _ineffective_distillation(self) -> Iterator[tuple[str, str]]:
        yield "distill_from", "in `train draft`: --model is the teacher"
