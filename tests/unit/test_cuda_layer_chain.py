"""Chains that trained layers draft on the device, against the chains of single steps with the host's ranking.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

from helpers.checkpoints import VOCAB, load_glide, make_checkpoint, make_glide
from helpers.cuda_kernels import DEVICE, HAS_CUDA
from helpers.eagle import load_eagle, make_eagle
from helpers.recorded_graphs import RanGraph, RecordedGraphs, watched
from longdraft import kernels
from longdraft.checkpoint import checkpoint, config_file
from longdraft.checkpoint.tensor_files import TensorFiles
from longdraft.drafters.chain import Chain
from longdraft.drafters.eagle import EagleDraftModel
from longdraft.drafters.glide import GlideDraftModel
from longdraft.kernels import launched
from longdraft.kernels.chain_plan import NEVER, ChainEnd, Ranked
from longdraft.kernels.cuda.kv_store import move_rows
from longdraft.kernels.cuda.layer_chain import LayerChains
from longdraft.kernels.launched import LaunchedWork, read_together
from longdraft.model.transformer import Transformer, chain_rows
from longdraft.parts.eagle import Eagle
from longdraft.parts.glide import Glide
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone

pytestmark = pytest.mark.full

PROMPT = [(3 * place + place // 5) % 40 for place in range(14)]
DIALECTS = {
    "EAGLE-3": dict(taps=(0, 1), draft_vocab=50, norm_before_residual=True),
    "EAGLE 3.1, own table": dict(taps=(0, 1), fc_norm=True, norm_output=True, has_own_embedding=True, layers=2),
    "EAGLE-1": dict(version=1, taps=(1,), uses_taps=False, draft_vocab=VOCAB),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layers")
    make_checkpoint(root, seed=1, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                    num_key_value_heads=1)
    return root


def load(folder: Path, dialect: str) -> tuple[Transformer, Eagle | Glide]:
    chosen = kernels.choose(DEVICE, "float32", "triton-16")
    model = checkpoint.load_transformer(TensorFiles(folder), config_file.read_config(folder), chosen)
    if dialect == "glide":
        if not (folder / "glide").exists():
            make_glide(folder / "glide", folder)
        return model, load_glide(folder / "glide", model)
    head = folder / dialect.replace(" ", "-")
    if not head.exists():
        make_eagle(head, **dict(target=32, hidden=32, heads=2, kv_heads=1, dim=16, inner=48) | DIALECTS[dialect])
    eagle = load_eagle(head, model)
    return model.with_taps(eagle.taps), eagle


class Drafting:
    """Chains of a head or a layer after the prompt: on the device, or step by step with the host's ranking."""

    def __init__(self, model: Transformer, head: Eagle | Glide, law: dict[str, float], on_host: bool,
                 length: int = len(PROMPT), window: int = 64, sinks: int = 4) -> None:
        cache, self.prompt = model.new_cache(), PROMPT[-length:]
        model.forward(chain_rows(self.prompt[:-1], 0), cache)
        cache.commit(range(length - 1))
        self._model, self._cache = model, cache
        self.draft_model = (GlideDraftModel(head, model, cache, 8) if isinstance(head, Glide)
                            else EagleDraftModel(head, cache, window, sinks, 8))
        params = SamplingParams(max_new_tokens=50, seed=3, **law)
        self.sampler = Sampler(params, [1], kernels=None if on_host else model.kernels, is_fast=False)
        self.context, self._on_host = Context(self.prompt), on_host

    def draft(self, length: int, width: int, end: ChainEnd) -> list[Ranked]:
        if self._on_host:
            return run_alone(self.chain(width).step_by_step(self.context, [self.context.last], length, end))
        found = launched.finished(self.launch(length, width, end))
        assert found is not None
        return found

    def launch(self, length: int, width: int, end: ChainEnd) -> LaunchedWork[list[Ranked] | None]:
        return self.chain(width).in_one_call(self.context, [self.context.last], length, end)

    def go_on(self, tokens: list[int]) -> None:
        """The target reads the last token and `tokens`, but the last one of them."""
        start = len(self.context) - 1
        self._model.forward(chain_rows([self.context.last, *tokens[:-1]], start), self._cache)
        self._cache.commit(range(len(tokens)))
        self.context.extend(tokens)

    def chain(self, width: int) -> Chain:
        return Chain(self.draft_model, self.sampler, width, "eagle", 0.8)

    def chain_rows(self, count: int) -> list[object]:
        """As `rows`, on the host. The last guess has no row yet."""
        return [part.tolist() for part in self.rows(count)]

    def rows(self, count: int) -> list[torch.Tensor]:
        """Keys and values of the text and of `count` drafts."""
        every = torch.arange(self.draft_model.rows.num_text + count, device=DEVICE)
        return [part for store in self.draft_model.rows.stores for part in store.read(every[None])]


