"""A request's tokens in the device's memory, and the rules by which tokens follow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from longdraft.kernels import noise
from longdraft.kernels.cuda.launch import require
from longdraft.kernels.cuda.support import FilterRules

MAX_CHAIN = 64  # tokens of a chain of drafts
_FIRST_CAPACITY = 4096  # tokens


class ChoiceRules(NamedTuple):
    """The sampling parameters that decide a token. See `longdraft.request.sampling_params.SamplingParams`."""

    temperature: float
    filters: FilterRules
    penalty: float
    window: int
    seed: int
    banned: Sequence[int]  # tokens that end the text, which is not allowed before `min_new_tokens`
    bias: Sequence[tuple[int, float]] = ()  # distinct tokens, and what is added to their logits


class DeviceText:
    """The tokens and the rules of one request.

    tokens  int32 [capacity]: the request's, and those that `place` or a chain of drafts put after them
    length  of the request's
    seed    the bits of splitmix64(seed)
    banned, biased, bias_values  of the rules, on the device; `banned` has one entry more
    """

    def __init__(self, rules: ChoiceRules, device: torch.device) -> None:
        self.rules, self._device = rules, device
        self.seed = int(noise.mix_seed(rules.seed).view(np.int64)[0])
        self.banned = torch.tensor([*rules.banned, 0], dtype=torch.int32, device=device)
        biased, values = zip(*rules.bias, strict=True) if rules.bias else ((), ())
        self.biased = torch.tensor(biased, dtype=torch.int32, device=device)
        self.bias_values = torch.tensor(values, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(_FIRST_CAPACITY, dtype=torch.int32, device=device)
        self.length = 0

    def extend(self, tokens: NDArray[np.int32], start: int) -> None:
        """Set the request's tokens from position `start` on. ValueError where tokens before `start` are missing."""
        end = start + len(tokens)
        require(start <= self.length, f"tokens from {self.length} on", start)
        self._reserve(end)
        self.tokens[start:end].copy_(torch.from_numpy(tokens.copy()), non_blocking=True)
        self.length = end

    def make_room(self, count: int) -> None:
        """Make room for `count` tokens that a kernel will append; call `has_appended` after its launch."""
        self._reserve(self.length + count)

    def has_appended(self, count: int) -> None:
        """A kernel that was launched appends `count` tokens."""
        self.length += count

    def place(self, drafted: Sequence[int]) -> None:
        """Put drafted tokens after those of the request, until the next `extend`, with room for a longest chain."""
        end = self.length + len(drafted)
        self._reserve(end + MAX_CHAIN)
        if drafted:
            self.tokens[self.length : end].copy_(torch.tensor(drafted, dtype=torch.int32), non_blocking=True)

    def _reserve(self, end: int) -> None:
        if end > len(self.tokens):
            grown = torch.zeros(2 * end, dtype=torch.int32, device=self._device)
            grown[: self.length] = self.tokens[: self.length]
            self.tokens = grown
