"""The same job on a Ray cluster: Ray Data with a pool of actors, an engine each.

Ray places the actors by GPUs or cores, hands each a row when it is free, starts actors again that were lost, and gives
their rows to others, which find the journal on shared storage and go on. What was lost with a node is asked for again,
so a record may come twice; the job takes one.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

from longdraft.batch.local import Check, Crew
from longdraft.batch.rows import Report, Task
from longdraft.batch.writer import Job, Writer, num_written
from longdraft.errors import JournalError, LongdraftError, UsageError, WorkerError

_LOOK_S = 0.25
_TELL_S = 5.0  # between two looks at how far texts have come
_TELL_PART = 0.05  # of the time that looking may take
_ANSWER_S = 10.0  # for a cluster to answer at all
_CURRENT = Path("/tmp/ray/ray_current_cluster")  # Ray's note of the cluster that this machine began last
_WINDOW = 8192  # rows that Ray holds at once, in blocks of those that are written side by side: they come together


@dataclass(frozen=True)
class Placement:
    """What an actor takes.

    workers  actors at most; None: as many as fit into the cluster
    threads  cores of each; None: 1
    device   auto, cpu or cuda; cuda, or auto on a cluster with GPUs, takes a GPU for each
    """

    workers: int | None
    threads: int | None
    device: str


def on_ray(address: str, placement: Placement) -> Crew:
    """A crew on the cluster at `address` ("auto": the one this machine belongs to, "local": one of this machine)."""

    def crew(job: Job, tasks: Iterator[Task], check: Check) -> Iterator[Report | None]:
        ray = _library()
        is_ours = not ray.is_initialized()
        if is_ours:
            _connect(ray, address)
        try:
            while window := list(islice(tasks, _WINDOW)):
                yield from _written(ray, job, window, placement, check)
        finally:
            if is_ours:
                ray.shutdown()

    return crew


def _library() -> ModuleType:
    try:
        import_module("ray.data")
        return import_module("ray")
    except ImportError as error:
        raise UsageError(f"--ray needs {error.name}; pip install 'longdraft[ray]'") from error


def _connect(ray: ModuleType, address: str) -> None:
    host, _, port = (_last_begun() if address == "auto" else address).rpartition(":")
    try:
        if host and port.isdigit():  # else Ray tries for minutes
            socket.create_connection((host, int(port)), _ANSWER_S).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise UsageError(f"--ray {address}: {reason}; start a cluster with `ray start --head`, or give --ray "
                         "local") from error


def _last_begun() -> str:
    """Where Ray looks for this machine's cluster: it may have ended without a word."""
    try:
        return os.environ.get("RAY_ADDRESS") or _CURRENT.read_text().strip()
    except OSError:
        return ""


def _written(ray: ModuleType, job: Job, tasks: list[Task], placement: Placement,
             check: Check) -> Iterator[Report | None]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.verbose_progress = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    resources = _resources(ray, placement)
    most = min(-(-len(tasks) // job.batch_size), placement.workers or _fitting(ray, resources))
    rows = [{"task": pickle.dumps(task)} for task in tasks]
    blocks = -(-len(rows) // job.batch_size)
    data = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        _actor(job), batch_size=job.batch_size, concurrency=(1, most), **resources)
    progress = Progress(job, tasks)
    for row in _watched(data.iter_rows(), check):
        if row is None:
            yield from progress.reports()
            yield None
            continue
        if isinstance(row, ray.exceptions.RayError):
            raise WorkerError(f"Ray gave the job up: {str(row).strip().splitlines()[-1]}; the same command goes "
                              "on") from row
        if isinstance(row, BaseException):
            raise row
        yield progress.ended(_report(row))


class Progress:
    """How far texts have come that no record is there of: actors answer with records, the rest stands in the journals
    on shared storage."""

    def __init__(self, job: Job, tasks: Iterable[Task]) -> None:
        self._job = job
        self._keys = {job.journal(task.key).name: task.key for task in tasks}
        self._resumed = dict(self._written())
        self._next = time.monotonic() + _TELL_S

    def reports(self) -> Iterator[Report]:
        """One for each text with a journal; nothing where the last ones are fresh."""
        if (began := time.monotonic()) < self._next:
            return
        for key, tokens in self._written():
            yield Report(key, tokens, self._resumed.get(key, 0))
        self._next = began + max(_TELL_S, (time.monotonic() - began) / _TELL_PART)

    def ended(self, report: Report) -> Report:
        self._keys.pop(self._job.journal(report.key).name, None)
        return report

    def _written(self) -> Iterator[tuple[str, int]]:
        folder = self._job.work_folder / "journals"
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            if key := self._keys.get(name):
                with suppress(JournalError):  # removed meanwhile, or not to be read for a moment
                    yield key, num_written(folder / name)


def _watched(rows: Iterable[dict[str, Any]], check: Check) -> Iterator[dict[str, Any] | BaseException | None]:
    """The rows as they come, or what ended them, and None where none came for a moment: a text may take hours, and a
    signal should not wait for it."""
    found: SimpleQueue[dict[str, Any] | BaseException | None] = SimpleQueue()

    def wait() -> None:
        try:
            for row in rows:
                found.put(row)
            found.put(None)
        except BaseException as error:  # whatever it is, it is raised where the rows are wanted
            found.put(error)

    Thread(target=wait, daemon=True).start()
    while True:
        check()
        try:
            row = found.get(timeout=_LOOK_S)
        except Empty:
            yield None
            continue
        if row is None:
            return
        yield row


def _resources(ray: ModuleType, placement: Placement) -> dict[str, float]:
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if placement.device == "cuda" and not has_gpus:
        raise UsageError("device is 'cuda', but the cluster has no GPU; use --device cpu or auto")
    is_gpu = has_gpus and placement.device != "cpu"
    return {"num_cpus": float(placement.threads or 1), "num_gpus": float(is_gpu)}


def _fitting(ray: ModuleType, resources: dict[str, float]) -> int:
    there = ray.cluster_resources()
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return max(1, int(min(there.get(names[name], 0) // need for name, need in resources.items() if need)))


def _actor(job: Job) -> type:
    """The class of the pool's actors. They find the job in it: arguments would lie in one node's memory."""

    class Actor:
        """An engine in a process of the cluster. What ends the job travels as an answer: Ray would try it again."""

        def __init__(self) -> None:
            self._error: LongdraftError | MemoryError | None = None
            try:
                self._writer = Writer(job)
            except (LongdraftError, MemoryError) as error:
                self._error = error

        def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
            return {"report": [pickle.dumps(answer) for answer in self._answers(map(pickle.loads, batch["task"]))]}

        def _answers(self, tasks: Iterator[Task]) -> Iterator[Report | LongdraftError | MemoryError]:
            if self._error:
                yield self._error
                return
            try:
                for report in self._writer.write(lambda is_idle: next(tasks, None)):
                    if report and report.record:
                        yield report
            except (LongdraftError, MemoryError) as error:
                yield error

    return Actor


def _report(row: dict[str, Any]) -> Report:
    found = pickle.loads(row["report"])
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Report)
    return found


