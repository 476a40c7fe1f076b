"""Helpers that every kernel launch needs: sizes, launch options, Triton dtypes, argument checks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

# Of every launch: a * b + c is rounded twice, whatever code surrounds it, and whatever Triton does by default.
UNFUSED = {"enable_fp_fusion": False}
_TRITON_DTYPES = {torch.float32: triton.language.float32, torch.float16: triton.language.float16,
                  torch.bfloat16: triton.language.bfloat16, torch.float8_e4m3fn: triton.language.float8e4nv}


def chained(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel may begin before the one in front ends (jit_chain), `UNFUSED` among them."""
    return UNFUSED | ({"IS_CHAINED": True, "launch_pdl": True} if _can_chain(device) else {"IS_CHAINED": False})


@functools.cache
def _can_chain(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def padded_size(size: int, minimum: int = 16) -> int:
    """The next power of two, and at least `minimum`: Triton's block sizes, and the smallest operand of `tl.dot`."""
    return max(minimum, 1 << (size - 1).bit_length())


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def triton_dtype(tensor: Tensor) -> Any:
    """Triton's name for the tensor's dtype."""
    return _TRITON_DTYPES[tensor.dtype]


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` current, so that kernels are launched on it. Does nothing for the CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


def require(condition: bool, wanted: str, got: object) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(f"CUDA kernels want {wanted}, got {got}")
