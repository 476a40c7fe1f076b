"""A job's work folder: whose it is, what lies in it, and its end. What others keep in the same folder is left alone.

    job.json          what the job was begun with, and the output that it belongs to
    engine.json       what its writers are
    journals/HASH/    texts that were begun, by a hash of the row's id
    attempts/HASH     how far the row was each time that somebody began to write it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longdraft.errors import OutputError, UsageError

_JOB, ENGINE = "job.json", "engine.json"
_JOURNALS, _ATTEMPTS = "journals", "attempts"
_HASH = re.compile("[0-9a-f]{32}")
_PARTIAL = re.compile("(job|engine)[.][0-9a-f]{32}")


def journal(work: Path, key: str) -> Path:
    return work / _JOURNALS / _name(key)


def attempts(work: Path, key: str) -> Path:
    return work / _ATTEMPTS / _name(key)


def _name(key: str) -> str:
    """An id as the name of a file: ids may hold any letters."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def agree(work: Path, output: Path, settings: Mapping[str, Any], *, begin: bool) -> None:
    """A job goes on as it was begun: rows without settings of their own would differ otherwise.

    begin  note what this job is, where nobody has; else a folder without a job is well too

    UsageError where the folder belongs to another output, or the settings were others, or it cannot be used.
    """
    # As seen from the folder, so that both may be moved together.
    place = os.path.relpath(os.path.realpath(output.parent) + f"/{output.name}", os.path.realpath(work))
    ours = json.loads(json.dumps({"output": place, **settings}))
    path = work / _JOB
    try:
        begun = note(path, ours) if begin else noted(path) if path.exists() else ours
    except OSError as error:
        raise UsageError(f"the work folder {work} cannot be used: {error.strerror or error}; give another with "
                         "--work") from error
    if not isinstance(begun.get("output"), str):
        raise _strange(path)
    if begun["output"] != place:
        whose = os.path.normpath(os.path.realpath(work) + f"/{begun['output']}")
        raise UsageError(f"the work folder {work} belongs to the job of {whose}, which is not done; give each job its "
                         "own with --work")
    if unlike := [f"{name} was {begun.get(name)}, now {ours[name]}" for name in ours
                  if begun.get(name) != ours[name]]:
        raise UsageError(f"the job in {work} was begun otherwise: {'; '.join(unlike)}; give the same, or another "
                         "output")


def note(path: Path, ours: Mapping[str, Any]) -> dict[str, Any]:
    """What the job's first process noted in this file: ours, where nobody was faster. OSError, or see `noted`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        partial.write_text(json.dumps(ours), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)  # whole from the moment it has its name, and never replaced
    finally:
        partial.unlink(missing_ok=True)
    return noted(path)


def noted(path: Path) -> dict[str, Any]:
    """UsageError where the file is nobody's note."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _strange(path)
    return found


def _strange(path: Path) -> UsageError:
    return UsageError(f"{path} is no note of a job; give another folder with --work, or remove the file")


@contextlib.contextmanager
def told(work: Path) -> Iterator[None]:
    """What the system refuses in the folder is no row's fault, and ends the job: OutputError."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"the work folder {work} cannot be used: {error.strerror or error}; what is there stands, "
                          "start the job again to go on") from error


def forget(work: Path, key: str) -> None:
    """The row's record is on the disk."""
    shutil.rmtree(journal(work, key), ignore_errors=True)
    attempts(work, key).unlink(missing_ok=True)


def forget_attempts(work: Path) -> None:
    """Of earlier runs: what ended them may have been anything."""
    for path in _own(work / _ATTEMPTS, _HASH):
        path.unlink()


def remove(work: Path) -> None:
    """The job is done. What it made goes, its name last; the folder too where nothing else is in it."""
    with contextlib.suppress(OSError):  # the records are whole; what is left does no harm
        for path in _own(work / _JOURNALS, _HASH):
            shutil.rmtree(path)
        forget_attempts(work)
        for path in [*_own(work, _PARTIAL), work / ENGINE, work / _JOB]:
            path.unlink(missing_ok=True)
    for folder in (work / _JOURNALS, work / _ATTEMPTS, work):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _own(folder: Path, names: re.Pattern[str]) -> list[Path]:
    return [folder / name for name in os.listdir(folder) if names.fullmatch(name)] if folder.is_dir() else []
