"""Guesses ranked on the device, and whole chains drafted there, against the host's definition.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.extents import extent
from helpers.recorded_graphs import RanGraph
from longdraft import kernels
from longdraft.cache.full import FullCache
from longdraft.checkpoint import config_file
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.plain import PlainDrafter
from longdraft.drafters.self_draft import MagicDecOptions, new_partial_cache
from longdraft.kernels import AttentionRows, launched
from longdraft.kernels.chain_plan import NEVER, ChainEnd, PlaceRows, Ranked
from longdraft.kernels.cpu.vocabulary import PartOfVocabulary
from longdraft.kernels.cuda import head_places
from longdraft.kernels.cuda.choices import ChoiceBuffers, Chosen
from longdraft.kernels.cuda.head_places import GivenLogits, PairPlaces
from longdraft.model.transformer import Forward, Transformer, chain_rows, tree_rows
from longdraft.parts.block import PairScorer, PairTerms
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling import process
from longdraft.sampling.sampler import Sampler, Shortlist
from longdraft.speculation.routine import run_alone, run_together
from longdraft.speculation.step import Step, Tally, Timings
from longdraft_bench.cuda.models import small_transformer, tiny_source

NAME = "triton-16"
LAWS = {
    "greedy": dict(temperature=0.0, repetition_penalty=1.3, penalty_window=9),
    "all tokens": dict(temperature=1.3, min_new_tokens=9),
    "paper": dict(min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "short window": dict(min_p=0.3, temperature=0.7, repetition_penalty=1.4, penalty_window=3, min_new_tokens=3),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("path, ahead, num, within", [([], 0, 1, math.inf), ([3, 8, 3, 5], 0, 5, 0.7),
                                                      ([7], 2, 16, math.inf)])
def test_the_device_ranks_the_guesses_that_the_filters_leave_as_the_host_does(law, path, ahead, num, within):
    vocabulary, params = 1300, SamplingParams(max_new_tokens=50, seed=2**64 - 59, **LAWS[law])
    context = Context([(7 * place) % 90 for place in range(40)])
    kernel = kernels.choose(DEVICE, "float32", NAME)
    host, device = Sampler(params, [5, 1200], is_fast=False), Sampler(params, [5, 1200], kernels=kernel)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(num)) * 3
    logits[:90] += 2
    logits[1250:] = -torch.inf
    before = logits.clone()
    with np.errstate(all="ignore"):
        expected, found = (s.ranked(logits.to(DEVICE), context, path, num, ahead, within) for s in (host, device))
    assert torch.equal(logits, before), "a drafter may read its logits again"
    assert found.lead == expected.lead and found.tokens
    assert found.tokens == expected.tokens[: len(found.tokens)]
    row = host._penalised(logits[None], context, [path], ahead)[0]
    kept = range(vocabulary) if params.temperature == 0 else process.filtered(row, params).ids
    assert not set(expected.tokens[len(found.tokens) :]) & set(kept)


def logits_of_places(places: int, vocabulary: int = 700) -> torch.Tensor:
    return torch.randn(places, vocabulary, generator=torch.Generator().manual_seed(places)) * 3


@pytest.mark.parametrize("law", extent(LAWS, ["paper", "greedy"]))
@pytest.mark.parametrize("has_part", [False, True])
def test_the_device_gives_the_shortlists_that_the_host_gives(law, has_part):
    """For the guesses that the filters leave, with the same scores. `ahead` tokens are not known before the first."""
    params, context = SamplingParams(max_new_tokens=50, seed=7, **LAWS[law]), Context([(7 * i) % 90 for i in range(40)])
    host = Sampler(params, [5], is_fast=False)
    device = Sampler(params, [5], kernels=kernels.choose(DEVICE, "float32", NAME))
    part = PartOfVocabulary(torch.arange(1, 700, 2), 700) if has_part else None
    logits = logits_of_places(3)[:, 1::2] if has_part else logits_of_places(3)
    for ahead in (0, 2):
        with np.errstate(all="ignore"):
            expected = launched.finished(host.shortlists(logits, context, 16, part, ahead))
            found = launched.finished(device.shortlists(logits.to(DEVICE), context, 16, part, ahead))
        for own, wanted in zip(found, expected, strict=True):
            count = len(own.tokens)
            assert count and own.tokens == wanted.tokens[:count]
            np.testing.assert_array_equal(own.scores, wanted.scores[:count])


def test_kernels_and_tensors_have_one_device():
    """Work whose logits are on the kernels' device is given to it: "cuda" is not equal to "cuda:0"."""
    kernel = kernels.choose(DEVICE, "float32", NAME)
    device = Sampler(SamplingParams(max_new_tokens=5, seed=1), kernels=kernel).on_device
    assert torch.zeros(1, device=DEVICE).device == kernel.device == device.device


