"""A PyTorch file (`pytorch_model.bin`), memory-mapped, read without PyTorch's loader and without running any code.

Such a file is a ZIP archive: a pickle that describes the tensors (torch_pickle.py), and one stored entry for the
numbers of each storage.

`torch.load(mmap=True, weights_only=True)` runs no code either, but it keeps every page that was read in memory, and it
reads other bytes than those of a tensor where an entry is compressed, or shorter than the pickle says.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.memory import forget_pages, map_file, mapped_numbers
from longdraft.checkpoint.tensor_file import FLOATS, Entry, StoredTensors, require_file
from longdraft.checkpoint.torch_pickle import STORAGES, DamagedError, View, fail, load
from longdraft.errors import ModelError

_MAX_PICKLE = 1 << 26  # bytes; a 400-billion-parameter model's shard has some 100 KB


class _Member(NamedTuple):
    """The bytes [start, stop) of an entry of the archive."""

    start: int
    stop: int


class TorchFile(StoredTensors):
    """A PyTorch file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_file(path)
        self.stat, self._map = map_file(path, "PyTorch")
        if self._map[:4] != b"PK\3\4":
            raise ModelError(f"{path} is not a PyTorch file of the ZIP format; save the model again with "
                             "save_pretrained, which writes safetensors")
        try:
            members = _members(path, self._map)
            views = _tensors(self._map, members)
            self._views = {name: self._checked(name, view, members) for name, view in views.items()}
        except (DamagedError, struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not a readable PyTorch file: {error}; it is damaged or incomplete, get it "
                             "again") from error
        self.entries = {name: Entry(STORAGES[view.storage.kind][0], view.shape, member.start, member.stop)
                        for name, (view, member) in self._views.items()}

    def _checked(self, name: str, view: View, members: dict[str, _Member]) -> tuple[View, _Member]:
        """The view with its bytes. Raises DamagedError if it is not inside of its storage."""
        member = members.get(f"data/{view.storage.key}")
        if member is None:
            fail(f"the numbers of {name} are missing")
        nbytes = view.storage.size * STORAGES[view.storage.kind][1].itemsize
        if member.stop - member.start != nbytes:
            fail(f"the storage of {name} has {member.stop - member.start:,} bytes, not {nbytes:,}")
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        if prod(view.shape) and last >= view.storage.size:
            fail(f"{name} reaches beyond its storage")
        if prod(view.shape) > view.storage.size:
            fail(f"{name} has more numbers than its storage")
        return view, member

    def float_dtype(self, name: str) -> torch.dtype | None:
        return FLOATS.get(self.entries[name].dtype)

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        view, member = self._views[name]
        own = STORAGES[view.storage.kind][1]
        flat = mapped_numbers(self._map, member.start, member.stop, own, self.path)
        return flat.as_strided(view.shape, view.strides, view.offset)

    def forget(self, name: str) -> None:
        forget_pages(self._map, self.entries[name].start, self.entries[name].stop)


def _members(path: Path, data: mmap.mmap) -> dict[str, _Member]:
    """The entries of the archive, without the folder that all of them are in. Every one must be stored as it is."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        fail(f"its directory is missing or damaged ({error})")
    members: dict[str, _Member] = {}
    for info in infos:
        name = info.filename[:80]
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            fail(f"{name} is compressed, which a memory mapping cannot read")
        if info.flag_bits & 1:
            fail(f"{name} is encrypted")
        sign, name_size, extra_size = struct.unpack_from("<4s22x2H", data, info.header_offset)
        start = info.header_offset + 30 + name_size + extra_size
        if sign != b"PK\3\4" or start + info.file_size > len(data):
            fail(f"{name} reaches beyond the end of the file")
        inside = info.filename.partition("/")[2]
        if inside in members:
            fail(f"{name} occurs twice")
        members[inside] = _Member(start, start + info.file_size)
    return members


def _tensors(data: mmap.mmap, members: dict[str, _Member]) -> dict[str, View]:
    """The tensors that the pickle describes, by name."""
    order = members.get("byteorder")
    described = members.get("data.pkl")
    if described is None:
        fail("it has no data.pkl")
    if order is not None and data[order.start : min(order.stop, order.start + 16)] != b"little":
        fail("its numbers are not little-endian")
    if described.stop - described.start > _MAX_PICKLE:
        fail(f"data.pkl has {described.stop - described.start:,} bytes; allowed: {_MAX_PICKLE:,}")
    tensors = load(data[described.start : described.stop])
    if not isinstance(tensors, dict):
        fail(f"it holds a {type(tensors).__name__}, not tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, View):
            fail(f"{str(name)[:80]!r} is no tensor")
    return tensors
