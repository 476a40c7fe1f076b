"""What the ranks of a run tell one another.

A library's all-reduce adds in an order that depends on where a number lies in the buffer, and so on how many rows
travel together. Ours gathers the ranks' parts and adds them in the order of ranks, whatever the number of rows: row
invariance, and with it the promise, holds across ranks too.

    few numbers    every rank gathers all parts and adds them                                    one message
    many           each rank gathers its own share of all parts, adds it, and shares the sum      two, of less
"""

from __future__ import annotations

import atexit
import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longdraft.errors import UsageError, WorkerError, translate_memory_errors

_MANY = 1 << 18  # numbers from which the second way sends less than it waits longer


def in_torchrun() -> tuple[int, int]:
    """(rank, number of ranks) of this process, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(size: int, device: str) -> Group:
    """The group of the processes that torchrun started. UsageError where they are not `size`, or there is no torchrun.

    device  cpu: gloo; cuda: NCCL for numbers, each process on a GPU of its own
    """
    started = in_torchrun()[1]
    if started != size:
        said = f"torchrun started {started}" if "WORLD_SIZE" in os.environ else "this is one process"
        raise UsageError(f"tensor_parallel is {size}, but {said}; start with: torchrun --nproc-per-node {size} -m "
                         "longdraft ... --tensor-parallel " + str(size))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        try:
            # Followers wait for the next request as long as it takes; a rank that dies closes its connections.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                                    timeout=datetime.timedelta(days=365))
            atexit.register(_leave)
        except (RuntimeError, ValueError) as error:
            raise WorkerError(f"the ranks do not find one another: {str(error).splitlines()[0]}") from error
    return Group()


def _leave() -> None:
    """Threads of the group must not outlive the interpreter."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Group:
    """The ranks, of which this process is one. WorkerError where another is gone."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape (float32), in the order of ranks."""
        with _told():
            return _added(self._gathered(part)) if part.numel() < _MANY else self._sum_in_shares(part)

    def _gathered(self, part: Tensor) -> Tensor:
        """[ranks, ...]"""
        parts = part.new_empty(self.size, *part.shape)
        dist.all_gather(list(parts), part.contiguous())
        return parts

    def _sum_in_shares(self, part: Tensor) -> Tensor:
        count = part.numel()
        share = -(-count // self.size)
        padded = part.new_zeros(self.size * share)
        padded[:count] = part.flatten()
        mine = torch.empty_like(padded)
        dist.all_to_all_single(mine, padded)
        return self._gathered(_added(mine.view(self.size, share))).flatten()[:count].view(part.shape)

    def concatenate(self, part: Tensor) -> Tensor:
        """All ranks' tensors [R, N], one beside the other: [R, ranks N]."""
        with _told():
            return self._gathered(part).transpose(0, 1).flatten(1)

    def numbers(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Rank 0's."""
        told = torch.tensor(values, dtype=torch.float64)
        with _told():
            dist.broadcast(told, 0)
        return tuple(told.tolist())

    def object(self, value: Any) -> Any:
        """Rank 0's."""
        box = [value]
        with _told():
            dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def require_same(self, facts: dict[str, str]) -> None:
        """UsageError where these are not the same on all ranks: their texts would part."""
        found: list[dict[str, str]] = [{}] * self.size
        with _told():
            dist.all_gather_object(found, facts)
        for rank, theirs in enumerate(found):
            for name in facts:
                if theirs[name] != found[0][name]:
                    raise UsageError(f"rank {rank} has {name} {theirs[name]}, rank 0 {found[0][name]}; all ranks need "
                                     "the same files, options and kernels (LONGDRAFT_KERNELS chooses)")

    @property
    def cores(self) -> int:
        """Of this machine, for each of its ranks."""
        return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _added(parts: Tensor) -> Tensor:
    """[ranks, ...] in the order of ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@contextmanager
def _told() -> Iterator[None]:
    try:
        with translate_memory_errors():  # of this rank, and no other's fault
            yield
    except RuntimeError as error:
        reason = re.sub(r"^\[.*?\] ", "", str(error).splitlines()[0]).split(". ")[0]  # without the library's own places
        raise WorkerError(f"another rank is gone: {reason[:200]}") from error
