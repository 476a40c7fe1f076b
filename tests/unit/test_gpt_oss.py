"""gpt-oss: attention sinks, the clamped activation, and experts in MXFP4. What it shares with
other families is in test_every_family.py, and GGUF in test_gguf.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import longdraft
from helpers.checkpoints import load
from helpers.equality import prompt_of
from helpers.families import logits_of, make_family, pack_experts
from helpers.family_checks import check_one_call
from longdraft import kernels
from longdraft.__main__ import run
from longdraft.checkpoint import sizing
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels import KV
from longdraft.kernels.formats import mxfp4
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.kernels.layer import _of_sinks
from longdraft.request.sampling_params import SamplingParams


def test_drafts_of_a_small_cache_know_the_sinks_of_layers_whose_window_it_holds(tmp_path):
    """All layers see 24 positions, and the cache holds more: the drafts are those of the whole cache."""
    make_family(tmp_path, "gpt_oss", layer_types=["sliding_attention"] * 3)
    tensors = load_file(tmp_path / "model.safetensors")
    strong = {name: tensor + 4.0 for name, tensor in tensors.items() if name.endswith("sinks")}
    save_file(tensors | strong, tmp_path / "model.safetensors", {"format": "pt"})
    engine = longdraft.load(str(tmp_path), drafter="magicdec", drafter_options={"suffix": "false", "budget": 40,
                                                                                 "sinks": 4, "refresh": 8})
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    stats = list(engine.generate(prompt_of(90), params))[-1].stats
    assert stats["mean_accepted_length"] > 6


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are whole blocks of 32."""
    folder = tmp_path_factory.mktemp("wide")
    make_family(folder, "gpt_oss", hidden_size=64)
    return folder


