"""The commands of `longdraft bench` that run experiments and show their results: tables, pages, figures.

    longdraft bench paper --prompt-file novel.txt --tables 3,5 --output paper.jsonl
    longdraft bench report paper.jsonl --output report/
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longdraft.errors import OutputError, check
from longdraft_bench.options import ModelOption, ThreadsOption, within

if TYPE_CHECKING:
    from longdraft.report.table import Table
    from longdraft_bench.paper.experiment import Experiment, Scale
    from longdraft_bench.results import Results

_Prompt = Annotated[list[Path], typer.Option(
    help="Texts that prompts are taken from: .txt, or .parquet or .jsonl with one text per row. Repeatable.")]
_Skip = Annotated[int, typer.Option(help="Characters at the beginning of each text that are left out.")]
_Documents = Annotated[int, typer.Option(help="Texts of a .parquet or .jsonl file that are used; 0: all.")]
_Profile = Annotated[str, typer.Option(
    help="Settings of one of the paper's models (its table 10), such as Qwen2.5-7B; default: LLaMA3.1-8B's, without "
         "banned tokens.")]
_MedusaHeads = Annotated[str | None, typer.Option(
    help="Folder or hub id of heads trained as Medusa's, for Medusa*; default: the model's heads.")]
_Scale = Annotated[str | None, typer.Option(
    "--scale", help="Length of the texts: smoke, small (the default) or full; an experiment may name others.")]
_Tables = Annotated[str, typer.Option(help="Only these tables, such as 3,5,F3; default: all.")]
_Seeds = Annotated[str, typer.Option(help="Seeds of the sampling; several give mean ± standard deviation.")]
_Stretches = Annotated[int, typer.Option(help="Number of prompts, taken from even distances in each text.")]
_Results = Annotated[Path | None, typer.Option(
    help="Results as JSON lines; only what an existing file lacks is measured.")]
_DraftModel = Annotated[str | None, typer.Option(help="A smaller model for `triforce` and `draft-model`.")]
_Heads = Annotated[str | None, typer.Option(help="Folder or hub id of heads; default: the model's.")]
_Tokenizer = Annotated[str | None, typer.Option(
    help="Folder, GGUF file or hub id of the tokenizer, for a checkpoint without one; default: the model's.")]
_Dtype = Annotated[str, typer.Option(help="auto (the file's), float32 or bfloat16.")]
_Memory = Annotated[float, typer.Option(help="GiB that are read to measure the machine's bandwidth.")]


def run(experiment: Annotated[str, typer.Argument(help="A .toml file; see longdraft_bench/paper/experiment.py.")],
        prompt_file: _Prompt, model: ModelOption = "novelist", scale: _Scale = None, tables: _Tables = "",
        seeds: _Seeds = "7", stretches: _Stretches = 1, output: _Results = None, draft_model: _DraftModel = None,
        heads: _Heads = None, dtype: _Dtype = "auto", threads: ThreadsOption = None, memory: _Memory = 1.0,
        skip_characters: _Skip = 0, documents: _Documents = 0, profile: _Profile = "",
        medusa_heads: _MedusaHeads = None, tokenizer: _Tokenizer = None) -> None:
    """Run an experiment of your own."""
    from longdraft.engine.loading import load
    from longdraft.system import machine
    from longdraft_bench.document import measure_limits
    from longdraft_bench.machine import device
    from longdraft_bench.paper import experiment as experiments
    from longdraft_bench.paper import measures
    from longdraft_bench.paper import run as runner
    from longdraft_bench.systems import Engines

    parts = [part.strip() for part in seeds.split(",")]
    check(all(part.isdecimal() for part in parts), "--seeds", seeds, "whole numbers with commas between them")
    within("--stretches", stretches, 1, 1000)
    within("--skip-characters", skip_characters, 0, 10**9)
    within("--documents", documents, 0, 10**6)
    check(0 < memory <= 1024, "--memory", memory, "above 0, at most 1024 GiB")
    ids = [part.strip() for part in tables.split(",") if part.strip()]
    chosen = experiments.load_experiment(experiment).chosen(ids)
    chosen = chosen.with_draft_model(draft_model) if draft_model else chosen
    chosen = chosen.with_profile(profile) if profile else chosen
    scale = scale or chosen.default_scale
    plan = runner.ExperimentPlan(chosen, chosen.scale(scale), scale, prompt_file, [int(part) for part in parts],
                                 stretches)
    texts = [text for path in prompt_file for text in _texts(path, skip_characters, documents)]
    engine = load(model, heads=heads, dtype=dtype, threads=threads, tokenizer=tokenizer, cache_ram=0)
    kernels = engine.model.kernels
    limits = (device.limits(kernels) if kernels.is_device
              else measure_limits(machine.affordable(int(memory * (1 << 30))), 1).details)
    results = runner.run_experiment(plan, Engines(engine, medusa_heads), [engine.encode(text) for text in texts],
                                    output, limits)
    for table in measures.tables(results, chosen, plan.scale):
        table.show()
    print(json.dumps({"bench": chosen.name, "output": str(output) if output else None,
                      **measures.summary(results, chosen, plan.scale)}))


def _command_of(experiment: str, text: str, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """The command of a bundled experiment: `run` with its name, without these options."""
    def command(**given: Any) -> None:
        run(experiment, **given)

    parameters = [each for each in inspect.signature(run, eval_str=True).parameters.values()
                  if each.name not in ("experiment", *without)]
    # Typer reads the name and the options from these attributes.
    command.__name__, command.__doc__ = experiment, text
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


paper = _command_of("paper", """Repeat TokenSwift's tables and ablations, with the published values beside the measured
ones.

