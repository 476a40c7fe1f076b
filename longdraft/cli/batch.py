"""`longdraft batch`: from a file of prompts to a file of texts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from longdraft.cli import options
from longdraft.cli.options import FILES, OptionValues, engine_options, option, sampling_options, with_option_groups
from longdraft.engine.settings import CACHE_RAM, FSYNC, LOADING, TENSOR_PARALLEL
from longdraft.errors import UsageError, check
from longdraft.system import processor

if TYPE_CHECKING:
    from longdraft.batch.local import Executor
    from longdraft.batch.run import Totals
    from longdraft.batch.worker import BatchJob
    from longdraft.system.console import Interrupt

JOB = "Batch job"


class Command(TyperCommand):
    """Accepts `--ray` without a value, which Typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = [place for place, arg in enumerate(args)
                if arg == "--ray" and [*args, "-"][place + 1].startswith("-")]
        for place in reversed(bare):
            args = [*args[: place + 1], "auto", *args[place + 1 :]]
        return super().parse_args(ctx, args)


@with_option_groups
def batch(
    rows: Annotated[Path, typer.Argument(metavar="IN", help="Input: rows as .jsonl or .parquet.", show_default=False)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Output: records as .jsonl or .parquet.",
                                           show_default=False)],
    workers: Annotated[int | None, option("Number of worker processes, each with an engine.", JOB, "--workers",
                                          show_default="this process; with --ray as many as fit")] = None,
    batch_size: Annotated[int, option("Texts that each engine writes at the same time. Larger batches write more "
                                      "tokens per second and need a KV cache per text.", JOB, "--batch-size")] = 4,
    ray: Annotated[str | None, option("Run on the Ray cluster at ADDRESS: auto (also without ADDRESS), local, or "
                                      "host:port. All nodes must share the storage of --work.", JOB, "--ray",
                                      metavar="[ADDRESS]")] = None,
    work: Annotated[Path | None, options.folder_option("Folder for journals until the job is done.", JOB,
                                                       show_default="OUT.work")] = None,
    retries: Annotated[int, option("How often a row may end its worker without a new token before it becomes an error "
                                   "record.", JOB)] = 2,
    retry_errors: Annotated[bool, option("Write the rows of error records again.", JOB, "--retry-errors")] = False,
    served_model_name: Annotated[str | None, option("The model's name in requests and records.", JOB,
                                                    show_default="--model")] = None,
    stats: Annotated[Path | None, option("Write the job's totals to this JSON file.", FILES)] = None,
    quiet: options.Quiet = False,
    *,
    journaling: Annotated[OptionValues, engine_options((FSYNC,), FILES)],
    loading: Annotated[OptionValues, engine_options(
        (*LOADING, TENSOR_PARALLEL, CACHE_RAM),
        threads=dict(help="CPU threads of each worker.", shown="the cores divided by the workers"))],
    sampling: Annotated[OptionValues, sampling_options(
        without=("stop_token_ids", "logit_bias"),
        max_new_tokens=dict(help="Maximum number of new tokens per text."),
        min_new_tokens=dict(help="Minimum number of new tokens before a text may end."),
        seed=dict(help="Seed of the job. A row without a seed derives its own from this one and its id.", default=0,
                  shown=""),
        on_loop=dict(default="warn"))],
) -> int:
    """Write a text for every row of IN into OUT. Start the same command again to resume after any interruption.

    Rows are lines of OpenAI's batch API, or objects with id, prompt (or messages) and sampling settings, which override
    these options. A row that cannot be written becomes an error record, and the exit status is then 1. Records are in
    the order in which texts end.
    """
    from longdraft.checkpoint.hub import from_anywhere, with_file
    from longdraft.journal.writer import parse_fsync
    from longdraft.request.sampling_params import SamplingParams

    SamplingParams.from_names(sampling)  # fail before any file is read
    seed = sampling.pop("seed")
    parse_fsync(journaling["fsync"])
    check(workers is None or 1 <= workers <= 4096, "--workers", workers, "1 to 4096")
    check(1 <= batch_size <= 1024, "--batch-size", batch_size, "1 to 1024")
    check(0 <= retries <= 1000, "--retries", retries, "0 to 1000")
    if ray is None and workers and workers > 1 and _is_on_gpu(loading["device"]):
        raise UsageError("--workers would share one GPU; leave the option out, or use --ray, which gives "
                         "each worker its own GPU")
    if ray is None and loading["threads"] is None and workers:
        loading["threads"] = max(1, processor.cores() // workers)
    threads, tensor_parallel, cache_dir = loading["threads"], loading["tensor_parallel"], loading["cache_dir"]
    model, file = loading["model"], loading.pop("file")
    load = {**loading, "model": from_anywhere(with_file(model, file)), "cache_dir": cache_dir and str(cache_dir),
            **{name: loading[name] and from_anywhere(str(loading[name]))
               for name in ("tokenizer", "heads", "chat_template")}}
    options.require_one_process(tensor_parallel)
    if tensor_parallel > 1 and (workers or ray is not None):
        raise UsageError("--tensor-parallel writes one text at a time on all ranks; leave --workers and --ray out")
    if options.is_follower():
        from longdraft.cli.stream import follow
        from longdraft.engine.loading import load as load_engine

        return follow(lambda: load_engine(**load))
    from longdraft.batch.worker import BatchJob

    job = BatchJob(Path(os.path.abspath(work or f"{output}.work")), load, sampling, seed, served_model_name or model,
                   journaling["fsync"], retries, batch_size=1 if tensor_parallel > 1 else batch_size)
    return _run(rows, output, job, _executor(workers, ray, threads, loading["device"]), retry_errors, stats, quiet)


def _is_on_gpu(device: str) -> bool:
    """Whether `longdraft.load` will choose a GPU."""
    if device == "auto":
        import torch

        return torch.cuda.is_available()
    return device == "cuda"


def _executor(workers: int | None, ray: str | None, threads: int | None, device: str) -> Executor:
    from longdraft.batch.local import in_process, worker_processes

    if ray is not None:
        from longdraft.batch.on_ray import WorkerResources, on_ray

        return on_ray(ray, WorkerResources(workers, threads, device))
    return worker_processes(workers) if workers and workers > 1 else in_process


def _run(rows: Path, output: Path, job: BatchJob, executor: Executor, retry_errors: bool, stats: Path | None,
         quiet: bool) -> int:
    from longdraft.batch.job_files import is_parquet
    from longdraft.batch.run import run
    from longdraft.cli.display import BatchDisplay
    from longdraft.system.console import Interrupt, Interrupted
    from longdraft.system.files import open_outputs

    files = open_outputs({"--stats": stats})
    totals: Totals | None = None

    def shown(now: Totals) -> None:
        nonlocal totals
        totals = now
        display.show(now)

    try:
        with Interrupt() as interrupt, BatchDisplay(quiet=quiet) as display, contextlib.suppress(Interrupted):
            totals = run(rows, output, job, executor, check=interrupt.check, on_progress=shown,
                         retry_errors=retry_errors)
        if totals and files:
            files["--stats"].write((json.dumps(totals.summary(), indent=2) + "\n").encode())
            files["--stats"].finish()
        return _end(totals, interrupt, quiet, may_retry=not is_parquet(output))
    finally:
        for file in files.values():
            file.abandon()


def _end(totals: Totals | None, interrupt: Interrupt, quiet: bool, *, may_retry: bool) -> int:
    parts = [totals.last_line(may_retry=may_retry)] if totals else []
    if interrupt.number:
        parts = ["interrupted", *parts, "the same command continues the job"]
    if not quiet or interrupt.number:
        print(f"longdraft: {'; '.join(parts)}", file=sys.stderr)
    if interrupt.number:
        return 128 + interrupt.number
    return 1 if totals and totals.errors + totals.failed else 0
