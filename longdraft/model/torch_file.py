"""A PyTorch file (`pytorch_model.bin`), memory-mapped, read without PyTorch's loader and without running any code.

Such a file is a ZIP archive: a pickle that describes the tensors, and one stored entry for the numbers of each storage.
The pickle is interpreted here by an own machine for the few instructions that such files need. It creates no objects
but texts, numbers, tuples, lists, dictionaries and the records below; every other instruction or name is refused.
"""

from __future__ import annotations

import mmap
import os
import pickletools
import struct
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.model.memory import forget_pages
from longdraft.model.tensor_file import Entry, require_file, stored_bytes

_MAX_PICKLE = 1 << 26  # bytes; a 400-billion-parameter model's shard has some 100 KB
_MAX_INSTRUCTIONS = 1 << 22  # a tensor takes some 45
_MAX_MEMBERS = 1 << 20
_STORAGES = {
    "FloatStorage": ("F32", torch.float32), "HalfStorage": ("F16", torch.float16),
    "BFloat16Storage": ("BF16", torch.bfloat16), "DoubleStorage": ("F64", torch.float64),
    "LongStorage": ("I64", torch.int64), "IntStorage": ("I32", torch.int32), "ShortStorage": ("I16", torch.int16),
    "CharStorage": ("I8", torch.int8), "ByteStorage": ("U8", torch.uint8), "BoolStorage": ("BOOL", torch.bool)}
_FLOATS = ("F32", "F16", "BF16")


class _Member(NamedTuple):
    """The bytes [start, stop) of an entry of the archive."""

    start: int
    stop: int


class _Name(NamedTuple):
    """A global name of the pickle. It stands for nothing."""

    name: str


class _Storage(NamedTuple):
    kind: str  # a key of _STORAGES
    key: str
    count: int


