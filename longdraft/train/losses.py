"""Losses and scores of trainings, which never hold [tokens, vocabulary] logits at a time.

The logits of a row depend on its hidden state only. A long sequence is therefore cut into chunks of rows, and the
logits of one chunk at a time are computed, differentiated and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CPU_CHUNK_ELEMENTS = 2**21  # logits of a chunk; 8 MiB of float32, about the L2 cache of a server's core
GPU_CHUNK_ELEMENTS = 2**28
IGNORED = -100


def row_chunks(device: torch.device, vocab_size: int, count: int) -> Iterator[slice]:
    """Slices of rows 0 .. count, small enough for their logits."""
    elements = CPU_CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS
    rows = max(64, elements // vocab_size)
    return (slice(start, start + rows) for start in range(0, count, rows))


def mixed_loss(logits: Tensor, wanted: Tensor, taught: Tensor | None, part: float) -> Tensor:
    """The distillation loss, summed over rows: (1 - part) CE(target token) + part CE(teacher's distribution).

    logits  [R, V] float32
    wanted  [R] int64 target tokens; rows that are IGNORED do not count
    taught  [R, V] float32 probabilities of the teacher; None: cross-entropy only
    """
    if taught is None or not part:
        return functional.cross_entropy(logits, wanted, ignore_index=IGNORED, reduction="sum")
    loss: Tensor = _MixedLoss.apply(logits, wanted, taught, part)  # type: ignore[no-untyped-call]
    return loss


class _MixedLoss(torch.autograd.Function):
    """Cross-entropy against the mixture q = (1 - part) onehot + part taught: -q log p, with the gradient p - q.

    It reads [R, V] half as often as softmax, log_softmax and their separate derivatives do.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, taught: Tensor, part: float) -> Tensor:
        is_known = wanted != IGNORED
        tokens = wanted.clamp(min=0)[:, None]
        log_p = logits.log_softmax(-1)
        of_taught = torch.einsum("rv,rv->r", taught, log_p)
        loss = -(part * of_taught + (1 - part) * log_p.gather(1, tokens)[:, 0])
        gradient = log_p.exp_().sub_(taught, alpha=part)
        gradient.scatter_add_(1, tokens, gradient.new_full(tokens.shape, part - 1.0))
        ctx.save_for_backward(gradient.masked_fill_(~is_known[:, None], 0.0))
        return loss.masked_fill(~is_known, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, = ctx.saved_tensors
        return gradient * upstream, None, None, None


def backward_in_chunks(hidden: Tensor, wanted: Tensor, logits: Callable[[Tensor], Tensor],
                       teacher: Callable[[slice], Tensor] | None, runs: Iterable[slice], part: float,
                       scale: float) -> Tensor:
    """Add `scale` times the gradient of the mean `mixed_loss` of normalised rows; returns that mean.

    The gradient of the rows is computed a chunk at a time, and that of the layers in one backward.

    hidden   [R, hidden]
    wanted   [R] int64 target tokens
    logits   computes the logits of some rows
    teacher  computes the teacher's probabilities for a chunk of rows; None: cross-entropy only
    runs     the chunks of rows
    """
    rows = hidden.detach().requires_grad_()
    mean = torch.zeros((), device=hidden.device)
    for run in runs:
        with torch.no_grad():
            taught = teacher(run) if teacher else None
        loss = mixed_loss(logits(rows[run]), wanted[run], taught, part) / len(wanted)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        mean += loss.detach()
    assert rows.grad is not None
    hidden.backward(rows.grad)  # type: ignore[no-untyped-call]
    return mean


class Scores:
    """Sums the validation of several parts (heads, lags), a chunk of rows at a time."""

    def __init__(self, parts: int) -> None:
        self._sums = torch.zeros(parts, 4, dtype=torch.float64)  # loss, top 1, top 3, rows

    def add(self, part: int, logits: Tensor, target: Tensor) -> None:
        """Count rows with logits [R, V] and target tokens [R]."""
        own = logits.gather(1, target[:, None])
        rank = (logits > own).sum(1)
        loss = functional.cross_entropy(logits, target, reduction="sum")
        sums = [float(loss), int((rank < 1).sum()), int((rank < 3).sum()), len(target)]
        self._sums[part] += torch.tensor(sums, dtype=torch.float64)

    def metrics(self) -> list[dict[str, float]]:
        """Of each part: mean cross-entropy in nats; shares of targets that rank first, and among the first three."""
        return [dict(zip(("loss", "top1", "top3"), (row[:3] / row[3]).tolist(), strict=True)) for row in self._sums]
