"""Kernels that begin before the kernel in front of them has ended (programmatic dependent launch, Hopper and newer).

Some 350 kernels make a step, and between two of them the device would be idle while programs end and others start. A
chained kernel lets the next one start at once. Before it reads what another kernel wrote, it waits until the kernel in
front of it has ended; that kernel has waited for the one before. So results do not depend on the chain.

IS_CHAINED is False on older devices and in Triton's interpreter.
"""

import inspect

import triton
import triton.language as tl

# Triton 3.4 cannot compile a call of its own `gdc_wait`; the instructions below are those that it means.
_HAS_WAIT = tl.constexpr("_semantic" in inspect.signature(tl.extra.cuda.gdc_wait).parameters)
LINE = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def wait_for_inputs(IS_CHAINED: tl.constexpr):
    """Let the next kernel start, and wait until the kernel in front has ended. Nothing may be stored before."""
    if IS_CHAINED and _HAS_WAIT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    elif IS_CHAINED:
        tl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False,
                                  pack=1)
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def prefetch(addresses):
    """Fetch the cache lines at these addresses into the second-level cache, without waiting for them."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32,
                              is_pure=False, pack=1)
