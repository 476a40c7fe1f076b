"""The hash of a model's weights, cached in the user's cache folder.

Hashing reads every byte, which takes seconds to minutes for a large model. The cache entry records the files' status.
Any write to a file changes its ctime, which programs cannot set. Only a write within the same clock tick could go
unnoticed, so the hash of files that were just written is not cached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from longdraft.checkpoint.tensor_source import TensorSource
from longdraft.errors import ModelError

_MIN_CACHED_BYTES = 1 << 27  # smaller weights are hashed in a fraction of a second
_TICK_S = 2.0  # longer than the time resolution of any file system


def weights_sha256(files: TensorSource) -> str:
    """SHA-256 of the weights: `files.fingerprint()`, computed once in a process, and cached on the disk.

    Raises ModelError if the files have been replaced between their opening and the first call.
    """
    if files.sha256 is None:
        files.sha256 = _hash(files)
    return files.sha256


def _hash(files: TensorSource) -> str:
    _require_unchanged(files)
    if not files.files or files.nbytes < _MIN_CACHED_BYTES:
        return files.fingerprint()
    try:
        folder = cache_dir()
    except RuntimeError:  # the user has no home folder
        return files.fingerprint()
    state = _status(files)
    kept = folder / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(kept.read_text(encoding="utf-8"))["sha256"])
    found = files.fingerprint()
    is_settled = max(ctime for *_, ctime in state) < (time.time() - _TICK_S) * 1e9
    if is_settled and _status(files) == state:
        write_cached(kept, {"sha256": found, "files": state})
    return found


def _require_unchanged(files: TensorSource) -> None:
    for file in files.files:
        try:
            current = os.stat(file.path)
        except OSError as error:
            raise ModelError(f"{file.path} was removed after it was loaded ({error.strerror}); restore it") from error
        if any(getattr(current, name) != getattr(file.stat, name)
               for name in ("st_dev", "st_ino", "st_size", "st_mtime_ns")):
            raise ModelError(f"{file.path} was replaced after it was loaded; load the model again")


def cache_dir(name: str = "fingerprints") -> Path:
    """A folder of the user's cache, of the hashes or another. Raises RuntimeError if the user has no home folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longdraft" / name


def write_cached(file: Path, content: object) -> None:
    """Write JSON to a file of the user's cache folder, all of it or nothing. A folder that is not writable costs only
    time."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(content), encoding="utf-8")
        os.replace(partial, file)


def _status(files: TensorSource) -> list[tuple[str, int, int, int, int, int]]:
    """Path, device, inode, size, mtime and ctime of each file, some of which change when the file does."""
    found = []
    for file in files.files:
        path = Path(os.path.realpath(file.path))
        about = path.stat()
        found.append((str(path), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    return found
