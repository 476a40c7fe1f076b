"""Guesses of heads and of small draft models, computed on the device, against those that are ranked place by place.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it


from helpers.checkpoints import VOCAB, make_checkpoint, make_heads
from helpers.cuda_kernels import DEVICE, HAS_CUDA, OperationRecorder, rows_of
from helpers.recorded_graphs import RanGraph, watched
from longdraft import kernels
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.chain import Chain
from longdraft.drafters.streaming_model import StreamingDraftModel
from longdraft.drafters.template import ranked_heads
from longdraft.kernels import launched
from longdraft.kernels.chain_plan import Heads
from longdraft.kernels.cuda import ranker
from longdraft.kernels.cuda.head_places import HeadPlaces
from longdraft.kernels.launched import LaunchedWork
from longdraft.model.transformer import Transformer
from longdraft.parts import heads
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone
from longdraft_bench.cuda.models import small_transformer, tiny_source

pytestmark = pytest.mark.full

PROMPT = [(5 * place + place // 7) % 40 for place in range(20)]
LAWS = {
    "greedy": dict(temperature=0.0, repetition_penalty=1.3, penalty_window=9),
    "paper": dict(min_p=0.02, repetition_penalty=1.2, penalty_window=1024, min_new_tokens=9),
    "llama": dict(temperature=0.9, top_p=0.95),
    "biased": dict(top_k=9, logit_bias=((8, 3.0),), eta_cutoff=0.01),
}


def samplers(model: Transformer, law: str) -> tuple[Sampler, Sampler]:
    """On the host, and on the device."""
    params = SamplingParams(max_new_tokens=50, seed=3, **LAWS[law])
    return Sampler(params, [1], is_fast=False), Sampler(params, [1], kernels=model.kernels)


@pytest.fixture(scope="module")
def small() -> Transformer:
    settings, weights = tiny_source()
    weights = {name: 3 * tensor.to(DEVICE) for name, tensor in weights.items()}
    return small_transformer(config_file.parse_config(settings), weights, kernels.choose(DEVICE, "float32",
                                                                                          "triton-16"))


@pytest.mark.parametrize("law", ["paper", "llama"])
def test_a_small_model_drafts_the_chain_of_single_steps(small, law, monkeypatch):
    """Through accepted and rejected drafts, after drafted tokens, and where its window is full."""
    waits = []
    honest = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    both = [(StreamingDraftModel(small, small.config.vocab_size, 30, 2, 4), sampler, Context(PROMPT))
            for sampler in samplers(small, law)]
    accepted: list[list[int]] = [[], [7, 9], []]
    for step, path in enumerate(([], [3, 8], [])):
        found = []
        for draft_model, sampler, context in both:
            context.extend(accepted[step])
            chain = Chain(draft_model, sampler, 2, "draft", 0.8)
            whole = [context.last, *path]
            if sampler.on_device is None:
                found.append(run_alone(chain.step_by_step(context, whole, 3)))
            else:
                places = launched.finished(chain.in_one_call(context, whole, 3))
                assert places is not None
                found.append(places)
        host, device = found
        assert [place.lead for place in device] == [place.lead for place in host]
        assert [place.tokens[0] for place in device] == [place.tokens[0] for place in host]
        accepted[(step + 1) % 3] += [host[0].tokens[0]] * (step == 1)
    assert waits == [3, 3, 3]
    draft_model, sampler, context = both[1]
    context.extend([5, 6, 4, 5, 6, 4])
    length = draft_model.cache.length
    chain = Chain(draft_model, sampler, 2, "draft", 0.8)
    assert launched.finished(chain.in_one_call(context, [context.last], 3)) is None, "the window moves"
    assert draft_model.cache.length <= length
    again = run_alone(Chain(draft_model, sampler, 2, "draft", 0.8).step_by_step(context, [context.last], 3))
    fresh = StreamingDraftModel(small, small.config.vocab_size, 30, 2, 4)
    assert again == run_alone(Chain(fresh, sampler, 2, "draft", 0.8).step_by_step(context, [context.last], 3))


def test_a_small_model_with_another_vocabulary_drafts_token_by_token(small):
    _, sampler = samplers(small, "greedy")
    draft_model = StreamingDraftModel(small, small.config.vocab_size + 3, 30, 2, 4)
    chain = Chain(draft_model, sampler, 1, "draft")
    assert launched.finished(chain.in_one_call(Context(PROMPT), PROMPT[-1:], 3)) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    base = make_checkpoint(root, seed=1, num_hidden_layers=1, hidden_size=32, intermediate_size=48,
                           num_attention_heads=2, num_key_value_heads=1)
    make_heads(root / "heads", base)
    return root


@pytest.fixture(scope="module")
def model(folder: Path) -> Transformer:
    chosen = kernels.choose(DEVICE, "float32", "triton-16")
    return checkpoint.load_transformer(TensorFiles(folder), config_file.read_config(folder), chosen)


@pytest.mark.parametrize("law, has_first", [("greedy", False), ("paper", True), ("llama", False)])
def test_heads_rank_on_the_device_what_they_rank_place_by_place(folder, model, law, has_first, monkeypatch):
    """One wait for all places. The graph serves every number of drafted tokens in front."""
    trained, context = heads.load_heads(folder / "heads", model), Context(PROMPT)
    hidden, first = rows_of(1, 32, seed=4), rows_of(1, VOCAB, seed=5) if has_first else None
    waits, ran = [], []
    honest = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    monkeypatch.setattr(model.kernels.graphs, "run", lambda owner, work, key=None: (
        ran.append(RanGraph(owner, key)), work()))
    both = samplers(model, law)
    for path in ([], [3, 8]):
        expected, found = (launched.finished(ranked_heads(each, trained, hidden, first, context, path, [3, 1]))
                           for each in both)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours and ours == theirs[: len(ours)]
    assert waits == [2, 2] and len(ran) == 2 and len(set(ran)) == 1
    assert torch.equal(hidden, rows_of(1, 32, seed=4))


class Guesses(NamedTuple):
    """What the heads guess for a text of `length` tokens. path: drafted tokens in front of the first place."""

    law: str
    length: int
    widths: tuple[int, ...]
    path: tuple[int, ...] = ()

    def of(self, model: Transformer, trained: Heads, has_first: bool) -> LaunchedWork[list[list[int]]]:
        sampler = Sampler(SamplingParams(max_new_tokens=50, seed=self.length, **LAWS[self.law]), [1],
                          kernels=model.kernels)
        text = Context([(7 * place + self.length) % 40 for place in range(self.length)])
        hidden, first = rows_of(1, 32, seed=self.length), rows_of(1, VOCAB, seed=5) if has_first else None
        return ranked_heads(sampler, trained, hidden, first, text, self.path, self.widths)


TEXTS = [Guesses("paper", 20, (3, 1)), Guesses("greedy", 7, (1,), (4, 2)), Guesses("llama", 41, (2, 2, 4)),
         Guesses("biased", 12, (2, 1), (9,)), Guesses("paper", 33, (1, 4, 1))]


def ranked_together(texts: Sequence[LaunchedWork[list[list[int]]]]) -> list[list[list[int]]]:
    launched.read_together([next(text) for text in texts])
    return [launched.finished(text) for text in texts]


@pytest.mark.parametrize("has_first", [False, True])
def test_heads_of_several_texts_guess_what_they_guess_for_each_alone(folder, model, has_first, monkeypatch):
    """With other settings and numbers of places, shuffled, and when one leaves or comes: one graph, and one wait."""
    trained, waits, alone = heads.load_heads(folder / "heads", model), list[int](), list[int]()
    honest, launch = launched.copied_to_host, HeadPlaces.launch
    expected = [launched.finished(text.of(model, trained, has_first)) for text in TEXTS]
    assert all(len(each) == len(text.widths) and all(each) for each, text in zip(expected, TEXTS, strict=True))
    monkeypatch.setattr(HeadPlaces, "launch", lambda self, parts: (
        alone.extend([1] * (len(parts) == 1)), launch(self, parts))[1])
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(1) or honest(rows))
    ran = watched(monkeypatch, model.kernels.graphs)
    for order in ([0, 1, 2, 3], [2, 4, 0, 3], [4, 3, 2], [2, 1]):
        found = ranked_together([TEXTS[place].of(model, trained, has_first) for place in order])
        assert found == [expected[place] for place in order]
    assert waits == [1] * 4 and alone == [] and len(ran) == 4
    owners = [graph.owner for graph in ran]
    assert owners[0] is owners[2] and len({(graph.owner, graph.key[0]) for graph in ran}) == 2, "of four and of two"


def test_heads_with_and_without_logits_of_the_first_place_have_a_graph_each(folder, model):
    trained = heads.load_heads(folder / "heads", model)
    expected = [launched.finished(text.of(model, trained, place % 2 > 0)) for place, text in enumerate(TEXTS)]
    assert ranked_together([text.of(model, trained, place % 2 > 0) for place, text in enumerate(TEXTS)]) == expected


def test_the_switch_launches_the_heads_of_each_text(folder, model, monkeypatch):
    trained = heads.load_heads(folder / "heads", model)
    expected = [launched.finished(text.of(model, trained, True)) for text in TEXTS[:2]]
    monkeypatch.setattr(ranker, "SHARES_CHAINS", False)
    launch = HeadPlaces.launch
    monkeypatch.setattr(HeadPlaces, "launch", lambda self, parts: (
        launch(self, parts) if len(parts) == 1 else pytest.fail("heads are shared")))
    assert ranked_together([text.of(model, trained, True) for text in TEXTS[:2]]) == expected


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("num, has_first", [(2, True), (5, False)])
def test_heads_are_one_graph_three_copies_and_one_wait_however_many_texts(folder, model, num, has_first, monkeypatch):
    """With as many kernels as the graph of one text, filters apart."""
    from triton.runtime import interpreter

    trained, texts = heads.load_heads(folder / "heads", model), [Guesses("paper", 14, (3, 1))] * num
    launches, inside, waits, recorder = list[str](), list[int](), list[int](), OperationRecorder()
    run, call, honest = model.kernels.graphs.run, interpreter.GridExecutor.__call__, launched.copied_to_host

    def replay(owner: object, work: Any, key: object = None) -> None:
        before, names = len(launches), len(recorder.names)
        run(owner, work, key)
        inside.append(len(launches) - before)
        del launches[before:], recorder.names[names:]

    def count_launch(executor: object, *args: object, **named: object) -> None:
        launches.append(executor.fn.__name__)
        names = len(recorder.names)
        call(executor, *args, **named)
        del recorder.names[names:]

    ranked_together([text.of(model, trained, has_first) for text in texts])  # allocates buffers, and records
    monkeypatch.setattr(model.kernels.graphs, "run", replay)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", count_launch)
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(1) or honest(rows))
    launched.finished(texts[0].of(model, trained, has_first))
    waits.clear()
    work = [text.of(model, trained, has_first) for text in texts]
    begun = [next(each) for each in work]
    launches.clear()
    with recorder:
        launched.read_together(begun)
    assert len(inside) == 2 and inside[0] == inside[1] and waits == [1] and launches == ["append_tokens_kernel"]
    assert recorder.names == ["copy_", "cat", *["cat"][: has_first], "cat"], "inputs; rows; logits; the guesses of all"
