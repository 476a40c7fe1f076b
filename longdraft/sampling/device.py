"""The sampler of a CUDA device: the same tokens, to the bit, from the same logits, without bringing those to the host.

For settings that need no sums (temperature, penalty, min-p); others are decided on the host by the Python beside it.
The walk along the tree is done on the device too, so that the cache can keep its rows before the host knows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from longdraft.core import Context, SamplingParams
from longdraft.kernels import Kernels
from longdraft.tree import Tree

if TYPE_CHECKING:
    from longdraft.kernels.cuda.choice import Chosen

Place = Callable[[Tensor, Tensor], None]  # keep these rows at these positions, both on the device


def serves(params: SamplingParams, kernels: Kernels | None) -> bool:
    """Whether these settings can be decided on these kernels' device."""
    if kernels is None or not kernels.is_device or params.logit_bias:
        return False
    no_sums = params.top_k == 0 and params.top_p == 1 and params.eta_cutoff == 0
    return params.temperature == 0 or (no_sums and params.min_tokens_to_keep == 1)


class DeviceSampler:
    """`choose` of :class:`longdraft.sampling.sampler.Sampler`, and `walk`."""

    def __init__(self, params: SamplingParams, banned: Sequence[int], kernels: Kernels) -> None:
        from longdraft.kernels.cuda.choice import Chooser, Law  # needs Triton

        least = math.log(params.min_p) if params.min_p > 0 else None
        self._law = Law(params.temperature, least, params.repetition_penalty, params.penalty_window, params.seed or 0,
                        tuple(banned))
        self._params = params
        self._chooser = Chooser(self._law, kernels.device)

    def choose(self, logits: Tensor, tree: Tree, context: Context) -> list[int]:
        """The token behind each node, -1 where there is nothing to choose from."""
        found: list[int] = self.launch(logits.clone(), tree, context).choices.tolist()
        return found

    def walk(self, logits: Tensor, tree: Tree, context: Context, place: Place) -> tuple[list[int], list[int]]:
        """Nodes from the root down along the target's choices, and those choices. `logits` are overwritten.

        The rows are given to `place` before anybody waits for the device.
        """
        chosen = self.launch(logits, tree, context)
        place(chosen.path, chosen.targets)
        return chosen.read()

    def launch(self, logits: Tensor, tree: Tree, context: Context) -> Chosen:
        start = self._chooser.length
        if start < len(context):
            self._chooser.follow(context.slice(start, len(context)), start)
        left = max(0, self._params.min_new_tokens - context.num_new)
        return self._chooser.choose(logits, tree.tokens, tree.parents, len(context) - 1, left)
