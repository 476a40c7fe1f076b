"""int8 weights: their definition, their products, and that speculative text equals plain text with them."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import DRAFTERS, factory_of, params_of, prompt_of
from helpers.extents import extent
from helpers.generation import by_name, generate
from longdraft import kernels
from longdraft.__main__ import run
from longdraft.errors import UsageError
from longdraft.kernels.formats.int8 import quantise

every_kernel = pytest.mark.parametrize("name", kernels.available())
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@given(rows=st.integers(1, 9), width=st.integers(1, 70), magnitude=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
       dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_error_of_a_weight_is_at_most_half_a_scale(rows, width, magnitude, dtype, seed):
    weight = (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * magnitude).to(dtype)
    values, scale = quantise(weight)
    assert values.abs().max() <= 127
    largest = weight.float().abs().amax(1)
    assert ((values.abs().amax(1) == 127) | (largest == 0)).all()
    off = (weight.double() - values.double() * scale.double()[:, None]).abs()
    assert (off <= scale.double()[:, None] * 0.50001).all()


def test_chunked_quantisation_equals_quantisation_in_one_piece(monkeypatch):
    weight = torch.randn(50, 30)
    whole = quantise(weight)
    monkeypatch.setattr("longdraft.kernels.formats.int8._CHUNK_ELEMENTS", 100)
    assert all(torch.equal(*both) for both in zip(whole, quantise(weight), strict=True))


@every_kernel
@every_dtype
def test_rows_of_zeros_stay_zero_and_damaged_rows_become_nan(name, dtype):
    kernel = kernels.choose("cpu", dtype, name)
    weight = torch.randn(70, 40)
    weight[3], weight[5, 7], weight[6, 1], weight[8] = 0.0, float("nan"), float("-inf"), 1e-44
    packed = kernel.pack(weight, quantize="int8")
    out = kernel.linear(torch.randn(2, 40).to(kernel.dtype), packed)
    assert (out[:, [3, 8]] == 0).all() and out[:, [5, 6]].isnan().all()
    assert out[:, [n for n in range(70) if n not in (5, 6)]].isfinite().all()
    rows = kernel.embed(packed, [3, 5])
    assert (rows[0] == 0).all() and rows[1].isnan().all()


@every_kernel
@every_dtype
def test_the_product_equals_that_of_the_dequantised_weight(name, dtype):
    """Compare with the formula in double precision: integers, then the scale, then the bias."""
    kernel = kernels.choose("cpu", dtype, name)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(130, 300), torch.randn(130), torch.randn(40, 300).to(kernel.dtype)
    values, scale = quantise(weight)
    exact = (x.double() @ values.double().T) * scale.double() + bias.to(kernel.dtype).double()
    got = kernel.linear(x, kernel.pack(weight, bias, quantize="int8"), keep_float=True)
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)
    row = (values[7].double() * scale[7].double()).to(kernel.dtype)
    assert torch.equal(kernel.embed(kernel.pack(weight, quantize="int8"), [7])[0], row)


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_int8_takes_half_of_bfloat16s_memory(name):
    kernel = kernels.choose("cpu", "bfloat16", name)
    weight = torch.randn(640, 256)
    half, quarter = kernel.pack(weight).nbytes, kernel.pack(weight, quantize="int8").nbytes
    assert half == 640 * 256 * 2 and quarter == 640 * 256 + 640 * 4


MODELS = {"mha": ("mha", "bfloat16", None), "gqa, reference": ("gqa", "float32", "reference")}


@pytest.fixture(scope="module", params=MODELS)
def quantised(request, tiny):
    """A quantised model, another to draft with, and the folder of its heads and glide."""
    folder, dtype, name = MODELS[request.param]
    model, another = (load(tiny[each], dtype, name, "int8") for each in sorted(tiny, key=lambda each: each != folder))
    return model, another, tiny[folder]


@pytest.fixture(scope="module")
def plain(quantised):
    return {name: generate(quantised[0], prompt_of(90), params_of(name), by_name("plain"))
            for name in ("greedy, penalty", "paper")}


@pytest.mark.full
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_writes_the_plain_text_of_the_quantised_model(quantised, plain, drafter):
    """With both settings; on the slow reference the drafters take turns."""
    model, another, folder = quantised
    factory = factory_of(drafter, model, another, folder)
    in_turn = list(plain)[list(DRAFTERS).index(drafter) % 2 :][:1]
    for sampling in in_turn if model.kernels.name == "reference" else plain:
        assert generate(model, prompt_of(90), params_of(sampling), factory) == plain[sampling], sampling


@every_kernel
@pytest.mark.parametrize("dtype", extent(["float32", "bfloat16"], ["bfloat16"]))
def test_speculative_equals_plain_for_an_untied_biased_model_on_every_kernel(tmp_path_factory, name, dtype):
    folder = tmp_path_factory.mktemp("int8")
    make_checkpoint(folder, tie_word_embeddings=False, attention_bias=True, mlp_bias=True, num_key_value_heads=2)
    model = load(folder, dtype, name, "int8")
    expected = generate(model, prompt_of(60), params_of("paper"), by_name("plain"))
    assert generate(model, prompt_of(60), params_of("paper"), by_name("plain"), chunk=7) == expected
    assert generate(model, prompt_of(60), params_of("paper"), by_name("magicdec", budget=24, sinks=4)) == expected
    again = generate(load(folder, dtype, name, "int8"), prompt_of(60), params_of("paper"), by_name("suffix"))
    assert again == expected


def test_statistics_and_tokens_of_the_quantised_model_differ(tiny):
    params = longdraft.SamplingParams(max_new_tokens=40, seed=1)
    stats = []
    for quantize, drafter in (("none", "plain"), ("int8", "plain"), ("int8", "suffix")):
        generation = longdraft.load(str(tiny["mha"]), quantize=quantize, drafter=drafter).generate("It was", params)
        list(generation)
        stats.append(generation.stats())
    assert [s["quantize"] for s in stats] == ["none", "int8", "int8"]
    assert stats[0]["sha256_tokens"] != stats[1]["sha256_tokens"] == stats[2]["sha256_tokens"]
    with pytest.raises(UsageError, match="quantize is 'int3'; allowed: auto, none, int8, int4 or file"):
        longdraft.load(str(tiny["mha"]), quantize="int3")


def test_the_command_line_quantises(tiny, tmp_path, capfd):
    command = ["generate", "It was", "--model", str(tiny["gqa"]), "--max-new-tokens", "9", "--seed", "1"]
    assert run([*command, "--quantize", "int8", "--stats", str(tmp_path / "stats.json")]) == 0
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["quantize"] == "int8" and stats["exactness"] == "bit-exact"
    capfd.readouterr()
    assert run([*command, "--quantize", "4"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "quantize is '4'; allowed: auto, none, int8, int4 or file" in error


def test_kernels_and_steps_are_measured_with_int8(tiny, tmp_path):
    output = tmp_path / "out.json"
    common = ["--repeats", "1", "--memory", "0.0005", "--model", str(tiny["mha"]), "--contexts", "10", "--rows", "1",
              "--quantize", "int8", "--output", str(output)]
    assert run(["bench", "kernels", *common, "--positions", "9", "--prefill-rows", "0", "--shapes", "64x32"]) == 0
    report = json.loads(output.read_text())
    assert report["quantize"] == "int8" and report["linear"][0]["bytes_read"] == 64 * 32
    assert run(["bench", "roofline", *common]) == 0
    report = json.loads(output.read_text())
    linears = load(tiny["mha"], "bfloat16", quantize="int8").linears
    assert report["contexts"][0]["weights_bytes"] == sum(linear.nbytes for linear in linears)


def test_perplexity_with_and_without_quantisation(tiny, tmp_path, capsys):
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night; the rain fell in torrents. " * 9)
    command = ["bench", "perplexity", "--text", str(tmp_path / "novel.txt"), "--model", str(tiny["mha"]), "--context",
               "100", "--tokens", "350", "--repeats", "1", "--output", str(tmp_path / "out.json")]
    assert run(command) == 0
    as_it_is, int8 = json.loads((tmp_path / "out.json").read_text())["settings"]
    assert (as_it_is["quantize"], int8["quantize"]) == ("none", "int8")
    assert as_it_is["predicted_tokens"] == 3 * 99
    assert as_it_is["nats_per_token"] != int8["nats_per_token"] == pytest.approx(as_it_is["nats_per_token"], rel=0.05)
    assert int8["weights_bytes"] < 0.6 * as_it_is["weights_bytes"]
    assert "Quantisation: perplexity, memory and speed" in capsys.readouterr().out
    assert run([*command[:3], str(tmp_path / "missing.txt")]) == 2
    assert "--text cannot read" in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert run([*command[:3], str(tmp_path / "latin.txt")]) == 2
    assert "--text" in (shown := capsys.readouterr().err) and "not UTF-8 text (byte 3)" in shown
    assert run([*command, "--quantize", "int3"]) == 2
    assert "--quantize is 'int3'; allowed: none, int8, int4 or file" in capsys.readouterr().err
    assert run([*command, "--device", "tpu"]) == 2
    assert "device is 'tpu'; allowed: auto, cpu or cuda" in capsys.readouterr().err
