"""The log: one line for each request and each text, as JSON or plain text. It never contains prompts or outputs.

A thread writes the lines, so that a stderr that is not read delays neither requests nor texts.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from contextlib import suppress
from typing import Any

_MAX_LINES = 10_000  # that wait to be written; later ones are dropped and counted
_FLUSH_S = 1.0  # at the end of the process, for lines that were not written yet
log = logging.getLogger("longdraft.server")
_FIELDS = "longdraft_fields"  # attribute of a log record that holds the event's fields


def log_event(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one line: the event's name and its fields."""
    log.log(level, event, extra={_FIELDS: fields})


class BackgroundHandler(logging.Handler):
    """Writes lines to a file descriptor in a thread of its own."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()  # a signal handler may log, too
        self._num_dropped = 0
        threading.Thread(target=self._work, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= _MAX_LINES:
            self._num_dropped += 1
            return
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until the lines so far are written, but not for long: nothing may read them."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_S)

    def _work(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                line += f"\n{dropped} lines of the log were dropped, because nothing read them"
            remaining = f"{line}\n".encode(errors="backslashreplace")
            with suppress(OSError):  # nothing can read it any more
                while remaining:
                    remaining = remaining[os.write(self._file, remaining) :]


class JsonFormatter(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        content = {"time": _timestamp(entry), "level": entry.levelname.lower(), "logger": entry.name,
                   "event": entry.getMessage(), **getattr(entry, _FIELDS, {})}
        if entry.exc_info:
            content["traceback"] = self.formatException(entry.exc_info)
        return json.dumps(content, default=str)


class TextFormatter(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in getattr(entry, _FIELDS, {}).items())
        trace = "\n" + self.formatException(entry.exc_info) if entry.exc_info else ""
        return f"{_timestamp(entry)} {entry.levelname.lower():7} {entry.getMessage()} {fields}".rstrip() + trace


def _quoted(value: Any) -> str:
    """Quote values that could read as several fields or lines: clients choose paths and names."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(" =\"'") else json.dumps(text)


def configure_logging(form: str, level: str) -> None:
    """Write everything that longdraft and uvicorn log to stderr. form: "json" or "text"."""
    sys.stderr.flush()
    handler = BackgroundHandler(sys.stderr.fileno())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    ours = logging.getLogger("longdraft")
    ours.handlers.clear()
    ours.setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def flush_log() -> None:
    """Wait shortly until everything is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _timestamp(entry: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(entry.created)) + f".{int(entry.msecs):03}Z"
