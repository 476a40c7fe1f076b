"""Rotary position embedding (RoPE): the frequencies of each rope type, and a table of rotations by position.

Angles are computed in float32, as `transformers` does: models were trained with these roundings at far positions.
The frequencies of `dynamic` and `longrope` depend on the text's length; see `Transformer.for_length`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from longdraft.errors import ModelError
from longdraft.model.config import ModelConfig
from longdraft.model.rope_config import RopeConfig

_ORIGINAL = "original_max_position_embeddings"
_CHUNK_SIZE = 1024  # positions that are computed together: always the same shape, so always the same bits
_MAX_CHUNKS = 8  # that the table keeps; a step needs one or two


def frequencies(rope: RopeConfig, trained: int, length: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dims / 2] float32, and the factor on cos and sin.

    trained  the model's max_position_embeddings
    length   tokens of the text
    """
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    if rope.kind == "dynamic":
        return 1.0 / (_dynamic_base(rope, trained, length) ** exponents), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, exponents, trained, length)
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / _setting(rope, "factor"), 1.0
    if rope.kind == "proportional":
        return _proportional(rope, inverse), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse, trained), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inverse, trained)
    return inverse, 1.0


def max_unscaled_length(rope: RopeConfig, trained: int) -> int | None:
    """The text length up to which the frequencies are constant; None: they never depend on the length."""
    if rope.kind == "dynamic":
        return trained
    return int(_setting(rope, _ORIGINAL, trained)) if rope.kind == "longrope" else None


def _setting(rope: RopeConfig, name: str, default: float | None = None) -> float:
    value = rope.settings.get(name)
    value = default if value is None else value
    assert value is not None
    return float(value)


def _dynamic_base(rope: RopeConfig, trained: int, length: int) -> float:
    """Dynamic NTK scaling: the base grows with the length, so that the slowest dimension's angle stays in range."""
    factor = _setting(rope, "factor")
    growth = factor * max(length, trained) / trained - (factor - 1)
    return float(rope.theta * growth ** (rope.dims / (rope.dims - 2)))


