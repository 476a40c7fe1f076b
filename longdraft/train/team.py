"""The processes of one training: this one alone, or those that `torchrun` or `accelerate launch` started.

Each works on its own share of every step's sequences with its own copy of what learns. Gradients are averaged once in a
step, in one message, so that every copy takes the same step; the first process alone writes files.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longdraft.errors import UsageError

if TYPE_CHECKING:
    from accelerate import PartialState

# The first process reads, writes text to learn from and measures while the others stand by, perhaps for hours; the
# usual minutes would end them. A process that dies ends the others by way of whoever started them.
_PATIENCE = timedelta(days=7)


class Team:
    """`device`: auto, cpu or cuda. UsageError for cuda without a GPU."""

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
    def leads(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every process is here."""
        self._state.wait_for_everyone()

    def average(self, values: Tensor) -> Tensor:
        """The mean over processes."""
        from accelerate.utils import reduce

        averaged: Tensor = reduce(values, "mean") if self.size > 1 else values
        return averaged

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        averaged = self.average(torch.cat([gradient.flatten().float() for gradient in gradients]))
        for gradient, part in zip(gradients, torch.split(averaged, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def largest(self, value: float) -> float:
        """Over processes: what has stopped one stops all, on the slowest one's clock."""
        from accelerate.utils import gather

        if self.size == 1:
            return value
        return float(gather(torch.tensor([value], dtype=torch.float64, device=self.device)).max())


def _state(*, is_cpu: bool) -> PartialState:
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise UsageError(f"training needs {error.name}; pip install 'longdraft[train]'") from error
    return PartialState(cpu=is_cpu, timeout=_PATIENCE)
