"""The target's token at each node of a tree, and the walk along the tree, on the device: launches `jit_choice`.

The host is not asked in between, so the next forward can be prepared while the device still computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels import noise
from longdraft.kernels.cuda import jit_activations, jit_attention, jit_choice, jit_rows
from longdraft.kernels.cuda.graph_cache import BUCKETS, GraphCache, new_owner
from longdraft.kernels.cuda.launch import UNFUSED, RecentlyUsed, ceil_div, chained, on_device, padded_size, require
from longdraft.kernels.cuda.linear import SUM_BLOCK, CudaLinear, add_partial_sums
from longdraft.kernels.cuda.support import BLOCK, FilterRules, SupportSearch

_FIRST_CAPACITY = 4096  # tokens
_MAX_BUFFERS = 10  # numbers of rows of one request
MAX_CHAIN = 64  # tokens of a chain of drafts


class ChoiceRules(NamedTuple):
    """The sampling parameters that decide a token. See `longdraft.request.sampling_params.SamplingParams`."""

    temperature: float
    filters: FilterRules
    penalty: float
    window: int
    seed: int
    banned: Sequence[int]  # tokens that end the text, which is not allowed before `min_new_tokens`
    bias: Sequence[tuple[int, float]] = ()  # distinct tokens, and what is added to their logits


class ChosenTokens(NamedTuple):
    """The choices for one tree of R rows, on the device."""

    choices: Tensor  # [R] int32: the token that follows each node, -1 where its logits are not finite
    path: Tensor  # [R] int32: the nodes that the target accepts, from the root down, then zeros
    targets: Tensor  # [R] int64: the cache positions of those nodes; -1: the row is not kept
    outcome: Tensor  # [1 + 2 B] int32: length of the path, its nodes, the choices at them
    size: int  # B, R or more

    def read(self) -> tuple[list[int], list[int]]:
        """The nodes of the path and the choices at them. Waits for the device."""
        outcome: list[int] = self.outcome.tolist()
        count, rows = outcome[0], self.size
        return outcome[1 : 1 + count], outcome[1 + rows : 1 + rows + count]


class LogitsSource(NamedTuple):
    """From the last layer's output to logits: the final norm and the head.

    graphs   of the head's kernels
    tile     rows that a product computes at a time
    divisor  of the logits; cap: their soft cap, 0 for none
    """

    graphs: GraphCache
    tile: int
    norm: Tensor
    eps: float
    rounds_once: bool
    head: CudaLinear
    divisor: float
    cap: float = 0.0

    def launch(self, hidden: Tensor, normed: Tensor, sums: Tensor, logits: Tensor) -> None:
        """Write the logits [R, V] of hidden [R, hidden]."""
        rows, width = hidden.shape
        jit_rows.rms_norm_kernel[(rows,)](hidden, self.norm, normed, self.eps, WIDTH=width, PADDED=padded_size(width),
                                          ROUNDS_ONCE=self.rounds_once, num_warps=8 if width > 512 else 1,
                                          **chained(hidden.device))
        add_partial_sums(self.head.partial_sums(normed, self.tile, sums), logits)
        if self.divisor != 1:
            logits.div_(self.divisor)
        if self.cap:
            jit_activations.squash_kernel[(ceil_div(logits.numel(), SUM_BLOCK),)](
                logits, logits, logits.numel(), self.cap, BLOCK=SUM_BLOCK, HAS_CAP=True, **UNFUSED)


class ChoiceBuffers:
    """The memory of one number of rows: the tree, intermediate results, and the outcome."""

    def __init__(self, rows: int, vocabulary: int, window: int, support: SupportSearch | None, device: torch.device,
                 source: LogitsSource | None) -> None:
        """support: what the filters leave; None: they are off."""
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        num, int32 = ceil_div(vocabulary, BLOCK), torch.int32
        self.serial = new_owner()
        self.rows, self.window, self.support = rows, window, support
        self._staged = empty(4 + rows, dtype=torch.int64)
        self.scalars, self.tree = self._staged[:4], self._staged[4:].view(int32).view(2, rows)
        self.path, self.depths = torch.zeros(rows, rows, dtype=int32, device=device), empty(rows, dtype=int32)
        self.found, self.values = empty(rows, window, dtype=int32), empty(rows, window)
        self.bests, self.ids = empty(rows, num), empty(rows, num, dtype=int32)
        self.scores = empty(rows, num, dtype=torch.float64)
        self.choices, self.walked = (empty(rows, dtype=int32) for _ in range(2))
        self.targets, self.outcome = empty(rows, dtype=torch.int64), empty(1 + 2 * rows, dtype=int32)
        self.given: Tensor | None = None
        self.logits: Tensor | None = None
        self.normed = self.sums = self.bests
        if source is not None:
            self.given = empty(rows, source.head.in_features, dtype=source.head.dtype).zero_()
            self.normed, self.sums = torch.empty_like(self.given), empty(source.head.num_sums(rows))
            self.logits = empty(rows, vocabulary)

    def load(self, tokens: Sequence[int], parents: Sequence[int], scalars: tuple[int, int, int, int]) -> None:
        """One copy to the device. Padding rows follow no node, so no walk reaches them."""
        staged = np.empty(4 + self.rows, dtype=np.int64)
        staged[:4] = scalars
        tree = staged[4:].view(np.int32).reshape(2, self.rows)
        tree[0], tree[1] = 0, -1
        tree[0, : len(tokens)], tree[1, : len(parents)] = tokens, parents
        self._staged.copy_(torch.from_numpy(staged), non_blocking=True)

    def chosen(self, rows: int) -> ChosenTokens:
        return ChosenTokens(self.choices[:rows], self.walked[:rows], self.targets[:rows], self.outcome, self.rows)


class TokenChooser:
    """Chooses the tokens of one request. Holds a copy of the request's tokens on the device."""

    def __init__(self, rules: ChoiceRules, device: torch.device) -> None:
        self.rules, self._device = rules, device
        self.seed = int(noise.mix_seed(rules.seed).view(np.int64)[0])
        self._settings = torch.tensor([rules.temperature, *rules.filters.settings, 0.0], dtype=torch.float64,
                                      device=device)
        self.banned = torch.tensor([*rules.banned, 0], dtype=torch.int32, device=device)
        biased, values = zip(*rules.bias, strict=True) if rules.bias else ((), ())
        self.biased = torch.tensor(biased, dtype=torch.int32, device=device)
        self.bias_values = torch.tensor(values, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(_FIRST_CAPACITY, dtype=torch.int32, device=device)
        self._length = 0
        self.place_serial = 0  # of the memory of `text`; graphs are valid for one only
        self._buffers: RecentlyUsed[object, ChoiceBuffers] = RecentlyUsed(_MAX_BUFFERS)

    def extend(self, tokens: NDArray[np.int32], start: int) -> None:
        """Set the request's tokens from position `start` on. ValueError where tokens before `start` are missing."""
        end = start + len(tokens)
        require(start <= self._length, f"tokens from {self._length} on", start)
        self._reserve(end)
        self._tokens[start:end].copy_(torch.from_numpy(tokens.copy()), non_blocking=True)
        self._length = end

    def make_room(self, count: int) -> None:
        """Make room for `count` tokens that a kernel will append; call `has_appended` after its launch."""
        self._reserve(self._length + count)

    def has_appended(self, count: int) -> None:
        """A kernel that was launched appends `count` tokens."""
        self._length += count

    def place(self, drafted: Sequence[int]) -> None:
        """Put drafted tokens after those of the request, until the next `extend`, with room for a longest chain."""
        end = self._length + len(drafted)
        self._reserve(end + MAX_CHAIN)
        if drafted:
            self._tokens[self._length : end].copy_(torch.tensor(drafted, dtype=torch.int32), non_blocking=True)

    def _reserve(self, end: int) -> None:
        if end > len(self._tokens):
            grown = torch.zeros(2 * end, dtype=torch.int32, device=self._device)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
            self.place_serial += 1

    @property
    def length(self) -> int:
        """Tokens on the device."""
        return self._length

    @property
    def text(self) -> Tensor:
        """The request's tokens, and those that `place` put after them: int32 [capacity]."""
        return self._tokens

    def choose(self, logits: Tensor, tokens: Sequence[int], parents: Sequence[int], cached: int,
               required: int) -> ChosenTokens:
        """Choose from logits [R, V], float32, one row per node of the tree. Overwrites `logits`.

        cached    committed rows of the cache: the position of the root's row
        required  tokens that must still be written before the text may end

        The result is valid until the next choice.
        """
        rows = len(logits)
        require(rows == len(tokens) == len(parents) and logits.is_contiguous() and logits.dtype == torch.float32,
                f"logits [{len(tokens)}, V] float32", (logits.shape, logits.dtype))
        buffers = self.buffers_for(rows, logits.shape[1])
        buffers.load(tokens, parents, (self._length, self.seed, required, cached))
        self._run(buffers, logits, required > 0)
        return buffers.chosen(rows)

    def choose_behind(self, source: LogitsSource, hidden: Tensor, tokens: Sequence[int], parents: Sequence[int],
                      cached: int, required: int) -> ChosenTokens:
        """As `choose`, from the last layer's outputs [R, hidden]: norm, head, choice and walk are one CUDA graph."""
        rows = len(hidden)
        require(rows == len(tokens) == len(parents), f"{len(tokens)} rows", rows)
        bucket = next((size for size in BUCKETS if size >= rows), rows)
        buffers = self.buffers_for(bucket, source.head.out_features, source)
        buffers.load(tokens, parents, (self._length, self.seed, required, cached))
        assert buffers.given is not None and buffers.logits is not None
        buffers.given[:rows].copy_(hidden)
        has_bans = required > 0
        key = ("choice", buffers.serial, has_bans, self.place_serial)
        with on_device(self._device):
            if bucket in BUCKETS:
                source.graphs.own(buffers, buffers.serial)
                source.graphs.run(key, partial(self._run_behind, source, buffers, has_bans))
            else:
                self._run_behind(source, buffers, has_bans)
        return buffers.chosen(rows)

    def _run_behind(self, source: LogitsSource, buffers: ChoiceBuffers, has_bans: bool) -> None:
        assert buffers.given is not None and buffers.logits is not None
        source.launch(buffers.given, buffers.normed, buffers.sums, buffers.logits)
        self._run(buffers, buffers.logits, has_bans)

    def buffers_for(self, rows: int, vocabulary: int, source: LogitsSource | None = None) -> ChoiceBuffers:
        """Buffers for `rows` rows; those of the latest numbers of rows are kept."""
        rules = self.rules
        window = 0 if rules.penalty == 1 else min(rules.window, len(self._tokens))
        key = (rows, vocabulary, window, None if source is None else id(source.head))

        def make() -> ChoiceBuffers:
            given = rules.filters, rows, vocabulary, self._settings
            support = SupportSearch.of_text(*given) if rules.temperature > 0 else None
            return ChoiceBuffers(rows, vocabulary, window, support, self._device, source)

        return self._buffers.get(key, make)

    def prepare(self, buffers: ChoiceBuffers, logits: Tensor, has_bans: bool) -> None:
        """Edit the logits of a tree, and find the largest one of each block."""
        rows, vocabulary = logits.shape
        num, (tokens, parents) = ceil_div(vocabulary, BLOCK), buffers.tree
        jit_attention.tree_paths_kernel[(rows,)](parents, buffers.path, buffers.depths, rows, num_warps=1, **UNFUSED)
        self.edit(logits, tokens, buffers.path, buffers.depths, buffers.scalars, buffers.window, has_bans,
                  (buffers.found, buffers.values))
        jit_choice.block_maxima_kernel[(rows, num)](logits, buffers.bests, buffers.ids, vocabulary, num, BLOCK=BLOCK,
                                                    **chained(self._device))

    def _run(self, buffers: ChoiceBuffers, logits: Tensor, has_bans: bool) -> None:
        """Launches that do not depend on the buffers' contents, as a graph requires."""
        rows, vocabulary = logits.shape
        num, (tokens, parents) = ceil_div(vocabulary, BLOCK), buffers.tree
        with on_device(self._device):
            self.prepare(buffers, logits, has_bans)
            scores: Tensor = buffers.bests
            if buffers.support is not None:
                support, scores = buffers.support, buffers.scores
                support.find(logits, buffers.bests)
                jit_choice.noisy_block_maxima_kernel[(rows, num)](
                    logits, buffers.bests, buffers.depths, buffers.scalars, self._settings, *support.limits, scores,
                    buffers.ids, vocabulary, num, BLOCK=BLOCK, BLOCKS=padded_size(num), **support.flags,
                    **chained(self._device))
            jit_choice.choose_tokens_kernel[(rows,)](buffers.bests, scores, buffers.ids, buffers.choices, num,
                                                     BLOCKS=padded_size(num), **chained(self._device))
            jit_choice.walk_tree_kernel[(1,)](buffers.choices, tokens, parents, buffers.scalars[3:], buffers.walked,
                                              buffers.targets, buffers.outcome, rows, rows, BLOCK=padded_size(rows),
                                              num_warps=1, **chained(self._device))

    def edit(self, logits: Tensor, tokens: Tensor, path: Tensor, depths: Tensor, scalars: Tensor, window: int,
             has_bans: bool, buffers: tuple[Tensor, Tensor]) -> None:
        """Apply `logit_bias`, penalty and bans in place.

        window   tokens of the penalty's window; the text may be shorter
        buffers  int32 and float32 [R, window], which are overwritten
        """
        rows, vocabulary = logits.shape
        rules = self.rules
        if rules.bias:
            num = len(rules.bias)
            jit_choice.add_bias_kernel[(rows, ceil_div(num, BLOCK))](logits, self.biased, self.bias_values, num,
                                                                     vocabulary, BLOCK=BLOCK, **chained(self._device))
        if rules.penalty != 1:
            found, values = buffers
            grid = (rows, ceil_div(window, BLOCK))
            jit_choice.read_window_kernel[grid](logits, self._tokens, tokens, path, depths, scalars, found, values,
                                                window, rows, vocabulary, BLOCK=BLOCK, **chained(self._device))
            jit_choice.penalise_kernel[grid](logits, found, values, window, rules.penalty, vocabulary, BLOCK=BLOCK,
                                             **chained(self._device))
        if has_bans and rules.banned:
            jit_choice.ban_kernel[(rows,)](logits, self.banned, depths, scalars, len(rules.banned), vocabulary,
                                           BLOCK=padded_size(len(rules.banned)), **chained(self._device))
