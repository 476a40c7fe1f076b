"""Figures of tables for `longdraft bench report`: sweeps, and texts with their repeated passages highlighted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from longdraft.checkpoint import hub
from longdraft.errors import LongdraftError
from longdraft.report import page
from longdraft.text.tokenizer import Tokenizer
from longdraft_bench import figures
from longdraft_bench.paper import measures, repeats
from longdraft_bench.paper.experiment import Experiment, Scale, TableSpec
from longdraft_bench.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Plan = tuple[Experiment, Scale]
_MAX_TOKENS = 4000  # of a text that is shown


def sweeps(results: Results, plan: Plan | None) -> Iterator[tuple[str, Figure]]:
    """The sweeps, each with its name."""
    for spec in _specs(plan, "sweep"):
        assert plan
        names, series = measures.sweep(results, *plan, spec)
        yield f"table-{spec.id}", figures.sweep(names, {heading: [
            value and (value.mean, value.deviation or 0.0) for value in values] for heading, values in series.items()})


def sections(results: Results, plan: Plan | None) -> list[page.Section]:
    """The sweeps, and the case studies, as sections of a page."""
    all_sections = [page.Section(f"Figure of table {name.removeprefix('table-')}",
                                 figures=[("Values at the end of the texts; bars: standard deviation.", figure)])
                    for name, figure in sweeps(results, plan)]
    for spec in _specs(plan, "repeats"):
        assert plan
        all_sections += _case_study(results, plan, spec)
    return all_sections


def _specs(plan: Plan | None, figure: str) -> list[TableSpec]:
    return [spec for spec in plan[0].tables if spec.figure == figure] if plan else []


def _case_study(results: Results, plan: Plan, spec: TableSpec) -> list[page.Section]:
    """The text of each case. One section that says why, where the model's tokenizer is not on this machine."""
    try:
        tokenizer = Tokenizer(hub.resolve(str(results.sessions[0]["model"])))
    except LongdraftError as error:
        return [page.Section(spec.title, f"The texts are not shown: {error}.")]
    studies: list[page.Section] = []
    for case in spec.cases:
        text = measures.text_of_case(results, *plan, case)
        if text is None:
            continue
        tokens = text.tokens(case.system)[:_MAX_TOKENS].tolist()
        share = sum(repeats.repeated(tokens)) / max(1, len(tokens))
        intro = (f"{len(tokens):,} new tokens, {share:.0%} of them part of {repeats.LEAST} tokens or more that "
                 "occurred in the text before.")
        studies.append(page.coloured_section(f"{spec.title}: {case.name}", intro,
                                             repeats.marked_pieces(tokens, tokenizer)))
    return studies