def _longrope(rope: RopeConfig, exponents: Tensor, trained: int, length: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): one searched factor per pair of dimensions, and a separate set for long texts."""
    original = _setting(rope, _ORIGINAL, trained)
    factor = _setting(rope, "factor")
    sharpened = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = torch.tensor(rope.long_factors if length > original else rope.short_factors)
    return 1.0 / (factors * rope.theta**exponents), _setting(rope, "attention_factor", sharpened)


def _proportional(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Gemma 4: the first pairs rotate at the frequencies of the whole head, other pairs stand still."""
    turning = int(_setting(rope, "partial_rotary_factor") * rope.dims // 2)
    return torch.cat([inverse[:turning], torch.zeros(len(inverse) - turning)]) / _setting(rope, "factor", 1.0)


def _llama3(rope: RopeConfig, inverse: Tensor, positions: int) -> Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, and interpolate between them."""
    factor = _setting(rope, "factor")
    low, high = _setting(rope, "low_freq_factor"), _setting(rope, "high_freq_factor")
    trained = _setting(rope, _ORIGINAL, positions)
    turns = trained * inverse / (2 * math.pi)  # full rotations within the trained length
    blend = (turns - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    return torch.where(turns < low, inverse / factor, torch.where(turns > high, inverse, blended))


def _yarn(rope: RopeConfig, inverse: Tensor, positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate low frequencies, keep high ones, and scale attention."""
    factor = _setting(rope, "factor")
    trained = _setting(rope, _ORIGINAL, positions)
    dims = rope.dims

    def scale(by: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(by) + 1.0 if by > 1 else 1.0

    mscale, mscale_all = rope.settings.get("mscale"), rope.settings.get("mscale_all_dim")
    sharpened = scale(factor)
    if mscale and mscale_all:
        sharpened = scale(factor, float(mscale)) / scale(factor, float(mscale_all))
    attention = _setting(rope, "attention_factor", sharpened)

    def dimension(turns: float) -> float:
        """Index, possibly fractional, of the pair that rotates `turns` times within the trained length."""
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    fast, slow = dimension(_setting(rope, "beta_fast", 32.0)), dimension(_setting(rope, "beta_slow", 1.0))
    if rope.settings.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, dims - 1)
    ramp = (torch.arange(dims // 2, dtype=torch.float32) - fast) / max(slow - fast, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return inverse / factor * (1 - keep) + inverse * keep, attention


def require_sound(config: ModelConfig) -> None:
    """Raise ModelError if the settings give no finite angles."""
    try:
        lengths = (1, config.max_positions)
        computed = [frequencies(each, config.trained_positions, n) for each in config.ropes for n in lengths]
        is_sound = all(bool(inverse.isfinite().all()) and math.isfinite(factor) for inverse, factor in computed)
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # the possible results of nonsensical settings
        is_sound = False
    if not is_sound:
        raise ModelError(f"config.json: rope type {config.rope.kind!r} with base {config.rope.theta} and "
                         f"{dict(config.rope.settings)} gives no finite angles")


class RopeTable:
    """cos and sin by position, computed in aligned chunks. It keeps the latest chunks, so its memory is bounded.

    A model with several rotations (`ModelConfig.num_ropes`) has those of a position one after another.

    A rotation of layers with narrower heads is at the beginning of as many numbers as wider heads have.

    Dimensions that are not rotated have cos 1 and sin 0. They are the end of each half of a head: see
    `checkpoint.head_order`.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self._ropes = [frequencies(rope, config.trained_positions, length) for rope in config.ropes]
        self.key = tuple((inverse.numpy().tobytes(), factor) for inverse, factor in self._ropes)  # alike: equal
        self._growth = config.query_growth
        self._half = max(dim for _, dim in config.kv_shapes) // 2  # pairs of the widest heads
        self._device = device
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}  # least recently used first

    @cached_property
    def on_host(self) -> RopeTable:
        """The same table in the host's memory."""
        if self._device.type == "cpu":
            return self
        other = copy.copy(self)
        other._device = torch.device("cpu")
        other._chunks = {}
        return other

    def at(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos and sin [R, S D / 2] float32 of positions, for S rotations."""
        number, offset = divmod(positions[0], _CHUNK_SIZE)
        end = offset + len(positions)
        if end <= _CHUNK_SIZE and _are_consecutive(positions):  # most forwards: views, no gather
            cos, sin = self._chunk(number)
            return cos[offset:end], sin[offset:end]
        numbers = sorted({position // _CHUNK_SIZE for position in positions})
        chunks = [self._chunk(number) for number in numbers]
        start = {number: index * _CHUNK_SIZE for index, number in enumerate(numbers)}
        rows = torch.tensor([start[position // _CHUNK_SIZE] + position % _CHUNK_SIZE for position in positions],
                            device=self._device)
        if len(chunks) == 1:
            (cos, sin), = chunks
        else:
            cos, sin = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return cos[rows], sin[rows]

    def _chunk(self, number: int) -> tuple[Tensor, Tensor]:
        chunk = self._chunks.pop(number, None) or self._compute(number)
        self._chunks[number] = chunk
        while len(self._chunks) > _MAX_CHUNKS:
            self._chunks.pop(next(iter(self._chunks)), None)
        return chunk

    def _compute(self, number: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(number * _CHUNK_SIZE, (number + 1) * _CHUNK_SIZE).float()[:, None]
        parts = []
        for inverse, factor in self._ropes:
            unrotated = (0, self._half - len(inverse))
            angles = positions * inverse
            parts.append((pad(angles.cos() * factor, unrotated, value=1.0), pad(angles.sin() * factor, unrotated)))
        if self._growth:
            beta, length = self._growth
            growth = 1 + beta * torch.log(1 + torch.floor(positions / length))
            parts.append((parts[0][0] * growth, parts[0][1] * growth))
        cos, sin = (torch.cat(part, 1).to(self._device) for part in zip(*parts, strict=True))
        return cos, sin


def rotations_of(tables: Sequence[RopeTable], positions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions of several texts, each from its own table."""
    parts = [table.at(own) for table, own in zip(tables, positions, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])


def _are_consecutive(positions: Sequence[int]) -> bool:
    first = positions[0]
    return positions[-1] - first == len(positions) - 1 and list(positions) == list(range(first, first + len(positions)))
