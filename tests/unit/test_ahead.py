"""Plain decoding on the CPU that computes several tokens in one call writes the tokens of single steps, bit for bit."""

from __future__ import annotations

import pytest
import torch

import longdraft
from helpers.checkpoints import load
from helpers.equality import SETTINGS, params_of, prompt_of
from helpers.families import CPU_FAMILIES, make_family
from longdraft.drafters.plain import PlainDrafter
from longdraft.engine.rewind import _rewound
from longdraft.errors import NumericalError
from longdraft.model.transformer import chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation import ahead
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.cost_clock import CostClock
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings

NEW = 24


@pytest.fixture(autouse=True)
def bursts(monkeypatch):
    """Several tokens in each call, however slow the machine is."""
    monkeypatch.setattr(ahead, "_BURST_SECONDS", 1e9)


def begun(model, params, is_ahead, length=40, clock=None):
    """A text whose prompt is read."""
    cache, context, sampler = model.new_cache(), Context(prompt_of(length)), Sampler(params, [1])
    model.forward(chain_rows(context.slice(0, length - 1).tolist(), 0), cache)
    cache.commit(range(length - 1))
    return Step(model, cache, PlainDrafter(), sampler, context, Timings(), Tally(),
                ahead=PlainAhead(model, cache, sampler, clock) if is_ahead else None)


def write(step, tokens=NEW):
    while step.context.num_new < tokens:
        run_alone(step.run(tokens - step.context.num_new))
    return step.context.slice(0, len(step.context)).tolist()


def rows(step):
    every = range(step.cache.length)
    return [part for store in step.cache.stores
            for part in store.read(torch.tensor(list(every)).expand(store.shape[0], -1))]


def are_equal(model, params):
    fast, slow = begun(model, params, True), begun(model, params, False)
    assert write(fast) == write(slow) and fast.tally.steps == slow.tally.steps == NEW
    assert all(torch.equal(a, b) for a, b in zip(rows(fast), rows(slow), strict=True))
    return fast, slow


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family, dtype", [("mha", "float32"), ("gqa", "bfloat16")])
def test_tokens_and_rows_are_those_of_single_steps(tiny, family, dtype, name):
    are_equal(load(tiny[family], dtype), params_of(name))


def test_a_cut_forgets_the_tokens_that_were_computed_ahead(tiny):
    """Though drafts reach the place that they followed."""
    model, params = load(tiny["gqa"]), params_of("top-k")
    fast, slow = begun(model, params, True), begun(model, params, False)
    for _ in range(4):
        run_alone(fast.run(30))
    tokens = write(slow, 4)
    assert fast.ahead._tokens, "tokens that follow were computed"
    fast, slow = (_rewound(step, 2, [tokens[-2]], lambda sampler: PlainDrafter()) for step in (fast, slow))
    for _ in range(2):
        run_alone(fast._replace(ahead=None).run(1))
    assert write(fast, 12) == write(slow, 12) != write(begun(model, params, False), 12)


@pytest.mark.parametrize("family", CPU_FAMILIES)
def test_every_family_writes_the_same(tmp_path, family):
    make_family(tmp_path, family)
    are_equal(load(tmp_path, "bfloat16"), params_of("paper"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 0)])
def test_tapped_states_are_those_of_single_steps(tiny, dtype, layers):
    steps = are_equal(load(tiny["gqa"], dtype).with_taps(layers), params_of("paper"))
    [(start, fast)], [(_, slow)] = (step.cache.taps.take() for step in steps)
    assert start == 0 and fast.shape[1] == 40 - 1 + NEW and torch.equal(fast, slow)


def test_states_that_nobody_reads_are_not_copied(tiny):
    step = begun(load(tiny["gqa"], "bfloat16").with_taps((1,)), params_of("paper"), True)
    step.cache.taps.follow(False)
    write(step, 10)
    step.cache.taps.follow(True)
    write(step)
    assert [(start, states.shape[1]) for start, states in step.cache.taps.take()] == [(0, 39), (39 + 10, NEW - 10)]


def test_several_tokens_come_from_one_call(tiny):
    step = begun(load(tiny["gqa"], "bfloat16"), params_of("paper"), True)
    for _ in range(2):
        run_alone(step.run(NEW))
    assert len(step.ahead._tokens) == ahead.MOST - 1, "the first call computes one token, to learn what it costs"


def test_a_slow_model_writes_token_by_token(tiny, monkeypatch):
    monkeypatch.setattr(ahead, "_BURST_SECONDS", 0.0)
    step = begun(load(tiny["gqa"], "bfloat16"), params_of("paper"), True)
    for _ in range(3):
        run_alone(step.run(NEW))
    assert not step.ahead._tokens


def test_a_text_that_begins_to_share_its_forwards_goes_on_by_single_steps(tiny):
    model, clock = load(tiny["gqa"], "bfloat16"), CostClock()
    step = begun(model, params_of("paper"), True, clock=clock)
    for _ in range(2):
        run_alone(step.run(NEW))
    clock.start(2)
    assert write(step) == write(begun(model, params_of("paper"), False)) and not step.ahead._tokens


def test_logits_that_are_not_finite_are_an_error(tiny):
    model = load(tiny["gqa"], "bfloat16")
    model.weights.norm.fill_(float("nan"))
    with pytest.raises(NumericalError):
        write(begun(model, params_of("paper"), True))


@pytest.mark.parametrize("drafter", ["plain", "auto"])
@pytest.mark.parametrize("end", range(3, 7))
def test_an_end_within_the_tokens_ahead_ends_the_text(tiny, monkeypatch, drafter, end):
    engine = longdraft.load(str(tiny["gqa"]), drafter=drafter, dtype="bfloat16")
    params = SamplingParams(max_new_tokens=40, seed=4, ignore_eos=True)
    whole = engine.generate(prompt_of(20), params)
    list(whole)
    tokens = whole.tokens.tolist()
    stop = next(place for place in range(end, 40) if tokens[place] not in tokens[:place])
    ended = engine.generate(prompt_of(20), SamplingParams(max_new_tokens=40, seed=4, ignore_eos=True,
                                                          stop_token_ids=(tokens[stop],)))
    list(ended)
    assert ended.tokens.tolist() == tokens[: stop + 1]
    monkeypatch.setattr(ahead, "WRITES_AHEAD", False)
    single = engine.generate(prompt_of(20), params)
    list(single)
    assert single.tokens.tolist() == tokens
