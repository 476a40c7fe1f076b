"""Weights of few bits on the device: the numbers of kernels/formats (int4.py, groups.py), row invariance, and texts of
files that keep their numbers (helpers.cuda_kernels)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.cuda_kernels import DEVICE, TOLERANCE, every_dtype, kernels, rows_of
from helpers.cuda_texts import load
from helpers.equality import prompt_of
from helpers.families import make_family, pack_experts
from helpers.gguf_files import convert
from helpers.grouped_weights import KINDS, WIDTH, numbers
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.kernels.cuda import few_bits
from longdraft.kernels.cuda.few_bits import CudaFewBits, CudaStacked
from longdraft.kernels.formats import groups, int4, mxfp4
from longdraft.kernels.formats.int4 import Int4Weight
from longdraft.kernels.formats.mxfp4 import Mxfp4Weight
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.request.sampling_params import SamplingParams

pytestmark = pytest.mark.full


def packed(dtype: str, out: int, inner: int, bias: bool = True) -> tuple[CudaFewBits, Int4Weight, torch.Tensor]:
    kernel = kernels(dtype)
    weight, added = rows_of(out, inner, seed=1) / math.sqrt(inner), rows_of(out, seed=2)
    found = kernel.pack(weight, added if bias else None, quantize="int4")
    assert isinstance(found, CudaFewBits)
    return found, int4.quantise(weight), added.to(kernel.dtype)


@every_dtype
@pytest.mark.parametrize("out, inner", [(70, 40), (130, 256), (128, 1090)])
def test_products_are_those_of_the_definitions_numbers_and_row_invariant(dtype, out, inner):
    kernel = kernels(dtype)
    weight, numbers, bias = packed(dtype, out, inner)
    x = rows_of(18, inner, dtype=kernel.dtype)
    together = kernel.linear(x, weight, keep_float=True)
    exact = x.double() @ int4.dequantise(numbers).double().T + bias.double()
    torch.testing.assert_close(together.double(), exact, atol=TOLERANCE["float32"] * 4, rtol=1e-4)
    alone = torch.cat([kernel.linear(x[row : row + 1], weight, keep_float=True) for row in (0, 17)])
    assert torch.equal(together[[0, 17]], alone)
    torch.testing.assert_close(weight.matmul(x).double(), exact, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


@every_dtype
@pytest.mark.parametrize("out, inner", [(70, 40), (128, 128), (200, 300)])
def test_packing_keeps_every_number(out, inner, dtype):
    """What a prompt multiplies with: the definition's numbers, rounded once."""
    weight, numbers, _ = packed(dtype, out, inner, bias=False)
    values = torch.arange(256).repeat(out, inner // 128 + 1)[:, :inner]
    every = Int4Weight((values % 16).to(torch.uint8), numbers.scale.cpu(), (values[:, ::32] // 16).to(torch.uint8))
    for ours, theirs in ((weight, numbers), (kernels(dtype).pack(every), every)):
        assert torch.equal(ours.dequantised().cpu(), int4.dequantise(theirs).to(ours.dtype).cpu())


def test_all_pairs_of_value_and_zero_point_are_exact():
    """A row that selects one input gives the weight itself: value minus zero, times the scale."""
    values = torch.arange(256, dtype=torch.int32).view(16, 16).repeat(1, 2)  # [16, 32]: 16 rows of all values
    weight = Int4Weight((values % 16).to(torch.uint8), torch.full((16, 1), 0.5, dtype=torch.float16),
                        torch.arange(16, dtype=torch.uint8)[:, None])
    for dtype in ("float32", "float16"):
        kernel = kernels(dtype)
        x = torch.eye(32, dtype=kernel.dtype, device=kernel.device)
        found = kernel.linear(x, kernel.pack(weight), keep_float=True)
        assert torch.equal(found.T.cpu(), int4.dequantise(weight))


def test_the_splits_depend_on_the_shape_alone_and_a_damaged_group_gives_nan():
    weight, *_ = packed("float16", 70, 1090, bias=False)
    assert weight.splits == 4 and packed("float16", 16, 512, bias=False)[0].splits == 2
    assert weight.nbytes < 128 * 1152 * 0.65  # 5 bits and the padding: a scale with its zero point takes a word
    values = rows_of(20, 64)
    values[3, 40] = math.inf
    kernel = kernels("float16")
    found = kernel.linear(rows_of(2, 64, dtype=torch.float16), kernel.pack(values, quantize="int4"))
    assert found[:, 3].isnan().all() and found[:, :3].isfinite().all()


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_dtype
@every_kind
def test_every_kind_of_a_file_is_multiplied_with_its_own_numbers_whatever_rows_are_beside(kind, dtype):
    kernel, weight = kernels(dtype), numbers(kind)
    packed, table = kernel.pack(weight), groups.dequantise(weight)
    assert isinstance(packed, CudaFewBits)
    assert torch.equal(packed.dequantised().cpu(), table.to(kernel.dtype)), "rounded once, in a prompt"
    assert torch.equal(kernel.embed(packed, [0, 2, 69]).cpu(), table[[0, 2, 69]].to(kernel.dtype))
    x = rows_of(18, WIDTH, dtype=kernel.dtype)
    together = kernel.linear(x, packed, keep_float=True)
    exact = x.double() @ table.to(DEVICE).double().T
    assert (together - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert torch.equal(together[17:], kernel.linear(x[17:], packed, keep_float=True))


@every_kind
def test_every_kind_takes_the_bytes_of_its_bits(kind):
    bits = {"6 bits, common": 6.625}.get(kind, KINDS[kind][-1])  # its common scales are padded to words
    assert kernels("float16").pack(numbers(kind, rows=128)).nbytes == 128 * WIDTH * bits / 8


@every_kind
def test_a_part_of_the_inputs_and_of_the_outputs_is_padded(kind):
    columns = 256 if KINDS[kind][3] else 96  # common scales are of 256 inputs
    kernel, weight = kernels("float16"), numbers(kind, rows=130, columns=columns)
    packed = kernel.pack(weight)
    assert torch.equal(packed.dequantised().cpu(), groups.dequantise(weight).half())
    x = torch.eye(columns, dtype=torch.float16, device=DEVICE)[columns - 3 :]
    got = kernel.linear(x, packed, keep_float=True).T.cpu()
    torch.testing.assert_close(got, groups.dequantise(weight)[:, columns - 3 :], atol=1e-5, rtol=1e-6)


def test_the_bits_of_a_row_are_the_same_among_1_to_70_rows():
    """With every row tile of the kernels."""
    for name in ("triton-16", "triton-64"):
        kernel = kernels("float16", name)
        packed, x = kernel.pack(numbers("6 bits, common", rows=40, columns=256)), rows_of(70, 256, dtype=torch.float16)
        all_rows = kernel.linear(x, packed, keep_float=True)
        for count in (1, 2, 15, 16, 17, 33, 64):
            assert torch.equal(kernel.linear(x[:count].contiguous(), packed, keep_float=True), all_rows[:count])


@pytest.mark.parametrize("zero", [8, 7])
def test_a_weight_with_its_columns_in_another_order_gathers_its_inputs(zero):
    """GPTQ with desc_act. Zero points that are all 8 are not kept."""
    kernel, order = kernels("float32"), torch.randperm(96, generator=torch.Generator().manual_seed(3)).int()
    made = int4.quantise(rows_of(70, 96).cpu())
    weight = made._replace(order=order, zero=torch.full_like(made.zero, zero))
    packed = kernel.pack(weight)
    assert isinstance(packed, CudaFewBits) and packed.form.scales == (few_bits.SCALE if zero == 8 else few_bits.ZERO)
    exact = int4.dequantise(weight)
    assert torch.equal(packed.dequantised().cpu(), exact[:, order.long()])
    x = rows_of(18, 96)
    for found in (kernel.linear(x, packed), packed.matmul(x)):
        torch.testing.assert_close(found.cpu(), x.cpu() @ exact.T, atol=1e-4, rtol=1e-4)


@every_dtype
@pytest.mark.parametrize("inner", [256, 288])
def test_groups_of_128_inputs_have_one_scale(dtype, inner):
    """AWQ and GPTQ. Where the last group is shorter, groups of 32 have one each."""
    kernel, made = kernels(dtype), int4.quantise(rows_of(70, inner).cpu())
    scale, zero = (part[:, ::4].repeat_interleave(4, 1)[:, : inner // 32].contiguous() for part in made[1:3])
    weight = made._replace(scale=scale, zero=zero)
    packed, exact = kernel.pack(weight), int4.dequantise(weight)
    assert packed.form.scales == (few_bits.SHARED if inner == 256 else few_bits.ZERO)
    assert packed.nbytes == (128 * 256 * 4.25 if inner == 256 else 128 * 384 * 5) / 8
    assert torch.equal(packed.dequantised().cpu(), exact.to(kernel.dtype))
    x = rows_of(18, inner, dtype=kernel.dtype)
    together, wanted = kernel.linear(x, packed, keep_float=True).cpu(), x.cpu().double() @ exact.double().T
    assert (together - wanted).abs().max() <= 2e-6 * wanted.abs().max()
    assert torch.equal(together[17:], kernel.linear(x[17:], packed, keep_float=True).cpu())


@every_dtype
@pytest.mark.parametrize("out, inner", [(70, 256), (130, 96)])
def test_mxfp4_keeps_its_codes_and_every_number(dtype, out, inner):
    """All codes, each with the least and the greatest exponents whose numbers the dtype has."""
    kernel, generator = kernels(dtype), torch.Generator().manual_seed(1)
    codes = torch.arange(256, dtype=torch.int32).repeat(out, 1)[:, : inner // 2].to(torch.uint8)
    codes[1::2] = torch.randint(0, 256, codes[1::2].shape, generator=generator, dtype=torch.uint8)
    exponents = torch.randint(115, 135, (out, inner // 32), generator=generator, dtype=torch.uint8)
    if dtype != "float16":
        exponents[0], exponents[-1] = 2, 252
    weight = Mxfp4Weight(codes, exponents)
    packed, table = kernel.pack_mxfp4(weight), mxfp4.dequantise(weight)
    assert packed.form.scales == few_bits.POWERS
    assert packed.nbytes == -(-out // 128) * 128 * -(-inner // 128) * 128 * 4.25 / 8
    assert torch.equal(packed.dequantised().cpu(), table.to(kernel.dtype))
    assert torch.equal(kernel.embed(packed, [0, 2, 69]).cpu(), table[[0, 2, 69]].to(kernel.dtype))
    x = rows_of(18, inner, dtype=kernel.dtype)
    together = kernel.linear(x, packed, keep_float=True).cpu()
    wanted = x.cpu().double() @ table.double().T
    for rows in (slice(1, out - 1), slice(0, 1)):  # sums of the greatest numbers are infinite
        assert (together - wanted)[:, rows].abs().max() <= 2e-6 * wanted[:, rows].abs().max()
    assert torch.equal(together[17:], kernel.linear(x[17:], packed, keep_float=True).cpu())
    one = torch.eye(inner, dtype=kernel.dtype, device=DEVICE)[:40]
    assert torch.equal(kernel.linear(one, packed, keep_float=True).T.cpu(), table[:, :40]), "each number itself"
    with pytest.raises(ValueError, match="exponents of normal numbers"):
        kernel.pack_mxfp4(Mxfp4Weight(codes, torch.full_like(exponents, 255)))


@pytest.mark.parametrize("chunk", [1, 1 << 25])
def test_packing_in_pieces_changes_nothing(monkeypatch, chunk):
    weight = numbers("4 bits, common", rows=300)
    monkeypatch.setattr(few_bits, "_CHUNK", chunk)
    assert torch.equal(kernels("float32").pack(weight).dequantised().cpu(), groups.dequantise(weight))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, hidden_size=64, intermediate_size=96, num_hidden_layers=1)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_gguf_file_keeps_its_numbers_by_default_and_drafts_change_no_text(tmp_path, model, kind, monkeypatch):
    """No matrix is expanded. Logits are those of the expanded weights within rounding."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "model.gguf"
    convert(*model, path, kind)
    texts = []
    for drafter in ("plain", "magicdec", "ngram"):
        engine = engine_of(path, drafter)
        weights = engine.model.weights
        assert weights.quantize == "file"
        linears = [*weights.layers[0].linears, weights.embedding, weights.head]
        assert all(isinstance(linear, CudaFewBits) for linear in linears)
        texts.append(text_of(engine))
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 6
    logits = {quantize: logits_of(load(path, quantize=quantize)) for quantize in ("none", "file")}
    torch.testing.assert_close(logits["file"], logits["none"], atol=1e-4, rtol=1e-4)


def test_parts_of_unlike_kinds_are_multiplied_together_each_with_its_own_numbers(tmp_path, model):
    path, layer = tmp_path / "model.gguf", "model.layers.0."
    convert(*model, path, "Q4_1", kinds={"attn_v": "Q8_0", "attn_k": "Q4_0"})
    loaded, files = load(path, quantize="file"), TensorFiles(path)
    weight, kernel = loaded.weights.layers[0].qkv, loaded.kernels
    assert isinstance(weight, CudaStacked) and isinstance(loaded.weights.layers[0].gate_up, CudaFewBits)
    table = torch.cat([files.read(f"{layer}self_attn.{part}_proj.weight").clone() for part in "qkv"])
    x = rows_of(18, table.shape[1])
    together = kernel.linear(x, weight)
    for found in (together, weight.matmul(x)):
        torch.testing.assert_close(found.cpu(), x.cpu() @ table.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(kernel.linear(x[17:], weight), together[17:])


@pytest.mark.parametrize("gate_up, down", [("Q4_1", "Q8_0"), ("MXFP4", "Q4_0")])
def test_experts_of_a_gguf_file_keep_their_numbers_and_are_multiplied_together(tmp_path, monkeypatch, gate_up, down):
    """Gate and up of one type, down of another one, as files have them. Drafts change no text."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = tmp_path / "model.gguf"
    made = make_family(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1)
    kinds = {"ffn_gate_exps": gate_up, "ffn_up_exps": gate_up, "ffn_down_exps": down}
    convert(tmp_path, made, path, "Q8_0", kinds=kinds)
    file, whole = (load(path, quantize=quantize) for quantize in ("file", "none"))
    experts = file.weights.layers[0].experts
    forms = {"Q4_0": few_bits.SCALE, "Q4_1": few_bits.LEAST, "Q8_0": few_bits.SCALE, "MXFP4": few_bits.POWERS}
    for mlp in experts.mlps:
        assert [each.form.scales for each in mlp] == [forms[gate_up], forms[down]]
    assert file.kernels.experts.stacks_of(experts) is not None, "one launch for all experts of a product"
    torch.testing.assert_close(logits_of(file), logits_of(whole), atol=1e-4, rtol=1e-4)
    texts = [text_of(engine_of(path, drafter)) for drafter in ("plain", "magicdec")]
    assert texts[0] == texts[1] and len(texts[0]) == 6


def test_experts_in_mxfp4_stay_in_4_bits_and_drafts_change_no_text(tmp_path):
    make_family(tmp_path, "gpt_oss", hidden_size=64, num_hidden_layers=1, layer_types=["full_attention"])
    pack_experts(tmp_path, tmp_path / "packed")
    small, whole = (load(folder) for folder in (tmp_path / "packed", tmp_path / "packed" / "whole"))
    for mlp in small.weights.layers[0].experts.mlps:
        assert all(isinstance(each, CudaFewBits) and each.form.scales == few_bits.POWERS for each in mlp)
    torch.testing.assert_close(logits_of(small), logits_of(whole), atol=1e-4, rtol=1e-4)
    texts = [text_of(engine_of(tmp_path / "packed", drafter)) for drafter in ("plain", "magicdec")]
    assert texts[0] == texts[1] and len(texts[0]) == 6


def engine_of(path: Path, drafter: str) -> longdraft.Engine:
    return longdraft.load(str(path), device=DEVICE, dtype="float32", kernels_name="triton-16", drafter=drafter)


def text_of(engine: longdraft.Engine) -> list[int]:
    params = SamplingParams(max_new_tokens=6, seed=3, ignore_eos=True)
    return [token for event in engine.generate(prompt_of(40), params) for token in event.tokens]


def logits_of(model: Transformer) -> torch.Tensor:
    cache = model.new_cache()
    cache.reserve(40)
    return model.logits(model.forward(chain_rows(prompt_of(3), 0), cache).hidden)
