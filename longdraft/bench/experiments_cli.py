"""`longdraft bench paper`, `ablation`, `run` and `report`: experiments as data, and what is made of their results.

    longdraft bench paper --prompt-file novel.txt --tables 3,5 --output paper.jsonl
    longdraft bench report paper.jsonl --output report/
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import OutputError, check

if TYPE_CHECKING:
    from longdraft.bench.experiment import Experiment
    from longdraft.bench.page import Section
    from longdraft.bench.results import Results

Prompt = Annotated[Path, typer.Option(help="A long text; prompts are taken from it.")]
Model = Annotated[str, typer.Option(help="Bundled name, model folder or hub id.")]
ScaleName = Annotated[str | None, typer.Option(
    "--scale", help="How long the texts are: smoke, small (the default) or full; an experiment may name others.")]
Tables = Annotated[str, typer.Option(help="Only these tables, such as 3,5,F3; default: all.")]
Seeds = Annotated[str, typer.Option(help="Seeds of the sampling; with several, figures are mean ± standard deviation.")]
Stretches = Annotated[int, typer.Option(help="Prompts: stretches of the file at even distances.")]
Output = Annotated[Path | None, typer.Option(
    help="Results as JSON lines; where the file has some, only what is missing is measured.")]
Draft = Annotated[str | None, typer.Option(help="A smaller model for `triforce` and `draft-model`.")]
Heads = Annotated[str | None, typer.Option(help="Folder or hub id of heads; default: the model's.")]
Dtype = Annotated[str, typer.Option(help="auto (the file's), float32 or bfloat16.")]
Threads = Annotated[int | None, typer.Option(help="Threads; default: PyTorch's choice.")]
Memory = Annotated[float, typer.Option(help="GiB that are read to measure the machine's bandwidth.")]


def paper(prompt_file: Prompt, model: Model = "novelist", scale: ScaleName = None, tables: Tables = "",
          seeds: Seeds = "7", stretches: Stretches = 1, output: Output = None, draft_model: Draft = None,
          heads: Heads = None, dtype: Dtype = "auto", threads: Threads = None, memory: Memory = 1.0) -> None:
    """Repeat TokenSwift's tables and ablations, the published values beside ours.

    Also with the published rule of verification, which is not plain decoding's law and exists only here.
    """
    _run("paper", prompt_file, model, scale, tables, seeds, stretches, output, draft_model, heads, dtype, threads,
         memory)


def ablation(prompt_file: Prompt, model: Model = "novelist", scale: ScaleName = None, tables: Tables = "",
             seeds: Seeds = "7", stretches: Stretches = 1, output: Output = None, draft_model: Draft = None,
             heads: Heads = None, dtype: Dtype = "auto", threads: Threads = None, memory: Memory = 1.0) -> None:
    """Measure what each drafter and each part of ours is worth, on one text."""
    _run("ablation", prompt_file, model, scale, tables, seeds, stretches, output, draft_model, heads, dtype, threads,
         memory)


def run(experiment: Annotated[str, typer.Argument(help="A .toml file (longdraft/bench/experiment.py says how).")],
        prompt_file: Prompt, model: Model = "novelist", scale: ScaleName = None, tables: Tables = "",
        seeds: Seeds = "7", stretches: Stretches = 1, output: Output = None, draft_model: Draft = None,
        heads: Heads = None, dtype: Dtype = "auto", threads: Threads = None, memory: Memory = 1.0) -> None:
    """Run an experiment of your own."""
    _run(experiment, prompt_file, model, scale, tables, seeds, stretches, output, draft_model, heads, dtype, threads,
         memory)


def _run(name: str, prompt_file: Path, model: str, scale: str | None, tables: str, seeds: str, stretches: int,
         output: Path | None, draft_model: str | None, heads: str | None, dtype: str, threads: int | None,
         memory: float) -> None:
    from longdraft.bench import experiment as experiments
    from longdraft.bench import machine, measures, report, runner
    from longdraft.engine import load
    from longdraft.files import read_prompt

    parts = [part.strip() for part in seeds.split(",")]
    check(all(part.isdecimal() for part in parts), "--seeds", seeds, "whole numbers with commas between them")
    check(1 <= stretches <= 1000, "--stretches", stretches, "1 to 1000")
    check(0 < memory <= 1024, "--memory", memory, "above 0, at most 1024 GiB")
    chosen = experiments.load(name).chosen([part.strip() for part in tables.split(",") if part.strip()])
    chosen = chosen.with_draft_model(draft_model) if draft_model else chosen
    scale = scale or chosen.default_scale
    plan = runner.Plan(chosen, chosen.scale(scale), scale, prompt_file, [int(part) for part in parts], stretches)
    text = read_prompt(None, str(prompt_file))
    engine = load(model, heads=heads, dtype=dtype, threads=threads)
    with report.doing("this machine's limits"):
        limits = machine.limits(machine.affordable(int(memory * (1 << 30))), 1).details
    report.limits_line(limits)
    results = runner.run(plan, engine, engine.encode(text), output, limits)
    for grid in measures.tables(results, chosen, plan.scale):
        grid.show()
    print(json.dumps({"bench": chosen.name, "output": str(output) if output else None,
                      **measures.summary(results, chosen, plan.scale)}))


def report(
    results: Annotated[list[Path], typer.Argument(
        help="Files of results, as --output wrote them: of experiments, and of peers.")],
    output: Annotated[Path, typer.Option(help="Folder for report.html, tables.md, tables.tex and the figures.")],
    experiment: Annotated[str | None, typer.Option(
        help="The .toml whose tables are read; default: the one that was run, where it is one of ours.")] = None,
) -> None:
    """Make a page (one file, works offline), figures as PNG and SVG, and tables in Markdown and LaTeX of results."""
    from longdraft.bench import documents, figures, page, peers_text
    from longdraft.bench import results as stored

    figures.require_matplotlib("report")
    peers = {path: document for path in results if (document := documents.peers(path))}
    found = [stored.read(path) for path in results if path not in peers]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--output cannot make the folder {output}: {error.strerror or error}") from error
    grids: list[Any] = []
    sections: list[Section] = []
    for path, document in peers.items():
        tables = peers_text.tables(document)
        grids += tables
        figure = figures.peers(document["texts"])
        figures.save(figure, output, f"{path.stem}-texts")
        sections.append(page.Section(f"Other engines: {path.name}", pictures=[(page.CAPTIONS["peers"], figure)],
                                     grids=[*tables, documents.machine(document)]))
    for path, each in zip((path for path in results if path not in peers), found):
        tables = _tables(each, experiment)
        grids += tables
        sections.append(page.Section(f"Results: {path.name}", grids=tables))
        sections += page.of_texts(each)
        sections.append(page.where(each.sessions))
        _save_figures(each, output, path.stem)
    try:
        (output / "report.html").write_text(page.render("longdraft: what was measured", sections), encoding="utf-8")
        (output / "tables.md").write_text("\n".join(grid.markdown() for grid in grids), encoding="utf-8")
        (output / "tables.tex").write_text("\n".join(grid.latex() for grid in grids), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output cannot write into {output}: {error.strerror or error}") from error
    print(f"{output / 'report.html'}: {len(grids)} tables, {len(sections)} sections")


def _tables(results: Results, experiment: str | None) -> list[Any]:
    from longdraft.bench import measures

    plan = _experiment_of(results, experiment)
    return measures.tables(results, plan, plan.scale(results.sessions[0]["scale"])) if plan else []


def _experiment_of(results: Results, name: str | None) -> Experiment | None:
    """The tables to read; of them those for which something was measured."""
    from longdraft.bench import experiment as experiments
    from longdraft.bench import measures

    name = name or results.sessions[0].get("experiment")
    known = [file.stem for file in experiments.FOLDER.glob("*.toml")]
    if not name or not results.texts or (name not in known and not Path(name).is_file()):
        return None
    plan = experiments.load(name)
    return measures.measured(results, plan, plan.scale(results.sessions[0]["scale"]))


def _save_figures(results: Results, folder: Path, stem: str) -> None:
    from longdraft.bench import figures

    for text in figures.main_texts(results):
        for name, figure in figures.of_text(text, results.sessions[0]):
            figures.save(figure, folder, f"{stem}-{text.about['prefill']}-{name}")
