"""The executor that writes a batch job on a Ray cluster: Ray Data with a pool of actors, an engine each.

Ray places the actors by GPUs or cores and sends each a row when it is free. It restarts lost actors and sends their
rows to others, which resume the journals on shared storage. Rows whose records were lost with a node are written again,
so a record may arrive twice; the job keeps one.

Ray puts the driver's current folder first on its workers' `sys.path`, and a clone of this repository there would hide
the installed package. Therefore an actor first imports `longdraft` from the driver's location, if that folder exists on
its node. The driver also sends its identity (version, kernels, weights), and an actor with another one ends the job.
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

from longdraft import kernels
from longdraft.batch import work_folder
from longdraft.batch.local import Check, Executor
from longdraft.batch.requests import BatchRequest, RowProgress
from longdraft.batch.worker import BatchJob, BatchWorker, num_written
from longdraft.checkpoint import config_file, fingerprint, hub
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import JournalError, LongdraftError, ModelError, UsageError, WorkerError, missing_extra
from longdraft.text.tokenizer import Tokenizer
from longdraft.version import __version__

_POLL_S = 0.25  # how often a waiting job checks for signals
_REPORT_S = 5.0  # least time between two readings of the journals
_REPORT_SHARE = 0.05  # largest share of the time that reading them may take
_CONNECT_S = 10.0  # how long to wait for the cluster's address to answer
_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")  # where Ray saves the address of this machine's last cluster
_WINDOW = 8192  # rows that Ray holds at a time, in blocks of `batch_size`


@dataclass(frozen=True)
class WorkerResources:
    """The number of actors and the resources of each.

    workers  largest number of actors; None: as many as fit into the cluster
    threads  CPU cores of each; None: 1
    device   auto, cpu or cuda; with cuda, or auto on a cluster with GPUs, each takes one GPU
    """

    workers: int | None
    threads: int | None
    device: str


def on_ray(address: str, resources: WorkerResources) -> Executor:
    """An executor on the cluster at `address`; "auto": the one of this machine, "local": a new one on this machine."""

    def execute(job: BatchJob, requests: Iterator[BatchRequest], check: Check) -> Iterator[RowProgress | None]:
        ray = _library()
        must_connect = not ray.is_initialized()
        if must_connect:
            _connect(ray, address)
        try:
            while window := list(islice(requests, _WINDOW)):
                yield from _execute(ray, job, window, resources, check)
        finally:
            if must_connect:
                ray.shutdown()

    return execute


def _library() -> ModuleType:
    try:
        import_module("ray.data")
        return import_module("ray")
    except ImportError as error:
        raise missing_extra("--ray", str(error.name), "ray") from error


def _connect(ray: ModuleType, address: str) -> None:
    host, _, port = (_last_cluster() if address == "auto" else address).rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise UsageError(f"--ray {address}: {reason}; start a cluster with `ray start --head`, or give --ray "
                         "local") from error


def _last_cluster() -> str:
    """The address where Ray looks for this machine's cluster, which may have ended."""
    try:
        return os.environ.get("RAY_ADDRESS") or _CURRENT_CLUSTER.read_text().strip()
    except OSError:
        return ""


def _execute(ray: ModuleType, job: BatchJob, requests: list[BatchRequest], wanted: WorkerResources,
             check: Check) -> Iterator[RowProgress | None]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.verbose_progress = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    resources = _per_actor(ray, wanted)
    job = _with_identity(job, "cuda" if resources["num_gpus"] else "cpu")
    rows = [{"request": pickle.dumps(request)} for request in requests]
    blocks = -(-len(rows) // job.batch_size)
    most = min(blocks, wanted.workers or _fitting(ray, resources))
    data = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
        _actor(job), batch_size=job.batch_size, concurrency=(1, most), **resources)
    progress = JournalProgress(job, requests)
    for row in _with_pauses(data.iter_rows(), check):
        if row is None:
            yield from progress.reports()
            yield None
            continue
        if isinstance(row, ray.exceptions.RayError):
            raise WorkerError(f"Ray ended the job: {str(row).strip().splitlines()[-1]}; the same command "
                              "continues it") from row
        if isinstance(row, BaseException):
            raise row
        yield progress.ended(_unpickled(row))


def _with_identity(job: BatchJob, device: str) -> BatchJob:
    """The job with this process's identity, and with the kernels that LONGDRAFT_KERNELS names here."""
    load = {**job.load, "kernels_name": job.load.get("kernels_name") or os.environ.get(kernels.VARIABLE)}
    return replace(job, load=load, identity=identity_of(load, device))


class JournalProgress:
    """The progress of unfinished texts, read from their journals on shared storage: actors return records only."""

    def __init__(self, job: BatchJob, requests: Iterable[BatchRequest]) -> None:
        self._job = job
        self._keys = {job.journal(request.key).name: request.key for request in requests}
        self._resumed = dict(self._written())
        self._next = time.monotonic() + _REPORT_S

    def reports(self) -> Iterator[RowProgress]:
        """One for each text with a journal; none if the last ones are recent."""
        if (began := time.monotonic()) < self._next:
            return
        for key, tokens in self._written():
            yield RowProgress(key, tokens, self._resumed.get(key, 0))
        self._next = began + max(_REPORT_S, (time.monotonic() - began) / _REPORT_SHARE)

    def ended(self, progress: RowProgress) -> RowProgress:
        self._keys.pop(self._job.journal(progress.key).name, None)
        return progress

    def _written(self) -> Iterator[tuple[str, int]]:
        folder = work_folder.journals(self._job.work_folder)
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            if key := self._keys.get(name):
                with suppress(JournalError):  # removed meanwhile, or not readable for a moment
                    yield key, num_written(folder / name)