@pytest.mark.parametrize("shards", [1, 2])
def test_experts_in_mxfp4_have_the_numbers_of_transformers(wide, tmp_path, shards):
    pack_experts(wide, tmp_path, shards)
    found, expected = (logits_of(load(path), prompt_of(30), 30) for path in (tmp_path, tmp_path / "whole"))
    assert torch.equal(found, expected)
    assert sizing.model_sizes(read_config(tmp_path)) == sizing.model_sizes(read_config(tmp_path / "whole"))
    prints = [TensorFiles(path).fingerprint() for path in (tmp_path, tmp_path / "whole")]
    assert prints[0] != prints[1]
    texts = []
    for drafter in ("plain", "magicdec"):
        engine = longdraft.load(str(tmp_path), drafter=drafter)
        params = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True)
        texts.append([token for event in engine.generate(prompt_of(40), params) for token in event.tokens])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_4_bits_and_have_the_bits_of_their_numbers(wide, tmp_path, name, dtype):
    """Rows alone, together and in prompts that convert a tile once; the reference multiplies the numbers."""
    pack_experts(wide, tmp_path)
    small, whole = (load(path, dtype, name) for path in (tmp_path, tmp_path / "whole"))
    tokens = prompt_of(130)
    assert torch.equal(logits_of(small, tokens, 120), logits_of(whole, tokens, 120))
    if name != "reference":
        check_one_call(small)
        size = small.weights.layers[0].experts.mlps[0].gate_up.nbytes
        assert size < (0.2 if dtype == "float32" else 0.35) * whole.weights.layers[0].experts.mlps[0].gate_up.nbytes


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_in_mxfp4_have_the_bits_of_the_numbers(name, dtype):
    """For every number of rows, of outputs and of groups; all codes and extreme exponents among them."""
    ops = kernels.choose("cpu", dtype, name)
    generator = torch.Generator().manual_seed(2)
    for rows, outputs, inputs in ((1, 64, 32), (2, 70, 64), (3, 1, 96), (16, 130, 160), (33, 65, 64)):
        codes = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(100, 140, (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        exponents[0, 0], exponents[-1, -1] = 2, 252
        weight, bias = Mxfp4Weight(codes, exponents), torch.randn(outputs, generator=generator)
        x = (torch.randn(rows, inputs, generator=generator) * 1e-3).to(ops.dtype)
        small, whole = ops.pack_mxfp4(weight, bias), ops.pack(mxfp4.dequantise(weight), bias)
        for keep_float in (True, False):
            assert torch.equal(ops.linear(x, small, keep_float=keep_float), ops.linear(x, whole, keep_float=keep_float))
    for wrong in (Mxfp4Weight(codes, exponents[:, :-1]), Mxfp4Weight(codes.int(), exponents),
                  Mxfp4Weight(codes, torch.full_like(exponents, 255))):
        with pytest.raises(ValueError, match="CPU kernels want uint8 codes"):
            ops.pack_mxfp4(wrong)


def test_damaged_experts_are_one_clear_line(wide, tmp_path):
    pack_experts(wide, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for changed, message in (
            ({name: tensors[name][:, :-1].contiguous()}, "has no scales .* the checkpoint is incomplete"),
            ({name: torch.full_like(tensors[name], 255)}, "values that are NaN or infinite"),
            ({name.replace("_scales", "_blocks"): torch.zeros(6, 3, dtype=torch.uint8)}, "is none of gpt-oss")):
        save_file(tensors | changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=message) as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_clamped_activation_is_that_of_the_definition_at_every_width(name, dtype):
    ops = kernels.choose("cpu", dtype, name)
    torch.manual_seed(3)
    for width in (1, 15, 16, 33):
        gate_up = (torch.randn(5, 2 * width) * 6).to(ops.dtype)
        gate, up = gate_up.float().chunk(2, 1)
        gate = gate.clamp(max=7.0)
        expected = (up.clamp(-7.0, 7.0) + 1) * gate * (1.702 * gate).sigmoid()
        found = ops.clamped_swiglu(gate_up, 1.702, 7.0)
        torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-5 if dtype == "float32" else 1e-2)
        assert torch.equal(torch.cat([ops.clamped_swiglu(row[None], 1.702, 7.0) for row in gate_up]), found)
    assert ops.clamped_swiglu(torch.full((1, 6), torch.nan).to(ops.dtype), 1.702, 7.0).isnan().all()


@pytest.mark.parametrize("name", kernels.available())
def test_sinks_join_the_softmax_without_a_value(name):
    ops = kernels.choose("cpu", "float32", name)
    torch.manual_seed(4)
    length, heads, dim = 70, 2, 16
    store, k, v = ops.new_store(heads, dim), torch.randn(length, heads, dim), torch.randn(length, heads, dim)
    store.write(0, k, v)
    q, sinks = torch.randn(1, heads, dim), torch.tensor([3.0, -1.0])
    scores = torch.einsum("thd,nhd->thn", q, k)[0] / dim**0.5
    weights = torch.cat([scores, sinks[:, None]], 1).softmax(-1)[:, :-1]
    kv = KV(store, length - 1, k[-1:], v[-1:], _of_sinks(sinks, 1, dim))
    found = ops.attention(q, kv, torch.tensor([-1], dtype=torch.int32)).output[0]
    torch.testing.assert_close(found, torch.einsum("hn,nhd->hd", weights, v), atol=1e-5, rtol=1e-4)


@pytest.mark.full
def test_doctor_reckons_experts_in_mxfp4_as_they_are_kept(wide, tmp_path, capsys):
    pack_experts(wide, tmp_path)
    config, expert = read_config(tmp_path), 3 * 64 * 64
    assert sizing.has_mxfp4(tmp_path, config) and not sizing.has_mxfp4(tmp_path / "whole", config)
    small, whole = (sizing.model_sizes(config, has_mxfp4=given) for given in (True, False))
    assert whole.weights_bytes - small.weights_bytes == 3 * 6 * expert * 47 // 32
    assert whole.read_bytes - small.read_bytes == 3 * 3 * expert * 47 // 32
    model = load(tmp_path, "bfloat16")
    experts = [mlp for layer in model.weights.layers for mlp in layer.experts.mlps]
    held = sum(linear.nbytes for mlp in experts for linear in mlp) - sum(
        4 * linear.out_features for mlp in experts for linear in mlp)  # biases are float32
    assert held == 3 * 6 * expert * 17 // 32
    assert run(["doctor", "--model", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["experts"], found["weights_bytes"], found["bytes_per_token"]) == (
        "mxfp4", small.weights_bytes, small.read_bytes)
    assert run(["doctor", "--model", str(tmp_path)]) == 0
    assert "in bfloat16 with experts in MXFP4, as in the file" in capsys.readouterr().out


def test_a_silent_config_is_that_of_gpt_oss_120b():
    config = parse_config(dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=36,
                               num_attention_heads=64, quantization_config={"quant_method": "mxfp4"}))
    assert config.experts is not None and (config.experts.count, config.experts.clamp) == (128, (1.702, 7.0))
    assert [layer.attention.window for layer in config.layers[:4]] == [128, 0, 128, 0]
    assert config.rope.settings["truncate"] is False and config.max_positions == 131072
    assert sizing.model_sizes(config).parameters == 116_829_156_672
    sizes = sizing.model_sizes(config, has_mxfp4=True)
    assert 64e9 < sizes.weights_bytes < 66e9 and 5e9 < sizes.read_bytes < 6e9  # published: 60.8 GiB
    with pytest.raises(ModelError, match=r"swiglu_limit 0.0; allowed: positive"):
        parse_config(dict(model_type="gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                          num_attention_heads=8, swiglu_limit=0))
    with pytest.raises(ModelError, match="quantised"):
        parse_config(dict(model_type="llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=9,
                          num_attention_heads=8, quantization_config={"quant_method": "mxfp4"}))
