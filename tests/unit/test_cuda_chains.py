"""Chains of several texts in one graph: each is the chain that the text drafts alone, whatever its company.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.checkpoints import make_checkpoint
from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.cuda_texts import NAME, load
from helpers.recorded_graphs import RanGraph, watched
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.chain import Chain, SelfDraftModel
from longdraft.drafters.self_draft import MagicDecOptions, new_partial_cache
from longdraft.kernels import AttentionRows, launched
from longdraft.kernels.chain_plan import NEVER, ChainEnd, Ranked
from longdraft.kernels.cuda import chain_rows
from longdraft.kernels.cuda.model_chain import ModelChains
from longdraft.kernels.launched import Launched, finished, read_together
from longdraft.model.transformer import Transformer
from longdraft.model.transformer import chain_rows as rows_of_chain
from longdraft.parts.draft_copy import load_copy
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler

pytestmark = pytest.mark.full

LAWS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0.0, repetition_penalty=1.3, penalty_window=9),
    "all tokens": dict(temperature=1.3),
    "paper": dict(min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "short window": dict(min_p=0.3, temperature=0.7, repetition_penalty=1.4, penalty_window=3, min_new_tokens=3),
    "top-p": dict(temperature=1.2, top_p=0.8),
    "qwen": dict(temperature=0.9, top_k=6, top_p=0.7, repetition_penalty=1.05, logit_bias=((7, 2.5), (3, -1.0))),
    "eta": dict(eta_cutoff=0.05, min_p=0.2, min_tokens_to_keep=3),
}


class Case(NamedTuple):
    """A text, of which a partial cache holds 21 rows, and its chains. path: drafted tokens before each."""

    law: str
    length: int
    count: int
    width: int = 2
    margin: float = 0.8
    path: tuple[int, ...] = ()
    end: ChainEnd = NEVER


CASES = [Case("paper", 60, 5), Case("greedy", 9, 1, 1, math.inf), Case("short window", 31, 3, 3, 1.5, (4,)),
         Case("all tokens", 45, 6, end=ChainEnd((0.5,), (0.3, 0.9), 0.5)), Case("paper", 26, 2, 1)]
FILTERED = [Case("qwen", 28, 3, 3), Case("greedy", 34, 2, 1, math.inf), Case("top-p", 9, 5, 4, math.inf),
            Case("eta", 30, 4, 3, 1.5), Case("paper", 40, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("chains")
    make_checkpoint(root, seed=1, num_hidden_layers=2, hidden_size=32, intermediate_size=32, num_attention_heads=2,
                    num_key_value_heads=1)
    return root


@pytest.fixture(scope="module", params=[NAME, NAME + "-k8v4"] if HAS_CUDA else [NAME])
def model(request: pytest.FixtureRequest, folder: Path) -> Transformer:
    return load(folder, request.param)


class Text:
    """A text after random rows, which drafts with `drafting` on a partial cache of the target's."""

    def __init__(self, case: Case, model: Transformer, drafting: Transformer) -> None:
        self.case, self.model = case, model
        params = SamplingParams(max_new_tokens=50, seed=case.length, **LAWS[case.law])
        self.sampler = Sampler(params, [1], kernels=model.kernels)
        self.context = Context([(7 * place + case.length) % 90 for place in range(case.length)])
        self.cache = random_cache(model, case.length - 4, 64)
        self.partial = new_partial_cache(MagicDecOptions(budget=16, sinks=2, refresh=5), model, self.cache)
        self.draft_model = SelfDraftModel(drafting, self.partial)
        self.verify(self.context.slice(case.length - 4, case.length - 1).tolist())

    def verify(self, tokens: Sequence[int]) -> None:
        """The target's rows of these tokens, from which the remainder is fitted."""
        result = self.model.forward(rows_of_chain(tokens, self.cache.length), self.cache)
        self.cache.commit(range(len(tokens)))
        self.partial.update(AttentionRows.all(result.attention_output))

    def drafts(self) -> Any:
        case = self.case
        path = [self.context.last, *case.path]
        for place in range(len(case.path)):  # the rows of the path, as the drafter has computed them before
            finished(Chain(self.draft_model, self.sampler, 1, "self", 0.0).in_one_call(
                self.context, path[: place + 1], 1))
        chain = Chain(self.draft_model, self.sampler, case.width, "self", case.margin)
        return chain.in_one_call(self.context, path, case.count, case.end)

    def state(self, places: list[Ranked]) -> list[object]:
        """The chain: guesses, leads, keys and values."""
        rows = torch.arange(self.partial.length, device=DEVICE)[None]
        return [places, [part.tolist() for store in self.partial._base.stores for part in store.read(rows)]]

    def accept(self, tokens: Sequence[int]) -> None:
        """The chain is over, and these tokens are written."""
        self.partial.drop_drafts()
        self.verify([self.context.last, *tokens[:-1]])
        self.context.extend(tokens)


def drafted_together(texts: Sequence[Text]) -> list[list[object]]:
    routines = [text.drafts() for text in texts]
    read_together([next(routine) for routine in routines])
    return [text.state(finished(routine)) for text, routine in zip(texts, routines, strict=True)]


