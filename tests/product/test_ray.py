"""A batch job on a Ray cluster of several nodes on this machine: killed workers and nodes do not change the output.

The tests that start a cluster take a minute on two cores: `make cluster` runs them.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.jobs import put, records, sorted_lines, writers
from longdraft.__main__ import run as longdraft_command
from longdraft.batch import job_files
from longdraft.batch import on_ray as on_ray_module
from longdraft.batch.local import in_process
from longdraft.batch.on_ray import ActorWorker, JournalProgress, WorkerResources, identity_of, on_ray
from longdraft.batch.requests import BatchRequest, RowProgress, parse
from longdraft.batch.run import run
from longdraft.batch.worker import BatchJob, BatchWorker
from longdraft.errors import ModelError, UsageError

ray = pytest.importorskip("ray", reason="needs ray; pip install '.[ray]'")

pytestmark = pytest.mark.full


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster: a head node without CPU cores, and two worker nodes with one core each."""
    from ray._private import worker
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
    nodes = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 0, "include_dashboard": False,
        "_system_config": {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, logging_level=logging.ERROR, log_to_driver=False)
    yield nodes
    ray.shutdown()
    worker.global_worker.node = None  # Ray keeps the node of an ended connection and then refuses to remove it
    nodes.shutdown()


@pytest.mark.parametrize("address", [["--ray"], ["--ray", "127.0.0.1:9"], ["--ray", "nonsense"]])
def test_a_missing_cluster_prints_one_line(tmp_path, capfd, monkeypatch, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rows = put(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}])
    assert longdraft_command(["batch", str(rows), str(tmp_path / "out.jsonl"), *address]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"longdraft: --ray {[*address, 'auto'][1]}: ") and said.count("\n") == 1


def test_the_saved_address_of_an_ended_cluster_prints_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray_module, "_CURRENT_CLUSTER", put(tmp_path / "current", ["127.0.0.1:9"]))
    rows = put(tmp_path / "in.jsonl", [{"id": "a", "prompt": "x"}])
    assert longdraft_command(["batch", str(rows), str(tmp_path / "out.jsonl"), "--ray"]) == 2
    assert capfd.readouterr().err.startswith("longdraft: --ray auto: ")


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def work_on(folder: Path, num_rows: int, num_tokens: int) -> tuple[Path, BatchJob]:
    """An input file and a job; the last row is invalid JSON."""
    make_checkpoint(folder / "tiny", num_key_value_heads=2)
    rows = [{"id": f"row {i}", "prompt": "It was", "max_new_tokens": num_tokens, "ignore_eos": True}
            for i in range(num_rows - 1)]
    load = {"model": str(folder / "tiny"), "drafter": "plain", "threads": 1}
    job = BatchJob(folder / "work", load, {"on_loop": "off"}, 0, "tiny", "never")
    return put(folder / "in.jsonl", [*rows, "{"]), job


def test_progress_is_read_from_the_journals(tmp_path, monkeypatch):
    rows, job = work_on(tmp_path, 4, 30)
    tasks = [parse(row, line, "tiny") for line, row in job_files.read_rows(rows)]

    def write(task: BatchRequest, steps: int) -> None:
        given = iter([task])
        with BatchWorker(job) as writer:
            reports = filter(None, writer.write(lambda is_idle: next(given, None)))
            assert len(list(islice(reports, steps))) == steps

    write(tasks[0], 5)
    progress = JournalProgress(job, tasks)
    assert not list(progress.reports())  # the journals were read a moment ago
    write(tasks[0], 10)
    write(tasks[1], 7)
    monkeypatch.setattr(on_ray_module, "_REPORT_S", 0.0)
    monkeypatch.setattr(on_ray_module, "_REPORT_SHARE", 1e9)
    monkeypatch.setattr(progress, "_next", 0.0)
    (first, _, resumed, none), (second, *_) = sorted(progress.reports())
    assert first == "row 0" and resumed == 5 and none is None and second == "row 1"
    # After a resume, the first report includes the tokens of the earlier run.
    assert {key: tokens for key, tokens, *_ in progress.reports()} == {"row 0": 14, "row 1": 7}
    progress.ended(RowProgress("row 0", 30, 5, {"text": ""}))
    assert [key for key, *_ in progress.reports()] == ["row 1"]


