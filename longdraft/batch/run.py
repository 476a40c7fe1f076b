"""A job from its input to its output: what is done is skipped, what is not is given to a crew, records are collected.

    OUT          the records, in the order in which texts end
    OUT.work/    while the job is not done: the journals of texts that are begun, and more (longdraft/batch/work_folder.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from longdraft.batch import source, work_folder
from longdraft.batch.local import Check, Crew
from longdraft.batch.records import Records
from longdraft.batch.rows import Report, Task, is_failed, parse
from longdraft.batch.writer import Job
from longdraft.errors import UsageError


@dataclass
class Totals:
    """How far a job has come.

    rows     of the input
    skipped  that were done before this run began; of them `errors` are errors
    done     in this run; of them `failed` are errors
    tokens   of the texts that ended in this run
    resumed  of all tokens, those that were in journals before
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
        """Written in this run."""
        return self.tokens + sum(self.running.values()) - self.resumed

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """If the texts to come are as long as those that ended; None: nobody knows yet."""
        texts = self.done - self.failed
        if not texts or not self.new_tokens:
            return None
        to_come = max(0.0, self.left * self.tokens / texts - sum(self.running.values()))
        return to_come / self.tokens_per_second

    def take(self, report: Report) -> None:
        """A report of a row that is not done."""
        if report.key not in self.running:  # later, what was written in this run may be in its journal too
            self.resumed += report.resumed
        self.running[report.key] = report.tokens
        if report.record is not None:
            self.tokens += self.running.pop(report.key)
            self.done += 1
            self.failed += is_failed(report.record)

    def summary(self) -> dict[str, Any]:
        """For `--stats`."""
        return {"rows": self.rows, "skipped": self.skipped, "done": self.done, "failed": self.errors + self.failed,
                "left": self.left, "new_tokens": self.new_tokens, "resumed_tokens": self.resumed,
                "seconds": self.seconds, "tokens_per_second": self.tokens_per_second}


def run(rows: Path, output: Path, job: Job, crew: Crew, *, check: Check = lambda: None,
        on_progress: Callable[[Totals], None] = lambda totals: None, retry_errors: bool = False) -> Totals:
    """Write what is missing of `output`. Left early, by `check` or in any other way, it can be run again to go on.

    Raises UsageError for files that cannot be used, and for a job that was begun otherwise; what ends a writer.
    """
    if os.path.exists(output) and os.path.exists(rows) and os.path.samefile(output, rows):
        raise UsageError(f"input and output are both {rows}; give the output another name")
    num_rows = source.count(rows)
    settings = {"seed": job.seed, "sampling": dict(job.defaults), "model": job.model}
    work_folder.agree(job.work_folder, output, settings, begin=False)  # before another job's records are taken for ours
    with Records.open(output, job.work_folder, without_errors=retry_errors) as records:
        work_folder.agree(job.work_folder, output, settings, begin=True)
        with work_folder.told(job.work_folder):
            work_folder.forget_attempts(job.work_folder)
        totals = Totals(num_rows, len(records.done), records.failed)
        tasks = _pending(rows, job.model, frozenset(records.done))
        if (first := next(tasks, None)) is not None:
            reports = crew(replace(job, fingerprint=records.fingerprint), chain([first], tasks), check)
            for report in reports:
                if report is None:
                    on_progress(totals)
                    continue
                if report.key in records.done:
                    continue  # its writer was lost with a record on the way, which came all the same
                if report.record is not None:
                    records.add(report.record)
                    with work_folder.told(job.work_folder):
                        work_folder.forget(job.work_folder, report.key)
                totals.take(report)
                on_progress(totals)
        records.finish()
    work_folder.remove(job.work_folder)
    return totals


def _pending(rows: Path, model: str, done: frozenset[str]) -> Iterator[Task]:
    """Tasks without a record, as they are asked for."""
    lines: dict[str, int] = {}
    for line, row in source.rows(rows):
        task = parse(row, line, model)
        if (earlier := lines.setdefault(task.key, line)) != line:
            task = replace(task, key=f"line {line}", problem=f"the id {task.key!r} stands in line {earlier} already; "
                                                             "give every row its own")
        if task.key not in done:
            yield task
