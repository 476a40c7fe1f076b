"""Chains that mixtures, Gemmas, gpt-oss and hybrids draft on the device, against single steps ranked by the host.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.cuda_kernels import DEVICE, HAS_CUDA, rows_of
from helpers.cuda_texts import load
from helpers.families import make_family
from helpers.recorded_graphs import watched
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.plain import PlainDrafter
from longdraft.drafters.self_draft import MagicDecOptions, new_partial_cache
from longdraft.kernels import AttentionRows, launched
from longdraft.kernels.chain_plan import Ranked
from longdraft.kernels.cuda import model_chain
from longdraft.kernels.cuda.decoder import CudaDecoder
from longdraft.kernels.cuda.model_chain import ModelChains
from longdraft.kernels.launched import finished, read_together
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Trie
from longdraft.sampling.sampler import Sampler
from longdraft.speculation import ahead
from longdraft.speculation.ahead import PlainAhead
from longdraft.speculation.routine import run_alone
from longdraft.speculation.step import Step, Tally, Timings

pytestmark = pytest.mark.full

_TWO = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_hidden_layers=2), "gemma3": _TWO, "gpt_oss": _TWO, "gemma2": _TWO, "ministral3": {},
    "gemma4, inputs": dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
    "qwen3_next": dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])}
LAW = dict(min_p=0.1, repetition_penalty=1.2, penalty_window=1024, min_new_tokens=2)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp("family")
    make_family(folder, request.param, **FAMILIES[request.param])
    return load(folder)


class Drafting:
    """Chains of a text after random rows, of which a partial cache holds 21: on the device, or step by step with the
    host's ranking."""

    def __init__(self, model: Transformer, length: int, on_host: bool = False, count: int = 5, width: int = 2) -> None:
        self.model, self._on_host, self._count, self._width = model, on_host, count, width
        self.context = Context([(7 * place + length) % 90 for place in range(length)])
        self.cache = random_cache(model, length - 4, 64)
        for place, state in enumerate(self.cache.states.current if self.cache.states else ()):
            state.matrix.copy_(rows_of(*state.matrix.shape, seed=length + place))
            state.history.copy_(rows_of(*state.history.shape, seed=length + place + 50))
        self.partial = new_partial_cache(MagicDecOptions(budget=16, sinks=2, refresh=5), model, self.cache)
        result = model.forward(chain_rows(self.context.slice(length - 4, length - 1).tolist(), length - 4), self.cache)
        self.cache.commit(range(3))
        self.partial.update(AttentionRows.all(result.attention_output))
        self.draft_model = SelfDraftModel(model, self.partial)
        self.sampler = Sampler(SamplingParams(max_new_tokens=50, seed=length, **LAW), [1],
                               kernels=None if on_host else model.kernels, is_fast=False)

    def routine(self, count: int) -> Any:
        return self.chain.in_one_call(self.context, [self.context.last], count)

    @property
    def chain(self) -> Chain:
        return Chain(self.draft_model, self.sampler, self._width, "self", 0.8)

    def draft(self, count: int) -> list[Ranked]:
        if self._on_host:
            return run_alone(self.chain.step_by_step(self.context, [self.context.last], count))
        found = finished(self.routine(count))
        assert found is not None
        return found

    @property
    def rows(self) -> list[torch.Tensor]:
        """Keys and values of the partial cache, and the states after the chain."""
        every = torch.arange(self.partial.length, device=DEVICE)[None]
        held = [part for store in self.partial._base.stores for part in store.read(every)]
        states = self.partial._states.current if self.partial._states else ()
        return held + [part for state in states for part in state]


