"""Writes a journal. Only one process at a time can open a journal for writing.

Each record is passed to the operating system in one write, before its tokens are shown, so killing the process loses no
shown token. The `fsync` policy limits what a power failure can lose. If a write fails, the file is truncated to its
last complete record and nothing more is written, so the text can be resumed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from longdraft.errors import BusyJournalError, JournalError, OutputError, UsageError, check
from longdraft.journal import format as form
from longdraft.journal.format import Closing, Header, JournalContent, Run, RunningHash
from longdraft.journal.snapshot_folder import remove_snapshot
from longdraft.system.files import open_regular, sync_file, sync_folder

if TYPE_CHECKING:
    from longdraft.journal.snapshot import Snapshot  # imports PyTorch

log = logging.getLogger(__name__)
_PARTIAL = form.FILE + ".partial"  # the name until the header is complete
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 40, 0.005  # `is_being_written` holds a shared lock for an instant
_STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_PATH_CHECK_INTERVAL_S = 1.0  # between checks that the file is still at its path


def resume_hint(folder: Path) -> str:
    return f"resume it with: longdraft resume {shlex.quote(str(folder))}"


def is_being_written(folder: Path) -> bool:
    """Whether a process has the journal open for writing. JournalError if the system cannot say."""
    try:
        with open_regular(folder / form.FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise JournalError(f"the journal {folder} cannot be read: {error.strerror or error}") from error
    return False


def remove_journal(folder: Path) -> None:
    """Remove a journal, and its folder if nothing else is in it. Other files in the folder stay.

    BusyJournalError if a process is writing the journal, OutputError if it cannot be removed.
    """
    try:
        with contextlib.suppress(FileNotFoundError), open_regular(folder / form.FILE) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            for name in (_PARTIAL, form.FILE):
                (folder / name).unlink(missing_ok=True)
        remove_snapshot(folder)
    except BlockingIOError as error:
        raise _busy(folder) from error
    except OSError as error:  # such as a file system that became read-only
        raise OutputError(f"the journal {folder} cannot be removed: {error.strerror or error}") from error
    with contextlib.suppress(OSError):
        folder.rmdir()


def parse_fsync(policy: str | float) -> float:
    """Seconds between two calls of fsync: `always` is 0, `never` infinity, else a number above 0. Raises UsageError."""
    names = {"always": 0.0, "never": math.inf}
    try:
        seconds = names[policy] if isinstance(policy, str) and policy in names else float(policy)
    except (TypeError, ValueError):
        seconds = math.nan
    check(seconds >= 0 and (policy in names or 0 < seconds < math.inf), "fsync", policy,
          "always, never, or seconds above 0")
    return seconds


class Journal:
    """Appends records to a journal and locks it against other writers. Use it as a context manager, or close it.

    snapshot  of the same text; None: it has none

    Methods raise OutputError if the operating system cannot write. The journal can still be resumed.
    """

    def __init__(self, folder: Path, file: int, size: int, digest: RunningHash, fsync: float) -> None:
        self.folder = folder
        self._path = folder / form.FILE
        self._file = file
        self._size = size
        self._digest = digest
        self._interval = fsync
        self._synced = self._looked = time.monotonic()
        self._is_closed = self._has_failed = False
        self._is_ours = False  # once it is closed: whether it lay at its path, though it had failed
        self._has_begun = True  # False: a damaged end was not cut off yet
        self.snapshot: Snapshot | None = None
        self._unwritten = 0, 0.0  # drafted tokens and seconds of steps without tokens

    @classmethod
    def create(cls, folder: Path, header: Header, run: Run, fsync: float = 1.0) -> Journal:
        """Create a journal; its folder may exist. Only its owner may read it, because it has the prompt.

        JournalError if the folder holds one, or another process is creating one; OutputError if the disk is full or
        fails; UsageError if the place cannot be used.
        """
        digest = RunningHash()
        content = form.MAGIC + form.encode_record(form.HEADER, form.dump_payload(header), digest)
        content += form.encode_record(form.RUN, form.dump_payload(run), digest)
        try:
            file = _create_file(folder, content)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            reason = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
                raise OutputError(f"the journal {folder} cannot be written: {reason}; free some space") from error
            raise UsageError(f"the journal {folder} cannot be written: {reason}; choose another place") from error
        return cls(folder, file, len(content), digest, fsync)

    @classmethod
    def open(cls, folder: Path, fsync: float = 1.0) -> tuple[Journal, JournalContent]:
        """Open an existing journal; returns it and its content. The file is not changed before `begin`.

        JournalError if there is none or its header is damaged, BusyJournalError if another process is writing it.
        """
        form.read_journal(folder)  # raises for a missing or damaged journal before it is locked
        path = folder / form.FILE
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except OSError as error:
            raise JournalError(f"the journal {folder} cannot be written: {error.strerror}; `longdraft inspect` reads "
                               "it, and a copy can be resumed") from error
        try:
            _lock(file, folder)
            with open(file, "rb", closefd=False) as reader:
                content = form.read_file(reader, path)
        except OSError as error:
            os.close(file)
            raise JournalError(f"the journal {folder} cannot be read: {error.strerror or error}") from error
        except JournalError:
            os.close(file)
            raise
        journal = cls(folder, file, content.size, content.digest, fsync)
        journal._has_begun = False
        return journal, content

    def begin(self, run: Run) -> None:
        """Start a run of this process: truncate the file to its valid records and write the run's record."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError as error:
            raise self._failure(error) from error
        self._has_begun = True
        self._put(form.RUN, form.dump_payload(run))

    def append(self, tokens: Sequence[int], drafted: int, seconds: float) -> None:
        """Write one step: its new token ids, the number of tokens drafted for it and the seconds it took.

        The figures of a step without tokens count for the next one.
        """
        drafted, seconds = self._unwritten[0] + drafted, self._unwritten[1] + seconds
        self._unwritten = (0, 0.0) if len(tokens) else (drafted, seconds)
        if not len(tokens):
            return
        self._put(form.TOKENS, form.dump_step(np.array(tokens, dtype=np.int32), drafted, seconds))
        if self.snapshot:
            self.snapshot.offer()

    def close_thought(self, closing: Closing) -> None:
        """Record that the text's thought closes on request, before any token that follows."""
        self._put(form.CLOSING, form.dump_payload(closing))

    def finish(self, reason: str) -> None:
        """Write the last record: the text is complete."""
        self._looked = -math.inf  # a complete text that is not in the journal must not go unnoticed
        self._put(form.FINISH, json.dumps({"finish_reason": reason}).encode())
        if self.snapshot:
            self.snapshot.close(keeps=False)
            self.snapshot = None

    def close(self) -> None:
        """Release the lock. All records are on the disk then, unless `fsync` is `never`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.snapshot:
            self.snapshot.close(keeps=True)
        try:
            try:
                if not self._has_failed:
                    self._check_path()
                    if self._interval < math.inf:
                        sync_file(self._file)
            except OSError:
                self._is_ours = self._lies_at_its_path()
                raise
            finally:
                os.close(self._file)
        except OSError as error:
            self._has_failed = True
            raise self._error(error) from error

    def discard(self) -> None:
        """Close the journal and remove it, unless another file lies in its place. Raises nothing: it has failed."""
        self._has_failed = True
        is_ours = self._is_ours or (not self._is_closed and self._lies_at_its_path())
        with contextlib.suppress(JournalError, OutputError):
            self.close()
            if is_ours:
                remove_journal(self.folder)

    def _lies_at_its_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except OSError:
            return False

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):  # a generation that was discarded before its first step
            self._is_closed = True
            with contextlib.suppress(OSError):
                os.close(self._file)

    def _put(self, kind: int, payload: bytes) -> None:
        assert not self._is_closed and not self._has_failed
        digest = self._digest.copy()
        record = form.encode_record(kind, payload, digest)
        try:
            _write(self._file, record)
            self._digest, self._size = digest, self._size + len(record)
            self._check_and_sync()
        except OSError as error:
            raise self._failure(error) from error

    def _check_and_sync(self) -> None:
        """Check the file's path and call fsync, each at its interval by the monotonic clock."""
        now = time.monotonic()
        if now - self._looked >= _PATH_CHECK_INTERVAL_S:
            self._looked = now
            self._check_path()
        if now - self._synced >= self._interval:
            sync_file(self._file)
            self._synced = time.monotonic()

    def _check_path(self) -> None:
        """If the file or its folder was removed, write the journal again from the file that is still open.

        OSError if the file is another one, or has another size than this writer gave it.
        """
        ours = os.fstat(self._file)
        if ours.st_size != self._size and self._has_begun:
            raise OSError(0, "another program has truncated it or written to it")
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            content = b"".join(_chunks(self._file, self._size))
            file = _create_file(self.folder, content)
            os.close(self._file)
            self._file = file
            log.warning("the journal %s had been removed; it was written again", self.folder)
            return
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            raise OSError(0, "another file lies in its place")

    def _failure(self, error: OSError) -> OutputError:
        """Allow no further record, and remove an incomplete one that the failed write may have left, if possible."""
        self._has_failed = True
        try:
            if os.fstat(self._file).st_size > self._size:
                os.ftruncate(self._file, self._size)
        except OSError:
            log.debug("%s ends in an incomplete record; reading stops there", self._path)
        return self._error(error)

    def _error(self, error: OSError) -> OutputError:
        return OutputError(f"the journal {self.folder} cannot be written: {error.strerror or error}")