def test_the_shortlists_of_several_texts_are_one_launch(monkeypatch):
    """Of unlike numbers of places."""
    kernel, sizes = kernels.choose(DEVICE, "float32", NAME), (3, 2, 4)
    launch, launches = GivenLogits._launch, list[int]()
    monkeypatch.setattr(GivenLogits, "_launch",
                        lambda self, parts: (launches.append(len(parts)), launch(self, parts))[1])

    def work(text: int) -> launched.LaunchedWork[list[Shortlist]]:
        params = SamplingParams(max_new_tokens=50, seed=text, **LAWS["paper"])
        context = Context([(7 * place + text) % 90 for place in range(20 + text)])
        return Sampler(params, [5], kernels=kernel).shortlists(logits_of_places(sizes[text]).to(DEVICE), context, 16)

    alone = [launched.finished(work(text)) for text in range(3)]
    results = run_together([work(text) for text in range(3)])
    assert launches == [1, 1, 1, 3]
    for found, wanted in zip(results, alone, strict=True):
        assert [each.tokens for each in found] == [each.tokens for each in wanted] and len(found) > 1
        assert all(np.array_equal(a.scores, b.scores) for a, b in zip(found, wanted, strict=True))


def pair_scores(kind: str, kernel: kernels.Kernels, part: PartOfVocabulary | None) -> PairScorer:
    """Random ones: the terms of DSpark, or of DFlash2, which selects among the best tokens of a place."""
    numbers = torch.Generator().manual_seed(5)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=numbers)

    terms = PairTerms(random(700, 16).to(DEVICE) / 20, kernel.pack(random(len(part.ids) if part else 700, 16)),
                      kernel.pack(random(16, 32)) if kind == "dflash2" else None,
                      None if kind == "dflash2" else kernel.pack(random(1, 48) / 4, random(1)))
    return PairScorer(kernel, terms, part and part.ids, part)


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
@pytest.mark.parametrize("law", extent(LAWS, ["paper"]))
def test_places_that_depend_on_the_token_before_are_ranked_in_one_launch_as_the_host_ranks_them(kind, law, monkeypatch):
    """Of one text, and of several with unlike numbers of places; of the first places, or after unknown tokens."""
    kernel, params = kernels.choose(DEVICE, "float32", NAME), SamplingParams(max_new_tokens=50, seed=7, **LAWS[law])
    part = PartOfVocabulary(torch.arange(1, 700, 2).to(DEVICE), 700) if kind == "dspark" else None
    pairs, launch, launches = pair_scores(kind, kernel, part), PairPlaces._launch, list[int]()
    monkeypatch.setattr(PairPlaces, "_launch",
                        lambda self, parts: (launches.append(len(parts)), launch(self, parts))[1])
    hosts, devices = [], []
    for text, count in enumerate((3, 2, 4)):
        context = Context([(7 * place + text) % 90 for place in range(20 + text)])
        normed = torch.randn(count, 32, generator=torch.Generator().manual_seed(count)).to(DEVICE)
        logits = logits_of_places(count, 350 if part else 700).to(DEVICE)
        gates = kernel.linear(normed, pairs.terms.gate).float() if pairs.terms.gate else None
        wanted = PlaceRows(logits, normed, gates), pairs, context, context.last, 16, 2 * (text == 1)
        with np.errstate(all="ignore"):
            hosts.append(launched.finished(Sampler(params, [5], is_fast=False).paired_shortlists(*wanted)))
        devices.append(partial(Sampler(params, [5], kernels=kernel).paired_shortlists, *wanted))
    alone = [launched.finished(each()) for each in devices]
    together = run_together([each() for each in devices])
    assert launches == [1, 1, 1, 2, 1], "those after unknown tokens by themselves"
    assert any(len(own.shortlist.tokens) > 1 for found in alone for own in found)
    for found, same, expected in zip(alone, together, hosts, strict=True):
        assert len(found) == len(same) == len(expected)
        before = 1
        for own, again, wanted in zip(found, same, expected, strict=True):
            count = len(own.shortlist.tokens)
            assert count and own.shortlist.tokens == again.shortlist.tokens == wanted.shortlist.tokens[:count]
            np.testing.assert_allclose(own.shortlist.scores, wanted.shortlist.scores[:count], atol=1e-4)
            assert own.table.shape == (before, count)
            np.testing.assert_allclose(own.table, wanted.table[:before, :count], atol=1e-4)
            # A device multiplies several texts' pairs in another order: drafts owe no bits.
            np.testing.assert_allclose(own.table, again.table, atol=1e-4)
            assert own.trust == pytest.approx(again.trust, abs=1e-5) == pytest.approx(wanted.trust, abs=1e-5)
            before = count


