"""Whole texts written by other engines, the model conversion for llama.cpp, and drafters replayed on journals."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import longdraft
from helpers import gguf_files
from helpers.checkpoints import make_checkpoint
from helpers.experiments import TEXT, bench
from longdraft.__main__ import run
from longdraft_bench.peers import process as peers
from longdraft_bench.peers import steps
from longdraft_bench.peers import texts as peers_text

pytestmark = pytest.mark.full


def texts_of(model, names, draft=None, **changes):
    plan = steps.PeersPlan(str(model), model, peers.named(names), peers.interpreter(None), [20], 0, 1, 2, 600, 128)
    report = {"repeats": 2}
    peers_text.write_texts(plan._replace(**changes), report, list(range(5, 65)), 12, draft, contextlib.nullcontext)
    return report


def test_peers_write_whole_texts(capfd, tmp_path, tiny, monkeypatch):
    """Measures only three modes, because each starts a process."""
    for engine, chosen in (("transformers", [1]), ("longdraft", [0, 3])):
        program, modes = peers_text.MODES[engine]
        monkeypatch.setitem(peers_text.MODES, engine, (program, [modes[place] for place in chosen]))
    report = texts_of(tiny["gqa"], "longdraft,transformers", tiny["gqa"])
    plain, draft, lookup = report["texts"]
    assert [(each["engine"], each["system"]) for each in report["texts"]] == [
        ("longdraft", "plain"), ("longdraft", "draft model"), ("transformers", "prompt lookup")]
    for record in report["texts"]:
        assert "error" not in record
        assert len(record["tokens"]) == 12 and len(record["seconds"]) == len(record["first_s"]) == 2
        assert record["peak_memory_bytes"] > 1e7 and record["first_token_s"] > 0
        assert record["to_longdraft_plain"]["low"] <= record["to_longdraft_plain"]["high"]
        if record["tries"]:
            assert record["settings"] == min(record["tries"], key=lambda each: each["seconds"])["settings"]
    assert draft["as_longdraft"] == draft["as_own_plain"] == 12  # the drafted text equals the plain one
    assert plain["to_own_plain"] == {"median": 1, "low": 1, "high": 1} and len(lookup["tries"]) == 3
    pytest.importorskip("matplotlib")
    machine = {"machine": {"processor": "x"}, "bench": "peers", "model": "m"}
    (tmp_path / "peers.json").write_text(json.dumps(report | machine))
    bench(capfd, "report", str(tmp_path / "peers.json"), "--output", str(tmp_path / "report"))
    page = (tmp_path / "report" / "report.html").read_text()
    assert "transformers, prompt lookup" in page and "What cannot be compared" in page


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = make_checkpoint(folder / "tiny", hidden_size=64, intermediate_size=96)
    gguf_files.convert(folder / "tiny", model, folder / "model.gguf", "Q8_0")
    return folder / "model.gguf"


def test_a_gguf_file_is_given_to_the_engines_as_it_is(gguf_file, tmp_path):
    plan = steps.PeersPlan("x", gguf_file, peers.named("longdraft", "file"), peers.interpreter(None), [20], 0, 1, 2,
                           600, 128, ["plain"], "file")
    assert peers.portable_model(gguf_file, tmp_path) == gguf_file
    measured = {}
    steps.measure_peers(plan, measured, contextlib.nullcontext)
    assert "file" in measured["engines"][0]["version"] and measured["steps"][0]["ms"] > 0
    texts = {"repeats": 2}
    peers_text.write_texts(plan, texts, list(range(5, 65)), 12, None, contextlib.nullcontext)
    (plain,) = texts["texts"]
    assert "file" in plain["version"] and plain["settings"] == {} and len(plain["tokens"]) == 12
    assert all(first < whole for first, whole in zip(plain["first_s"], plain["seconds"], strict=True))
    tokens = longdraft.load(str(gguf_file), quantize="file", dtype="bfloat16", drafter="plain").generate(
        list(range(5, 65)), longdraft.SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True))
    assert list(tokens) and plain["tokens"] == tokens.tokens.tolist()


def test_what_cannot_be_compared_with_a_gguf_file_is_one_line(gguf_file, tiny, capfd):
    for model, given, line in (
            (gguf_file, [], "--quantize is 'none'; allowed: file for a GGUF file"),
            (tiny["gqa"], ["--quantize", "file"], "--quantize is 'file'; allowed: none, int8 or int4"),
            (gguf_file, ["--quantize", "file", "--modes", "magic"], "--modes is 'magic'; allowed: plain,")):
        assert run(["bench", "peers", "--model", str(model), "--peers", "longdraft", *given]) == 2
        error = capfd.readouterr().err.strip()
        assert line in error and len(error.splitlines()) == 1


def test_an_unsupported_mode_is_listed_with_its_reason(tiny, monkeypatch):
    program = peers.PeerProgram("longdraft", ("no_such_package",), "pip install no-such-package")
    monkeypatch.setitem(peers_text.MODES, "longdraft", (program, (
        peers_text.DecodingMode("plain"), peers_text.DecodingMode("draft", needs_draft=True),
        peers_text.DecodingMode("magic", unsupported="never"))))
    report = texts_of(tiny["mha"], "longdraft")
    assert [record["error"] for record in report["texts"]] == [
        "not installed: pip install no-such-package (missing: no_such_package)",
        "needs a smaller model: give --draft-model", "never"]
    assert [row[2] for row in peers_text.tables(report)[0].rows][-1] == "never"


def test_quantised_weights_are_compared_with_llama_cpp_alone(tiny, capfd):
    programs = peers.named("longdraft,llama.cpp", "int4")
    assert [dict(program.options) for program in programs.values()] == [
        {"quantize": "int4"}, {"flash": False, "weights": "q4_0"}, {"flash": True, "weights": "q4_0"}]
    assert all("weights" not in program.options for program in peers.named("longdraft,llama.cpp").values())
    for given in (["--peers", "longdraft,openvino", "--quantize", "int4"], ["--quantize", "int5"],
                  ["--peers", "longdraft", "--quantize", "int8", "--prompt-file", "x"]):
        assert run(["bench", "peers", "--model", str(tiny["gqa"]), *given]) == 2
        assert len(capfd.readouterr().err.strip().splitlines()) == 1


@pytest.fixture
def llama_cpp_worker(monkeypatch):
    """The worker's module with stand-ins for the packages that it needs. `writer` collects what is written."""
    writer = SimpleNamespace(settings={}, tensors=[])

    class GGUFWriter:
        def __init__(self, path, family):
            pass

        def add_tensor(self, name, data, raw_dtype=None):
            writer.tensors.append(name)

        def __getattr__(self, name):
            return lambda *values: writer.settings.update({name: values})

    gguf, llama, lookup = (ModuleType(name) for name in ("gguf", "llama_cpp", "llama_cpp.llama_speculative"))
    gguf.GGUFWriter, gguf.GGMLQuantizationType = GGUFWriter, {"BF16": 30}
    gguf.quants = SimpleNamespace(quantize=lambda tensor, kind: tensor)
    lookup.LlamaPromptLookupDecoding = object
    for module in (gguf, llama, lookup):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(str(Path(peers.__file__).parent / "workers"))
    yield importlib.import_module("with_llama_cpp"), writer
    del sys.modules["with_llama_cpp"]


