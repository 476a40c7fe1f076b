"""Who writes a job's rows on this machine: this process, or worker processes with an engine each.

Both take tasks one by one as they can write them, and give reports as texts grow and end; None where there is nothing
to report, but the work goes on.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue

from longdraft.batch.rows import Report, Task
from longdraft.batch.writer import Job, Writer
from longdraft.errors import LongdraftError, WorkerError

_LOOK_S = 0.25  # how often a waiting job looks whether it is to end
_LOADS = 2  # workers that may die while they load
_TELL_S = 0.5  # how often a worker tells how far it is


Check = Callable[[], None]  # raises where the work is to end
Crew = Callable[[Job, Iterator[Task], Check], Iterator[Report | None]]


def in_process(job: Job, tasks: Iterator[Task], check: Check) -> Iterator[Report | None]:
    """In this process."""
    with Writer(job) as writer:
        for report in writer.write(lambda is_idle: next(tasks, None)):
            check()
            yield report


def processes(count: int) -> Crew:
    """`count` worker processes. One that dies is replaced, and its row given to another, which goes on with it."""

    def crew(job: Job, tasks: Iterator[Task], check: Check) -> Iterator[Report | None]:
        lost: list[Task] = []  # rows of workers that died
        lost_loading = 0  # since the last one that loaded

        def fill(worker: _Worker) -> None:
            while worker.is_loaded and len(worker.tasks) < job.batch_size:
                task = lost.pop() if lost else next(tasks, None)
                if task is None:
                    return
                worker.give(task)

        workers = [_Worker(job) for _ in range(count)]
        try:
            while True:
                check()
                yield None
                for worker in _talking(workers):
                    message = worker.hear()
                    if isinstance(message, Exception):
                        raise message
                    if message is None:  # it died
                        lost_loading += not worker.is_loaded
                        if lost_loading > _LOADS:
                            raise WorkerError(f"a worker ended while it loaded the model ({worker.how()}); fewer "
                                              "--workers need less memory")
                        lost += worker.tasks.values()
                        workers[workers.index(worker)] = _Worker(job)
                        worker.end()
                    elif isinstance(message, Report):
                        yield message
                    else:
                        lost_loading = 0
                for worker in workers:
                    fill(worker)
                if not lost and all(worker.is_loaded and not worker.tasks for worker in workers):
                    return
        finally:
            for worker in workers:
                worker.end()

    return crew


_READY = "ready"


class _Worker:
    """A process, and the rows that it has."""

    def __init__(self, job: Job) -> None:
        context = get_context("spawn")  # a fork would share threads and locks with this process
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.tasks: dict[str, Task] = {}
        self.is_loaded = False
        self._given: SimpleQueue[Task | None] = SimpleQueue()
        self._giver = threading.Thread(target=self._give, daemon=True)
        self._giver.start()

    @property
    def signs(self) -> tuple[Connection, int]:
        """What can be waited for."""
        return self._pipe, self._process.sentinel

    def give(self, task: Task) -> None:
        self.tasks[task.key] = task
        self._given.put(task)

    def _give(self) -> None:
        """In a thread: both ends would wait for ever where each sends more than the pipe holds."""
        while task := self._given.get():
            with contextlib.suppress(OSError):  # it died: `hear` will tell, and the row is given to another
                self._pipe.send(task)

    def hear(self) -> object:
        """A message, an error that ends the job, or None: the process is no more."""
        try:
            message: object = self._pipe.recv()
        except (EOFError, OSError):
            return None
        self.is_loaded = True
        if isinstance(message, Report) and message.record:
            self.tasks.pop(message.key)
        return message

    def how(self) -> str:
        """... it ended."""
        self._process.join(1)
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"status {code}"

    def end(self) -> None:
        self._process.kill()  # journals survive anything
        self._process.join()
        self._given.put(None)
        self._giver.join()
        self._pipe.close()
        self._process.close()


def _talking(workers: list[_Worker]) -> list[_Worker]:
    signs = {sign: worker for worker in workers for sign in worker.signs}
    ready = wait(list(signs), _LOOK_S)
    return list({id(worker): worker for worker in (signs[sign] for sign in ready)}.values())  # type: ignore[index]


def _serve(job: Job, pipe: Connection) -> None:
    """A worker process: write what is given, until nobody gives any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; who gives the rows decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        writer = Writer(job)
        told: dict[str, float] = {}
        with _parting():
            pipe.send(_READY)
        for report in writer.write(lambda is_idle: _asked(pipe, is_idle)):
            if report and (report.record or time.monotonic() > told.get(report.key, 0.0) + _TELL_S):
                told[report.key] = time.monotonic()
                with _parting():
                    pipe.send(report)
            if report and report.record:
                told.pop(report.key, None)
    except (LongdraftError, MemoryError) as error:
        with _parting():
            pipe.send(error)


def _asked(pipe: Connection, is_idle: bool) -> Task | None:
    with _parting():
        task: Task | None = pipe.recv() if is_idle or pipe.poll() else None
        return task


@contextlib.contextmanager
def _parting() -> Iterator[None]:
    """Where whom it is for is gone, the worker ends. Only the pipe may say so: files fail with the same errors."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise SystemExit from error