@pytest.mark.parametrize("length", [60, 12])
def test_a_chain_of_a_family_is_the_chain_of_single_steps(model, length, monkeypatch):
    """With a remainder and without one: guesses, leads, keys, values and states, to the bit. The host waits once, and
    the graphs of four tokens and of one serve the next chain."""
    waits, honest = list[int](), launched.copied_to_host
    device, host = (Drafting(model, length, on_host) for on_host in (False, True))
    assert isinstance(model._decoder, CudaDecoder)
    assert (device.partial.draft_stores.remainder is None) == (length == 12)
    expected = [host.draft(5), host.rows]
    with monkeypatch.context() as patch:
        patch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
        ran = watched(patch, model.kernels.graphs)
        whole = device.draft(5)
        assert [place.lead for place in whole] == [place.lead for place in expected[0]]
        assert all(ours.tokens == theirs.tokens[: len(ours.tokens)] and ours.tokens
                   for ours, theirs in zip(whole, expected[0], strict=True))
        assert len(device.rows) == len(expected[1]) and all(map(torch.equal, device.rows, expected[1]))
        device.partial.drop_drafts()
        assert device.draft(2) == whole[:2]
    assert waits == [5, 2] and [graph.key[0] for graph in ran] == [4, 1, 1, 1] and len(set(ran)) == 2


LENGTHS, COUNTS = (60, 41, 50, 12), (3, 1, 2, 2)  # the last one has no remainder


def drafted_together(texts: Sequence[Drafting], counts: Sequence[int]) -> list[list[Any]]:
    routines = [text.routine(count) for text, count in zip(texts, counts, strict=True)]
    read_together([next(routine) for routine in routines])
    return [[finished(routine), text.rows] for text, routine in zip(texts, routines, strict=True)]


def same(found: Sequence[list[Any]], expected: Sequence[list[Any]]) -> bool:
    return all(places == wanted and len(rows) == len(others) and all(map(torch.equal, rows, others))
               for (places, rows), (wanted, others) in zip(found, expected, strict=True))


@pytest.mark.parametrize("model", ["gpt_oss", "gemma4, inputs", "qwen3_next"], indirect=True)
def test_chains_of_several_texts_of_a_family_are_those_that_each_drafts_alone(model, monkeypatch):
    """Of unlike lengths, shuffled, and when one leaves and one without a remainder comes: guesses, leads, keys, values
    and states, to the bit. One launch and one wait for all."""
    together, waits = list[tuple[int, set[Any]]](), list[int]()
    launch, honest = ModelChains._launch, launched.copied_to_host
    alone = []

    def counted(self: ModelChains, parts: Sequence[Any]) -> torch.Tensor:
        """Counts the texts, and the memory of their graphs."""
        ran.clear()
        outcome = launch(self, parts)
        together.append((len(parts), {graph.owner for graph in ran}))
        return outcome

    for length, count in zip(LENGTHS, COUNTS, strict=True):
        text = Drafting(model, length)
        alone.append([text.draft(count), text.rows])
    texts = [Drafting(model, length) for length in LENGTHS]
    monkeypatch.setattr(ModelChains, "_launch", counted)
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    ran = watched(monkeypatch, model.kernels.graphs)
    for order in ([0, 1, 2], [2, 0, 3, 1]):
        for text in texts:
            text.partial.drop_drafts()
        some, counts = [texts[place] for place in order], [COUNTS[place] for place in order]
        assert same(drafted_together(some, counts), [alone[place] for place in order])
        assert waits.pop() == sum(counts) and not waits
    counts, owners = zip(*together, strict=True)
    assert owners[0] == owners[1] and len(owners[0]) == 1
    if any(layer.sinks is not None for layer in model.weights.layers):
        assert counts == (3, 3, 1) and not owners[0] & owners[2], "remainders contain the sinks"
    else:
        assert counts == (3, 4)


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"], indirect=True)
def test_the_graph_of_several_texts_has_the_kernels_of_one_text(model, monkeypatch):
    """Those that edit and rank the logits as well."""
    from triton.runtime import interpreter

    counts, launches = dict[Any, list[str]](), list[str]()
    launch, run = interpreter.GridExecutor.__call__, model.kernels.graphs.run
    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *args, **named: (launches.append(self.fn.__name__), launch(self, *args, **named)))

    def replay(owner: object, work: Any, key: object = None) -> None:
        launches.clear()
        run(owner, work, key)
        counts[type(owner)] = sorted(launches)

    monkeypatch.setattr(model.kernels.graphs, "run", replay)
    Drafting(model, 60).draft(1)
    one = counts.pop(model_chain._Buffers)
    drafted_together([Drafting(model, 60), Drafting(model, 41)], [1, 1])
    assert one == counts[model_chain._Buffers] and {"read_window_kernel", "penalise_kernel", "ban_kernel"} <= {*one}


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3_next"], indirect=True)
def test_the_host_launches_two_graphs_for_a_chain_of_five_and_waits_once(model, monkeypatch):
    """And a kernel beside them, which appends the tokens that are new to the device. Token by token it is a graph of
    the layers and one of the ranking, more launches and a wait for each."""
    from triton.runtime import interpreter

    graphs, launches, waits = list[Any](), list[str](), list[int]()
    launch, run, honest = interpreter.GridExecutor.__call__, model.kernels.graphs.run, launched.copied_to_host

    def replay(owner: object, work: Any, key: object = None) -> None:
        before = len(launches)
        run(owner, work, key)
        graphs.append(owner)
        del launches[before:]

    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *args, **named: (launches.append(self.fn.__name__), launch(self, *args, **named)))
    monkeypatch.setattr(model.kernels.graphs, "run", replay)
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    found, counts = [], []
    for is_on in (True, False):
        text = Drafting(model, 60)
        chain = Chain(text.draft_model, text.sampler, 2, "self", 0.8)
        if not is_on:
            monkeypatch.setattr(text.draft_model, "plan", lambda *given: None)
        found.append(run_alone(chain.draft(Trie(text.context.last), text.context, [text.context.last], 1))[1])
        text.partial.drop_drafts()
        graphs.clear(), launches.clear(), waits.clear()
        found.append(run_alone(chain.draft(Trie(text.context.last), text.context, [text.context.last], 5))[1])
        counts.append((len(graphs), len(launches), len(waits)))
    assert found[:2] == found[2:] and counts == [(2, 1, 1), (10, 25, 5)]


