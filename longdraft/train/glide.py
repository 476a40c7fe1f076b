"""Training of glide (LongSpec, arXiv 2502.17421): a layer that drafts from a window and the target's own keys.

At inference the target's keys lag behind the row that attends to them: by one for the first draft, by j for the j-th.
In training every batch therefore draws a lag and shifts queries against keys by it, which needs no mask:

    keys       0 1 2 3 4 5 6 7 . .        lag 2: row i sees the target's keys up to i - 2,
    rows           2 3 4 5 6 7 8 9        and its own layer's up to i

Positions are offset (anchor-offset indices): the first ones are unchanged, later ones get a large offset, so that short
sequences train far positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longdraft.checkpoint.tensor_files import WEIGHTS, TensorFiles
from longdraft.parts.glide import GLIDE_KIND, glide_shapes, require_supported
from longdraft.train.data import as_ids
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import FrozenModel, FrozenOutputs
from longdraft.train.layers import LayerModule, read_part, write_part
from longdraft.train.losses import Scores, backward_in_chunks
from longdraft.train.settings import BlockSettings, EagleSettings, GlideSettings


class GlideModule(LayerModule):
    """The layer. longdraft/parts/glide.py has the names of its file."""

    def __init__(self, base: FrozenModel, settings: GlideSettings) -> None:
        require_supported(base.config)
        super().__init__(base, glide_shapes(base.config), settings.seed)
        self._window = settings.window
        self.to(base.device)

    def forward(self, ids: Tensor, positions: Tensor, seen: FrozenOutputs, lag: int) -> Tensor:
        """Normalised rows [B, L, hidden] float32 for ids [B, L]; `seen` are the target's outputs for them."""
        x = self._base.embed(ids)
        cos, sin = self._base.last_rotations(seen.keys, positions)
        x = x + self._own(self._norm(x, "input_layernorm"), cos, sin)
        x = x + self._cross(self._norm(x, "cross_layernorm"), cos, sin, seen, lag)
        return self._norm(x + self._mlp(x, ""), "norm")

    def _own(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Self-attention over each row and the `window` rows before it."""
        q, k, v = (self._heads(x, f"self_attn.{name}_proj") for name in "qkv")
        row = torch.arange(x.shape[1], device=x.device)
        distance = row[:, None] - row
        mask = (distance >= 0) & (distance <= self._window)
        out = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask,
                                                      enable_gqa=True)
        return self._merge(out, "self_attn.o_proj")

    def _cross(self, x: Tensor, cos: Tensor, sin: Tensor, seen: FrozenOutputs, lag: int) -> Tensor:
        """Cross-attention over the target's last keys, `lag` positions behind. The first `lag` rows have no keys."""
        q = rotate(self._heads(x, "cross_attn.q_proj"), cos, sin)
        count = x.shape[1] - lag
        keys, values = (part[:, :, :count].to(q.dtype) for part in (seen.keys, seen.values))
        out = functional.scaled_dot_product_attention(q[:, :, lag:], keys, values, is_causal=True, enable_gqa=True)
        return functional.pad(self._merge(out, "cross_attn.o_proj"), (0, 0, lag, 0))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first N dimensions of x [B, H, L, D] by cos, sin [B, L, N], with paired halves."""
    part, remainder = torch.split(x, [cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = part.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rotated = part.float() * cos[:, None].float() + turned * sin[:, None].float()
    return torch.cat([rotated.to(x.dtype), remainder], -1)


def offset_positions(seed: int, anchors: int, most: int, index: int, count: int, length: int) -> Tensor:
    """Positions [count, length] int64 below `most` of sequences `index`, `index` + 1, ...: up to `anchors` first ones
    are unchanged, later ones are offset at random."""
    positions = np.tile(np.arange(length), (count, 1))
    room = most - length
    for row in range(count):
        draw = np.random.default_rng([seed, 3, index + row])
        kept = int(draw.integers(anchors + 1))
        if room > 0:
            positions[row, kept:] += int(draw.integers(room + 1))
    return torch.from_numpy(positions)


def training_positions(settings: GlideSettings | EagleSettings | BlockSettings, base: FrozenModel, first: int,
                       ids: Tensor) -> Tensor:
    """Positions of sequences ids [B, L], the first of which is number `first` of the data."""
    most = settings.positions or base.config.trained_positions
    return offset_positions(settings.seed, settings.anchors, most, first, *ids.shape).to(base.device)


@dataclass
class GlideTask:
    """The training task of glide over a frozen model."""

    module: GlideModule
    base: FrozenModel
    settings: GlideSettings
    validation: Tokens

    def accumulate(self, sequences: Tokens, scale: float, first: int) -> Tensor:
        """Mean cross-entropy of the next token over all rows except the first `lag`, which have no target keys."""
        base, settings = self.base, self.settings
        ids = as_ids(sequences, base.device)
        positions = training_positions(settings, base, first, ids)
        lag = int(np.random.default_rng([settings.seed, 5, first]).integers(1, settings.max_lag + 1))
        seen = base.outputs(ids, positions)
        hidden = self.module(ids, positions, seen, lag)[:, lag:-1].flatten(0, 1)
        wanted = ids[:, lag + 1 :].flatten()
        teacher = base.probabilities(seen.hidden[:, lag:-1]) if settings.distill else None
        return backward_in_chunks(hidden, wanted, base.logits, teacher, base.row_chunks(len(hidden)),
                                  settings.distill, scale)[None]

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        """Validate with the lags of the first and the last draft of a step: 1 and `max_lag`."""
        lags = sorted({1, self.settings.max_lag})
        scores = Scores(len(lags))
        for sequence in self.validation:
            ids = as_ids(sequence[None], self.base.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            seen = self.base.outputs(ids, positions)
            for part, lag in enumerate(lags):
                rows, wanted = self.module(ids, positions, seen, lag)[0, lag:-1], ids[0, lag + 1 :]
                for run in self.base.row_chunks(len(rows)):
                    scores.add(part, self.base.logits(rows[run]), wanted[run])
        return [{"lag": float(lag)} | part for lag, part in zip(lags, scores.metrics(), strict=True)]

    def start_from(self, folder: Path) -> None:
        read_part(TensorFiles(folder), self.module.stored())

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """Write the files that longdraft.parts.glide reads."""
        config = {"kind": GLIDE_KIND, "window": self.settings.window, "max_lag": self.settings.max_lag, **record}
        write_part(folder / WEIGHTS, self.module.stored(), self.base.saved_dtype, config)


def glide_task(base: FrozenModel, settings: GlideSettings, validation: Tokens) -> GlideTask:
    """Raises ModelError for a model with which glide does not draft."""
    return GlideTask(GlideModule(base, settings), base, settings, validation)
