"""The journals of a folder, as the list and the page show them."""

from __future__ import annotations

import shutil
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

from longdraft.engine import Engine
from longdraft.errors import JournalError
from longdraft.journal import FILE, Found, is_being_written, read
from longdraft.server.logs import record
from longdraft.text_stream import TextStream

_TITLE = 80  # tokens and letters


class Journals:
    """Reads what is there. Files that have not changed are not read again."""

    def __init__(self, root: Path, engine: Engine) -> None:
        self.root = root
        self._engine = engine
        self._known: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._lock = threading.Lock()  # of `_known`: requests and pruning read in threads of their own

    def names(self) -> list[str]:
        """The latest first."""
        found = []
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            try:
                found.append(((folder / FILE).stat().st_mtime, folder.name))
            except OSError:
                continue
        return [name for _, name in sorted(found, reverse=True)]

    def list(self) -> list[dict[str, Any]]:
        """A summary of each; of one that cannot be read, why."""
        names = self.names()
        there = set(names)
        with self._lock:
            self._known = {name: known for name, known in self._known.items() if name in there}
        return [self.summary(name) for name in names]

    def summary(self, name: str) -> dict[str, Any]:
        path = self.root / name / FILE
        try:
            about = path.stat()
            state = (about.st_mtime_ns, about.st_size)
            with self._lock:
                known, summary = self._known.get(name, (None, {}))
            if known != state:
                summary = self._summary(name, read(self.root / name))
                with self._lock:
                    self._known[name] = state, summary
            if summary["state"] == "cut" and is_being_written(self.root / name):
                return summary | {"state": "running", "resumable": False}
            return summary
        except (JournalError, OSError) as error:
            return {"id": name, "state": "unreadable", "resumable": False, "error": _plain(str(error), self.root)}

    def _summary(self, name: str, found: Found) -> dict[str, Any]:
        header, seconds = found.header, sum(step.seconds for step in found.steps)
        return {
            "id": name,
            "state": "finished" if found.finish else "cut",
            "resumable": found.finish is None,
            "title": title(self._engine, header.prompt),
            "created": datetime.fromisoformat(found.runs[0].began).timestamp() if found.runs else None,
            "model": Path(header.model).name,
            "drafter": header.drafter,
            "prompt_tokens": len(header.prompt),
            "new_tokens": len(found.tokens),
            "max_new_tokens": header.params.max_new_tokens,
            "seed": header.params.seed,
            "finish_reason": found.finish,
            "decode_seconds": seconds,
            "tokens_per_second": len(found.tokens) / seconds if seconds else 0.0,
            "mean_accepted_length": len(found.tokens) / len(found.steps) if found.steps else 0.0,
        }

    def detail(self, name: str) -> dict[str, Any]:
        """The summary, the settings and the text so far. JournalError where there is none."""
        found = read(self.root / name)
        header = found.header
        detail = self.summary(name) | {"sampling": header.sampling, "exactness": header.exactness}
        if header.tokenizer == self._engine.tokenizer.sha256:
            writing = TextStream(self._engine.tokenizer, header.params, header.eos_token_ids)
            written = writing.push(found.tokens.tolist())
            detail |= {"prompt": self._engine.tokenizer.decode(header.prompt), "text": written.text,
                       "tokens": list(written.tokens), "pieces": list(written.pieces)}
        return detail

    def remove(self, name: str) -> None:
        shutil.rmtree(self.root / name)
        record("journal_removed", id=name)

    def prune(self, keep: int) -> None:
        """Remove finished journals but the `keep` latest. What was cut stays until somebody removes it."""
        finished = [each["id"] for each in self.list() if each["state"] == "finished"]
        for name in finished[keep:]:
            self.remove(name)


def title(engine: Engine, ids: list[int]) -> str:
    """The end of a prompt, for people."""
    text = " ".join(engine.tokenizer.decode(ids[-_TITLE:]).split())
    return "…" + text[-_TITLE:] if len(text) > _TITLE or len(ids) > _TITLE else text


def _plain(message: str, root: Path) -> str:
    """Without the server's own folders."""
    return message.replace(f"{root}/", "")
