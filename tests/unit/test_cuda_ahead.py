"""Plain decoding that a device computes ahead of the host, against single steps.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.cuda_texts import NAME, PROMPT, copy_of, load, prompt_forward
from helpers.equality import prompt_of
from helpers.families import make_family
from longdraft.drafters.plain import PlainDrafter
from longdraft.errors import NumericalError, UsageError
from longdraft.kernels import launched, switches
from longdraft.model.transformer import Transformer
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation import ahead
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings

pytestmark = pytest.mark.full

NEW = 14
LAWS = {
    "greedy": dict(temperature=0.0, repetition_penalty=1.3, penalty_window=5),
    "paper, not ended early": dict(min_p=0.05, repetition_penalty=1.2, penalty_window=1024, min_new_tokens=6),
    "top-p": dict(temperature=0.8, top_p=0.9),
}


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a few tokens are computed ahead, too."""
    monkeypatch.setattr(ahead, "LONG_TEXT", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("ahead")
    make_checkpoint(root, seed=1, num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                    num_key_value_heads=1)
    return root


@pytest.fixture(scope="module", params=[NAME, NAME + "-k8v4"] if HAS_CUDA else [NAME])
def model(request: pytest.FixtureRequest, folder: Path) -> Transformer:
    return load(folder, request.param)


def text_of(model: Transformer, law: dict[str, Any], is_ahead: bool, room: int = 64, new: int = NEW) -> Step:
    cache, _ = prompt_forward(model)
    cache, context = copy_of(cache, model), Context(PROMPT)
    cache.reserve(len(PROMPT) + room)
    sampler = Sampler(SamplingParams(max_new_tokens=new, seed=11, **law), [1], kernels=model.kernels)
    return Step(model, cache, PlainDrafter(), sampler, context, Timings(), Tally(),
                ahead=PlainAhead(model, cache, sampler) if is_ahead else None)


def write(step: Step, tokens: int = NEW) -> list[int]:
    while step.context.num_new < tokens:
        run_alone(step.run(tokens - step.context.num_new))
    return step.context.slice(len(PROMPT), len(step.context)).tolist()


def rows(step: Step) -> list[torch.Tensor]:
    every = torch.arange(step.cache.length, device=DEVICE)[None]
    return [part for store in step.cache.stores for part in store.read(every)]


@pytest.mark.parametrize("law", LAWS)
def test_tokens_ahead_are_those_of_single_steps(model, law, monkeypatch):
    """Tokens and rows, to the bit, with one wait for several tokens. The last ones are written by single steps."""
    waits = []
    honest = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    fast, slow = (text_of(model, LAWS[law], is_ahead) for is_ahead in (True, False))
    assert write(fast) == write(slow)
    assert waits == [8] and fast.tally.steps == slow.tally.steps == NEW
    assert all(torch.equal(a, b) for a, b in zip(rows(fast), rows(slow), strict=True))


@pytest.mark.parametrize("family, layers", [(None, (0, 1, 2)), (None, (2, 0)), ("qwen3_moe", (0, 2))])
def test_tapped_states_are_those_of_single_steps(folder, tmp_path, family, layers, monkeypatch):
    """Beside a head: of chains whose rows begin anywhere in the memory of tapped states."""
    if family:
        folder = tmp_path
        make_family(folder, family, num_hidden_layers=2)
    waits = []
    honest = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    fast, slow = (text_of(load(folder).with_taps(layers), LAWS["top-p"], is_ahead, new=36)
                  for is_ahead in (True, False))
    assert write(fast, 36) == write(slow, 36) and waits == [8, 8, 8, 4]
    [(start, found)], [(_, wanted)] = (step.cache.taps.take() for step in (fast, slow))
    assert start == 0 and found.shape[1] == len(PROMPT) - 1 + 36 and torch.equal(found, wanted)


def test_a_text_that_begins_to_share_its_forwards_goes_on_by_single_steps(model):
    """After the tokens that are computed."""
    step, clock = text_of(model, LAWS["top-p"], True), CostClock()
    step = step._replace(ahead=PlainAhead(model, step.cache, step.sampler, clock))
    for _ in range(3):
        run_alone(step.run(NEW))
    clock.start(2)
    assert len(step.ahead._tokens) == 6, "the first token is that of a single step"
    assert write(step) == write(text_of(model, LAWS["top-p"], False)) and not step.ahead._tokens


def test_short_texts_are_not_computed_ahead(model, monkeypatch):
    monkeypatch.setattr(ahead, "LONG_TEXT", 5)
    step = text_of(model, LAWS["greedy"], True)
    run_alone(step.run(100))
    assert not step.ahead._tokens
    write(step, 5)
    run_alone(step.run(9))
    assert len(step.ahead._tokens) == 3, "four of the nine that may follow, less the one that was taken"


def test_logits_that_are_not_finite_are_an_error(model, monkeypatch):
    step = text_of(model, LAWS["greedy"], True)
    damaged = model.weights.norm.clone()
    model.weights.norm.fill_(float("nan"))
    try:
        with pytest.raises(NumericalError):
            run_alone(step.run(20))
    finally:
        model.weights.norm.copy_(damaged)


@pytest.mark.parametrize("end", range(3, 6))
def test_an_end_within_the_tokens_ahead_ends_the_text(folder, monkeypatch, end):
    monkeypatch.setenv("LONGDRAFT_KERNELS", NAME)
    engine = longdraft.load(str(folder), drafter="plain", device=DEVICE, dtype="float32")
    params = SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True)
    whole = engine.generate(prompt_of(20), params)
    list(whole)
    tokens = whole.tokens.tolist()
    stop = next(place for place in range(end, 20) if tokens[place] not in tokens[:place])
    found = engine.generate(prompt_of(20), SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True,
                                                          stop_token_ids=(tokens[stop],)))
    list(found)
    assert found.tokens.tolist() == tokens[: stop + 1]
    monkeypatch.setattr(ahead, "WRITES_AHEAD", False)
    single = engine.generate(prompt_of(20), params)
    *_, last = single
    assert single.tokens.tolist() == tokens and last.stats["steps"] == 20


def test_switches_are_read_from_the_environment(monkeypatch):
    assert switches.is_on("FUSES_GATE")
    monkeypatch.setenv(switches.VARIABLE, "FUSES_GATE, WRITES_AHEAD")
    assert not switches.is_on("FUSES_GATE") and switches.is_on("DRAFTS_LAYERS")
    monkeypatch.setenv(switches.VARIABLE, "all")
    assert not any(switches.is_on(name) for name in switches.SWITCHES)
    monkeypatch.setenv(switches.VARIABLE, "FUSE_GATE")
    with pytest.raises(UsageError, match=r"FUSE_GATE.*allowed: all, FUSES_GATE"):
        switches.is_on("FUSES_GATE")
