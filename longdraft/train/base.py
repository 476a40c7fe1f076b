"""The frozen model under what is trained, and losses that never hold [tokens, vocabulary] at once.

Rows of the trained layers do not look at one another once their hidden states are made, so a long sequence is cut into
runs of rows whose logits are made, differentiated and dropped one run at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.errors import ModelError, UsageError
from longdraft.model.checkpoint import TensorFiles
from longdraft.model.config import ModelConfig, read_config
from longdraft.train.data import Tokens

CPU_RUN_ELEMENTS = 2**21  # logits of a run; float32 they still fit the second-level cache of a server's core
GPU_RUN_ELEMENTS = 2**28
TOP = 3
IGNORED = -100
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Seen(NamedTuple):
    """What the frozen model gives for sequences: rows before the final norm, and its last layer's keys and values."""

    hidden: Tensor  # [B, L, hidden] float32
    keys: Tensor  # [B, Hkv, L, D], rotated
    values: Tensor  # [B, Hkv, L, D]


@dataclass(frozen=True)
class Base:
    """A frozen model: token ids in, rows and logits out."""

    folder: Path
    config: ModelConfig
    fingerprint: str
    initializer_range: float
    body: nn.Module  # its final norm taken out
    final_norm: Tensor  # [hidden]
    head_weight: Tensor  # [V, hidden]
    saved_dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @torch.no_grad()
    def see(self, ids: Tensor, positions: Tensor | None = None) -> Seen:
        """Run ids [B, L] at positions [B, L] (none given: 0, 1, 2, ...)."""
        kept = _last_layer(self.config.num_layers - 1)
        hidden = self.body(input_ids=ids, position_ids=positions, past_key_values=kept, use_cache=False)
        keys, values = kept.found
        return Seen(hidden.last_hidden_state.float().to(self.device), keys.to(self.device), values.to(self.device))

    @torch.no_grad()
    def hidden(self, ids: Tensor, window: int = 0, sinks: int = 0) -> Tensor:
        """Rows of the last layer before the final norm, [B * L, hidden] float32, of ids [B, L].

        window  each row sees the `sinks` first positions and this many latest ones, as on a partial cache; 0: all
        """
        mask = None
        if window:
            row, column = torch.arange(ids.shape[1], device=ids.device)[:, None], torch.arange(ids.shape[1],
                                                                                             device=ids.device)
            mask = ((column <= row) & ((column < sinks) | (row - column < window)))[None, None]
        hidden: Tensor = self.body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden.flatten(0, 1).float().to(self.device)

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm of rows [..., hidden] float32."""
        return functional.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.config.rms_norm_eps)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [R, V] float32 of normalised rows [R, hidden]; differentiable in the rows."""
        logits = functional.linear(normed.to(self.head_weight.dtype), self.head_weight).float()
        return logits if self.config.logits_divisor == 1 else logits / self.config.logits_divisor

    def runs(self, count: int) -> Iterator[slice]:
        """Rows 0 .. count in runs whose logits are small."""
        return runs(self.device, self.config.vocab_size, count)


def _last_layer(index: int) -> Any:
    """A cache for one forward of `transformers` that keeps the keys and values of one layer only."""
    from transformers import DynamicCache

    class LastLayer(DynamicCache):  # type: ignore[misc]
        found: tuple[Tensor, Tensor]

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
                   **options: Any) -> tuple[Tensor, Tensor]:
            if layer_idx == index:
                self.found = key_states, value_states
            return key_states, value_states

    return LastLayer()


