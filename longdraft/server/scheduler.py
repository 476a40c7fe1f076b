"""Admission, and the one thread that runs the engine.

Jobs wait in order of arrival for a free place and for memory: a job starts once its caches fit at their largest size.
Running jobs share each round, which is one forward with rows of all of them (longdraft/engine/batching.py). Between
rounds, jobs join and leave.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from longdraft.engine.engine import Engine
from longdraft.engine.generation import Generation
from longdraft.errors import LongdraftError, OutputError, UsageError
from longdraft.journal import format as form
from longdraft.request.events import Event
from longdraft.server.admission import REST
from longdraft.server.errors import ApiError, Cancelled, retry_later
from longdraft.server.jobs import GenerationJob
from longdraft.server.journals import JournalFolder, has_space
from longdraft.server.logs import log, log_event
from longdraft.server.metrics import ServerMetrics
from longdraft.server.settings import ServerSettings

_MAX_ENDED = 100  # ended jobs that remain visible
_PROMPT_TOKEN_BYTES = 7  # of a journal's header, in JSON, about
_PAUSE_S = 0.005  # where no text is in the batch yet
_SLOW_S = 0.02  # of a text's own work in a round: masks of a hard grammar take up to 0.4 s
_GRAMMAR_SHARE = 0.75  # of the memory, for texts with a grammar: their matchers are counted as large as they may get
_STALLED_S = 60.0  # without a round, although texts run: something is wrong


class Scheduler:
    """Runs jobs. Any thread may call its public methods."""

    def __init__(self, engine: Engine, settings: ServerSettings, metrics: ServerMetrics,
                 journals: JournalFolder | None = None) -> None:
        """journals: counts what texts write to it."""
        self._journals = journals
        self.is_draining = False
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._changed = threading.Condition()  # guards the next five fields
        self._waiting: deque[GenerationJob] = deque()
        self._running: list[GenerationJob] = []
        self._ended: deque[GenerationJob] = deque(maxlen=_MAX_ENDED)
        self._reserved = 0  # bytes, of the running jobs
        self._is_closing = False
        self._last_round = time.monotonic()  # when the last round ended, or the engine thread last had nothing to do
        self._batch = engine.batch()
        self._tree = engine.loaded.prefixes
        self._resuming = ThreadPoolExecutor(1, "resume")
        self._resuming_rests_until = 0.0  # monotonic time
        self._slow_rest_until = 0.0  # monotonic time, of all texts whose own work is long
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._add_gauges()

    def _add_gauges(self) -> None:
        add = self._metrics.add_gauge
        add("num_requests_running", "Texts being generated.", lambda: len(self._running))
        add("num_requests_waiting", "Texts in the queue.", lambda: len(self._waiting))
        add("kv_cache_usage_perc", "Share of the memory budget that is reserved.",
            lambda: self._reserved / self._settings.memory_bytes)
        add("kv_cache_bytes", "Bytes in use by caches.", self._cache_bytes)
        if self._tree is not None:
            add("prefix_cache_bytes", "Bytes of the prefix tree.", lambda: self._tree.nbytes if self._tree else 0)
        add("tokens_remaining", "Tokens that running texts may still generate.",
            lambda: sum(job.remaining_tokens for job in self._running))
        add("eta_seconds", "Estimated time until the last running text is finished.",
            lambda: max((job.eta_seconds or 0.0 for job in self._running), default=0.0))

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_jobs(self) -> int:
        """Waiting and running jobs."""
        with self._changed:
            return len(self._waiting) + len(self._running)

    def jobs(self) -> list[GenerationJob]:
        """Waiting, running and recently ended jobs, newest first."""
        with self._changed:
            return [*reversed(self._waiting), *reversed(self._running), *reversed(self._ended)]

    def position(self, job: GenerationJob) -> int:
        """Number of jobs ahead of it in the queue."""
        with self._changed:
            return self._waiting.index(job) if job in self._waiting else 0

    def load(self) -> dict[str, Any]:
        """Jobs and memory in use, for /ready and the page."""
        with self._changed:
            return {"running": len(self._running), "waiting": len(self._waiting), "draining": self.is_draining,
                    "problem": self._problem(),
                    "reserved_bytes": self._reserved, "memory_bytes": self._settings.memory_bytes}

    def _problem(self) -> str | None:
        """Why new texts would not be written now; None if they would."""
        if not self.is_alive:
            return "the engine thread has ended"
        if self.is_draining:
            return "the server is shutting down"
        seconds = time.monotonic() - self._last_round
        if self._running and seconds > _STALLED_S:
            return f"no step has ended for {seconds:.0f} s"
        return None

    def submit(self, jobs: list[GenerationJob]) -> None:
        """Admit all jobs of a request. Raises ApiError, and admits none, when they do not fit."""
        with self._changed:
            if self.is_draining or not self.is_alive:
                raise retry_later("the server is shutting down; retry in a moment", "draining", 503)
            largest = max(job.num_bytes for job in jobs)
            if largest > self._settings.memory_bytes:
                raise ApiError(400, f"prompt and max_tokens need {largest:,} bytes of memory for their cache; allowed: "
                               f"{self._settings.memory_bytes:,}; shorten the prompt or lower max_tokens",
                               param="max_tokens", code="memory_exceeded")
            free = max(0, self._settings.max_running - len(self._running) - len(self._waiting))
            if len(self._waiting) + len(jobs) > self._settings.max_queued + free:
                self._metrics.count_failure("overloaded")
                raise retry_later(f"{len(self._waiting)} texts are queued; allowed: {self._settings.max_queued}; retry "
                                  "later", "queue_full")
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, job: GenerationJob, reason: BaseException | None = None) -> None:
        """Cancel a job. Its memory is free after the current round. Ended jobs ignore this."""
        with self._changed:
            if job.ended is not None or job.cancelled is not None:
                return
            job.cancelled = reason or Cancelled()
            if job in self._waiting:
                self._waiting.remove(job)
                self._end(job, "cancelled", job.cancelled)
            self._changed.notify()

    def drain(self) -> None:
        """Stop admitting jobs."""
        with self._changed:
            self.is_draining = True

    def close(self) -> None:
        """Cancel all jobs, keeping a journal of each running one, and stop the thread."""
        self.drain()
        for job in self.jobs():
            self.cancel(job, retry_later("the server is shutting down", "draining", 503))
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self.is_alive:
            self._thread.join()  # each journal is saved; a second signal ends the process before that

    # What follows runs in the engine thread, except that `cancel` may call `_end`.

    def _work(self) -> None:
        try:
            while self._wait_for_jobs():
                try:
                    self._round()
                except Exception as error:  # a bug: the texts of this round end, and the thread goes on
                    for job in list(self._running):
                        self._fail(job, error)
                self._last_round = time.monotonic()
        except BaseException:
            log.exception("the engine thread has failed; the server cannot generate any more")
            raise
        finally:
            for job in self.jobs():
                if job.ended is None:
                    self._end(job, "failed", RuntimeError("the engine thread has ended"))

    def _wait_for_jobs(self) -> bool:
        """Start waiting jobs that fit, and block until at least one runs. False: the scheduler is closed."""
        with self._changed:
            while True:
                while (job := self._next()) is not None:
                    self._waiting.remove(job)
                    job.started = time.monotonic()
                    self._reserved += job.num_bytes
                    self._running.append(job)
                    if self._tree is not None:  # running texts come first
                        self._tree.make_room(self._settings.memory_bytes - self._reserved)
                    self._metrics.queue_time.observe(job.started - job.arrived)
                self._cancel_late()
                if self._running:
                    return True
                assert self._reserved == 0, "memory is reserved, but no job runs"
                if self._is_closing:
                    return False
                self._changed.wait(timeout=1.0 if self._waiting else None)
                self._last_round = time.monotonic()

    def _next(self) -> GenerationJob | None:
        """The first waiting text, if there is room for it. Texts with a grammar leave room to others, which pass."""
        for job in self._waiting:
            if not job.params.structured_outputs:
                return job if self._fits(job) else None
            alike = sum(other.num_bytes for other in self._running if other.params.structured_outputs)
            if not alike or alike + job.num_bytes <= _GRAMMAR_SHARE * self._settings.memory_bytes:
                return job if self._fits(job) else None
        return None

    def _fits(self, job: GenerationJob) -> bool:
        """Slow texts, of which one takes part in a round, take half of the places at most."""
        most = self._settings.max_running
        slow = sum(other.is_slow for other in self._running)
        return (len(self._running) - max(0, slow - most // 2) < most
                and self._reserved + job.num_bytes <= self._settings.memory_bytes)

    def _cancel_late(self) -> None:
        """Cancel jobs whose deadline has passed."""
        now = time.monotonic()
        for job in [*self._waiting, *self._running]:
            if job.deadline is not None and now > job.deadline:
                self.cancel(job, ApiError(408, f"the text was not finished in time{job.resume_hint}", code="timeout"))

    def _round(self) -> None:
        """Remove cancelled jobs, begin new ones, run one forward for all, and deliver the events."""
        for job in list(self._running):
            if job.beginning is not None and not job.beginning.done() and not (
                    job.cancelled is not None and job.beginning.cancel()):
                continue
            if job.cancelled is not None:
                self._stop(job, job.cancelled)
            elif job.number < 0:
                self._begin(job)
        if self._running and not self._batch:
            time.sleep(_PAUSE_S)
        by_number = {job.number: job for job in self._running if job.number >= 0}
        try:
            events = self._batch.step(self._awake(by_number)) if self._batch else []
        except Exception as error:  # not the failure of one text, but a bug: no job can continue
            events = []
            for job in by_number.values():
                self._fail(job, error)
        for number, event in events:
            job = by_number[number]
            if job.ended is not None:  # an earlier event of this round failed
                continue
            try:
                if event.error is not None:
                    raise event.error
                self._deliver(job, event)
            except Exception as error:  # fails this job only
                self._fail(job, error)

    def _begin(self, job: GenerationJob) -> None:
        try:
            if job.begins_apart and job.beginning is None:
                job.beginning = self._resuming.submit(self._start_apart, job)
            else:
                job.number = self._batch.admit(job.beginning.result() if job.beginning else self._start(job))
                job.beginning = None
        except Exception as error:
            self._fail(job, error)

    def _awake(self, jobs: dict[int, GenerationJob]) -> list[int] | None:
        """The texts that take part in the next round; None: all of them.

        Those whose own work is long take turns. After each of them, all of them rest, so that the others have the
        larger part of the time, however many slow texts there are.
        """
        now = time.monotonic()
        for number, seconds in self._batch.own_seconds.items():
            if number in jobs:
                jobs[number].is_slow = seconds > _SLOW_S
                if jobs[number].is_slow:
                    self._slow_rest_until = now + REST * seconds
        present = [number for number in jobs if number in self._batch]
        awake = [number for number in present if not jobs[number].is_slow]
        if len(awake) < len(present) and (not awake or self._slow_rest_until <= now):
            turn = min((number for number in present if jobs[number].is_slow), key=lambda number: jobs[number].turn)
            jobs[turn].turn = now
            awake.append(turn)
        return awake or None

    def _start_apart(self, job: GenerationJob) -> Generation:
        """Begin a text in a thread of its own, which rests after that: texts that are being written come first."""
        time.sleep(max(0.0, self._resuming_rests_until - time.monotonic()))
        if job.cancelled is not None:
            raise job.cancelled
        began = time.monotonic()
        try:
            return self._start(job)
        finally:
            now = time.monotonic()
            self._resuming_rests_until = now + REST * (now - began)

    def _start(self, job: GenerationJob) -> Generation:
        try:
            generation = job.begin()
        except (OutputError, UsageError) as error:
            if job.journal is None or job.keeps_journal:
                raise
            job.drop_journal()
            self._leave_journal_out(job, error)
            return job.begin()
        if job.journal is not None and self._journals is not None and not job.begins_apart:
            self._journals.count(job.prompt_tokens * _PROMPT_TOKEN_BYTES)
        if job.journal is not None and not job.keeps_journal:
            generation.on_journal_error = partial(self._leave_journal_out, job)
        return generation

    def _leave_journal_out(self, job: GenerationJob, error: LongdraftError) -> None:
        """The request did not ask for the journal that cannot be written: the text is written without."""
        job.journal = None
        log_event("journal_left_out", level=logging.WARNING, id=job.id, reason=str(error))

    def _deliver(self, job: GenerationJob, event: Event) -> None:
        """Pass an event on to the client. The last one ends the job."""
        metrics = self._metrics
        seconds = job.record_step(event)
        now = time.monotonic()
        if job.generation and (job.num_tokens > job.generation.num_resumed if event.sources else not job.num_tokens):
            metrics.generation_tokens.inc(len(event.tokens))
            job.events.charge(len(event.tokens))
            metrics.observe_draft(event.drafted, event.num_accepted)
            if seconds is None:
                metrics.first_token.observe(now - job.arrived)
                metrics.prompt_tokens.inc(job.prompt_tokens)
                if self._tree is not None and job.cache_salt is not None:
                    metrics.cache_queries.inc(job.prompt_tokens)
                    metrics.cache_hits.inc(job.generation.reuse.cached_tokens)
            else:
                metrics.observe_step(seconds, len(event.tokens))
        if job.journal is not None and self._journals is not None:
            self._journals.count(form.STEP_BYTES + form.TOKEN_BYTES * len(event.tokens),
                                 int(bool(event.finish_reason and job.keeps_journal)))
        job.finish(event.stats)
        job.events.put(job, event)
        if event.finish_reason:
            metrics.count_finished(event.finish_reason)
            metrics.total_time.observe(now - job.arrived)
            self._close(job)
            if not job.keeps_journal:
                job.remove_journal()
            self._end(job, "finished", None)

    def _stop(self, job: GenerationJob, reason: BaseException) -> None:
        """End a cancelled job.

        If the server itself cancelled it (an ApiError), the job gets a journal, so that the client can resume it.
        Otherwise its journal is removed, unless the client asked to keep it.
        """
        generation = job.generation
        self._close(job)
        if isinstance(reason, ApiError):
            if generation is not None and job.journal is None and job.may_journal:
                self._save(job, generation)
            if job.journal and "resume" not in str(reason):
                reason = ApiError(reason.status_code, f"{reason}{job.resume_hint}", code=reason.code,
                                  headers=dict(reason.headers or {}))
        elif not (job.keeps_journal or getattr(reason, "keeps_journal", False)):
            job.remove_journal()
        self._end(job, "cancelled", reason)

    def _save(self, job: GenerationJob, generation: Generation) -> None:
        """Give a text a journal. At the end of the process it gets one even if the disk is nearly full."""
        root = self._settings.journals
        if root is None or not (self._is_closing or self.is_draining or has_space(
                root, self._settings.disk_floor_bytes)):
            return
        try:
            generation.save_journal(root / job.id)
            job.journal = root / job.id
        except Exception as error:  # such as no memory: this must not cost the other texts theirs
            log_event("journal_failed", id=job.id, error=str(error))

    def _fail(self, job: GenerationJob, error: Exception) -> None:
        """End a job with an error. The log gets a traceback for unexpected errors, and one line for others."""
        is_expected = isinstance(error, LongdraftError | MemoryError | ApiError)
        log.error("a text failed: %s", type(error).__name__, exc_info=None if is_expected else error)
        self._close(job)
        error.__traceback__ = None  # its frames would keep the text's caches alive
        self._metrics.count_failure("out_of_memory" if isinstance(error, MemoryError) else type(error).__name__)
        self._end(job, "failed", error)

    def _close(self, job: GenerationJob) -> None:
        """Free the generation, with its caches; one that is still beginning, as soon as it has begun."""
        generation, job.generation = job.generation, None
        if job.beginning is not None and not (job.beginning.done() or job.beginning.cancel()):
            job.beginning.add_done_callback(partial(_close_begun, job))
        try:
            if job.number in self._batch:
                self._batch.remove(job.number)
            elif generation is not None:
                generation.close()
        except Exception as error:
            log.error("a text could not be closed: %s", error)

    def _end(self, job: GenerationJob, state: str, error: BaseException | None) -> None:
        with self._changed:
            job.state = state
            job.ended = time.monotonic()
            job.release()
            if job in self._running:
                self._running.remove(job)
                self._reserved -= job.num_bytes
            self._ended.append(job)
        log_event("text", id=job.id, state=state, user=job.user, key=job.events.key_label,
                  prompt_tokens=job.prompt_tokens, new_tokens=job.num_tokens,
                  seconds=round(job.ended - job.arrived, 4),
                  finish_reason=job.finish_reason, error=type(error).__name__ if error else None)
        if state == "cancelled":
            self._metrics.count_failure("cancelled")
        job.events.end(job, error)

    def _cache_bytes(self) -> float:
        generations = [job.generation for job in list(self._running)]
        return float(sum(generation.step.cache.nbytes for generation in generations if generation is not None))


def _close_begun(job: GenerationJob, beginning: Future[Generation]) -> None:
    """Close the generation of a job that has ended before it had begun."""
    job.generation = None
    if beginning.exception() is None:
        beginning.result().close()
