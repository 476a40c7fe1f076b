"""Experiments as data, their results, and what keeps comparisons honest. Nothing here depends on how long things take
but the one test of a system that is slowed down on purpose."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longdraft import drafters
from longdraft.__main__ import run
from longdraft.bench import experiment as experiments
from longdraft.bench import figures, grid, measures, peers, peers_text, rules, runner, turns
from longdraft.bench import results as stored
from longdraft.core import Context, SamplingParams
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine import load
from longdraft.errors import UsageError
from longdraft.sampling.sampler import Sampler
from longdraft.tree import from_paths

GOLDEN = Path(__file__).parent / "golden"
TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 30
EXPERIMENT = {
    "name": "small", "title": "A small one", "reference": "plain",
    "scales": {"default": {"lengths": [20, 40], "turn": 15, "prefix": 0.5}},
    "base": {"prefill": 400, "sampling": {"min_p": 0.1, "repetition_penalty": 1.2, "penalty_window": 30}},
    "systems": {
        "plain": {"drafter": "plain"}, "magicdec": {"drafter": "magicdec"},
        "paper": {"drafter": "tokenswift", "options": {"chain": 1, "tree": [1, 3, 3, 3], "budget": "prefill/2",
                                                          "recent": 16, "room": 16}},
        "per-path": {"drafter": "tokenswift", "rule": "per-path", "options": {"chain": 1, "tree": [1, 3, 3, 3]}},
        "independent": {"drafter": "tokenswift", "rule": "independent"}},
    "tables": [
        {"id": "1", "title": "By length", "measures": ["alpha", "speedup", "minutes"], "cases": [
            {"name": "MagicDec, prefix {prefill}", "system": "magicdec"},
            {"name": "paper's", "system": "paper", "paper": {"8B": {"alpha": [0.5, 0.6]}}},
            {"name": "published rule", "system": "per-path"}, {"name": "independent", "system": "independent"}]},
        {"id": "2", "title": "At the end", "layout": "final", "measures": ["distinct_1", "tau"], "cases": [
            {"name": "hot", "system": "magicdec", "sampling": {"temperature": 1.3}, "at": 25}]}],
}


@pytest.fixture(scope="module")
def engine(tiny):
    return load(str(tiny["mha"]), dtype="float32", threads=1)


def plan_of(data=EXPERIMENT, **changes) -> runner.Plan:
    chosen = experiments.parse(data)
    plan = runner.Plan(chosen, chosen.scale("default"), "default", Path("text.txt"), [7], 1)
    return plan._replace(**changes)


def measured(engine, output=None, **changes):
    return runner.run(plan_of(**changes), engine, engine.encode(TEXT), output, {})


def test_a_text_beyond_the_models_context_is_refused_before_the_first_is_measured(engine, tmp_path):
    data = EXPERIMENT | {"scales": {"default": {"lengths": [20, 4000], "turn": 15, "prefix": 0.5}}}
    with pytest.raises(UsageError, match=r"max_new_tokens \(4000\) is 4200; allowed: 4096"):
        measured(engine, tmp_path / "results.jsonl", data=data)
    assert not (tmp_path / "results.jsonl").exists()


def test_an_experiment_is_measured_and_its_tables_filled(engine):
    plan = plan_of(seeds=[7, 8])
    results = measured(engine, seeds=[7, 8])
    assert len(results.texts) == 4  # two sampling settings, two seeds
    first, second = measures.tables(results, plan.experiment, plan.scale)
    assert first.columns == ["new tokens", "20", "40"]
    assert [row[0] for row in first.rows][:3] == ["MagicDec, prefix 200, α", "MagicDec, prefix 200, ×",
                                                  "MagicDec, prefix 200, minutes"]
    assert re.fullmatch(r"\d\.\d\d ± \d\.\d\d \(0\.60\)", first.rows[3][2])
    assert [row[0] for row in second.rows] == ["hot"] and all(re.match(r"\d+\.\d\d ± ", cell)
                                                              for cell in second.rows[0][1:])
    for text in results.texts.values():
        assert text.about["prefill"] == 200 and text.about["ends"] == [15, 20, 25, 30, 40]
        for system, written in text.turns.items():
            assert sum(turn["tokens"] for turn in written) == 40 and len(text.tokens(system)) == 40
            for turn in written:
                assert turn["seconds"] > 0 and turn["steps"] == sum(turn["lengths"].values())
                assert turn["accepted"] == sum(turn["accepted_by_source"].values()) <= turn["depth"]
                assert turn["steps"] + turn["accepted"] == turn["tokens"] or turn["end"] == 40
            assert text.stats[system]["drafter"] == text.about["systems"][system]["drafter"]
    session = results.sessions[0]
    assert session.keys() >= {"commit", "processor", "threads", "kernels", "dtype", "weights_sha256", "prompt_sha256",
                              "seeds", "torch", "device", "tokenizer_sha256"}


def test_options_can_name_the_prompts_length(engine):
    text = next(iter(measured(engine).texts.values()))
    assert text.about["systems"]["paper"]["options"]["budget"] == 100


def test_systems_of_a_text_write_the_same_but_for_the_published_rule(engine):
    text = next(iter(measured(engine).texts.values()))
    hashes = {name: [turn["sha256_tokens"] for turn in written] for name, written in text.turns.items()}
    assert hashes["plain"] == hashes["magicdec"] == hashes["paper"] == hashes["independent"] != hashes["per-path"]


def test_a_cut_run_goes_on_and_measures_only_what_is_missing(engine, tmp_path, monkeypatch):
    whole = tmp_path / "whole.jsonl"
    measured(engine, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    before = [json.loads(line) for line in lines]
    cut = tmp_path / "cut.jsonl"
    kept = [place for place, record in enumerate(before) if record["kind"] == "turn"][7]  # in the second round
    cut.write_bytes(b"".join(lines[: kept + 1]) + lines[kept + 1][:40])  # and a line torn in its middle
    written = []
    monkeypatch.setattr(turns, "write", lambda text, end, _write=turns.write: written.append(end) or _write(text, end))
    results = measured(engine, cut)
    assert written.count(15) == 2  # the first round of the first text is not measured again
    for key, text in stored.read(whole).texts.items():
        again = results.texts[key]
        for system in text.turns:
            assert (again.tokens(system) == text.tokens(system)).all()
            assert [turn["end"] for turn in again.turns[system]] == [15, 20, 25, 30, 40]
    resumed = [turn for text in results.texts.values() for each in text.turns.values() for turn in each
               if turn["is_resumed"]]
    assert {turn["end"] for turn in resumed} == {20}
    written.clear()
    measured(engine, cut)
    assert not written  # all is there


def test_more_tables_are_added_to_a_file_without_measuring_again(engine, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    first = plan_of()
    table = first.experiment.tables[0]
    measured(engine, output, experiment=replace(first.experiment, tables=(replace(table, cases=table.cases[:1]),)))
    written = []
    monkeypatch.setattr(turns, "start", lambda engine, system, *rest, _start=turns.start: written.append(
        (system.drafter, system.rule)) or _start(engine, system, *rest))
    results = measured(engine, output)  # the first text's other systems, and the second text
    assert sorted(written) == [
        ("magicdec", "keyed"), ("plain", "keyed"), ("plain", "keyed"), ("tokenswift", "independent"),
        ("tokenswift", "keyed"), ("tokenswift", "per-path")]
    grids = measures.tables(results, first.experiment, first.scale)
    assert not any("–" in row for row in grids[0].rows)


def test_other_settings_are_not_mixed_into_a_file(engine, tmp_path):
    output = tmp_path / "out.jsonl"
    measured(engine, output)
    with pytest.raises(UsageError, match=r"holds other measurements \(seeds: \[7\], \[8\]\)"):
        measured(engine, output, seeds=[8])


@pytest.mark.parametrize("change", [{"kernels": "other"}, {"threads": 99}, {"device": "cuda:0"}, {"dtype": "float64"},
                                    {"weights_sha256": "0"}, {"processor": "another"}, {"commit": "0"}])
def test_mixed_devices_or_settings_are_refused(engine, tmp_path, change):
    output = tmp_path / "out.jsonl"
    measured(engine, output)
    session = json.loads(output.read_text().splitlines()[0])
    with output.open("a") as file:
        file.write(json.dumps(session | change) + "\n")
    with pytest.raises(UsageError, match=f"mix machines or settings: {next(iter(change))}: "):
        stored.read(output)


def test_a_comparison_whose_texts_differ_fails(engine, tmp_path):
    output = tmp_path / "out.jsonl"
    measured(engine, output)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    liar = next(record for record in records if record["kind"] == "turn" and record["system"] == "magicdec")
    liar["sha256_tokens"] = "0" * 64
    output.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UsageError, match="plain and magicdec wrote different texts, somewhere before token 15"):
        stored.read(output)


def test_it_fails_while_measuring_too(engine, monkeypatch):
    class Forger(Sampler):
        def choose(self, logits, tree, context):
            return [5] * len(tree)

    monkeypatch.setitem(turns.SAMPLERS, "independent", Forger)
    with pytest.raises(UsageError, match="plain and independent wrote different texts"):
        measured(engine)


def test_a_slowed_system_shows_up_as_slower(engine, monkeypatch):
    class Slow(PlainDrafter):
        def propose(self, context, max_depth):
            time.sleep(0.05)
            return super().propose(context, max_depth)

    kind = drafters.KINDS["plain"]
    monkeypatch.setitem(drafters.KINDS, "slow", kind._replace(build=lambda options, given: Slow()))
    data = EXPERIMENT | {
        "systems": {"plain": {"drafter": "plain"}, "same": {"drafter": "plain"}, "slow": {"drafter": "slow"}},
        "tables": [{"id": "1", "title": "", "measures": ["speedup"], "cases": [{"name": name, "system": name}
                                                                              for name in ("same", "slow")]}]}
    text = next(iter(measured(engine, data=data).texts.values()))
    slow, same = (measures.measure(text, name, "speedup", 40) for name in ("slow", "same"))
    assert 3 * slow < same
    spent = [sum(turn["seconds"] for turn in text.turns[name]) for name in ("slow", "plain")]
    assert spent[0] > 40 * 0.05 > spent[1]


# --- the published rule of verification


def laws_of(tree, probabilities):
    return [(np.arange(len(probabilities)), np.cumsum(probabilities))] * len(tree)


def test_the_published_rule_gives_the_counter_example():
    """A fair coin and the leaves (A, A), (A, B): A is written three times out of four, 1.1875 guesses are accepted."""
    tree = from_paths(0, [(0, 0), (0, 1)], "test")
    pick = np.random.default_rng(1)
    found = []
    for _ in range(20_000):
        path, last = rules.best_path(tree, laws_of(tree, [0.5, 0.5]), pick)
        found.append((tree.tokens[path[1]] if len(path) > 1 else last, len(path) - 1))
    assert np.mean([first == 0 for first, _ in found]) == pytest.approx(0.75, abs=0.015)
    assert np.mean([accepted for _, accepted in found]) == pytest.approx(1.1875, abs=0.02)


def test_tries_of_many_paths_add_up():
    """M paths through one token of probability p: it is written with 1 - (1 - p)^M."""
    tree = from_paths(9, [(0, other) for other in range(10, 37)], "test")
    pick = np.random.default_rng(2)
    first = [len(rules.best_path(tree, laws_of(tree, [0.05, 0.95]), pick)[0]) > 1 for _ in range(4000)]
    assert np.mean(first) == pytest.approx(1 - 0.95**27, abs=0.03)


def test_the_walk_ends_where_the_rule_does():
    """The added token may be the child of another path, whose own samples missed it: it is not followed."""
    tree = from_paths(0, [(1, 1), (1, 2)], "test")
    params = SamplingParams(seed=3)
    logits = torch.tensor([[-9.0, 9.0, -9.0], [-9.0, 1.0, 1.0]] + [[9.0, 0.0, 0.0]] * 2)
    lengths = set()
    for length in range(2, 60):
        context = Context([2] * length + [0])
        fresh = from_paths(0, [(1, 1), (1, 2)], "test")
        choices = rules.PathSampler(params).choose(logits, fresh, context)
        pick = np.random.default_rng([3, len(context)])
        laws = [rules._law(row.numpy(), params) for row in logits]
        path, last = rules.best_path(tree, laws, pick)
        from longdraft.speculation.verify import walk

        walked = walk(fresh, choices)
        assert walked == path and choices[walked[-1]] == last
        lengths.add(len(path))
    assert lengths >= {2, 3}


def test_only_the_benchmarks_know_the_published_rule():
    package = Path(experiments.__file__).parent.parent
    knowing = {path for path in package.rglob("*.py") if "PathSampler" in path.read_text()}
    assert {path.parent.name for path in knowing} == {"bench"}


# --- the experiments that come with the package


@pytest.mark.parametrize("name", ["paper", "ablation"])
def test_ours_can_be_run_at_every_scale(name):
    found = experiments.load(name)
    for scale in found.scales.values():
        plan = found.plan(scale, [7], 1)
        assert all(names[0] == "plain" and len(names) > 1 for names in plan.values())
        for text, names in plan.items():
            for system in (found.systems[name] for name in names):
                drafters.parse_options(system.drafter, system.options_for(text.prefill))


def test_published_values_are_those_of_the_paper():
    """Some that the design cites: tables 3, 4, 5, 6, 7, 13 and 15, and the identity of figure 3 and table 12."""
    tables = {table.id: {case.name: case for case in table.cases} for table in experiments.load("paper").tables}
    assert set(tables) == {"1", "3", "4", "F1", "F3", "5", "6", "7", "8", "12", "13", "14", "15", "16"}
    llama = {case.prefill: case.paper["LLaMA3.1-8B"] for case in experiments.load("paper").tables[1].cases
             if case.system == "tokenswift-per-path"}
    assert llama[4096]["speedup"] == [1.93, 2.47, 2.88, 3.13, 3.27] and llama[8192]["alpha"][-1] == 0.90
    assert tables["4"]["TokenSwift, published rule"].paper["Qwen2.5-14B"]["minutes_reference"][-1] == 474.6
    assert tables["5"]["Static"].paper["LLaMA3.1-8B"]["speedup"][0] == 0.94
    assert tables["6"]["top-p 0.9"].paper["LLaMA3.1-8B"]["distinct_1"] == [0.15]
    assert tables["7"]["1,9,9,9"].paper["LLaMA3.1-8B"]["alpha"][-1] == 0.57
    assert tables["13"]["T = 0.6, published rule"].paper["LLaMA3.1-8B"]["speedup"][-1] == 3.41
    assert tables["15"]["window 128"].paper["LLaMA3.1-8B"]["alpha"][0] == 0.59
    min_p = tables["12"]["min-p 0.1, published rule"].paper["LLaMA3.1-8B"]
    assert min_p["alpha"] == tables["F3"]["k = 20, published rule"].paper["LLaMA3.1-8B"]["alpha"]


MISTAKES = {
    "no file": (None, "no experiment 'nowhere'"),
    "not TOML": ("[", "is not TOML"),
    "unknown key": ('name = "x"\ncolour = "red"', "a key of experiment is 'colour'"),
    "missing": ('name = "x"', "experiment is incomplete"),
    "measure": ({"tables": [{"id": "1", "title": "", "measures": ["luck"], "cases": []}]}, "a measure of table 1 is"),
    "system": ({"tables": [{"id": "1", "title": "", "cases": [{"name": "", "system": "x"}]}]}, "system is 'x'"),
    "rule": ({"systems": {"plain": {"drafter": "plain", "rule": "best"}}}, "rule is 'best'"),
    "drafter": ({"systems": {"plain": {"drafter": "magic"}}}, "drafter is 'magic'"),
    "reference": ({"reference": "nobody"}, "system is 'nobody'"),
    "lengths": ({"scales": {"a": {"lengths": [5, 4]}}}, "lengths is [5, 4]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_faulty_experiment_is_told_in_one_line(mistake, tmp_path):
    given, message = MISTAKES[mistake]
    path = tmp_path / "experiment.toml"
    if isinstance(given, str):
        path.write_text(given)
    with pytest.raises(UsageError) as caught:
        experiments.parse(EXPERIMENT | given) if isinstance(given, dict) else experiments.load(
            "nowhere" if given is None else str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


# --- what is made of results


def golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_golden_results_give_golden_tables():
    results = stored.read(GOLDEN / "results.jsonl")
    plan = experiments.parse(json.loads((GOLDEN / "experiment.json").read_text()))
    grids = measures.tables(results, plan, plan.scale("default"))
    golden("tables.md", "\n".join(each.markdown() for each in grids))
    golden("tables.tex", "\n".join(each.latex() for each in grids))
    golden("tables.html", "\n".join(each.html() for each in grids))


def test_tables_are_escaped_for_where_they_stand():
    hostile = grid.Grid("a & b", ["", "50 %_x"], [["<script>", "a|b"]], "n#1")
    assert "<script>" not in hostile.html() and "&lt;script&gt;" in hostile.html()
    assert r"a\|b" in hostile.markdown()
    assert r"50 \%\_x" in hostile.latex() and r"a \& b. n\#1" in hostile.latex()


def bench(capfd, *arguments):
    assert run(["bench", *arguments]) == 0
    return capfd.readouterr().out


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
auto = { drafter = "auto" }
[[tables]]
id = "1"
title = "One"
measures = ["alpha", "speedup"]
cases = [{ name = "auto", system = "auto" }]
""")
    output, folder = tmp_path / "out.jsonl", tmp_path / "report"
    out = bench(capfd, "run", str(tmp_path / "mine.toml"), "--prompt-file", str(tmp_path / "text.txt"), "--model",
                str(tiny["gqa"]), "--dtype", "float32", "--output", str(output), "--memory", "0.0005")
    assert "1. One" in out
    last = json.loads(out.splitlines()[-1])
    assert last["bench"] == "mine" and len(last["tables"][0]["cases"][0]["measures"]["speedup"]) == 2
    limits = stored.read(output).sessions[0]["limits"]
    assert limits["read_bandwidth_gb_per_s"] > 0 and limits["peak_gflop_per_s"]["bfloat16"] > 0
    bench(capfd, "report", str(output), "--output", str(folder), "--experiment", str(tmp_path / "mine.toml"))
    page = (folder / "report.html").read_text()
    assert page.count("<img ") == page.count('src="data:image/svg+xml;base64,') >= 4
    assert not re.search(r'(src|href)="http|<script|@import|url\(', page)  # whole in itself
    assert "| auto, α |" in (folder / "tables.md").read_text() and r"\toprule" in (folder / "tables.tex").read_text()
    names = {path.name for path in folder.iterdir()}
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