@pytest.mark.cluster
def test_a_cluster_writes_the_same_records_as_one_process(cluster, tmp_path):
    rows, job = work_on(tmp_path, 4, 40)
    totals = run(rows, tmp_path / "out.jsonl", job, on_ray("auto", WorkerResources(2, 1, "cpu")))
    run(rows, tmp_path / "alone.jsonl", job, in_process)
    assert (totals.done, totals.failed, totals.new_tokens) == (4, 1, 120)
    assert sorted_lines(tmp_path / "out.jsonl") == sorted_lines(tmp_path / "alone.jsonl")
    with pytest.raises(UsageError, match="the cluster has no GPU"):
        run(rows, tmp_path / "gpu.jsonl", job, on_ray("auto", WorkerResources(None, None, "cuda")))
    nobody = replace(job, work_folder=tmp_path / "other work", load={**job.load, "model": "nobody"})
    with pytest.raises(ModelError, match="no model 'nobody'"):
        run(rows, tmp_path / "nobody.jsonl", nobody, on_ray("auto", WorkerResources(1, 1, "cpu")))


@pytest.mark.cluster
def test_every_row_is_written_once_after_a_worker_and_a_node_are_killed(cluster, tmp_path):
    rows, job = work_on(tmp_path, 7, 1500)
    killed: list[str] = []

    def kill() -> None:
        """Kill a worker that is writing a text, then remove a node whose worker is writing one."""
        while len(killed) < 2:
            time.sleep(0.02)
            for writer in writers(job.work_folder):
                try:
                    raylet = parent_of(writer)
                    node = next((node for node in cluster.worker_nodes
                                 if node.all_processes["raylet"][0].process.pid == raylet), None)
                    if not killed:
                        os.kill(writer, signal.SIGKILL)
                        killed.append("worker")
                        time.sleep(1)
                    elif node is not None:
                        cluster.remove_node(node, allow_graceful=False)
                        killed.append("node")
                except OSError:
                    continue
                break

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    totals = run(rows, tmp_path / "out.jsonl", job, on_ray("auto", WorkerResources(None, 1, "cpu")))
    killer.join(timeout=1)
    assert killed == ["worker", "node"] and totals.done == 7 and totals.failed == 1
    keys = [record["id"] for record in records(tmp_path / "out.jsonl")]
    assert len({*keys}) == len(keys) == 7
    run(rows, tmp_path / "alone.jsonl", job, in_process)
    assert sorted_lines(tmp_path / "out.jsonl") == sorted_lines(tmp_path / "alone.jsonl")


def test_the_required_worker_identity_is_a_subset_of_the_engine_identity(tmp_path):
    _, job = work_on(tmp_path, 2, 5)
    expected = identity_of(job.load, "cpu")
    with BatchWorker(replace(job, identity=expected)) as writer:  # the same identity raises no error
        found = writer._engine.identity
    assert expected.items() <= found.items()
    assert expected.keys() == {"longdraft_version", "torch_version", "weights", "tokenizer", "kernels", "dtype"}


def test_the_identity_of_a_model_missing_on_this_machine_has_no_hashes(tmp_path):
    assert identity_of({"model": str(tmp_path / "nowhere")}, "cpu").keys() == {"longdraft_version", "torch_version"}


@pytest.mark.parametrize("name, here, there", [
    ("longdraft_version", "0.0.1", None), ("kernels", "avx512", "reference"), ("weights", "0123", None)])
def test_a_worker_with_another_identity_ends_the_job_and_names_the_difference(tmp_path, name, here, there):
    _, job = work_on(tmp_path, 2, 5)
    job = replace(job, load={**job.load, "kernels_name": there})
    found = identity_of(job.load, "cpu")[name]
    worker = ActorWorker(replace(job, identity={**identity_of(job.load, "cpu"), name: here}))
    error, = map(pickle.loads, worker.answers([pickle.dumps(BatchRequest("a", prompt="x"))]))
    assert isinstance(error, UsageError)
    assert f"differs from the process that started the job: {name} is {found}, expected {here}; install" in str(error)


@pytest.mark.cluster
def test_workers_import_the_package_of_the_driver_instead_of_the_current_folder(tmp_path):
    """The current folder is a clone without compiled kernels; the installed package is elsewhere."""
    rows, _ = work_on(tmp_path, 4, 20)
    package = Path(longdraft.__file__).parent
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "longdraft").symlink_to(package)
    shutil.copytree(package, tmp_path / "clone" / "longdraft", ignore=shutil.ignore_patterns("*.so", "bundled"))
    command = tmp_path / "bin" / "longdraft"
    command.parent.mkdir()
    command.write_text("from longdraft.__main__ import main\nmain()\n")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    for output, options in (("ray", ["--ray", "local", "--workers", "1"]), ("alone", [])):
        subprocess.run([sys.executable, command, "batch", rows, tmp_path / f"{output}.jsonl", "--model",
                        tmp_path / "tiny", "--drafter", "plain", "--threads", "1", *options], cwd=tmp_path / "clone",
                       env=environment | {"PYTHONPATH": str(tmp_path / "site")}, check=False)
    assert sorted_lines(tmp_path / "ray.jsonl") == sorted_lines(tmp_path / "alone.jsonl")
