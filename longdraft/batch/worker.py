"""One loaded engine that writes the rows of a batch job: the same on this machine and on any other.

Each text has a journal in the job's work folder. A worker that is given a row resumes its journal, if there is one.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from longdraft.batch import work_folder
from longdraft.batch.requests import BatchRequest, RowProgress, error_record, seed_of, text_record
from longdraft.engine import loading
from longdraft.engine.generation import Generation
from longdraft.errors import BusyJournalError, ModelError, NumericalError, UnusableJournalError, UsageError
from longdraft.journal.format import journal_exists, read_journal
from longdraft.journal.writer import is_being_written, remove_journal
from longdraft.request.events import Event
from longdraft.request.sampling_params import SamplingParams
from longdraft.text.tools.model_tools import ModelTools
from longdraft.text.tools.reader import WholeAnswer, put_together

log = logging.getLogger(__name__)
_BUSY_JOURNAL_S = 30.0  # how long to wait for the row's previous worker to exit
_POLL_S = 0.2

NextRequest = Callable[[bool], BatchRequest | None]


@dataclass(frozen=True)
class BatchJob:
    """The description of a job for its workers: plain data that can be sent to other processes.

    work_folder  folder of the journals; for several machines, on storage that all of them share
    load         arguments of `longdraft.load`
    defaults     sampling settings of rows that set none, by longdraft's names
    seed         of the job; a row without a seed derives its own from this one and its id
    model        the model's name in records
    fsync        when journals are synced to the disk: always, never, or an interval in seconds
    retries      how often a row may end its worker without a new token before it becomes an error record
    fingerprint  of the engine that wrote the existing records; None if there are none
    batch_size   texts that a worker writes at the same time, in shared forwards
    identity     the part of `Engine.identity` that workers must share with the driver; a difference ends the job
    """

    work_folder: Path
    load: Mapping[str, Any]
    defaults: Mapping[str, Any]
    seed: int
    model: str
    fsync: str = "1"
    retries: int = 2
    fingerprint: str | None = None
    batch_size: int = 1
    identity: Mapping[str, str] = field(default_factory=dict)

    def journal(self, key: str) -> Path:
        return work_folder.journal(self.work_folder, key)


@dataclass
class _RunningRow:
    """A row that is being written, and the text that each token has added so far."""

    request: BatchRequest
    generation: Generation
    pieces: list[str] = field(default_factory=list)


class BatchWorker(AbstractContextManager["BatchWorker"]):
    """Loads an engine for a job. Raises UsageError if it would write other texts than the job's other workers."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job
        self._engine = loading.load(**job.load)
        if unlike := identity_differences(job.identity, self._engine.identity):
            raise UsageError(f"the worker on {socket.gethostname()} differs from the process that started the job: "
                             f"{'; '.join(unlike)}; install the same longdraft and give the same model there")
        self._fingerprint = self._engine.fingerprint
        if job.fingerprint not in (None, self._fingerprint):
            raise UsageError(f"the output's texts have fingerprint {job.fingerprint}, this engine has "
                             f"{self._fingerprint}: weights, tokenizer, kernels or versions differ; use the same ones, "
                             "or another output")
        self._require_same_as_first_worker()

    def _require_same_as_first_worker(self) -> None:
        """The first worker saves its identity. Later ones must have the same, or texts would depend on the worker."""
        ours = self._engine.identity
        path = self._job.work_folder / work_folder.ENGINE
        with work_folder.translate_storage_errors(self._job.work_folder):
            first = work_folder.write_once(path, ours)
        if unlike := identity_differences(dict.fromkeys(ours, "missing") | first, ours):
            raise UsageError(f"the job was begun by another engine: {'; '.join(unlike)}; use the same everywhere "
                             "(LONGDRAFT_KERNELS chooses kernels), or begin the job again with another output")

    def __exit__(self, *exc: object) -> None:
        self._engine.close()

    def write(self, next_request: NextRequest) -> Iterator[RowProgress | None]:
        """Write rows, `batch_size` of them at the same time, and yield their progress; a row's last one has its record.

        A None follows each round of steps. A round may have no progress: a long prompt takes many.

        next_request  returns the next row, or None if there is none now. It is called with True if no row is being
                      written; a None then ends the iteration

        A row that may have ended its previous worker is written alone until it has a new token, so that it cannot take
        other rows with it. Errors that are not a row's are raised. Leaving the iteration early leaves journals that
        can be resumed.
        """
        rows: dict[int, _RunningRow] = {}  # by their numbers in the batch
        suspects: list[BatchRequest] = []
        running_suspect: int | None = None
        with self._engine.batch() as batch:
            while True:
                while (running_suspect is None and len(batch) + len(suspects) < self._job.batch_size
                       and (request := next_request(not batch and not suspects)) is not None):
                    if self._is_suspect(request.key):
                        suspects.append(request)
                    elif isinstance(started := self._start(request), RowProgress):
                        yield started
                    else:
                        rows[batch.admit(started)] = _RunningRow(request, started)
                if not batch and suspects:
                    if isinstance(started := self._start(request := suspects.pop(0)), RowProgress):
                        yield started
                        continue
                    rows[running_suspect := batch.admit(started)] = _RunningRow(request, started)
                if not batch:
                    return
                for number, event in batch.step():
                    progress = self._advance(rows[number], event)
                    if number == running_suspect and (progress.record or progress.tokens > progress.resumed):
                        running_suspect = None
                    if progress.record:
                        del rows[number]
                    yield progress
                yield None

    def _start(self, request: BatchRequest) -> Generation | RowProgress:
        """The row's generation, new or resumed; or the error record of a row that cannot be written."""
        if request.problem:
            return _failed(request, "invalid_request", request.problem)
        if self._has_failed_too_often(request.key):  # before the checks, which may end the worker as well
            return _failed(request, "worker_lost", f"the row ended its worker {self._job.retries + 1} times without a "
                                                   "new token; one possible reason is too little memory")
        try:
            ids, params = self._checked(request)
        except (UsageError, ModelError) as error:  # a chat template comes with the model and may raise any error
            return _failed(request, "invalid_request", str(error))
        try:
            return self._generation(request.key, ids, params)
        except MemoryError as error:
            return _failed(request, "out_of_memory", f"out of memory: {error}; a shorter context needs less")

    def _advance(self, row: _RunningRow, event: Event) -> RowProgress:
        if event.error:
            if isinstance(event.error, NumericalError):
                return _failed(row.request, "model_error", str(event.error))
            if isinstance(event.error, MemoryError):
                return _failed(row.request, "out_of_memory", f"out of memory: {event.error}; a lower --batch-size or a "
                                                             "shorter context needs less")
            raise event.error
        row.pieces += event.pieces
        tokens, resumed = len(row.generation.tokens), row.generation.num_resumed
        if event.stats is None:
            return RowProgress(row.request.key, tokens, resumed)
        text = "".join(row.pieces)
        record = text_record(row.request, text, self._answer(row, text), event.stats, self._job.model,
                             self._fingerprint)
        return RowProgress(row.request.key, tokens, resumed, record)

    def _answer(self, row: _RunningRow, text: str) -> WholeAnswer:
        """The parts of a row's text. Only those of OpenAI's chats are apart."""
        if row.request.kind != "chat":
            return WholeAnswer("", text, [])
        thinking, generation = row.request.thinking, row.generation
        answers = self._tools.answers(row.request.tools, shows_thinking=thinking.format != "none",
                                      sends_thinking=thinking.is_sent)
        return put_together(answers.whole(generation.prompt, generation.tokens.tolist(), row.pieces,
                                          generation.params.seed))

    @cached_property
    def _tools(self) -> ModelTools:
        return ModelTools(self._engine.tokenizer, self._engine.loaded.answer_format)

    def _checked(self, request: BatchRequest) -> tuple[list[int], SamplingParams]:
        """The row's token ids and settings, checked against the model."""
        engine = self._engine
        params = engine.params(**{**self._job.defaults, **request.settings})
        prompt, tools = request.prompt, request.tools
        if request.is_chat:
            effort = engine.effort(params, request.chat_options, turns_on=request.thinking.turns_on,
                                   is_required="reasoning_effort" not in request.settings)
            text = self._tools.prompt(prompt, tools, effort.variables)
            prompt = engine.tokenizer.encode(text, add_special_tokens=False)
            params = self._tools.applied(effort.applied(params), tools, prompt)
        if params.seed is None:
            params = params.with_seed(seed_of(request.key, self._job.seed))
        ids = engine.encode(prompt)
        params = engine.loaded.completed(params, ids)
        return engine.check_request(ids, params), params

    def _generation(self, key: str, ids: list[int], params: SamplingParams) -> Generation:
        """Start the text or resume its journal. The row's previous worker may still be exiting."""
        deadline = time.monotonic() + _BUSY_JOURNAL_S
        while True:
            try:
                with work_folder.translate_storage_errors(self._job.work_folder):
                    return self._start_or_resume(key, ids, params)
            except BusyJournalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)

    def _start_or_resume(self, key: str, ids: list[int], params: SamplingParams) -> Generation:
        """Delete a journal only if its content is unusable. A journal that cannot be read now may be readable when the
        job is started again."""
        folder = self._job.journal(key)
        fsync = self._job.fsync
        if journal_exists(folder):
            try:
                content = read_journal(folder)
                if content.header.prompt == ids and content.params == params:
                    return self._engine.resume(folder, fsync=fsync, snapshot="never")
                reason = "its journal has another prompt or other settings"
            except UnusableJournalError as error:
                reason = str(error)
            if is_being_written(folder):
                raise BusyJournalError(f"the journal {folder} is being written by a process of another job; end it")
            log.warning("row %s starts again: %s", key, reason)
            remove_journal(folder)
        return self._engine.generate(ids, params, journal=folder, fsync=fsync, snapshot="never")

    def _is_suspect(self, key: str) -> bool:
        """Whether the last attempt ended without a new token."""
        before = self._attempts(key)
        return bool(before) and before[-1] >= num_written(self._job.journal(key))

    def _has_failed_too_often(self, key: str) -> bool:
        """Whether `retries` + 1 attempts in a row ended without a new token. Records one more attempt."""
        allowed = self._job.retries + 1
        before = self._attempts(key)
        now = num_written(self._job.journal(key))
        path = work_folder.attempts(self._job.work_folder, key)
        with work_folder.translate_storage_errors(self._job.work_folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="ascii") as file:
                file.write(f"{now}\n")
        return len(before) >= allowed and before[-allowed] >= now

    def _attempts(self, key: str) -> list[int]:
        """For each attempt, the number of tokens that the journal had at its start."""
        with work_folder.translate_storage_errors(self._job.work_folder):
            try:
                lines = work_folder.attempts(self._job.work_folder, key).read_bytes().split()
            except FileNotFoundError:
                return []
        return [int(line) for line in lines if line.isdigit()]  # a power cut may leave any content


def identity_differences(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """The differences from `expected`, such as "kernels is reference, expected avx2"."""
    return [f"{name} is {actual.get(name, 'missing')}, expected {value}" for name, value in sorted(expected.items())
            if actual.get(name, "missing") != value]


def _failed(request: BatchRequest, code: str, message: str) -> RowProgress:
    return RowProgress(request.key, 0, 0, error_record(request, code, message))


def num_written(journal: Path) -> int:
    """Tokens of a row's text that can be resumed. JournalError if the system cannot read the journal."""
    try:
        return len(read_journal(journal).tokens) if journal_exists(journal) else 0
    except UnusableJournalError:  # the text starts again
        return 0
