"""The memory and time that a model needs, computed from its config.json."""

from __future__ import annotations

import json
import platform
import time

import psutil
import pytest
import torch

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.gguf_files import convert
from longdraft.__main__ import run
from longdraft.checkpoint import config_file, sizing
from longdraft.errors import ModelError
from longdraft.system import machine
from longdraft_bench.machine import limits
from longdraft_bench.models import random_model
from longdraft_bench.models.shapes import SHAPES

LLAMA_8B = dict(model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, torch_dtype="bfloat16")
LLAMA_2_7B = dict(model_type="llama", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                  num_attention_heads=32, max_position_embeddings=4096, torch_dtype="float16")
LLAMA_70B = LLAMA_8B | dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)


def sizes_of(settings: dict[str, object], dtype: str = "bfloat16") -> sizing.Sizes:
    return sizing.model_sizes(config_file.parse_config(settings), dtype)


@pytest.mark.parametrize("settings, parameters", [  # the published numbers
    (LLAMA_8B, 8_030_261_248), (LLAMA_2_7B, 6_738_415_616), (LLAMA_70B, 70_553_706_496)])
def test_parameter_counts_of_known_models_match_their_publications(settings, parameters):
    assert sizes_of(settings).parameters == parameters


@pytest.mark.parametrize("dtype, width", [("bfloat16", 2), ("float32", 4)])
def test_the_size_in_bytes_depends_on_the_dtype(dtype, width):
    sizes = sizes_of(LLAMA_8B, dtype)
    assert sizes.weights_bytes == 8_030_261_248 * width
    assert sizes.read_bytes == (8_030_261_248 - 128256 * 4096) * width
    assert sizes.cache_bytes_per_token == 32 * 2 * 8 * 128 * width


def test_a_tied_embedding_counts_as_the_output_head():
    sizes = sizes_of(LLAMA_8B | {"tie_word_embeddings": True})
    assert sizes.read_bytes == sizes.weights_bytes == (8_030_261_248 - 128256 * 4096) * 2


def test_the_maximum_context_fits_beside_the_weights():
    sizes = sizes_of(LLAMA_8B)
    assert sizes.max_context(10 << 30) == 0
    assert sizes.max_context(1 << 40) == sizes.context_limit == 131072
    tokens = sizes.max_context(20 << 30)
    needed = sizes.weights_bytes + tokens * sizes.cache_bytes_per_token
    assert 0 <= (20 << 30) * sizing.USABLE - needed < sizes.cache_bytes_per_token


def test_the_time_of_a_step_is_bytes_divided_by_bandwidth():
    sizes = sizes_of(LLAMA_8B)
    assert sizes.ms_per_token(0, 1e12) == pytest.approx(sizes.read_bytes / 1e9)
    assert sizes.ms_per_token(1000, 1e9) - sizes.ms_per_token(0, 1e9) == pytest.approx(131_072_000 / 1e6)


@pytest.mark.parametrize("sizes, message", [
    *(({name: 10**300}, f"{name} is 10+; allowed") for name in ("num_hidden_layers", "hidden_size", "vocab_size")),
    (dict(num_hidden_layers=1 << 14, hidden_size=1 << 24, vocab_size=1 << 26),
     r"describes a model of 10\*\*\d+ parameters or more; allowed")])
def test_absurd_sizes_raise_an_error_immediately(sizes, message):
    began = time.monotonic()
    with pytest.raises(ModelError, match=message):
        sizes_of(LLAMA_8B | sizes | {"head_dim": 128})
    assert time.monotonic() - began < 1


@pytest.fixture
def quick(monkeypatch):
    from longdraft.system import machine

    monkeypatch.setattr(machine, "read_bandwidth", lambda memory: 20e9)


