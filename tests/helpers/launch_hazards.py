"""What goes wrong on a device and not in Triton's interpreter, which runs one program after another.

    programs of a launch      run at the same time, in any order: none may read what another one writes, and two that
                              write the same write the same value
    threads of a program      too: memory that one uses and another one writes, with another value than it has, needs a
                              barrier between (`tl.debug_barrier`); a lane of a tensor belongs to one thread
    a chained kernel          begins while earlier kernels run (`jit_chain`): until it waits for its inputs it may read
                              what no kernel writes, and write nothing
    an address                must be that of a tensor
    memory that nobody wrote  holds anything: here NaN, and -1 of integers, so that results show what reads it
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from helpers.recorded_graphs import UNSET
from longdraft.kernels.cuda.jit_chain import wait_for_inputs


class Access(NamedTuple):
    """What an instruction reads or writes.

    lanes    int64: an address for each lane of a tensor; -1: none
    used     int64: the addresses alone
    size     bytes of an element
    writes   whether it writes
    """

    lanes: NDArray[np.int64]
    used: NDArray[np.int64]
    size: int
    writes: bool

    def bytes_from(self, begin: int) -> NDArray[np.int64]:
        """The indices of all bytes in the memory that begins there."""
        return ((self.used - begin)[:, None] + np.arange(self.size)).ravel()

    def meets(self, other: Access) -> bool:
        """Whether this and the other one, of which one writes, use the same bytes in different lanes."""
        if not (self.writes or other.writes) or not len(self.used):
            return False
        first, last = sorted((self, other), key=lambda each: int(each.used.min()))
        if first.used.max() + first.size <= last.used.min():
            return False
        if self.lanes.shape != other.lanes.shape or self.size != other.size:
            return bool(np.isin(self.bytes_from(0), other.bytes_from(0)).any())
        mine, theirs = self.lanes[self.lanes != other.lanes], other.lanes[self.lanes != other.lanes]
        return bool(np.isin(mine[mine >= 0], other.used).any() or np.isin(theirs[theirs >= 0], self.used).any())


class Memory:
    """Which programs used the bytes of a storage, which is held: its memory is not used again. Programs are counted
    from 1 on, over all launches.

    readers  int32 of each byte: the last program that read it; negative: and another one of the same launch
    writers  int32 of each byte: the last program that wrote it. Both are None as long as nothing is written
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.begin, self.end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # holds the storage
        self.readers: NDArray[np.int32] | None = None
        self.writers: NDArray[np.int32] | None = None
        self._first_reads: list[tuple[Access, int]] = []  # of a launch, as long as nothing is written
        self._launch = 0

    def read(self, access: Access, program: int, launch: int) -> bool:
        """Whether another program of the launch, whose first program is given, wrote what this one reads."""
        if self.readers is None or self.writers is None:
            if self._launch != launch:
                self._first_reads, self._launch = [], launch
            self._first_reads.append((access, program))
            return False
        at = access.bytes_from(self.begin)
        earlier, writers = self.readers[at], self.writers[at]
        has_others = (np.abs(earlier) >= launch) & (earlier != program)
        self.readers[at] = np.where(has_others, -program, program)
        return bool(((writers >= launch) & (writers != program)).any())

    def write(self, access: Access, values: NDArray[np.uint8], program: int, launch: int) -> tuple[bool, bool]:
        """Whether another program of the launch wrote other bytes where this one writes `values`, and whether one reads
        there."""
        if self.readers is None or self.writers is None:
            self.readers, self.writers = (np.zeros(self.end - self.begin, np.int32) for _ in range(2))
            if self._launch == launch:
                for earlier in self._first_reads:
                    self.read(*earlier, launch)
            self._first_reads = []
        at = access.bytes_from(self.begin)
        writers, readers = self.writers[at], self.readers[at]
        is_other = (writers >= launch) & (writers != program) & (self._bytes[at] != values)
        self.writers[at] = program
        return bool(is_other.any()), bool(((np.abs(readers) >= launch) & (readers != program)).any())

    def changes(self, access: Access, values: NDArray[np.uint8]) -> Access:
        """The part of a write that changes what is there."""
        changed = (self._bytes[access.bytes_from(self.begin)] != values).reshape(-1, access.size).any(1)
        lanes = access.lanes.copy()
        lanes[lanes >= 0] = np.where(changed, access.used, -1)
        return access._replace(lanes=lanes, used=access.used[changed])

    def has_written(self, access: Access) -> bool:
        return self.writers is not None and bool(self.writers[access.bytes_from(self.begin)].any())


