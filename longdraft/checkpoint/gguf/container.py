"""The container of a GGUF file: its metadata and its table of tensors, read through a memory mapping.

A file is untrusted. Every length and every count is compared with the bytes that are left before anything of that size
is read or allocated, and every tensor must begin where the one before it ends.

Layout, little-endian: `GGUF`, version, number of tensors, number of pairs; the pairs (key, type, value); the entries of
the tensors (name, shape, type, offset); padding; the data.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from longdraft.checkpoint.gguf import ollama
from longdraft.checkpoint.gguf.types import REFUSED, TYPES, Array, BlockType, TensorEntry
from longdraft.checkpoint.memory import map_file, require_bytes
from longdraft.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_KEY = 1 << 16  # bytes
_MAX_NAME = 64  # bytes of a tensor's name
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20
_ALIGNMENT = 32
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_PAIR, _LEAST_TENSOR = 13, 32  # bytes of the shortest possible ones
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 10_000
_MAX_SAID = 1000  # characters of a message, which may contain a text of the file


class GgufFile:
    """One GGUF file, memory-mapped.

    values   the metadata: int, float, bool, str or Array by key
    tensors  the entries by name
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is not a sound GGUF file of the supported types."""
        self.path = path
        self.stat, self.map = map_file(path, "GGUF", least=24)
        header = _Header(path, self.map)
        self.values = header.values
        self.tensors = header.tensors

    def array(self, key: str) -> list[Any]:
        """The values of an array; of strings, those must be valid UTF-8. ModelError if there is no such array."""
        stored = self.values.get(key)
        if not isinstance(stored, Array):
            raise ModelError(f"{self.path}: {key} is {'missing' if stored is None else 'no array'}; get the file again")
        kind, count, start = stored
        require_bytes(self.map, len(self.map), self.path)
        if kind != _STRING:
            numbers = np.frombuffer(self.map, dtype=np.dtype("<" + _NUMBERS[kind]), count=count, offset=start)
            return [bool(n) for n in numbers] if kind == _BOOL else list(numbers.tolist())
        texts = []
        for _ in range(count):
            stop = start + 8 + int.from_bytes(self.map[start : start + 8], "little")
            try:
                texts.append(self.map[start + 8 : stop].decode())
            except UnicodeDecodeError as error:
                raise ModelError(f"{self.path}: {key} has a text that is not UTF-8; get the file again") from error
            start = stop
        return texts


class _Header:
    """Reads the header once, from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        if data[:4] != MAGIC:
            self._fail(f"it begins with {data[:4]!r}, not with {MAGIC!r}", "give a model folder or a GGUF file")
        self._at = 4
        version, num_tensors, num_pairs = self._numbers("IQQ")
        if not version & 0xFFFF:
            self._fail("its numbers are big-endian", "get a little-endian file")
        if version not in _VERSIONS:
            self._fail(f"its version is {version}; allowed: 2 or 3", "convert the model again")
        left = self._size - self._at
        if num_pairs * _LEAST_PAIR + num_tensors * _LEAST_TENSOR > left:
            self._fail(f"it claims {num_pairs:,} pairs and {num_tensors:,} tensors in {left:,} bytes")
        self.values: dict[str, Any] = {}
        for _ in range(num_pairs):
            self._pair()
        alignment = self.values.get("general.alignment", _ALIGNMENT)
        if (not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1)):
            self._fail(f"general.alignment is {alignment!r}; allowed: a power of two up to {_MAX_ALIGNMENT:,}")
        entries = [self._tensor() for _ in range(num_tensors)]
        self.tensors = self._placed(entries, alignment)

    def _pair(self) -> None:
        key = self._name(_MAX_KEY, "a key")
        if key in self.values:
            self._fail(f"the key {key!r} occurs twice")
        kind, = self._numbers("I")
        self.values[key] = self._array(key) if kind == _ARRAY else self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._text(self._size, key)
        if kind not in _NUMBERS:
            self._fail(f"{key} has the unknown type {kind}")
        value, = self._numbers(_NUMBERS[kind])
        if kind == _BOOL:
            if value > 1:
                self._fail(f"{key} is a truth value of {value}; allowed: 0 or 1")
            return bool(value)
        return value

    def _array(self, key: str) -> Array:
        kind, count = self._numbers("IQ")
        start = self._at
        if kind == _STRING:
            self._skip_texts(key, count)
        elif kind in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[kind]), key)
        else:
            self._fail(f"{key} is an array of type {kind}; allowed: numbers, truth values and texts")
        return Array(kind, count, start)

    def _skip_texts(self, key: str, count: int) -> None:
        if count * 8 > self._size - self._at:
            self._fail(f"{key} claims {count:,} texts in {self._size - self._at:,} bytes")
        data, at, size = self._data, self._at, self._size
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
            if at > size:
                self._fail(f"a text of {key} reaches beyond the end of the file")
        self._at = at

    def _tensor(self) -> tuple[str, BlockType, tuple[int, ...], int]:
        name = self._name(_MAX_NAME, "a tensor's name")
        count, = self._numbers("I")
        if not 1 <= count <= _MAX_DIMENSIONS:
            self._fail(f"{name} has {count} dimensions; allowed: 1 to {_MAX_DIMENSIONS}")
        sizes = self._numbers(f"{count}Q")
        kind, offset = self._numbers("IQ")
        if min(sizes) < 1 or math.prod(sizes) >= 1 << 63:
            self._fail(f"{name} has the shape {list(sizes)}; allowed: sizes of 1 or more, less than 2**63 numbers")
        if kind not in TYPES:
            raise ModelError(f"{self._path}: {name} has type {REFUSED.get(kind, kind)}; supported: "
                             f"{', '.join(known.name for known in TYPES.values())}")
        if sizes[0] % TYPES[kind].block:
            self._fail(f"{name} has rows of {sizes[0]}, which is no multiple of the {TYPES[kind].block} numbers of a "
                       f"{TYPES[kind].name} block")
        return name, TYPES[kind], tuple(reversed(sizes)), offset

    def _placed(self, entries: Sequence[tuple[str, BlockType, tuple[int, ...], int]],
                alignment: int) -> dict[str, TensorEntry]:
        start = _padded(self._at, alignment)
        offset = 0
        placed: dict[str, TensorEntry] = {}
        for name, kind, shape, claimed in entries:
            if name in placed:
                self._fail(f"the tensor {name!r} occurs twice")
            if claimed != offset:
                self._fail(f"{name} begins at {claimed:,}, but the tensors before it end at {offset:,}")
            nbytes = math.prod(shape) // kind.block * kind.nbytes
            if start + offset + nbytes > self._size:
                self._fail(f"{name} ends at byte {start + offset + nbytes:,} of {self._size:,}")
            placed[name] = TensorEntry(kind, shape, start + offset, start + offset + nbytes)
            offset += _padded(nbytes, alignment)
        return placed

    def _numbers(self, form: str) -> tuple[Any, ...]:
        packed = struct.Struct("<" + form)
        at = self._at
        self._skip(packed.size, "the header")
        return packed.unpack_from(self._data, at)

    def _name(self, limit: int, what: str) -> str:
        """A text that messages may contain as it is."""
        name = self._text(limit, what)
        if not name.isprintable():
            self._fail(f"{what} is {name[:80]!r}; allowed: printable characters")
        return name

    def _text(self, limit: int, what: str) -> str:
        length, = self._numbers("Q")
        if length > limit:
            self._fail(f"{what} has {length:,} bytes; allowed: {limit:,}")
        at = self._at
        self._skip(length, what)
        return self._data[at : self._at].decode(errors="replace")

    def _skip(self, count: int, what: str) -> None:
        if count > self._size - self._at:
            self._fail(f"{what} reaches beyond the end of the file")
        self._at += count

    def _fail(self, problem: str, cure: str = "the file is damaged or incomplete, get it again") -> NoReturn:
        raise ModelError(f"{self._path} is not a readable GGUF file: {problem[:_MAX_SAID]}; {cure}")


