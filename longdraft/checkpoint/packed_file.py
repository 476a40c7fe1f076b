"""Quantised matrices in the layout of the CPU kernels, in one file: quantising them takes seconds to minutes.

The file is a safetensors file of bytes, `<matrix>.tiles`, `.scale` and `.bias`, and at its end `sha256` over all of
them. It is written under another name and renamed when it is complete. A file that is damaged, or that has other
matrices than the model, is made anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from longdraft.checkpoint.tensor_file import TensorFile
from longdraft.errors import ModelError
from longdraft.kernels import Linear
from longdraft.kernels.cpu.kernels import CpuKernels
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.system.files import sync_file

log = logging.getLogger(__name__)
_PARTS = ("tiles", "scale", "bias", "order")
_CHECKSUM = "sha256"
_ABANDONED_S = 3600.0  # after its last write, an incomplete file has no process


class PackedFile:
    """The quantised matrices of a model, read from a file if it has them, and written to it otherwise.

    path  of the file, `<name>-<key>.safetensors`, where files with the same name and other keys are outdated
    """

    def __init__(self, path: Path, kernels: CpuKernels) -> None:
        self.path = path
        self._kernels = kernels
        self._file = self._checked_file()
        self._linears: dict[str, CpuLinear] = {}

    def linear(self, name: str, quantize: str, shape: tuple[int, int], has_bias: bool,
               make: Callable[[], Linear]) -> Linear:
        """The matrix `name` from the file, or what `make` returns if the file does not have it.

        shape  [N, K]
        """
        linear: Linear | None = None
        if self._file is not None and (linear := self._read(name, quantize, shape, has_bias)) is None:
            log.warning("%s does not have this model's matrices: quantising again", self.path)
            self._file = None
        linear = linear or make()
        assert isinstance(linear, CpuLinear)
        self._linears[name] = linear
        return linear

    def save(self) -> None:
        """Write the matrices to the file, unless it has them. What prevents it costs one log line."""
        linears, self._linears = self._linears, {}
        if self._file is not None:
            return
        partial = self.path.with_suffix(f".{os.getpid()}")
        size = sum(linear.nbytes for linear in linears.values())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self.path.parent).free) < size:
                raise OSError(f"it takes {size / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free")
            try:
                _write(partial, linears)
                os.replace(partial, self.path)
            finally:
                partial.unlink(missing_ok=True)
            log.info("the quantised weights are cached in %s, %.2f GiB", self.path, size / 2**30)
            self._remove_outdated()
        except OSError as error:
            log.warning("the quantised weights are not cached in %s: %s; --quantized-cache names another folder, or "
                        "none", self.path.parent, error.strerror or error)

    def _checked_file(self) -> TensorFile | None:
        """The file, if there is one and its checksum is right."""
        if not self.path.is_file():
            return None
        try:
            file = TensorFile(self.path)
            digest = hashlib.sha256()
            for name in file.entries:
                if name != _CHECKSUM:
                    digest.update(f"{name} ".encode())
                    digest.update(file.view(name).numpy().data)
            if _CHECKSUM in file.entries and file.view(_CHECKSUM).numpy().tobytes() == digest.digest():
                return file
            problem = "its checksum is wrong"
        except ModelError as error:
            problem = str(error)
        log.warning("the cached quantised weights %s are damaged (%s): quantising again", self.path, problem)
        return None

    def _read(self, name: str, quantize: str, shape: tuple[int, int], has_bias: bool) -> CpuLinear | None:
        """A matrix of the file; None if it is missing there, or has another size."""
        assert self._file is not None
        file = self._file
        order = f"{name}.order"
        linear = self._kernels.new_linear(quantize, *shape, has_bias, order in file.entries)
        for part, memory in _parts(name, linear):
            if part not in file.entries or file.entries[part].stop - file.entries[part].start != len(memory):
                return None
            memory[:] = file.view(part).numpy().data
            if part == order and sorted(memory.cast("i")) != list(range(shape[1])):
                return None
            file.forget(part)
        return linear

    def _remove_outdated(self) -> None:
        """Remove the files of other weights of this model, and what a process that was killed has left."""
        name, long_ago = self.path.stem.rsplit("-", 1)[0], time.time() - _ABANDONED_S
        for other in self.path.parent.glob(f"{name}-*"):
            is_abandoned = other.suffix[1:].isdigit() and other.stat().st_mtime < long_ago
            if (other.suffix == ".safetensors" and other != self.path) or is_abandoned:
                other.unlink(missing_ok=True)


def _parts(name: str, linear: CpuLinear) -> list[tuple[str, memoryview]]:
    """The names and bytes of what a matrix consists of."""
    return [(f"{name}.{part}", memory) for part, memory in zip(_PARTS, linear.memory(), strict=True) if len(memory)]


def _write(path: Path, linears: Mapping[str, CpuLinear]) -> None:
    parts = [part for name, linear in linears.items() for part in _parts(name, linear)]
    header = {}
    start = 0
    for name, size in (*((name, len(memory)) for name, memory in parts), (_CHECKSUM, 32)):
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    digest = hashlib.sha256()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, memory in parts:
            digest.update(f"{name} ".encode())
            digest.update(memory)
            file.write(memory)
        file.write(digest.digest())
        file.flush()
        sync_file(file.fileno())
