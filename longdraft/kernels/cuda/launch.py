"""Helpers that every kernel launch needs: sizes, launch options, Triton dtypes, argument checks."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch
import triton
from torch import Tensor

# Of every launch: a * b + c is rounded twice, whatever code surrounds it, and whatever Triton does by default.
UNFUSED = {"enable_fp_fusion": False}
ALIGNED = 4  # int32 of 16 bytes: an address that is not their multiple would select another compiled program
TRITON_DTYPES = {torch.float32: triton.language.float32, torch.float16: triton.language.float16,
                 torch.bfloat16: triton.language.bfloat16, torch.int8: triton.language.int8,
                 torch.uint8: triton.language.uint8}


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Buffers by what they depend on, of which the most recently used are kept. limit: number of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Key, Value] = {}

    def get(self, key: Key, make: Callable[[], Value], owner: object = None) -> Value:
        """The value of `key`, which `make` makes if it is missing. It is dropped when the `owner` is freed."""
        value = self._held.pop(key, None)
        if value is None:
            value = make()
            if owner is not None:
                weakref.finalize(owner, _drop, weakref.ref(self), key).atexit = False
        self._held[key] = value
        while len(self._held) > self._limit:
            self.drop(next(iter(self._held)))
        return value

    def drop(self, key: Key) -> None:
        """Drop the value of `key`, if there is one."""
        self._held.pop(key, None)


def _drop(kept: weakref.ref[RecentlyUsed[Key, Value]], key: Key) -> None:
    if found := kept():
        found.drop(key)


def chained(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel may begin before the one in front ends (jit_chain), `UNFUSED` among them."""
    return UNFUSED | ({"IS_CHAINED": True, "launch_pdl": True} if _can_chain(device) else {"IS_CHAINED": False})


_unchained: set[torch.device] = set()  # devices whose driver cannot capture chained launches


def stop_chaining(device: torch.device) -> bool:
    """Launch kernels one after another from now on, after a capture has failed: drivers before CUDA 12.3 cannot
    capture chained launches. False: they were not chained."""
    was_on = _can_chain(device)
    _unchained.add(device)
    return was_on


def _can_chain(device: torch.device) -> bool:
    return _has_chains(device) and device not in _unchained


@functools.cache
def _has_chains(device: torch.device) -> bool:
    is_nvidia = torch.version.hip is None  # AMD's numbers of capabilities mean something else
    return device.type == "cuda" and is_nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def indexed(device: torch.device) -> torch.device:
    """The device with its number, which those of tensors have: "cuda" is not equal to "cuda:0"."""
    if device.type != "cuda":
        return device
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program can have. Of the CPU, in Triton's interpreter, those of Hopper."""
    if device.type != "cuda":
        return 227 << 10
    return int(triton.runtime.driver.active.utils.get_device_properties(indexed(device).index)["max_shared_mem"])


@functools.cache
def product_rows(device: torch.device) -> int:
    """Rows of one product of the tensor cores: 64 of Hopper and of large Blackwell devices, 16 of all other cards.

    With 64 rows, attention does 64 operations for each byte of a 16-bit cache that it reads, and 128 of an 8-bit one,
    however many rows there are. An RTX 3060 does 70 while its memory delivers a byte.
    """
    is_large = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
    return 64 if is_large else 16


def padded_size(size: int, minimum: int = 16) -> int:
    """The next power of two, and at least `minimum`: Triton's block sizes, and the smallest operand of `tl.dot`."""
    return max(minimum, 1 << (size - 1).bit_length())


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def staged_parts(*sizes: int) -> list[slice]:
    """Where inputs of these sizes are in the int32 that are uploaded together. An int64 takes two of them."""
    parts, start = [], 0
    for size in sizes:
        parts.append(slice(start, start + size))
        start += ceil_div(size, ALIGNED) * ALIGNED
    return parts


def triton_dtype(tensor: Tensor) -> Any:
    """Triton's name for the tensor's dtype."""
    return TRITON_DTYPES[tensor.dtype]


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
