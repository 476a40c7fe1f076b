"""The folder of journals: summaries for the list and the page, and removal of old journals."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from longdraft.errors import BusyJournalError, JournalError, OutputError
from longdraft.journal.format import FILE, JournalContent, read_journal
from longdraft.journal.snapshot_folder import remove_snapshot, snapshot_bytes
from longdraft.journal.writer import is_being_written, remove_journal
from longdraft.server.logs import log, log_event
from longdraft.server.settings import ServerSettings
from longdraft.text.stream import TextStream
from longdraft.text.thought_rules import new_thought
from longdraft.text.tokenizer import Tokenizer

_EXCERPT = 80  # length of an excerpt in characters
_PRUNE_INTERVAL_S = 600.0
# Nothing is removed for its age before both hold: until then the clock may be ahead, as after a boot without network.
_TRUST_S = 3600.0  # the server runs for so long
_RECENT_S = 86400.0  # the newest journal is no older


class JournalFolder:
    """Reads journals. A journal that has not changed is not read again."""

    def __init__(self, root: Path, tokenizer: Tokenizer) -> None:
        self.root = root
        self._tokenizer = tokenizer
        self._began = self._pruned = time.monotonic()
        self._num_bytes = self._num_finished = 0  # at the last pruning, and what was written or kept since
        self._summaries: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {}  # name -> (mtime, size), summary
        self._lock = threading.Lock()  # requests, pruning and the engine run in different threads

    def names(self) -> list[str]:
        """Names of all journals, newest first."""
        names_by_time = []
        try:
            for folder in self.root.iterdir() if self.root.is_dir() else ():
                with contextlib.suppress(OSError):
                    names_by_time.append(((folder / FILE).stat().st_mtime, folder.name))
        except OSError as error:
            raise OutputError(f"the folder of journals cannot be read: {error.strerror or error}") from error
        return [name for _, name in sorted(names_by_time, reverse=True)]

    def list(self, active: Collection[str] = ()) -> list[dict[str, Any]]:
        """A summary of each journal, newest first.

        active  names to leave out: texts that are being written here
        """
        names = [name for name in self.names() if name not in active]
        existing = set(names)
        with self._lock:
            self._summaries = {name: known for name, known in self._summaries.items() if name in existing}
        return [self.summary(name) for name in names]

    def summary(self, name: str) -> dict[str, Any]:
        """State, size and speed of a text. For a journal that cannot be read, the error."""
        path = self.root / name / FILE
        try:
            stat = path.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            with self._lock:
                known, summary = self._summaries.get(name, (None, {}))
            is_live = known is not None and known != version and is_being_written(self.root / name)
            if known != version and not is_live:  # a live one would be read again each time
                summary = self._summarise(name, read_journal(self.root / name))
                with self._lock:
                    self._summaries[name] = version, summary
            if summary["state"] == "cut" and (is_live or is_being_written(self.root / name)):
                return summary | {"state": "running", "resumable": False}
            return summary
        except (JournalError, OSError, ValueError, OverflowError) as error:  # a damaged header may have any content
            message = str(error).replace(f"{self.root}/", "")  # the server's folders are not the client's business
            return {"id": name, "state": "unreadable", "resumable": False, "error": message}

    def _summarise(self, name: str, content: JournalContent) -> dict[str, Any]:
        header, seconds = content.header, sum(step.seconds for step in content.steps)
        return {
            "id": name,
            "state": "finished" if content.finish else "cut",
            "resumable": content.finish is None,
            "title": prompt_excerpt(self._tokenizer, header.prompt),
            "created": datetime.fromisoformat(content.runs[0].began).timestamp() if content.runs else None,
            "model": Path(header.model).name,
            "drafter": header.drafter,
            "prompt_tokens": len(header.prompt),
            "new_tokens": len(content.tokens),
            "max_new_tokens": header.params.max_new_tokens,
            "seed": header.params.seed,
            "finish_reason": content.finish,
            "decode_seconds": seconds,
            "tokens_per_second": len(content.tokens) / seconds if seconds else 0.0,
            "mean_accepted_length": len(content.tokens) / len(content.steps) if content.steps else 0.0,
        }

    def detail(self, name: str) -> dict[str, Any]:
        """The summary, the settings and the text so far; `message` is the question of a chat that has just one. Raises
        JournalError for an unreadable journal."""
        content = read_journal(self.root / name)
        header = content.header
        detail = self.summary(name) | {"sampling": header.sampling, "exactness": header.exactness}
        if header.tokenizer == self._tokenizer.sha256:
            stream = TextStream(self._tokenizer, content.params, header.eos_token_ids,
                                new_thought(self._tokenizer, content.params, header.prompt))
            written = stream.push(content.tokens.tolist())
            template = self._tokenizer.chat_template
            message = template and template.only_message(self._tokenizer.decode(header.prompt, shows_special=True))
            detail |= {"prompt": self._tokenizer.decode(header.prompt), "prompt_ids": header.prompt, "message": message,
                       "text": written.text, "tokens": list(written.tokens), "pieces": list(written.pieces)}
        return detail

    def remove(self, name: str) -> None:
        """Remove a journal. BusyJournalError if it is being written, OutputError if it cannot be removed."""
        remove_journal(self.root / name)
        log_event("journal_removed", id=name)

    def count(self, num_bytes: int = 0, num_finished: int = 0) -> None:
        """Texts wrote so many bytes, and so many finished ones are kept."""
        with self._lock:
            self._num_bytes += num_bytes
            self._num_finished += num_finished

    def is_due(self, settings: ServerSettings) -> bool:
        """Whether it is time to prune: at intervals, and as soon as there may be too many or too large journals."""
        return (time.monotonic() - self._pruned > _PRUNE_INTERVAL_S or self._num_bytes > settings.journals_bytes
                or self._num_finished > settings.keep_finished)

    def prune(self, settings: ServerSettings) -> None:
        """Remove journals beyond the settings' number, age and size. Those that are being written remain."""
        self._pruned = time.monotonic()
        states = {summary["id"]: summary["state"] for summary in self.list()}
        ages, sizes = {}, {}
        for name in states:
            with contextlib.suppress(OSError):
                stat = (self.root / name / FILE).stat()
                ages[name], sizes[name] = time.time() - stat.st_mtime, stat.st_size
        finished, cut = ([name for name in ages if states[name] == state] for state in ("finished", "cut"))
        is_clock_trusted = self._pruned - self._began > _TRUST_S and min(ages.values(), default=0.0) < _RECENT_S
        removed = finished[settings.keep_finished :] + [
            name for name in cut if ages[name] > settings.keep_cut_s and is_clock_trusted]
        excess = sum(sizes.values()) - sum(sizes[name] for name in removed) - settings.journals_bytes
        for name in (*reversed(finished), *reversed(cut)):  # the oldest first
            if excess > 0 and name not in removed:
                removed.append(name)
                excess -= sizes[name]
        kept = set(ages)
        for name in removed:
            try:
                self.remove(name)
                kept.discard(name)
            except BusyJournalError:  # resumed meanwhile
                pass
            except (JournalError, OutputError) as error:  # one of them must not keep the others
                log.warning("an old journal cannot be removed: %s", error)
        with self._lock:
            self._num_bytes = sum(sizes[name] for name in kept)
            self._num_finished = sum(name in kept for name in finished)
        excess = sum(snapshot_bytes(self.root / name) for name in kept) - settings.snapshots.max_bytes
        for name in sorted(kept, key=lambda name: -ages[name]):
            with contextlib.suppress(JournalError, OSError):
                if excess > 0 and not is_being_written(self.root / name):
                    excess -= snapshot_bytes(self.root / name)
                    remove_snapshot(self.root / name)


def has_space(folder: Path, floor: int) -> bool:
    """Whether the disk of a folder has at least `floor` free bytes. An unknown amount counts as enough."""
    try:
        return shutil.disk_usage(folder).free >= floor
    except OSError:
        return True


def prompt_excerpt(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The end of a prompt on one line, as a title; of a chat, the end of its last message."""
    ids = ids[-2 * _EXCERPT :]  # the markup behind a message has far fewer tokens than characters are shown
    template = tokenizer.chat_template
    message = template.last_message(tokenizer.decode(ids, shows_special=True)) if template else None
    text = " ".join((tokenizer.decode(ids) if message is None else message).split())
    return "…" + text[-_EXCERPT:] if len(text) > _EXCERPT else text
