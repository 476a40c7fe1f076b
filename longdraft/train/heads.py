"""Training of heads: chained ones (TokenSwift, paper section 3.1, and an MLP variant) and Medusa's independent ones.

    tokenswift   x_j = x_{j-1} + W_j RMSNorm_in(x_{j-1})               x_0 = the last layer's row, before the final norm
    mlp          x_j = x_{j-1} + s D_j silu(U_j RMSNorm_in(x_{j-1}))   s = the median RMS of such rows
    medusa       x_j = n + silu(W_j n + b_j)                           n = x_0 after the final norm

    logits_j = LM_head(RMSNorm_out(x_j)), of medusa LM_head(x_j); the loss of head j at row t is that of token t + 1 + j

The loss mixes the text's token with the model's own distribution at row t + j, which has read j more tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longdraft.checkpoint.tensor_files import WEIGHTS, TensorFiles
from longdraft.checkpoint.tensor_source import HEADS_PREFIX
from longdraft.parts import medusa
from longdraft.parts.heads import HEADS_KIND
from longdraft.train.data import as_ids
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import FrozenModel
from longdraft.train.layers import StoredTensor, read_part, write_part
from longdraft.train.losses import IGNORED, Scores, mixed_loss
from longdraft.train.settings import HeadSettings

log = logging.getLogger(__name__)


class LinearHead(nn.Module):
    """One head of the paper's chain. Its parameters have the names of TokenSwift's checkpoints."""

    def __init__(self, hidden: int, eps: float, size: float) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_layernorm = nn.RMSNorm(hidden, eps)
        with torch.no_grad():
            self.linear.weight.zero_()
            self.input_layernorm.weight.fill_(size)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The next x [R, hidden] float32; only the product is computed in `dtype`."""
        normed = self.input_layernorm(x).to(dtype)
        return x + functional.linear(normed, self.linear.weight.to(dtype)).float()

    def stored(self) -> Iterator[StoredTensor]:
        return (StoredTensor(name, p) for name, p in self.named_parameters())


class MlpHead(nn.Module):
    """One head of the MLP chain: a residual MLP whose output starts at zero."""

    def __init__(self, hidden: int, eps: float, size: float) -> None:
        super().__init__()
        self._size = size
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_layernorm = nn.RMSNorm(hidden, eps)
        with torch.no_grad():
            self.down.weight.zero_()

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The next x [R, hidden] float32; only the products are computed in `dtype`."""
        inner = functional.silu(functional.linear(self.input_layernorm(x).to(dtype), self.up.weight.to(dtype)))
        return x + self._size * functional.linear(inner, self.down.weight.to(dtype)).float()

    def stored(self) -> Iterator[StoredTensor]:
        """The tensors for inference, with the size multiplied into `down`."""
        return (StoredTensor(name, p, self._size if name == "down.weight" else 1.0)
                for name, p in self.named_parameters())


class ChainedModule(nn.Module):
    """The chain, in float32. `size` is the median RMS of the rows that it reads. `init` is its initialisation:

    identity  maps are 0, the output norm is the model's final norm, the input norm of a linear head is `size`: every
              head starts with the model's own prediction of the next token
    paper     norms are 1, maps are normal(0, initializer_range)

    The identity is the default because a normalised row has RMS 1, while the hidden rows of a trained model have
    another (20 in the bundled one). Adam moves an entry by about the learning rate per step regardless of its gradient,
    so with the paper's initialisation W needs hundreds of steps to reach that scale. Figures: docs/training.md.
    """

    FILE = WEIGHTS

    def __init__(self, base: FrozenModel, settings: HeadSettings, size: float) -> None:
        super().__init__()
        config = base.config
        self._base = base
        kind = MlpHead if settings.kind == "mlp" else LinearHead
        torch.manual_seed(settings.seed)
        self.medusa_layers = nn.ModuleList(kind(config.hidden_size, config.rms_norm_eps, size)
                                           for _ in range(settings.heads))
        with torch.no_grad():
            for head in self.heads():
                head.post_layernorm.weight.copy_(base.final_norm)
                if settings.init == "paper":
                    for parameter in head.parameters():
                        if parameter.ndim > 1:
                            parameter.normal_(std=base.initializer_range)
                        else:
                            parameter.fill_(1.0)
        self.to(base.device)

    def heads(self) -> Iterator[LinearHead | MlpHead]:
        for layer in self.medusa_layers:
            assert isinstance(layer, LinearHead | MlpHead)
            yield layer

    def forward(self, hidden: Tensor) -> Iterator[Tensor]:
        """Rows [R, hidden] for the output head, of each head in turn, from rows of hidden states [R, hidden]."""
        for head in self.heads():
            hidden = head(hidden, self._base.head_weight.dtype)
            yield head.post_layernorm(hidden)

    def stored(self) -> Iterator[StoredTensor]:
        for index, head in enumerate(self.heads()):
            yield from (each._replace(name=f"{HEADS_PREFIX}{index}.{each.name}") for each in head.stored())

    def config(self, record: dict[str, Any]) -> dict[str, Any]:
        """The content of config.json, as longdraft.parts.heads reads it."""
        return {"kind": HEADS_KIND, "num_heads": len(self.medusa_layers), **record}


class MedusaModule(nn.Module):
    """Independent residual blocks, in float32. They start at zero and share the model's output head."""

    FILE = medusa.MEDUSA_FILE

    def __init__(self, base: FrozenModel, settings: HeadSettings) -> None:
        super().__init__()
        hidden = base.config.hidden_size
        self._base = base
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(settings.heads))
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        self.to(base.device)

    def forward(self, hidden: Tensor) -> Iterator[Tensor]:
        """Rows [R, hidden] for the output head, of each head, from rows of hidden states [R, hidden]."""
        dtype = self._base.head_weight.dtype
        normed = self._base.normed(hidden)
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            inner = functional.linear(normed.to(dtype), block.weight.to(dtype), block.bias.to(dtype))
            yield normed + functional.silu(inner.float())

    def stored(self) -> Iterator[StoredTensor]:
        return (StoredTensor(f"{index}.0.linear.{name}", p)
                for index, block in enumerate(self.blocks) for name, p in block.named_parameters())

    def config(self, record: dict[str, Any]) -> dict[str, Any]:
        """The content of config.json in the public format, as longdraft.parts.medusa reads it."""
        return {"medusa_num_heads": len(self.blocks), "medusa_num_layers": 1,
                "base_model_name_or_path": record["base_model"], **record}