@pytest.mark.parametrize("rope, theta", [
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5), ({"rope_theta": 2e4}, 2e4),
    ({"rope_theta": 3e4, "rope_scaling": None}, 3e4), ({}, 1e4)])
def test_the_llama_cpp_worker_reads_both_formats_of_rope_settings(llama_cpp_worker, tiny, tmp_path, rope, theta):
    """Newer versions of transformers write only `rope_parameters`, older ones only `rope_theta`."""
    worker, writer = llama_cpp_worker
    config = json.loads((tiny["gqa"] / "config.json").read_text())
    config = {name: value for name, value in config.items() if not name.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps(config | rope))
    (tmp_path / "model.safetensors").symlink_to(tiny["gqa"] / "model.safetensors")
    assert worker.convert(tmp_path, tmp_path / "model.gguf", "bf16") == config["vocab_size"]
    assert writer.settings["add_rope_freq_base"] == (theta,)
    assert {"token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"} <= set(writer.tensors)


def test_the_llama_cpp_worker_refuses_scaled_rope(llama_cpp_worker):
    worker, _ = llama_cpp_worker
    for spelling in ("rope_parameters", "rope_scaling"):
        with pytest.raises(ValueError, match="plain rotary positions only"):
            worker.rope_theta({spelling: {"rope_type": "llama3", "rope_theta": 5e5}})


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
