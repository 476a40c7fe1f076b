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

from longdraft.checkpoint.tensor_files import WEIGHTS, TensorFiles, dump_json
from longdraft.parts.glide import GLIDE_KIND, glide_shapes, require_supported
from longdraft.train.checkpoint import write_tensors
from longdraft.train.data_files import Tokens
from longdraft.train.frozen_model import (
    FrozenModel,
    FrozenOutputs,
    LayerModule,
    Scores,
    as_ids,
    mixed_loss,
    read_part,
)
from longdraft.train.loop import decayed
from longdraft.train.settings import GlideSettings


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
        normed = self._norm(x, "post_attention_layernorm")
        gate, up = self._linear(normed, "mlp.gate_proj"), self._linear(normed, "mlp.up_proj")
        x = x + self._linear(functional.silu(gate) * up, "mlp.down_proj").float()
        return self._norm(x, "norm")

    def _own(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Self-attention over each row and the `window` rows before it."""
        q, k, v = (self._heads(self._linear(x, f"self_attn.{name}_proj")) for name in "qkv")
        row = torch.arange(x.shape[1], device=x.device)
        distance = row[:, None] - row
        mask = (distance >= 0) & (distance <= self._window)
        out = functional.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, mask,
                                                      enable_gqa=True)
        return self._merge(out, "self_attn.o_proj")

    def _cross(self, x: Tensor, cos: Tensor, sin: Tensor, seen: FrozenOutputs, lag: int) -> Tensor:
        """Cross-attention over the target's last keys, `lag` positions behind. The first `lag` rows have no keys."""
        q = rotate(self._heads(self._linear(x, "cross_attn.q_proj")), cos, sin)
        count = x.shape[1] - lag
        keys, values = (part[:, :, :count].to(q.dtype) for part in (seen.keys, seen.values))
        out = functional.scaled_dot_product_attention(q[:, :, lag:], keys, values, is_causal=True, enable_gqa=True)
        return functional.pad(self._merge(out, "cross_attn.o_proj"), (0, 0, lag, 0))

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._base.config.head_dim).transpose(1, 2)

    def _merge(self, out: Tensor, name: str) -> Tensor:
        return self._linear(out.transpose(1, 2).flatten(2), name).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weight(name)
        return functional.rms_norm(x, weight.shape, weight, self._base.config.rms_norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first N dimensions of x [B, H, L, D] by cos, sin [B, L, N], with paired halves."""
    part, rest = torch.split(x, [cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = part.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    rotated = part.float() * cos[:, None].float() + turned * sin[:, None].float()
    return torch.cat([rotated.to(x.dtype), rest], -1)


def offset_positions(seed: int, anchors: int, most: int, place: int, count: int, length: int) -> Tensor:
    """Positions [count, length] int64 below `most`: up to `anchors` first ones are unchanged, later ones are offset at
    random."""
    found = np.tile(np.arange(length), (count, 1))
    room = most - length
    for row in range(count):
        draw = np.random.default_rng([seed, 3, place + row])
        kept = int(draw.integers(anchors + 1))
        if room > 0:
            found[row, kept:] += int(draw.integers(room + 1))
    return torch.from_numpy(found)


@dataclass
class GlideTask:
    """The training task of glide over a frozen model."""

    module: GlideModule
    base: FrozenModel
    settings: GlideSettings
    validation: Tokens

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        return decayed(list(self.module.named_parameters()), weight_decay)

    def accumulate(self, sequences: Tokens, scale: float, place: int) -> Tensor:
        """Mean cross-entropy of the next token over all rows except the first `lag`, which have no target keys."""
        base, settings = self.base, self.settings
        ids = as_ids(sequences, base.device)
        room = settings.positions or base.config.trained_positions
        places = offset_positions(settings.seed, settings.anchors, room, place, *ids.shape).to(base.device)
        lag = int(np.random.default_rng([settings.seed, 5, place]).integers(1, settings.max_lag + 1))
        seen = base.outputs(ids, places)
        hidden = self.module(ids, places, seen, lag)[:, lag:-1].flatten(0, 1)
        wanted = ids[:, lag + 1 :].flatten()
        taught = base.normed(seen.hidden[:, lag:-1]).flatten(0, 1)
        rows = hidden.detach().requires_grad_()
        loss = torch.zeros((), device=base.device)
        for run in base.row_chunks(len(rows)):
            with torch.no_grad():
                said = base.logits(taught[run]).softmax(-1) if settings.distill else None
            part = mixed_loss(base.logits(rows[run]), wanted[run], said, settings.distill) / len(wanted)
            (part * scale).backward()  # type: ignore[no-untyped-call]
            loss += part.detach()
        assert rows.grad is not None
        hidden.backward(rows.grad)
        return loss[None]

    @torch.no_grad()
    def validate(self) -> list[dict[str, float]]:
        """Validate with the lags of the first and the last draft of a step: 1 and `max_lag`."""
        lags = sorted({1, self.settings.max_lag})
        scores = Scores(len(lags))
        for sequence in self.validation:
            ids = as_ids(sequence[None], self.base.device)
            places = torch.arange(ids.shape[1], device=ids.device)[None]
            seen = self.base.outputs(ids, places)
            for part, lag in enumerate(lags):
                rows, wanted = self.module(ids, places, seen, lag)[0, lag:-1], ids[0, lag + 1 :]
                for run in self.base.row_chunks(len(rows)):
                    scores.add(part, self.base.logits(rows[run]), wanted[run])
        return [{"lag": float(lag)} | found for lag, found in zip(lags, scores.metrics(), strict=True)]

    def start_from(self, folder: Path) -> None:
        read_part(TensorFiles(folder), self.module.stored())

    def export(self, folder: Path, record: dict[str, Any]) -> None:
        """Write the files that longdraft.parts.glide reads."""
        tensors = {each.name: each.value(self.base.saved_dtype) for each in self.module.stored()}
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        dump_json(folder / "config.json", {"kind": GLIDE_KIND, "window": self.settings.window,
                                           "max_lag": self.settings.max_lag, **record})


def glide_task(base: FrozenModel, settings: GlideSettings, validation: Tokens) -> GlideTask:
    """Raises ModelError for a model with which glide does not draft."""
    return GlideTask(GlideModule(base, settings), base, settings, validation)
