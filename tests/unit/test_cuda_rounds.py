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
from helpers.checkpoints import make_checkpoint, make_glide, make_heads
from helpers.cuda_kernels import DEVICE
from helpers.eagle import make_eagle
from helpers.equality import prompt_of
from longdraft.drafters import chain
from longdraft.kernels import launched
from longdraft.kernels.cuda import choices, ranker
from longdraft.kernels.cuda.chain_rows import Chains
from longdraft.kernels.cuda.choices import TextChoices
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.launched import Launched
from longdraft.request.sampling_params import SamplingParams

pytestmark = pytest.mark.full

PARAMS = [SamplingParams(max_new_tokens=6, seed=seed, ignore_eos=True, **law) for seed, law in enumerate((
    dict(min_p=0.05, repetition_penalty=1.3, penalty_window=7), dict(temperature=0.0), dict(temperature=0.7)))]
LENGTHS = (30, 9, 41)
DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle": dict(chain=2), "medusa": dict(tree="2,1"), "draft-model": dict(chain=3),
    "magicdec": dict(budget=24, sinks=4, refresh=5, chain=2), "glide": dict(chain=2),
}
OTHERS: dict[str, dict[str, Any]] = {  # that also wait for other guesses
    "tokenswift": dict(chain=2, tree="2,1", budget=40, sinks=4, recent=8, room=8),
    "triforce": dict(budget=48, stride=10, chain=2),
}
SHARED = ["magicdec", "draft-model", "eagle", "glide", "medusa"]  # whose chains, or heads, are one graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rounds") / "model"
    base = make_checkpoint(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                           num_key_value_heads=1)
    make_heads(folder / "heads", base)
    make_glide(folder / "glide", folder)
    make_eagle(folder / "eagle", target=32, taps=(0, 1), hidden=32, heads=2, kv_heads=1, dim=16, inner=48)
    return folder


def engine_of(folder: Path, drafter: str, monkeypatch: pytest.MonkeyPatch) -> longdraft.Engine:
    monkeypatch.setenv("LONGDRAFT_KERNELS", "triton-16")
    options = (DRAFTERS | OTHERS).get(drafter, {})
    options |= {"model": str(folder)} if drafter in ("draft-model", "triforce") else {}
    heads = {"eagle": "eagle", "glide": "glide", "medusa": "heads", "tokenswift": "heads"}.get(drafter)
    return longdraft.load(str(folder), drafter=drafter, drafter_options=options, device=DEVICE, dtype="float32",
                          heads=None if heads is None else str(folder / heads))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_of(folder, "plain", patch)
        return [[token for event in engine.generate(prompt_of(length), params) for token in event.tokens]
                for length, params in zip(LENGTHS, PARAMS, strict=True)]


def written(batch: longdraft.Batch, happened: list[str]) -> tuple[list[list[int]], list[list[str]]]:
    """The texts of LENGTHS, written side by side, and what happened in each round."""
    texts = {batch.add(prompt_of(length), params): list[int]()
             for length, params in zip(LENGTHS, PARAMS, strict=True)}
    rounds = []
    while batch:
        happened.clear()
        for text, event in batch.step():
            assert event.error is None, event.error
            texts[text].extend(event.tokens)
        rounds.append(list(happened))
    return list(texts.values()), rounds


def note_launches(monkeypatch: pytest.MonkeyPatch, happened: list[str], least: int = 1) -> None:
    """Note the launch of each text's chain, where at least so many texts launch theirs together."""
    launch = Chains.launch
    monkeypatch.setattr(Chains, "launch", lambda self, chains: (
        happened.extend(["begins"] * len(chains) * (len(chains) >= least)), launch(self, chains))[1])


@pytest.mark.parametrize("drafter, is_on", [*((drafter, True) for drafter in DRAFTERS),
                                            ("magicdec", False), ("glide", False)])
def test_what_all_texts_draft_is_launched_before_the_host_waits_once(folder, plain, drafter, is_on, monkeypatch):
    """And each text is the plain one, whatever the other texts are. With the switch, chains are launched together."""
    happened: list[str] = []
    read, copy, launch = choices._read, launched.copied_to_host, Chains.launch
    alone: list[int] = []
    monkeypatch.setattr(Chains, "launch", lambda self, chains: (
        alone.extend([1] * (len(chains) == 1)), launch(self, chains))[1])
    monkeypatch.setattr(ranker, "SHARES_CHAINS", is_on)
    note_launches(monkeypatch, happened)
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: happened.append("guesses") or copy(rows))
    monkeypatch.setattr(choices, "_read", lambda outcome: happened.append("choices") or read(outcome))
    texts, rounds = written(engine_of(folder, drafter, monkeypatch).batch(), happened)
    assert texts == plain
    assert all(events.count("guesses") <= 1 and events.count("choices") <= 1 for events in rounds)
    one_after_another = [event for events in rounds for event in events if event != "choices"]
    begun = "".join("b" if event == "begins" else "|" for event in one_after_another).split("|")
    assert begun.count("bbb") >= 2 and begun[-1] == "", "a wait for three texts, and for the last ones"
    assert len(alone) <= 2 if is_on else len(alone) > 5 or drafter not in SHARED, "only a last text drafts alone"