class Launches(TorchDispatchMode):
    """Watches launches, and the tensors that operations make. AssertionError at the first hazard.

    kernels  names of those that were launched
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: set[str] = set()
        self._memories: dict[int, Memory] = {}
        self._begins: list[int] = []
        self._kernel, self._program, self._launch = "", 0, 1
        self._has_waited = True
        self._since_barrier: list[tuple[Memory, Access]] = []  # of the program that runs

    def know(self, tensors: object) -> None:
        """Take note of these tensors' memory."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor) and (begin := tensor.untyped_storage().data_ptr()):
                known = self._memories.get(begin)
                if known is None:
                    bisect.insort(self._begins, begin)
                if known is None or known.end < begin + tensor.untyped_storage().nbytes():
                    self._memories[begin] = Memory(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.know((args, kwargs, result))
        if func._schema.name.removeprefix("aten::") in UNSET:
            result.untyped_storage().fill_(255)
        return result

    def begin_launch(self, kernel: str) -> None:
        self._kernel, self._launch = kernel, self._program + 1
        self.kernels.add(kernel)

    def begin_program(self, is_chained: bool) -> None:
        self._program += 1
        self._has_waited = not is_chained
        self._since_barrier = []

    def barrier(self) -> None:
        """All threads of the program have come here."""
        self._since_barrier = []

    def wait(self, IS_CHAINED: object) -> None:
        """In place of `wait_for_inputs`."""
        self._has_waited = True

    def access(self, addresses: NDArray[Any], mask: NDArray[Any], size: int,
               values: NDArray[Any] | None = None) -> None:
        """A program reads elements of `size` bytes, or writes these values."""
        addresses, is_used = np.broadcast_arrays(addresses.astype(np.int64), np.asarray(mask, bool))
        used = addresses[is_used]
        if not len(used):
            return
        access = Access(np.where(is_used, addresses, -1), used, size, values is not None)
        memory, kernel = self._memory(int(used.min()), int(used.max()) + size), self._kernel
        if not self._has_waited:
            assert values is None, f"{kernel} writes before it waits for its inputs"
            assert not memory.has_written(access), f"{kernel} reads early what a kernel writes"
        changed = access
        if values is None:
            is_read = memory.read(access, self._program, self._launch)
        else:
            written = np.ascontiguousarray(np.broadcast_to(values, is_used.shape)[is_used]).view(np.uint8)
            changed = memory.changes(access, written)
            is_written, is_read = memory.write(access, written, self._program, self._launch)
            assert not is_written, f"two programs of {kernel} write to the same place"
        assert not is_read, f"a program of {kernel} reads what another one writes"
        here = [earlier for held, earlier in self._since_barrier if held is memory]
        assert not any((changed if earlier.writes else access).meets(earlier) for earlier in here), \
            f"threads of {kernel} use the same memory without a barrier"
        self._since_barrier.append((memory, access))

    def _memory(self, first: int, end: int) -> Memory:
        """The memory with all addresses from `first` to before `end`."""
        for _ in range(2):
            index = bisect.bisect_right(self._begins, first) - 1
            if index >= 0 and end <= (memory := self._memories[self._begins[index]]).end:
                return memory
            self.know([each for each in gc.get_objects() if isinstance(each, torch.Tensor)])  # made before
        raise AssertionError(f"{self._kernel} uses an address outside of its tensors")


@contextmanager
def watched_launches() -> Iterator[Launches]:
    """A context in which no launch has a hazard."""
    launches, builder, executor = Launches(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    set_program, launch = builder.set_grid_idx, executor.__call__
    is_chained = False

    def watched_load(self: Any, ptrs: Any, mask: Any, *others: Any) -> Any:
        launches.access(ptrs.data, mask.data, max(1, ptrs.get_element_ty().primitive_bitwidth // 8))
        return load(self, ptrs, mask, *others)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *others: Any) -> Any:
        launches.access(ptrs.data, mask.data, value.data.itemsize, value.data)
        return store(self, ptrs, value, mask, *others)

    def watched_program(self: Any, *index: int) -> None:
        launches.begin_program(is_chained)
        set_program(self, *index)

    def watched_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_chained
        is_chained = "IS_CHAINED" in self.arg_names
        launches.know((args, kwargs))
        launches.begin_launch(self.fn.__name__)
        try:
            launch(self, *args, **kwargs)
        except interpreter.InterpreterError as error:
            raise error.__cause__ if isinstance(error.__cause__, AssertionError) else error  # noqa: B904

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(builder, "create_barrier", lambda self: launches.barrier())
        patch.setattr(builder, "set_grid_idx", watched_program)
        patch.setattr(executor, "__call__", watched_launch)
        patch.setitem(interpreter.InterpretedFunction.rewritten_fn, wait_for_inputs.fn, launches.wait)
        with launches:
            yield launches