def _with_pauses(rows: Iterable[dict[str, Any]], check: Check) -> Iterator[dict[str, Any] | BaseException | None]:
    """The rows as they arrive, or the error that ended them, and None after `_POLL_S` without one: a text may take
    hours, and a signal must not wait for it."""
    arrived: SimpleQueue[dict[str, Any] | BaseException | None] = SimpleQueue()

    def wait() -> None:
        try:
            for row in rows:
                arrived.put(row)
            arrived.put(None)
        except BaseException as error:  # any error is raised in the thread that reads the rows
            arrived.put(error)

    Thread(target=wait, daemon=True).start()
    while True:
        check()
        try:
            row = arrived.get(timeout=_POLL_S)
        except Empty:
            yield None
            continue
        if row is None:
            return
        yield row


def _per_actor(ray: ModuleType, wanted: WorkerResources) -> dict[str, float]:
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    if wanted.device == "cuda" and not has_gpus:
        raise UsageError("device is 'cuda', but the cluster has no GPU; use --device cpu or auto")
    is_gpu = has_gpus and wanted.device != "cpu"
    return {"num_cpus": float(wanted.threads or 1), "num_gpus": float(is_gpu)}


def _fitting(ray: ModuleType, resources: dict[str, float]) -> int:
    available = ray.cluster_resources()
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return max(1, int(min(available.get(names[name], 0) // need for name, need in resources.items() if need)))


def identity_of(load: Mapping[str, Any], device: str) -> dict[str, str]:
    """The identity that workers on `device` must have to write this process's texts: the part of `Engine.identity` that
    is known without loading the weights.

    load  arguments of `longdraft.load`

    It lacks the model's hashes if the files are not on this machine, and the kernels if there is no such device here.
    """
    expected = {"longdraft_version": __version__, "torch_version": str(torch.__version__)}
    cache = hub.Hub(load.get("revision"), cache_dir=load.get("cache_dir"), offline=True)
    try:
        folder = hub.resolve(str(load["model"]), cache)
        config = config_file.read_config(folder)
    except ModelError:
        return expected
    with suppress(ModelError):
        words = hub.resolve_tokenizer(str(load["tokenizer"]), cache) if load.get("tokenizer") else folder
        expected |= {"weights": fingerprint.weights_sha256(TensorFiles(folder)), "tokenizer": Tokenizer(words).sha256}
    if device == "cpu" or torch.cuda.is_available():
        dtype = load.get("dtype", "auto")
        chosen = kernels.choose(device, config.dtype if dtype == "auto" else dtype, load.get("kernels_name"))
        expected |= {"kernels": chosen.name, "dtype": str(chosen.dtype).removeprefix("torch.")}
    return expected


def _actor(job: BatchJob) -> type:
    """The class of the pool's actors.

    Ray pickles it by value, and its methods import `longdraft` themselves: no part of the package may be imported
    before the path is set. The job is part of the class, because Ray keeps arguments in the memory of one node.
    """
    pickled = pickle.dumps(job)
    home = str(Path(kernels.__file__).parents[2])

    class Actor:
        def __init__(self) -> None:
            import os
            import pickle
            import sys

            if is_on_node := os.path.isdir(os.path.join(home, "longdraft")):
                sys.path.insert(0, home)
            import longdraft.batch.on_ray

            if is_on_node:
                sys.path.remove(home)
            self._worker = longdraft.batch.on_ray.ActorWorker(pickle.loads(pickled))

        def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
            return {"progress": self._worker.answers(batch["request"])}

    return Actor


class ActorWorker:
    """An engine in a process of the cluster. It returns errors that end the job as answers: Ray would retry the call if
    they were raised."""

    def __init__(self, job: BatchJob) -> None:
        self._error: LongdraftError | MemoryError | None = None
        try:
            self._batch_worker = BatchWorker(job)
        except (LongdraftError, MemoryError) as error:
            self._error = error

    def answers(self, requests: Iterable[bytes]) -> list[bytes]:
        """The pickled progress of finished rows, and at most one error at the end."""
        if self._error:
            return [pickle.dumps(self._error)]
        answers: list[bytes] = []
        unwritten = map(pickle.loads, requests)
        try:
            for progress in self._batch_worker.write(lambda is_idle: next(unwritten, None)):
                if progress and progress.record:
                    answers.append(pickle.dumps(progress))
        except (LongdraftError, MemoryError) as error:
            answers.append(pickle.dumps(error))
        return answers


def _unpickled(row: dict[str, Any]) -> RowProgress:
    answer = pickle.loads(row["progress"])
    if isinstance(answer, Exception):
        raise answer
    assert isinstance(answer, RowProgress)
    return answer
