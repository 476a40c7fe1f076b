"""The tokens of several texts are chosen in one graph on the device: each has the tokens and rows that it has alone.

Without a device in Triton's interpreter (see helpers.cuda_kernels).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")  # before what needs it

import longdraft
from helpers.checkpoints import make_checkpoint
from helpers.cuda_kernels import DEVICE, HAS_CUDA, OperationRecorder
from helpers.equality import prompt_of
from helpers.recorded_graphs import RanGraph, watched
from longdraft import kernels
from longdraft.checkpoint import config_file
from longdraft.drafters.auto.calibration import random_cache
from longdraft.drafters.plain import PlainDrafter
from longdraft.kernels.cuda import choices
from longdraft.kernels.cuda.choices import ChoiceBuffers, Chosen, TextChoices
from longdraft.model import shared_choice as model_choice
from longdraft.model.transformer import ForwardRequest, Transformer
from longdraft.request.context import Context
from longdraft.request.sampling_params import SamplingParams
from longdraft.request.tree import Tree
from longdraft.sampling.sampler import Sampler
from longdraft.speculation.routine import run_alone, run_batched
from longdraft.speculation.step import Step, Tally, Timings
from longdraft.speculation.verify import verify
from longdraft_bench.cuda.models import small_transformer, tiny_source

pytestmark = pytest.mark.full

PARAMS = SamplingParams(max_new_tokens=50, seed=3)
LAWS = {
    "paper": replace(PARAMS, min_p=0.1, repetition_penalty=1.2, penalty_window=1024),
    "greedy": replace(PARAMS, temperature=0.0),
    "greedy, penalty": replace(PARAMS, temperature=0.0, repetition_penalty=1.4, penalty_window=5),
    "not ended early": replace(PARAMS, seed=2**64 - 59, temperature=0.7, repetition_penalty=1.3, penalty_window=7,
                               min_new_tokens=6),
    "all tokens": replace(PARAMS, seed=8, temperature=1.3),
    "top-p": replace(PARAMS, seed=4, temperature=1.2, top_p=0.8),
    "qwen": replace(PARAMS, seed=5, temperature=0.9, top_k=6, top_p=0.7, repetition_penalty=1.05,
                    logit_bias=((7, 2.5), (3, -1.0))),
    "eta": replace(PARAMS, seed=6, eta_cutoff=0.05, min_p=0.2, min_tokens_to_keep=3),
    "greedy, bias": replace(PARAMS, temperature=0.0, logit_bias=((21, 9.0),)),
}
TREES = [Tree((7,), (-1,), ("",)), Tree((3, 9, 4, 9), (-1, 0, 0, 1), ("", "a", "a", "a")),
         Tree((5, 1), (-1, 0), ("", "a"))]
LENGTHS = [60, 2, 41, 5, 17]


@pytest.fixture(scope="module")
def model() -> Transformer:
    settings, weights = tiny_source()
    weights = {name: 3 * tensor.to(DEVICE) for name, tensor in weights.items()}
    return small_transformer(config_file.parse_config(settings), weights,
                             kernels.choose(DEVICE, "float32", "triton-16"))


class Text:
    """A text after random rows, whose steps are plain ones or verify a tree."""

    def __init__(self, model: Transformer, params: SamplingParams, length: int) -> None:
        self.cache = random_cache(model, length - 1)
        self.sampler = Sampler(params, [1, 4], kernels=model.kernels)
        self.context = Context([(7 * place + length) % 40 for place in range(length)])
        self.step = Step(model, self.cache, PlainDrafter(), self.sampler, self.context, Timings(), Tally())

    @property
    def state(self) -> list[object]:
        places = torch.arange(self.cache.length, device=DEVICE)[None]
        rows = [part.tolist() for store in self.cache.stores for part in store.read(places)]
        return [self.context.slice(0, len(self.context)).tolist(), self.cache.length, rows]


def texts_of(model: Transformer, laws: list[str]) -> list[Text]:
    return [Text(model, LAWS[law], length) for law, length in zip(laws, LENGTHS, strict=False)]


def run_together(texts: list[Text], rounds: int) -> None:
    """Steps of all texts side by side, as `Batch.step` runs them."""
    for _ in range(rounds):
        routines = [text.step.run(1) for text in texts]
        results = run_batched([next(routine) for routine in routines], lambda indices, seconds: None)
        for routine, result in zip(routines, results, strict=True):
            assert not isinstance(result, Exception), result
            with pytest.raises(StopIteration):
                routine.send(result)


def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of texts of each shared choice from now on."""
    counts: list[int] = []
    run = TextChoices.run
    monkeypatch.setattr(TextChoices, "run", lambda self, source, hidden, k, v, trees: (
        counts.append(len(trees)), run(self, source, hidden, k, v, trees))[1])
    return counts