def test_places_that_depend_on_the_token_before_end_after_one_without_guesses():
    kernel, params = kernels.choose(DEVICE, "float32", NAME), SamplingParams(max_new_tokens=50, seed=7, min_p=0.05)
    pairs, logits, context = pair_scores("dspark", kernel, None), logits_of_places(3).to(DEVICE), Context(range(20))
    logits[1] = torch.nan
    for sampler in (Sampler(params, [5], is_fast=False), Sampler(params, [5], kernels=kernel)):
        with np.errstate(all="ignore"):
            places = PlaceRows(logits.clone(), torch.randn(3, 32).to(DEVICE), None)
            first, last = launched.finished(sampler.paired_shortlists(places, pairs, context, context.last, 16))
        assert first.shortlist.tokens and not last.shortlist.tokens
        assert last.table.shape == (len(first.shortlist.tokens), 0)


def test_graphs_have_as_many_texts_as_their_logits_have_room_for(monkeypatch):
    monkeypatch.setattr(head_places, "_MOST_BYTES", 5 * 4 * 2 * 700)
    part = SimpleNamespace(logits=logits_of_places(2))
    assert GivenLogits(0)._most_texts([part] * 9) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_guesses(bad):
    params = SamplingParams(max_new_tokens=5, seed=1)
    device = Sampler(params, kernels=kernels.choose(DEVICE, "float32", NAME))
    logits = torch.zeros(50, device=DEVICE)
    logits[7] = bad
    with np.errstate(all="ignore"):
        found = device.ranked(logits, Context([1, 2]), [], 2)
    assert found.tokens == [] and found.lead == math.inf


@pytest.fixture(scope="module")
def model() -> Transformer:
    settings, weights = tiny_source()
    weights = {name: 3 * tensor.to(DEVICE) for name, tensor in weights.items()}
    return small_transformer(config_file.parse_config(settings), weights, kernels.choose(DEVICE, "float32", NAME))