def count_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Gets the texts of each launch for several texts, chains that a text launches for itself, and waits."""
    found: dict[str, list[Any]] = {"together": [], "alone": [], "waits": []}
    launch, copy = ModelChains.launch, launched.copied_to_host
    monkeypatch.setattr(ModelChains, "launch", lambda self, chains: (
        found["alone" if len(chains) == 1 else "together"].append(len(chains)), launch(self, chains))[1])
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: found["waits"].append(len(rows)) or copy(rows))
    return found


@pytest.mark.parametrize("weights", ["same", "int8", "int4"])
def test_a_text_drafts_the_chain_that_it_drafts_alone(folder, model, weights, monkeypatch):
    """Guesses, leads, keys and values, to the bit: of unlike lengths and settings, with and without a remainder."""
    drafting = load_copy(TensorFiles(folder), model, weights) or model
    assert drafting.weights.head.scale is None or weights != "same"
    cases = CASES if weights == "same" else CASES[::2]
    alone, together = ([Text(case, model, drafting) for case in cases] for _ in range(2))
    assert [text.partial.draft_stores.remainder is None for text in alone] == [case.length < 21 for case in cases]
    expected = [text.state(finished(text.drafts())) for text in alone]
    counted = count_launches(monkeypatch)
    found = drafted_together(together)
    assert found == expected
    chains = [case.count for case in cases]
    assert counted == {"together": [len(cases)], "alone": [1] * sum(len(case.path) for case in cases),
                       "waits": [1] * sum(len(case.path) for case in cases) + [sum(chains)]}
    assert {len(places) for places, _ in found} >= {2, 3, 5}, "chains of unlike lengths, whose end one text sets"


def test_a_text_among_texts_with_filters_drafts_the_chain_that_it_drafts_alone(model, monkeypatch):
    """Top-k, top-p, eta and `logit_bias` of some texts, of which others have some or none."""
    alone, together = ([Text(case, model, model) for case in FILTERED] for _ in range(2))
    expected = [text.state(finished(text.drafts())) for text in alone]
    counted = count_launches(monkeypatch)
    assert drafted_together(together) == expected
    assert counted == {"together": [5], "alone": [], "waits": [16]}
    assert max(len(place.tokens) for place in expected[2][0]) == 4, "the filter leaves several guesses"


@pytest.mark.parametrize("cases", [[CASES[0], CASES[3], CASES[4]], [FILTERED[0], CASES[3], FILTERED[4]]])
def test_a_graph_serves_shuffled_texts_and_those_that_are_left(model, cases, monkeypatch):
    """Tokens that were written meanwhile are uploaded with the settings. A newcomer needs no graph of its own."""
    texts, alone = ([Text(case, model, model) for case in cases] for _ in range(2))
    ran: list[RanGraph] = []
    written = [[5, 7], [3], [8, 2, 6]]
    for place, order in enumerate(([0, 1, 2], [2, 0, 1], [1, 2], [0, 1])):
        if place == 3:  # the first text has left, and another one begins
            newcomer = Case("greedy" if cases[0] in CASES else "qwen", 33, 4)
            texts[0], alone[0] = (Text(newcomer, model, model) for _ in range(2))
        expected = [alone[text].state(finished(alone[text].drafts())) for text in order]
        with monkeypatch.context() as patch:
            now = watched(patch, model.kernels.graphs)
            assert drafted_together([texts[text] for text in order]) == expected
        ran += now
        for group in (texts, alone):
            for text in order:
                group[text].accept(written[text])
    assert len({graph.owner for graph in ran}) == 2, "of four texts, and of two"
    assert {graph.key[0] for graph in ran} == {4, 1}
    assert len({graph.key[1] for graph in ran}) == 1 + (cases[0] not in CASES), "with the filters, and without"


def test_texts_that_do_not_fit_take_several_graphs_and_one_wait(model, monkeypatch):
    monkeypatch.setattr(chain_rows, "MAX_TEXTS", 2)
    alone, together = ([Text(case, model, model) for case in CASES[:3]] for _ in range(2))
    for group in (alone, together):
        group[2].case = group[2].case._replace(path=())
    expected = [text.state(finished(text.drafts())) for text in alone]
    counted = count_launches(monkeypatch)
    assert drafted_together(together) == expected
    assert counted == {"together": [3], "alone": [], "waits": [9]}


def test_many_new_tokens_are_copied_by_themselves(model):
    """More than are uploaded with the settings: after a prompt."""
    alone, together = ([Text(case, model, model) for case in CASES[:2]] for _ in range(2))
    for text in (*alone, *together):
        assert len(text.context) < chain_rows.MAX_FRESH or text.case.length == 60
    for text in alone:
        text.state(finished(text.drafts()))
    drafted_together(together)
    for group in (alone, together):
        for text in group:
            text.accept([11, 12, 13] * 7)
    assert drafted_together(together) == [text.state(finished(text.drafts())) for text in alone]


def test_logits_that_are_not_finite_end_the_chain_of_their_own_text_only(model):
    texts = [Text(case, model, model) for case in CASES[:2]]
    for store in texts[0].partial._base.stores:
        store.v[:, 3] = torch.nan
    expected = finished(Text(CASES[1], model, model).drafts())
    damaged, sound = drafted_together(texts)
    assert damaged[0] == [Ranked([], math.inf)] and sound[0] == expected


@pytest.mark.parametrize("written", [[11, 12, 13], [11, 12, 13] * 7])
@pytest.mark.parametrize("failing", ["all", "second of two graphs"])
def test_where_the_launch_for_all_fails_each_text_launches_its_own(model, failing, written, monkeypatch, caplog):
    """Tokens that the failed launch uploaded are not appended again."""
    texts, alone = ([Text(case, model, model) for case in CASES[:2]] for _ in range(2))
    for text in alone:
        text.state(finished(text.drafts()))
    drafted_together(texts)
    for text in (*texts, *alone):
        text.accept(written)
    expected = [text.state(finished(text.drafts())) for text in alone]

    name, launched_parts = "launch" if failing == "all" else "_launch", list[int]()
    launch = getattr(ModelChains, name)

    def fail(self: ModelChains, chains: Any) -> Any:
        launched_parts.append(len(chains))
        if len(chains) > 1 if failing == "all" else len(launched_parts) == 2:
            raise MemoryError("no memory for the chains")
        return launch(self, chains)

    monkeypatch.setattr(chain_rows, "MAX_TEXTS", 64 if failing == "all" else 1)
    monkeypatch.setattr(ModelChains, name, fail)
    assert drafted_together(texts) == expected
    assert launched_parts == ([2, 1, 1] if failing == "all" else [1, 1, 1, 1])
    assert "drafts of 2 texts cannot be launched together: no memory for the chains" in caplog.text
    for text in texts:
        held, length = text.sampler.on_device._held, len(text.context)
        assert held.length == length and held.tokens[:length].tolist() == text.context.slice(0, length).tolist()


def test_work_that_fails_alone_is_an_error_of_its_own_text(model):
    def fail() -> torch.Tensor:
        raise MemoryError("no memory for this text")

    work = launched.Shareable(ModelChains(None), None, fail)
    other = Launched(torch.arange(3, device=DEVICE)[None])
    read_together([work, other])
    assert other._on_host is not None and other.read().tolist() == [[0, 1, 2]]
    with pytest.raises(MemoryError, match="this text"):
        work.read()


class Recorder(TorchDispatchMode):
    """Remembers the operations of PyTorch that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ("copy_", "fill_", "cat", "stack", "index", "_to_copy", "clone"):
            self.names.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("num, filters, more", [(2, [], 0), (5, [], 0), (2, FILTERED[2:3], 11),
                                                (4, [FILTERED[0], FILTERED[3]], 1 + 20 + 9 + 2)])
