"""A PyTorch file (`pytorch_model.bin`), memory-mapped, read without PyTorch's loader and without running any code.

Such a file is a ZIP archive: a pickle that describes the tensors (torch_pickle.py), and one stored entry for the
numbers of each storage.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from longdraft.checkpoint.memory import forget_pages, mapped_numbers
from longdraft.checkpoint.tensor_file import FLOATS, Entry, StoredTensors, require_file
from longdraft.checkpoint.torch_pickle import STORAGES, DamagedError, Machine, View, fail
from longdraft.errors import ModelError

_MAX_PICKLE = 1 << 26  # bytes; a 400-billion-parameter model's shard has some 100 KB
_MAX_MEMBERS = 1 << 20


class _Member(NamedTuple):
    """The bytes [start, stop) of an entry of the archive."""

    start: int
    stop: int


class TorchFile(StoredTensors):
    """A PyTorch file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_file(path)
        try:
            with path.open("rb") as file:
                self.stat = os.fstat(file.fileno())
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        if self._map[:4] != b"PK\3\4":
            raise ModelError(f"{path} is not a PyTorch file of the ZIP format; save the model again with "
                             "save_pretrained, which writes safetensors")
        try:
            members = dict(_members(self._map))
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


def _members(data: mmap.mmap) -> Iterator[tuple[str, _Member]]:
    """The entries of the archive, without the folder that all of them are in. Every one must be stored as it is."""
    start, size, count = _directory(data)
    if count > _MAX_MEMBERS or start + size > len(data) or count * 46 > size:
        fail(f"its directory has {count:,} entries in {size:,} bytes")
    at, seen = start, set()
    for _ in range(count):
        (sign, _, _, flags, method, _, _, _, packed, whole, name_size, extra_size, note_size, _, _, _,
         offset) = struct.unpack_from("<4s6H3L5H2L", data, at)
        if sign != b"PK\1\2":
            fail("its directory is damaged")
        name = data[at + 46 : at + 46 + name_size].decode()
        extra = data[at + 46 + name_size : at + 46 + name_size + extra_size]
        whole, packed, offset = _wide(extra, [whole, packed, offset])
        if method or packed != whole:
            fail(f"{name[:80]} is compressed, which a memory mapping cannot read")
        if flags & 1:
            fail(f"{name[:80]} is encrypted")
        sign, name_size_here, extra_size_here = struct.unpack_from("<4s22x2H", data, offset)
        begin = offset + 30 + name_size_here + extra_size_here
        inside = name.partition("/")[2]
        if sign != b"PK\3\4" or begin + whole > len(data):
            fail(f"{name[:80]} reaches beyond the end of the file")
        if inside in seen:
            fail(f"{name[:80]} occurs twice")
        seen.add(inside)
        yield inside, _Member(begin, begin + whole)
        at += 46 + name_size + extra_size + note_size


def _directory(data: mmap.mmap) -> tuple[int, int, int]:
    """Start, size and number of entries of the archive's directory."""
    end = data.rfind(b"PK\5\6", max(0, len(data) - 65557))
    if end < 0:
        fail("its directory is missing")
    count, size, start = struct.unpack_from("<10xH2L", data, end)
    if count == 0xFFFF or 0xFFFFFFFF in (size, start):
        sign, place = struct.unpack_from("<4s4xQ", data, max(0, end - 20))
        if sign != b"PK\6\7":
            fail("its directory is damaged")
        sign, count, size, start = struct.unpack_from("<4s28xQQQ", data, place)
        if sign != b"PK\6\6":
            fail("its directory is damaged")
    return start, size, count


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """The 64-bit values in an extra field in place of those that do not fit into 32 bits."""
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            inside = at + 4
            for i, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    values[i], = struct.unpack_from("<Q", extra, inside)
                    inside += 8
        at += 4 + size
    return values


def _tensors(data: mmap.mmap, members: dict[str, _Member]) -> dict[str, View]:
    """The tensors that the pickle describes, by name."""
    order, described = members.get("byteorder"), members.get("data.pkl")
    if described is None:
        fail("it has no data.pkl")
    if order is not None and data[order.start : min(order.stop, order.start + 16)] != b"little":
        fail("its numbers are not little-endian")
    if described.stop - described.start > _MAX_PICKLE:
        fail(f"data.pkl has {described.stop - described.start:,} bytes; allowed: {_MAX_PICKLE:,}")
    found = Machine().run(data[described.start : described.stop])
    if not isinstance(found, dict):
        fail(f"it holds a {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, View):
            fail(f"{str(name)[:80]!r} is no tensor")
    return found
