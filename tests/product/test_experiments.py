"""Experiments, their results, and the checks of comparisons.

Only the test of a deliberately slow system depends on measured times.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import pytest

from helpers.experiments import EXPERIMENT, measured, plan_of
from longdraft import drafters
from longdraft.__main__ import run
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine.loading import load
from longdraft.errors import UsageError
from longdraft.sampling.sampler import Sampler
from longdraft_bench import results as stored
from longdraft_bench import turns
from longdraft_bench.machine import device
from longdraft_bench.paper import experiment as experiments
from longdraft_bench.paper import measures

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def engine(tiny):
    return load(str(tiny["mha"]), dtype="float32", threads=1)


@pytest.fixture(scope="module")
def recorded(engine, tmp_path_factory):
    """The bytes of a file of results."""
    output = tmp_path_factory.mktemp("results") / "results.jsonl"
    measured(engine, output)
    return output.read_bytes()


@pytest.fixture
def output(recorded, tmp_path):
    """A copy of the file of results that a test may change."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(recorded)
    return path


def test_a_text_beyond_the_context_limit_is_refused_before_the_measurement(engine, tmp_path):
    data = EXPERIMENT | {"scales": {"default": {"lengths": [20, 4000], "turn": 15, "prefix": 0.5}}}
    with pytest.raises(UsageError, match=r"max_new_tokens \(4000\) is 4200; allowed: 4096"):
        measured(engine, tmp_path / "results.jsonl", data=data)
    assert not (tmp_path / "results.jsonl").exists()


def test_an_experiment_fills_its_tables(engine):
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
                assert (turn["seconds"] > 0) == (turn["steps"] > 0) and turn["steps"] == sum(turn["lengths"].values())
                assert turn["accepted"] == sum(turn["accepted_by_source"].values()) <= turn["depth"]
                assert turn["steps"] + turn["accepted"] == turn["tokens"] or turn["end"] == 40
            assert text.stats[system]["drafter"] == text.about["systems"][system]["drafter"]
    session = results.sessions[0]
    assert session.keys() >= {"commit", "processor", "threads", "kernels", "dtype", "weights_sha256", "prompt_sha256",
                              "seeds", "torch", "device", "tokenizer_sha256"}


def test_drafter_options_can_depend_on_the_prompt_length(output):
    text = next(iter(stored.read_results(output).texts.values()))
    assert text.about["systems"]["paper"]["options"]["budget"] == 100


def test_all_systems_write_the_same_text_except_with_the_published_rule(output):
    text = next(iter(stored.read_results(output).texts.values()))
    hashes = {name: [turn["sha256_tokens"] for turn in written] for name, written in text.turns.items()}
    assert hashes["plain"] == hashes["magicdec"] == hashes["paper"] == hashes["independent"] != hashes["per-path"]


def test_an_interrupted_run_measures_only_the_missing_turns(engine, output, tmp_path, monkeypatch):
    lines = output.read_bytes().splitlines(keepends=True)
    before = [json.loads(line) for line in lines]
    cut = tmp_path / "cut.jsonl"
    kept = [place for place, record in enumerate(before) if record["kind"] == "turn"][7]  # a turn of the second round
    cut.write_bytes(b"".join(lines[: kept + 1]) + lines[kept + 1][:40])  # and an incomplete line
    written = []
    monkeypatch.setattr(turns, "write_turn", lambda text, end, _write=turns.write_turn: (
        written.append(end) or _write(text, end)))
    results = measured(engine, cut)
    assert written.count(15) == 2  # the first round of the first text is not measured again
    for key, text in stored.read_results(output).texts.items():
        again = results.texts[key]
        for system in text.turns:
            assert (again.tokens(system) == text.tokens(system)).all()
            assert [turn["end"] for turn in again.turns[system]] == [15, 20, 25, 30, 40]
    resumed = [turn for text in results.texts.values() for each in text.turns.values() for turn in each
               if turn["is_resumed"]]
    assert {turn["end"] for turn in resumed} == {20}
    written.clear()
    measured(engine, cut)
    assert not written  # nothing is missing


def test_where_two_caches_do_not_fit_each_turn_reads_its_text_again(engine, output, monkeypatch):
    """Two systems at a time, one cache at a time: the same texts as with all caches in memory."""
    monkeypatch.setattr(device, "num_caches", lambda model, positions: 1)
    held, most = set(), []

    class Watched(turns.Generation):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            held.add(self)
            most.append(len(held))

        def close(self):
            held.discard(self)
            super().close()

    monkeypatch.setattr(turns, "Generation", Watched)
    found = measured(engine)
    assert set(most) == {1} and not held
    together = stored.read_results(output)
    texts = {system: turns_[-1]["sha256_tokens"] for text in together.texts.values() for system, turns_ in
             text.turns.items() if text.about["sampling"]["temperature"] == 1}
    for text in found.texts.values():
        assert len(text.turns) == 2
        for system, written in text.turns.items():
            if text.about["sampling"]["temperature"] == 1:
                assert written[-1]["sha256_tokens"] == texts[system]
            assert [turn["is_resumed"] for turn in written] == [False, *[True] * (len(written) - 1)]