def test_chains_are_two_copies_one_launch_and_one_wait_however_many_texts(model, num, filters, more, monkeypatch):
    """Beside the graphs. The graph of a place has as many kernels as that of one text with a penalty.

    more  kernels of a place for texts with filters: `logit_bias`, top-k and top-p, tokens left at least, eta
    """
    from triton.runtime import interpreter

    cases = [*filters, *CASES][:num]
    texts = [Text(case._replace(path=()), model, model) for case in cases]
    drafted_together(texts)
    for text in texts:
        text.accept([5, 7])
    recorder, graphs = Recorder(), model.kernels.graphs
    launches, inside, ran, waits = list[str](), list[list[str]](), list[int](), list[int]()

    def replay(owner: object, work: Any, key: object = None) -> None:
        before, names = len(launches), len(recorder.names)
        run(owner, work, key)
        ran.append(key[0])
        inside.append(launches[before:])
        del launches[before:], recorder.names[names:]

    def launch(executor: Any, *args: Any, **named: Any) -> None:
        launches.append(executor.fn.__name__)
        names = len(recorder.names)
        honest(executor, *args, **named)
        del recorder.names[names:]

    run, honest, copy = graphs.run, interpreter.GridExecutor.__call__, launched.copied_to_host
    monkeypatch.setattr(graphs, "run", replay)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(1) or copy(rows))
    routines = [text.drafts() for text in texts]
    with recorder:
        read_together([next(routine) for routine in routines])
    assert waits == [1] and launches == ["append_tokens_kernel", *["read_filters_kernel"][: len(filters)]]
    longest = max(case.count for case in cases)
    assert ran == [4] * (longest // 4) + [1] * (longest % 4)
    assert recorder.names == ["copy_", "copy_", "cat"], "two uploads, and the guesses of all texts"
    layer = 11  # rotation, remainder, attention and its merge, four products, activation, sum and norm twice
    # Begin; norm; head; penalty; largest logits; ranking; end. A text of the five may not end yet: bans.
    kernels = 1 + 1 + 2 * layer + 3 + 2 + 1 + 2 + 1 + (num == 5) + more
    assert [len(each) for each in inside] == [size * kernels for size in ran]