Includes the published verification rule, which samples from another distribution and exists only here.""")
ablation = _command_of("ablation", "Measure the effect of each drafter and of each of its parts, on one text.",
                       without=("profile",))


def _texts(path: Path, skip: int, documents: int) -> list[str]:
    """The texts of a prompt file, from character `skip` on. UsageError if one is shorter, or if there is none."""
    from longdraft.system.files import read_prompt

    if path.suffix.lower() in (".parquet", ".jsonl"):
        from longdraft.train.data_files import read_documents

        read = (text for text in read_documents([str(path)], "text") if isinstance(text, str))
        texts = list(islice(read, documents or None))
    else:
        check(not documents, "--documents", documents, "0 with a text file, which is one text")
        texts = [read_prompt(None, str(path))]
    check(bool(texts), "--prompt-file", str(path), "a file with at least one text")
    shortest = min(map(len, texts))
    check(skip < shortest, "--skip-characters", skip, f"less than the shortest text of {path} has ({shortest})")
    return [text[skip:] for text in texts]


def report(
    results: Annotated[list[Path], typer.Argument(
        help="Files that --output of `paper`, `ablation`, `run` or `peers` wrote.")],
    output: Annotated[Path, typer.Option(help="Folder for report.html, tables.md, tables.tex and the figures.")],
    experiment: Annotated[str | None, typer.Option(
        help="The .toml that defines the tables; default: the one that was run, if it comes with longdraft.")] = None,
) -> None:
    """Make a page (one file, works offline), figures (PNG and SVG) and tables (Markdown and LaTeX) of results."""
    from longdraft.report import figures as text_figures
    from longdraft.report import page, require_packages
    from longdraft_bench import figures
    from longdraft_bench import results as stored
    from longdraft_bench.document import peers_document
    from longdraft_bench.paper import case_figures, measures
    from longdraft_bench.peers import texts as peers_text

    require_packages("report")
    documents = {path: peers_document(path) for path in results}
    experiments = {path: stored.read_results(path) for path, document in documents.items() if document is None}
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"--output cannot make the folder {output}: {error.strerror or error}") from error
    tables: list[Table] = []
    sections: list[page.Section] = []
    drawn: dict[str, Any] = {}
    for path, document in documents.items():
        if document is None:
            continue
        engines = peers_text.tables(document)
        tables += engines
        figure = drawn[f"{path.stem}-texts"] = figures.engines(document["texts"])
        sections.append(page.Section(f"Other engines: {path.name}", figures=[(figures.ENGINES_CAPTION, figure)],
                                     tables=[*engines, peers_text.provenance_table(document)]))
    for path, stored_results in experiments.items():
        plan = _measured_experiment(stored_results, experiment)
        measured = measures.tables(stored_results, *plan) if plan else []
        tables += measured
        drawn |= {f"{path.stem}-{name}": figure for name, figure in case_figures.sweeps(stored_results, plan)}
        sections += [page.Section(f"Results: {path.name}", tables=measured),
                     *case_figures.sections(stored_results, plan),
                     *page.text_sections(stored_results.texts.values(), stored_results.sessions[0]),
                     page.provenance_section(stored_results.sessions)]
        for text in text_figures.main_texts(stored_results.texts.values()):
            drawn |= {f"{path.stem}-{text.about['prefill']}-{name}": figure
                      for name, figure in text_figures.of_text(text, stored_results.sessions[0])}
    for name, figure in drawn.items():
        figures.save_figure(figure, output / f"{name}.png", output / f"{name}.svg")
    try:
        (output / "report.html").write_text(page.render_page("longdraft: measurements", sections), encoding="utf-8")
        (output / "tables.md").write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
        (output / "tables.tex").write_text("\n".join(table.latex() for table in tables), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--output cannot write into {output}: {error.strerror or error}") from error
    print(f"{output / 'report.html'}: {len(tables)} tables, {len(sections)} sections")


def _measured_experiment(results: Results, experiment: str | None) -> tuple[Experiment, Scale] | None:
    """The experiment with its measured tables, and its scale; None if its definition is not available."""
    from longdraft_bench.paper import experiment as experiments
    from longdraft_bench.paper import measures

    name = experiment or results.sessions[0].get("experiment")
    bundled = [file.stem for file in experiments.FOLDER.glob("*.toml")]
    if not name or not results.texts or (name not in bundled and not Path(name).is_file()):
        return None
    plan = experiments.load_experiment(name)
    plan = plan.with_profile(profile) if (profile := results.sessions[0].get("profile")) else plan
    scale = plan.scale(results.sessions[0]["scale"])
    return measures.with_measured_tables(results, plan, scale), scale


def extrapolate(
    results: Annotated[Path, typer.Argument(help="The file that `bench run segments --output` wrote.")],
    prefill: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 100_000,
) -> None:
    """Estimate the decoding time of a long text by each system, from measured segments of it."""
    from longdraft_bench.paper import extrapolate
    from longdraft_bench.results import read_results

    print(extrapolate.table(read_results(results), prefill, tokens).markdown())


def tables(
    is_check: Annotated[bool, typer.Option(
        "--check", help="Change nothing; exit status 1 if the document differs from the results.")] = False,
) -> None:
    """Write the tables of docs/benchmarks.md from benchmarks/results/. For a checkout."""
    from longdraft_bench.paper import document_tables

    if is_check:
        raise typer.Exit(document_tables.differs())
    document_tables.rewrite()


def headline(
    output: Annotated[Path, typer.Option(help="The picture, in any format of matplotlib.")] = Path("docs/speed.svg"),
) -> None:
    """Draw the README's picture from benchmarks/results/. For a checkout."""
    from longdraft.report import require_packages
    from longdraft_bench import figures

    require_packages("headline", ("matplotlib",))
    figures.draw_headline(output)


def losses(
    runs: Annotated[list[str], typer.Argument(help="NAME=metrics.jsonl, in the order of the training.")],
    output: Annotated[Path, typer.Option(help="The figure: .svg, .png or .pdf.")],
    keep: Annotated[Path | None, typer.Option(help="Write the points to this file.")] = None,
) -> None:
    """Draw the loss curve of a model that was trained in several runs, for the README of a bundled model."""
    from longdraft.report import require_packages
    from longdraft_bench import figures

    require_packages("losses", ("matplotlib",))
    named = (each.rpartition("=") for each in runs)
    figures.draw_losses({name: Path(path) for name, _, path in named}, output, keep)
