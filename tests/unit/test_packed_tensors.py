"""Quantised checkpoints: AWQ, GPTQ, compressed-tensors and Q4_0 of GGUF, whose numbers `--quantize` keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels.formats import int4
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams

HIDDEN, INNER, GROUP = 128, 192, 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: Tensor, order: tuple[int, ...] = (), bits: int = 4) -> Tensor:
    """Whole numbers [A, B * 32 / bits] to words of 32 bits [A, B]: the number at order[n] in the n-th `bits` bits."""
    count = 32 // bits
    parts = numbers.long().view(len(numbers), -1, count)
    packed = sum(parts[..., place] << bits * n for n, place in enumerate(order or range(count)))
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
    if method == "compressed-tensors":
        return make_compressed(folder, group=group, **settings)
    tensors, meant, matrices = checkpoint(folder)
    for name, tensor in matrices.items():
        own = tensor.shape[1] if group == -1 else group
        order = torch.arange(tensor.shape[1])
        if settings.get("desc_act"):  # equal for matrices with the same inputs
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(len(order)))
        place = order.argsort()
        whole, scale, zero = quantised(tensor[:, order], own)
        offset = whole.view(len(whole), -1, own).float() - zero[..., None].float()
        meant[name] = (offset * scale.float()[..., None]).flatten(1)[:, place]
        whole = whole[:, place]
        stem = name.removesuffix(".weight")
        if method == "awq":
            packed, zeros = words(whole.T.contiguous(), AWQ_ORDER), words(zero.T.contiguous(), AWQ_ORDER)
        else:
            step = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
            packed, zeros = words(whole).T.contiguous(), words(zero.T.contiguous() - step)
            tensors[f"{stem}.g_idx"] = (place // own).int()
        tensors |= {f"{stem}.qweight": packed, f"{stem}.qzeros": zeros, f"{stem}.scales": scale.T.contiguous()}
    save(folder, tensors, {"quant_method": method, "bits": 4, "group_size": group} | settings)
    return meant


def checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Make a small checkpoint: its tensors in float16 but for those that are quantised, an empty dict, and these."""
    make_checkpoint(folder, hidden_size=HIDDEN, intermediate_size=INNER, num_key_value_heads=2)
    stored = load_file(folder / "model.safetensors")
    return ({name: tensor.half() for name, tensor in stored.items() if "_proj" not in name}, {},
            {name: tensor for name, tensor in stored.items() if "_proj" in name})


