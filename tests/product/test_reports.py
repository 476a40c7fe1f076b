"""Reports made from results: tables, pages, figures, documents, and the extrapolation from segments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.experiments import TEXT, bench, measured
from longdraft.__main__ import run
from longdraft.engine.loading import load
from longdraft.errors import UsageError
from longdraft.report import figures
from longdraft.report.table import Table
from longdraft_bench import figures as bench_figures
from longdraft_bench import results as stored
from longdraft_bench.paper import experiment as experiments
from longdraft_bench.paper import extrapolate, measures, repeats

pytestmark = pytest.mark.full

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[2]


def golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_golden_results_produce_the_golden_tables():
    results = stored.read_results(GOLDEN / "results.jsonl")
    plan = experiments.parse_experiment(json.loads((GOLDEN / "experiment.json").read_text()))
    grids = measures.tables(results, plan, plan.scale("default"))
    golden("tables.md", "\n".join(each.markdown() for each in grids))
    golden("tables.tex", "\n".join(each.latex() for each in grids))
    golden("tables.html", "\n".join(each.html() for each in grids))


def test_tables_are_escaped_for_each_format():
    hostile = Table("a & b", ["", "50 %_x"], [["<script>", "a|b"]], "n#1")
    assert "<script>" not in hostile.html() and "&lt;script&gt;" in hostile.html()
    assert r"a\|b" in hostile.markdown()
    assert r"50 \%\_x" in hostile.latex() and r"a \& b. n\#1" in hostile.latex()


def test_run_and_report_from_the_command_line(capfd, tmp_path, tiny):
    pytest.importorskip("matplotlib")
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "mine.toml").write_text("""
name = "mine"
title = "Mine"
reference = "plain"
default_scale = "quick"
[scales.quick]
turn = 16
lengths = [16, 48]
[base]
prefill = 100
sampling = { min_p = 0.1 }
[systems]
plain = { drafter = "plain" }
magicdec = { drafter = "magicdec" }
[[tables]]
id = "1"
title = "One"
measures = ["alpha", "speedup"]
cases = [{ name = "magicdec", system = "magicdec" }]
[[tables]]
id = "2"
title = "Study"
measures = ["distinct_1"]
layout = "final"
figure = "repeats"
cases = [{ name = "drafted", system = "magicdec" }]
[[tables]]
id = "3"
title = "Three"
measures = ["alpha"]
layout = "final"
figure = "sweep"
cases = [{ name = "drafted", system = "magicdec" }]
""")
    output, folder = tmp_path / "out.jsonl", tmp_path / "report"
    out = bench(capfd, "run", str(tmp_path / "mine.toml"), "--prompt-file", str(tmp_path / "text.txt"), "--model",
                str(tiny["gqa"]), "--dtype", "float32", "--output", str(output), "--memory", "0.0005")
    assert "1. One" in out
    last = json.loads(out.splitlines()[-1])
    assert last["bench"] == "mine" and len(last["tables"][0]["cases"][0]["measures"]["speedup"]) == 2
    limits = stored.read_results(output).sessions[0]["limits"]
    assert limits["read_bandwidth_gb_per_s"] > 0 and limits["peak_gflop_per_s"]["bfloat16"] > 0
    bench(capfd, "report", str(output), "--output", str(folder), "--experiment", str(tmp_path / "mine.toml"))
    page = (folder / "report.html").read_text()
    assert page.count("<img ") == page.count('src="data:image/svg+xml;base64,') >= 4
    assert not re.search(r'(src|href)="http|<script|@import|url\(', page)  # the page loads nothing from elsewhere
    assert "Study: drafted" in page and '<span title="new"' in page
    assert "| magicdec, α  |" in (folder / "tables.md").read_text()
    assert r"\toprule" in (folder / "tables.tex").read_text()
    names = {path.name for path in folder.iterdir()}
    assert names >= {"out-table-3.png", "out-table-3.svg"}
    assert names >= {f"out-100-{name}.{suffix}" for name in ("minutes", "speedup", "step", "sources", "lengths")
                     for suffix in ("png", "svg")}


def test_generate_writes_a_report_with_the_text_coloured_by_drafter(tmp_path, tiny, capfd):
    pytest.importorskip("matplotlib")
    report, text = tmp_path / "report.html", tmp_path / "text.txt"
    assert run(["generate", "It was <b>a dark</b> night. " * 9, "--model", str(tiny["mha"]), "--drafter", "tokenswift",
                "--max-new-tokens", "150", "--seed", "7", "--ignore-eos", "--quiet", "--report", str(report),
                "--output", str(text)]) == 0
    page = report.read_text(encoding="utf-8")
    body = page.partition('<div class="text">')[2].partition("</div>")[0]
    import html

    assert html.unescape(re.sub("<[^>]*>", "", body)) == text.read_text(encoding="utf-8")
    assert 'title="the model"' in body and "data:image/svg+xml" in page and "weights_sha256" in page
    assert run(["generate", "x", "--report", str(tmp_path / "no" / "such.html")]) == 2
    assert "--report cannot write" in capfd.readouterr().err


def test_every_figure_labels_its_axes(tiny):
    pytest.importorskip("matplotlib")
    results = measured(load(str(tiny["mha"]), dtype="float32", threads=1))
    found = dict(figures.of_text(figures.main_texts(results.texts.values())[0], results.sessions[0]))
    assert set(found) == {"minutes", "speedup", "step", "sources", "lengths"}
    for figure in found.values():
        for axes in figure.axes:
            assert axes.get_ylabel() and (axes.get_xlabel() or axes.get_label() == "<colorbar>")


def test_repeated_passages_are_found():
    once = list(range(20))
    assert not any(repeats.repeated(once, 4))
    again = [*once, 99, *once[5:11], 98, *once[3:6]]
    assert [place for place, found in enumerate(repeats.repeated(again, 4)) if found] == list(range(21, 27))
    assert not any(repeats.repeated([1, 2], 4))


def test_a_sweep_has_a_panel_for_each_measure_and_leaves_out_what_is_missing():
    pytest.importorskip("matplotlib")
    figure = bench_figures.sweep(["k = 0", "k = 5"], {"α": [(0.4, 0.1), None], "×": [(1.2, 0.0), (1.4, 0.2)]})
    first, second = figure.axes
    assert [axes.get_ylabel() for axes in figure.axes] == ["α", "×"]
    assert [len(axes.lines[0].get_xdata()) for axes in (first, second)] == [1, 2]
    assert [label.get_text() for label in second.get_xticklabels()] == ["k = 0", "k = 5"]


def test_tables_in_the_documents_match_the_stored_results():
    assert run(["bench", "tables", "--check"]) == 0


def test_stored_results_can_be_compared_and_name_their_model():
    kept = list((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert kept
    for path in kept:
        for session in stored.read_results(path).sessions:
            assert len(session["weights_sha256"]) == 64 and len(session["prompt_sha256"]) == 64
            assert not session["commit"].endswith("-dirty")


def test_the_time_of_a_whole_text_is_extrapolated_from_segments():
    """A piecewise linear time per token is summed exactly, between the measured segments and beyond them."""
    bend = 5000

    def pace(context: float) -> float:
        return 0.001 + 2e-7 * context + 5e-7 * max(0.0, context - bend)

    points = [(context, pace(context)) for context in (1000, bend, 30_000)]
    found = extrapolate.seconds(points, 500, 40_000)
    assert found == pytest.approx(sum(pace(500 + i + 0.5) for i in range(40_000)))


def test_extrapolation_from_a_single_context_is_refused():
    with pytest.raises(UsageError, match="no system at two contexts"):
        extrapolate.table(stored.read_results(GOLDEN / "results.jsonl"), 4096, 100_000)
