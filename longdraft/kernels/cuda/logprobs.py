"""Log-probabilities of chosen tokens, and of the likeliest ones beside them: the host reads a few numbers of a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longdraft.kernels.cuda.choices import TextChoices, TextTree
from longdraft.kernels.cuda.launch import on_device
from longdraft.kernels.cuda.text_rows import TextNeeds


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


def ranked_masses(choices: TextChoices, path: TextTree, logits: Tensor, chosen: Sequence[int],
                  num: int) -> RankedMasses:
    """For the rows of a path. Overwrites logits [R, V] float32, and waits for the device.

    choices  whose memory is used
    path     a chain of nodes, the text's last token first
    chosen   the token after each of them
    num      best tokens; fewer where the vocabulary is smaller. Where the filters leave fewer, ids are outside of it

    At temperature 0 no token is filtered.
    """
    vocabulary, needs = logits.shape[1], TextNeeds.of([(path.text, path.required)])
    buffers, _ = choices.loaded(None, logits, [path])
    support = buffers.support.search(needs)
    with on_device(logits.device):
        buffers.prepare(logits, needs)
        buffers.support.read_filters()
        support.find(logits, buffers.bests)
        orders = support.orders(logits, buffers.bests)
        best = orders.topk(min(num, vocabulary), dim=1).values
        own = orders.gather(1, torch.tensor(chosen, device=logits.device)[:, None])
        found = torch.cat([support.sum(logits, buffers.bests)[:, None], own, best], 1)
    return RankedMasses(found.cpu().numpy())