def test_every_figure_says_what_its_axes_are(engine):
    pytest.importorskip("matplotlib")
    results = measured(engine)
    found = dict(figures.of_text(figures.main_texts(results)[0], results.sessions[0]))
    assert set(found) == {"minutes", "speedup", "step", "sources", "lengths"}
    for figure in found.values():
        for axes in figure.axes:
            assert axes.get_ylabel() and (axes.get_xlabel() or axes.get_label() == "<colorbar>")


def test_experiments_mistakes_get_one_line(capfd, tmp_path):
    prompt = tmp_path / "short.txt"
    prompt.write_text("It was. ")
    for arguments, message in (
            (["paper", "--prompt-file", str(prompt), "--tables", "99"], "--tables is '99'"),
            (["paper", "--prompt-file", str(prompt), "--scale", "huge"], "--scale is 'huge'; allowed: smoke, sm"),
            (["paper", "--prompt-file", str(prompt), "--seeds", "x"], "--seeds is 'x'"),
            (["ablation", "--prompt-file", str(tmp_path / "none")], "--prompt-file cannot read"),
            (["report", str(prompt), "--output", str(tmp_path)], "is not a file of results"),
            (["report", str(tmp_path / "none"), "--output", str(tmp_path)], "cannot read the results")):
        assert run(["bench", *arguments]) == 2
        error = capfd.readouterr().err
        assert message in error and error.count("\n") == 1


