"""The measures of an experiment's tables, computed from the turns in its results.

    alpha    accepted draft tokens / depth of the drafts, summed over the steps. With drafts of depth 4 in every step
             this is the paper's alpha, the mean of accepted / 4
    beta     the same for n-gram drafters alone. A token that the tree proposed too counts for the tree; with the rule
             per-path for the n-grams, as in the paper
    tau      tokens written per forward of the model on its whole cache; at least 1
    speedup  seconds per token of the reference over those of the system, in the same run, from the first new token to
             the given length. The prompt does not count (as in the paper)
    speedup_weak  the same, over the weak loop (longdraft_bench/paper/weak_loop.py), as the paper's are
    minutes, minutes_reference    decoding time up to the given length, of the system and of the reference
    distinct_n, distinct_mean     distinct n-grams / n-grams of all new tokens, and their mean for n = 1 to 4
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from longdraft.engine import run_statistics
from longdraft.report.table import Table
from longdraft.report.turns import MeasuredText, Record
from longdraft_bench.paper.experiment import Case, Experiment, Scale, TableSpec
from longdraft_bench.results import Results

_NGRAM_SOURCES = ("ngram", "suffix")
_HEADINGS = {"alpha": "α", "beta": "β", "tau": "tokens/forward", "speedup": "×", "speedup_weak": "× the weak loop",
             "minutes": "minutes",
             "minutes_reference": "minutes, plain", "tokens_per_second": "tokens/s", "distinct_1": "distinct-1",
             "distinct_2": "distinct-2", "distinct_3": "distinct-3", "distinct_4": "distinct-4",
             "distinct_mean": "distinct, mean"}
_FORMATS = {"minutes": ".3g", "minutes_reference": ".3g", "tokens_per_second": ",.0f"}  # all others: .2f


class MeasureSummary(NamedTuple):
    """A measure over several texts: the mean, and the standard deviation if there are at least two texts."""

    mean: float
    deviation: float | None
    num_texts: int

    def formatted(self, form: str) -> str:
        spread = f" ± {self.deviation:{form}}" if self.deviation is not None else ""
        return f"{self.mean:{form}}{spread}"


def measure(text: MeasuredText, system: str, name: str, until: int) -> float | None:
    """A measure of the first `until` new tokens of a system, or None if it does not exist or is not measured yet."""
    other = text.about["reference"]
    if name == "speedup_weak":
        versions = {each: about.get("version") for each, about in text.about["systems"].items()}
        other = next((each for each, version in versions.items() if version == "weak"), "")
    turns, reference = (_turns_until(text.turns.get(each, []), until) for each in (system, other))
    if not turns or not reference:
        return None
    if name.startswith("distinct"):
        tokens = text.tokens(system)[:until]
        shares = [run_statistics.distinct(tokens, n) for n in range(1, 5)]
        return statistics.fmean(shares) if name == "distinct_mean" else shares[int(name[-1]) - 1]
    total = {key: sum(turn[key] for turn in turns) for key in ("tokens", "seconds", "steps", "accepted", "depth")}
    if name in ("alpha", "beta"):
        accepted = total["accepted"] if name == "alpha" else sum(
            turn["accepted_by_source"].get(source, 0) for turn in turns for source in _NGRAM_SOURCES)
        return accepted / total["depth"] if total["depth"] else None
    pace, reference_pace = (sum(turn["seconds"] for turn in each) / sum(turn["tokens"] for turn in each)
                            for each in (turns, reference))
    values: dict[str, float] = {
        "speedup": reference_pace / pace, "speedup_weak": reference_pace / pace,
        "tau": total["tokens"] / total["steps"], "tokens_per_second": 1 / pace,
        "minutes": pace * until / 60, "minutes_reference": reference_pace * until / 60}
    return values[name]


def _turns_until(turns: Sequence[Record], until: int) -> list[Record]:
    """The turns up to a length, or none if the system has not reached it."""
    chosen = [turn for turn in turns if turn["end"] <= until]
    return chosen if chosen and chosen[-1]["end"] == until else []


def over_texts(results: Results, experiment: Experiment, scale: Scale, case: Case, name: str, until: int,
               ) -> MeasureSummary | None:
    """A case's measure over the texts of all seeds and stretches."""
    seeds, stretches = results.seeds, results.sessions[0]["stretches"]
    specs = [experiment.text_of(case, scale, seed, stretch) for seed in seeds for stretch in range(stretches)]
    values = [measure(text, case.system, name, until) for text in results.texts.values()
              if case.system in text.about["systems"] and any(spec.is_of(text.about) for spec in specs)]
    measured = [value for value in values if value is not None]
    if not measured:
        return None
    deviation = statistics.stdev(measured) if len(measured) > 1 else None
    return MeasureSummary(statistics.fmean(measured), deviation, len(measured))


