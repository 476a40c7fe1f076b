"""Weights in groups with the numbers of a GGUF file: their values, the products of every kernel, and the promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import longdraft
from helpers.checkpoints import load, make_checkpoint
from helpers.equality import prompt_of
from helpers.gguf_files import TYPE_IDS, convert, noise
from helpers.grouped_weights import KINDS, WIDTH, numbers
from longdraft import kernels
from longdraft.checkpoint.gguf.blocks import dequantise, grouped, q4_0_parts
from longdraft.checkpoint.gguf.types import TYPES
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.errors import ModelError
from longdraft.kernels.cpu.store import CpuLinear
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary, rows_of_head
from longdraft.kernels.formats import groups, int4
from longdraft.kernels.formats.groups import BlockRows, GroupedWeight
from longdraft.model.transformer import chain_rows
from longdraft.request.sampling_params import SamplingParams

every_kernel = pytest.mark.parametrize("name", kernels.available())
EXACT = ("Q8_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K")
ROUNDED = ("Q3_K", "IQ4_XS")

every_kind = pytest.mark.parametrize("kind", KINDS)


def test_a_weight_rounded_to_8_bits_is_off_by_half_a_step_at_most():
    weight = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[3] = 0
    found = groups.quantise(weight)
    error = (groups.dequantise(found) - weight.float()).view(70, 3, 32).abs()
    assert (error <= 0.501 * found.scale.float()[..., None] + 127 * found.scale.float()[..., None] / 2048).all()
    assert not groups.dequantise(found)[3].any()
    weight[5, 40] = torch.inf
    assert groups.quantise(weight).scale.isnan().nonzero().tolist() == [[5, 1]]


@every_kernel
@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_is_that_of_the_slow_twin_whatever_rows_are_beside(name, kind, dtype):
    weight, ops = numbers(kind), kernels.choose("cpu", dtype, name)
    x = torch.randn(19, WIDTH, generator=torch.Generator().manual_seed(1)).to(ops.dtype)
    x[3], x[4] = 1.0, -1.0  # whole numbers of 127 and -127
    packed = ops.pack(weight)
    got = ops.linear(x, packed, keep_float=True)
    torch.testing.assert_close(got, groups.linear(x.float(), weight), atol=1e-3, rtol=1e-5)
    for some in (slice(0, 1), slice(3, 5), slice(2, 9), slice(3, 19)):
        assert torch.equal(ops.linear(x[some].clone(), packed, keep_float=True), got[some])
    table = groups.dequantise(weight)
    assert torch.equal(ops.embed(packed, [0, 2, 69]), table[[0, 2, 69]].to(ops.dtype))


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_taken_from_a_packed_weight_give_the_same_bits(kind, dtype):
    ops = kernels.choose("cpu", dtype)
    x, packed = torch.randn(3, WIDTH).to(ops.dtype), ops.pack(numbers(kind), torch.randn(70))
    ids = torch.tensor([0, 1, 3, *range(8, 68, 2), 69])
    taken = rows_of_head(ops, packed, PartOfVocabulary(ids, 70))
    assert torch.equal(ops.linear(x, taken), ops.linear(x, packed)[:, ids])
    assert torch.equal(ops.embed(taken, range(len(ids))), ops.embed(packed, ids))


@every_kind
def test_kernels_with_fused_operations_give_the_same_bits(kind):
    fused = [name for name in kernels.available()[:-1] if name != "portable"]
    x = torch.randn(5, WIDTH)
    results = [ops.linear(x, ops.pack(numbers(kind))) for ops in (kernels.choose("cpu", "float32", n) for n in fused)]
    assert all(torch.equal(result, results[0]) for result in results)


@every_kernel
def test_rows_that_are_not_finite_give_nan_and_leave_others_alone(name):
    ops = kernels.choose("cpu", "float32", name)
    packed, x = ops.pack(numbers("halves")), torch.randn(2, WIDTH)
    alone = ops.linear(x[1:], packed)
    x[0, 40] = float("inf")
    out = ops.linear(x, packed)
    assert out[0].isnan().all() and torch.equal(out[1:], alone)


@every_kind
def test_every_kind_has_the_same_numbers_in_the_general_one(kind):
    weight, is_rounded = numbers(kind), KINDS[kind][3]
    general = groups.dequantise(weight.general())
    torch.testing.assert_close(general, groups.dequantise(weight), atol=1e-2 if is_rounded else 0, rtol=0)
    moved = torch.arange(WIDTH).view(-1, 32).flip(0).flatten()
    assert torch.equal(groups.dequantise(weight.columns(moved)),
                       (general if is_rounded else groups.dequantise(weight))[:, moved])


def test_kinds_are_stacked_with_all_their_numbers():
    parts = [numbers("4 bits", 32), numbers("8 bits", 6), numbers("halves", 9)]
    both = torch.cat([groups.dequantise(part) for part in parts])
    assert torch.equal(groups.dequantise(GroupedWeight.stacked(parts)), both)
    same = GroupedWeight.stacked([parts[0], parts[0]])
    assert same.bits == 4
    simple = [numbers("5 bits", 8), numbers("8 bits", 5)]
    in_bytes = GroupedWeight.stacked(simple)
    assert in_bytes.bits == 8 and not in_bytes.has_halves
    assert torch.equal(groups.dequantise(in_bytes), torch.cat([groups.dequantise(part) for part in simple]))
    four = int4.quantise(torch.randn(8, 64))
    eight = GroupedWeight.of_int4(four)
    assert eight is not None and torch.equal(groups.dequantise(eight), int4.dequantise(four))


def test_a_group_takes_the_bits_that_are_documented():
    ops = kernels.choose("cpu", "bfloat16")
    if ops.name != "reference":
        for kind, (*_, bits) in KINDS.items():
            assert ops.pack(numbers(kind, 64, 256)).nbytes * 8 == bits * 64 * 256


def blocks(name: str) -> torch.Tensor:
    """Rows of blocks with any whole numbers and float16 scales from 0.25 to 2."""
    kind = TYPES[TYPE_IDS[name]]
    count = 12 * 256 // kind.block
    rows = torch.frombuffer(bytearray(noise(count * kind.nbytes, name)), dtype=torch.uint8).view(count, -1).clone()
    places = {"Q6_K": [208], "Q3_K": [108], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    for at in places.get(name, [0]):
        rows[:, at + 1] = rows[:, at + 1] & 0x8B | 0x34
    return rows.view(3, -1)


@pytest.mark.parametrize("name", [*EXACT, *ROUNDED])
def test_the_numbers_are_those_of_the_blocks(name):
    rows, kind = blocks(name), TYPES[TYPE_IDS[name]]
    meant = torch.empty(3, 4 * 256)
    dequantise(rows, kind, meant)
    weight = grouped(rows, kind)
    found = groups.dequantise(weight)
    if name in EXACT:
        assert torch.equal(found, meant)
    else:  # a product of two scales is rounded to float16
        size = groups.dequantise(weight._replace(least=None)).abs()
        size = size if weight.least is None else size + weight.least.float().abs().repeat_interleave(32, 1)
        assert ((found - meant).abs() <= size / 2048).all()


def where(rows: torch.Tensor, name: str) -> BlockRows:
    addresses = rows.data_ptr() + torch.arange(len(rows)) * rows.shape[1]
    return BlockRows(addresses, torch.full((len(rows),), TYPE_IDS[name], dtype=torch.uint8), 1024, (rows,))


def as_weight(rows: torch.Tensor, name: str) -> int4.Int4Weight | GroupedWeight:
    if name != "Q4_0":
        return grouped(rows, TYPES[TYPE_IDS[name]])
    values, scale = q4_0_parts(rows)
    return int4.Int4Weight(values, scale, torch.full(scale.shape, 8, dtype=torch.uint8))


def bytes_of(packed: CpuLinear) -> list[bytes]:
    return [bytes(part) for part in packed.memory()]


compiled = pytest.mark.skipif(kernels.choose("cpu", "bfloat16").name == "reference", reason="no compiled kernels")


@compiled
@pytest.mark.parametrize("name", [*EXACT, *ROUNDED, "Q4_0"])
def test_blocks_are_packed_as_their_numbers_are(name):
    ops, rows = kernels.choose("cpu", "bfloat16"), blocks(name).repeat(30, 1)[:70]
    bias = torch.randn(70)
    slow, (fast, damaged) = ops.pack(as_weight(rows, name), bias), ops.pack_blocks(where(rows, name), bias)
    assert damaged is None and bytes_of(fast) == bytes_of(slow)
    order = torch.randperm(70)
    fast, _ = ops.pack_blocks(where(rows, name).rows(order))
    assert bytes_of(fast) == bytes_of(ops.pack(as_weight(rows, name).rows(order)))


@compiled
@pytest.mark.parametrize("names", [("Q4_0", "Q8_0"), ("Q4_K", "Q6_K"), ("Q5_0", "IQ4_XS"), ("Q5_K", "Q5_1", "Q3_K"),
                                   ("Q4_0", "Q4_1"), ("Q5_0", "Q4_K", "Q4_0")])
def test_blocks_of_several_types_are_packed_as_their_numbers_are(names):
    ops = kernels.choose("cpu", "float32")
    parts = [as_weight(blocks(name), name) for name in names]
    slow = GroupedWeight.stacked([GroupedWeight.of_int4(part) if isinstance(part, int4.Int4Weight) else part
                                  for part in parts])
    fast, damaged = ops.pack_blocks(BlockRows.stacked([where(blocks(name), name) for name in names]))
    assert damaged is None and bytes_of(fast) == bytes_of(ops.pack(slow))


@compiled
@pytest.mark.parametrize("name, at", [("Q8_0", 0), ("Q5_1", 2), ("Q4_K", 2), ("Q6_K", 208), ("Q4_0", 0), ("Q3_K", 108)])
def test_the_first_row_with_a_damaged_scale_is_found(name, at):
    ops, rows = kernels.choose("cpu", "bfloat16"), blocks(name).repeat(30, 1)
    size = TYPES[TYPE_IDS[name]].nbytes
    for row, bits in ((71, 0x7E), (66, 0x7C)):  # NaN, infinity
        rows[row, 2 * size + at : 2 * size + at + 2] = torch.tensor([0, bits], dtype=torch.uint8)
    assert ops.pack_blocks(where(rows, name))[1] == rows[66].data_ptr()


def test_a_type_that_groups_cannot_hold_is_refused():
    if (ops := kernels.choose("cpu", "bfloat16")).name != "reference":
        with pytest.raises(ValueError, match="types that groups can hold"):
            ops.pack_blocks(where(blocks("Q8_0"), "MXFP4"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, hidden_size=64, intermediate_size=96, num_key_value_heads=2)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_file_keeps_its_numbers_and_its_size(tmp_path, model, kind):
    folder, network = model
    path = tmp_path / "model.gguf"
    convert(folder, network, path, kind)
    results = {}
    for quantize in ("none", "file"):
        loaded = load(path, "float32", quantize=quantize)
        results[quantize] = loaded.logits(loaded.forward(chain_rows(prompt_of(40), 0), loaded.new_cache()).hidden)
    difference = (results["file"] - results["none"]).abs().mean() / results["none"].abs().mean()
    assert difference < 0.05  # rows are quantised to 8 bits
    weights = load(path, "float32", "reference", "file").weights
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(weights.layers[0].down.weight, TensorFiles(path).read(name))
    assert torch.equal(weights.embedding.weight, TensorFiles(path).read("model.embed_tokens.weight"))


def test_parts_of_a_matrix_may_have_types_of_their_own(tmp_path, model):
    folder, network = model
    path = tmp_path / "model.gguf"
    convert(folder, network, path, "Q4_1", kinds={"attn_v": "Q8_0", "attn_k": "Q4_0", "ffn_up": "F16"})
    files, layer = TensorFiles(path), "model.layers.0."
    names = [f"{layer}self_attn.{part}_proj.weight" for part in "qkv"]
    exact = files.exact(names, "file")
    assert isinstance(exact, GroupedWeight)
    assert torch.equal(groups.dequantise(exact), torch.cat([files.read(name).clone() for name in names]))
    assert files.exact([f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"], "file") is None
    texts = []
    for drafter in ("plain", "magicdec", "auto"):
        engine = longdraft.load(str(path), drafter=drafter, quantize="file")
        params = SamplingParams(max_new_tokens=30, seed=3)
        texts.append([token for event in engine.generate(prompt_of(60), params) for token in event.tokens])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_damaged_scale_is_one_clear_line(tmp_path, model):
    folder, network = model
    path = tmp_path / "model.gguf"
    network.model.layers[1].mlp.down_proj.weight.data[3, 5] = 1e30  # its scale overflows float16
    convert(folder, network, path, "Q8_0")
    with pytest.raises(ModelError, match=r"down_proj.*NaN or infinite"):
        longdraft.load(str(path), drafter="plain", quantize="file")



@pytest.mark.parametrize("name", (*EXACT, *ROUNDED))
def test_the_numbers_of_every_type_are_unpacked_where_their_bytes_are(name):
    """A device reads the bytes of a file and unpacks them itself. The meta device refuses tensors of others."""
    kind = TYPES[TYPE_IDS[name]]
    weight = grouped(torch.empty(4, WIDTH // kind.block * kind.nbytes, dtype=torch.uint8, device="meta"), kind)
    assert weight.values.shape == (4, WIDTH) and weight.general().scale.shape == (4, WIDTH // 32, 2)