def _create_file(folder: Path, content: bytes) -> int:
    """Create a journal with this content, locked; returns the open file. It gets its name only when it is complete."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if form.journal_exists(folder):
        raise JournalError(f"{folder} holds a journal already; {resume_hint(folder)}, or give another folder")
    partial = folder / _PARTIAL
    file = os.open(partial, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    is_ours = False
    try:
        try:
            _lock(file, folder)
        except OSError:  # a file system without locks: no process can be creating a journal there
            is_ours = True
            raise
        if form.journal_exists(folder):  # another process created it meanwhile
            raise JournalError(f"{folder} holds a journal already; give another folder")
        is_ours = True
        os.ftruncate(file, 0)
        _write(file, content)
        sync_file(file)
        os.replace(partial, folder / form.FILE)
        sync_folder(folder)
        for each in new:  # a folder's own name is in its parent
            sync_folder(each.parent)
    except BaseException:
        if is_ours:
            partial.unlink(missing_ok=True)
        os.close(file)
        raise
    return file


def _lock(file: int, folder: Path) -> None:
    """Lock the file. The operating system releases the lock when the process ends for any reason."""
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if attempt == _LOCK_ATTEMPTS - 1:
                raise _busy(folder) from error
        time.sleep(_LOCK_PAUSE_S)


def _busy(folder: Path) -> BusyJournalError:
    return BusyJournalError(f"the journal {folder} is being written, by another process or a generation that was not "
                            "closed; wait for it, or end it")


def _write(file: int, data: bytes) -> None:
    """Write all of `data`: one call may write only a part. (Python itself repeats interrupted calls.)"""
    remaining = memoryview(data)
    while remaining:
        count = os.write(file, remaining)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        remaining = remaining[count:]


def _chunks(file: int, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, at most 1 MiB at a time."""
    at = 0
    while at < size and (chunk := os.pread(file, min(size - at, 1 << 20), at)):
        at += len(chunk)
        yield chunk
