"""The processes of a data-parallel training: one, or those that `torchrun` or `accelerate launch` started.

Each has a copy of the trained parameters and its own share of every step's sequences. Gradients are averaged once per
step, in one message, so that all copies take the same step. Only the main process writes files.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longdraft.errors import UsageError, missing_extra

if TYPE_CHECKING:
    from accelerate import PartialState

# The main process may write training text for hours while the other processes wait. The default timeout of minutes
# would end them. If a process dies, its launcher ends the remaining ones.
_TIMEOUT = timedelta(days=7)


class DistributedProcesses:
    """device: auto, cpu or cuda. Raises UsageError for cuda without a GPU."""

    def __init__(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device is 'cuda', but PyTorch sees no GPU; give --device cpu")
        self._state = _state(is_cpu=device == "cpu" or not torch.cuda.is_available())

    @property
    def device(self) -> torch.device:
        return torch.device(self._state.device)

    @property
    def rank(self) -> int:
        return int(self._state.process_index)

    @property
    def size(self) -> int:
        return int(self._state.num_processes)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Block until every process has called this."""
        self._state.wait_for_everyone()

    def average(self, values: Tensor) -> Tensor:
        """The mean over all processes."""
        from accelerate.utils import reduce

        averaged: Tensor = reduce(values, "mean") if self.size > 1 else values
        return averaged

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.average(values) * self.size

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        averaged = self.average(torch.cat([gradient.flatten().float() for gradient in gradients]))
        for gradient, part in zip(gradients, torch.split(averaged, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def maximum(self, value: float) -> float:
        """The maximum over all processes, so that all stop at the same step."""
        from accelerate.utils import gather

        if self.size == 1:
            return value
        return float(gather(torch.tensor([value], dtype=torch.float64, device=self.device)).max())


def _state(*, is_cpu: bool) -> PartialState:
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise missing_extra("training", str(error.name), "train") from error
    return PartialState(cpu=is_cpu, timeout=_TIMEOUT)