@pytest.mark.parametrize("laws", [["paper", "greedy", "not ended early"], ["all tokens", "greedy"],
                                  ["greedy, penalty", "paper", "all tokens", "not ended early", "paper"],
                                  ["top-p", "greedy"], ["qwen", "paper", "eta", "greedy, bias", "top-p"]])
def test_a_text_has_the_tokens_and_rows_that_it_has_alone(model, laws, monkeypatch):
    """Whatever the other texts' settings are, over several rounds with the same graph."""
    counts = shared(monkeypatch)
    together, alone = texts_of(model, laws), texts_of(model, laws)
    run_together(together, 3)
    assert counts == [len(laws)] * 3
    for text in alone:
        for _ in range(3):
            run_alone(text.step.run(1))
    assert len(counts) == 3
    assert [text.state for text in together] == [text.state for text in alone]


def test_a_graph_serves_shuffled_texts_with_filters_and_those_that_are_left(model, monkeypatch):
    """A newcomer needs no graph of its own; where the last text with a filter leaves, the round has no search."""
    laws = ["top-p", "paper", "qwen"]
    texts, alone = texts_of(model, laws), texts_of(model, laws)
    ran = list[RanGraph]()
    for place, order in enumerate(([0, 1, 2], [2, 0, 1], [1, 2], [0, 1], [1, 3])):
        if place == 3:  # the first text has left, and another one begins
            texts[0], alone[0] = (Text(model, LAWS["qwen"], 23) for _ in range(2))
        for group in (texts, alone):
            group += [Text(model, LAWS["greedy"], 11)] if place == 4 else []
        with monkeypatch.context() as patch:
            now = watched(patch, model.kernels.graphs)
            run_together([texts[text] for text in order], 1)
        ran += now
        for text in order:
            run_alone(alone[text].step.run(1))
        assert [text.state for text in texts] == [text.state for text in alone]
    found = [graph for graph in ran if isinstance(graph.owner, ChoiceBuffers)]
    assert len(found) == 5 and found[0] == found[1] and found[2] == found[3]
    kinds = [graph.key.filters for graph in found]
    assert kinds[0] == kinds[2] == kinds[0]._replace(top_k=True, top_p=True, min_p=True, eta=False)
    assert sum(kinds[4]) == 1 and kinds[4].min_p


def walk(text: Text, model: Transformer, result: object, tree: Tree) -> list[object]:
    """The outcome of a verification, whose rows are kept."""
    path, tokens = verify(text.sampler, result, tree, text.context, text.cache)
    text.cache.commit(path)
    text.context.extend(tokens)
    return [path, tokens, *text.state]


def requests_of(model: Transformer, texts: list[Text], trees: list[Tree]) -> Iterator[ForwardRequest]:
    from longdraft.model.transformer import tree_rows

    for text, tree in zip(texts, trees, strict=True):
        rows = tree_rows(tree, len(text.context) - 1)
        choice = text.sampler.on_device.tree_choice(tree, text.context)
        yield ForwardRequest(model, rows, text.cache, len(tree), choice=choice)


