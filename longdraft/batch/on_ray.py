"""The same job on a Ray cluster: Ray Data with a pool of actors, an engine each.

Ray places the actors by GPUs or cores, hands each a row when it is free, starts actors again that were lost, and gives
their rows to others, which find the journal on shared storage and go on. What was lost with a node is asked for again,
so a record may come twice; the job takes one.

Ray puts the driver's current folder first on its workers' `sys.path`, and a clone of this repository there would hide
the installed package. So an actor first imports `longdraft` from where the driver has it, if that folder exists on its
node. The driver also sends its identity (version, kernels, weights), and an actor with another one ends the job.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

import torch

import longdraft
from longdraft import kernels
from longdraft.batch.local import Check, Crew
from longdraft.batch.rows import Report, Task
from longdraft.batch.writer import Job, Writer, num_written
from longdraft.errors import JournalError, LongdraftError, ModelError, UsageError, WorkerError
from longdraft.model import config as model_config
from longdraft.model import fingerprint, hub
from longdraft.model.checkpoint import TensorFiles
from longdraft.model.tokenizer import Tokenizer
from longdraft.version import __version__

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
    job = _with_identity(job, "cuda" if resources["num_gpus"] else "cpu")
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


def _with_identity(job: Job, device: str) -> Job:
    """The job for workers on other machines: they take the kernels that this process's environment names."""
    load = {**job.load, "kernels_name": job.load.get("kernels_name") or os.environ.get(kernels.VARIABLE)}
    return replace(job, load=load, identity=identity_of(load, device))


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


def identity_of(load: Mapping[str, Any], device: str) -> dict[str, str]:
    """What workers on `device` must be to write the texts that this process would write: the part of `Engine.identity`
    that is known without loading the weights.

    load  arguments of `longdraft.load`

    The model's hashes are missing where its files are not on this machine, the kernels where there is no such device.
    """
    expected = {"longdraft_version": __version__, "torch_version": str(torch.__version__)}
    cache = hub.Hub(load.get("revision"), cache_dir=load.get("cache_dir"), offline=True)
    try:
        folder = hub.resolve(str(load["model"]), cache)
        config = model_config.read_config(folder)
    except ModelError:
        return expected
    with suppress(ModelError):
        expected |= {"weights": fingerprint.weights_sha256(TensorFiles(folder)), "tokenizer": Tokenizer(folder).sha256}
    if device == "cpu" or torch.cuda.is_available():
        dtype = load.get("dtype", "auto")
        chosen = kernels.choose(device, config.dtype if dtype == "auto" else dtype, load.get("kernels_name"))
        expected |= {"kernels": chosen.name, "dtype": str(chosen.dtype).removeprefix("torch.")}
    return expected


def _actor(job: Job) -> type:
    """The class of the pool's actors.

    Ray pickles it by value. Its methods import `longdraft` themselves, so that none of it is imported before they say
    from where. The job is part of the class: arguments would lie in one node's memory.
    """
    pickled, home = pickle.dumps(job), str(Path(longdraft.__file__).parents[1])

    class Actor:
        def __init__(self) -> None:
            import os
            import pickle
            import sys

            if is_there := os.path.isdir(os.path.join(home, "longdraft")):
                sys.path.insert(0, home)
            import longdraft.batch.on_ray

            if is_there:
                sys.path.remove(home)
            self._worker = longdraft.batch.on_ray.ActorWorker(pickle.loads(pickled))

        def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
            return {"report": self._worker.answers(batch["task"])}

    return Actor


class ActorWorker:
    """An engine in a process of the cluster. An error that ends the job is returned as an answer: Ray would call the
    actor again if it was raised."""

    def __init__(self, job: Job) -> None:
        self._error: LongdraftError | MemoryError | None = None
        try:
            self._writer = Writer(job)
        except (LongdraftError, MemoryError) as error:
            self._error = error

    def answers(self, tasks: Iterable[bytes]) -> list[bytes]:
        """Pickled reports, each with a record, and at most one error at the end."""
        return [pickle.dumps(answer) for answer in self._answers(map(pickle.loads, tasks))]

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


def _report(row: dict[str, Any]) -> Report:
    found = pickle.loads(row["report"])
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Report)
    return found