def targets(ids: Tensor, num_heads: int) -> Tensor:
    """Target tokens of each head: [heads, B * L] int64, IGNORED beyond the end of the sequence.

    ids            a b c d e f
    head 1         c d e f . .      row t predicts token t + 2
    head 2         d e f . . .      row t predicts token t + 3
    """
    rows = torch.full((num_heads, *ids.shape), IGNORED, dtype=torch.long, device=ids.device)
    for j in range(1, num_heads + 1):
        rows[j - 1, :, : -(1 + j)] = ids[:, 1 + j :]
    return rows.flatten(1)


@dataclass
class HeadsTask:
    """The training task of heads over a frozen model."""

    module: ChainedModule | MedusaModule
    base: FrozenModel
    settings: HeadSettings
    validation: Tokens

    def accumulate(self, sequences: Tokens, scale: float, first: int) -> Tensor:
        """Sum over heads of the mean loss over their rows; returns the mean of each head [heads]."""
        base, settings = self.base, self.settings
        ids = as_ids(sequences, base.device)
        wanted = targets(ids, settings.heads)
        rows = (wanted != IGNORED).sum(1)
        read = base.hidden(ids, settings.window, settings.sinks)
        whole = base.hidden(ids) if settings.distill and settings.window else read
        losses = torch.zeros(settings.heads, device=ids.device)
        for run in base.row_chunks(len(read)):
            teacher = self._teacher(whole, run) if settings.distill else None
            total = torch.zeros((), device=ids.device)
            for j, normed in enumerate(self.module(read[run])):
                own = None if teacher is None else teacher[j : j + len(normed)]
                loss = mixed_loss(base.logits(normed), wanted[j, run], own, settings.distill) / rows[j]
                losses[j] += loss.detach()
                total = total + loss
            (total * scale).backward()  # type: ignore[no-untyped-call]
        return losses

    @torch.no_grad()
    def _teacher(self, hidden: Tensor, run: slice) -> Tensor:
        """The model's probabilities at the rows that follow those of a run: row i, shifted by j, is head j + 1's."""
        last = run.stop + self.settings.heads
        rows = hidden[run.start + 1 : last]
        missing = last - (run.start + 1) - len(rows)  # rows beyond the end, where every target is IGNORED
        return self.base.logits(functional.pad(self.base.normed(rows), (0, 0, 0, missing))).softmax(-1)

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        base = self.base
        scores = Scores(self.settings.heads)
        for sequence in self.validation:
            ids = as_ids(sequence[None], base.device)
            read = base.hidden(ids, self.settings.window, self.settings.sinks)
            wanted = targets(ids, self.settings.heads)
            for run in base.row_chunks(len(read)):
                for j, normed in enumerate(self.module(read[run])):
                    known = wanted[j, run] != IGNORED
                    if bool(known.any()):
                        scores.add(j, base.logits(normed[known]), wanted[j, run][known])
        return scores.metrics()

    def start_from(self, folder: Path) -> None:
        files, tensors, wanted = TensorFiles(folder, self.module.FILE), list(self.module.stored()), self.settings.heads
        read_part(files, tensors)
        if (found := len(files.names()) * wanted // len(tensors)) > wanted:
            log.warning("--start %s has %d heads, and the first %d are trained further; --heads %d keeps all", folder,
                        found, wanted, found)

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        write_part(folder / self.module.FILE, self.module.stored(), self.base.saved_dtype, self.module.config(record))


def heads_task(base: FrozenModel, settings: HeadSettings, sample: Tokens, validation: Tokens) -> HeadsTask:
    """The task of untrained heads; `sample` is a sequence [1, L] of the training data."""
    if settings.kind == "medusa":
        return HeadsTask(MedusaModule(base, settings), base, settings, validation)
    size = float(base.hidden(as_ids(sample, base.device)).square().mean(-1).sqrt().median())
    return HeadsTask(ChainedModule(base, settings, size), base, settings, validation)
