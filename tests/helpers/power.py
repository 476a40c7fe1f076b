"""A disk that loses what was not synced, for files and their names."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

SECTOR = 512


class Operation(NamedTuple):
    """What happened to a file, or to a name.

    create    `name` begins to be that of `file`          write     `data` at `offset` of `file`
    rename    `file` gets `name`, and loses `old`         truncate  `file` to `offset`
    confirm   `data` was promised to a user               sync      `file`, or the names in the folder `name`
    """

    kind: str
    file: int = -1
    name: str = ""
    old: str = ""
    offset: int = 0
    data: Any = b""


class Disk:
    """Replaces `os` in modules and `Path.write_bytes`, and notes what they do to files and names. `after_power_cut`
    builds what is left."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._files: dict[int, int] = {}  # inode -> number
        self._folders: dict[int, str] = {}  # open descriptor -> folder

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def under(self, *modules: ModuleType) -> AbstractContextManager[pytest.MonkeyPatch]:
        """The modules use this disk in the `with` block."""
        class Patched(pytest.MonkeyPatch):
            def __enter__(self) -> Patched:
                for module in modules:
                    self.setattr(module, "os", disk)
                    if hasattr(module, "sync_file"):
                        self.setattr(module, "sync_file", disk.fsync)
                self.setattr(Path, "write_bytes", lambda path, data: disk.write_bytes(path, data))
                return self

            def __exit__(self, *error: object) -> None:
                self.undo()

        disk = self
        return Patched()

    def confirm(self, data: Any) -> None:
        self.operations.append(Operation("confirm", data=data))

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        is_new = not os.path.exists(path)
        file = os.open(path, flags, mode)
        if os.path.isdir(path):
            self._folders[file] = str(path)
            return file
        inode = os.fstat(file).st_ino
        if is_new or inode not in self._files:
            self._files[inode] = len(self.operations)
            self.operations.append(Operation("create", self._files[inode], str(path)))
        elif flags & os.O_TRUNC:
            self.operations.append(Operation("truncate", self._files[inode]))
        return file

    def close(self, file: int) -> None:
        self._folders.pop(file, None)
        os.close(file)

    def write(self, file: int, data: bytes) -> int:
        offset = os.fstat(file).st_size
        done = os.write(file, data)
        self.operations.append(Operation("write", self._number(file), offset=offset, data=bytes(data[:done])))
        return done

    def write_bytes(self, path: Path, data: bytes) -> None:
        file = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            assert self.write(file, data) == len(data)
        finally:
            self.close(file)

    def ftruncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)
        self.operations.append(Operation("truncate", self._number(file), offset=size))

    def fsync(self, file: int) -> None:
        folder = self._folders.get(file, "")
        self.operations.append(Operation("sync", -1 if folder else self._number(file), folder))

    def replace(self, old: Any, new: Any) -> None:
        number = self._files[os.stat(old).st_ino]
        os.replace(old, new)
        self.operations.append(Operation("rename", number, str(new), str(old)))

    def link(self, old: Any, new: Any) -> None:
        os.link(old, new)
        self.operations.append(Operation("create", self._files[os.stat(old).st_ino], str(new)))

    def _number(self, file: int) -> int:
        return self._files[os.fstat(file).st_ino]


def after_power_cut(operations: list[Operation], keeps: Callable[[], bool]) -> dict[str, bytes]:
    """The files by name. keeps: called for each sector, truncation and name that was not synced."""
    last_sync = {(each.file, each.name): i for i, each in enumerate(operations) if each.kind == "sync"}
    contents: dict[int, bytearray] = {}
    names: dict[str, int] = {}
    for i, each in enumerate(operations):
        if each.kind in ("create", "rename"):
            if i < last_sync.get((-1, str(Path(each.name).parent)), -1) or keeps():
                names.pop(each.old, None)
                names[each.name] = each.file
            continue
        is_synced, content = i < last_sync.get((each.file, ""), -1), contents.setdefault(each.file, bytearray())
        if each.kind == "truncate" and (is_synced or keeps()):
            del content[each.offset :]
        elif each.kind == "write":
            start, end = each.offset, each.offset + len(each.data)
            while start < end:
                stop = min(end, (start // SECTOR + 1) * SECTOR)
                if is_synced or keeps():
                    content.extend(bytes(max(0, stop - len(content))))
                    content[start:stop] = each.data[start - each.offset : stop - each.offset]
                start = stop
    return {name: bytes(contents.get(file, b"")) for name, file in names.items()}


def power_cuts(operations: list[Operation], turns: int = 6):
    """After each operation, several power cuts: (what was confirmed until then, the files that are left).

    The first two of a place keep nothing and everything that was not synced.
    """
    for cut in range(len(operations) + 1):
        done = operations[:cut]
        confirmed = [each.data for each in done if each.kind == "confirm"]
        for turn in range(turns):
            chance = random.Random(100 * cut + turn)
            keeps = [lambda: False, lambda: True][turn] if turn < 2 else lambda chance=chance: chance.random() < 0.5
            yield confirmed, after_power_cut(done, keeps)
