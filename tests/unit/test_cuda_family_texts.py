"""Several texts of hybrids, mixtures and Gemmas in one graph: each has the bits that it has alone.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.cuda_kernels import DEVICE, HAS_CUDA, rows_of
from helpers.cuda_texts import agree, by_definition, load
from helpers.equality import prompt_of
from helpers.families import make_family
from helpers.recorded_graphs import RanGraph, watched
from longdraft.cache.full import FullCache
from longdraft.drafters.auto.calibration import random_cache
from longdraft.model.transformer import ForwardRequest, Transformer, tree_rows
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree

pytestmark = pytest.mark.full

LENGTHS = [300, 2, 41] if HAS_CUDA else [140, 2, 41]  # 140: more than a split
TREES = [Tree((7,), (-1,), ("",)), Tree((3, 9, 4), (-1, 0, 0), ("", "a", "a")), Tree((5, 1), (-1, 0), ("", "a"))]
PLAIN = [Tree((token,), (-1,), ("",)) for token in (7, 3, 5)]
# Delta layers and a shared expert; sinks, windows and experts; soft caps; heads of two sizes, shared keys, own inputs
FAMILIES = {"qwen3_next": dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention",
                                                                  "linear_attention"]),
            "gpt_oss": dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
            "gemma2": dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
            "gemma4, inputs": {}}
Parts = dict[int, list[torch.Tensor]]


class Made(NamedTuple):
    model: Transformer
    caches: list[FullCache]

    def cache(self, length: int) -> FullCache:
        """Random rows and states."""
        cache = random_cache(self.model, length)
        for place, state in enumerate(cache.states.current if cache.states else ()):
            state.matrix.copy_(rows_of(*state.matrix.shape, seed=length + place))
            state.history.copy_(rows_of(*state.history.shape, seed=length + place + 50))
        return cache


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("family")
    make_family(folder, request.param, **FAMILIES[request.param])
    made = Made(load(folder).with_taps((1,)), [])
    return made._replace(caches=[made.cache(length) for length in LENGTHS])


def maps_of(made: Made, text: int) -> object:
    """A remainder for the text: one tensor, or one of each layer where the heads differ."""
    maps = [0.3 * rows_of(made.model.config.num_heads, store.dim + 1, store.dim + 1, seed=10 * text + layer)
            for layer, store in enumerate(made.caches[0].stores)]
    return torch.stack(maps) if len({each.shape for each in maps}) == 1 else tuple(maps)


def forward(made: Made, order: list[int], trees: list[Tree] = TREES, caches: list[FullCache] | None = None) -> Parts:
    """What the forward of some texts computes for each, states and their inputs among it."""
    caches = caches or made.caches
    requests = [ForwardRequest(made.model, tree_rows(trees[text], caches[text].length), caches[text], len(trees[text]))
                for text in order]
    found = {}
    for text, result in zip(order, made.model.forward_batch(requests), strict=True):
        cache, (k, v) = caches[text], caches[text].provisional
        parts = [result.logits, result.hidden, *k, *v, *result.attention_output, cache._tail.taps.rows]
        if cache.states:
            parts += [part for rows in cache.states._tail for part in (rows.mixed, rows.gates, *rows.after)]
        found[text] = [part.clone() for part in parts]
        cache.commit([])
    return found


@contextmanager
def graphs_of(model: Transformer) -> Iterator[list[RanGraph]]:
    """The graphs that run."""
    with pytest.MonkeyPatch.context() as patch:
        yield watched(patch, model.kernels.graphs)


def same(found: Parts, expected: Parts) -> bool:
    return all(len(parts) == len(expected[text]) and all(map(torch.equal, parts, expected[text]))
               for text, parts in found.items())


def test_a_text_of_any_family_has_its_own_bits_whatever_its_company(made):
    """Of unlike lengths, with trees of unlike sizes, shuffled, and when one leaves or another comes."""
    with by_definition(made.model):
        definition = forward(made, [0, 1, 2])
    with graphs_of(made.model) as ran:
        one_by_one = {text: forward(made, [text])[text] for text in range(3)}
        assert all(agree(one_by_one[text], definition[text]) for text in range(3))
        assert len(set(ran)) == 3
        ran.clear()
        for order in ([0, 1, 2], [2, 0, 1], [1, 0]):
            assert same(forward(made, order), one_by_one), order
        assert len(ran) == 3 and ran[0] == ran[1], "a graph belongs to numbers of texts and rows"
        assert ran[2] != ran[0] and (ran[0].owner.texts, ran[2].owner.texts) == (4, 2)
        newcomer = [*made.caches[:2], made.cache(41)]
        forward(made, [0, 1, 2], caches=newcomer)
        assert ran[3] == ran[0]
        newcomer[2].reserve(600)
        assert same(forward(made, [0, 1], caches=newcomer), one_by_one)
        forward(made, [1, 2, 0], caches=newcomer)
        places, stores = ran[5].owner.where.view(-1, 2).tolist(), newcomer[1].stores
        assert places[3] == [0, 256] and places[1][1] > stores[0].capacity, "a padding text's own place"


def test_texts_with_remainders_share_a_graph_and_have_their_own_bits(made, monkeypatch):
    """Each with maps of its own. If only some have any, and sinks are part of these, each text has a graph."""
    append, remainders = FullCache.append, {id(made.caches[text]): maps_of(made, text) for text in range(3)}
    monkeypatch.setattr(FullCache, "append", lambda self, k, v: append(self, k, v)._replace(
        remainder=remainders.get(id(self))))
    with by_definition(made.model):
        definition = forward(made, [0, 1, 2])
    with graphs_of(made.model) as ran:
        one_by_one = {text: forward(made, [text])[text] for text in range(3)}
        assert all(agree(one_by_one[text], definition[text]) for text in range(3))
        ran.clear()
        for order in ([0, 1, 2], [2, 1, 0], [1, 0]):
            assert same(forward(made, order), one_by_one), order
        assert len(ran) == 3 and ran[0] == ran[1] and len(set(ran)) == 2
        remainders[id(made.caches[1])] = None
        alone = forward(made, [1])[1]
        ran.clear()
        mixed = forward(made, [0, 1])
        assert same({0: mixed[0]}, one_by_one) and same({1: mixed[1]}, {1: alone})
        assert not same({1: alone}, one_by_one)
        assert len(ran) == (2 if any(layer.sinks is not None for layer in made.model.weights.layers) else 1)


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
def test_a_graph_of_several_texts_has_as_many_kernels_as_that_of_one_and_few_operations_beside_it(made, monkeypatch):
    """One block is uploaded for all texts, and one copy of each result made, but for taps and the inputs of states."""
    from triton.runtime import interpreter

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    names: list[str] = []
    launches: list[str] = []
    inside: list[tuple[int, int]] = []  # operations before the graph of the layers, and launches in it
    launch, run = interpreter.GridExecutor.__call__, made.model.kernels.graphs.run
    monkeypatch.setattr(interpreter.GridExecutor, "__call__",
                        lambda self, *args, **named: (launches.append(self.fn.__name__), launch(self, *args, **named)))

    def replay(owner: object, work: object, key: object = None) -> None:
        before, others = len(launches), list(names)
        run(owner, work, key)
        inside.append((others.count("copy_") + others.count("index_copy_"), len(launches) - before))
        names[:] = others

    counts = []
    with monkeypatch.context() as patch:
        patch.setattr(made.model.kernels.graphs, "run", replay)
        for order in ([0], [0, 1], [0, 1, 2]):
            forward(made, order, PLAIN)
            names.clear(), inside.clear()
            with Counting():
                forward(made, order, PLAIN)
            counts.append((*inside[0], names.count("copy_"), names.count("cat")))
    one, two, three = counts
    of_a_text = 1 + (2 if made.caches[0].states else 0)
    assert one[:2] == two[:2] == three[:2]
    assert three[2] - two[2] == of_a_text and three[3] == two[3]


def test_texts_of_a_batch_are_the_plain_ones(tmp_path, monkeypatch):
    """Of a hybrid, whose states change places with each commit."""
    monkeypatch.setenv("LONGDRAFT_KERNELS", "triton-16")
    make_family(tmp_path, "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    engine = longdraft.load(str(tmp_path), drafter="suffix", device=DEVICE, dtype="float32")
    params = [SamplingParams(max_new_tokens=new, seed=3, ignore_eos=True, temperature=temperature)
              for new, temperature in ((6, 0.0), (3, 0.7), (4, 0.0))]
    prompts = [prompt_of(length) for length in (17, 5, 9)]
    alone = [[token for event in engine.generate(prompt, each) for token in event.tokens]
             for prompt, each in zip(prompts, params, strict=True)]
    batch = engine.batch()
    texts = {batch.add(prompt, each): list[int]() for prompt, each in zip(prompts, params, strict=True)}
    while batch:
        for text, event in batch.step():
            assert event.error is None, event.error
            texts[text].extend(event.tokens)
    assert list(texts.values()) == alone
