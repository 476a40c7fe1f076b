"""Who writes a job's rows on this machine: this process, or worker processes with an engine each.

Both take tasks one by one as they can write them, and give reports as texts grow and end.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from longdraft.batch.rows import Report, Task
from longdraft.batch.writer import Job, Writer
from longdraft.errors import LongdraftError, WorkerError

_LOOK_S = 0.25  # how often a waiting job looks whether it is to end
_TELL_S = 0.5  # how often a worker tells how far it is


Check = Callable[[], None]  # raises where the work is to end
Crew = Callable[[Job, Iterator[Task], Check], Iterator[Report]]


def alone(job: Job, tasks: Iterator[Task], check: Check) -> Iterator[Report]:
    """In this process."""
    writer = Writer(job)
    for task in tasks:
        for report in writer.write(task):
            check()
            yield report


def processes(count: int) -> Crew:
    """`count` worker processes. One that dies is replaced, and its row given to another, which goes on with it."""

    def crew(job: Job, tasks: Iterator[Task], check: Check) -> Iterator[Report]:
        lost: list[Task] = []  # rows of workers that died

        def give(worker: _Worker) -> None:
            worker.give(lost.pop() if lost else next(tasks, None))

        workers = [_Worker(job) for _ in range(count)]
        try:
            while True:
                check()
                for worker in _talking(workers):
                    message = worker.hear()
                    if isinstance(message, Exception):
                        raise message
                    if message is None:  # it died
                        if not worker.is_loaded:
                            raise WorkerError(f"a worker ended while it loaded the model ({worker.how()}); fewer "
                                              "--workers need less memory")
                        lost += [worker.task] if worker.task else []
                        workers[workers.index(worker)] = _Worker(job)
                        worker.end()
                    elif isinstance(message, Report):
                        yield message
                    if message == _READY or (isinstance(message, Report) and message.record):
                        give(worker)
                for worker in workers:
                    if lost and worker.is_loaded and worker.task is None:
                        give(worker)
                if not lost and all(worker.is_loaded and worker.task is None for worker in workers):
                    return
        finally:
            for worker in workers:
                worker.end()

    return crew


_READY = "ready"


class _Worker:
    """A process, and the row that it has."""

    def __init__(self, job: Job) -> None:
        context = get_context("spawn")  # a fork would share threads and locks with this process
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.task: Task | None = None
        self.is_loaded = False

    @property
    def signs(self) -> tuple[Connection, int]:
        """What can be waited for."""
        return self._pipe, self._process.sentinel

    def give(self, task: Task | None) -> None:
        self.task = task
        if task is not None:
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
            self.task = None
        return message

    def how(self) -> str:
        """... it ended."""
        self._process.join(1)
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"status {code}"

    def end(self) -> None:
        self._pipe.close()
        self._process.kill()  # journals survive anything
        self._process.join()
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
        writer, due = Writer(job), 0.0
        pipe.send(_READY)
        while True:
            task: Task = pipe.recv()
            for report in writer.write(task):
                if report.record or time.monotonic() > due:
                    due = time.monotonic() + _TELL_S
                    pipe.send(report)
    except (EOFError, OSError):
        return  # whom it was for is gone
    except (LongdraftError, MemoryError) as error:
        pipe.send(error)
