"""The log: a line for each request and each text, as JSON or for people. Never any text of a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("longdraft.server")
_FIELDS = "longdraft_fields"


def record(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line: what happened, and its figures."""
    log.log(level, event, extra={_FIELDS: fields})


class JsonLines(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        content = {"time": _time(entry), "level": entry.levelname.lower(), "logger": entry.name,
                   "event": entry.getMessage(), **getattr(entry, _FIELDS, {})}
        if entry.exc_info:
            content["traceback"] = self.formatException(entry.exc_info)
        return json.dumps(content, default=str)


class Lines(logging.Formatter):
    def format(self, entry: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_shown(value)}" for name, value in getattr(entry, _FIELDS, {}).items())
        trace = "\n" + self.formatException(entry.exc_info) if entry.exc_info else ""
        return f"{_time(entry)} {entry.levelname.lower():7} {entry.getMessage()} {fields}".rstrip() + trace


def _shown(value: Any) -> str:
    """In quotes where it could pass for more than one field, or one line: clients choose paths and names."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(" =\"'") else json.dumps(text)


def set_up(form: str, level: str) -> None:
    """Everything that longdraft and uvicorn log goes to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Lines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("longdraft").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _time(entry: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(entry.created)) + f".{int(entry.msecs):03}Z"