def test_doctor_does_not_read_weights(quick, capfd, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert run(["doctor", "--model", str(tmp_path), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    sizes = sizes_of(LLAMA_70B)
    assert report["weights_bytes"] == sizes.weights_bytes
    assert report["cache_bytes_per_1k_tokens"] == 1024 * sizes.cache_bytes_per_token
    assert report["ms_per_token"] == {str(context): sizes.ms_per_token(context, 20e9) for context in (4096, 100_000)}
    assert run(["doctor", "--model", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "141.11 GB in bfloat16" in shown and "335.5 MB for 1,024 tokens" in shown and "at 4,096 tokens" in shown


def test_doctor_reports_the_states_of_a_hybrid(quick, capfd, tmp_path):
    hybrid = dict(model_type="qwen3_5_text", vocab_size=320, hidden_size=1024, intermediate_size=3584,
                  num_hidden_layers=24, num_attention_heads=8, linear_num_value_heads=16)
    (tmp_path / "config.json").write_text(json.dumps(hybrid))
    assert run(["doctor", "--model", str(tmp_path)]) == 0
    assert "states               18.9 MB, whatever the length" in capfd.readouterr().out


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_bytes_of_quantised_weights_and_of_a_draft_copy(tmp_path, quantize):
    make_checkpoint(tmp_path, hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    parsed = config_file.read_config(tmp_path)
    weights = load(tmp_path, "bfloat16", quantize=quantize)
    table = weights.weights.embedding.nbytes
    assert sizing.quantized_bytes(parsed, quantize) == weights.weights_bytes + table
    assert sizing.quantized_bytes(parsed, quantize, is_draft_copy=True) == weights.weights_bytes


@pytest.mark.parametrize("kinds", [{}, {"attn_v": "Q4_1"}, {"attn_k": "Q8_0", "ffn_up": "F16"}])
def test_the_bytes_of_a_file_whose_numbers_are_kept(quick, capfd, tmp_path, kinds):
    model = make_checkpoint(tmp_path / "folder", hidden_size=64, intermediate_size=128, num_attention_heads=1,
                            num_key_value_heads=1, tie_word_embeddings=False, vocab_size=320)
    convert(tmp_path / "folder", model, tmp_path / "other.gguf", "BF16")
    convert(tmp_path / "folder", model, tmp_path / "model.gguf", "Q4_0", kinds=kinds)
    assert sizing.kept_sizes(tmp_path / "other.gguf", config_file.read_config(tmp_path / "other.gguf")) is None
    found = sizing.kept_sizes(tmp_path / "model.gguf", config_file.read_config(tmp_path / "model.gguf"))
    loaded = load(tmp_path / "model.gguf", "bfloat16", quantize="file")
    assert found and found.read_bytes == pytest.approx(loaded.weights_bytes, rel=0.02)  # which leaves out norms
    assert found.weights_bytes - found.read_bytes == loaded.weights.embedding.nbytes
    assert run(["doctor", "--model", str(tmp_path), "--file", "model.gguf", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["quantize_file"]["weights_bytes"] == found.weights_bytes
    assert run(["doctor", "--model", str(tmp_path)]) == 2  # which of the two files?
    assert "choose one with --file" in capfd.readouterr().err
    assert run(["doctor", "--model", str(tmp_path / "model.gguf")]) == 0
    assert "as in the file " in capfd.readouterr().out


def test_doctor_counts_the_draft_copy_of_large_weights(quick, capfd, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert run(["doctor", "--model", str(tmp_path), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert 0.27 < report["draft_copy_bytes"] / report["weights_bytes"] < 0.32 and report["draft_copy"] == "int4"
    assert report["quantized_bytes"]["int4"] < 0.36 * report["weights_bytes"] < report["quantized_bytes"]["int8"]
    make_checkpoint(tmp_path)
    assert run(["doctor", "--model", str(tmp_path)]) == 0
    assert "none: the weights stay in the processor's caches" in capfd.readouterr().out


def test_doctor_reports_the_context_limit_of_the_model(quick, capfd, tmp_path):
    make_checkpoint(tmp_path)
    assert run(["doctor", "--model", str(tmp_path)]) == 0
    shown = capfd.readouterr().out
    assert "the model's limit is 4,096" in shown and "4,096 tokens (the model's limit)" in shown


def test_doctor_prints_one_line_for_a_folder_without_a_model(capfd, tmp_path):
    assert run(["doctor", "--model", str(tmp_path)]) == 2
    assert "has no config.json; give a model's folder" in (line := capfd.readouterr().err) and line.count("\n") == 1


def test_the_memory_bandwidth_is_measured():
    assert 1e8 < machine.read_bandwidth(1 << 24) < 1e13


def test_the_peak_is_measured_where_pytorch_is_slow_in_bfloat16(monkeypatch):
    """Then products in float32 are the peak of both, and no large product in bfloat16 is waited for."""
    shapes = []

    def multiply(a, b):
        shapes.append((a.dtype, len(a)))
        time.sleep(0.1 if a.dtype == torch.bfloat16 else 0.0)
        return a

    monkeypatch.setattr(torch, "matmul", multiply)
    measured = limits.limits(1 << 22, 1)
    assert {size for dtype, size in shapes if dtype == torch.bfloat16} == {256}
    assert {size for dtype, size in shapes if dtype == torch.float32} == {256, 512}
    assert measured.peak["bfloat16"] == measured.peak["float32"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back on their own")
def test_freed_memory_between_blocks_in_use_is_given_back():
    blocks = [torch.ones(1 << 14) for _ in range(1600)]  # 64 KiB each: below glibc's least size for pages of their own
    kept = blocks[::20]
    del blocks
    before = psutil.Process().memory_info().rss
    machine.return_free_memory()
    assert before - psutil.Process().memory_info().rss > 50 << 20 and len(kept) == 80


def test_random_models_have_the_requested_shape(tmp_path, monkeypatch):
    """A small model of `longdraft bench model random`, with shards, tokenizer and heads."""
    monkeypatch.setattr(random_model, "SHARD_BYTES", 1 << 19)
    shape = SHAPES["qwen2.5-1.5b"] | dict(
        vocab_size=5000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512)
    random_model.write_random_model(shape, tmp_path / "model", seed=1)
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 1
    engine = longdraft.load(str(tmp_path / "model"), drafter="tokenswift")
    assert engine.tokenizer.size == 5000 and len(engine.heads) == 3
    params = longdraft.SamplingParams(max_new_tokens=20, seed=1, ignore_eos=True)
    text = "".join(event.text for event in engine.generate("It was", params))
    assert "word" in text