def _padded(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment


class Gguf:
    """A model in GGUF: one file, or all parts of a split one. The metadata is that of the first part.

    Keys and names are those of llama.cpp, also of a file that Ollama's converter wrote.

    path   the (first) file
    files  all parts
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        first = GgufFile(path)
        count = first.values.get("split.count", 1)
        if count in (0, 1):
            self.files = [first]
        else:
            self.files = _parts(path, first, count)
            first, self.path = self.files[0], self.files[0].path
        self._first = first
        names = Counter(name for file in self.files for name in file.tensors)
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise ModelError(f"{self.path}: the tensor {twice!r} is in two parts of the split file")
        ollama.translate(first.values, [file.tensors for file in self.files], first.array)

    @property
    def values(self) -> dict[str, Any]:
        return self._first.values

    def array(self, key: str) -> list[Any]:
        return self._first.array(key)

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return {name: entry for file in self.files for name, entry in file.tensors.items()}

    def owner(self, name: str) -> GgufFile:
        """The file that holds a tensor."""
        return next(file for file in self.files if name in file.tensors)

    def floats(self, name: str, count: int) -> list[float]:
        """A tensor of `count` F32 numbers. Raises ModelError for another one, and for numbers that are not positive."""
        entry = self.tensors.get(name)
        if entry is None or entry.type.name != "F32" or entry.shape != (count,):
            self.fail(f"{name} must be a tensor of {count} F32 numbers")
        file = self.owner(name)
        require_bytes(file.map, entry.stop, file.path)
        numbers = list(struct.unpack_from(f"<{count}f", file.map, entry.start))
        if not all(math.isfinite(number) and number > 0 for number in numbers):
            self.fail(f"{name} has numbers that are not finite and positive")
        return numbers

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {problem[:_MAX_SAID]}")


def _parts(path: Path, opened: GgufFile, count: Any) -> list[GgufFile]:
    """All parts of a split file, in order. `opened`: the part at `path`."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if not match or not isinstance(count, int) or int(match["count"]) != count or not 2 <= count <= _MAX_PARTS:
        raise ModelError(f"{path} says split.count {count!r}; the parts of a split file must be named "
                         "NAME-00001-of-0000N.gguf")
    files = []
    for number in range(1, count + 1):
        other = path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf")
        if not other.is_file():
            raise ModelError(f"{other} is missing; put all {count} parts of the split file into one folder")
        file = opened if other == path else GgufFile(other)
        if file.values.get("split.no") != number - 1 or file.values.get("split.count") != count:
            raise ModelError(f"{other} does not say that it is part {number} of {count}; get the file again")
        files.append(file)
    total = sum(len(file.tensors) for file in files)
    if (said := files[0].values.get("split.tensors.count", total)) != total:
        raise ModelError(f"{path}: the parts hold {total} tensors, split.tensors.count says {said!r}; get them again")
    return files


def open_gguf(path: Path) -> Gguf:
    """The GGUF model at a path. The header of a file that has not changed is parsed once."""
    try:
        about = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    return _opened(path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=4)
def _opened(path: Path, *status: int) -> Gguf:
    return Gguf(path)
