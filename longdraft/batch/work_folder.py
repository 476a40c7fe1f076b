"""A job's work folder: which job it belongs to, what it holds, and its removal. Other files in it are left alone.

    job.json          the job's settings and its output
    engine.json       the identity of its workers
    journals/HASH/    texts that were started, by a hash of the row's id
    attempts/HASH     how many tokens the row had each time a worker started it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longdraft.errors import JournalError, OutputError, UsageError
from longdraft.journal.writer import remove_journal
from longdraft.system.files import sync_folder, write_synced

_JOB, ENGINE = "job.json", "engine.json"
_JOURNALS, _ATTEMPTS = "journals", "attempts"
_HASH = re.compile("[0-9a-f]{32}")
_PARTIAL = re.compile("(job|engine)[.][0-9a-f]{32}")


def journals(work: Path) -> Path:
    return work / _JOURNALS


def journal(work: Path, key: str) -> Path:
    return journals(work) / _file_name(key)


def attempts(work: Path, key: str) -> Path:
    return work / _ATTEMPTS / _file_name(key)


def _file_name(key: str) -> str:
    """A row's id as the name of a file: ids may hold any character."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def require_same_job(work: Path, output: Path, settings: Mapping[str, Any], *, begin: bool) -> None:
    """Check that the folder belongs to this job with the same settings: rows without their own would differ otherwise.

    begin  save this job's settings if the folder has none; otherwise a folder without a job passes the check

    Raises UsageError if the folder belongs to another output, the settings differ, or it cannot be used.
    """
    # The output's path is relative to the work folder, so that both can be moved together.
    relative = os.path.relpath(os.path.realpath(output.parent) + f"/{output.name}", os.path.realpath(work))
    ours = json.loads(json.dumps({"output": relative, **settings}))
    path = work / _JOB
    try:
        begun = write_once(path, ours) if begin else _read(path) if path.exists() else ours
    except OSError as error:
        raise UsageError(f"the work folder {work} cannot be used: {error.strerror or error}; give another with "
                         "--work") from error
    if not isinstance(begun.get("output"), str):
        raise _unknown_content(path)
    if begun["output"] != relative:
        other = os.path.normpath(os.path.realpath(work) + f"/{begun['output']}")
        raise UsageError(f"the work folder {work} belongs to the job of {other}, which is not done; give each job its "
                         "own with --work")
    if unlike := [f"{name} was {begun.get(name)}, now {ours[name]}" for name in ours
                  if begun.get(name) != ours[name]]:
        raise UsageError(f"the job in {work} has other settings: {'; '.join(unlike)}; give the same ones, or another "
                         "output")


def write_once(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON file, which the first process of the job writes. Raises OSError, or UsageError if the file
    holds something else."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # journals have prompts
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        write_synced(partial, json.dumps(content).encode())
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # atomic: the file is whole from the start, and never replaced
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _unknown_content(path)
    return content


def _unknown_content(path: Path) -> UsageError:
    return UsageError(f"{path} was not written by a batch job; give another folder with --work, or remove the file")


@contextlib.contextmanager
def translate_storage_errors(work: Path) -> Iterator[None]:
    """Raise OutputError for an OSError in the work folder: it is not a row's error, and ends the job."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"the work folder {work} cannot be used: {error.strerror or error}; start the job again to "
                          "continue with what was written") from error


def forget(work: Path, key: str) -> None:
    """Remove a row's files after its record is on the disk."""
    with contextlib.suppress(OSError, OutputError, JournalError):
        remove_journal(journal(work, key))
    attempts(work, key).unlink(missing_ok=True)


def forget_attempts(work: Path) -> None:
    """Remove the attempts of earlier runs, which may have ended for any reason."""
    for path in _matching(work / _ATTEMPTS, _HASH):
        path.unlink()


def remove_work_folder(work: Path) -> None:
    """Remove the files of a finished job, job.json last, and the folder if it is empty then."""
    with contextlib.suppress(OSError, OutputError, JournalError):  # the records are whole; remaining files do no harm
        for path in _matching(work / _JOURNALS, _HASH):
            remove_journal(path)
        forget_attempts(work)
        for path in [*_matching(work, _PARTIAL), work / ENGINE, work / _JOB]:
            path.unlink(missing_ok=True)
    for folder in (work / _JOURNALS, work / _ATTEMPTS, work):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _matching(folder: Path, names: re.Pattern[str]) -> list[Path]:
    return [folder / name for name in os.listdir(folder) if names.fullmatch(name)] if folder.is_dir() else []