def save(folder: Path, tensors: dict[str, Tensor], settings: dict[str, object]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def make_compressed(folder: Path, bits: int = 4, group: int = GROUP, symmetric: bool = True, in_words: bool = True,
                    act_order: bool = False) -> dict[str, Tensor]:
    """Save a checkpoint as compressed-tensors does. Returns the numbers that its matrices stand for."""
    tensors, meant, matrices = checkpoint(folder)
    middle = 1 << bits - 1
    for name, tensor in matrices.items():
        own = tensor.shape[1] if group == -1 else group
        place = torch.arange(tensor.shape[1])
        if act_order:
            place = torch.randperm(len(place), generator=torch.Generator().manual_seed(len(place)))
        groups = tensor[:, place.argsort()].view(len(tensor), -1, own)
        scale = (groups.abs().amax(2) / (middle - 1)).bfloat16()
        zero = torch.zeros_like(scale) if symmetric else torch.randint(-3, 4, scale.shape)
        whole = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(-middle, middle - 1)
        meant[name] = ((whole - zero[..., None]) * scale.float()[..., None]).flatten(1)[:, place]
        whole, stem = whole.flatten(1)[:, place], name.removesuffix(".weight")
        tensors[f"{stem}.weight_scale"] = scale
        if not in_words:
            tensors[name] = whole.to(torch.int8)
            continue
        tensors[f"{stem}.weight_packed"] = words(whole.long() + middle, bits=bits)
        tensors[f"{stem}.weight_shape"] = torch.tensor(tensor.shape)
        if not symmetric:
            tensors[f"{stem}.weight_zero_point"] = words(zero.T.contiguous().long() + middle, bits=bits).T
        if act_order:
            tensors[f"{stem}.weight_g_idx"] = (place // own).int()
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    save(folder, tensors, {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
                           "format": "pack-quantized" if in_words else "int-quantized",
                           "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    return meant


FORMATS = {
    "awq": dict(method="awq", zero_point=True, version="gemm"),
    "awq, one group": dict(method="awq", group=-1),
    "gptq": dict(method="gptq", desc_act=False, sym=False),
    "gptq, groups of 32": dict(method="gptq", group=32),
    "gptq_v2": dict(method="gptq", checkpoint_format="gptq_v2"),
    "gptq, inputs in another order": dict(method="gptq", desc_act=True),
    "compressed-tensors": dict(method="compressed-tensors"),
    "compressed-tensors, zero points": dict(method="compressed-tensors", symmetric=False),
    "compressed-tensors, one group": dict(method="compressed-tensors", group=-1),
    "compressed-tensors, inputs in another order": dict(method="compressed-tensors", act_order=True),
}
EIGHT_BITS = {
    "in words": dict(),
    "bytes": dict(in_words=False),
    "groups": dict(group=GROUP),
    "zero points": dict(symmetric=False),
}


@pytest.mark.parametrize("what", FORMATS)
def test_the_numbers_are_those_that_were_packed(tmp_path, what):
    meant = make_4bit(tmp_path, **FORMATS[what])
    files = TensorFiles(tmp_path)
    for name, tensor in meant.items():
        assert files.shape(name) == tuple(tensor.shape)
        assert torch.equal(files.read(name), tensor)
        exact = files.exact([name], "int4")
        assert exact is not None and torch.equal(int4.dequantise(exact), tensor)


@pytest.mark.parametrize("what", EIGHT_BITS)
def test_int8_keeps_bytes_with_one_scale_for_each_row(tmp_path, what):
    meant = make_compressed(tmp_path, **{"bits": 8, "group": -1} | EIGHT_BITS[what])
    files = TensorFiles(tmp_path)
    for name, tensor in meant.items():
        assert torch.equal(files.read(name), tensor)
        exact = files.exact([name], "int8")
        assert files.exact([name], "int4") is None
        if what in ("groups", "zero points"):
            assert exact is None
        else:
            assert exact is not None and torch.equal(exact.values * exact.scale[:, None], tensor)


@pytest.mark.parametrize("name", kernels.available())
def test_kernels_keep_the_numbers_of_bytes(tmp_path, name):
    meant = make_compressed(tmp_path, bits=8, group=-1, in_words=False)
    stem = "model.layers.1.mlp.up_proj.weight"
    weight = TensorFiles(tmp_path).exact([stem], "int8")
    assert weight is not None
    ops = kernels.choose("cpu", "float32", name)
    x = torch.randn(3, HIDDEN)
    product = ops.linear(x, ops.pack(weight, quantize="int8"))
    torch.testing.assert_close(product, x @ meant[stem].T, atol=1e-5, rtol=1e-5)


def test_matrices_with_other_orders_of_their_inputs_do_not_share_one(tmp_path):
    make_4bit(tmp_path, "gptq", desc_act=True)
    tensors, stem = load_file(tmp_path / "model.safetensors"), "model.layers.0.self_attn"
    tensors[f"{stem}.k_proj.g_idx"] = tensors[f"{stem}.k_proj.g_idx"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    files, names = TensorFiles(tmp_path), [f"{stem}.{part}_proj.weight" for part in "qk"]
    assert files.exact(names[:1], "int4") is not None and files.exact(names[1:], "int4") is not None
    assert files.exact(names, "int4") is None
    load(tmp_path, "float32", quantize="int4")  # they are quantised anew


@pytest.mark.parametrize("what", ["awq", "gptq", "gptq, inputs in another order", "compressed-tensors"])
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
    exact = files.exact(names, "int4")
    assert exact is not None
    assert torch.equal(int4.dequantise(exact), torch.cat([files.read(name).clone() for name in names]))
    assert files.exact(["model.norm.weight"], "int4") is None
    convert(tmp_path, model, tmp_path / "other.gguf", "Q4_1")
    assert TensorFiles(tmp_path / "other.gguf").exact(names, "int4") is None


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_every_kernel_multiplies_these_numbers_as_the_reference_does(tmp_path, name):
    # With zero points of up to 16 after the step.
    make_4bit(tmp_path, "gptq", group=32, desc_act=True)
    weight = TensorFiles(tmp_path).exact(["model.layers.0.mlp.down_proj.weight"], "int4")
    assert weight is not None
    assert weight.order is not None
    weight.zero[:, 0] = 16
    x = torch.randn(5, INNER)
    ops = kernels.choose("cpu", "float32", name)
    packed = ops.pack(weight, quantize="int4")
    torch.testing.assert_close(ops.linear(x, packed), int4.linear(x, weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(ops.linear(x, packed)[2:3], ops.linear(x[2:3], packed))
    assert torch.equal(ops.embed(packed, [3]), int4.dequantise(weight)[3:4])


@pytest.mark.parametrize("what", ["awq", "gptq, inputs in another order"])
def test_drafters_write_the_plain_text(tmp_path, what):
    make_4bit(tmp_path, **FORMATS[what])
    params = SamplingParams(max_new_tokens=30, seed=3)
    for quantize, used in (("none", "none"), ("int4", "int4"), ("auto", "file")):
        texts = []
        for drafter in ("plain", "magicdec", "auto"):
            engine = longdraft.load(str(tmp_path), drafter=drafter, quantize=quantize)
            assert engine.model.weights.quantize == used
            texts.append([token for event in engine.generate(prompt_of(60), params) for token in event.tokens])
        assert texts[0] == texts[1] == texts[2]


def check_refused(folder: Path, settings: Mapping[str, object], message: str) -> None:
    """With these settings in quantization_config, loading fails with one line."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        longdraft.load(str(folder), drafter="plain")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings, message", [
    (dict(bits=8), r"quantised \('gptq', 8 bits\); supported: awq and gptq with 4 bits"),
    (dict(quant_method="bitsandbytes"), r"quantised \('bitsandbytes', 4 bits\)"),
    (dict(group_size=48), "group_size is 48 in quantization_config; allowed: -1 or a multiple of 32"),
    (dict(checkpoint_format="marlin"), "checkpoint_format is 'marlin' in quantization_config"),
    (dict(quant_method="awq", version="gemv"), "the AWQ checkpoint has version 'gemv'; supported: gemm"),
    (dict(quant_method="compressed-tensors"), "has no config_groups"),
    (dict(group_size=32), "has zeros .* in groups of 32; the checkpoint is damaged"),
])
def test_other_formats_are_refused_by_name(tmp_path, settings, message):
    make_4bit(tmp_path, "gptq")
    check_refused(tmp_path, settings, message)


@pytest.mark.parametrize("damage, message", [
    (lambda tensors, stem: tensors.pop(f"{stem}.scales"), "is incomplete"),
    (lambda tensors, stem: tensors[f"{stem}.g_idx"].fill_(9), "must name one of 2 groups for each of 128 inputs"),
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


def scheme(**weights: object) -> dict[str, object]:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"} | weights}}


@pytest.mark.parametrize("settings, message", [
    (dict(config_groups=scheme(type="float")), "weights of type 'float' with 4 bits"),
    (dict(config_groups=scheme(num_bits=3)), "with 3 bits in compressed-tensors; supported: int with 4 or 8 bits"),
    (dict(format="marlin-24"), "in the format 'marlin-24'; supported: pack-quantized"),
    (dict(kv_cache_scheme={"num_bits": 8}), "has a kv_cache_scheme"),
    (dict(sparsity_config={"format": "sparse-24-bitmask"}), "sparse format 'sparse-24-bitmask'"),
])
def test_other_formats_of_compressed_tensors_are_refused_by_name(tmp_path, settings, message):
    make_compressed(tmp_path)
    check_refused(tmp_path, settings, message)


@pytest.mark.parametrize("damage", [
    lambda tensors, stem: tensors.update({f"{stem}.weight_shape": torch.tensor([HIDDEN, HIDDEN])}),
    lambda tensors, stem: tensors.update({f"{stem}.weight_scale": tensors[f"{stem}.weight_scale"][:5]}),
    lambda tensors, stem: tensors.update({f"{stem}.weight_zero_point": tensors[f"{stem}.weight_zero_point"][:5]}),
])
def test_parts_of_compressed_tensors_that_contradict_each_other_are_damage(tmp_path, damage):
    make_compressed(tmp_path, symmetric=False)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors, "model.layers.1.mlp.up_proj")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj .*the checkpoint is damaged"):
        longdraft.load(str(tmp_path), drafter="plain", quantize="int4")