def tables(results: Results, experiment: Experiment, scale: Scale) -> list[Table]:
    """The experiment's tables; cells show our value and in brackets the published one."""
    return [_table(results, experiment, scale, spec) for spec in experiment.tables]


def _table(results: Results, experiment: Experiment, scale: Scale, spec: TableSpec) -> Table:
    models = list(dict.fromkeys(model for case in spec.cases for model in case.paper))
    paper = f"In brackets the paper's: {'; '.join(models)}." if models else ""

    def cell(case: Case, name: str, until: int, index: int) -> str:
        form = _FORMATS.get(name, ".2f")
        value = over_texts(results, experiment, scale, case, name, until)
        known = [values.get(name, ()) for values in case.paper.values()]
        published = [format(values[index], form) for values in known if -len(values) <= index < len(values)]
        return (value.formatted(form) if value else "–") + (f" ({'; '.join(published)})" if published else "")

    if spec.layout == "final":
        columns = ["", *(_HEADINGS[name] for name in spec.measures)]
        rows = [[experiment.name_of(case, scale), *(
            cell(case, name, case.at or scale.lengths[-1], -1) for name in spec.measures)] for case in spec.cases]
    else:
        columns = ["new tokens", *(f"{length:,}" for length in scale.lengths)]
        rows = [[f"{experiment.name_of(case, scale)}, {_HEADINGS[name]}", *(
            cell(case, name, length, place) for place, length in enumerate(scale.lengths))]
            for case in spec.cases for name in spec.measures]
    return Table(f"{spec.id}. {spec.title}", columns, rows, " ".join(part for part in (paper, spec.note) if part))


def sweep(results: Results, experiment: Experiment, scale: Scale, spec: TableSpec,
          ) -> tuple[list[str], dict[str, list[MeasureSummary | None]]]:
    """Names of a table's cases; and of each measure its values at the end of the texts."""
    return [experiment.name_of(case, scale) for case in spec.cases], {
        _HEADINGS[name]: [over_texts(results, experiment, scale, case, name, case.at or scale.lengths[-1])
                          for case in spec.cases] for name in spec.measures}


def text_of_case(results: Results, experiment: Experiment, scale: Scale, case: Case) -> MeasuredText | None:
    """The first measured text of a case."""
    seeds, stretches = results.seeds, results.sessions[0]["stretches"]
    specs = [experiment.text_of(case, scale, seed, stretch) for stretch in range(stretches) for seed in seeds]
    return next((text for spec in specs for text in results.texts.values()
                 if case.system in text.turns and spec.is_of(text.about)), None)


def with_measured_tables(results: Results, experiment: Experiment, scale: Scale) -> Experiment:
    """The experiment with only the tables of which at least half of the cases are measured."""
    seed = results.seeds[0]

    def is_measured(case: Case) -> bool:
        spec = experiment.text_of(case, scale, seed, 0)
        return any(case.system in text.turns and spec.is_of(text.about) for text in results.texts.values())

    return replace(experiment, tables=tuple(spec for spec in experiment.tables if
                                            2 * sum(map(is_measured, spec.cases)) >= max(1, len(spec.cases))))


def summary(results: Results, experiment: Experiment, scale: Scale) -> Record:
    """All values of the tables, unrounded, for the last line of the command's output."""
    def values(spec: TableSpec, case: Case, name: str) -> list[Record | None]:
        lengths = [case.at or scale.lengths[-1]] if spec.layout == "final" else scale.lengths
        by_length = [over_texts(results, experiment, scale, case, name, until) for until in lengths]
        return [value._asdict() if value else None for value in by_length]

    return {
        **{key: results.sessions[0][key] for key in ("scale", "model", "weights_sha256", "lengths")},
        "seeds": results.seeds,
        "tables": [{"id": spec.id, "title": spec.title, "cases": [
            {"name": experiment.name_of(case, scale), "system": case.system, "paper": case.paper, "measures": {
                name: values(spec, case, name) for name in spec.measures}}
            for case in spec.cases]} for spec in experiment.tables]}
