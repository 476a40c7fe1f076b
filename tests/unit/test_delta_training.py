"""The gated delta rule in chunks, with gradients (longdraft/train/delta.py), against the rule row after row."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from helpers.families import make_family
from longdraft.train.delta import chunked_delta_rule, use_chunks


def row_after_row(q, k, v, g, beta):
    """S = exp(g) S;  S = S + k (beta (v - k S));  output = q S."""
    state, rows = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for row in range(v.shape[2]):
        state = state * g[:, :, row, None, None].exp()
        change = (v[:, :, row] - (state * k[:, :, row, :, None]).sum(2)) * beta[:, :, row, None]
        state = state + k[:, :, row, :, None] * change[:, :, None]
        rows.append((state * q[:, :, row, :, None]).sum(2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("length", [1, 8, 21])
@pytest.mark.parametrize("rate", [0.05, 2.0, 200.0])  # with the last one, exp(c) and its inverse leave float32
def test_rows_and_gradients_are_those_of_the_rule_row_after_row(length, rate):
    torch.manual_seed(1)
    q, k = (functional.normalize(torch.randn(2, 3, length, 16), dim=-1) for _ in range(2))
    given = [q, k, torch.randn(2, 3, length, 24), -torch.rand(2, 3, length) * rate, torch.rand(2, 3, length)]
    found = []
    for rule in (row_after_row, lambda *given: chunked_delta_rule(*given, chunk=8)):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        rows = rule(*inputs)
        torch.manual_seed(2)
        found.append([rows, *torch.autograd.grad((rows * torch.randn_like(rows)).sum(), inputs)])
    for slow, fast in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, atol=2e-5, rtol=2e-5)


def test_a_model_with_chunks_computes_what_transformers_computes(tmp_path):
    """Logits and gradients of all weights, with more value heads than key heads."""
    slow = make_family(tmp_path, "qwen3_5", linear_num_key_heads=2, linear_num_value_heads=4)
    fast = use_chunks(copy.deepcopy(slow))
    ids = torch.arange(100).view(2, 50) % 90
    found = []
    for model in (slow, fast):
        logits = model(ids).logits
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        found.append({"logits": logits} | {name: each.grad for name, each in model.named_parameters()})
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, atol=2e-4, rtol=2e-3)
