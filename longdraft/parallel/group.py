"""Messages between the ranks of a run: sums in a fixed order, concatenated parts, broadcasts from rank 0.

A library's all-reduce adds in an order that depends on an element's position in the buffer, and so on the number of
rows. Here the ranks' parts are gathered and added in the order of ranks, for any number of rows. Row invariance, and
with it the equality of speculative and plain output, therefore holds across ranks.

    few numbers    every rank gathers all parts and adds them                                  one message
    many numbers   every rank gathers its share of all parts, adds it, and shares the sum      two smaller messages
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
from longdraft.system import processor

_MANY_NUMBERS = 1 << 18  # elements; from here on, sending less data outweighs the second message


def in_torchrun() -> tuple[int, int]:
    """(rank, number of ranks) of this process, from torchrun's environment variables; (0, 1) without torchrun."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(size: int, device: str) -> ProcessGroup:
    """The group of the processes that torchrun started.

    device  cpu: gloo; cuda: NCCL for tensors, each process on a GPU of its own

    UsageError if torchrun did not start `size` processes; WorkerError if they cannot connect.
    """
    started = in_torchrun()[1]
    if started != size:
        actual = f"torchrun started {started}" if "WORLD_SIZE" in os.environ else "this is one process"
        raise UsageError(f"tensor_parallel is {size}, but {actual}; start with: torchrun --nproc-per-node {size} -m "
                         "longdraft ... --tensor-parallel " + str(size))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        try:
            # Followers wait for requests without a time limit. If a rank dies, its closed connections raise.
            dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                                    timeout=datetime.timedelta(days=365))
            atexit.register(_leave)
        except (RuntimeError, ValueError) as error:
            raise WorkerError(f"the ranks cannot connect: {str(error).splitlines()[0]}") from error
    return ProcessGroup()


def _leave() -> None:
    """Stop the threads of the group before the interpreter ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ProcessGroup:
    """The ranks of a run, from the view of this process. Methods raise WorkerError if another rank is gone."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all ranks' tensors of this shape (float32), in the order of ranks."""
        with _translate_rank_errors():
            return _added(self._gathered(part)) if part.numel() < _MANY_NUMBERS else self._sum_in_shares(part)

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
        """Concatenate all ranks' tensors [R, N] in the order of ranks: [R, ranks * N]."""
        with _translate_rank_errors():
            return self._gathered(part).transpose(0, 1).flatten(1)

    def broadcast_numbers(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Rank 0's values, on all ranks."""
        buffer = torch.tensor(values, dtype=torch.float64)
        with _translate_rank_errors():
            dist.broadcast(buffer, 0)
        return tuple(buffer.tolist())

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        box = [value]
        with _translate_rank_errors():
            dist.broadcast_object_list(box, 0, device=torch.device("cpu"))
        return box[0]

    def require_same(self, facts: dict[str, str]) -> None:
        """UsageError if these facts differ between ranks, because the ranks would generate different texts."""
        per_rank: list[dict[str, str]] = [{}] * self.size
        with _translate_rank_errors():
            dist.all_gather_object(per_rank, facts)
        for rank, theirs in enumerate(per_rank):
            for name in facts:
                if theirs[name] != per_rank[0][name]:
                    raise UsageError(f"rank {rank} has {name} {theirs[name]}, rank 0 {per_rank[0][name]}; all ranks "
                                     "need the same files, options and kernels (LONGDRAFT_KERNELS chooses)")

    @property
    def cores(self) -> int:
        """CPU cores of this machine for each of its ranks."""
        return max(1, processor.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _added(parts: Tensor) -> Tensor:
    """The sum of parts [ranks, ...], added in the order of ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@contextmanager
def _translate_rank_errors() -> Iterator[None]:
    """Raise MemoryError if this rank has no memory left, and WorkerError if another rank is gone."""
    try:
        with translate_memory_errors():
            yield
    except RuntimeError as error:
        # without the library's source locations
        reason = re.sub(r"^\[.*?\] ", "", str(error).splitlines()[0]).split(". ")[0]
        raise WorkerError(f"another rank is gone: {reason[:200]}") from error
