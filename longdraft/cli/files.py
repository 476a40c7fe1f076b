"""Files that are either complete or clearly partial, and that are known to be writable before work begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from longdraft.errors import UsageError


class OutputFile:
    """Writes to `<path>.partial`; `finish` gives it its name. Devices and pipes are written directly."""

    def __init__(self, path: Path, option: str) -> None:
        self.path = path
        is_special = path.exists() and not path.is_file()
        self._partial = path if is_special else path.with_name(path.name + ".partial")
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder; give the name of a file")
        if path.is_file() and not os.access(path, os.W_OK):
            raise UsageError(f"{option} cannot write {path}: it is write-protected; choose another name")
        try:
            self._file: IO[bytes] = open(self._partial, "wb")  # noqa: SIM115 - held until `finish`
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{option} cannot write {path}: {reason}; choose another place") from error

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def finish(self) -> None:
        """What was written is all there is: give the file its name."""
        self._file.close()
        if self._partial != self.path:
            os.replace(self._partial, self.path)

    def abandon(self) -> None:
        """Nothing worth a name was written."""
        if not self._file.closed:
            self._file.close()
            if self._partial != self.path and self._partial.stat().st_size == 0:
                self._partial.unlink()


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt's text from the argument, a file, or standard input (`-`)."""
    import sys

    if prompt is not None and file is not None:
        raise UsageError("a prompt and --prompt-file are both given; give one of them")
    if prompt is not None:
        return prompt
    if file is None:
        raise UsageError("no prompt; give it as an argument or with --prompt-file FILE ('-' reads stdin)")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"--prompt-file cannot read {file}: {error.strerror or error}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt-file {file} is not UTF-8 text (byte {error.start}); convert it first") from error
