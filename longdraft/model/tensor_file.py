"""One safetensors file, memory-mapped: its header is believed only after the format's own library has checked it.

Tensors are views of the map. Pages that were read count as this process's memory until they are let go, so
whoever has copied a tensor says `forget`; a view stays good after that, its pages are read again.
"""

from __future__ import annotations

import json
import mmap
import os
import warnings
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longdraft.errors import ModelError

_MAX_HEADER = 1 << 25  # bytes of JSON; a 400-billion-parameter model's shard has some 100 KB
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**FLOATS, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
           "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
           "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class Entry(NamedTuple):
    """A tensor's place: bytes [start, stop) of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """The tensors of one file by name. Views that it gives are read-only: writing into one ends the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _require_file(path)
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > _MAX_HEADER:
                    raise ModelError(f"{path} is not a readable safetensors file: its header claims {length} bytes; "
                                     f"allowed: {_MAX_HEADER}")
                with safe_open(path, framework="pt"):  # refuses lengths, offsets and shapes that do not add up
                    pass
                self.about = os.fstat(file.fileno())  # which file it was, should another take its name
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = json.loads(self._map[8 : 8 + length])
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {error}; it is damaged or was not "
                             "downloaded whole, get it again") from error
        header.pop("__metadata__", None)
        self.entries = {name: Entry(entry["dtype"], tuple(entry["shape"]), *(8 + length + at for at in
                                                                              entry["data_offsets"]))
                        for name, entry in header.items()}

    def view(self, name: str) -> Tensor:
        entry = self.entries[name]
        if entry.dtype not in _DTYPES:
            raise ModelError(f"{name} in {self.path} is of type {entry.dtype}; allowed: {', '.join(_DTYPES)}")
        dtype, count = _DTYPES[entry.dtype], prod(entry.shape)
        if not count:
            return torch.empty(entry.shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor does anybody write
            flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start)
        if flat.data_ptr() % dtype.itemsize:  # nothing in the format forbids it
            flat = flat.clone()
        return flat.view(entry.shape)

    def forget(self, name: str) -> None:
        """Let go of the pages of a tensor (but for the two it shares with its neighbours)."""
        entry = self.entries[name]
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = entry.stop // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)


def _require_file(path: Path) -> None:
    """Links are followed wherever they lead: the hub's cache consists of them, and what is no tensor is refused.

    But nothing that would block or never end (a pipe, a device) is opened.
    """
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError as error:  # a name too long
        raise ModelError(f"{str(path)[:200]!r} cannot be a file: {error.strerror}") from error
    if is_file:
        return
    if exists:
        raise ModelError(f"{path} is not a file")
    pickles = sorted(found.name for pattern in ("*.bin", "*.pt", "*.pth") for found in path.parent.glob(pattern))
    if pickles:
        raise ModelError(f"{path} is missing, and {pickles[0]} is a pickle, which can run code, and is not loaded; "
                         "save the model again with save_pretrained (it writes safetensors)")
    raise ModelError(f"{path} is missing; a model folder holds config.json, tokenizer.json and "
                     "model.safetensors (or shards with their index)")
