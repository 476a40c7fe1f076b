"""What runs at the same time on a device: the threads of a program, the programs of a launch, and chained kernels.

Triton's interpreter hides what goes wrong there, so it is looked for (helpers.launch_hazards).
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import triton
import triton.language as tl

from helpers.cuda_kernels import HAS_CUDA
from helpers.launch_hazards import watched_launches
from longdraft.kernels.cuda.jit_chain import wait_for_inputs

pytestmark = pytest.mark.skipif(HAS_CUDA, reason="Triton's interpreter watches the launches")


@triton.jit
def add_kernel(x, y, SHIFT: tl.constexpr, SIZE: tl.constexpr, ADDS: tl.constexpr):
    """y[i] = x[i + SHIFT] for `SIZE` elements, of which each program shares all but two with the next one. ADDS: plus
    the number of the program."""
    at = 2 * tl.program_id(0) + tl.arange(0, SIZE)
    value = tl.load(x + at + SHIFT)
    tl.store(y + at, value + tl.program_id(0) if ADDS else value)


@triton.jit
def chained_kernel(x, y, z, READS: tl.constexpr, WRITES: tl.constexpr, IS_CHAINED: tl.constexpr):
    """z = x + y of one element. READS, WRITES: before it waits for its inputs it reads x, or writes z."""
    value = tl.load(x) if READS else 0.0
    if WRITES:
        tl.store(z, value)
    wait_for_inputs(IS_CHAINED)
    if not READS:
        value = tl.load(x)
    tl.store(z, value + tl.load(y))


@triton.jit
def reverse_kernel(x, HAS_BARRIER: tl.constexpr):
    """Reverse the order of two elements."""
    index = tl.arange(0, 2)
    value = tl.load(x + index)
    if HAS_BARRIER:
        tl.debug_barrier()
    tl.store(x + 1 - index, value)


def test_programs_that_use_what_another_one_writes_are_found():
    with watched_launches() as launches:
        x, y = torch.zeros(16), torch.zeros(16)
        add_kernel[(4,)](x, y, 0, 2, True)
        add_kernel[(4,)](x, x, 0, 2, True)  # each program its own
        add_kernel[(4,)](x, y, 0, 4, False)  # the same values
        with pytest.raises(AssertionError, match="two programs of add_kernel write to the same place"):
            add_kernel[(4,)](x, y, 0, 4, True)
        with pytest.raises(AssertionError, match="a program of add_kernel reads what another one writes"):
            add_kernel[(4,)](x, x, 2, 2, True)
    assert launches.kernels == {"add_kernel"}


def test_threads_that_use_what_others_of_their_program_write_are_found():
    with watched_launches():
        x = torch.arange(2)
        reverse_kernel[(1,)](x, True)
        with pytest.raises(AssertionError, match="threads of reverse_kernel use the same memory without a barrier"):
            reverse_kernel[(1,)](x, False)


def test_addresses_outside_of_every_tensor_are_found():
    with watched_launches():
        x, y = torch.zeros(16), torch.zeros(16)
        with pytest.raises(AssertionError, match="add_kernel uses an address outside of its tensors"):
            add_kernel[(8,)](x, y, 1, 2, False)


def test_what_a_chained_kernel_may_not_do_before_it_waits_is_found():
    with watched_launches():
        x, y, z = (torch.zeros(1) for _ in range(3))
        chained_kernel[(1,)](x, y, z, True, False, False)  # nobody writes x
        with pytest.raises(AssertionError, match="chained_kernel writes before it waits"):
            chained_kernel[(1,)](x, y, z, True, True, False)
        chained_kernel[(1,)](z, y, x, False, False, False)
        with pytest.raises(AssertionError, match="chained_kernel reads early what a kernel writes"):
            chained_kernel[(1,)](x, y, z, True, False, False)


def test_memory_that_nobody_wrote_holds_no_number():
    with watched_launches():
        x, y = torch.empty(2), torch.zeros(2)
        add_kernel[(1,)](x, y, 0, 2, False)
        assert y.isnan().all() and (x.new_empty(1, dtype=torch.int32) == -1).all()
