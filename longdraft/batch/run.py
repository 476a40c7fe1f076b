"""A batch job from its input to its output: skip finished rows, pass the rest to an executor, collect records.

    OUT          the records, in the order in which texts end
    OUT.work/    until the job is done: journals of unfinished texts, and more (longdraft/batch/work_folder.py)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from longdraft.batch import job_files, work_folder
from longdraft.batch.job_files import RecordFile
from longdraft.batch.local import Check, Executor
from longdraft.batch.requests import BatchRequest, RowProgress, is_failed, parse
from longdraft.batch.worker import BatchJob
from longdraft.errors import UsageError
from longdraft.system.console import clock


@dataclass
class Totals:
    """The progress of a job.

    rows     rows of the input
    skipped  rows that earlier runs finished; `errors` of them are errors
    done     rows that this run finished; `failed` of them are errors
    tokens   tokens of the texts that ended in this run
    resumed  how many of all tokens were in journals before this run
    running  tokens so far of each text that is being written
    """

    rows: int
    skipped: int
    errors: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    resumed: int = 0
    running: dict[str, int] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> int:
        return max(0, self.rows - self.skipped - self.done)

    @property
    def new_tokens(self) -> int:
        """Tokens that this run wrote."""
        return self.tokens + sum(self.running.values()) - self.resumed

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """An estimate that takes the remaining texts to be as long as the finished ones; None before the first."""
        texts = self.done - self.failed
        if not texts or not self.new_tokens:
            return None
        to_come = max(0.0, self.left * self.tokens / texts - sum(self.running.values()))
        return to_come / self.tokens_per_second

    def add(self, progress: RowProgress) -> None:
        """Count the progress of an unfinished row."""
        if progress.key not in self.running:  # later, tokens of this run may be in its journal too
            self.resumed += progress.resumed
        self.running[progress.key] = progress.tokens
        if progress.record is not None:
            self.tokens += self.running.pop(progress.key)
            self.done += 1
            self.failed += is_failed(progress.record)

    def summary(self) -> dict[str, Any]:
        """For `--stats`."""
        return {"rows": self.rows, "skipped": self.skipped, "done": self.done, "failed": self.errors + self.failed,
                "left": self.left, "new_tokens": self.new_tokens, "resumed_tokens": self.resumed,
                "seconds": self.seconds, "tokens_per_second": self.tokens_per_second}

    def live_line(self) -> str:
        """12 of 100 rows, 1 failed · 4 running · 45,000 tokens · 120.3 tokens/s · 31:00 left"""
        errors = self.errors + self.failed
        failed = f", {errors:,} failed" if errors else ""
        left = "" if self.seconds_left is None else f" · {clock(self.seconds_left)} left"
        return (f"{self.skipped + self.done:,} of {self.rows:,} rows{failed} · {len(self.running):,} running · "
                f"{self.new_tokens:,} tokens · {self.tokens_per_second:.1f} tokens/s{left}")

    def last_line(self, *, may_retry: bool = True) -> str:
        """The outcome of this run. may_retry: whether the output can be continued."""
        parts = [f"{self.done:,} of {self.rows:,} rows written"]
        before = "was done before and stays as it is" if self.skipped == 1 else "were done before and stay as they are"
        parts += [f"{self.skipped:,} {before}"] if self.skipped else []
        errors = self.errors + self.failed
        which = "is an error" if errors == 1 else "are errors"
        parts += [f"{errors:,} {which}" + " (--retry-errors writes them again)" * may_retry] if errors else []
        parts += [f"{self.new_tokens:,} tokens in {clock(self.seconds)}, {self.tokens_per_second:.1f} tokens/s"]
        return "; ".join(parts)


def run(rows: Path, output: Path, job: BatchJob, executor: Executor, *, check: Check = lambda: None,
        on_progress: Callable[[Totals], None] = lambda totals: None, retry_errors: bool = False) -> Totals:
    """Write the rows that `output` lacks. After any interruption, by `check` or otherwise, run it again to continue.

    Raises UsageError for files that cannot be used and for a job that was begun with other settings, and the errors
    that end a worker.
    """
    if os.path.exists(output) and os.path.exists(rows) and os.path.samefile(output, rows):
        raise UsageError(f"input and output are both {rows}; give the output another name")
    num_rows = job_files.count_rows(rows)
    settings = {"seed": job.seed, "sampling": dict(job.defaults), "model": job.model}
    # First, so that another job's records are not mistaken for this one's.
    work_folder.require_same_job(job.work_folder, output, settings, begin=False)
    with RecordFile(output, job.work_folder, without_errors=retry_errors) as records:
        work_folder.require_same_job(job.work_folder, output, settings, begin=True)
        totals = Totals(num_rows, len(records.done), sum(records.done.values()))
        requests = _pending(rows, job.model, dict(records.done), totals)
        try:
            if (first := next(requests, None)) is not None:
                updates = executor(replace(job, fingerprint=records.fingerprint), chain([first], requests), check)
                for progress in updates:
                    if progress is None:
                        on_progress(totals)
                        continue
                    if progress.key in records.done:
                        continue  # a worker was lost after it sent this record, and the row was written again
                    if progress.record is not None:
                        records.add(progress.record)
                        with work_folder.translate_storage_errors(job.work_folder):
                            work_folder.forget(job.work_folder, progress.key)
                    totals.add(progress)
                    on_progress(totals)
        finally:  # reached unless this process is killed, perhaps by a row: then its attempts count next time
            with contextlib.suppress(OSError):
                work_folder.forget_attempts(job.work_folder)
        records.finish()
    work_folder.remove_work_folder(job.work_folder)
    return totals


def _pending(rows: Path, model: str, done: Mapping[str, bool], totals: Totals) -> Iterator[BatchRequest]:
    """Requests without a record, one at a time. done: as in `RecordFile`

    At the end, `totals` counts the records of these rows alone: the output may have others.
    """
    lines: dict[str, int] = {}
    skipped = errors = 0
    for line, row in job_files.read_rows(rows):
        request = parse(row, line, model)
        if (earlier := lines.setdefault(request.key, line)) != line:
            problem = f"the id {request.key!r} is that of line {earlier} too; give every row its own"
            request = replace(request, key=f"line {line}", problem=problem)
        if request.key in done:
            skipped += 1
            errors += done[request.key]
        else:
            yield request
    totals.skipped, totals.errors = skipped, errors