class _View(NamedTuple):
    """A tensor: a view of a storage, in numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """The tensors of one file by name. See :class:`longdraft.model.tensor_file.TensorFile`."""

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
        except (_DamagedError, struct.error, IndexError, ValueError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not a readable PyTorch file: {error}; it is damaged or incomplete, get it "
                             "again") from error
        self.entries = {name: Entry(_STORAGES[view.storage.kind][0], view.shape, member.start, member.stop)
                        for name, (view, member) in self._views.items()}

    def _checked(self, name: str, view: _View, members: dict[str, _Member]) -> tuple[_View, _Member]:
        """The view with its bytes. Raises _DamagedError if it is not inside of its storage."""
        member = members.get(f"data/{view.storage.key}")
        if member is None:
            _fail(f"the numbers of {name} are missing")
        nbytes = view.storage.count * _STORAGES[view.storage.kind][1].itemsize
        if member.stop - member.start != nbytes:
            _fail(f"the storage of {name} has {member.stop - member.start:,} bytes, not {nbytes:,}")
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        if prod(view.shape) and last >= view.storage.count:
            _fail(f"{name} reaches beyond its storage")
        if prod(view.shape) > view.storage.count:
            _fail(f"{name} has more numbers than its storage")
        return view, member

    def float_dtype(self, name: str) -> torch.dtype | None:
        """The type of a tensor's floating-point numbers; None: it holds other values."""
        kind, dtype = _STORAGES[self._views[name][0].storage.kind]
        return dtype if kind in _FLOATS else None

    def view(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor as it is stored. dtype: not used here."""
        view, member = self._views[name]
        own = _STORAGES[view.storage.kind][1]
        if not prod(view.shape):
            return torch.empty(view.shape, dtype=own)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # and nothing writes to it
            flat = torch.frombuffer(self._map, dtype=own, count=view.storage.count, offset=member.start)
        if flat.data_ptr() % own.itemsize:
            flat = flat.clone()
        return flat.as_strided(view.shape, view.strides, view.offset)

    def stored(self, name: str) -> tuple[str, Tensor]:
        """The name of a tensor's type, and its bytes, uint8."""
        return stored_bytes(self.view(name))

    def forget(self, name: str) -> None:
        """Release the pages of a tensor's storage, except those that it shares with its neighbours."""
        forget_pages(self._map, self.entries[name].start, self.entries[name].stop)


class _DamagedError(Exception):
    """The file contradicts itself, or has what longdraft does not read."""


def _fail(problem: str) -> NoReturn:
    raise _DamagedError(problem)


def _members(data: mmap.mmap) -> Iterator[tuple[str, _Member]]:
    """The entries of the archive, without the folder that all of them are in. Every one must be stored as it is."""
    start, size, count = _directory(data)
    if count > _MAX_MEMBERS or start + size > len(data) or count * 46 > size:
        _fail(f"its directory has {count:,} entries in {size:,} bytes")
    at, seen = start, set()
    for _ in range(count):
        (sign, _, _, flags, method, _, _, _, packed, whole, name_size, extra_size, note_size, _, _, _,
         offset) = struct.unpack_from("<4s6H3L5H2L", data, at)
        if sign != b"PK\1\2":
            _fail("its directory is damaged")
        name = data[at + 46 : at + 46 + name_size].decode()
        extra = data[at + 46 + name_size : at + 46 + name_size + extra_size]
        whole, packed, offset = _wide(extra, [whole, packed, offset])
        if method or packed != whole:
            _fail(f"{name[:80]} is compressed, which a memory mapping cannot read")
        if flags & 1:
            _fail(f"{name[:80]} is encrypted")
        sign, name_size_here, extra_size_here = struct.unpack_from("<4s22x2H", data, offset)
        begin = offset + 30 + name_size_here + extra_size_here
        inside = name.partition("/")[2]
        if sign != b"PK\3\4" or begin + whole > len(data):
            _fail(f"{name[:80]} reaches beyond the end of the file")
        if inside in seen:
            _fail(f"{name[:80]} occurs twice")
        seen.add(inside)
        yield inside, _Member(begin, begin + whole)
        at += 46 + name_size + extra_size + note_size


def _directory(data: mmap.mmap) -> tuple[int, int, int]:
    """Start, size and number of entries of the archive's directory."""
    end = data.rfind(b"PK\5\6", max(0, len(data) - 65557))
    if end < 0:
        _fail("its directory is missing")
    count, size, start = struct.unpack_from("<10xH2L", data, end)
    if count == 0xFFFF or 0xFFFFFFFF in (size, start):
        sign, place = struct.unpack_from("<4s4xQ", data, max(0, end - 20))
        if sign != b"PK\6\7":
            _fail("its directory is damaged")
        sign, count, size, start = struct.unpack_from("<4s28xQQQ", data, place)
        if sign != b"PK\6\6":
            _fail("its directory is damaged")
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


def _tensors(data: mmap.mmap, members: dict[str, _Member]) -> dict[str, _View]:
    """The tensors that the pickle describes, by name."""
    order, described = members.get("byteorder"), members.get("data.pkl")
    if described is None:
        _fail("it has no data.pkl")
    if order is not None and data[order.start : min(order.stop, order.start + 16)] != b"little":
        _fail("its numbers are not little-endian")
    if described.stop - described.start > _MAX_PICKLE:
        _fail(f"data.pkl has {described.stop - described.start:,} bytes; allowed: {_MAX_PICKLE:,}")
    found = _Machine().run(data[described.start : described.stop])
    if not isinstance(found, dict):
        _fail(f"it holds a {type(found).__name__}, not tensors by name")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, _View):
            _fail(f"{str(name)[:80]!r} is no tensor")
    return found


