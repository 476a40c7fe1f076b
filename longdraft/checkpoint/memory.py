"""Memory for tensors that are read from files: temporaries that are given back at once, and pages of mapped files."""

from __future__ import annotations

import math
import mmap
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from longdraft.errors import ModelError

_POINTER = b"version https://git-lfs.github.com/spec/"


def temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in its own memory mapping, which the system gets back as soon as the tensor is unused.

    The allocator would place temporaries between the packed weights. The holes they leave are too small for later
    weights, which costs 1.25 times the memory for a model of 80 MB.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=dtype, count=math.prod(shape)).view(shape)


def map_file(path: Path, form: str, least: int = 0) -> tuple[os.stat_result, mmap.mmap]:
    """The status of a file and its bytes, read-only. ModelError for one that cannot be mapped.

    form, least  the file's format, and the least number of bytes that it has
    """
    require_content(path)
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_size < least:
                raise ModelError(f"{path} is not a {form} file: it has {stat.st_size} bytes")
            return stat, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def require_content(path: Path) -> None:
    """Raise ModelError for a file that a clone without Git LFS left in place of a large one."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_POINTER))
    except OSError:
        return
    if begin == _POINTER:
        raise ModelError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or "
                         "download the model with the hub's client")


def mapped_numbers(mapped: mmap.mmap, start: int, stop: int, dtype: torch.dtype, path: Path,
                   alignment: int = 1) -> Tensor:
    """The numbers in bytes [start, stop) of a mapped file: a read-only view, or a copy where they are not aligned.

    ModelError for a file that was cut since it was opened.
    """
    if start == stop:
        return torch.empty(0, dtype=dtype)
    require_bytes(mapped, stop, path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nothing writes to it
        flat = torch.frombuffer(mapped, dtype=dtype, count=(stop - start) // dtype.itemsize, offset=start)
    return flat.clone() if flat.data_ptr() % max(alignment, dtype.itemsize) else flat


def forget_pages(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Release the pages of bytes [start, stop) of a mapped file, except those that hold other bytes too."""
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = stop // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, start, length)


def require_bytes(mapped: mmap.mmap, stop: int, path: Path) -> None:
    """Raise ModelError unless the mapped file still has the bytes up to `stop`.

    Reading a page that the file has lost would end the process (SIGBUS). A file that is cut after this check, while the
    bytes are read, still does that.
    """
    if min(len(mapped), size := mapped.size()) < stop:  # size() asks the system
        raise ModelError(f"{path} was cut to {size:,} bytes while it was loaded; load the model again when the file is "
                         "complete")
