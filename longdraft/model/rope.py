"""Rotary position embedding: frequencies of each type, and a table of rotations by position.

Angles are formed in float32, as `transformers` does, so that trained models see the rotations they were
trained with at far positions too. Where frequencies depend on a text's length (dynamic, longrope), they are those of
the length asked for, from the first token on: see `Transformer.for_length`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.model.config import ModelConfig, RopeConfig

_ORIGINAL = "original_max_position_embeddings"
_CHUNK = 1024  # positions computed at once: always the same shape, so always the same bits
_KEPT = 8  # chunks; a step meets one or two


def frequencies(rope: RopeConfig, trained: int, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dims / 2] float32 for a text of so many tokens, and the factor on cos and sin."""
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    if rope.kind == "dynamic":
        return 1.0 / (_stretched(rope, trained, length) ** exponents), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, exponents, trained, length)
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / _number(rope, "factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse, trained), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, trained)
    return inverse, 1.0


def max_unscaled_length(rope: RopeConfig, trained: int) -> int | None:
    """The length up to which frequencies stay as they are; None: they depend on no length."""
    if rope.kind == "dynamic":
        return trained
    return int(_number(rope, _ORIGINAL, trained)) if rope.kind == "longrope" else None


def _number(rope: RopeConfig, name: str, default: float | None = None) -> float:
    value = rope.settings.get(name)
    value = default if value is None else value
    assert value is not None
    return float(value)


def _stretched(rope: RopeConfig, trained: int, length: int) -> float:
    """The base of dynamic NTK scaling: it grows with the length, so that the slowest dimension turns no farther."""
    factor = _number(rope, "factor")
    growth = factor * max(length, trained) / trained - (factor - 1)
    return float(rope.theta * growth ** (rope.dims / (rope.dims - 2)))


def _longrope(rope: RopeConfig, exponents: Tensor, trained: int, length: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a factor found by search for each pair, one set of them for short texts."""
    original = _number(rope, _ORIGINAL, trained)
    factor = _number(rope, "factor")
    sharpened = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = torch.tensor(rope.long_factors if length > original else rope.short_factors)
    return 1.0 / (factors * rope.theta**exponents), _number(rope, "attention_factor", sharpened)


def _llama3(rope: RopeConfig, inverse: Tensor, positions: int) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    trained = _number(rope, _ORIGINAL, positions)
    turns = trained * inverse / (2 * math.pi)  # full turns within the trained length
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    return torch.where(turns < low, inverse / factor, torch.where(turns > high, inverse, blended))


def _yarn(rope: RopeConfig, inverse: Tensor, positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, sharpen attention."""
    factor = _number(rope, "factor")
    trained = _number(rope, _ORIGINAL, positions)
    dims = rope.dims

    def scale(by: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(by) + 1.0 if by > 1 else 1.0

    mscale, mscale_all = rope.settings.get("mscale"), rope.settings.get("mscale_all_dim")
    sharpened = scale(factor)
    if mscale and mscale_all:
        sharpened = scale(factor, float(mscale)) / scale(factor, float(mscale_all))
    attention = _number(rope, "attention_factor", sharpened)

    def dimension(turns: float) -> float:
        """The (fractional) dimension pair that makes this many turns within the trained length."""
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    fast, slow = dimension(_number(rope, "beta_fast", 32.0)), dimension(_number(rope, "beta_slow", 1.0))
    if rope.settings.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - fast) / max(slow - fast, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return inverse / factor * (1 - keep) + inverse * keep, attention


class RopeTable:
    """cos and sin by position, in aligned chunks of which the latest in use are kept: memory does not grow with a text.

    Dimensions that are not rotated (they end each half: `checkpoint.load` has moved them there) have cos 1, sin 0.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self._inverse, self._factor = frequencies(config.rope, config.trained_positions, length)
        self._still = (config.head_dim - config.rope.dims) // 2
        self._device = device
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}  # in the order of their use

    def at(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos, sin [R, D / 2] float32."""
        if len(positions) == 1:  # plain decoding and drafts: views, nothing is gathered
            number, place = divmod(positions[0], _CHUNK)
            cos, sin = self._chunk(number)
            return cos[place : place + 1], sin[place : place + 1]
        numbers = sorted({position // _CHUNK for position in positions})
        chunks = [self._chunk(number) for number in numbers]
        start = {number: place * _CHUNK for place, number in enumerate(numbers)}
        places = torch.tensor([start[position // _CHUNK] + position % _CHUNK for position in positions],
                              device=self._device)
        if len(chunks) == 1:
            (cos, sin), = chunks
        else:
            cos, sin = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return cos[places], sin[places]

    def _chunk(self, number: int) -> tuple[Tensor, Tensor]:
        found = self._chunks.pop(number, None) or self._compute(number)
        self._chunks[number] = found
        while len(self._chunks) > _KEPT:
            self._chunks.pop(next(iter(self._chunks)), None)
        return found

    def _compute(self, number: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(number * _CHUNK, (number + 1) * _CHUNK).float()[:, None] * self._inverse
        still = (0, self._still)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return pad(cos, still, value=1.0).to(self._device), pad(sin, still).to(self._device)