class _Machine:
    """Interprets the instructions of a pickle that describes tensors (protocol 2)."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(content)):
            if count > _MAX_INSTRUCTIONS:
                _fail(f"its pickle has more than {_MAX_INSTRUCTIONS:,} instructions")
            name = instruction.name
            if name == "STOP":
                return self._stack.pop()
            if name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name]())
            elif name in _ARGUMENTS:
                self._stack.append(argument)
            elif name in _INSTRUCTIONS:
                _INSTRUCTIONS[name](self, argument)
            else:
                _fail(f"its pickle has the instruction {name}, which tensors do not need")
        _fail("its pickle does not end")

    def _protocol(self, version: int) -> None:
        if version != 2:
            _fail(f"its pickle has protocol {version}; allowed: 2")

    def _mark(self, _: None) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _tuple(self, _: None) -> None:
        self._stack.append(tuple(self._since_mark()))

    def _short_tuple(self, count: int) -> None:
        parts = self._stack[len(self._stack) - count :]
        if len(parts) != count:
            _fail("its pickle is damaged")
        self._stack[len(self._stack) - count :] = [tuple(parts)]

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _get(self, place: int) -> None:
        if place not in self._memo:
            _fail("its pickle is damaged")
        self._stack.append(self._memo[place])

    def _global(self, name: str) -> None:
        name = name.replace(" ", ".")
        if name not in _CALLS and name.removeprefix("torch.") not in _STORAGES:
            _fail(f"its pickle names {name[:80]!r}, which tensors do not need")
        self._stack.append(_Name(name))

    def _persistent(self, _: None) -> None:
        """A storage, which is described by ('storage', class, key, device, number of numbers)."""
        match self._stack.pop():
            case ("storage", _Name(name), str(key), str(), int(count)) if 0 <= count < 1 << 48:
                self._stack.append(_Storage(name.removeprefix("torch."), key, count))
            case _:
                _fail("a storage in its pickle is damaged")

    def _call(self, _: None) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        if not isinstance(name, _Name) or name.name not in _CALLS:
            _fail("its pickle calls what is no function")
        self._stack.append(_CALLS[name.name](arguments))

    def _set_items(self, _: None) -> None:
        self._store(self._since_mark())

    def _set_item(self, _: None) -> None:
        value = self._stack.pop()
        self._store([self._stack.pop(), value])

    def _store(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str | int) for key in pairs[::2]):
            _fail("its pickle is damaged")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if key in target:
                _fail(f"the name {str(key)[:80]!r} occurs twice")
            target[key] = value

    def _extend(self, _: None) -> None:
        values = self._since_mark()
        if not isinstance(self._stack[-1], list):
            _fail("its pickle is damaged")
        self._stack[-1].extend(values)

    def _build(self, _: None) -> None:
        """Attributes of a dictionary, which are not needed."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            _fail("its pickle sets attributes of what is no dictionary")


def _rebuilt_tensor(arguments: Any) -> _View:
    match arguments:
        case (_Storage() as storage, int(offset), tuple(shape), tuple(strides), *_):
            numbers = (offset, *shape, *strides)
            if len(shape) == len(strides) <= 8 and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
                return _View(storage, offset, shape, strides)
    _fail("a tensor in its pickle is damaged")


def _rebuilt_parameter(arguments: Any) -> _View:
    match arguments:
        case (_View() as view, *_):
            return view
    _fail("a parameter in its pickle is damaged")


def _ordered(arguments: Any) -> dict[str, Any]:
    return {} if arguments == () else _fail("a dictionary in its pickle is damaged")


_CALLS: dict[str, Callable[[Any], Any]] = {
    "collections.OrderedDict": _ordered, "torch._utils._rebuild_tensor_v2": _rebuilt_tensor,
    "torch._utils._rebuild_parameter": _rebuilt_parameter}
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None, "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False}
_ARGUMENTS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine._protocol, "MARK": _Machine._mark, "TUPLE": _Machine._tuple,
    "TUPLE1": lambda machine, _: machine._short_tuple(1), "TUPLE2": lambda machine, _: machine._short_tuple(2),
    "TUPLE3": lambda machine, _: machine._short_tuple(3), "BINPUT": _Machine._put, "LONG_BINPUT": _Machine._put,
    "BINGET": _Machine._get, "LONG_BINGET": _Machine._get, "GLOBAL": _Machine._global,
    "BINPERSID": _Machine._persistent, "REDUCE": _Machine._call, "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items, "APPENDS": _Machine._extend, "BUILD": _Machine._build,
}
