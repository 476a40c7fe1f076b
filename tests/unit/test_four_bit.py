"""4-bit checkpoints: AWQ, GPTQ and Q4_0 of GGUF, whose numbers `--quantize int4` keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import prompt_of
from helpers.gguf_files import convert
from longdraft import kernels
from longdraft.core import SamplingParams
from longdraft.errors import ModelError
from longdraft.kernels import int4
from longdraft.model.tensor_files import TensorFiles
from longdraft.model.transformer import chain_rows

HIDDEN, INNER, GROUP = 128, 192, 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Whole numbers [A, 8 B] of 4 bits to words of 32 bits [A, B]: the number at order[n] in the n-th 4 bits."""
    eights = numbers.long().view(len(numbers), -1, 8)
    packed = sum(eights[..., place] << 4 * n for n, place in enumerate(order))
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def quantised(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers [N, K], scales [N, G] and zero points [N, G] from 1 to 15."""
    groups = weight.view(len(weight), -1, group)
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    whole = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return whole.flatten(1).to(torch.uint8), scale, zero.to(torch.uint8)


def make_4bit(folder: Path, method: str, group: int = GROUP, **settings: object) -> dict[str, Tensor]:
    """Save a 4-bit checkpoint. Returns the numbers that its matrices stand for."""
    make_checkpoint(folder, hidden_size=HIDDEN, intermediate_size=INNER, num_key_value_heads=2)
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor.half()
            continue
        own = tensor.shape[1] if group == -1 else group
        whole, scale, zero = quantised(tensor, own)
        stem = name.removesuffix(".weight")
        if method == "awq":
            packed, zeros = words(whole.T.contiguous(), AWQ_ORDER), words(zero.T.contiguous(), AWQ_ORDER)
        else:
            step = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
            packed, zeros = words(whole).T.contiguous(), words(zero.T.contiguous() - step)
            tensors[f"{stem}.g_idx"] = torch.arange(tensor.shape[1], dtype=torch.int32) // own
        tensors |= {f"{stem}.qweight": packed, f"{stem}.qzeros": zeros, f"{stem}.scales": scale.T.contiguous()}
        offset = whole.view(len(whole), -1, own).float() - zero[..., None].float()
        meant[name] = (offset * scale.float()[..., None]).flatten(1)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own_settings = {"quant_method": method, "bits": 4, "group_size": group} | settings
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": own_settings}))
    return meant


FORMATS = {
    "awq": dict(method="awq", zero_point=True, version="gemm"),
    "awq, one group": dict(method="awq", group=-1),
    "gptq": dict(method="gptq", desc_act=False, sym=False),
    "gptq, groups of 32": dict(method="gptq", group=32),
    "gptq_v2": dict(method="gptq", checkpoint_format="gptq_v2"),
}


@pytest.mark.parametrize("what", FORMATS)
def test_the_numbers_are_those_that_were_packed(tmp_path, what):
    meant = make_4bit(tmp_path, **FORMATS[what])
    files = TensorFiles(tmp_path)
    for name, tensor in meant.items():
        assert files.shape(name) == tuple(tensor.shape)
        assert torch.equal(files.read(name), tensor)
        exact = files.int4([name])
        assert exact is not None and torch.equal(int4.dequantise(exact), tensor)


@pytest.mark.parametrize("what", ["awq", "gptq"])
def test_with_int4_a_matrix_keeps_its_numbers_and_without_it_has_their_values(tmp_path, what):
    make_4bit(tmp_path, **FORMATS[what])
    tokens, results = prompt_of(40), {}
    for quantize in ("none", "int4"):
        model = load(tmp_path, "float32", quantize=quantize)
        results[quantize] = model.logits(model.forward(chain_rows(tokens, 0), model.new_cache()).hidden)
    difference = (results["int4"] - results["none"]).abs().mean() / results["none"].abs().mean()
    assert difference < 0.1  # rows in int8 and the table in int8; the numbers of the layers are the same
    kept = load(tmp_path, "float32", "reference", "int4").weights.layers[0].down
    files = TensorFiles(tmp_path)
    assert torch.equal(kept.weight, files.read("model.layers.0.mlp.down_proj.weight"))


def test_a_q4_0_file_keeps_its_numbers_in_int4(tmp_path):
    model = make_checkpoint(tmp_path, hidden_size=HIDDEN, intermediate_size=INNER, num_key_value_heads=2)
    convert(tmp_path, model, tmp_path / "model.gguf", "Q4_0")
    files = TensorFiles(tmp_path / "model.gguf")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]  # rows of q and k are in another order
    exact = files.int4(names)
    assert exact is not None
    assert torch.equal(int4.dequantise(exact), torch.cat([files.read(name).clone() for name in names]))
    assert files.int4(["model.norm.weight"]) is None
    convert(tmp_path, model, tmp_path / "other.gguf", "Q4_1")
    assert TensorFiles(tmp_path / "other.gguf").int4(names) is None


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_every_kernel_multiplies_these_numbers_as_the_reference_does(tmp_path, name):
    make_4bit(tmp_path, "gptq", group=32)  # with zero points of up to 16 behind the step
    weight = TensorFiles(tmp_path).int4(["model.layers.0.mlp.down_proj.weight"])
    assert weight is not None
    weight.zero[:, 0] = 16
    x = torch.randn(5, INNER)
    ops = kernels.choose("cpu", "float32", name)
    packed = ops.pack(weight, quantize="int4")
    torch.testing.assert_close(ops.linear(x, packed), int4.linear(x, weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(ops.linear(x, packed)[2:3], ops.linear(x[2:3], packed))


def test_drafters_write_the_plain_text(tmp_path):
    make_4bit(tmp_path, "awq")
    params = SamplingParams(max_new_tokens=30, seed=3)
    for quantize in ("none", "int4"):
        texts = []
        for drafter in ("plain", "magicdec", "auto"):
            engine = longdraft.load(str(tmp_path), drafter=drafter, quantize=quantize)
            texts.append([token for event in engine.generate(prompt_of(60), params) for token in event.tokens])
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("settings, message", [
    (dict(bits=8), r"quantised \('gptq', 8 bits\); supported: awq and gptq with 4 bits"),
    (dict(quant_method="bitsandbytes"), r"quantised \('bitsandbytes', 4 bits\)"),
    (dict(group_size=48), "group_size is 48 in quantization_config; allowed: -1 or a multiple of 32"),
    (dict(checkpoint_format="marlin"), "checkpoint_format is 'marlin' in quantization_config"),
    (dict(quant_method="awq", version="gemv"), "the AWQ checkpoint has version 'gemv'; supported: gemm"),
    (dict(group_size=32), "has zeros .* in groups of 32; the checkpoint is damaged"),
])
def test_other_formats_are_refused_by_name(tmp_path, settings, message):
    make_4bit(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(tmp_path), drafter="plain")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage, message", [
    (lambda tensors, stem: tensors.pop(f"{stem}.scales"), "is incomplete"),
    (lambda tensors, stem: tensors.update({f"{stem}.g_idx": tensors[f"{stem}.g_idx"].flip(0)}), r"\(desc_act\)"),
    (lambda tensors, stem: tensors[f"{stem}.scales"].fill_(float("nan")), "NaN or infinite"),
])
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_damaged_parts_get_one_clear_line(tmp_path, damage, message, quantize):
    make_4bit(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors, "model.layers.1.mlp.up_proj")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        longdraft.load(str(tmp_path), drafter="plain", quantize=quantize)