def true_trees(model: Transformer, texts: list[Text]) -> list[Tree]:
    """Trees of which some nodes are right: the next two tokens of each text are among them."""
    trees = []
    for text, tree in zip(texts, TREES, strict=False):
        copy = Text(model, text.sampler.params, len(text.context))
        for _ in range(2):
            run_alone(copy.step.run(1))
        first, second = copy.context.slice(len(text.context), len(copy.context)).tolist()
        root, wrong = text.context.last, (first + 1) % 40
        trees.append({1: Tree((root,), (-1,), ("",)), 2: Tree((root, first), (-1, 0), ("", "a")), 4: Tree(
            (root, wrong, first, wrong, second, 2), (-1, 0, 0, 1, 2, 4), ("",) + 5 * ("a",))}[len(tree)])
    return trees


@pytest.mark.parametrize("most", [128, 4])
def test_trees_of_unlike_sizes_are_walked_as_alone(model, most, monkeypatch):
    """Also in several graphs, for which the host waits once."""
    monkeypatch.setattr(choices, "_MAX_ROWS", 8 if most == 4 else most)
    laws, waits = ["paper", "greedy", "not ended early"], []
    read = choices._read
    together, alone = texts_of(model, laws), texts_of(model, laws)
    trees = true_trees(model, together)
    monkeypatch.setattr(choices, "_read", lambda outcome: waits.append(1) or read(outcome))
    results = model.forward_batch(list(requests_of(model, together, trees)))
    found = [walk(*each) for each in zip(together, [model] * 3, results, trees, strict=True)]
    assert len(waits) == 1
    expected = []
    for text, request, tree in zip(alone, requests_of(model, alone, trees), trees, strict=True):
        expected.append(walk(text, model, model.forward_batch([request])[0], tree))
    assert found == expected
    assert [len(path) for path, *_ in found] == [1, 3, 2], "of each tree's the right nodes are accepted"


def test_other_requests_of_a_forward_get_their_logits(model, monkeypatch):
    """Settings of the host and log-probabilities are decided as before."""
    counts = shared(monkeypatch)
    texts = texts_of(model, ["paper", "greedy", "top-p"])
    texts.insert(1, Text(model, replace(PARAMS, typical_p=0.8), 30))
    texts.append(Text(model, LAWS["paper"], 9))
    texts[-1].step = texts[-1].step._replace(num_logprobs=2)
    alone = texts_of(model, ["paper", "greedy", "top-p"])
    alone.insert(1, Text(model, replace(PARAMS, typical_p=0.8), 30))
    alone.append(Text(model, LAWS["paper"], 9))
    run_together(texts, 2)
    assert counts == [3, 3]
    for text in alone:
        for _ in range(2):
            run_alone(text.step.run(1))
    assert [text.state for text in texts] == [text.state for text in alone]


def test_a_single_text_and_the_switch_keep_the_present_way(model, monkeypatch):
    counts = shared(monkeypatch)
    texts = texts_of(model, ["paper", "greedy"])
    texts[1].step = texts[1].step._replace(num_logprobs=1)
    run_together(texts, 1)
    monkeypatch.setattr(model_choice, "SHARES_CHOICES", False)
    run_together(texts_of(model, ["paper", "greedy"]), 1)
    assert counts == []


def test_logits_that_are_not_finite_are_found_in_their_own_text_only(model):
    texts, trees = texts_of(model, ["paper", "greedy"]), TREES[:2]
    requests = list(requests_of(model, texts, trees))
    hidden = torch.ones(5, model.config.hidden_size, device=DEVICE)
    hidden[0] = torch.nan
    k, v = (torch.zeros(model.config.num_layers, 5, *texts[0].cache.shapes[0], device=DEVICE) for _ in range(2))
    first, second = model._shared_choices.of([request.choice for request in requests], [text.cache for text in texts],
                                             [1, 4], hidden, k, v)
    assert first == ([0], [-1]) and -1 not in second[1]