PAPER = dict(min_p=0.1, repetition_penalty=1.2, penalty_window=1024, min_new_tokens=2)
CASES = [("EAGLE-3", PAPER, 6, 3, NEVER), ("EAGLE 3.1, own table", dict(temperature=0.0), 2, 1, NEVER),
         ("EAGLE-1", dict(temperature=1.3), 3, 2, ChainEnd((0.5,), (0.3, 0.9), 0.5)),
         ("EAGLE-3", PAPER, 1, 1, NEVER), ("glide", PAPER, 6, 2, NEVER)]


@pytest.mark.parametrize("dialect, law, length, width, end", CASES)
def test_a_chain_on_the_device_is_the_chain_of_single_steps(folder, dialect, law, length, width, end, monkeypatch):
    """Guesses, leads, keys and values, to the bit; the host waits once, and the graphs serve the next chain."""
    waits, ran = [], []
    honest = launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    model, head = load(folder, dialect)
    device, host = (Drafting(model, head, law, on_host) for on_host in (False, True))
    graphs = model.kernels.graphs
    monkeypatch.setattr(graphs, "run", lambda owner, work, key=None: (ran.append(RanGraph(owner, key)), work()))
    whole, steps = (each.draft(length, width, end) for each in (device, host))
    sizes = {1: [0], 2: [0, 1], 3: [0, 1, 1], 6: [0, 4, 1]}[length]
    assert waits == [length] and [graph.key[0] for graph in ran] == sizes
    assert [place.tokens[0] for place in whole] == [place.tokens[0] for place in steps]
    assert [place.lead for place in whole] == [place.lead for place in steps]
    for ours, theirs in zip(whole, steps, strict=True):
        assert ours.tokens == theirs.tokens[: len(ours.tokens)]
    drafted = len(steps) - 1  # the last guess has no row yet
    assert all(torch.equal(a, b) for a, b in zip(device.rows(drafted), host.rows(drafted), strict=True))
    assert device.draft_model.rows.num_drafts == (drafted if dialect == "glide" else 0), "true drafts stay as text"
    assert device.draft(length, width, end) == whole and len(set(ran)) == len({graph.key[0] for graph in ran})


class CapturedGraphs(RecordedGraphs):
    """As a device has them: a capture runs the work once, and the replay begins from the state before."""

    def run_in_turn(self, owner, pieces, begin):
        if not all(self.holds(owner, key) for key, _ in pieces):
            super().run_in_turn(owner, pieces, begin)
        super().run_in_turn(owner, pieces, begin)


is_captured = pytest.mark.parametrize("is_captured", [False, pytest.param(True, marks=pytest.mark.skipif(
    HAS_CUDA, reason="a device captures graphs itself, and the record is one of the interpreter"))])
# Steps of a text: tokens that it gets, in windows that they fill and leave.
STEPS = [[5], [7, 9, 5], [3, 8, 2, 6, 1], [4, 4], [11, 2, 3, 4, 5, 6, 7, 8, 9]]


@is_captured
@pytest.mark.parametrize("dialect, window, sinks",
                         [("EAGLE-3", 64, 4), ("EAGLE-3", 10, 2), ("EAGLE 3.1, own table", 9, 0), ("EAGLE-1", 12, 3)])
