"""Run an experiment: each text is written by all its systems in turns, and each turn is appended to the results.

    plan = ExperimentPlan(experiment, experiment.scale("small"), "small", [Path("novel.txt")], seeds=[7], stretches=1)
    results = run_experiment(plan, Engines(engine), [engine.encode(text)], Path("results.jsonl"), limits)
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from longdraft.engine import run_statistics
from longdraft.engine.engine import Engine
from longdraft.errors import check
from longdraft.report.turns import Record
from longdraft.system import machine
from longdraft_bench.machine import device
from longdraft_bench.paper.experiment import Experiment, Scale, TextSpec
from longdraft_bench.results import Results, ResultsWriter
from longdraft_bench.systems import Engines
from longdraft_bench.turns import write_in_turns

_STEP_OVERHEAD_BYTES = 1e6  # the rest of a step as bytes read, for the estimate of the remaining time


class ExperimentPlan(NamedTuple):
    """An experiment at a scale, on prompts from `stretches` places of each text, with each of the seeds."""

    experiment: Experiment
    scale: Scale
    scale_name: str
    prompt_files: Sequence[Path]
    seeds: Sequence[int]
    stretches: int

    def with_texts(self, count: int) -> ExperimentPlan:
        """The plan for `count` texts, of which a file may hold several; `stretches` counts those of all texts."""
        return self._replace(stretches=self.stretches * count)

    def identity(self) -> Record:
        """The properties of the experiment that a result depends on."""
        systems = {name: asdict(system) for name, system in self.experiment.systems.items()}
        return {"experiment": self.experiment.name, "scale": self.scale_name, "lengths": list(self.scale.lengths),
                "turn": self.scale.turn, "seeds": list(self.seeds), "stretches": self.stretches,
                "profile": self.experiment.profile,
                "systems_sha256": hashlib.sha256(json.dumps(systems, sort_keys=True).encode()).hexdigest()}


class WorkUnit(NamedTuple):
    """A text and the systems that write it at the same time, the reference first. `key` names it in the results."""

    spec: TextSpec
    key: str
    systems: list[str]


def run_experiment(plan: ExperimentPlan, engines: Engines, texts: Sequence[Sequence[int]], output: Path | None,
                   limits: Record) -> Results:
    """Measure what is missing in `output`. Returns all results, including those of earlier runs.

    texts   tokens of the texts that prompts are taken from
    limits  limits of this machine, measured in this run
    """
    engine, plan = engines.engine, plan.with_texts(len(texts))
    kernels = engine.model.kernels
    session = machine.description(kernels) | engine.provenance | plan.identity() | device.description(
        str(kernels.device)) | {
        "device": str(kernels.device), "kind": "session", "limits": limits,
        "prompt_file": ", ".join(path.name for path in plan.prompt_files),
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "prompt_sha256": run_statistics.sha256_tokens([token for ids in texts for token in ids]), **engines.provenance}
    planned = plan.experiment.plan(plan.scale, plan.seeds, plan.stretches)
    prompts = {spec: _prompt(texts, spec, plan.stretches) for spec in planned}
    for spec, prompt in prompts.items():  # before the first text is measured for hours
        engine.check_request(prompt, spec.sampling)
    ends = plan.experiment.ends(plan.scale)
    with closing(ResultsWriter(output, session)) as writer:
        units = list(_units(engine, planned, writer.results))
        with _progress(units, ends, engine, writer.results) as show:
            for unit in units:
                _write_unit(plan, engines, writer, unit, prompts[unit.spec], ends, show)
    writer.results.check()
    return writer.results


def _units(engine: Engine, texts: Mapping[TextSpec, list[str]], known: Results) -> Iterator[WorkUnit]:
    """Split the systems of each text so that their caches fit into memory; the reference writes with each part. Where
    not even two caches fit, the two systems of a part read their text again for each turn (`write_in_turns`).

    Units that earlier runs began come first, then the systems that no run has begun.
    """
    for spec, (reference, *names) in texts.items():
        begun = [text.about for text in known.texts.values() if spec.is_of(text.about)]
        yield from (WorkUnit(spec, about["text"], list(about["systems"])) for about in begun)
        others = [name for name in names if not any(name in about["systems"] for about in begun)]
        if begun and not others:
            continue
        most = max(1, device.num_caches(engine.model, spec.prefill + spec.sampling.max_new_tokens) - 1)
        for start in range(0, max(1, len(others)), most):
            part = others[start : start + most]
            yield WorkUnit(spec, f"{spec.key}/{'+'.join(part)}", [reference, *part])


def _write_unit(plan: ExperimentPlan, engines: Engines, writer: ResultsWriter, unit: WorkUnit, prompt: Sequence[int],
                ends: Sequence[int], show: Callable[[Record], None]) -> None:
    systems = {name: plan.experiment.systems[name] for name in unit.systems}
    if unit.key not in writer.results.texts:
        about = {name: {**asdict(system), "options": system.options_for(unit.spec.prefill),
                        "own_text": system.has_own_text} for name, system in systems.items()}
        writer.append({"kind": "text", "text": unit.key, **unit.spec.about, "reference": unit.systems[0],
                       "systems": about, "prompt_sha256": run_statistics.sha256_tokens(prompt), "ends": list(ends)})

    def emit(record: Record) -> None:
        writer.append(record)
        show(record)

    text = writer.results.texts[unit.key]
    fits = device.num_caches(engines.engine.model, len(prompt) + unit.spec.sampling.max_new_tokens)
    write_in_turns(engines, systems, prompt, unit.spec.sampling, text.about["ends"], text, emit,
                   holds_all=fits >= len(systems))


def _prompt(texts: Sequence[Sequence[int]], spec: TextSpec, stretches: int) -> list[int]:
    """The first `prefill` tokens of a stretch. Stretches begin at even distances in each text; those of the first text
    come first."""
    per_text = stretches // len(texts)
    ids = texts[spec.stretch // per_text]
    start = len(ids) // per_text * (spec.stretch % per_text)
    check(start + spec.prefill <= len(ids), "tokens in --prompt-file", len(ids),
          f"at least {start + spec.prefill} for prompts of {spec.prefill} from {per_text} stretches")
    return list(ids[start : start + spec.prefill])


@contextmanager
def _progress(units: Sequence[WorkUnit], ends: Sequence[int], engine: Engine,
              known: Results) -> Iterator[Callable[[Record], None]]:
    """A live line on a terminal's stderr. The remaining time is estimated from the bytes that the turns read."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    weights, per_token = int(engine.provenance["weights_bytes"]), engine.model.cache_bytes_per_token
    costs = {unit.key: {end: (end - before) * (weights + per_token * (unit.spec.prefill + end) + _STEP_OVERHEAD_BYTES)
                        for before, end in zip([0, *ends], ends)} for unit in units}
    total = sum(sum(costs[unit.key].values()) * len(unit.systems) for unit in units)
    for key, text in known.texts.items():
        if key in costs:
            total -= sum(costs[key][turn["end"]] for turns in text.turns.values() for turn in turns)
    console, began, done = Console(file=sys.stderr), time.monotonic(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=total, left="")

        def show(record: Record) -> None:
            nonlocal done
            if record["kind"] != "turn":
                return
            done += costs[record["text"]][record["end"]]
            left = (time.monotonic() - began) * (total - done) / done
            place = [unit.key for unit in units].index(record["text"]) + 1
            progress.update(task, completed=done, left=f"{left / 60:.0f} min left",
                            description=f"text {place} of {len(units)}, {record['system']}: {record['end']:,} tokens")

        yield show
