"""Output files, which are complete or named `.partial` and are opened before work begins; and input texts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from longdraft.errors import OutputError, UsageError, check

_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS


class OutputFile:
    """Writes to `<path>.partial`, which `finish` renames to `path`. Devices and pipes are written directly."""

    def __init__(self, path: Path, option: str) -> None:
        self._option = option
        require_file_name(path, option)
        try:
            # Write to the target of a symbolic link (/dev/stdout is one) instead of replacing the link.
            self.path = Path(os.path.realpath(path))
            is_special = str(path).startswith("/dev/") or (self.path.exists() and not self.path.is_file())
            if self.path.is_dir():
                raise UsageError(f"{option} {path} is a folder; give the name of a file")
            if self.path.is_file() and not os.access(self.path, os.W_OK):
                raise UsageError(f"{option} cannot write {path}: it is write-protected; choose another name")
            self._partial = path if is_special else self.path.with_name(self.path.name + ".partial")
            # Open, and locked, until `finish` or `abandon`.
            self._file: IO[bytes]
            if is_special:
                self._file = open(self._partial, "wb")  # noqa: SIM115
            else:
                self._file = os.fdopen(open_locked(self._partial, os.O_WRONLY, lock_if_possible), "wb")
                self._file.truncate()
        except BlockingIOError as error:
            raise UsageError(f"{option} cannot write {path}: another process is writing it; wait for that, or choose "
                             "another name") from error
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{option} cannot write {path}: {reason}; choose another place") from error
        self._is_special = is_special

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def finish(self) -> None:
        """The file is complete: rename it to `path`. It gets the mode of the file that it replaces."""
        try:
            if not self._is_special:
                sync_file(self._file.fileno())  # else a power failure could leave an empty file of this name
            self._file.close()
            if not self._is_special:
                if self.path.exists():
                    os.chmod(self._partial, self.path.stat().st_mode)
                os.replace(self._partial, self.path)
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> OutputError:
        message = f"{self._option} cannot write {self.path}: {error.strerror or error}"
        kept = "" if self._is_special else f"; what was written so far is in {self._partial}"
        return OutputError(message + kept)

    def abandon(self) -> None:
        """Close the file under its `.partial` name, or delete it if it is empty."""
        if self._file.closed:
            return
        with contextlib.suppress(OSError):
            if not self._is_special and os.fstat(self._file.fileno()).st_size == 0:
                self._partial.unlink()  # while locked, so it is not another process's file
        with contextlib.suppress(OSError):
            self._file.close()


def lock(file: int) -> None:
    """Lock a file until it is closed. BlockingIOError if another process has locked it."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def open_locked(path: Path, flags: int, lock_file: Callable[[int], None] = lock) -> int:
    """Open a file, created if necessary, and lock it. Raises OSError; see `lock`."""
    while True:
        file = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock_file(file)
            if os.path.exists(path) and os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # another process replaced, renamed or deleted it meanwhile: try again


def lock_if_possible(file: int) -> None:
    """As `lock`, where the file system has locks."""
    try:
        lock(file)
    except BlockingIOError:
        raise
    except OSError:
        pass  # a file system without locks


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read it. OSError for a pipe or a device, which may never end, or block the thread that opens it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(file, "rb")


def sync_file(file: int) -> None:
    """What was written to an open file is on the disk when this returns. Raises OSError.

    On macOS fsync leaves it in the drive's cache, which a power failure loses. Where a file system refuses the stronger
    operation, fsync is what there is.
    """
    if _FULL_SYNC is not None:
        try:
            fcntl.fcntl(file, _FULL_SYNC)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY):
                raise
    os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of files created or renamed in it are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_file(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name for a new file, which gets the name `path` after the block: it is complete and on the disk then. If the
    block fails, it is removed. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        with partial.open("rb") as file:
            sync_file(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """A file with this content, all of it or nothing. Raises OSError."""
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_synced(path: Path, data: bytes) -> None:
    """Append to a file, which may be new; the data is on the disk when this returns. Raises OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND, 0o666)
    try:
        append_synced(file, data)
    finally:
        os.close(file)


def append_synced(file: int, data: bytes) -> None:
    """Write to an open file; the data is on the disk when this returns. Raises OSError."""
    remainder = memoryview(data)
    while remainder:
        remainder = remainder[os.write(file, remainder) :]
    sync_file(file)


def require_file_name(path: Path, option: str) -> None:
    """UsageError for `-`, which means stdout where a text may go there."""
    check(str(path) != "-", option, "-", "the name of a file", "it is not written to stdout")


def named_folder(name: str | Path) -> Path:
    """The folder of this name. UsageError for an empty name, which would mean the current folder, and other types."""
    check(isinstance(name, str | Path) and str(name) != "", "the folder's path", name, "a path such as work",
          "'.' is the current folder")
    return Path(name)


def open_outputs(paths: Mapping[str, Path | None]) -> dict[str, OutputFile]:
    """Open the file of each option that has a path: option -> file. UsageError if two options name the same file."""
    files: dict[str, OutputFile] = {}
    try:
        for option, path in paths.items():
            if path is None:
                continue
            twin = next((name for name, file in files.items() if file.path == Path(os.path.realpath(path))), None)
            if twin and not str(path).startswith("/dev/"):
                raise UsageError(f"{twin} and {option} both name {path}; give each its own file")
            files[option] = OutputFile(path, option)
    except UsageError:
        for file in files.values():
            file.abandon()
        raise
    return files


def read_prompt(prompt: str | None, file: str | None, name: str = "prompt") -> str:
    """The prompt's text from the argument, a file, or standard input (`-`). UsageError if there is not exactly one.

    name  what the text is, whose file `--NAME-file` names
    """
    option = f"--{name}-file"
    if prompt is not None and file is not None:
        raise UsageError(f"a {name} and {option} are both given; give one of them")
    if prompt is not None:
        require_text(prompt, f"the {name}", f"put it into a UTF-8 file and give {option}")
        return prompt
    if file is None:
        raise UsageError(f"no {name}; give it as an argument or with {option} FILE ('-' reads stdin)")
    return read_text(file, option)


def read_text(file: str, option: str) -> str:
    """The text of the UTF-8 file that `option` names, or of standard input (`-`). UsageError if it cannot be read.

    A byte-order mark is no text.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{option} cannot read {file}: {error.strerror or error}; give a text file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{option} {file} is not UTF-8 text (byte {error.start}); convert it first") from error


def lone_surrogate(text: str) -> int | None:
    """The index of the first lone surrogate, or None. JSON escapes can contain one, and Python represents bytes that
    are not UTF-8 by them (PEP 383), but valid text has none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def require_text(text: str, name: str, cure: str) -> None:
    """Raise UsageError if a command-line argument has bytes that are not UTF-8."""
    if lone_surrogate(text) is not None:
        raise UsageError(f"{name} is not UTF-8 text; {cure}")
