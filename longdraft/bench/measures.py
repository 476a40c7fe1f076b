"""What the tables say, computed from the turns of a file of results.

    alpha    accepted guesses / places guessed ahead, all steps together. With a tree of depth 4 in every step that is
             the paper's: the mean of accepted / 4
    beta     the same of n-grams alone; one that the tree had guessed as well is the tree's (the paper: the n-gram's)
    tau      tokens written with each forward of the model on the whole cache; at least 1
    speedup  seconds for each token of the reference over the system's, in the same run: from the first new token to
             the length asked for, the prompt not counted (as in the paper)
    minutes  of that; minutes_reference: of the reference
    distinct_n, distinct_mean     distinct n-grams over n-grams of all new tokens; their mean for n = 1 to 4
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from longdraft import run_statistics as of_text
from longdraft.bench.experiment import Case, Experiment, Scale, TableSpec
from longdraft.bench.grid import Table
from longdraft.bench.results import Record, Results, Text

NGRAMS = ("ngram", "suffix")
_NAMES = {"alpha": "α", "beta": "β", "tau": "tokens/forward", "speedup": "×", "minutes": "minutes",
          "minutes_reference": "minutes, plain", "tokens_per_second": "tokens/s", "distinct_1": "distinct-1",
          "distinct_2": "distinct-2", "distinct_3": "distinct-3", "distinct_4": "distinct-4",
          "distinct_mean": "distinct, mean"}
_FORMS = {"speedup": ".2f", "minutes": ".3g", "minutes_reference": ".3g", "tokens_per_second": ",.0f"}


class Value(NamedTuple):
    """A measure over several texts: mean, and the standard deviation where there are several."""

    mean: float
    deviation: float | None
    num_texts: int

    def shown(self, form: str) -> str:
        spread = f" ± {self.deviation:{form}}" if self.deviation is not None else ""
        return f"{self.mean:{form}}{spread}"


def measure(text: Text, system: str, name: str, until: int) -> float | None:
    """A measure of what a system had written at `until` new tokens; None where it does not (yet) exist."""
    mine, other = (_until(text.turns.get(each, []), until) for each in (system, text.about["reference"]))
    if not mine or not other:
        return None
    if name.startswith("distinct"):
        tokens = text.tokens(system)[:until]
        found = [of_text.distinct(tokens, n) for n in range(1, 5)]
        return statistics.fmean(found) if name == "distinct_mean" else found[int(name[-1]) - 1]
    total = {key: sum(turn[key] for turn in mine) for key in ("tokens", "seconds", "steps", "accepted", "depth")}
    others = {key: sum(turn[key] for turn in other) for key in ("tokens", "seconds")}
    if name == "alpha":
        return total["accepted"] / total["depth"] if total["depth"] else None
    if name == "beta":
        taken = sum(turn["accepted_by_source"].get(source, 0) for turn in mine for source in NGRAMS)
        return taken / total["depth"] if total["depth"] else None
    pace, reference = (each["seconds"] / each["tokens"] for each in (total, others))
    values: dict[str, float] = {
        "speedup": reference / pace, "tau": total["tokens"] / total["steps"], "tokens_per_second": 1 / pace,
        "minutes": pace * until / 60, "minutes_reference": reference * until / 60}
    return values[name]


def _until(turns: Sequence[Record], until: int) -> list[Record]:
    """The turns up to a length; none if it was not reached."""
    chosen = [turn for turn in turns if turn["end"] <= until]
    return chosen if chosen and chosen[-1]["end"] == until else []


def over_texts(results: Results, experiment: Experiment, scale: Scale, case: Case, name: str, until: int,
               ) -> Value | None:
    """A case's measure over all texts (seeds and stretches) that are of its kind."""
    seeds, stretches = results.sessions[0]["seeds"], results.sessions[0]["stretches"]
    specs = [experiment.text_of(case, scale, seed, stretch) for seed in seeds for stretch in range(stretches)]
    values = [measure(text, case.system, name, until) for text in results.texts.values()
              if case.system in text.about["systems"] and any(spec.is_of(text.about) for spec in specs)]
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Value(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def table(results: Results, experiment: Experiment, scale: Scale, spec: TableSpec) -> Table:
    """Ours, and in brackets what the paper says for the same place of its run."""
    models = list(dict.fromkeys(model for case in spec.cases for model in case.paper))
    paper = f"In brackets the paper's: {'; '.join(models)}." if models else ""
    note = " ".join(part for part in (paper, spec.note) if part)
    title = f"{spec.id}. {spec.title}"
    if spec.layout == "final":
        columns = ["", *(_NAMES[name] for name in spec.measures)]
        rows = [[experiment.name_of(case, scale), *(
            _cell(results, experiment, scale, case, name, case.at or scale.lengths[-1], -1)
            for name in spec.measures)] for case in spec.cases]
        return Table(title, columns, rows, note)
    rows = [[f"{experiment.name_of(case, scale)}, {_NAMES[name]}",
             *(_cell(results, experiment, scale, case, name, length, place)
               for place, length in enumerate(scale.lengths))] for case in spec.cases for name in spec.measures]
    return Table(title, ["new tokens", *(f"{length:,}" for length in scale.lengths)], rows, note)


def _cell(results: Results, experiment: Experiment, scale: Scale, case: Case, name: str, until: int,
          place: int) -> str:
    form = _FORMS.get(name, ".2f")
    value = over_texts(results, experiment, scale, case, name, until)
    known = [values.get(name, ()) for values in case.paper.values()]
    published = [values[place] for values in known if -len(values) <= place < len(values)]  # -1: the last
    brackets = f" ({'; '.join(format(each, form) for each in published)})" if published else ""
    return (value.shown(form) if value else "–") + brackets


def tables(results: Results, experiment: Experiment, scale: Scale) -> list[Table]:
    return [table(results, experiment, scale, spec) for spec in experiment.tables]


def measured(results: Results, experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment with only those tables of which half or more was measured."""
    def is_there(spec: TableSpec) -> bool:
        seeds = results.sessions[0]["seeds"]
        specs = [experiment.text_of(case, scale, seeds[0], 0) for case in spec.cases]
        found = [any(case.system in text.turns and wanted.is_of(text.about) for text in results.texts.values())
                 for case, wanted in zip(spec.cases, specs)]
        return 2 * sum(found) >= max(1, len(found))

    return replace(experiment, tables=tuple(spec for spec in experiment.tables if is_there(spec)))


def summary(results: Results, experiment: Experiment, scale: Scale) -> Record:
    """Everything that the tables show, unrounded."""
    return {
        **{key: results.sessions[0][key] for key in ("scale", "model", "weights_sha256", "lengths", "seeds")},
        "tables": [{"id": spec.id, "title": spec.title, "cases": [
            {"name": experiment.name_of(case, scale), "system": case.system, "paper": case.paper, "measures": {
                name: [_plain(over_texts(results, experiment, scale, case, name, until))
                       for until in _lengths(spec, case, scale)] for name in spec.measures}}
            for case in spec.cases]} for spec in experiment.tables]}


def _lengths(spec: TableSpec, case: Case, scale: Scale) -> Sequence[int]:
    return [case.at or scale.lengths[-1]] if spec.layout == "final" else scale.lengths


def _plain(value: Value | None) -> Record | None:
    return value._asdict() if value else None
