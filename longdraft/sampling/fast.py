"""The compiled sampler, for most settings: temperature, penalties, top-k, top-p, min-p. It chooses the same tokens.

Its definition is the Python code of this package (`sampler`, `process`, `window`). That code runs where the compiled
module is missing, for all other filters, and in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.chain_plan import Ranked, Ranker
from longdraft.kernels.cpu import native
from longdraft.kernels.cpu.chain import CompiledRanker
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import process
from longdraft.sampling.path_penalties import PathPenalties

_MAX_WINDOW = 2**31 - 1  # tokens: the largest C++ int; no text is longer


class FastSampler:
    """`choose` and `ranked` of :class:`longdraft.sampling.sampler.Sampler`, compiled."""

    @staticmethod
    def supports(params: SamplingParams) -> bool:
        """Whether the compiled module is installed and supports these settings."""
        return not native.IMPORT_ERROR and not replace(params, top_k=0, top_p=1.0).needs_sums

    def __init__(self, params: SamplingParams, banned: NDArray[np.int64], vocabulary: int,
                 penalties: PathPenalties | None) -> None:
        """penalties: compiled ones, which the caller keeps up to date with the text; None: there are none."""
        self._params = params
        self._vocabulary = vocabulary
        lowest = least = -math.inf
        filter_temperature = process.filter_temperature(params)
        if params.min_p > 0:
            least = math.log(params.min_p)
            lowest = filter_temperature * (least - 1.0)
        inside = [int(token) for token in banned if token < vocabulary]
        window = min(params.penalty_window, _MAX_WINDOW)
        self._native = native.new_choice(params.temperature, lowest, least, filter_temperature,
                                         params.repetition_penalty, window, params.seed or 0,
                                         min(params.top_k, vocabulary), params.top_p, vocabulary, inside)
        if penalties is not None:
            self._native.set_penalties(penalties)  # type: ignore[arg-type]
        self._num_seen = 0

    def choose(self, logits: Tensor, tree: Tree, context: Context, every: bool) -> list[int]:
        self._update(context)
        rows = self._rows(logits)
        assert rows.shape[0] == len(tree), "one row of logits for each node"
        return self._native.choose(rows, tree.tokens, tree.parents, len(context), self._left(context),
                                   every)

    def ranked(self, logits: Tensor, context: Context, path: Sequence[int], num: int, ahead: int,
               within: float) -> Ranked:
        self._update(context)
        row, known = self._rows(logits[None]), len(path) + ahead
        return Ranked(*self._native.rank(row, path, len(context) + known, known < self._left(context), num,
                                         within))

    def shortlists(self, logits: Tensor, context: Context, num: int,
                   part: PartOfVocabulary | None, ahead: int) -> list[tuple[list[int], list[float]]]:
        self._update(context)
        rows = self._rows(logits, None if part is None else len(part.ids))
        return self._native.shortlists(rows, len(context) + ahead, self._left(context) - ahead, num,
                                       part.native if part else None)

    def ranker(self, context: Context, width: int, within: float) -> Ranker:
        """See `Sampler.ranker`."""
        self._update(context)
        return CompiledRanker(self._native, len(context), width, within, self._left(context))

    def _left(self, context: Context) -> int:
        """Tokens to write before the text may end."""
        return max(0, self._params.min_new_tokens - context.num_new)

    def _update(self, context: Context) -> None:
        """Pass the new tokens of the text, or the last window of them."""
        if self._num_seen < len(context):
            new = context.slice(max(self._num_seen, len(context) - self._params.penalty_window), len(context))
            self._native.extend(new)
            self._num_seen = len(context)

    def _rows(self, logits: Tensor, width: int | None = None) -> Tensor:
        rows = logits
        if rows.dtype != torch.float32 or rows.device.type != "cpu" or not rows.is_contiguous():
            rows = logits.detach().to("cpu", torch.float32).contiguous()
        assert rows.ndim == 2 and rows.shape[1] == (width or self._vocabulary), "logits [R, V] of one vocabulary"
        return rows
