"""The tokens that follow the trees of several texts, chosen together with their forward on a device.

A verification names its sampler and its tree in `ForwardRequest.choice`. Where two or more requests of a forward do,
one CUDA graph computes logits and chooses for all of them (longdraft/kernels/cuda/choices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from longdraft.cache.full import FullCache, KVCache
from longdraft.kernels import Kernels, KVStore, Linear
from longdraft.kernels.switches import is_on
from longdraft.model.config import ModelConfig

if TYPE_CHECKING:
    from longdraft.kernels.cuda.choices import LogitsSource, TextChoices, TextTree

SHARES_CHOICES = is_on("SHARES_CHOICES")  # False: each text's tokens are chosen by its own launches
Walk = tuple[list[int], list[int]]  # what `longdraft.speculation.verify.verify` returns


class TextChoice(Protocol):
    """How the tokens after the nodes of one text's tree are chosen."""

    def of_text(self, stores: Sequence[KVStore]) -> TextTree:
        """The tree and the rules. stores: of the text's cache, where the rows of the accepted path are kept."""


def logits_source_of(kernels: Kernels, config: ModelConfig, norm: Tensor, head: Linear) -> LogitsSource | None:
    """What computes logits in one graph with their choice; None for other kernels."""
    if not kernels.is_device:
        return None
    from longdraft.kernels.cuda.kernels import CudaKernels  # needs Triton

    if not isinstance(kernels, CudaKernels):
        return None
    return kernels.logits_source(norm, config.rms_norm_eps, config.rounds_once, head, config.logits_divisor,
                                 config.logits_cap)


class SharedTextChoices:
    """Choices of several texts from one model's logits."""

    def __init__(self, source: LogitsSource | None) -> None:
        """source: of the model; None: it has none, and no choice is shared."""
        self._source = source
        self._choices: TextChoices | None = None

    def of(self, choices: Sequence[TextChoice | None], caches: Sequence[KVCache], counts: Sequence[int],
           hidden: Tensor, k: Tensor, v: Tensor) -> list[Walk | None]:
        """The walks of the texts that share a choice, whose rows are placed in their caches; None for all other texts,
        also where only one could.

        counts  rows of each text
        hidden  [R, hidden] of all rows; k, v [L, R, Hkv, D]
        """
        walks: list[Walk | None] = [None] * len(choices)
        if self._source is None or not SHARES_CHOICES or len(choices) < 2:
            return walks
        sharing = [(text, choice, cache) for text, (choice, cache) in enumerate(zip(choices, caches, strict=True))
                   if choice is not None and isinstance(cache, FullCache) and len(cache.groups) == 1]
        if len(sharing) < 2:
            return walks
        if len(sharing) < len(choices):
            ends = [0, *accumulate(counts)]
            own = [slice(ends[text], ends[text + 1]) for text, *_ in sharing]
            hidden = torch.cat([hidden[rows] for rows in own])
            k, v = (torch.cat([part[:, rows] for rows in own], 1) for part in (k, v))
        if self._choices is None:
            from longdraft.kernels.cuda.choices import TextChoices

            self._choices = TextChoices()
        trees = [choice.of_text(cache.stores) for _, choice, cache in sharing]
        made = self._choices.run(self._source, hidden, k, v, trees)
        for (text, _, cache), walk in zip(sharing, made, strict=True):
            cache.has_placed()
            walks[text] = walk
        return walks