def test_the_caches_that_fit_are_counted_by_what_the_device_has_free(engine, monkeypatch):
    kernels, per_token = engine.model.kernels, engine.model.cache_bytes_per_token
    monkeypatch.setattr(kernels, "free_bytes", lambda: 10_000 * per_token)
    assert device.num_caches(engine.model, 1000) == 7  # 0.9 x 10,000 / (1.2 x 1,000)
    monkeypatch.setattr(kernels, "is_device", True)
    assert device.num_caches(engine.model, 1000) == 3  # with room for a tree of 1,024 rows each


def test_clocks_are_recorded_where_the_system_tells_them(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 700.00 W, 550.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert device.clocks()["clocks.sm"] == "1980 MHz" and device.clocks()["driver_version"] == "550.1"
    monkeypatch.setenv("PATH", "")
    assert device.clocks() == {} and device.description("cpu") == {}


def test_more_tables_are_added_to_a_file_without_measuring_again(engine, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    first = plan_of()
    table = first.experiment.tables[0]
    measured(engine, output, experiment=replace(first.experiment, tables=(replace(table, cases=table.cases[:1]),)))
    written = []
    monkeypatch.setattr(turns, "start", lambda engine, system, *rest, _start=turns.start: written.append(
        (system.drafter, system.rule)) or _start(engine, system, *rest))
    results = measured(engine, output)  # measures the first text's other systems and the second text
    assert sorted(written) == [
        ("magicdec", "keyed"), ("plain", "keyed"), ("plain", "keyed"), ("tokenswift", "independent"),
        ("tokenswift", "keyed"), ("tokenswift", "per-path")]
    grids = measures.tables(results, first.experiment, first.scale)
    assert not any("–" in row for row in grids[0].rows)


def test_another_seed_is_added_to_an_existing_results_file(engine, output):
    before = output.read_bytes()
    results = measured(engine, output, seeds=[8])
    assert output.read_bytes().startswith(before)
    assert results.seeds == stored.read_results(output).seeds == [7, 8]
    plan = plan_of(seeds=[7, 8])
    grid = measures.tables(results, plan.experiment, plan.scale)[0]
    assert all(" ± " in cell for row in grid.rows for cell in row[1:])


def test_another_number_of_stretches_is_refused_for_an_existing_results_file(engine, output):
    with pytest.raises(UsageError, match=r"holds other measurements \(stretches: 1, 2\)"):
        measured(engine, output, stretches=2)


@pytest.mark.parametrize("change", [{"kernels": "other"}, {"threads": 99}, {"device": "cuda:0"}, {"dtype": "float64"},
                                    {"weights_sha256": "0"}, {"processor": "another"}, {"commit": "0"}])
def test_mixed_devices_or_settings_are_refused(output, change):
    session = json.loads(output.read_text().splitlines()[0])
    with output.open("a") as file:
        file.write(json.dumps(session | change) + "\n")
    with pytest.raises(UsageError, match=f"mix machines or settings: {next(iter(change))}: "):
        stored.read_results(output)


def test_a_comparison_of_different_texts_fails(output):
    records = [json.loads(line) for line in output.read_text().splitlines()]
    liar = next(record for record in records if record["kind"] == "turn" and record["system"] == "magicdec")
    liar["sha256_tokens"] = "0" * 64
    output.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UsageError, match="plain and magicdec wrote different texts, somewhere before token 15"):
        stored.read_results(output)


def test_different_texts_fail_while_measuring_too(engine, monkeypatch):
    class Forger(Sampler):
        def choose(self, logits, tree, context, every=True):
            return [5] * len(tree)

    monkeypatch.setitem(turns.SAMPLERS, "independent", Forger)
    with pytest.raises(UsageError, match="plain and independent wrote different texts"):
        measured(engine)


def test_a_slowed_system_shows_up_as_slower(engine, monkeypatch):
    class Slow(PlainDrafter):
        plain_steps = 0  # each step calls `propose`

        def propose(self, context, max_depth):
            time.sleep(0.05)
            return super().propose(context, max_depth)

    spec = drafters.DRAFTERS["plain"]
    monkeypatch.setitem(drafters.DRAFTERS, "slow", spec._replace(build=lambda options, resources: Slow()))
    data = EXPERIMENT | {
        "systems": {"plain": {"drafter": "plain"}, "same": {"drafter": "plain"}, "slow": {"drafter": "slow"}},
        "tables": [{"id": "1", "title": "", "measures": ["speedup"], "cases": [{"name": name, "system": name}
                                                                              for name in ("same", "slow")]}]}
    text = next(iter(measured(engine, data=data).texts.values()))
    slow, same = (measures.measure(text, name, "speedup", 40) for name in ("slow", "same"))
    assert 3 * slow < same
    spent = [sum(turn["seconds"] for turn in text.turns[name]) for name in ("slow", "plain")]
    assert spent[0] > 40 * 0.05 > spent[1]


# The bundled experiments.


@pytest.mark.parametrize("name", ["paper", "ablation", "segments"])
def test_bundled_experiments_can_run_at_every_scale(name):
    found = experiments.load_experiment(name)
    for scale in found.scales.values():
        plan = found.plan(scale, [7], 1)
        assert all(names[0] == "plain" and len(names) > 1 for names in plan.values())
        for text, names in plan.items():
            for system in (found.systems[name] for name in names):
                system.choice(text.prefill)


def test_published_values_are_those_of_the_paper():
    """A sample: tables 3, 4, 5, 6, 7, 13 and 15, and the identity of figure 3 and table 12."""
    paper = experiments.load_experiment("paper")
    tables = {table.id: {case.name: case for case in table.cases} for table in paper.tables}
    assert set(tables) == {"1", "3", "4", "F1", "B", "D", "F3", "F4", "F5", "H", "5", "6", "7", "8", "10", "12", "13",
                           "14", "15", "16"}

    def llama(table, case):
        return tables[table][f"{case}, published system"].paper["LLaMA3.1-8B"]

    by_prefill = {case.prefill: case.paper["LLaMA3.1-8B"] for case in paper.tables[1].cases
                  if case.system == "published"}
    assert by_prefill[4096]["speedup"] == [1.93, 2.47, 2.88, 3.13, 3.27] and by_prefill[8192]["alpha"][-1] == 0.90
    published = tables["4"]["TokenSwift, published system"]
    assert published.paper["Qwen2.5-14B"]["minutes_reference"][-1] == 474.6
    assert llama("5", "Static")["speedup"][0] == 0.94
    assert llama("6", "top-p 0.9")["distinct_1"] == [0.15]
    assert llama("7", "1,9,9,9")["alpha"][-1] == 0.57
    assert llama("13", "T = 0.6")["speedup"][-1] == 3.41
    assert llama("15", "window 128")["alpha"][0] == 0.59
    assert llama("12", "min-p 0.1")["alpha"] == llama("F3", "k = 20")["alpha"]


def test_published_values_stand_beside_the_published_system_and_the_other_papers_only():
    own = {"medusa-star", "triforce", "magicdec", "magicdec-standalone"}
    for table in experiments.load_experiment("paper").tables:
        for case in table.cases:
            assert not case.paper or case.system.startswith("published") or case.system in own


@pytest.mark.parametrize("profile, expected", [
    ("LLaMA3.1-8B", {"min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": ((18328, -100), (78191, -100))}),
    ("YaRN-LLaMA2-7B", {"top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.15}),
    ("qwen2.5-1.5b", {"top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.15}),
    ("qwen2.5-7b", {"top_p": 1.0, "min_p": 0.05, "repetition_penalty": 1.15}),
    ("Qwen2.5-14B", {"min_p": 0.05, "repetition_penalty": 1.13, "penalty_window": 1024}),
])
def test_a_profile_has_its_models_sampler_and_published_values(profile, expected):
    """The paper's table 10. The published code keeps at least 20 tokens and bans two of LLaMA3.1; ours does neither."""
    chosen = experiments.load_experiment("paper").with_profile(profile)
    case = next(case for case in chosen.tables[1].cases if case.system == "published")
    found = chosen.text_of(case, chosen.scale("small"), 7, 0).sampling
    assert {name: getattr(found, name) for name in expected} == expected and found.min_tokens_to_keep == 20
    ours = chosen.text_of(replace(case, system="tokenswift"), chosen.scale("small"), 7, 0).sampling
    assert ours == replace(found, min_tokens_to_keep=1, logit_bias=())
    triforce = chosen.text_of(replace(case, system="triforce"), chosen.scale("small"), 7, 0).sampling
    assert triforce == replace(ours, repetition_penalty=1.0)
    values = {model for table in chosen.tables for case in table.cases for model in case.paper}
    assert {model.lower() for model in values} == {profile.lower()}


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
    "version": ({"systems": {"plain": {"drafter": "plain", "version": "new"}}}, "version is 'new'"),
    "published": ({"systems": {"plain": {"drafter": "plain"}, "magicdec": {"drafter": "magicdec",
                                                                           "version": "published"}},
                   "tables": [{"id": "1", "title": "", "cases": [{"name": "", "system": "magicdec"}]}]},
                  "drafter is 'magicdec'; allowed: tokenswift, with version published"),
    "no weak loop": ({"tables": [{"id": "1", "title": "", "measures": ["speedup_weak"], "cases": []}]}, "weak is ''"),
    "lengths": ({"scales": {"a": {"lengths": [5, 4]}}}, "lengths is [5, 4]"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_faulty_experiment_gets_one_clear_line(mistake, tmp_path):
    given, message = MISTAKES[mistake]
    path = tmp_path / "experiment.toml"
    if isinstance(given, str):
        path.write_text(given)
    with pytest.raises(UsageError) as caught:
        experiments.parse_experiment(EXPERIMENT | given) if isinstance(given, dict) else experiments.load_experiment(
            "nowhere" if given is None else str(path))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_mistakes_on_the_command_line_get_one_line(capfd, tmp_path):
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
