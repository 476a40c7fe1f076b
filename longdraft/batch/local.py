"""Executors on this machine: they write a job's rows in this process, or in worker processes with an engine each.

An executor takes each request when it can start it, and yields the progress of rows, or None without progress.
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

from longdraft.batch.requests import BatchRequest, RowProgress
from longdraft.batch.worker import BatchJob, BatchWorker
from longdraft.errors import LongdraftError, WorkerError

_POLL_S = 0.25  # how often a waiting job checks for signals
_MAX_FAILED_LOADS = 2  # workers that may die while they load the model
_REPORT_S = 0.5  # how often a worker reports the progress of a row
_READY = "ready"

Check = Callable[[], None]  # raises if the work must end
Executor = Callable[[BatchJob, Iterator[BatchRequest], Check], Iterator[RowProgress | None]]


def in_process(job: BatchJob, requests: Iterator[BatchRequest], check: Check) -> Iterator[RowProgress | None]:
    """The executor that writes all rows in this process."""
    with BatchWorker(job) as worker:
        for progress in worker.write(lambda is_idle: next(requests, None)):
            check()
            yield progress


def worker_processes(count: int) -> Executor:
    """An executor with `count` worker processes. One that dies is replaced, and another one resumes its rows."""

    def execute(job: BatchJob, requests: Iterator[BatchRequest], check: Check) -> Iterator[RowProgress | None]:
        lost: list[BatchRequest] = []  # rows of workers that died
        failed_loads = 0  # since a worker last loaded its model

        def fill(worker: _WorkerProcess) -> None:
            while worker.is_loaded and len(worker.requests) < job.batch_size:
                request = lost.pop() if lost else next(requests, None)
                if request is None:
                    return
                worker.send(request)

        workers = [_WorkerProcess(job) for _ in range(count)]
        try:
            while True:
                check()
                yield None
                for worker in _with_messages(workers):
                    message = worker.receive()
                    if isinstance(message, Exception):
                        raise message
                    if message is None:  # the process died
                        failed_loads += not worker.is_loaded
                        if failed_loads > _MAX_FAILED_LOADS:
                            raise WorkerError(f"a worker ended while it loaded the model ({worker.exit_reason()}); "
                                              "fewer --workers need less memory")
                        lost += worker.requests.values()
                        workers[workers.index(worker)] = _WorkerProcess(job)
                        worker.end()
                    elif isinstance(message, RowProgress):
                        yield message
                    else:
                        failed_loads = 0
                for worker in workers:
                    fill(worker)
                if not lost and all(worker.is_loaded and not worker.requests for worker in workers):
                    return
        finally:
            for worker in workers:
                worker.end()

    return execute


class _WorkerProcess:
    """A worker process and the rows that it was sent."""

    def __init__(self, job: BatchJob) -> None:
        context = get_context("spawn")  # a fork would share threads and locks with this process
        self._pipe, theirs = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.requests: dict[str, BatchRequest] = {}
        self.is_loaded = False
        self._outbox: SimpleQueue[BatchRequest | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    @property
    def waitables(self) -> tuple[Connection, int]:
        """For `multiprocessing.connection.wait`: ready if there is a message, or if the process has ended."""
        return self._pipe, self._process.sentinel

    def send(self, request: BatchRequest) -> None:
        self.requests[request.key] = request
        self._outbox.put(request)

    def _send(self) -> None:
        """Runs in a thread: two processes that both send more than the pipe holds would block forever."""
        while request := self._outbox.get():
            with contextlib.suppress(OSError):  # the process died: `receive` returns None, and the row is sent again
                self._pipe.send(request)

    def receive(self) -> object:
        """A message, an error that ends the job, or None if the process has ended."""
        try:
            message: object = self._pipe.recv()
        except (EOFError, OSError):
            return None
        self.is_loaded = True
        if isinstance(message, RowProgress) and message.record:
            self.requests.pop(message.key)
        return message

    def exit_reason(self) -> str:
        self._process.join(1)
        code = self._process.exitcode or 0
        return f"signal {-code}" if code < 0 else f"status {code}"

    def end(self) -> None:
        self._process.kill()  # journals survive a kill
        self._process.join()
        self._outbox.put(None)
        self._sender.join()
        self._pipe.close()
        self._process.close()


def _with_messages(workers: list[_WorkerProcess]) -> list[_WorkerProcess]:
    """The workers that have something to receive; waits for one for `_POLL_S` at most."""
    owners = {waitable: worker for worker in workers for waitable in worker.waitables}
    ready = wait(list(owners), _POLL_S)
    return list({id(worker): worker for worker in (owners[each] for each in ready)}.values())  # type: ignore[index]


def _serve(job: BatchJob, pipe: Connection) -> None:
    """The main function of a worker process: write the rows that arrive until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the job's process handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        worker = BatchWorker(job)
        reported: dict[str, float] = {}  # when a row's progress was last sent
        with _exit_without_peer():
            pipe.send(_READY)
        for progress in worker.write(lambda is_idle: _receive(pipe, is_idle)):
            if progress and (progress.record or time.monotonic() > reported.get(progress.key, 0.0) + _REPORT_S):
                reported[progress.key] = time.monotonic()
                with _exit_without_peer():
                    pipe.send(progress)
            if progress and progress.record:
                reported.pop(progress.key, None)
    except (LongdraftError, MemoryError) as error:
        with _exit_without_peer():
            pipe.send(error)


def _receive(pipe: Connection, is_idle: bool) -> BatchRequest | None:
    with _exit_without_peer():
        request: BatchRequest | None = pipe.recv() if is_idle or pipe.poll() else None
        return request


@contextlib.contextmanager
def _exit_without_peer() -> Iterator[None]:
    """End the worker if the job's process is gone. Use it around the pipe only: files raise the same errors."""
    try:
        yield
    except (EOFError, OSError) as error:
        raise SystemExit from error