@pytest.mark.parametrize("model", ["qwen3_next"], indirect=True)
def test_a_chain_goes_token_by_token_where_no_graph_can_hold_it(model, monkeypatch):
    """A chain after drafts would write to the states that it continues, which a capture needs twice."""
    text = Drafting(model, 12)
    with monkeypatch.context() as patch:
        patch.setattr(model._decoder, "can_capture", False)
        assert finished(text.routine(1)) is None
    first = text.draft(1)[0].tokens[0]
    path = [text.context.last, first]
    assert finished(text.chain.in_one_call(text.context, path, 1)) is None


@pytest.mark.parametrize("model", ["gpt_oss", "gemma3", "qwen3_next"], indirect=True)
def test_plain_decoding_of_a_family_is_computed_ahead_of_the_host(model, monkeypatch):
    """Tokens and rows are those of single steps, to the bit. A hybrid takes single steps."""
    monkeypatch.setattr(ahead, "LONG_TEXT", 1)
    found, waits, honest = [], list[int](), launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    for is_ahead in (True, False):
        cache, sampler = random_cache(model, 40, 64), Sampler(SamplingParams(max_new_tokens=9, seed=11, **LAW), [1],
                                                             kernels=model.kernels)
        context = Context([(7 * place) % 90 for place in range(41)])
        step = Step(model, cache, PlainDrafter(), sampler, context, Timings(), Tally(),
                    ahead=PlainAhead(model, cache, sampler) if is_ahead else None)
        while context.num_new < 9:
            run_alone(step.run(9 - context.num_new))
        every = torch.arange(cache.length, device=DEVICE)[None]
        found.append([context.slice(41, 50).tolist(), [part for store in cache.stores for part in store.read(every)]])
    assert same(*([each] for each in found)) and waits == ([] if cache.states else [4])
