"""One engine that writes the rows of a job, one after the other: the same on this machine and on any other.

Each text has a journal in the job's work folder. Who is given a row goes on where the last one was cut.
"""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longdraft import engine as engines
from longdraft.batch import work_folder
from longdraft.batch.rows import Report, Task, failed, seed_of, written
from longdraft.core import Event, SamplingParams
from longdraft.errors import BusyJournalError, ModelError, NumericalError, UnusableJournalError, UsageError
from longdraft.generation import Generation
from longdraft.journal import is_being_written, is_there, read

log = logging.getLogger(__name__)
_PATIENCE_S = 30.0  # for the process that had the row before to be gone
_LOOK_S = 0.2


@dataclass(frozen=True)
class Job:
    """What every writer of a job must know; plain data that travels to other processes.

    work         folder of journals; on several machines, on storage that all of them see
    load         arguments of `longdraft.load`
    defaults     sampling settings of rows that give none, by our names
    seed         of the job: rows that give no seed have one from it and their id
    model        the model's name in records
    fsync        of the journals
    retries      times that a row may end its writer without a new token; then it becomes an error
    fingerprint  of what wrote the records that are there (None: none are)
    batch_size   texts that a writer writes side by side, in the same forwards
    identity     what the process that started the job is (`Engine.identity`, as far as it is known there)
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
class _Row:
    """A row that is being written, and its text so far."""

    task: Task
    generation: Generation
    text: list[str] = field(default_factory=list)


class Writer:
    """A loaded engine. Raises UsageError where it would write other texts than the job's other writers do."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._engine = engines.load(**job.load)
        if unlike := differences(job.identity, self._engine.identity):
            raise UsageError(f"a worker on {socket.gethostname()} is not like the process that started the job: "
                             f"{'; '.join(unlike)}; install the same longdraft and give the same model there")
        self._fingerprint = self._engine.fingerprint
        if job.fingerprint not in (None, self._fingerprint):
            raise UsageError(f"the output's texts are of {job.fingerprint}, this engine is {self._fingerprint}: other "
                             "weights, tokenizer, kernels or versions; give the same ones, or another output")
        self._agree()

    def _agree(self) -> None:
        """The first writer notes what it is, the others must be the same: else texts would depend on who wrote them."""
        ours, path = self._engine.identity, self._job.work_folder / work_folder.ENGINE
        with work_folder.told(self._job.work_folder):
            first = work_folder.note(path, ours)
        if unlike := [f"{name} {first.get(name)}, here {ours.get(name)}" for name in sorted(first.keys() | ours.keys())
                      if first.get(name) != ours.get(name)]:
            raise UsageError(f"the job was begun by another engine: {'; '.join(unlike)}; use the same everywhere "
                             "(LONGDRAFT_KERNELS chooses kernels), or begin the job anew with another output")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.close()

    def write(self, more: Callable[[bool], Task | None]) -> Iterator[Report | None]:
        """Reports as texts grow and end, `batch_size` of them side by side; the last of a row has its record. None after
        each round, which may have nothing to report: a prompt takes many.

        more  the next row; None: there is none now, or, where it is called with True (nothing is being written), no
              more at all

        A row that may have ended its writer is written when nothing else is, and alone until it has a new token: it
        would take the others with it again. What is no row's fault is raised. Whoever stops iterating leaves journals
        to go on with.
        """
        rows: dict[int, _Row] = {}  # by their numbers in the batch
        suspects: list[Task] = []
        suspect: int | None = None  # that is written
        with self._engine.batch() as batch:
            while True:
                while (suspect is None and len(batch) + len(suspects) < self._job.batch_size
                       and (task := more(not batch and not suspects)) is not None):
                    if self._is_suspect(task.key):
                        suspects.append(task)
                    elif isinstance(found := self._open(task), Report):
                        yield found
                    else:
                        rows[batch.admit(found)] = _Row(task, found)
                if not batch and suspects:
                    if isinstance(found := self._open(task := suspects.pop(0)), Report):
                        yield found
                        continue
                    rows[suspect := batch.admit(found)] = _Row(task, found)
                if not batch:
                    return
                for number, event in batch.step():
                    report = self._taken(rows[number], event)
                    if number == suspect and (report.record or report.tokens > report.resumed):
                        suspect = None
                    if report.record:
                        del rows[number]
                    yield report
                yield None

    def _open(self, task: Task) -> Generation | Report:
        """The text of a row, begun or gone on with; or why there will be none."""
        if task.problem:
            return _failed(task, "invalid_request", task.problem)
        try:
            ids, params = self._asked(task)
        except (UsageError, ModelError) as error:  # a chat template is the model's, and may fail in any way
            return _failed(task, "invalid_request", str(error))
        if self._is_hopeless(task.key):
            return _failed(task, "worker_lost", f"the row ended its worker {self._job.retries + 1} times without a new "
                                                "token; too little memory, for one, may do that")
        try:
            return self._begin(task.key, ids, params)
        except MemoryError as error:
            return _failed(task, "out_of_memory", f"out of memory: {error}; a shorter context needs less")

    def _taken(self, row: _Row, event: Event) -> Report:
        if event.error:
            if isinstance(event.error, NumericalError):
                return _failed(row.task, "model_error", str(event.error))
            if isinstance(event.error, MemoryError):
                return _failed(row.task, "out_of_memory", f"out of memory: {event.error}; lower --batch-size, or a "
                                                          "shorter context, need less")
            raise event.error
        row.text.append(event.text)
        tokens, resumed = len(row.generation.tokens), row.generation.num_resumed
        if event.stats is None:
            return Report(row.task.key, tokens, resumed)
        record = written(row.task, "".join(row.text), event.stats, self._job.model, self._fingerprint)
        return Report(row.task.key, tokens, resumed, record)

    def _asked(self, task: Task) -> tuple[list[int], SamplingParams]:
        """The row's token ids and settings, checked against the model."""
        engine = self._engine
        prompt = engine.chat(task.prompt, **task.chat_options) if task.is_chat else task.prompt
        settings = {**self._job.defaults, **task.settings}
        params = engine.params(**settings)
        if params.seed is None:
            params = params.with_seed(seed_of(task.key, self._job.seed))
        return engine.checked(prompt, params), params

    def _begin(self, key: str, ids: list[int], params: SamplingParams) -> Generation:
        """Begin the text, or go on with its journal. Whoever had the row before may be dying still."""
        patience = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with work_folder.told(self._job.work_folder):
                    return self._begun(key, ids, params)
            except BusyJournalError:
                if time.monotonic() > patience:
                    raise
                time.sleep(_LOOK_S)

    def _begun(self, key: str, ids: list[int], params: SamplingParams) -> Generation:
        """Only a journal whose content is no use any more is thrown away; what the system does not give now, it may
        give when the job is started again."""
        folder, fsync = self._job.journal(key), self._job.fsync
        if is_there(folder):
            try:
                header = read(folder).header
                if header.prompt == ids and header.params == params:
                    return self._engine.resume(folder, fsync=fsync)
                why = "it has another prompt or other settings than when it was begun"
            except UnusableJournalError as error:
                why = str(error)
            if is_being_written(folder):
                raise BusyJournalError(f"the journal {folder} is being written by a process of another job; end it")
            log.warning("row %s begins anew: %s", key, why)
            shutil.rmtree(folder)
        return self._engine.generate(ids, params, journal=folder, fsync=fsync)

    def _is_suspect(self, key: str) -> bool:
        """Whether the last attempt ended without a new token."""
        before = self._attempts(key)
        return bool(before) and before[-1] >= num_written(self._job.journal(key))

    def _is_hopeless(self, key: str) -> bool:
        """Whether the last attempts all ended without a new token; notes another one."""
        allowed, before, now = self._job.retries + 1, self._attempts(key), num_written(self._job.journal(key))
        path = work_folder.attempts(self._job.work_folder, key)
        with work_folder.told(self._job.work_folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="ascii") as file:
                file.write(f"{now}\n")
        return len(before) >= allowed and before[-allowed] >= now

    def _attempts(self, key: str) -> list[int]:
        """The tokens that were there when each attempt began."""
        with work_folder.told(self._job.work_folder):
            try:
                lines = work_folder.attempts(self._job.work_folder, key).read_bytes().split()
            except FileNotFoundError:
                return []
        return [int(line) for line in lines if line.isdigit()]  # a power cut may leave anything


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """What differs of `expected` in an engine's identity: "kernels is reference, expected avx2"."""
    return [f"{name} is {found.get(name, 'missing')}, expected {value}" for name, value in expected.items()
            if found.get(name) != value]


def _failed(task: Task, code: str, message: str) -> Report:
    return Report(task.key, 0, 0, failed(task, code, message))


def num_written(journal: Path) -> int:
    """Tokens of a row's text that are there to go on with. JournalError where the system does not give them."""
    try:
        return len(read(journal).tokens) if is_there(journal) else 0
    except UnusableJournalError:  # the text begins anew
        return 0
