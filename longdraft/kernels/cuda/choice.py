"""The target's token at each node of a tree, and the walk along the tree, on the device: launches `jit_choice`.

The host is not asked in between, so the next forward can be prepared while the device still computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels import noise
from longdraft.kernels.cuda import jit_attention, jit_choice
from longdraft.kernels.cuda.launch import UNFUSED, ceil_div, on_device, padded_size, require

_BLOCK = 1024  # elements of one program: tokens of the vocabulary or of a penalty window
_FIRST_CAPACITY = 4096  # tokens


class ChoiceRules(NamedTuple):
    """The sampling parameters that decide a token. See `longdraft.core.SamplingParams`."""

    temperature: float
    log_min_p: float | None  # None: no min-p filter
    penalty: float
    window: int
    seed: int
    banned: Sequence[int]  # tokens that end the text, which is not allowed before `min_new_tokens`


class ChosenTokens(NamedTuple):
    """The choices for one tree of R rows, on the device."""

    choices: Tensor  # [R] int32: the token that follows each node, -1 where its logits are not finite
    path: Tensor  # [R] int32: the nodes that the target accepts, from the root down, then zeros
    targets: Tensor  # [R] int64: the cache positions of those nodes; -1: the row is not kept
    outcome: Tensor  # [1 + 2 R] int32: length of the path, its nodes, the choices at them

    def read(self) -> tuple[list[int], list[int]]:
        """The nodes of the path and the choices at them. Waits for the device."""
        outcome: list[int] = self.outcome.tolist()
        count, rows = outcome[0], len(self.path)
        return outcome[1 : 1 + count], outcome[1 + rows : 1 + rows + count]


class TokenChooser:
    """Chooses the tokens of one request. Holds a copy of the request's tokens on the device."""

    def __init__(self, rules: ChoiceRules, device: torch.device) -> None:
        self._rules, self._device = rules, device
        self._seed = int(noise.mix_seed(rules.seed).view(np.int64)[0])
        self._settings = torch.tensor([rules.temperature, rules.log_min_p or 0.0], dtype=torch.float64, device=device)
        self._banned = torch.tensor([*rules.banned, 0], dtype=torch.int32, device=device)
        self._tokens = torch.zeros(_FIRST_CAPACITY, dtype=torch.int32, device=device)
        self._length = 0

    def extend(self, tokens: NDArray[np.int32], start: int) -> None:
        """Set the request's tokens from position `start` on. ValueError where tokens before `start` are missing."""
        end = start + len(tokens)
        require(start <= self._length, f"tokens from {self._length} on", start)
        if end > len(self._tokens):
            grown = torch.zeros(2 * end, dtype=torch.int32, device=self._device)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[start:end].copy_(torch.from_numpy(tokens.copy()), non_blocking=True)
        self._length = end

    @property
    def length(self) -> int:
        """Tokens on the device."""
        return self._length

    def choose(self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int], cached: int,
               required: int) -> ChosenTokens:
        """Choose from logits [R, V], float32, one row per node of the tree. Overwrites `logits`.

        cached    committed rows of the cache: the position of the root's row
        required  tokens that must still be written before the text may end
        """
        rows = len(logits)
        require(rows == len(tokens) == len(parents) and logits.is_contiguous() and logits.dtype == torch.float32,
                f"logits [{len(tokens)}, V] float32", (logits.shape, logits.dtype))
        tree = torch.tensor([tokens, parents], dtype=torch.int32).to(self._device, non_blocking=True)
        scalars = torch.tensor([self._length, self._seed, required, cached]).to(self._device, non_blocking=True)
        path = torch.zeros(rows, rows, dtype=torch.int32, device=self._device)
        depths = torch.zeros(rows, dtype=torch.int32, device=self._device)
        with on_device(self._device):
            jit_attention.tree_paths_kernel[(rows,)](tree[1], path, depths, rows, num_warps=1)
            self._apply_penalty_and_bans(logits, tree[0], path, depths, scalars, required)
            choices = self._choose_tokens(logits, depths, scalars)
            return self._walk_tree(choices, tree, scalars)

    def _apply_penalty_and_bans(self, logits: Tensor, tokens: Tensor, path: Tensor, depths: Tensor, scalars: Tensor,
                                required: int) -> None:
        """In place."""
        rows, vocabulary = logits.shape
        rules = self._rules
        window = min(rules.window, self._length + rows)
        if rules.penalty != 1:
            found = torch.empty(rows, window, dtype=torch.int32, device=self._device)
            values = torch.empty(rows, window, device=self._device)
            grid = (rows, ceil_div(window, _BLOCK))
            jit_choice.read_window_kernel[grid](logits, self._tokens, tokens, path, depths, scalars, found, values,
                                                window, rows, vocabulary, BLOCK=_BLOCK)
            jit_choice.penalise_kernel[grid](logits, found, values, window, rules.penalty, vocabulary, BLOCK=_BLOCK,
                                             **UNFUSED)
        if required > 0 and rules.banned:
            jit_choice.ban_kernel[(rows,)](logits, self._banned, depths, scalars, len(rules.banned), vocabulary,
                                           BLOCK=padded_size(len(rules.banned)))

    def _choose_tokens(self, logits: Tensor, depths: Tensor, scalars: Tensor) -> Tensor:
        """[R] int32."""
        rows, vocabulary = logits.shape
        num = ceil_div(vocabulary, _BLOCK)
        bests = torch.empty(rows, num, device=self._device)
        ids = torch.empty(rows, num, dtype=torch.int32, device=self._device)
        choices = torch.empty(rows, dtype=torch.int32, device=self._device)
        jit_choice.block_maxima_kernel[(rows, num)](logits, bests, ids, vocabulary, num, BLOCK=_BLOCK)
        scores = bests
        if self._rules.temperature > 0:
            scores = torch.empty(rows, num, dtype=torch.float64, device=self._device)
            jit_choice.noisy_block_maxima_kernel[(rows, num)](
                logits, bests, depths, scalars, self._settings, scores, ids, vocabulary, num, BLOCK=_BLOCK,
                BLOCKS=padded_size(num), HAS_MIN_P=self._rules.log_min_p is not None, **UNFUSED)
        jit_choice.choose_tokens_kernel[(rows,)](bests, scores, ids, choices, num, BLOCKS=padded_size(num))
        return choices

    def _walk_tree(self, choices: Tensor, tree: Tensor, scalars: Tensor) -> ChosenTokens:
        rows = len(choices)
        path = torch.empty(rows, dtype=torch.int32, device=self._device)
        targets = torch.empty(rows, dtype=torch.int64, device=self._device)
        outcome = torch.empty(1 + 2 * rows, dtype=torch.int32, device=self._device)
        jit_choice.walk_tree_kernel[(1,)](choices, tree[0], tree[1], scalars[3:], path, targets, outcome, rows, rows,
                                          BLOCK=padded_size(rows), num_warps=1)
        return ChosenTokens(choices, path, targets, outcome)
