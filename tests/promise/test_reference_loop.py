"""Greedy text with a windowed penalty equals a few obvious lines over `transformers`."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import load, make_checkpoint, make_heads
from helpers.equality import prompt_of
from helpers.generation import by_name, generate
from longdraft.parts import heads
from longdraft.request.sampling_params import SamplingParams

THETA, WINDOW, NEW = 1.3, 16, 60


def naive(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        for token in set(ids[-WINDOW:]):
            logits[token] = logits[token] * THETA if logits[token] < 0 else logits[token] / THETA
        ids.append(int(logits.argmax()))
    return ids[len(prompt):]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("drafter", ["plain", "ngram", "tokenswift"])
def test_greedy_text_with_a_penalty_equals_the_naive_loop(tmp_path, kv_heads, drafter):
    base = make_checkpoint(tmp_path / "model", num_key_value_heads=kv_heads)
    make_heads(tmp_path / "heads", base)
    model = load(tmp_path / "model")
    params = SamplingParams(max_new_tokens=NEW, temperature=0.0, repetition_penalty=THETA, penalty_window=WINDOW)
    options = {} if drafter == "plain" else {"delay": 0}
    factory = by_name(drafter, heads.load_heads(tmp_path / "heads", model), **options)
    prompt = prompt_of(40)
    assert generate(model, prompt, params, factory) == naive(base, prompt)
