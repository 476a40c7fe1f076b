"""Log-probabilities of chosen tokens, and of the likeliest ones beside them: the host reads a few numbers of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cuda.choice import TokenChooser
from longdraft.kernels.cuda.launch import on_device
from longdraft.kernels.cuda.support import FilterRules, SupportSearch


class RankedMasses:
    """Of R rows of logits: what `longdraft.sampling.process` needs to compute log-probabilities.

    total   [R] int64: the mass of the tokens that the filters leave
    logits  [R, 1 + N] float32: of the chosen token, and of the N best ones, best first
    tokens  [R, 1 + N] int64: their ids
    """

    def __init__(self, found: NDArray[np.int64]) -> None:
        """found [R, 2 + N]: total, and the orders of the tokens (see jit_support)."""
        orders = found[:, 1:]
        bits = (orders >> 32).astype(np.int32)
        self.total = found[:, 0]
        self.logits = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
        self.tokens = 0xFFFFFFFF - (orders & 0xFFFFFFFF)


def ranked_masses(chooser: TokenChooser, logits: Tensor, tokens: Sequence[int], chosen: Sequence[int], cached: int,
                  required: int, num: int) -> RankedMasses:
    """For the rows of a path. Overwrites logits [R, V] float32, and waits for the device.

    tokens  the path's tokens, the text's last one first
    chosen  the token after each of them
    num     best tokens; fewer where the vocabulary is smaller. Where the filters leave fewer, ids are outside of it

    The other arguments are those of `TokenChooser.choose`. At temperature 0 no token is filtered.
    """
    rows, vocabulary = logits.shape
    buffers = chooser.buffers_for(rows, vocabulary)
    buffers.load(tokens, range(-1, rows - 1), (chooser.length, chooser.seed, required, cached))
    with on_device(logits.device):
        chooser.prepare(buffers, logits, required > 0)
        support = buffers.support
        if support is None:
            settings = torch.ones(6, dtype=torch.float64, device=logits.device)
            support = SupportSearch.of_text(FilterRules(1.0), rows, vocabulary, settings)
        support.find(logits, buffers.bests)
        orders = support.orders(logits, buffers.bests)
        best = orders.topk(min(num, vocabulary), dim=1).values
        own = orders.gather(1, torch.tensor(chosen, device=logits.device)[:, None])
        found = torch.cat([support.sum(logits, buffers.bests)[:, None], own, best], 1)
    return RankedMasses(found.cpu().numpy())
