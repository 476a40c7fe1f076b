"""The tensors of a model folder, in one safetensors file or in shards.

They are memory-mapped, read on use, and checked: type, shape, and that every number is finite.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from longdraft.errors import ModelError
from longdraft.model.config import read_json
from longdraft.model.tensor_file import FLOATS, TensorFile
from longdraft.parallel import Pick

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADS_PREFIX = "model.medusa_layers."  # TokenSwift's heads inside a whole-model checkpoint

ReadCallback = Callable[[int, int], None]  # called with (bytes read, bytes in all)


class TensorFiles:
    """The tensors of a folder by name. They are memory-mapped and read on use.

    single   name of the file, where the folder has no shards
    on_read  called with (bytes read, bytes in all) after each tensor
    """

    sha256: str | None = None  # set by `fingerprint.weights_sha256`

    def __init__(self, folder: Path, single: str = WEIGHTS, on_read: ReadCallback | None = None) -> None:
        self.folder = folder
        self.files = [TensorFile(path) for path in _weight_files(folder, single)]
        self._file_of: dict[str, TensorFile] = {}
        for file in self.files:
            for name in file.entries:
                if name in self._file_of:
                    raise ModelError(f"{name} is in {self._file_of[name].path} and in {file.path}; remove one of them")
                self._file_of[name] = file
        self._on_read = on_read
        self._read: set[str] = set()
        self._mapped = ""  # the tensor whose pages may be in memory

    def names(self) -> set[str]:
        return set(self._file_of)

    @property
    def nbytes(self) -> int:
        return sum(self._size(name) for name in self._file_of)

    @contextmanager
    def second_reading(self) -> Iterator[None]:
        """A context in which the tensors are read again, for a quantised copy: `on_read` counts from 0."""
        self._read = set()
        yield
        self._report(self.nbytes)

    def read(self, name: str, pick: Pick | None = None) -> Tensor:
        """A floating-point tensor, or the part that `pick` selects: a read-only view of the file, for immediate use.

        Raises ModelError for other types, and for values that are NaN or infinite. The rest of a tensor is not read.
        """
        file = self._file_of[name]
        if problem := self._wrong_type(name):
            raise ModelError(f"{file.path}: {problem}")
        tensor = self._view(name) if pick is None else pick(self._view(name))
        # A sum with a NaN or an infinity is not finite, and costs a fraction of reading the tensor. A finite tensor
        # whose sum overflows is counted as well, and passes.
        if not tensor.sum().isfinite() and (bad := int((~tensor.isfinite()).sum())):
            raise ModelError(f"{file.path}: {name} has {bad} values that are NaN or infinite: the file is damaged, or "
                             "its training failed; get it again")
        self._read.add(name)
        self._report(sum(map(self._size, self._read)))
        return tensor

    def _report(self, done: int) -> None:
        if self._on_read:
            self._on_read(done, self.nbytes)

    def integers(self, name: str) -> Tensor:
        """A tensor of whole numbers or truth values as int64. Raises ModelError for floating-point numbers."""
        tensor = self._view(name)
        if tensor.is_floating_point():
            raise ModelError(f"{self._file_of[name].path}: {name} has dtype {tensor.dtype}; allowed: whole numbers")
        return tensor.to(torch.int64, copy=True)

    def stack(self, names: Sequence[str], dtype: torch.dtype | None, picks: Sequence[Pick | None] = ()) -> Tensor:
        """Tensors, or the parts that `picks` select, concatenated along their rows in one dtype.

        Needs memory for the result and the part being read only. dtype None: that of the first tensor.
        """
        own = FLOATS[self._file_of[names[0]].entries[names[0]].dtype]
        dtype = dtype or own
        if len(names) == 1 and own == dtype:
            return self.read(names[0], *picks)
        picks = picks or [None] * len(names)
        shapes = [_picked(self.shape(name), pick) for name, pick in zip(names, picks, strict=True)]
        stacked = _temporary((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype)
        row = 0
        for name, pick, shape in zip(names, picks, shapes, strict=True):
            stacked[row : row + shape[0]] = self.read(name, pick)
            row += shape[0]
        self._release()
        return stacked

    def _view(self, name: str) -> Tensor:
        """A tensor as it is stored. Releases the pages of the previous one."""
        self._release()
        self._mapped = name
        return self._file_of[name].view(name)

    def _release(self) -> None:
        if self._mapped:
            self._file_of[self._mapped].forget(self._mapped)

    def _size(self, name: str) -> int:
        entry = self._file_of[name].entries[name]
        return entry.stop - entry.start

    def _wrong_type(self, name: str) -> str:
        dtype = self._file_of[name].entries[name].dtype
        return "" if dtype in FLOATS else f"{name} has dtype {dtype}; allowed: {', '.join(FLOATS)}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].entries[name].shape

    def check(self, expected: Mapping[str, tuple[int, ...]], present: Set[str], what: str) -> None:
        """Raise ModelError unless the tensors `present` are those of `expected`, in name and shape.

        what  the source of `expected`, for the message, which lists up to eight differences
        """
        both = sorted(expected.keys() & present)
        problems = [f"missing {name}" for name in sorted(expected.keys() - present)]
        problems += [f"unexpected {name}" for name in sorted(present - expected.keys())]
        problems += [f"{name} has shape {list(self.shape(name))}, not {list(expected[name])}"
                     for name in both if self.shape(name) != expected[name]]
        problems += [problem for name in both if (problem := self._wrong_type(name))]
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ModelError(f"{self.folder} does not match {what}: {shown}")

    def fingerprint(self) -> str:
        """SHA-256 over name, shape, dtype and bytes of every tensor, except those of heads."""
        digest = hashlib.sha256()
        for name in sorted(self.names()):
            if not name.startswith(HEADS_PREFIX):
                tensor = self._view(name)
                digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._release()
        return digest.hexdigest()


def _picked(shape: tuple[int, ...], pick: Pick | None) -> tuple[int, ...]:
    return shape if pick is None else tuple(pick(torch.empty(shape, device="meta")).shape)


def _temporary(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in its own memory mapping, which the system gets back as soon as the tensor is unused.

    The allocator would place temporaries between the packed weights. The holes they leave are too small for later
    weights, which costs 1.25 times the memory for a model of 80 MB.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=dtype, count=math.prod(shape)).view(shape)


def _weight_files(folder: Path, single: str) -> list[Path]:
    index = folder / INDEX
    names = shard_names(index) if single == WEIGHTS and index.exists() else [single]
    return [folder / name for name in names]


def shard_names(index: Path) -> list[str]:
    """The files that an index lists. Raises ModelError for paths, which could lead out of the folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(s, str) for s in shards.values()):
        raise ModelError(f"{index} must have a weight_map from tensor names to file names")
    names = sorted(set(shards.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} lists {name[:200]!r}; allowed: names of .safetensors files in its folder")
    return names


def dump_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