PROMPT = [(5 * place + place // 7) % 40 for place in range(31)]


@pytest.fixture(scope="module")
def prompt(model: Transformer) -> tuple[FullCache, Forward]:
    """The cache of the prompt, and its forward. Drafts do not change them."""
    cache = model.new_cache()
    result = model.forward(chain_rows(PROMPT[:-1], 0), cache)
    cache.commit(range(len(PROMPT) - 1))
    return cache, result


class Drafting:
    """Chains after the prompt, drafted on the device, or step by step with the host's ranking."""

    def __init__(self, model: Transformer, prompt: tuple[FullCache, Forward], law: str, on_host: bool) -> None:
        cache, result = prompt
        self.partial = new_partial_cache(MagicDecOptions(budget=16, sinks=2, refresh=5), model, cache)
        self.partial.update(AttentionRows.all(result.attention_output))
        self.draft_model = SelfDraftModel(model, self.partial)
        params = SamplingParams(max_new_tokens=50, seed=3, **LAWS[law])
        self.sampler = Sampler(params, [1], kernels=None if on_host else model.kernels, is_fast=False)
        self.context, self._on_host = Context(PROMPT), on_host

    def draft(self, path: list[int], length: int, width: int, end: ChainEnd) -> list[Ranked]:
        for place in range(len(path) - 1):  # the rows of the path, as the drafter has computed them before
            run_alone(self.draft_model.next_logits(self.context, path[: place + 1]))
        chain = Chain(self.draft_model, self.sampler, width, "self", 0.8)
        if self._on_host:
            return run_alone(chain.step_by_step(self.context, path, length, end))
        found = launched.finished(chain.in_one_call(self.context, path, length, end))
        assert found is not None
        return found

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.partial._base.stores[0].read(torch.arange(self.partial.length, device=DEVICE)[None])


CHAINS = [
    ("paper", [PROMPT[-1]], 5, 3, NEVER), ("greedy", [PROMPT[-1], 4], 2, 1, NEVER),
    ("short window", [PROMPT[-1]], 3, 2, ChainEnd((0.5,), (0.3, 0.9), 0.5)),
]


@pytest.mark.parametrize("law, path, length, width, end", extent(CHAINS, CHAINS[2:]))
def test_a_chain_on_the_device_is_the_chain_of_single_steps(model, prompt, law, path, length, width, end, monkeypatch):
    """Guesses, leads, and the keys and values in the partial cache, to the bit; the host waits for the device once."""
    waits = []
    honest = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    device, host = (Drafting(model, prompt, law, on_host) for on_host in (False, True))
    whole, steps = (each.draft(path, length, width, end) for each in (device, host))
    assert waits == [length]
    assert [place.tokens[0] for place in whole] == [place.tokens[0] for place in steps]
    assert [place.lead for place in whole] == [place.lead for place in steps]
    for ours, theirs in zip(whole, steps, strict=True):
        assert ours.tokens == theirs.tokens[: len(ours.tokens)]
    for ours, theirs in zip(device.rows, host.rows, strict=True):
        assert torch.equal(ours, theirs)


def test_the_graphs_of_four_tokens_and_of_one_serve_every_chain(model, prompt, monkeypatch):
    """They are captured once: places, lengths and rotations are in the device's memory."""
    drafting, ran = Drafting(model, prompt, "paper", on_host=False), []
    monkeypatch.setattr(model.kernels.graphs, "run", lambda owner, work, key=None: (
        ran.append(RanGraph(owner, key)), work()))
    first = drafting.draft(PROMPT[-1:], 5, 1, NEVER)
    drafting.partial.drop_drafts()
    again = drafting.draft(PROMPT[-1:], 1, 1, NEVER)
    assert first[:1] == again and len(first) == 5
    assert [graph.key[0] for graph in ran] == [4, 1, 1] and len(set(ran)) == 2


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
def test_a_plain_step_is_two_graphs_one_launch_and_one_wait(model, prompt, monkeypatch):
    """Layers, then norm, head, choice and walk. Beside them rows are kept in the cache. No step needs a new graph."""
    from triton.runtime import interpreter

    cache, _ = prompt
    params = SamplingParams(max_new_tokens=50, seed=3, **LAWS["paper"])
    graphs, sampler, length = model.kernels.graphs, Sampler(params, [1], kernels=model.kernels), cache.length
    step = Step(model, cache, PlainDrafter(), sampler, Context(PROMPT), Timings(), Tally())
    replays, launches, waits = [], [], []

    def replay(owner: object, work: Callable[[], None], key: object = None) -> None:
        before = len(launches)
        work()
        replays.append(RanGraph(owner, key))
        del launches[before:]

    launch, read = interpreter.GridExecutor.__call__, Chosen.read
    monkeypatch.setattr(graphs, "run", replay)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *args, **named: (launches.append(self.fn.__name__), launch(self, *args, **named)))
    monkeypatch.setattr(Chosen, "read", lambda self: waits.append(1) or read(self))
    for _ in range(2):
        run_alone(step.run(1))
    cache.truncate(length)
    assert launches == ["scatter_rows_kernel"] * 2 and len(waits) == 2
    assert len(replays) == 4 and replays[:2] == replays[2:] and isinstance(replays[1].owner, ChoiceBuffers)


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("tree", [Tree((7,), (-1,), ("",)), Tree((7, 1, 2), (-1, 0, 0), ("", "liar", "liar"))])
def test_before_its_layers_a_forward_copies_one_tensor_and_launches_nothing(model, prompt, tree, monkeypatch):
    """Tokens, positions, rotations and parents are uploaded together; the graph embeds them. The device is idle then.

    The graph has three kernels (paths, which one row does not need, embedding, norm) and ten for each layer: four
    products, rotation, attention and the merge of its splits, activation, sum and norm twice.
    """
    from triton.runtime import interpreter

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    cache, _ = prompt
    names: list[str] = []
    launches: list[str] = []
    launch, graphs, length = interpreter.GridExecutor.__call__, model.kernels.graphs, cache.length
    before: list[list[str]] = []

    def replay(owner: object, work: Callable[[], None], key: object = None) -> None:
        before.extend([names.copy(), launches.copy()])
        with monkeypatch.context() as patch:
            patch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **named: (
                launches.append(self.fn.__name__), launch(self, *args, **named)))
            work()

    model.forward(tree_rows(tree, length), cache, len(tree))  # allocates buffers
    cache.commit([])
    monkeypatch.setattr(graphs, "run", replay)
    with Recorder():
        model.forward(tree_rows(tree, length), cache, len(tree))
    cache.commit([])
    views = {"slice", "view", "split", "split_with_sizes", "expand", "detach", "lift_fresh", "alias"}
    on_host = {"index", "cat", "_to_copy"} if len(tree) > 1 else set()  # rotations of several rows
    assert [name for name in before[0] if name not in views | on_host] == ["empty", "empty", "copy_"]
    assert before[1] == [] and len(launches) == 2 + (len(tree) > 1) + 10 * model.config.num_layers