def runs(device: torch.device, vocab_size: int, count: int) -> Iterator[slice]:
    elements = CPU_RUN_ELEMENTS if device.type == "cpu" else GPU_RUN_ELEMENTS
    rows = max(64, elements // vocab_size)
    return (slice(start, start + rows) for start in range(0, count, rows))


def load_base(folder: Path, dtype: str, device: torch.device, *, shard: bool = False) -> Base:
    """The frozen model of a folder. ModelError where a file or tensor is missing or not supported.

    shard  layer by layer over all GPUs that this process sees, where one does not hold it
    """
    config = read_config(folder)
    fingerprint = TensorFiles(folder).fingerprint()
    saved = DTYPES[config.dtype]
    model = pretrained(folder, saved if dtype == "auto" else DTYPES[dtype], device, shard=shard)
    model.requires_grad_(False).eval()
    body, norm = model.model, model.model.norm.weight.detach().float()
    # With an identity in its place the body returns what the heads read: the rows before the final norm.
    body.norm = nn.Identity()
    spread = float(getattr(model.config, "initializer_range", 0.02))
    head_weight = model.get_output_embeddings().weight.detach()
    return Base(folder, config, fingerprint, spread, body, norm.to(head_weight.device), head_weight, saved)


def pretrained(folder: Path, dtype: torch.dtype, device: torch.device, *, shard: bool = False) -> Any:
    """The model of a folder as `transformers` has it, whole or a ModelError."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(f"training needs {error.name}; pip install 'longdraft[train]'") from error

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True,
            **({"device_map": "auto"} if shard else {}))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load {folder}: {str(error).strip().splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ModelError(f"{folder} lacks the tensors {', '.join(sorted(report['missing_keys']))}")
    return model if shard else model.to(device)


def as_ids(sequences: Tokens, device: torch.device) -> Tensor:
    return torch.from_numpy(sequences).long().to(device)


def mixed_loss(logits: Tensor, wanted: Tensor, taught: Tensor | None, part: float) -> Tensor:
    """Sum over rows [R] that want a token: cross-entropy against it, `part` of it against a distribution instead.

    logits [R, V] float32; taught [R, V] float32 probabilities, or None: there is no such part. Rows of `wanted` [R]
    that are IGNORED count for nothing.
    """
    if taught is None or not part:
        return functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    loss: Tensor = _MixedLoss.apply(logits, wanted, taught, part)  # type: ignore[no-untyped-call]
    return loss


class _MixedLoss(torch.autograd.Function):
    """With what is wanted, (1 - part) onehot + part taught, as one distribution q: -q log p, its gradient p - q.

    [R, V] is gone through half as often as by softmax, log_softmax and their derivatives one by one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, taught: Tensor, part: float) -> Tensor:
        is_known = wanted != IGNORED
        places = wanted.clamp(min=0)[:, None]
        log_p = logits.log_softmax(-1)
        of_taught = torch.einsum("rv,rv->r", taught, log_p)
        loss = -(part * of_taught + (1 - part) * log_p.gather(1, places)[:, 0])
        gradient = log_p.exp_().sub_(taught, alpha=part)
        gradient.scatter_add_(1, places, gradient.new_full(places.shape, part - 1.0))
        ctx.save_for_backward(gradient.masked_fill_(~is_known[:, None], 0.0))
        return loss.masked_fill(~is_known, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, = ctx.saved_tensors
        return gradient * upstream, None, None, None


class Metrics(NamedTuple):
    """Validation of one part: mean cross-entropy in nats, and how often the token is its first (three)."""

    loss: float
    top1: float
    top3: float


class Scores:
    """Sums up validation of several parts, a run of rows at a time."""

    def __init__(self, parts: int) -> None:
        self._sums = torch.zeros(parts, 4, dtype=torch.float64)  # loss, top 1, top 3, rows

    def add(self, part: int, logits: Tensor, target: Tensor) -> None:
        """logits [R, V] of rows that should say target [R]."""
        own = logits.gather(1, target[:, None])
        rank = (logits > own).sum(1)
        loss = functional.cross_entropy(logits, target, reduction="sum")
        row = [loss.double(), (rank < 1).sum().double(), (rank < TOP).sum().double()]
        self._sums[part] += torch.tensor([*(float(value) for value in row), float(len(target))], dtype=torch.float64)

    def metrics(self) -> list[dict[str, float]]:
        return [Metrics(*(row[:3] / row[3]).tolist())._asdict() for row in self._sums]
