"""The sampler of a CUDA device: it chooses the same tokens from the same logits, without copying those to the host.

It supports temperature, repetition penalty and min-p; the host decides the other settings, for which the logits are
copied to it. The walk along the
tree runs on the device too, so the cache can commit its rows before the host has read which they are.
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
    from longdraft.kernels.cuda.choice import ChosenTokens

Place = Callable[[Tensor, Tensor], None]  # KVCache.place: commit rows [N] at positions [N], both on the device


class DeviceSampler:
    """`choose` of :class:`longdraft.sampling.sampler.Sampler`, and `walk`, on a device."""

    @staticmethod
    def supports(params: SamplingParams, kernels: Kernels) -> bool:
        """Whether the kernels' device can decide these settings."""
        restricts = params.logit_bias or params.banned_strings or params.structured_outputs
        on_host = restricts or params.has_path_penalties or params.needs_sums
        return kernels.is_device and not on_host and not (params.temperature_last and params.min_p)

    def __init__(self, params: SamplingParams, banned: Sequence[int], kernels: Kernels) -> None:
        from longdraft.kernels.cuda.choice import ChoiceRules, TokenChooser  # needs Triton

        least = math.log(params.min_p) if params.min_p > 0 else None
        rules = ChoiceRules(params.temperature, least, params.repetition_penalty, params.penalty_window,
                            params.seed or 0, tuple(banned))
        self._params = params
        self._chooser = TokenChooser(rules, kernels.device)

    def choose(self, logits: Tensor, tree: Tree, context: Context) -> list[int]:
        """The token behind each node; NO_TOKEN (-1) where a row's logits are not finite."""
        found: list[int] = self.launch(logits.clone(), tree, context).choices.tolist()
        return found

    def walk(self, logits: Tensor, tree: Tree, context: Context, place: Place) -> tuple[list[int], list[int]]:
        """Nodes from the root down along the target's choices, and those choices. Overwrites `logits`.

        Calls `place` with the rows before it waits for the device.
        """
        chosen = self.launch(logits, tree, context)
        place(chosen.path, chosen.targets)
        return chosen.read()

    def launch(self, logits: Tensor, tree: Tree, context: Context) -> ChosenTokens:
        start = self._chooser.length
        if start < len(context):
            self._chooser.extend(context.slice(start, len(context)), start)
        left = max(0, self._params.min_new_tokens - context.num_new)
        return self._chooser.choose(logits, tree.tokens, tree.parents, len(context) - 1, left)