def test_new_rows_of_a_text_are_read_on_the_device_with_the_bits_of_the_host(
        folder, dialect, window, sinks, is_captured, monkeypatch):
    """Guesses and rows after each step, also where the window slides and its first rows turn, and where a graph is
    recorded, which runs its work before. The host runs no layer and waits once; the graphs serve all steps."""
    model, head = load(folder, dialect)
    device, host = (Drafting(model, head, PAPER, on_host, window=window, sinks=sinks) for on_host in (False, True))
    assert device.draft(3, 2, NEVER)[0].tokens[0] == host.draft(3, 2, NEVER)[0].tokens[0]
    waits, keys, honest = [], set(), launched.copied_to_host
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(len(rows)) or honest(rows))
    if is_captured:
        model.kernels.graphs = CapturedGraphs(model.kernels.device)
    graphs = model.kernels.graphs
    for step, tokens in enumerate(STEPS):
        for each in (device, host):
            each.go_on(tokens)
        with monkeypatch.context() as patch:
            patch.setattr(Eagle, "forward", lambda *given: pytest.fail("the host runs the layers"))
            ran = watched(patch, graphs)
            waits.clear()
            whole = device.draft(3, 2, NEVER)
        keys |= {graph.key[0] for graph in ran}
        assert waits == [3]
        steps = host.draft(3, 2, NEVER)
        assert [place.lead for place in whole] == [place.lead for place in steps]
        assert [place.tokens[0] for place in whole] == [place.tokens[0] for place in steps]
        host.draft_model.rows.num_drafts = 0
        assert device.draft_model.rows.num_text == host.draft_model.rows.num_text == min(
            len(device.context) - 1, window + sinks)
        assert all(torch.equal(a, b) for a, b in zip(device.rows(0), host.rows(0), strict=True)), step
        host.draft_model._forget_drafts(0)
        assert torch.equal(device.draft_model._outputs[0], host.draft_model._outputs[0])
    assert is_captured or keys == {(8, 16), (16, 16), 1}
    path = [device.context.last, 3]
    found, wanted = (run_alone(each.draft_model.next_logits(each.context, path)) for each in (device, host))
    assert torch.equal(found, wanted), "single steps go on from what the device has read"


@is_captured
def test_new_rows_of_several_texts_are_read_together_with_the_bits_of_each_alone(folder, is_captured, monkeypatch):
    """Unlike numbers of new rows and of moves, one text that has read all its rows already, and a padding text."""
    model, head = load(folder, "EAGLE-3")
    steps = [[5], [7, 9, 5, 4], []]
    if is_captured:
        model.kernels.graphs = CapturedGraphs(model.kernels.device)

    def begun() -> list[Drafting]:
        texts = [Drafting(model, head, PAPER, False, window=window, sinks=sinks)
                 for window, sinks in ((10, 2), (64, 4), (11, 0))]
        for text, tokens in zip(texts, steps, strict=True):
            text.draft(1, 1, NEVER)
            text.go_on(tokens) if tokens else None
        return texts

    alone = [[text.draft(3, 2, NEVER), text.chain_rows(0)] for text in begun()]
    together = begun()
    monkeypatch.setattr(Eagle, "forward", lambda *given: pytest.fail("the host runs the layers"))
    routines = [text.launch(3, 2, NEVER) for text in together]
    read_together([next(routine) for routine in routines])
    assert [[launched.finished(routine), text.chain_rows(0)] for routine, text in
            zip(routines, together, strict=True)] == alone


