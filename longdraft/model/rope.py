"""Rotary position embedding: frequencies of each type, and a table of rotations by position.

Angles are formed in float32, as `transformers` does, so that trained models see the rotations they were
trained with at far positions too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from longdraft.model.config import RopeConfig

_CHUNK = 1024  # positions computed at once: always the same shape, so always the same bits


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [D / 2] float32 and the factor on cos and sin (YaRN's attention factor)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / _number(rope, "factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim)
    return inverse, 1.0


def _number(rope: RopeConfig, name: str, default: float | None = None) -> float:
    value = rope.settings.get(name)
    value = default if value is None else value
    assert value is not None
    return float(value)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    trained = _number(rope, "original_max_position_embeddings")
    turns = trained * inverse / (2 * math.pi)  # full turns within the trained length
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    return torch.where(turns < low, inverse / factor, torch.where(turns > high, inverse, blended))


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, sharpen attention."""
    factor = _number(rope, "factor")
    trained = _number(rope, "original_max_position_embeddings")

    def scale(by: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(by) + 1.0 if by > 1 else 1.0

    mscale, mscale_all = rope.settings.get("mscale"), rope.settings.get("mscale_all_dim")
    sharpened = scale(factor)
    if mscale and mscale_all:
        sharpened = scale(factor, float(mscale)) / scale(factor, float(mscale_all))
    attention = _number(rope, "attention_factor", sharpened)

    def dimension(turns: float) -> float:
        """The (fractional) dimension pair that makes this many turns within the trained length."""
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    fast, slow = dimension(_number(rope, "beta_fast", 32.0)), dimension(_number(rope, "beta_slow", 1.0))
    if rope.settings.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - fast) / max(slow - fast, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return inverse / factor * (1 - keep) + inverse * keep, attention


class RopeTable:
    """cos and sin by position, computed in aligned chunks up to the farthest position asked for."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inverse, self._factor = frequencies(rope, head_dim)
        self._device = device
        self._cos = self._sin = torch.empty(0, head_dim // 2, device=device)

    def at(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos, sin [R, D / 2] float32."""
        if max(positions) >= len(self._cos):
            self._grow(max(positions) + 1)
        places = torch.tensor(positions, device=self._device)
        return self._cos[places], self._sin[places]

    def _grow(self, length: int) -> None:
        """Double at least, so that a long text grows the table a few times only."""
        have = len(self._cos) // _CHUNK
        want = max(-(-length // _CHUNK), 2 * have)
        starts = range(have * _CHUNK, want * _CHUNK, _CHUNK)
        angles = [torch.arange(start, start + _CHUNK).float()[:, None] * self._inverse for start in starts]
        cos = [(a.cos() * self._factor).to(self._device) for a in angles]
        sin = [(a.sin() * self._factor).to(self._device) for a in angles]
        self._cos, self._sin = torch.cat([self._cos, *cos]), torch.cat([self._sin, *sin])
