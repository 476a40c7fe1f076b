"""Rounds of several texts that draft on the device: the host launches what all texts draft before it waits, once.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.checkpoints import make_checkpoint, make_heads
from helpers.cuda_kernels import DEVICE
from helpers.eagle import make_eagle
from helpers.equality import prompt_of
from longdraft.core import SamplingParams
from longdraft.kernels import launched
from longdraft.kernels.cuda import shared_choice
from longdraft.kernels.cuda.drafting import DraftRanking
from longdraft.kernels.launched import Launched

PARAMS = [SamplingParams(max_new_tokens=6, seed=seed, ignore_eos=True, **law) for seed, law in enumerate((
    dict(min_p=0.05, repetition_penalty=1.3, penalty_window=7), dict(temperature=0.0), dict(temperature=0.7)))]
LENGTHS = (30, 9, 41)
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": dict(chain=2), "medusa": dict(tree="2,1"), "draft-model": dict(chain=3),
    "magicdec": dict(budget=24, sinks=4, refresh=5, chain=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds") / "model"
    base = make_checkpoint(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                           num_key_value_heads=1)
    make_heads(folder / "heads", base)
    make_eagle(folder / "eagle", target=32, taps=(0, 1), hidden=32, heads=2, kv_heads=1, dim=16, inner=48)
    return folder


def engine_of(folder: Path, drafter: str, monkeypatch: pytest.MonkeyPatch) -> longdraft.Engine:
    monkeypatch.setenv("LONGDRAFT_KERNELS", "triton-16")
    options = DRAFTERS.get(drafter, {}) | ({"model": str(folder)} if drafter == "draft-model" else {})
    heads = {"eagle": "eagle", "medusa": "heads"}.get(drafter)
    return longdraft.load(str(folder), drafter=drafter, drafter_options=options, device=DEVICE, dtype="float32",
                          heads=None if heads is None else str(folder / heads))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(folder, "plain", patch)
        return [[token for event in engine.generate(prompt_of(length), params) for token in event.tokens]
                for length, params in zip(LENGTHS, PARAMS, strict=True)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_all_texts_draft_is_launched_before_the_host_waits_once(folder, plain, drafter, monkeypatch):
    """And each text is the plain one, whatever the other texts are."""
    happened: list[object] = []
    begin, read, copy = DraftRanking.begin, shared_choice._read, launched.copied_to_host
    monkeypatch.setattr(DraftRanking, "begin", lambda self, *given: (happened.append("begins"), begin(self, *given))[1])
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: happened.append("guesses") or copy(rows))
    monkeypatch.setattr(shared_choice, "_read", lambda outcome: happened.append("choices") or read(outcome))
    batch = engine_of(folder, drafter, monkeypatch).batch()
    texts = {batch.add(prompt_of(length), params): list[int]()
             for length, params in zip(LENGTHS, PARAMS, strict=True)}
    rounds = []
    while batch:
        happened.clear()
        for text, event in batch.step():
            assert event.error is None, event.error
            texts[text].extend(event.tokens)
        rounds.append(list(happened))
    assert list(texts.values()) == plain
    assert all(events.count("guesses") <= 1 and events.count("choices") <= 1 for events in rounds)
    one_after_another = [event for events in rounds for event in events if event != "choices"]
    begun = "".join("b" if event == "begins" else "|" for event in one_after_another).split("|")
    assert begun.count("bbb") >= 2 and begun[-1] == "", "a wait for three texts, and for the last ones"


def test_results_of_unlike_forms_are_read_each_and_equal_ones_together(monkeypatch):
    waits: list[tuple[int, ...]] = []
    copy = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(tuple(rows.shape)) or copy(rows))
    parts = [torch.arange(6, device=DEVICE).view(3, 2), torch.ones(1, 2, dtype=torch.int64, device=DEVICE),
             torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)]
    work = [Launched(part) for part in parts]
    launched.read_together(work)
    assert [each.read().tolist() for each in work] == [part.tolist() for part in parts]
    assert waits == [(4, 2), (2, 3)]
