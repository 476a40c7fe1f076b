"""Work that a device has begun, and whose result the host reads later.

A text that drafts on a device launches the whole chain and yields a `Launched` before it reads the guesses. In a batch,
the other texts launch theirs meanwhile, and the host waits once for all of them (`read_together`).

Work that several texts can do in one graph is yielded before it is launched (`Shareable`): `read_together` launches it
for all of them at once. So is work of the processor that texts can do at the same time (`HostWork`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
log = logging.getLogger(__name__)


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


class LaunchesTogether(Protocol):
    """What launches the work of several texts at once."""

    def launch(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Launch these parts; returns the outcome of each."""


class Shareable(Launched):
    """Work that is not launched yet.

    group  launches it together with the work of other texts that has the same group
    part   of the text, for `group`
    alone  launches it by itself; returns its outcome
    """

    def __init__(self, group: LaunchesTogether, part: Any, alone: Callable[[], Any]) -> None:
        self.group, self.part, self._alone = group, part, alone
        self.is_launched = False
        self._on_host = None

    def launched(self, outcome: Any) -> None:
        """Set the outcome of work that was launched."""
        self.outcome, self.is_launched = outcome, True

    def launch_alone(self) -> None:
        """Launch the work, unless it is launched."""
        if not self.is_launched:
            self.launched(self._alone())

    def read(self) -> Tensor:
        self.launch_alone()
        return super().read()


class HostWork(Shareable):
    """Work that the host does not wait for after its launch, and whose outcome may be anything: of the processor, which
    is done then, or rows that a device computes for further launches. Alone it has all threads. Texts do it together as
    `group` says: each on one thread, or in one forward."""

    def launch_on_one_thread(self) -> None:
        """Do the work as beside that of other texts."""
        self.launched(self.group.launch([self.part])[0])

    def read(self) -> Any:
        self.launch_alone()
        return self.outcome


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
    """Read the results of several pieces of work: those of one device, dtype and width in one copy, with one wait.

    Work that fails is not read here: `read` launches it again, and its own text gets the error.
    """
    _launch_together([each for each in launched if isinstance(each, Shareable)])
    groups: dict[object, list[Launched]] = {}
    for each in launched:
        if not isinstance(each, HostWork) and (not isinstance(each, Shareable) or each.is_launched):
            key = each.outcome.device, each.outcome.dtype, each.outcome.shape[1:]
            groups.setdefault(key, []).append(each)
    for group in groups.values():
        if len(group) == 1:
            group[0].read()
            continue
        rows = copied_to_host(torch.cat([each.outcome for each in group]))
        parts = torch.split(rows, [len(each.outcome) for each in group])
        for each, part in zip(group, parts, strict=True):
            each.arrived(part)


def _launch_together(work: Sequence[Shareable]) -> None:
    """Launch what several texts share, once for each group, and the rest by itself."""
    groups: dict[int, list[Shareable]] = {}
    for each in work:
        groups.setdefault(id(each.group), []).append(each)
    for group in groups.values():
        try:
            if len(group) == 1:
                group[0].launch_alone()
                continue
            for each, outcome in zip(group, group[0].group.launch([each.part for each in group]), strict=True):
                each.launched(outcome)
        except Exception as error:  # which text has caused it shows when each launches its own
            log.warning("the drafts of %d texts cannot be launched together: %s", len(group), error)