@pytest.mark.parametrize("drafter", [*OTHERS, "magicdec"])
def test_chains_of_large_weights_and_of_lower_levels_are_launched_together(folder, plain, drafter, monkeypatch):
    """Also where texts would share the forwards of each drafted token, as all other forwards are shared."""
    monkeypatch.setattr(chain, "SMALL_BYTES", 0)
    happened: list[str] = []
    note_launches(monkeypatch, happened, least=2)
    texts, rounds = written(engine_of(folder, drafter, monkeypatch).batch(), happened)
    assert texts == plain
    assert ["begins"] * 3 in rounds


@pytest.mark.parametrize("drafter", ["magicdec", "eagle"])
def test_chains_that_lie_change_no_text(folder, plain, drafter, monkeypatch):
    """Half of the guesses are replaced, and half of the places have none."""
    launch = Chains.launch
    lies: list[int] = []

    def lie(self: Chains[Any, Any], chains: Any) -> list[torch.Tensor]:
        outcomes = launch(self, chains)
        for text, outcome in enumerate(outcomes):
            outcome[len(lies) % 2 :: 2, 2] += 1 + text
            outcome[1:, 0] *= len(lies) % 2
            lies.append(text)
        return outcomes

    monkeypatch.setattr(Chains, "launch", lie)
    assert written(engine_of(folder, drafter, monkeypatch).batch(), [])[0] == plain
    assert lies.count(2) >= 2


@pytest.mark.parametrize("drafter", ["magicdec", "eagle", "medusa"])
def test_texts_with_filters_draft_and_choose_together(folder, drafter, monkeypatch):
    """Top-k, top-p, eta and `logit_bias` of some texts: all chains in one graph, all choices in another."""
    laws = dict(top_p=0.9), dict(top_k=12, logit_bias=((5, 2.0),)), dict(eta_cutoff=0.02), dict(temperature=0.0)
    params = [SamplingParams(max_new_tokens=5, seed=seed, ignore_eos=True, **law) for seed, law in enumerate(laws)]
    lengths, drafted, chosen = (30, 9, 41, 22), list[int](), list[int]()
    launch, run = Chains.launch, TextChoices.run
    monkeypatch.setattr(Chains, "launch", lambda self, chains: (
        drafted.append(len(chains)), launch(self, chains))[1])
    monkeypatch.setattr(TextChoices, "run", lambda self, source, hidden, k, v, trees: (
        chosen.append(len(trees)), run(self, source, hidden, k, v, trees))[1])
    batch = engine_of(folder, drafter, monkeypatch).batch()
    texts = {batch.add(prompt_of(length), each): list[int]() for length, each in zip(lengths, params, strict=True)}
    while batch:
        for text, event in batch.step():
            texts[text].extend(event.tokens)
    engine = engine_of(folder, "plain", monkeypatch)
    assert list(texts.values()) == [[token for event in engine.generate(prompt_of(length), each)
                                     for token in event.tokens] for length, each in zip(lengths, params, strict=True)]
    assert 4 in drafted and 4 in chosen


def test_texts_that_the_host_decides_share_the_forwards_of_their_drafts(folder, monkeypatch):
    """With remainders, which are read from a table. Another text, which could share its chain, drafts alone."""
    monkeypatch.setattr(chain, "SMALL_BYTES", 0)
    params = [SamplingParams(max_new_tokens=4, seed=seed, ignore_eos=True, **law)
              for seed, law in enumerate((dict(typical_p=0.9), dict(typical_p=0.7), dict(temperature=0.7)))]
    shared: list[int] = []
    run = CudaDecoder._shared
    monkeypatch.setattr(CudaDecoder, "_shared", lambda self, rows, texts, parents: (
        shared.append(sum(kv.remainder is not None for kv in texts)), run(self, rows, texts, parents))[1])
    batch = engine_of(folder, "magicdec", monkeypatch).batch()
    texts = {batch.add(prompt_of(length), each): list[int]() for length, each in zip((34, 41, 35), params, strict=True)}
    while batch:
        for text, event in batch.step():
            texts[text].extend(event.tokens)
    engine = engine_of(folder, "plain", monkeypatch)
    assert list(texts.values()) == [[token for event in engine.generate(prompt_of(length), each)
                                     for token in event.tokens]
                                    for length, each in zip((34, 41, 35), params, strict=True)]
    assert 2 in shared


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
