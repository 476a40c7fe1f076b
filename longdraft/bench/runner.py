"""Runs an experiment: every text by all its systems in turns, into a file of results that a later run goes on with."""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longdraft import run_statistics
from longdraft.bench import machine
from longdraft.bench.experiment import Experiment, Scale, TextSpec
from longdraft.bench.results import Record, Results, Store
from longdraft.bench.turns import OWN_TEXT, write_all
from longdraft.engine import Engine
from longdraft.errors import check

_SHARE = 0.5  # of the free memory that the caches of the systems of a text may take together
_SPARE_BYTES = 1e6  # what a step's other work is taken for, in bytes read, where the time left is estimated


class Plan(NamedTuple):
    """What is run: an experiment at a scale, on prompts from a text, with so many seeds."""

    experiment: Experiment
    scale: Scale
    scale_name: str
    prompt_file: Path
    seeds: Sequence[int]
    stretches: int

    @property
    def texts(self) -> dict[TextSpec, list[str]]:
        return self.experiment.plan(self.scale, self.seeds, self.stretches)

    def identity(self) -> Record:
        """What of the experiment a result depends on."""
        systems = {name: asdict(system) for name, system in self.experiment.systems.items()}
        return {"experiment": self.experiment.name, "scale": self.scale_name, "lengths": list(self.scale.lengths),
                "turn": self.scale.turn, "seeds": list(self.seeds), "stretches": self.stretches,
                "systems_sha256": hashlib.sha256(json.dumps(systems, sort_keys=True).encode()).hexdigest()}


def run(plan: Plan, engine: Engine, ids: Sequence[int], output: Path | None, limits: Record) -> Results:
    """All results, those of earlier runs in `output` among them. Only what is missing is measured.

    ids     tokens of the prompt file
    limits  the machine's, measured in this run
    """
    session = provenance(engine) | plan.identity() | {
        "kind": "session", "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "limits": limits,
        "prompt_file": plan.prompt_file.name, "prompt_sha256": run_statistics.sha256_tokens(_as_array(ids))}
    texts = plan.texts
    prompts = {text: _prompt(ids, text, plan.stretches) for text in texts}
    for text, prompt in prompts.items():  # before the first of them is measured for hours
        engine.checked(prompt, text.sampling)
    store = Store(output, session)
    try:
        ends, units = plan.experiment.ends(plan.scale), list(_units(engine, texts, store.results))
        with _progress(units, ends, engine, store.results) as told:
            for spec, key, names in units:
                _write_unit(plan, engine, store, spec, key, names, prompts[spec], ends, told)
    finally:
        store.close()
    store.results.check()
    return store.results


Unit = tuple[TextSpec, str, list[str]]


def _units(engine: Engine, texts: dict[TextSpec, list[str]], known: Results) -> Iterator[Unit]:
    """Texts with as many systems as memory holds caches for; the reference is with all of them.

    First what was begun, then the systems that nobody began (another choice of tables may have been measured before).
    """
    for spec, (reference, *names) in texts.items():
        begun = [text.about for text in known.texts.values() if spec.is_of(text.about)]
        yield from ((spec, about["text"], list(about["systems"])) for about in begun)
        others = [name for name in names if not any(name in about["systems"] for about in begun)]
        if begun and not others:
            continue
        positions = spec.prefill + spec.sampling.max_new_tokens
        bytes_each = 1.2 * positions * engine.model.cache_bytes_per_token
        most = max(1, int(_SHARE * machine.free_memory() / bytes_each) - 1)
        for start in range(0, max(1, len(others)), most):
            names = others[start : start + most]
            yield spec, f"{spec.key}/{'+'.join(names)}", [reference, *names]


def _write_unit(plan: Plan, engine: Engine, store: Store, spec: TextSpec, key: str, names: Sequence[str],
                prompt: Sequence[int], ends: Sequence[int], told: Callable[[Record], None]) -> None:
    systems = {name: plan.experiment.systems[name] for name in names}
    if key not in store.results.texts:
        about = {name: {**asdict(system), "options": system.options_for(spec.prefill),
                        "own_text": system.rule in OWN_TEXT} for name, system in systems.items()}
        store.append({"kind": "text", "text": key, **spec.about, "reference": names[0], "systems": about,
                      "prompt_sha256": run_statistics.sha256_tokens(_as_array(prompt)), "ends": list(ends)})

    def emit(record: Record) -> None:
        store.append(record)
        told(record)

    text = store.results.texts[key]
    write_all(engine, systems, prompt, spec.sampling, text.about["ends"], text, emit)


def provenance(engine: Engine) -> Record:
    return machine.describe(engine.model.kernels) | engine.provenance | {"device": str(engine.model.kernels.device)}


def _prompt(ids: Sequence[int], text: TextSpec, stretches: int) -> list[int]:
    """The stretch's part of the file: `prefill` tokens from as many places at even distances."""
    start = len(ids) // stretches * text.stretch
    check(start + text.prefill <= len(ids), "tokens in --prompt-file", len(ids),
          f"at least {start + text.prefill} for prompts of {text.prefill} from {stretches} stretches")
    return list(ids[start : start + text.prefill])


def _as_array(ids: Sequence[int]) -> Any:
    return torch.tensor(ids, dtype=torch.int32).numpy()


@contextmanager
def _progress(units: Sequence[Unit], ends: Sequence[int], engine: Engine,
              known: Results) -> Iterator[Callable[[Record], None]]:
    """A live line on a terminal's stderr, with the time left as the bytes that turns read tell it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    weights, per_token = int(engine.provenance["weights_bytes"]), engine.model.cache_bytes_per_token

    def work(prefill: int, end: int, before: int) -> float:
        return (end - before) * (weights + per_token * (prefill + end) + _SPARE_BYTES)

    spans = list(zip(ends, [0, *ends]))
    costs = {key: {end: work(spec.prefill, end, before) for end, before in spans} for spec, key, _ in units}
    total = sum(sum(costs[key].values()) * len(names) for _, key, names in units)
    for key, text in known.texts.items():
        if key in costs:
            total -= sum(costs[key][turn["end"]] for turns in text.turns.values() for turn in turns)
    console, began, done = Console(file=sys.stderr), time.monotonic(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("begins", total=total, left="")

        def told(record: Record) -> None:
            nonlocal done
            if record["kind"] != "turn":
                return
            done += costs[record["text"]][record["end"]]
            left = (time.monotonic() - began) * (total - done) / done
            place = [key for _, key, _ in units].index(record["text"]) + 1
            progress.update(task, completed=done, left=f"{left / 60:.0f} min left",
                            description=f"text {place} of {len(units)}, {record['system']}: {record['end']:,} tokens")

        yield told
