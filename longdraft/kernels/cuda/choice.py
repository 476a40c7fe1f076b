"""The target's tokens behind a tree's nodes, and the walk, without asking the host: the launches of `jit_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels import noise
from longdraft.kernels.cuda import jit_attention, jit_choice
from longdraft.kernels.cuda.launch import EXACT, ceil_div, on, padded, require

_BLOCK = 1024  # tokens of the vocabulary, or of a penalty's window, that a program looks at
_FIRST_TEXT = 4096


class Law(NamedTuple):
    """What decides a token: see SamplingParams. `least` is log(min_p), None where there is none."""

    temperature: float
    least: float | None
    penalty: float
    window: int
    seed: int
    banned: Sequence[int]


class Chosen(NamedTuple):
    """On the device: choices [R]; the path's nodes [R], and where the cache keeps them [R] (-1: it does not); and all
    that the host wants to know, in one piece."""

    choices: Tensor
    path: Tensor
    targets: Tensor
    outcome: Tensor

    def read(self) -> tuple[list[int], list[int]]:
        """Nodes of the walk and the choices behind them. Waits for the device."""
        outcome: list[int] = self.outcome.tolist()
        count, rows = outcome[0], len(self.path)
        return outcome[1 : 1 + count], outcome[1 + rows : 1 + rows + count]


class Chooser:
    """Chooses for one text; holds the tokens of it on the device."""

    def __init__(self, law: Law, device: torch.device) -> None:
        self._law, self._device = law, device
        seed = int(noise.mixed(law.seed).view(np.int64)[0])
        self._seed = seed
        self._settings = torch.tensor([law.temperature, law.least or 0.0], dtype=torch.float64, device=device)
        self._banned = torch.tensor([*law.banned, 0], dtype=torch.int32, device=device)
        self._text = torch.zeros(_FIRST_TEXT, dtype=torch.int32, device=device)
        self._length = 0

    def follow(self, tokens: NDArray[np.int32], start: int) -> None:
        """The text from position `start` on, up to its end."""
        end = start + len(tokens)
        require(start <= self._length, f"tokens from {self._length} on", start)
        if end > len(self._text):
            grown = torch.zeros(2 * end, dtype=torch.int32, device=self._device)
            grown[: self._length] = self._text[: self._length]
            self._text = grown
        self._text[start:end].copy_(torch.from_numpy(tokens.copy()), non_blocking=True)
        self._length = end

    @property
    def length(self) -> int:
        return self._length

    def choose(self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int], cached: int, left: int) -> Chosen:
        """From logits [R, V] float32 of a tree, which are overwritten.

        cached  rows that the cache holds: where it goes on
        left    tokens still to be written before the text may end
        """
        rows = len(logits)
        require(rows == len(tokens) == len(parents) and logits.is_contiguous() and logits.dtype == torch.float32,
                f"logits [{len(tokens)}, V] float32", (logits.shape, logits.dtype))
        given = torch.tensor([tokens, parents], dtype=torch.int32).to(self._device, non_blocking=True)
        about = torch.tensor([self._length, self._seed, left, cached]).to(self._device, non_blocking=True)
        path = torch.zeros(rows, rows, dtype=torch.int32, device=self._device)
        depths = torch.zeros(rows, dtype=torch.int32, device=self._device)
        with on(self._device):
            jit_attention.paths[(rows,)](given[1], path, depths, rows, num_warps=1)
            self._edit(logits, given[0], path, depths, about, left)
            choices = self._pick(logits, depths, about)
            return self._walk(choices, given, about)

    def _edit(self, logits: Tensor, tokens: Tensor, path: Tensor, depths: Tensor, about: Tensor, left: int) -> None:
        """Penalty and bans, in place."""
        rows, vocabulary = logits.shape
        law = self._law
        window = min(law.window, self._length + rows)
        if law.penalty != 1:
            found = torch.empty(rows, window, dtype=torch.int32, device=self._device)
            values = torch.empty(rows, window, device=self._device)
            grid = (rows, ceil_div(window, _BLOCK))
            jit_choice.read_window[grid](logits, self._text, tokens, path, depths, about, found, values, window, rows,
                                         vocabulary, BLOCK=_BLOCK)
            jit_choice.penalise[grid](logits, found, values, window, law.penalty, vocabulary, BLOCK=_BLOCK, **EXACT)
        if left > 0 and law.banned:
            jit_choice.ban[(rows,)](logits, self._banned, depths, about, len(law.banned), vocabulary,
                                    BLOCK=padded(len(law.banned)))

    def _pick(self, logits: Tensor, depths: Tensor, about: Tensor) -> Tensor:
        rows, vocabulary = logits.shape
        num = ceil_div(vocabulary, _BLOCK)
        bests = torch.empty(rows, num, device=self._device)
        ids = torch.empty(rows, num, dtype=torch.int32, device=self._device)
        choices = torch.empty(rows, dtype=torch.int32, device=self._device)
        jit_choice.largest[(rows, num)](logits, bests, ids, vocabulary, num, BLOCK=_BLOCK)
        scores = bests
        if self._law.temperature > 0:
            scores = torch.empty(rows, num, dtype=torch.float64, device=self._device)
            jit_choice.with_noise[(rows, num)](
                logits, bests, depths, about, self._settings, scores, ids, vocabulary, num, BLOCK=_BLOCK,
                BLOCKS=padded(num), HAS_LEAST=self._law.least is not None, **EXACT)
        jit_choice.choose[(rows,)](bests, scores, ids, choices, num, BLOCKS=padded(num))
        return choices

    def _walk(self, choices: Tensor, given: Tensor, about: Tensor) -> Chosen:
        rows = len(choices)
        path = torch.empty(rows, dtype=torch.int32, device=self._device)
        targets = torch.empty(rows, dtype=torch.int64, device=self._device)
        outcome = torch.empty(1 + 2 * rows, dtype=torch.int32, device=self._device)
        jit_choice.walk[(1,)](choices, given[0], given[1], about[3:], path, targets, outcome, rows, rows,
                              BLOCK=padded(rows), num_warps=1)
        return Chosen(choices, path, targets, outcome)
