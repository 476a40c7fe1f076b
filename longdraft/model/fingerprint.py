"""The hash of a model's weights, computed once for each state of its files.

Hashing reads every byte: seconds to minutes for a large model. The user's cache folder keeps the result beside what the
system says of the files. Whoever writes into a file changes its ctime, which nobody can set back; only a write in the
same tick of the clock could hide, so a hash of files that have just been written is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from longdraft.errors import ModelError
from longdraft.model.checkpoint import TensorFiles

_WORTH_KEEPING = 1 << 27  # bytes of weights; less is hashed in a fraction of a second
_TICK_S = 2.0  # longer than any file system's


def weights_sha256(files: TensorFiles) -> str:
    """`files.fingerprint()`, from the cache where the files are what they were.

    ModelError where they are not those that were loaded any more.
    """
    _require_unchanged(files)
    if not files.files or files.nbytes < _WORTH_KEEPING:
        return files.fingerprint()
    try:
        folder = cache_dir()
    except RuntimeError:  # a user without a home
        return files.fingerprint()
    state = _state(files)
    kept = folder / f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(kept.read_text(encoding="utf-8"))["sha256"])
    found = files.fingerprint()
    is_settled = max(ctime for *_, ctime in state) < (time.time() - _TICK_S) * 1e9
    if is_settled and _state(files) == state:
        with contextlib.suppress(OSError):  # a home that cannot be written to costs time, nothing else
            kept.parent.mkdir(parents=True, exist_ok=True)
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"sha256": found, "files": state}), encoding="utf-8")
            os.replace(partial, kept)
    return found


def _require_unchanged(files: TensorFiles) -> None:
    for file in files.files:
        try:
            there = os.stat(file.path)
        except OSError as error:
            raise ModelError(f"{file.path} is gone since it was loaded ({error.strerror}); give it back") from error
        about = file.about
        if ((there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns)
                != (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)):
            raise ModelError(f"{file.path} was replaced after it was loaded; load the model again")


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longdraft" / "fingerprints"


def _state(files: TensorFiles) -> list[tuple[str, int, int, int, int, int]]:
    """What changes when a file does: where it lies, and which, how large and how old it is."""
    found = []
    for file in files.files:
        path = Path(os.path.realpath(file.path))
        about = path.stat()
        found.append((str(path), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns))
    return found