# --- other engines' texts, and recorded journals


def texts_of(model, names, draft=None, **changes):
    plan = peers.Plan(str(model), model, peers.named(names), peers.interpreter(None), [20], 0, 1, 2, 600, 128)
    report = {"repeats": 2}
    peers_text.measure(plan._replace(**changes), report, list(range(5, 65)), 12, draft, contextlib.nullcontext)
    return report


def test_whole_texts_by_other_engines(capfd, tmp_path, tiny, monkeypatch):
    """Of ours and of transformers a way each: every one is a process."""
    kind, ways = peers_text.WAYS["transformers"]
    monkeypatch.setitem(peers_text.WAYS, "transformers", (kind, ways[1:2]))
    kind, ways = peers_text.WAYS["longdraft"]
    monkeypatch.setitem(peers_text.WAYS, "longdraft", (kind, [ways[0], ways[3]]))
    report = texts_of(tiny["gqa"], "longdraft,transformers", tiny["gqa"])
    plain, draft, lookup = report["texts"]
    assert [(each["engine"], each["system"]) for each in report["texts"]] == [
        ("longdraft", "plain"), ("longdraft", "draft model"), ("transformers", "prompt lookup")]
    for record in report["texts"]:
        assert "error" not in record
        assert len(record["tokens"]) == 12 and len(record["seconds"]) == len(record["first_s"]) == 2
        assert record["peak_memory_bytes"] > 1e7 and record["first_token_s"] > 0
        assert record["to_longdraft_plain"]["low"] <= record["to_longdraft_plain"]["high"]
        assert record["settings"] == min(record["tries"], key=lambda each: each["seconds"])["settings"]
    assert draft["as_longdraft"] == draft["as_own_plain"] == 12  # the promise
    assert plain["to_own_plain"] == {"median": 1, "low": 1, "high": 1} and len(lookup["tries"]) == 3
    pytest.importorskip("matplotlib")
    machine = {"machine": {"processor": "x"}, "bench": "peers", "model": "m"}
    (tmp_path / "peers.json").write_text(json.dumps(report | machine))
    bench(capfd, "report", str(tmp_path / "peers.json"), "--output", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "transformers, prompt lookup" in page and "What cannot be compared" in page


def test_a_way_that_cannot_be_is_in_the_table_with_its_reason(tiny, monkeypatch):
    kind = peers.Kind("longdraft", ("no_such_package",), "pip install no-such-package")
    monkeypatch.setitem(peers_text.WAYS, "longdraft", (kind, (
        peers_text.Way("plain"), peers_text.Way("draft", needs_draft=True), peers_text.Way("magic", cannot="never"))))
    report = texts_of(tiny["mha"], "longdraft")
    assert [record["error"] for record in report["texts"]] == [
        "not installed: pip install no-such-package (missing: no_such_package)",
        "needs a smaller model: give --draft-model", "never"]
    assert [row[2] for row in peers_text.tables(report)[0].rows][-1] == "never"


def test_a_journal_is_replayed_with_its_own_prompt_and_penalty(capfd, tmp_path, tiny):
    folder = tmp_path / "journal"
    assert run(["generate", TEXT[:200], "--model", str(tiny["mha"]), "--max-new-tokens", "300", "--seed", "7",
                "--repetition-penalty", "1.1", "--penalty-window", "50", "--ignore-eos", "--quiet", "--journal",
                str(folder), "--output", str(tmp_path / "out.txt")]) == 0
    capfd.readouterr()
    out = bench(capfd, "replay", str(folder), "--drafter", "ngram")
    document = json.loads(out.splitlines()[-1])
    assert document["files"]["journal"][0]["tokens"] == 300
    assert "200 of them the prompt, penalty window 50" in out


def test_the_documents_tables_are_those_of_the_kept_results():
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, str(root / "benchmarks" / "tables.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0


def test_kept_results_can_be_compared_and_name_their_model():
    kept = list((Path(__file__).resolve().parent.parent / "benchmarks" / "results").glob("*.jsonl"))
    assert kept
    for path in kept:
        for session in stored.read(path).sessions:
            assert len(session["weights_sha256"]) == 64 and len(session["prompt_sha256"]) == 64
            assert not session["commit"].endswith("-dirty")
