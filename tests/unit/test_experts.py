"""Mixtures of experts: the routing, the sum, and that a row's company changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

import longdraft
from helpers.checkpoints import load
from helpers.families import MIXTURES, make_family
from helpers.family_checks import check_one_call, check_rows
from longdraft import kernels
from longdraft.checkpoint import sizing
from longdraft.checkpoint.config_file import parse_config, read_config
from longdraft.errors import ModelError
from longdraft.kernels.experts import experts_forward, route
from longdraft.kernels.weights import Experts, Mlp

HIDDEN, INNER, COUNT = 48, 32, 6
ONE_CALL = [*MIXTURES, "qwen3_5_moe", "qwen3_next"]


def mixture(ops: kernels.Kernels, *, normalises: bool = True, rounds: bool = False, quantize: str = "none") -> Experts:
    torch.manual_seed(1)

    def packed(*shape: int) -> kernels.Linear:
        return ops.pack(torch.randn(*shape) * 0.3, quantize=quantize)

    mlps = tuple(Mlp(packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER)) for _ in range(COUNT))
    return Experts(ops.pack(torch.randn(COUNT, HIDDEN)), mlps, 3, normalises, rounds)


@pytest.mark.parametrize("name", kernels.available())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_any_company(name, dtype):
    ops = kernels.choose("cpu", dtype, name)
    for quantize in ("none", "int8", "int4"):
        experts = mixture(ops, quantize=quantize)
        x = torch.randn(33, HIDDEN).to(ops.dtype)
        alone = torch.cat([experts_forward(ops, row[None], experts) for row in x])
        for count in (2, 5, 16, 17, 33):
            assert torch.equal(experts_forward(ops, x[:count], experts), alone[:count]), (quantize, count)
        order = torch.randperm(33)
        assert torch.equal(experts_forward(ops, x[order], experts), alone[order])


@pytest.mark.parametrize("normalises", [True, False])
def test_the_sum_is_that_of_the_definition(normalises):
    """Row by row, expert by expert."""
    ops = kernels.choose("cpu", "float32", "reference")
    experts = mixture(ops, normalises=normalises)
    x = torch.randn(7, HIDDEN)
    for row, found in zip(x, experts_forward(ops, x, experts), strict=True):
        p = torch.softmax(ops.linear(row[None], experts.router)[0], 0)
        best = p.topk(3).indices.tolist()
        total = torch.zeros(HIDDEN)
        for expert in best:
            gate, up = ops.linear(row[None], experts.mlps[expert].gate_up)[0].chunk(2)
            inner = (functional.silu(gate) * up)[None]
            weight = p[expert] / (p[best].sum() if normalises else 1)
            total += weight * ops.linear(inner, experts.mlps[expert].down)[0]
        torch.testing.assert_close(found, total, atol=1e-5, rtol=1e-5)


def test_of_equal_probabilities_the_lower_index_comes_first():
    experts = mixture(kernels.choose("cpu", "float32", "reference"))
    choice = route(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 6]), experts)
    assert choice.experts.tolist() == [[1, 2, 4], [0, 1, 2]]
    torch.testing.assert_close(choice.weights, torch.full((2, 3), 1 / 3))


def test_a_forward_reads_the_chosen_experts_only(tmp_path):
    make_family(tmp_path, "qwen3_moe")
    model, config = load(tmp_path, "bfloat16"), read_config(tmp_path)
    sizes = sizing.model_sizes(config)
    expert = 3 * 48 * 32 * 2  # bytes
    assert sizes.weights_bytes - sizes.read_bytes == config.num_layers * 3 * expert
    layer = model.weights.layers[0].experts
    assert layer is not None and len(layer.mlps) == 6 and layer.chosen == 3
    all_of_them = sum(mlp.gate_up.nbytes + mlp.down.nbytes for layer in model.weights.layers
                      if layer.experts for mlp in layer.experts.mlps)
    assert model.weights_bytes == sum(linear.nbytes for linear in model.linears) + all_of_them // 2


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory) -> dict[str, Path]:
    """A folder for every family with experts."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ONE_CALL}
    for name, folder in folders.items():
        make_family(folder, name)
    return folders


def test_rows_of_mixtral_have_the_same_bits_one_by_one_together_and_in_a_tree(mixtures):
    check_rows(mixtures["mixtral"], kernels.available()[0], "bfloat16")


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("family", ONE_CALL)
def test_one_call_computes_what_single_operations_compute(mixtures, family, name):
    """After a prompt of more pairs of rows and experts than are multiplied at a time, and a short one."""
    for dtype, quantize, prompt in (("float32", "none", 400), ("bfloat16", "none", 20), ("bfloat16", "int8", 20),
                                    ("bfloat16", "int4", 20)):
        check_one_call(load(mixtures[family], dtype, name, quantize=quantize), prompt)


@pytest.mark.parametrize("name", kernels.available()[:-1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_routing_is_that_of_the_definition(name, dtype):
    """For every number of experts, with equal logits, and for rows that are not finite."""
    compiled, reference = (kernels.choose("cpu", dtype, each) for each in (name, "reference"))
    torch.manual_seed(4)
    for count, chosen in ((1, 1), (6, 3), (16, 16), (40, 5), (128, 8)):
        logits = (torch.randn(9, count) * 4).to(compiled.dtype)
        logits[0] = 1.0
        logits[1, count // 2] = torch.nan
        logits[2, 0] = torch.inf
        logits[3, count // 2 :] = -torch.inf
        for normalises, rounds in ((True, False), (False, True)):
            settings = mixture(reference)._replace(chosen=chosen, normalises=normalises, rounds=rounds)
            found, expected = compiled.route(logits, settings), reference.route(logits, settings)
            assert torch.equal(found.experts[:3], expected.experts[:3])
            near = dict(atol=1e-6, rtol=1e-2 if rounds and dtype == "bfloat16" else 1e-5, equal_nan=True)
            torch.testing.assert_close(found.weights, expected.weights, **near)
            assert found.weights[1].isnan().all()
            assert torch.equal(torch.cat([compiled.route(row[None], settings).weights for row in logits])[4:],
                               found.weights[4:])


@pytest.mark.parametrize("changes, message", [
    (dict(num_experts_per_tok=9), "9 of 6 experts of width 32; allowed"),
    (dict(moe_intermediate_size=0), "moe_intermediate_size is 0; allowed: a whole number, 1 to 16,777,216"),
    (dict(mlp_only_layers=[0]), "make some layers dense; supported: experts in all layers"),
    (dict(decoder_sparse_step=2), "make some layers dense; supported: experts in all layers"),
])
def test_settings_of_experts_are_checked(changes, message):
    base = dict(model_type="qwen3_moe", vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=32)
    with pytest.raises(ModelError, match=message):
        parse_config(base | changes)


def test_absurd_numbers_of_experts_are_refused_before_memory_is_taken(tmp_path):
    make_family(tmp_path, "qwen3_moe")
    text = (tmp_path / "config.json").read_text()
    for name in ("num_experts", "num_local_experts"):
        text = text.replace(f'"{name}": 6', f'"{name}": 1000000000000')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="num_local_experts is 1000000000000; allowed: a whole number"):
        longdraft.load(str(tmp_path), drafter="plain")
