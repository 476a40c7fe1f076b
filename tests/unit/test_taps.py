"""Tapped states: what drafters read of the target's layers. They are the model's own states, and cost no bit of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from helpers.checkpoints import HIDDEN, load
from helpers.equality import factory_of, prompt_of
from longdraft import kernels
from longdraft.cache import taps
from longdraft.cache.taps import TapLog
from longdraft.drafters import Resources
from longdraft.kernels import Taps
from longdraft.model.transformer import ForwardRequest, Rows, chain_rows
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.abilities import memory_of

LAYERS = (0, 1, 2)  # both layers, and what leaves the last one


def states(cache) -> torch.Tensor:
    return torch.cat([run.states for run in cache.taps.take()], 1)


@pytest.mark.parametrize("name", kernels.available())
def test_taps_are_the_hidden_states_of_transformers_and_change_no_bit(tiny, name):
    model = load(tiny["gqa"], name=name)
    ids = prompt_of(40)
    tapped = model.with_taps(LAYERS)
    cache, plain = tapped.new_cache(), model.new_cache()
    for start in (0, 30):
        rows = chain_rows(ids[start : start + 30], start)
        logits = [each.forward(rows, to, len(rows.tokens)).logits for each, to in ((tapped, cache), (model, plain))]
        assert torch.equal(*logits)
        for each in (cache, plain):
            each.commit(range(len(rows.tokens)))
    found = states(cache).float()
    with torch.no_grad():
        theirs = LlamaForCausalLM.from_pretrained(tiny["gqa"])(torch.tensor([ids]), output_hidden_states=True)
    for layer in (0, 1):
        torch.testing.assert_close(found[layer], theirs.hidden_states[layer][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.normed(found[2]), theirs.hidden_states[2][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", kernels.available())
def test_the_taps_of_accepted_rows_are_those_of_plain_decoding(tiny, name):
    """A tree's rows, of which one path is text, in a batch with another text."""
    model = load(tiny["mha"], "bfloat16" if name != "reference" else "float32", name).with_taps((2, 0))
    ids = prompt_of(24)
    one, other, whole = (model.new_cache() for _ in range(3))
    for cache in (one, other):
        model.forward(chain_rows(ids[:20], 0), cache)
        cache.commit(range(20))
    tree = Rows([ids[20], 7, ids[21], 9, ids[22]], [20, 21, 21, 22, 22], [-1, 0, 0, 1, 2])
    model.forward_batch([ForwardRequest(model, tree, one, 5), ForwardRequest(model, chain_rows(ids[20:23], 20), other)])
    one.commit([0, 2, 4])
    other.commit(range(2))
    for place in range(23):
        model.forward(chain_rows(ids[place : place + 1], place), whole)
        whole.commit([0])
    wanted = states(whole)
    assert torch.equal(states(one), wanted) and torch.equal(states(other), wanted[:, :22])


def test_the_log_holds_the_first_and_the_latest_rows(monkeypatch):
    monkeypatch.setattr(taps, "LATEST", 10)
    monkeypatch.setattr(taps, "FIRST", 2)
    log = TapLog(kernels.choose("cpu", "float32", "reference"), (0, 3), HIDDEN)
    number = 0

    def write(count: int, kept: list[int]) -> None:
        nonlocal number
        tail = log.append(count)
        tail.rows[:] = -1.0
        for row in kept:
            tail.rows[:, row] = float(number)
            number += 1
        log.commit(tail, kept, number - len(kept))

    for count, kept in ((5, [0, 1, 2, 3, 4]), (4, [1, 3]), (4, [0]), (7, list(range(7))), (3, [0, 1, 2]), (4, [])):
        write(count, kept)
    runs = log.take()
    assert [run.start for run in runs] == [0, 8] and log.nbytes == 0, "runs that follow one another are joined"
    assert [run.states.shape[1] for run in runs] == [2, 10]
    for run in runs:
        assert run.states[:, :, 0].tolist() == [[float(run.start + i) for i in range(run.states.shape[1])]] * 2
    write(2, [0, 1])
    assert [(run.start, run.states.shape) for run in log.take()] == [(18, (2, 2, HIDDEN))]


def test_forwards_copy_no_states_while_no_drafter_reads_them(tiny):
    model = load(tiny["gqa"]).with_taps((0, 2))
    ids, found = prompt_of(12), {}
    for off in (range(0), range(5, 9)):
        cache = model.new_cache()
        for place, token in enumerate(ids):
            cache.taps.follow(place not in off)
            model.forward(chain_rows([token], place), cache)
            assert (cache._tail.taps is None) == (place in off)
            cache.commit([0])
        found[off] = cache.taps.take()
    (whole,), (before, after) = found.values()
    assert (before.start, after.start) == (0, 9), "the positions go on"
    assert torch.equal(before.states, whole.cut(0, 5).states) and torch.equal(after.states, whole.cut(9, 12).states)


@pytest.mark.parametrize("name", ["eagle", "block"])
def test_states_that_a_drafter_has_not_read_belong_to_its_memory(tiny, name):
    model, params = load(tiny["gqa"]), SamplingParams(seed=1)
    factory = factory_of(name, model, model, tiny["gqa"])
    tapped = model.with_taps(factory.taps)
    cache = tapped.new_cache()
    drafter = factory(Resources(tapped, cache, Sampler(params), params))
    before = memory_of(drafter)
    tapped.forward(chain_rows(prompt_of(9), 0), cache)
    cache.commit(range(9))
    assert memory_of(drafter) - before == len(factory.taps) * 9 * HIDDEN * 4


def test_a_device_copies_states_always():
    """Its forwards are captured with the copies, and texts of a batch share one capture."""
    log = TapLog(SimpleNamespace(is_device=True), (0,), HIDDEN)
    log.follow(False)
    assert log.is_on


def test_wrong_taps_are_refused_before_memory_is_written(tiny):
    model = load(tiny["gqa"])
    kv = model.new_cache().append(*(torch.zeros(2, 1, 1, 12) for _ in range(2)))
    x, rotations = model.embed([5]), model.rotations([0])
    for layers, rows in (((0, 3), (2, 1, HIDDEN)), ((1, 1), (2, 1, HIDDEN)), ((0, 1), (2, 2, HIDDEN))):
        with pytest.raises(ValueError, match="CPU kernels want"):
            model.identity.forward(x, *rotations, [kv._replace(taps=Taps(layers, torch.zeros(rows)))],
                                   torch.tensor([-1], dtype=torch.int32))