def test_a_batch_of_an_engine_writes_the_texts_that_each_writes_alone(tmp_path, monkeypatch):
    """Prompts of unlike lengths, plain and with guesses; two texts begin when others have ended."""
    counts = shared(monkeypatch)
    monkeypatch.setenv("LONGDRAFT_KERNELS", "triton-16")
    folder = tmp_path / "model"
    make_checkpoint(folder, num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=2,
                    num_key_value_heads=1)
    laws = "paper", "greedy", "top-p", "not ended early", "qwen"
    params = [replace(LAWS[law], max_new_tokens=4 + place, ignore_eos=True) for place, law in enumerate(laws)]
    for drafter in ("plain", "suffix"):
        engine = longdraft.load(str(folder), drafter=drafter, device=DEVICE, dtype="float32")
        prompts = [prompt_of(length) for length in (9, 30, 12, 17, 8)]
        texts: dict[int, list[int]] = {place: [] for place in range(len(prompts))}
        for place, event in engine.generate_many(prompts, params, batch_size=3):
            texts[place].extend(event.tokens)
        alone = [[token for event in engine.generate(*each) for token in event.tokens]
                 for each in zip(prompts, params, strict=True)]
        assert list(texts.values()) == alone
        assert set(counts) == {2, 3}
        counts.clear()


SETTINGS, SEARCH = ["read_filters_kernel"], 8 * ["search_level_kernel"] + ["end_search_kernel"]
BY_SUM = ["support_sums_kernel", "top_p_goal_kernel", *SEARCH]


@pytest.mark.skipif(HAS_CUDA, reason="counts the interpreter's launches")
@pytest.mark.parametrize("num, filters, searched", [
    (2, [], []), (5, [], []), (2, ["top-p"], SETTINGS + BY_SUM), (5, ["top-p"], SETTINGS + BY_SUM),
    (5, ["qwen", "eta"], SETTINGS + SEARCH + SEARCH + BY_SUM + ["support_sums_kernel", "eta_kernel"])])
def test_a_round_is_two_graphs_one_launch_and_one_wait_however_many_texts(model, num, filters, searched, monkeypatch):
    """Layers, then norm, head, choices and walks. Beside them rows are kept in the caches, and inputs are copied.

    Texts with filters add launches to the second graph only.
    """
    from triton.runtime import interpreter

    texts = texts_of(model, [*filters, "paper", "greedy", "paper", "all tokens", "paper"][:num])
    run_together(texts, 1)  # allocates buffers, and records graphs
    graphs, recorder = model.kernels.graphs, OperationRecorder()
    replays, launches, waits, inside = list[object](), list[str](), list[int](), list[str]()

    def replay(owner: object, work: object, key: object = None) -> None:
        before, names = len(launches), len(recorder.names)
        run(owner, work, key)
        replays.append(owner)
        inside[:] = launches[before:]
        del launches[before:], recorder.names[names:]

    def count_launch(executor: object, *args: object, **named: object) -> None:
        launches.append(executor.fn.__name__)
        names = len(recorder.names)
        launch(executor, *args, **named)
        del recorder.names[names:]

    launch, run, read = interpreter.GridExecutor.__call__, graphs.run, choices._read
    monkeypatch.setattr(graphs, "run", replay)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", count_launch)
    monkeypatch.setattr(choices, "_read", lambda outcome: waits.append(1) or read(outcome))
    monkeypatch.setattr(Chosen, "read", lambda self: pytest.fail("a text waits for itself"))
    with recorder:
        run_together(texts, 1)
    assert len(replays) == 2 and isinstance(replays[1], ChoiceBuffers) and len(waits) == 1
    assert launches == ["scatter_rows_kernel"]
    on_host = {"index", "_to_copy", "cos", "sin"}
    counted = [name for name in recorder.names if name not in on_host]
    # The block of the forward's inputs, that of the choices', and the hidden rows between the two graphs.
    assert counted.count("copy_") == 3
    assert inside == ["rms_norm_kernel", "few_rows_kernel", "sum_parts_kernel", "append_tokens_kernel",
                      "tree_paths_kernel", *["add_bias_kernel"][: filters.count("qwen")], "read_window_kernel",
                      "penalise_kernel", "block_maxima_kernel", *searched,
                      "best_in_blocks_kernel", "choose_tokens_kernel", "walk_trees_kernel"]
    assert counted.count("cat") == 2 + 2 + 5, "of rotations, keys, values, hidden rows, and what attention computed"
    assert len(counted) == 3 + 9 + 1, "and no logits for other requests"