@pytest.mark.parametrize("name", ["triton-16", "triton-16-kv8", "triton-16-k8v4"])
def test_rows_are_moved_and_turned_as_the_host_does_it_in_stores_with_and_without_scales(name):
    """Rows that make room, and first rows that turn, in two layers; moves without a target do nothing."""
    chosen = kernels.choose(DEVICE, "float32", name)
    moved, expected = ([chosen.new_store(2, 16) for _ in range(2)] for _ in range(2))
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 9, 2, 16, device=DEVICE)
    for stores in (moved, expected):
        for store, keys, values in zip(stores, k, v, strict=True):
            store.write(0, keys, values)
    angles = torch.arange(8, device=DEVICE)[None] / 7
    turn = torch.stack([angles.cos(), angles.sin()], 1)
    moves = torch.tensor([[[7, 0, 1], [8, 2, 0], [-1, -1, -1]]], device=DEVICE)
    move_rows(moved, moves, turn, None)
    for store in expected:
        every = torch.tensor([[7, 8]], device=DEVICE).expand(2, -1)
        keys, values = (part.transpose(0, 1).contiguous() for part in store.read(every))
        store.write(0, chosen.rope(keys[:1], *turn.unbind(1)), values[:1])
        store.write(2, keys[1:], values[1:])
    rows = torch.arange(9, device=DEVICE).expand(2, -1)
    for ours, theirs in zip(moved, expected, strict=True):
        for a, b in zip(ours.read(rows), theirs.read(rows), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_rows_that_no_device_reads_after_all_are_read_by_the_host(folder):
    """A ranker declines a plan, single steps follow, and texts go on while rows are unread."""
    model, head = load(folder, "EAGLE-3")
    device, host = (Drafting(model, head, PAPER, on_host, window=10, sinks=2) for on_host in (False, True))
    for each in (device, host):
        each.draft(2, 1, NEVER)
    for tokens in STEPS[:3]:
        for each in (device, host):
            each.go_on(tokens)
        plan = device.draft_model.plan(device.context, [device.context.last], 2)
        again = device.draft_model.plan(device.context, [device.context.last], 2)
        assert plan.layers.unread.moves == again.layers.unread.moves and plan.stores == again.stores
        if len(tokens) != 3:
            found, wanted = (run_alone(each.draft_model.next_logits(each.context, [each.context.last, 3]))
                             for each in (device, host))
            assert torch.equal(found, wanted)
        host.draft(1, 1, NEVER)
    host.draft_model._forget_drafts(0)
    assert all(torch.equal(a, b) for a, b in zip(device.rows(0), host.rows(0), strict=True))


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.needs_cuda
def test_a_capture_changes_no_guess(folder):
    """Graphs are captured by running them: the first chain must be drafted from the state before that."""
    model, head = load(folder, "EAGLE-3")
    first = Drafting(model, head, PAPER, on_host=False)
    found = first.draft(6, 2, NEVER)
    model.kernels.graphs.is_on = False
    assert Drafting(model, head, PAPER, on_host=False).draft(6, 2, NEVER) == found == first.draft(6, 2, NEVER)


TEXTS = [(PAPER, 6, 3, NEVER), (dict(temperature=0.0), 1, 1, NEVER), (dict(temperature=1.3), 3, 2, CASES[2][4])]


@pytest.mark.parametrize("dialect", ["EAGLE-3", "EAGLE 3.1, own table", "glide"])
def test_chains_of_several_texts_are_those_that_each_drafts_alone(folder, dialect, monkeypatch):
    """Guesses, leads, keys and values, to the bit: texts and chains of unlike lengths, with other settings, shuffled,
    and when one leaves or comes. One launch for all, and graphs that belong to no text."""
    launches, waits, ran = list[int](), list[int](), list[RanGraph]()
    honest, launch = launched.copied_to_host, LayerChains._launch
    monkeypatch.setattr(launched, "copied_to_host", lambda rows: waits.append(1) or honest(rows))
    monkeypatch.setattr(LayerChains, "_launch", lambda self, parts: (
        launches.append(len(parts)), launch(self, parts))[1])
    model, head = load(folder, dialect)

    def text(place: int) -> Drafting:
        return Drafting(model, head, TEXTS[place][0], on_host=False, length=(14, 3, 9)[place])

    together = [text(place) for place in range(3)]
    graphs = model.kernels.graphs
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        if len(order) == 2:
            together[1] = text(1)
        expected = []
        for place in order:
            alone = text(place)
            expected.append([alone.draft(*TEXTS[place][1:]), alone.chain_rows(TEXTS[place][1] - 1)])
        with monkeypatch.context() as patch:
            now = watched(patch, graphs)
            routines = [together[place].launch(*TEXTS[place][1:]) for place in order]
            waits.clear()
            read_together([next(routine) for routine in routines])
        ran += now
        found = [[launched.finished(routine), together[place].chain_rows(TEXTS[place][1] - 1)]
                 for place, routine in zip(order, routines, strict=True)]
        assert found == expected and waits == [1]
    assert launches == [1, 1, 1, 3, 1, 1, 1, 3, 1, 1, 2], "each text by itself, then one launch for all"
    assert [graph.key[0] for graph in ran] == [0, 4, 1, 0, 4, 1, 0, 1, 1] and len({graph.owner for graph in ran}) == 2
    stores = [weakref.ref(store) for text in together for store in text.draft_model.rows.stores]
    del together, routines, alone
    gc.collect()
    assert not any(store() for store in stores), "shared graphs keep no stores of texts that have ended"
