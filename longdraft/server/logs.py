"""The log: one line for each request and each text, as JSON or plain text. It never contains prompts or outputs."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("longdraft.server")
_FIELDS = "longdraft_fields"  # attribute of a log record that holds the event's fields


def log_event(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log one line: the event's name and its fields."""
    log.log(level, event, extra={_FIELDS: fields})


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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("longdraft").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _timestamp(entry: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(entry.created)) + f".{int(entry.msecs):03}Z"
