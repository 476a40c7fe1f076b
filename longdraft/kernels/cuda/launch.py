"""What every launch needs: sizes as powers of two, checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

EXACT = {"enable_fp_fusion": False}  # a*b+c stays two roundings, whatever the code around it
_TYPES = {torch.float32: triton.language.float32, torch.float16: triton.language.float16,
          torch.bfloat16: triton.language.bfloat16, torch.float8_e4m3fn: triton.language.float8e4nv}


def padded(size: int, least: int = 16) -> int:
    """The next power of two, at least what a product of tiles takes."""
    return max(least, 1 << (size - 1).bit_length())


def ceil_div(size: int, by: int) -> int:
    return -(-size // by)


def element_of(tensor: Tensor) -> Any:
    """Triton's name of a tensor's dtype."""
    return _TYPES[tensor.dtype]


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Launches go to this device."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


def require(condition: bool, wanted: str, got: object) -> None:
    if not condition:
        raise ValueError(f"CUDA kernels want {wanted}, got {got}")
