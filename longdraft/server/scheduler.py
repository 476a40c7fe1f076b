"""Who is written next: the one thread that the engine works in.

Texts wait in order of arrival until there is a place and memory for all that their caches may come to hold. Those that
run are written side by side: each round, one forward has the rows of all (longdraft/batching.py), so that each gets a
piece of its work done, a step, a draft or a part of its prompt. Between rounds texts come and go.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from typing import Any

from longdraft.core import Event
from longdraft.engine import Engine
from longdraft.errors import LongdraftError
from longdraft.journal import is_there
from longdraft.server.errors import ApiError, Cancelled, busy
from longdraft.server.jobs import End, Job
from longdraft.server.logs import log, record
from longdraft.server.metrics import Metrics
from longdraft.server.settings import Settings

_REMEMBERED = 100  # ended texts that can still be inspected


class Scheduler:
    """Runs jobs. Everything public may be called from any thread."""

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics) -> None:
        self.is_draining = False
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._batch = engine.batch()
        self._ended: deque[Job] = deque(maxlen=_REMEMBERED)
        self._reserved = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        metrics.gauge("num_requests_running", "Texts that are written in turns.", lambda: len(self._running))
        metrics.gauge("num_requests_waiting", "Texts that wait.", lambda: len(self._waiting))
        metrics.gauge("kv_cache_usage_perc", "Reserved share of the memory for caches.",
                      lambda: self._reserved / settings.memory_bytes)
        metrics.gauge("kv_cache_bytes", "Bytes that caches hold.", self._cache_bytes)
        metrics.gauge("tokens_remaining", "Tokens that running texts may still write.",
                      lambda: sum(job.remaining_tokens for job in self._running))
        metrics.gauge("eta_seconds", "Until the last running text is whole.",
                      lambda: max((job.eta_seconds or 0.0 for job in self._running), default=0.0))

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_jobs(self) -> int:
        with self._changed:
            return len(self._waiting) + len(self._running)

    def jobs(self) -> list[Job]:
        """The latest first."""
        with self._changed:
            return [*reversed(self._waiting), *reversed(self._running), *reversed(self._ended)]

    def position(self, job: Job) -> int:
        """How many wait before it."""
        with self._changed:
            return self._waiting.index(job) if job in self._waiting else 0

    def submit(self, jobs: list[Job]) -> None:
        """All of a request's texts or none. ApiError where they do not fit."""
        with self._changed:
            if self.is_draining or not self.is_alive:
                raise busy("the server is shutting down; ask again in a moment", "draining", 503)
            largest = max(job.plan.num_bytes for job in jobs)
            if largest > self._settings.memory_bytes:
                raise ApiError(400, f"prompt and max_tokens need {largest:,} bytes of memory for their cache; allowed: "
                               f"{self._settings.memory_bytes:,}; shorten the prompt or write fewer tokens",
                               param="max_tokens", code="memory_exceeded")
            free = max(0, self._settings.max_running - len(self._running) - len(self._waiting))
            if len(self._waiting) + len(jobs) > self._settings.max_queued + free:
                self._metrics.failed("overloaded")
                raise busy(f"{len(self._waiting)} texts wait already; allowed: {self._settings.max_queued}; ask again "
                           "later", "queue_full")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job, reason: BaseException | None = None) -> None:
        """Leave a text; what it held is free when its present step is done."""
        with self._changed:
            if job.ended is not None or job.cancelled is not None:
                return
            job.cancelled = reason or Cancelled()
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, "cancelled", job.cancelled)
            self._changed.notify()

    def drain(self) -> None:
        """Take nothing new."""
        with self._changed:
            self.is_draining = True

    def close(self) -> None:
        """End what runs, with a journal of each, and stop."""
        self.drain()
        for job in self.jobs():
            self.cancel(job, busy(_GONE, "draining", 503))
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self.is_alive:
            self._thread.join(timeout=30)

    def _work(self) -> None:
        try:
            while self._admit():
                self.round()
        except BaseException:
            log.exception("the engine thread has ended; no text can be written any more")
            raise
        finally:
            for job in self.jobs():
                if job.ended is None:
                    self._end(job, "failed", RuntimeError("the engine thread has ended"))

    def _admit(self) -> bool:
        """Wait until there is something to do; False when there never will be again."""
        with self._changed:
            while True:
                while self._waiting and self._fits(self._waiting[0]):
                    job = self._waiting.popleft()
                    job.started = time.monotonic()
                    self._reserved += job.plan.num_bytes
                    self._running.append(job)
                    self._metrics.queued.observe(job.started - job.arrived)
                self._expire()
                if self._running:
                    return True
                assert self._reserved == 0, "nobody runs, so nobody holds memory"
                if self._is_closing:
                    return False
                self._changed.wait(timeout=1.0 if self._waiting else None)

    def _fits(self, job: Job) -> bool:
        return (len(self._running) < self._settings.max_running
                and self._reserved + job.plan.num_bytes <= self._settings.memory_bytes)

    def _expire(self) -> None:
        """Texts whose time is up."""
        now = time.monotonic()
        for job in [*self._waiting, *self._running]:
            if job.deadline is not None and now > job.deadline:
                self.cancel(job, ApiError(408, f"the text was not whole in time{_how(job)}", code="timeout"))

    def round(self) -> None:
        """Let go of who has to leave, begin with who has come, and do a piece of everybody's work."""
        for job in list(self._running):
            if job.cancelled is not None:
                self._leave(job, job.cancelled)
            elif job.generation is None:
                self._begin(job)
        by_number = {job.number: job for job in self._running}
        try:
            events = self._batch.step() if self._batch else []
        except Exception as error:  # of no text in particular: a bug, and none can go on
            events = []
            for job in by_number.values():
                self._fail(job, error)
        for number, event in events:
            job = by_number[number]
            if job.ended is not None:  # it failed with an event before
                continue
            try:
                if event.error is not None:
                    raise event.error
                self._tell(job, event)
            except Exception as error:  # one text's failure is nobody else's
                self._fail(job, error)

    def _begin(self, job: Job) -> None:
        try:
            job.number = self._batch.admit(job.begin())
        except Exception as error:
            self._fail(job, error)

    def _tell(self, job: Job, event: Event) -> None:
        now, metrics = time.monotonic(), self._metrics
        seconds = job.note(event)
        if event.sources and job.generation and job.num_tokens > job.generation.num_resumed:
            metrics.generation_tokens.inc(len(event.tokens))
            metrics.stepped(event.drafted, event.num_accepted)
            if seconds is None:
                metrics.first_token.observe(now - job.arrived)
                metrics.prompt_tokens.inc(job.plan.prompt_tokens)
            else:
                metrics.waited(seconds, len(event.tokens))
        job.stats = event.stats
        job.outlet.put(job, event)
        if event.finish_reason:
            metrics.ended(event.finish_reason)
            metrics.whole.observe(now - job.arrived)
            self._close(job)
            if job.plan.journal and not job.plan.keeps:
                shutil.rmtree(job.plan.journal, ignore_errors=True)
            self._end(job, "finished", None)

    def _leave(self, job: Job, reason: BaseException) -> None:
        """Nobody waits for this text any more, or it has to go. One that the server itself ends can be resumed, and so
        can one that has a journal and was not merely hung up on."""
        generation, folder = job.generation, job.plan.journal
        self._close(job)
        is_ours, keeps = isinstance(reason, ApiError), job.plan.keeps or getattr(reason, "keeps", False)
        if is_ours and generation is not None and folder is None and self._settings.journals:
            folder = self._settings.journals / job.id
            try:
                self._engine.keep(generation, folder)
                job.plan = job.plan._replace(journal=folder)
            except LongdraftError as error:
                record("journal_failed", id=job.id, error=str(error))
        elif not is_ours and folder is not None and not keeps:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(reason, ApiError) and job.resume_id and "resume" not in str(reason):
            reason = ApiError(reason.status_code, f"{reason}{_how(job)}", code=reason.code,
                              headers=dict(reason.headers or {}))
        self._end(job, "cancelled", reason)

    def _fail(self, job: Job, error: Exception) -> None:
        """Our bugs go to the log in full, other failures in a line."""
        is_known = isinstance(error, LongdraftError | MemoryError | ApiError)
        log.error("a text failed: %s", type(error).__name__, exc_info=None if is_known else error)
        self._close(job)
        error.__traceback__ = None  # whose frames would hold the text's caches
        self._metrics.failed("out_of_memory" if isinstance(error, MemoryError) else type(error).__name__)
        self._end(job, "failed", error)

    def _close(self, job: Job) -> None:
        generation, job.generation = job.generation, None
        try:
            if job.number in self._batch:
                self._batch.remove(job.number)
            elif generation is not None:
                generation.close()
        except Exception as error:
            log.error("a text could not be closed: %s", error)

    def _end(self, job: Job, state: str, error: BaseException | None) -> None:
        with self._changed:
            job.state, job.ended = state, time.monotonic()
            if job in self._running:
                self._running.remove(job)
                self._reserved -= job.plan.num_bytes
            self._ended.append(job)
        record("text", id=job.id, state=state, user=job.user, prompt_tokens=job.plan.prompt_tokens,
               new_tokens=job.num_tokens, seconds=round(job.ended - job.arrived, 4),
               finish_reason=(job.stats or {}).get("finish_reason"), error=type(error).__name__ if error else None)
        if state == "cancelled":
            self._metrics.failed("cancelled")
        job.outlet.put(job, End(error))

    def _cache_bytes(self) -> float:
        generations = [job.generation for job in list(self._running)]
        return float(sum(generation.cache_bytes for generation in generations if generation is not None))

    def figures(self) -> dict[str, Any]:
        """For the page and for /ready."""
        with self._changed:
            return {"running": len(self._running), "waiting": len(self._waiting), "draining": self.is_draining,
                    "reserved_bytes": self._reserved, "memory_bytes": self._settings.memory_bytes}


_GONE = "the server is shutting down"


def _how(job: Job) -> str:
    has_journal = job.resume_id and job.plan.journal and is_there(job.plan.journal)  # one that waits has none yet
    return f"; go on with POST /v1/longdraft/generations/{job.resume_id}/resume" if has_journal else ""
