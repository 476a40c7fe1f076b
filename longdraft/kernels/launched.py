"""Work that a device has begun, and whose result the host reads later.

A text that drafts on a device launches the whole chain and yields a `Launched` before it reads the guesses. In a batch,
the other texts launch theirs meanwhile, and the host waits once for all of them (`read_together`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Launched:
    """A tensor [N, C] that a device is still computing. Nothing may overwrite it before `read`."""

    def __init__(self, outcome: Tensor) -> None:
        self.outcome = outcome
        self._on_host: Tensor | None = None

    def read(self) -> Tensor:
        """The tensor on the host. Waits for the device, unless `read_together` has."""
        if self._on_host is None:
            self._on_host = copied_to_host(self.outcome)
        return self._on_host

    def arrived(self, on_host: Tensor) -> None:
        """Set the tensor, which was read together with others."""
        self._on_host = on_host


LaunchedWork = Generator[Launched, None, T]  # returns a T, once what it yields can be read


def copied_to_host(outcome: Tensor) -> Tensor:
    """The one place where the host waits for launched work."""
    return outcome.cpu()


def finished(work: LaunchedWork[T]) -> T:
    """The result of work that no other work is launched beside."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def read_together(launched: Sequence[Launched]) -> None:
    """Read the results of several pieces of work: those of one device, dtype and width in one copy, with one wait."""
    groups: dict[object, list[Launched]] = {}
    for each in launched:
        groups.setdefault((each.outcome.device, each.outcome.dtype, each.outcome.shape[1:]), []).append(each)
    for group in groups.values():
        if len(group) == 1:
            group[0].read()
            continue
        rows = copied_to_host(torch.cat([each.outcome for each in group]))
        parts = torch.split(rows, [len(each.outcome) for each in group])
        for each, part in zip(group, parts, strict=True):
            each.arrived(part)
